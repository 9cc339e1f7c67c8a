//! The products of queries and keys.
//!
//! Lanes are taken in blocks of four. A few keys at a time are laid out so that a vector holds one block of several
//! keys; it is multiplied by the same block of a query, repeated. So a vector sums up four parts of the products of
//! as many keys as it has blocks, and only these four are added across lanes.

use crate::SPAN;
use crate::ahead::{Ahead, Stage};
use crate::element::Element;
use crate::product::TILE_ROWS;
use crate::simd::{Arithmetic, BLOCK};

/// `scores[r][k] = Σ over i of queries[r][i] · rows[k][i]`.
///
/// Each score is summed in the same order whatever other rows take part.
pub(crate) struct Score<'a> {
    /// One key for each position; positions that are not read point to a row of zeros.
    pub(crate) rows: &'a [*const u8; SPAN],
    /// Values in a row.
    pub(crate) head_dim: usize,
    /// Room for the lanes of the keys that are scored at a time, padded to whole vectors.
    pub(crate) keys: *mut f32,
    /// `[num_rows]` packed rows of `head_dim` values.
    pub(crate) queries: *const u32,
    /// The distance between two rows of `queries`, in words.
    pub(crate) queries_stride: usize,
    /// `[num_rows][SPAN]` singles.
    pub(crate) scores: *mut f32,
    pub(crate) num_rows: usize,
}

/// After how many blocks more memory is asked for.
const BLOCKS_PER_ASK: usize = 4;

/// Computes the scores of a span.
///
/// # Safety
/// Each of `rows` is readable for `head_dim` values, and the job's pointers are valid for the sizes that it names.
#[inline(always)]
pub(crate) unsafe fn score<A: Arithmetic, E: Element>(arithmetic: A, job: &Score, ahead: &mut Ahead) {
    // A tile is four vectors wide.
    let num_tiles = job.num_rows.div_ceil(TILE_ROWS * A::TILE_VECTORS / 4);
    let num_chunks = job.head_dim.div_ceil(A::LANES * A::VALUES);
    let num_asks = job.head_dim.div_ceil(BLOCK * A::VALUES).div_ceil(BLOCKS_PER_ASK);
    ahead.enter(Stage::Scores, SPAN / A::LANES * (num_chunks + num_tiles * num_asks));
    for first_key in (0..SPAN).step_by(A::LANES) {
        // SAFETY: the keys of a vector start at `first_key`.
        unsafe { arrange::<A, E>(arithmetic, job, ahead, first_key) };
        let mut row = 0;
        for tile in 0..num_tiles {
            let height = (job.num_rows - row).div_ceil(num_tiles - tile);
            // SAFETY: the rows `row..row + height` exist, and the keys are arranged.
            unsafe {
                match height {
                    1 => score_tile::<A, 1>(arithmetic, job, ahead, row, first_key),
                    2 => score_tile::<A, 2>(arithmetic, job, ahead, row, first_key),
                    3 => score_tile::<A, 3>(arithmetic, job, ahead, row, first_key),
                    4 => score_tile::<A, 4>(arithmetic, job, ahead, row, first_key),
                    5 => score_tile::<A, 5>(arithmetic, job, ahead, row, first_key),
                    _ => score_tile::<A, 6>(arithmetic, job, ahead, row, first_key),
                }
            }
            row += height;
        }
    }
}

/// Lays out the keys of a vector of scores: for each block of lanes four vectors, of which vector v holds that block of
/// the keys v, v + 4 and so on.
///
/// # Safety
/// As for [`score`]; a vector of keys starts at `first_key`.
#[inline(always)]
unsafe fn arrange<A: Arithmetic, E: Element>(
    arithmetic: A,
    job: &Score,
    ahead: &mut Ahead,
    first_key: usize,
) {
    for (chunk, value) in (0..job.head_dim).step_by(A::LANES * A::VALUES).enumerate() {
        ahead.ask(arithmetic);
        let to = job.keys.wrapping_add(chunk * A::LANES * A::LANES);
        let mut loaded = [[arithmetic.splat(0.0); BLOCK]; 4];
        for key in (0..A::LANES).step_by(2) {
            let rows = job.rows[first_key + key..].as_ptr();
            // SAFETY: the rows hold `head_dim` values.
            let [one, other] = unsafe { arithmetic.load_two::<E>(rows, value, job.head_dim - value) };
            (loaded[key % 4][key / 4], loaded[key % 4 + 1][key / 4]) = (one, other);
        }
        for (vector, loaded) in loaded.into_iter().enumerate() {
            for (block, lanes) in
                arithmetic.transpose_blocks(loaded).into_iter().enumerate().take(A::LANES / BLOCK)
            {
                // SAFETY: the keys have room for four vectors for each block of the chunk.
                unsafe { arithmetic.store(to.wrapping_add((block * 4 + vector) * A::LANES), lanes) };
            }
        }
    }
}

/// # Safety
/// As for [`score`]; `HEIGHT` rows start at `row`, and the keys of a vector from `first_key` on are arranged.
#[inline(always)]
unsafe fn score_tile<A: Arithmetic, const HEIGHT: usize>(
    arithmetic: A,
    job: &Score,
    ahead: &mut Ahead,
    row: usize,
    first_key: usize,
) {
    let mut tile = [[arithmetic.splat(0.0); 4]; HEIGHT];
    // SAFETY: every access below is to a row, block and vector that the job names.
    unsafe {
        let queries = job.queries.add(row * job.queries_stride);
        for block in 0..job.head_dim.div_ceil(BLOCK * A::VALUES) {
            if block % BLOCKS_PER_ASK == 0 {
                ahead.ask(arithmetic);
            }
            let mut keys = [arithmetic.splat(0.0); 4];
            for (vector, keys) in keys.iter_mut().enumerate() {
                *keys = arithmetic.load(job.keys.add((block * 4 + vector) * A::LANES));
            }
            for (r, sums) in tile.iter_mut().enumerate() {
                let query = arithmetic.repeat(queries.add(r * job.queries_stride + block * BLOCK).cast());
                for (sum, keys) in sums.iter_mut().zip(keys) {
                    *sum = arithmetic.accumulate(*sum, keys, query);
                }
            }
        }
        for (r, sums) in tile.into_iter().enumerate() {
            arithmetic.store(job.scores.add((row + r) * SPAN + first_key), arithmetic.sum_in_blocks(sums));
        }
    }
}
