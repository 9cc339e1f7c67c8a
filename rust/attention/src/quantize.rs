//! From floats to 8 bits and a scale. The same numbers give the same bytes on every backend.
//!
//! A number becomes `number / scale`, divided in single precision, rounded to the nearest (ties to even) and held
//! inside the format's range. The scale of a row is its largest magnitude over the format's largest number.

use crate::element::{Brain, Element, Half, Single};
use crate::view::Format;

/// The largest number of int8 that is used: as far from 0 on both sides.
const INT8_MAX: f32 = 127.0;

/// The largest number of e4m3.
const FP8_MAX: f32 = 448.0;

/// The scale that makes the most of the format for a row. A row of zeros gets 1; a NaN in a row makes the scale NaN.
///
/// # Safety
/// The row can be read for `head_dim` numbers.
pub(crate) unsafe fn row_scale(row: *const u8, from: Format, head_dim: usize, to: Format) -> f32 {
    let mut largest = 0f32;
    let mut has_nan = false;
    for index in 0..head_dim {
        // SAFETY: number `index` lies in the row.
        let magnitude = unsafe { read(row, from, index) }.abs();
        has_nan |= magnitude.is_nan();
        largest = largest.max(magnitude);
    }
    match largest.min(f32::MAX) / largest_of(to) {
        _ if has_nan => f32::NAN,
        scale if scale == 0.0 && largest == 0.0 => 1.0,
        scale => scale.max(f32::MIN_POSITIVE),
    }
}

fn largest_of(format: Format) -> f32 {
    if format == Format::Int8 { INT8_MAX } else { FP8_MAX }
}

/// Writes a row's numbers over `scale`.
///
/// # Safety
/// The row can be read for `head_dim` numbers, and as many bytes be written.
pub(crate) unsafe fn write_row(
    row: *const u8,
    from: Format,
    head_dim: usize,
    scale: f32,
    format: Format,
    to: *mut u8,
) {
    for index in 0..head_dim {
        // SAFETY: number `index` lies in the row, and byte `index` can be written.
        unsafe {
            let number = read(row, from, index) / scale;
            to.add(index).write(if format == Format::Int8 { to_int8(number) } else { to_fp8(number) });
        }
    }
}

/// # Safety
/// Number `index` of the row can be read.
unsafe fn read(row: *const u8, format: Format, index: usize) -> f32 {
    // SAFETY: by this function's contract.
    unsafe {
        match format {
            Format::F32 => Single::read(row.add(4 * index)),
            Format::Bf16 => Brain::read(row.add(2 * index)),
            Format::F16 => Half::read(row.add(2 * index)),
            Format::Int8 | Format::Fp8 => unreachable!("keys and values come as floats"),
        }
    }
}

/// NaN becomes 0: the scale says that it was there.
fn to_int8(number: f32) -> u8 {
    number.round_ties_even().clamp(-INT8_MAX, INT8_MAX) as i8 as u8
}

/// Infinities become the largest numbers; NaN stays NaN.
pub(crate) fn to_fp8(number: f32) -> u8 {
    let sign = ((number.to_bits() >> 24) & 0x80) as u8;
    let magnitude = number.abs();
    if magnitude.is_nan() {
        return 0x7f;
    }
    // From 448 on up, and below the halfway point to the next step under it, everything is 448.
    let magnitude = magnitude.min(FP8_MAX);
    let code = if magnitude < 1.0 / 64.0 {
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        round_normal(magnitude)
    };
    sign | code
}

/// The code of a magnitude from 2^-6 to 448.
fn round_normal(magnitude: f32) -> u8 {
    let bits = magnitude.to_bits();
    let tie = (bits >> 20) & 1;
    let rounded = (bits + 0x7_ffff + tie) >> 20;
    (rounded - (120 << 3)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::widen_fp8;

    fn nearest_fp8(number: f32) -> u8 {
        let distance = |code: &u8| (f64::from(widen_fp8(*code)) - f64::from(number)).abs();
        let codes: Vec<u8> = (0..0x7f).chain(0x80..0xff).collect();
        let least = codes.iter().map(distance).fold(f64::INFINITY, f64::min);
        let best: Vec<u8> = codes.into_iter().filter(|code| distance(code) == least).collect();
        let same_sign = |code: &&u8| (**code >= 0x80) == number.is_sign_negative();
        let signed: Vec<&u8> = best.iter().filter(same_sign).collect();
        **signed.iter().find(|code| signed.len() == 1 || ***code % 2 == 0).unwrap()
    }

    #[test]
    fn every_bf16_becomes_the_nearest_fp8() {
        for bits in 0..=u16::MAX {
            let number = half::bf16::from_bits(bits).to_f32();
            if number.is_nan() {
                assert!(widen_fp8(to_fp8(number)).is_nan());
            } else {
                let expected = nearest_fp8(number.clamp(-448.0, 448.0));
                assert_eq!(to_fp8(number), expected, "{number}");
            }
        }
    }

    #[test]
    fn every_fp8_is_its_own_code() {
        for code in (0..0x7f).chain(0x80..0xff) {
            assert_eq!(to_fp8(widen_fp8(code)), code);
        }
    }

    #[test]
    fn int8_rounds_to_even_and_saturates() {
        let numbers = [0.5, 1.5, -0.5, -2.5, 126.5, 127.4, 1e30, f32::NEG_INFINITY, f32::NAN];
        let expected = [0, 2, 0, -2, 126, 127, 127, -127, 0];
        for (number, expected) in numbers.into_iter().zip(expected) {
            assert_eq!(to_int8(number) as i8, expected, "{number}");
        }
    }

    #[test]
    fn scales_are_finite_for_every_row_of_numbers() {
        for largest in [0.0, 1e-45, 1e-38, 1e-8, 3.0, 6e4, f32::MAX, f32::INFINITY] {
            for format in [Format::Int8, Format::Fp8] {
                let row = [0.0f32, -largest, largest / 3.0];
                // SAFETY: the row holds three singles, and the bytes three.
                let (scale, bytes) = unsafe {
                    let scale = row_scale(row.as_ptr().cast(), Format::F32, 3, format);
                    let mut bytes = [0u8; 3];
                    write_row(row.as_ptr().cast(), Format::F32, 3, scale, format, bytes.as_mut_ptr());
                    (scale, bytes)
                };
                assert!(scale.is_normal() && scale > 0.0, "{largest}: {scale}");
                assert_eq!(bytes[0], 0);
            }
        }
    }
}
