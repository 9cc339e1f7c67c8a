//! Weighted sums of values straight from their pages, for few rows: what they read once need not be copied first.

use crate::SPAN;
use crate::ahead::{Ahead, Stage};
use crate::element::Element;
use crate::simd::Arithmetic;

/// The most rows that are summed at a time.
pub(crate) const MOST_ROWS: usize = 6;

/// `sums[r][c] = sums[r][c] * factors[r] + Σ over s of weights[r][s] · values[s][c]`, step by step.
///
/// It gives, bit for bit, what [`Product`](crate::product::Product) gives with gathered values.
pub(crate) struct Sum<'a> {
    /// One row of values for each position; positions that are not read point to a row of zeros.
    pub(crate) rows: &'a [*const u8; SPAN],
    /// Values in a row.
    pub(crate) head_dim: usize,
    /// `[num_rows]` packed rows of `SPAN` weights.
    pub(crate) weights: *const u32,
    /// `[num_rows][head_dim]` singles, padded to `LANES * VALUES`.
    pub(crate) sums: *mut f32,
    /// The distance between two rows of `sums`, in words.
    pub(crate) sums_stride: usize,
    /// One factor for each row.
    pub(crate) factors: *const f32,
    /// At most [`MOST_ROWS`]; any number in whole numbers.
    pub(crate) num_rows: usize,
    /// The steps, of `VALUES` positions each.
    pub(crate) first_step: usize,
    pub(crate) end_step: usize,
}

/// Computes a weighted sum.
///
/// # Safety
/// Each of `rows` is readable for `head_dim` values, and the job's pointers are valid for the sizes that it names.
#[inline(always)]
pub(crate) unsafe fn sum<A: Arithmetic, E: Element>(arithmetic: A, job: &Sum, ahead: &mut Ahead) {
    let num_chunks = job.head_dim.div_ceil(A::LANES * A::VALUES);
    let width = A::TILE_VECTORS / A::VALUES;
    ahead.enter(Stage::Values, num_chunks.div_ceil(width) * (job.end_step - job.first_step));
    let mut chunk = 0;
    while chunk < num_chunks {
        let column = chunk * A::LANES * A::VALUES;
        // SAFETY: the tile's chunks start at a column of the rows.
        unsafe {
            match width.min(num_chunks - chunk) {
                1 => sum_columns::<A, E, 1>(arithmetic, job, ahead, column),
                2 => sum_columns::<A, E, 2>(arithmetic, job, ahead, column),
                3 => sum_columns::<A, E, 3>(arithmetic, job, ahead, column),
                _ => sum_columns::<A, E, 4>(arithmetic, job, ahead, column),
            }
        }
        chunk += width;
    }
}

/// # Safety
/// As for [`sum`]; `CHUNKS` chunks start at `column`.
#[inline(always)]
unsafe fn sum_columns<A: Arithmetic, E: Element, const CHUNKS: usize>(
    arithmetic: A,
    job: &Sum,
    ahead: &mut Ahead,
    column: usize,
) {
    // SAFETY: the same contract.
    unsafe {
        match job.num_rows {
            1 => sum_tile::<A, E, 1, CHUNKS>(arithmetic, job, ahead, column),
            2 => sum_tile::<A, E, 2, CHUNKS>(arithmetic, job, ahead, column),
            3 => sum_tile::<A, E, 3, CHUNKS>(arithmetic, job, ahead, column),
            4 => sum_tile::<A, E, 4, CHUNKS>(arithmetic, job, ahead, column),
            5 => sum_tile::<A, E, 5, CHUNKS>(arithmetic, job, ahead, column),
            _ => sum_tile::<A, E, MOST_ROWS, CHUNKS>(arithmetic, job, ahead, column),
        }
    }
}

/// # Safety
/// As for [`sum`]; there are `HEIGHT` rows, and `CHUNKS` chunks start at `column`.
#[inline(always)]
unsafe fn sum_tile<A: Arithmetic, E: Element, const HEIGHT: usize, const CHUNKS: usize>(
    arithmetic: A,
    job: &Sum,
    ahead: &mut Ahead,
    column: usize,
) {
    let stride = SPAN / A::VALUES;
    // Of the two vectors of a chunk only the first is used where a lane holds one value.
    let mut tile = [[[arithmetic.splat(0.0); 2]; CHUNKS]; HEIGHT];
    let place = |row: usize, chunk: usize, vector: usize| {
        row * job.sums_stride + column + (chunk * A::VALUES + vector) * A::LANES
    };
    // SAFETY: every access below is to a row, step and column that the job names.
    unsafe {
        for (r, sums) in tile.iter_mut().enumerate() {
            let factor = arithmetic.splat(*job.factors.add(r));
            for (c, chunk) in sums.iter_mut().enumerate() {
                for (v, sum) in chunk.iter_mut().enumerate().take(A::VALUES) {
                    *sum = arithmetic.mul(arithmetic.load(job.sums.add(place(r, c, v))), factor);
                }
            }
        }
        for step in job.first_step..job.end_step {
            let position = step * A::VALUES;
            ahead.ask(arithmetic);
            for c in 0..CHUNKS {
                let value = column + c * A::VALUES * A::LANES;
                let rows = job.rows.as_ptr().add(position);
                let lanes = arithmetic.load_step::<E>(rows, value, job.head_dim - value);
                for (r, sums) in tile.iter_mut().enumerate() {
                    let weight = arithmetic.splat(f32::from_bits(*job.weights.add(r * stride + step)));
                    for (sum, lanes) in sums[c].iter_mut().zip(lanes.as_ref()) {
                        *sum = arithmetic.accumulate(*sum, *lanes, weight);
                    }
                }
            }
        }
        for (r, sums) in tile.iter().enumerate() {
            for (c, chunk) in sums.iter().enumerate() {
                for (v, sum) in chunk.iter().enumerate().take(A::VALUES) {
                    arithmetic.store(job.sums.add(place(r, c, v)), *sum);
                }
            }
        }
    }
}
