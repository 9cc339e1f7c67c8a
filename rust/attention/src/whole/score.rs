//! The products of queries and keys.
//!
//! [`KEYS`] keys at a time are laid out so that a lane holds four neighbours of one key. They are multiplied by the same
//! four digits of a query, repeated: nothing is left to be added across lanes.

use std::arch::x86_64::*;

use super::digits::{self, CHUNK, CHUNK_BYTES};
use crate::SPAN;
use crate::ahead::{Ahead, Stage};
use crate::score::Score;
use crate::simd::Simd;
use crate::simd::avx512_vnni::Avx512Vnni;

/// The most rows of a register tile: for each there are two digits' sums of two vectors of keys.
const TILE_ROWS: usize = 6;

/// Keys that are laid out and scored together.
pub(crate) const KEYS: usize = 2 * LANES;

const LANES: usize = Avx512Vnni::LANES;

/// Numbers between which more memory is asked for.
const NUMBERS_PER_ASK: usize = 16;

/// The bytes that four neighbours of all keys take.
const GROUP_BYTES: usize = 4 * KEYS;

/// Computes the scores of a span.
///
/// # Safety
/// Each of the job's `rows` is readable for `head_dim` values, at most [`MOST_VALUES`](super::MOST_VALUES), and its
/// pointers are valid for the sizes that it names; the queries are packed in digits.
#[inline(always)]
pub(crate) unsafe fn score(unit: Avx512Vnni, job: &Score, ahead: &mut Ahead) {
    let num_tiles = job.num_rows.div_ceil(TILE_ROWS);
    let (num_chunks, num_asks) = (job.head_dim.div_ceil(CHUNK), job.head_dim.div_ceil(NUMBERS_PER_ASK));
    ahead.enter(Stage::Scores, SPAN / KEYS * (2 * num_chunks + num_tiles * num_asks));
    for first_key in (0..SPAN).step_by(KEYS) {
        // SAFETY: so many keys start at `first_key`.
        unsafe { arrange(unit, job, ahead, first_key) };
        let mut row = 0;
        for tile in 0..num_tiles {
            let height = (job.num_rows - row).div_ceil(num_tiles - tile);
            // SAFETY: the rows `row..row + height` exist, and the keys are arranged.
            unsafe {
                match height {
                    1 => score_tile::<1>(unit, job, ahead, row, first_key),
                    2 => score_tile::<2>(unit, job, ahead, row, first_key),
                    3 => score_tile::<3>(unit, job, ahead, row, first_key),
                    4 => score_tile::<4>(unit, job, ahead, row, first_key),
                    5 => score_tile::<5>(unit, job, ahead, row, first_key),
                    _ => score_tile::<TILE_ROWS>(unit, job, ahead, row, first_key),
                }
            }
            row += height;
        }
    }
}

/// Lays out [`KEYS`] keys: for each four neighbours two vectors, of which each holds those of its keys.
///
/// # Safety
/// As for [`score`]; the keys start at `first_key`.
#[inline(always)]
unsafe fn arrange(unit: Avx512Vnni, job: &Score, ahead: &mut Ahead, first_key: usize) {
    for half in 0..2 {
        for value in (0..job.head_dim).step_by(CHUNK) {
            ahead.ask(unit);
            // SAFETY: the keys hold `head_dim` values, and the scratch memory has room for whole chunks of them.
            unsafe {
                let keys = job.rows.as_ptr().add(first_key + half * LANES);
                let mut loaded = [unit.zero(); LANES];
                for (key, loaded) in loaded.iter_mut().enumerate() {
                    *loaded = unit.load_raised(*keys.add(key), value, job.head_dim - value);
                }
                let to = job.keys.cast::<u8>().add(value / 4 * GROUP_BYTES + half * GROUP_BYTES / 2);
                for (group, vector) in unit.transpose(loaded).into_iter().enumerate() {
                    _mm512_storeu_si512(to.add(group * GROUP_BYTES).cast(), vector);
                }
            }
        }
    }
}

/// # Safety
/// As for [`score`]; `HEIGHT` rows start at `row`, and the keys from `first_key` on are arranged.
#[inline(always)]
unsafe fn score_tile<const HEIGHT: usize>(
    unit: Avx512Vnni,
    job: &Score,
    ahead: &mut Ahead,
    row: usize,
    first_key: usize,
) {
    let mut tile = [[[unit.zero(); 2]; 2]; HEIGHT];
    // SAFETY: every access below is to a row, key and group that the job names.
    unsafe {
        let queries = job.queries.add(row * job.queries_stride);
        for (r, [_, low]) in tile.iter_mut().enumerate() {
            let (_, raised) = digits::tail(queries.add(r * job.queries_stride), job.head_dim);
            *low = [_mm512_set1_epi32(raised.wrapping_neg()); 2];
        }
        for value in (0..job.head_dim).step_by(NUMBERS_PER_ASK) {
            ahead.ask(unit);
            let digits = queries.add((value / CHUNK * CHUNK_BYTES + value % CHUNK) / 4);
            for group in 0..NUMBERS_PER_ASK / 4 {
                let keys = job.keys.cast::<u8>().add((value / 4 + group) * GROUP_BYTES);
                let keys =
                    [_mm512_loadu_si512(keys.cast()), _mm512_loadu_si512(keys.add(GROUP_BYTES / 2).cast())];
                for (r, sums) in tile.iter_mut().enumerate() {
                    for (digit, sums) in sums.iter_mut().enumerate() {
                        let query = *digits.add(r * job.queries_stride + digit * CHUNK / 4 + group);
                        let query = _mm512_set1_epi32(query as i32);
                        for (sum, keys) in sums.iter_mut().zip(keys) {
                            *sum = unit.accumulate(*sum, keys, query);
                        }
                    }
                }
            }
        }
        for (r, [high, low]) in tile.into_iter().enumerate() {
            let (step, _) = digits::tail(queries.add(r * job.queries_stride), job.head_dim);
            for half in 0..2 {
                let whole = _mm512_cvtepi32_ps(unit.join(high[half], low[half]));
                let scores = job.scores.add((row + r) * SPAN + first_key + half * LANES);
                unit.store(scores, unit.mul(whole, unit.splat(step)));
            }
        }
    }
}
