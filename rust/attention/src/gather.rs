//! Copies the rows of one span out of their pages into dense scratch memory, as the matrix product wants them.

use crate::SPAN;
use crate::ahead::{Ahead, Stage};
use crate::element::Element;
use crate::simd::{Arithmetic, MOST_LANES};

/// Where the rows of a span are, and where their packed values go.
pub(crate) struct Gather<'a> {
    /// One row for each position; positions that are not read point to a row of zeros.
    pub(crate) rows: &'a [*const u8; SPAN],
    /// Values in a row.
    pub(crate) head_dim: usize,
    /// The packed values.
    pub(crate) to: *mut f32,
    /// The distance between two lines of `to`, in words.
    pub(crate) stride: usize,
}

/// Writes the keys transposed: line s of `to` holds, for each position, lane s of its row.
///
/// # Safety
/// Each of `rows` is readable for `head_dim` values. `to` holds `head_dim / VALUES` lines, rounded up to a multiple
/// of `LANES`, of `stride >= SPAN` words.
#[inline(always)]
pub(crate) unsafe fn gather_keys<A: Arithmetic, E: Element>(arithmetic: A, job: &Gather, ahead: &mut Ahead) {
    let num_values = A::LANES * A::VALUES;
    ahead.enter(Stage::Keys, SPAN / A::LANES * job.head_dim.div_ceil(num_values));
    for first_row in (0..SPAN).step_by(A::LANES) {
        for (chunk, value) in (0..job.head_dim).step_by(num_values).enumerate() {
            // No closure here: it might be compiled without the instructions of its caller.
            let mut rows = [arithmetic.splat(0.0); MOST_LANES];
            for row in (0..A::LANES).step_by(2) {
                // SAFETY: the rows hold `head_dim` values.
                let two = unsafe {
                    let pointers = job.rows.as_ptr().add(first_row + row);
                    arithmetic.load_two::<E>(pointers, value, job.head_dim - value)
                };
                [rows[row], rows[row + 1]] = two;
            }
            let to = job.to.wrapping_add(chunk * A::LANES * job.stride + first_row);
            ahead.ask(arithmetic);
            // SAFETY: `LANES` lines from line `chunk * LANES` on exist, and `LANES` words from `first_row` on in each.
            unsafe { arithmetic.store_transposed(&rows, to, job.stride) }
        }
    }
}

/// Writes the values in order: line s of `to` holds, for each column, the values of positions `VALUES * s` onwards.
///
/// # Safety
/// Each of `rows` is readable for `head_dim` values. `to` holds `SPAN / VALUES` lines of `stride` words, which is at
/// least `head_dim` rounded up to a multiple of `LANES * VALUES`.
#[inline(always)]
pub(crate) unsafe fn gather_values<A: Arithmetic, E: Element>(
    arithmetic: A,
    job: &Gather,
    ahead: &mut Ahead,
) {
    let num_values = A::LANES * A::VALUES;
    ahead.enter(Stage::Values, SPAN / A::VALUES);
    for (line, first_row) in (0..SPAN).step_by(A::VALUES).enumerate() {
        ahead.ask(arithmetic);
        for value in (0..job.head_dim).step_by(num_values) {
            let to = job.to.wrapping_add(line * job.stride + value);
            // SAFETY: `VALUES` rows start at `first_row`; the columns of the chunk fit into the line's stride.
            unsafe {
                let rows = job.rows.as_ptr().add(first_row);
                let chunk = arithmetic.load_step::<E>(rows, value, job.head_dim - value);
                for (vector, lanes) in chunk.as_ref().iter().enumerate() {
                    arithmetic.store(to.add(vector * A::LANES), *lanes);
                }
            }
        }
    }
}
