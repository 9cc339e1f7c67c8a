//! Which rows of the caches a span reads, and which of its positions a token sees.

use std::ops::Range;

use super::scratch::SpanRows;
use crate::SPAN;
use crate::ahead::Ahead;
use crate::plan::{PlanShape, Token, Unit};
use crate::view::{CacheView, Scales, ScalesView, Side};

/// The positions of the span at `start` that the unit reads.
pub(super) fn read_positions(unit: &Unit, start: usize) -> Range<usize> {
    let first = start.max(unit.seen.start);
    first..(start + SPAN).min(unit.seen.end).max(first)
}

/// The positions that a token sees, relative to the span at `start`.
pub(super) fn seen_positions(token: &Token, start: usize, shape: &PlanShape) -> Range<usize> {
    let first = shape.first_seen(token.position).max(start);
    let end = (token.position + 1).min(start + SPAN).max(first);
    first - start..end - start
}

/// Calls `visit` for each run of positions that lie side by side in one block: the block's id, the first offset in
/// the block and the positions.
pub(super) fn for_each_block(
    unit: &Unit,
    blocks: &[usize],
    block_size: usize,
    positions: Range<usize>,
    mut visit: impl FnMut(usize, usize, Range<usize>),
) {
    let mut position = positions.start;
    while position < positions.end {
        let (block, offset) = (position / block_size, position % block_size);
        let end = (position - offset + block_size).min(positions.end);
        let id = blocks[unit.table.start + block - unit.table.first_block];
        visit(id, offset, position..end);
        position = end;
    }
}

/// Finds the rows of the span at `start`; positions that the unit does not read get `zero_row`.
pub(super) fn find_rows(
    unit: &Unit,
    blocks: &[usize],
    caches: [&CacheView; 2],
    start: usize,
    kv_head: usize,
    zero_row: *const u8,
    rows: &mut SpanRows,
) {
    let positions = read_positions(unit, start);
    if positions.len() < SPAN {
        rows.keys.fill(zero_row);
        rows.values.fill(zero_row);
    }
    let [keys, values] = caches;
    for_each_block(unit, blocks, keys.block_size(), positions, |id, offset, positions| {
        let mut key = keys.row(id, kv_head, offset);
        let mut value = values.row(id, kv_head, offset);
        for position in positions {
            rows.keys[position - start] = key;
            rows.values[position - start] = value;
            key = key.wrapping_offset(keys.strides[2]);
            value = value.wrapping_offset(values.strides[2]);
        }
    });
}

/// Lists the memory that the span at `start` reads of the caches and, if they have any, of the tokens' scales.
pub(super) fn look_ahead(
    unit: &Unit,
    blocks: &[usize],
    caches: [&CacheView; 2],
    scales: &Scales,
    start: usize,
    ahead: &mut Ahead,
) {
    let block_size = caches[0].block_size();
    for_each_block(unit, blocks, block_size, read_positions(unit, start), |id, offset, positions| {
        for (cache, side) in caches.into_iter().zip([Side::Key, Side::Value]) {
            add_heads(cache, id, unit.kv_heads.clone(), offset, positions.len(), ahead);
            if let Scales::Token(scales) = scales {
                for kv_head in unit.kv_heads.clone() {
                    add_scales(
                        scales.entry(id, side, kv_head, offset),
                        scales.strides[3],
                        positions.len(),
                        ahead,
                    );
                }
            }
        }
    });
}

fn add_scales(first: *const f32, stride: isize, count: usize, ahead: &mut Ahead) {
    if stride == 1 {
        return ahead.add(first.cast(), count * size_of::<f32>());
    }
    for step in 0..count as isize {
        ahead.add(first.wrapping_offset(step * stride).cast(), size_of::<f32>());
    }
}

fn add_heads(
    cache: &CacheView,
    id: usize,
    kv_heads: Range<usize>,
    offset: usize,
    count: usize,
    ahead: &mut Ahead,
) {
    let head_bytes = count * cache.row_bytes();
    let are_neighbours =
        cache.strides[1] == head_bytes as isize && cache.strides[2] == cache.row_bytes() as isize;
    if are_neighbours {
        return ahead.add(cache.row(id, kv_heads.start, offset), kv_heads.len() * head_bytes);
    }
    for kv_head in kv_heads {
        add_rows(cache, id, kv_head, offset, count, ahead);
    }
}

fn add_rows(cache: &CacheView, id: usize, kv_head: usize, offset: usize, count: usize, ahead: &mut Ahead) {
    let row_bytes = cache.row_bytes();
    if cache.strides[2] == row_bytes as isize {
        return ahead.add(cache.row(id, kv_head, offset), count * row_bytes);
    }
    for step in 0..count {
        ahead.add(cache.row(id, kv_head, offset + step), row_bytes);
    }
}

/// Reads the scales of the span at `start`; positions that the unit does not read get 0.
///
/// # Safety
/// The scales of the unit's blocks can be read.
pub(super) unsafe fn read_scales(
    unit: &Unit,
    blocks: &[usize],
    block_size: usize,
    start: usize,
    kv_head: usize,
    scales: &ScalesView,
    to: [&mut [f32]; 2],
) {
    let [keys, values] = to;
    keys[..SPAN].fill(0.0);
    values[..SPAN].fill(0.0);
    for_each_block(unit, blocks, block_size, read_positions(unit, start), |id, offset, positions| {
        let place = positions.start - start..positions.end - start;
        for (side, to) in [(Side::Key, &mut keys[place.clone()]), (Side::Value, &mut values[place])] {
            let from = scales.entry(id, side, kv_head, offset);
            // SAFETY: the block's id is checked, and the offsets lie in the block.
            unsafe { copy_strided(from, scales.strides[3], to) };
        }
    });
}

/// Copies singles that may be unaligned.
///
/// # Safety
/// `to.len()` singles can be read from `from` on, `stride` singles apart.
unsafe fn copy_strided(from: *const f32, stride: isize, to: &mut [f32]) {
    if stride == 1 {
        let (from, to, num_bytes) = (from.cast::<u8>(), to.as_mut_ptr().cast(), size_of_val(to));
        // SAFETY: by this function's contract; scratch memory is not the cache's.
        return unsafe { from.copy_to_nonoverlapping(to, num_bytes) };
    }
    let mut from = from;
    for to in to {
        // SAFETY: by this function's contract.
        *to = unsafe { from.read_unaligned() };
        from = from.wrapping_offset(stride);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Table;
    use crate::view::Format;

    fn unit(seen: Range<usize>) -> Unit {
        Unit { tokens: 0..1, table: Table { start: 0, first_block: 0 }, kv_heads: 0..1, segments: 0..1, seen }
    }

    #[test]
    fn blocks_are_visited_in_order_and_cut_at_their_borders() {
        let mut visits = Vec::new();
        for_each_block(&unit(0..20), &[7, 5, 9], 6, 4..14, |id, offset, positions| {
            visits.push((id, offset, positions));
        });
        assert_eq!(visits, [(7, 4, 4..6), (5, 0, 6..12), (9, 0, 12..14)]);
    }

    #[test]
    fn a_unit_reads_no_position_outside_what_it_sees() {
        assert_eq!(read_positions(&unit(70..100), 64), 70..100);
        assert_eq!(read_positions(&unit(70..100), 128), 128..128);
        assert_eq!(read_positions(&unit(0..1000), 128), 128..192);
    }

    #[test]
    fn scales_are_copied_and_asked_for_wherever_they_lie() {
        let memory: Vec<f32> = (0..240).map(|number| number as f32).collect();
        let of_stride = |stride: isize| ScalesView {
            address: memory.as_ptr().cast_mut(),
            strides: [80 * stride, 40 * stride, 20 * stride, stride],
        };
        for stride in [1, 2] {
            let scales = of_stride(stride);
            let [mut keys, mut values] = [[-1.0; SPAN]; 2];
            let mut one = unit(2..5);
            one.table.start = 1;
            // SAFETY: block 1's three scales of either side of head 1 lie in the memory.
            unsafe { read_scales(&one, &[9, 0], 20, 0, 1, &scales, [&mut keys, &mut values]) };
            let wanted = |first: isize| {
                (0..SPAN as isize).map(move |place| {
                    if (2..5).contains(&place) { ((first + place) * stride) as f32 } else { 0.0 }
                })
            };
            assert!(keys.into_iter().eq(wanted(20)), "{keys:?}");
            assert!(values.into_iter().eq(wanted(60)), "{values:?}");
        }
        // SAFETY: one single can be read a byte behind the first one.
        unsafe {
            let mut found = [0.0];
            copy_strided(memory.as_ptr().wrapping_byte_add(1), 1, &mut found);
            let bytes: Vec<u8> = memory[..2].iter().flat_map(|number| number.to_ne_bytes()).collect();
            assert_eq!(found[0].to_ne_bytes(), bytes[1..5]);
        }
    }

    #[test]
    fn the_scales_of_both_sides_are_asked_for_ahead() {
        let cache = |address: usize| CacheView {
            address: address as *mut u8,
            shape: [2, 2, 16],
            strides: [4096, 1024, 64],
            head_dim: 64,
            format: Format::Int8,
        };
        let scales = Scales::Token(ScalesView { address: 0x9_0000 as *mut f32, strides: [64, 32, 16, 1] });
        let mut one = unit(0..16);
        one.kv_heads = 0..2;
        let mut ahead = Ahead::default();
        look_ahead(&one, &[1], [&cache(0x1_0000), &cache(0x2_0000)], &scales, 0, &mut ahead);
        let wanted = [(0x1_1000, 2048), (0x9_0100, 128), (0x2_1000, 2048), (0x9_0180, 128)];
        assert_eq!(ahead.listed(), wanted);
    }
}
