//! Copies the rows of one span out of their pages into dense scratch memory, as the matrix product wants them.

use crate::SPAN;
use crate::ahead::{Ahead, Stage};
use crate::element::Element;
use crate::simd::Arithmetic;

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
