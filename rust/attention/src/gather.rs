//! Copies the rows of one span out of their pages into dense scratch memory, as the matrix product wants them.

use crate::SPAN;
use crate::element::Element;
use crate::simd::Arithmetic;

/// Where the rows of a span are, and where their packed values go.
pub(crate) struct Gather<'a> {
    /// One row for each position; positions that are not read point to a row of zeros.
    pub(crate) rows: &'a [*const u8; SPAN],
    /// Rows that will be read soon; any addresses.
    pub(crate) next_rows: &'a [*const u8; SPAN],
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
pub(crate) unsafe fn gather_keys<A: Arithmetic, E: Element>(arithmetic: A, job: &Gather) {
    let num_values = A::LANES * A::VALUES;
    for first_row in (0..SPAN).step_by(A::LANES) {
        for (chunk, value) in (0..job.head_dim).step_by(num_values).enumerate() {
            let load = |row: usize| {
                let row = first_row + row;
                arithmetic.prefetch(job.next_rows[row].wrapping_add(value * E::FORMAT.bytes()));
                // SAFETY: the row holds `head_dim` values.
                unsafe { arithmetic.load_values::<E>(job.rows[row], value, job.head_dim - value) }
            };
            let to = job.to.wrapping_add(chunk * A::LANES * job.stride + first_row);
            // SAFETY: `LANES` lines from line `chunk * LANES` on exist, and `LANES` words from `first_row` on in each.
            unsafe { arithmetic.store_transposed(load, to, job.stride) }
        }
    }
}

/// Writes the values in order: line s of `to` holds, for each column, the values of positions `VALUES * s` onwards.
///
/// # Safety
/// Each of `rows` is readable for `head_dim` values. `to` holds `SPAN / VALUES` lines of `stride` words, which is at
/// least `head_dim` rounded up to a multiple of `LANES * VALUES`.
#[inline(always)]
pub(crate) unsafe fn gather_values<A: Arithmetic, E: Element>(arithmetic: A, job: &Gather) {
    let num_values = A::LANES * A::VALUES;
    for (line, first_row) in (0..SPAN).step_by(A::VALUES).enumerate() {
        for value in (0..job.head_dim).step_by(num_values) {
            for row in first_row..first_row + A::VALUES {
                arithmetic.prefetch(job.next_rows[row].wrapping_add(value * E::FORMAT.bytes()));
            }
            let to = job.to.wrapping_add(line * job.stride + value);
            // SAFETY: `VALUES` rows start at `first_row`; the columns of the chunk fit into the line's stride.
            unsafe {
                let rows = job.rows.as_ptr().add(first_row);
                arithmetic.store_step::<E>(rows, value, job.head_dim - value, to);
            }
        }
    }
}
