//! Weighted sums of values, straight from their pages however many rows there are: what is needed to arrange four
//! positions' values finds room beside the products.

use std::arch::x86_64::*;

use super::digits::{self, CHUNK};
use crate::SPAN;
use crate::ahead::{Ahead, Stage};
use crate::simd::Simd;
use crate::simd::avx512_vnni::Avx512Vnni;
use crate::sum::Sum;

/// The most rows of a register tile: for each there are two digits' sums of four vectors of columns.
const TILE_ROWS: usize = 3;

/// Positions of a step.
pub(crate) const POSITIONS: usize = 4;

/// After how many steps more memory is asked for.
const STEPS_PER_ASK: usize = 4;

/// Computes a weighted sum. Positions outside the rows' must have no weight.
///
/// # Safety
/// Each of the job's `rows` is readable for `head_dim` values, and its pointers are valid for the sizes that it names;
/// the weights are packed in digits, and a step is of [`POSITIONS`].
#[inline(always)]
pub(crate) unsafe fn sum(unit: Avx512Vnni, job: &Sum, ahead: &mut Ahead) {
    let num_tiles = job.num_rows.div_ceil(TILE_ROWS);
    let num_asks = job.end_step.div_ceil(STEPS_PER_ASK) - job.first_step.div_ceil(STEPS_PER_ASK);
    ahead.enter(Stage::Values, job.head_dim.div_ceil(CHUNK) * num_tiles * num_asks);
    for column in (0..job.head_dim).step_by(CHUNK) {
        let mut row = 0;
        for tile in 0..num_tiles {
            let height = (job.num_rows - row).div_ceil(num_tiles - tile);
            // SAFETY: the rows `row..row + height` exist, and a chunk of columns starts there.
            unsafe {
                match height {
                    1 => sum_tile::<1>(unit, job, ahead, row, column),
                    2 => sum_tile::<2>(unit, job, ahead, row, column),
                    _ => sum_tile::<TILE_ROWS>(unit, job, ahead, row, column),
                }
            }
            row += height;
        }
    }
}

/// # Safety
/// As for [`sum`]; `HEIGHT` rows start at `row`, and a chunk at `column`.
#[inline(always)]
unsafe fn sum_tile<const HEIGHT: usize>(
    unit: Avx512Vnni,
    job: &Sum,
    ahead: &mut Ahead,
    row: usize,
    column: usize,
) {
    let stride = digits::packed_words(SPAN);
    let mut tile = [[[unit.zero(); 4]; 2]; HEIGHT];
    // SAFETY: every access below is to a row, step and column that the job names.
    unsafe {
        let weights = job.weights.add(row * stride);
        for (r, [_, low]) in tile.iter_mut().enumerate() {
            let (_, raised) = digits::tail(weights.add(r * stride), SPAN);
            *low = [_mm512_set1_epi32(raised.wrapping_neg()); 4];
        }
        for step in job.first_step..job.end_step {
            if step % STEPS_PER_ASK == 0 {
                ahead.ask(unit);
            }
            let rows = job.rows.as_ptr().add(step * POSITIONS);
            let values = [0, 1, 2, 3]
                .map(|position| unit.load_raised(*rows.add(position), column, job.head_dim - column));
            let values = unit.interleave(values);
            for (r, sums) in tile.iter_mut().enumerate() {
                for (digit, sums) in sums.iter_mut().enumerate() {
                    let weight = *weights.add(r * stride + digit * (CHUNK / POSITIONS) + step);
                    let weight = _mm512_set1_epi32(weight as i32);
                    for (sum, values) in sums.iter_mut().zip(values) {
                        *sum = unit.accumulate(*sum, values, weight);
                    }
                }
            }
        }
        for (r, [high, low]) in tile.into_iter().enumerate() {
            let (step, _) = digits::tail(weights.add(r * stride), SPAN);
            let factor = unit.splat(*job.factors.add(row + r));
            let sums = job.sums.add((row + r) * job.sums_stride + column);
            let joined = [0, 1, 2, 3].map(|vector| unit.join(high[vector], low[vector]));
            for (vector, joined) in unit.transpose_blocks_of_bytes(joined).into_iter().enumerate() {
                let sums = sums.add(vector * Avx512Vnni::LANES);
                let whole = _mm512_cvtepi32_ps(joined);
                let old = unit.mul(unit.load(sums), factor);
                unit.store(sums, unit.multiply_add(whole, unit.splat(step), old));
            }
        }
    }
}
