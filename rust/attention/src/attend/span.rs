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
            for kv_head in unit.kv_heads.clone() {
                add_rows(cache, id, kv_head, offset, positions.len(), ahead);
            }
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

/// # Safety
/// `to.len()` singles can be read from `from` on, `stride` singles apart.
unsafe fn copy_strided(from: *const f32, stride: isize, to: &mut [f32]) {
    if stride == 1 {
        // SAFETY: by this function's contract; scratch memory is not the cache's.
        return unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
    }
    let mut from = from;
    for to in to {
        // SAFETY: by this function's contract.
        *to = unsafe { *from };
        from = from.wrapping_offset(stride);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Table;

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
}
