//! Queries as the kernels of singles and of bf16 want them: lanes of neighbours, padded with zeros.

use crate::view::Format;

/// Words of a packed row of `count` numbers, `VALUES` of them in each.
pub(crate) fn packed_words<const VALUES: usize>(count: usize) -> usize {
    count.div_ceil(VALUES).next_multiple_of(16)
}

/// Writes a query as lanes of `VALUES` numbers each.
///
/// # Safety
/// The row can be read for `head_dim` numbers, and `to` written for as many lanes as they fill.
pub(crate) unsafe fn pack<const VALUES: usize>(
    row: *const u8,
    format: Format,
    head_dim: usize,
    to: *mut u32,
) {
    // SAFETY: by this function's contract; numbers may be unaligned.
    unsafe {
        match (format, VALUES) {
            (Format::Bf16, 2) => to.cast::<u8>().copy_from_nonoverlapping(row, head_dim * 2),
            (Format::F32, 1) => to.cast::<u8>().copy_from_nonoverlapping(row, head_dim * 4),
            (Format::Bf16, 1) => {
                for index in 0..head_dim {
                    to.add(index).write(u32::from(row.cast::<u16>().add(index).read_unaligned()) << 16);
                }
            }
            (Format::F16, 1) => {
                for index in 0..head_dim {
                    let number = half::f16::from_bits(row.cast::<u16>().add(index).read_unaligned());
                    to.add(index).write(number.to_f32().to_bits());
                }
            }
            _ => unreachable!("no query of format {format:?} with {VALUES} values a lane"),
        }
    }
}
