//! The matrix product behind the outputs of many rows: broadcast weights times lines of packed values.

use crate::ahead::{Ahead, Stage};
use crate::simd::Arithmetic;

/// `sums[r][c] = sums[r][c] * factors[r] + Σ over s of left[r][s] · right[s][c]`, the sum taken step by step.
///
/// Each row's sums are formed in the same order whatever other rows take part.
pub(crate) struct Product {
    /// `[num_rows][num_steps]` lanes.
    pub(crate) left: *const u32,
    /// The distance between two rows of `left`, in words.
    pub(crate) left_stride: usize,
    /// `[num_steps][num_columns]` lanes, padded to whole vectors.
    pub(crate) right: *const f32,
    /// The distance between two lines of `right`, in words.
    pub(crate) right_stride: usize,
    /// `[num_rows][num_columns]` singles, padded to whole vectors.
    pub(crate) sums: *mut f32,
    /// The distance between two rows of `sums`, in words.
    pub(crate) sums_stride: usize,
    /// One factor for each row.
    pub(crate) factors: *const f32,
    pub(crate) num_rows: usize,
    pub(crate) num_steps: usize,
    pub(crate) num_columns: usize,
}

/// After how many steps more memory is asked for.
const STEPS_PER_ASK: usize = 4;

/// The most rows of a register tile.
pub(crate) const TILE_ROWS: usize = 6;

/// Computes a product.
///
/// # Safety
/// The job's pointers are valid for the sizes and strides that it names; `sums` overlaps nothing else.
#[inline(always)]
pub(crate) unsafe fn multiply<A: Arithmetic>(arithmetic: A, job: &Product, ahead: &mut Ahead) {
    let num_vectors = job.num_columns.div_ceil(A::LANES);
    let num_tiles = num_vectors.div_ceil(A::TILE_VECTORS);
    let times_per_tile = job.num_rows.div_ceil(TILE_ROWS) * job.num_steps.div_ceil(STEPS_PER_ASK);
    ahead.enter(Stage::Outputs, num_tiles * times_per_tile);
    let mut vector = 0;
    for tile in 0..num_tiles {
        let width = (num_vectors - vector).div_ceil(num_tiles - tile);
        // SAFETY: the vectors `vector..vector + width` lie in the columns.
        unsafe {
            match width {
                1 => multiply_columns::<A, 1>(arithmetic, job, ahead, vector * A::LANES),
                2 => multiply_columns::<A, 2>(arithmetic, job, ahead, vector * A::LANES),
                3 => multiply_columns::<A, 3>(arithmetic, job, ahead, vector * A::LANES),
                _ => multiply_columns::<A, 4>(arithmetic, job, ahead, vector * A::LANES),
            }
        }
        vector += width;
    }
}

/// # Safety
/// As for [`multiply`]; `WIDTH` vectors start at `column`.
#[inline(always)]
unsafe fn multiply_columns<A: Arithmetic, const WIDTH: usize>(
    arithmetic: A,
    job: &Product,
    ahead: &mut Ahead,
    column: usize,
) {
    let num_tiles = job.num_rows.div_ceil(TILE_ROWS);
    let mut row = 0;
    for tile in 0..num_tiles {
        let height = (job.num_rows - row).div_ceil(num_tiles - tile);
        // SAFETY: the rows `row..row + height` exist.
        unsafe {
            match height {
                1 => multiply_tile::<A, 1, WIDTH>(arithmetic, job, ahead, row, column),
                2 => multiply_tile::<A, 2, WIDTH>(arithmetic, job, ahead, row, column),
                3 => multiply_tile::<A, 3, WIDTH>(arithmetic, job, ahead, row, column),
                4 => multiply_tile::<A, 4, WIDTH>(arithmetic, job, ahead, row, column),
                5 => multiply_tile::<A, 5, WIDTH>(arithmetic, job, ahead, row, column),
                _ => multiply_tile::<A, 6, WIDTH>(arithmetic, job, ahead, row, column),
            }
        }
        row += height;
    }
}

/// # Safety
/// As for [`multiply`]; `HEIGHT` rows start at `row` and `WIDTH` vectors at `column`.
#[inline(always)]
unsafe fn multiply_tile<A: Arithmetic, const HEIGHT: usize, const WIDTH: usize>(
    arithmetic: A,
    job: &Product,
    ahead: &mut Ahead,
    row: usize,
    column: usize,
) {
    let mut tile = [[arithmetic.splat(0.0); WIDTH]; HEIGHT];
    // SAFETY: every access below is to a row, step and vector that the caller named.
    unsafe {
        let left = job.left.add(row * job.left_stride);
        let right = job.right.add(column);
        let sums = job.sums.add(row * job.sums_stride + column);
        for (r, sums_row) in tile.iter_mut().enumerate() {
            let factor = arithmetic.splat(*job.factors.add(row + r));
            for (v, sum) in sums_row.iter_mut().enumerate() {
                let old = arithmetic.load(sums.add(r * job.sums_stride + v * A::LANES));
                *sum = arithmetic.mul(old, factor);
            }
        }
        for step in 0..job.num_steps {
            if step % STEPS_PER_ASK == 0 {
                ahead.ask(arithmetic);
            }
            let mut lanes = [arithmetic.splat(0.0); WIDTH];
            for (v, lanes) in lanes.iter_mut().enumerate() {
                *lanes = arithmetic.load(right.add(step * job.right_stride + v * A::LANES));
            }
            for (r, sums_row) in tile.iter_mut().enumerate() {
                let broadcast = arithmetic.splat(f32::from_bits(*left.add(r * job.left_stride + step)));
                for (sum, lanes) in sums_row.iter_mut().zip(lanes) {
                    *sum = arithmetic.accumulate(*sum, lanes, broadcast);
                }
            }
        }
        for (r, sums_row) in tile.iter().enumerate() {
            for (v, sum) in sums_row.iter().enumerate() {
                arithmetic.store(sums.add(r * job.sums_stride + v * A::LANES), *sum);
            }
        }
    }
}
