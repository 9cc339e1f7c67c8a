//! From floats to 8 bits and a scale. The same numbers give the same bytes on every backend.
//!
//! A number becomes `number / scale`, divided in single precision, rounded to the nearest (ties to even) and held
//! inside the format's range. The scale of a row is its largest magnitude over the format's largest number.
//!
//! The loops run over arrays of [`CHUNK`] numbers without branches, so that the compiler makes vectors of them; each is
//! compiled once for each instruction set.

use half::slice::HalfFloatSliceExt;

use crate::InstructionSet;
use crate::view::Format;

/// The largest number of int8 that is used: as far from 0 on both sides.
const INT8_MAX: f32 = 127.0;

/// The largest number of e4m3.
const FP8_MAX: f32 = 448.0;

/// Numbers that are worked on at a time.
const CHUNK: usize = 32;

/// 1.5 * 2^23. Added to a magnitude below 2^22 it rounds to a whole number, whose last byte is the sum's.
const WHOLE: f32 = 12_582_912.0;

/// One row that is to be written.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    /// Its numbers.
    pub(crate) from: *const u8,
    /// How they are stored: as floats.
    pub(crate) format: Format,
    /// How many there are.
    pub(crate) head_dim: usize,
    /// What they are divided by; none: the scale that makes the most of the format.
    pub(crate) scale: Option<f32>,
    /// Where the bytes go.
    pub(crate) to: *mut u8,
}

/// Writes rows as int8 or e4m3.
#[derive(Clone, Copy)]
pub(crate) struct RowWriter(unsafe fn(&Row) -> f32);

impl RowWriter {
    /// The writer for this format, with no more than these instructions.
    pub(crate) fn choose(format: Format, limit: InstructionSet) -> RowWriter {
        let is_int8 = format == Format::Int8;
        #[cfg(target_arch = "x86_64")]
        match limit.min(InstructionSet::detect()) {
            InstructionSet::Avx512Vnni | InstructionSet::Avx512Bf16 | InstructionSet::Avx512 => {
                return RowWriter(if is_int8 { avx512::write::<Int8> } else { avx512::write::<Fp8> });
            }
            InstructionSet::Avx2 => {
                return RowWriter(if is_int8 { avx2::write::<Int8> } else { avx2::write::<Fp8> });
            }
            InstructionSet::Portable => {}
        }
        let _ = limit;
        RowWriter(if is_int8 { write::<Int8> } else { write::<Fp8> })
    }

    /// Writes a row and returns its scale. A row of zeros gets 1; a NaN in a row makes the scale NaN.
    ///
    /// # Safety
    /// The row can be read for `head_dim` numbers, and as many bytes be written.
    pub(crate) unsafe fn write(self, row: &Row) -> f32 {
        // SAFETY: the same contract; the instructions were detected.
        unsafe { (self.0)(row) }
    }
}

/// Compiles the writer for an instruction set.
#[cfg(target_arch = "x86_64")]
macro_rules! compile {
    ($module:ident, $features:literal) => {
        mod $module {
            /// # Safety
            /// See [`super::write`]; the machine has the instructions.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn write<T: super::Target>(row: &super::Row) -> f32 {
                // SAFETY: the same contract.
                unsafe { super::write::<T>(row) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
compile!(avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compile!(avx512, "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c");

/// # Safety
/// See [`RowWriter::write`].
#[inline(always)]
unsafe fn write<T: Target>(row: &Row) -> f32 {
    // SAFETY: the same contract.
    unsafe {
        match row.format {
            Format::F32 => write_from::<Singles, T>(row),
            Format::Bf16 => write_from::<Brains, T>(row),
            Format::F16 => write_from::<Halves, T>(row),
            Format::Int8 | Format::Fp8 => unreachable!("keys and values come as floats"),
        }
    }
}

/// A format of floats.
trait Source {
    /// A number as it is stored.
    type Raw: Copy + Default;

    fn widen(raw: &[Self::Raw; CHUNK]) -> [f32; CHUNK];
}

struct Singles;

impl Source for Singles {
    type Raw = f32;

    #[inline(always)]
    fn widen(raw: &[f32; CHUNK]) -> [f32; CHUNK] {
        *raw
    }
}

struct Brains;

impl Source for Brains {
    type Raw = u16;

    #[inline(always)]
    fn widen(raw: &[u16; CHUNK]) -> [f32; CHUNK] {
        let mut numbers = [0f32; CHUNK];
        for (number, &brain) in numbers.iter_mut().zip(raw) {
            *number = f32::from_bits(u32::from(brain) << 16);
        }
        numbers
    }
}

struct Halves;

impl Source for Halves {
    type Raw = half::f16;

    #[inline(always)]
    fn widen(raw: &[half::f16; CHUNK]) -> [f32; CHUNK] {
        let mut numbers = [0f32; CHUNK];
        raw.convert_to_f32_slice(&mut numbers);
        numbers
    }
}

/// # Safety
/// See [`RowWriter::write`].
// No closures here: they would be compiled without the instructions of their caller.
#[inline(always)]
unsafe fn write_from<S: Source, T: Target>(row: &Row) -> f32 {
    // SAFETY: the chunks lie in the row, and so do their bytes.
    unsafe {
        let scale = match row.scale {
            Some(scale) => scale,
            None => {
                let mut largest = 0;
                for first in (0..row.head_dim).step_by(CHUNK) {
                    largest = largest.max(largest_bits(&load::<S>(row, first)));
                }
                scale_of(largest, T::LARGEST)
            }
        };
        for first in (0..row.head_dim).step_by(CHUNK) {
            let bytes = encode::<T>(&load::<S>(row, first), scale);
            match row.head_dim - first {
                count @ 0..CHUNK => row.to.add(first).copy_from_nonoverlapping(bytes.as_ptr(), count),
                _ => row.to.add(first).copy_from_nonoverlapping(bytes.as_ptr(), CHUNK),
            }
        }
        scale
    }
}

/// The numbers of a row from number `first` on, zeros behind its end.
///
/// # Safety
/// The row can be read, and has a number `first`.
#[inline(always)]
unsafe fn load<S: Source>(row: &Row, first: usize) -> [f32; CHUNK] {
    let mut raw = [S::Raw::default(); CHUNK];
    // SAFETY: as many numbers are copied as the row has; as bytes, since they need not be aligned.
    unsafe {
        let from = row.from.add(first * size_of::<S::Raw>());
        let to = raw.as_mut_ptr().cast::<u8>();
        match row.head_dim - first {
            count @ 0..CHUNK => to.copy_from_nonoverlapping(from, count * size_of::<S::Raw>()),
            _ => to.copy_from_nonoverlapping(from, CHUNK * size_of::<S::Raw>()),
        }
    }
    S::widen(&raw)
}

/// The bits of the largest magnitude. As whole numbers they are ordered as the magnitudes are, a NaN above all.
#[inline(always)]
fn largest_bits(numbers: &[f32; CHUNK]) -> u32 {
    let mut largest = 0;
    for number in numbers {
        largest = largest.max(number.to_bits() & 0x7fff_ffff);
    }
    largest
}

/// The scale of a row with this largest magnitude.
#[inline(always)]
fn scale_of(largest_bits: u32, largest_of_format: f32) -> f32 {
    let largest = f32::from_bits(largest_bits);
    if largest.is_nan() {
        f32::NAN
    } else if largest == 0.0 {
        1.0
    } else {
        (largest.min(f32::MAX) / largest_of_format).max(f32::MIN_POSITIVE)
    }
}

#[inline(always)]
fn encode<T: Target>(numbers: &[f32; CHUNK], scale: f32) -> [u8; CHUNK] {
    let mut codes = [0u8; CHUNK];
    for (code, number) in codes.iter_mut().zip(numbers) {
        *code = T::code(number / scale) as u8;
    }
    codes
}

/// A format of 8 bits.
trait Target {
    /// Its largest number.
    const LARGEST: f32;

    /// The code of a number, in the last byte.
    fn code(number: f32) -> u32;
}

struct Int8;

impl Target for Int8 {
    const LARGEST: f32 = INT8_MAX;

    /// NaN becomes 0: the scale says that it was there.
    #[inline(always)]
    fn code(number: f32) -> u32 {
        let held = number.clamp(-INT8_MAX, INT8_MAX);
        if number.is_nan() { 0 } else { (held + WHOLE).to_bits() }
    }
}

struct Fp8;

impl Target for Fp8 {
    const LARGEST: f32 = FP8_MAX;

    /// Infinities become the largest numbers; NaN stays NaN.
    #[inline(always)]
    fn code(number: f32) -> u32 {
        // From 448 on up, and below the halfway point to the next step under it, everything is 448.
        let magnitude = number.abs().min(FP8_MAX);
        let bits = magnitude.to_bits();
        // From 2^-6 on: rounded to three digits after the first, and the exponent's bias moved from 127 to 7.
        let normal = ((bits + 0x7_ffff + ((bits >> 20) & 1)) >> 20).wrapping_sub(120 << 3);
        // Below, the codes are whole multiples of 2^-9.
        let small = (magnitude * 512.0 + WHOLE).to_bits() & 0xff;
        let code = if magnitude < 1.0 / 64.0 { small } else { normal };
        let sign = (number.to_bits() >> 24) & 0x80;
        if number.is_nan() { 0x7f } else { code | sign }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::widen_fp8;

    fn to_fp8(number: f32) -> u8 {
        Fp8::code(number) as u8
    }

    const SETS: [InstructionSet; 3] =
        [InstructionSet::Portable, InstructionSet::Avx2, InstructionSet::Avx512];

    /// A row of singles with every instruction set that is here: its scale and bytes, the same from all.
    fn written(row: &[f32], scale: Option<f32>, format: Format) -> (f32, Vec<u8>) {
        let results = SETS.map(|set| {
            if set > InstructionSet::detect() {
                eprintln!("skipped: {}", set.name());
            }
            let mut bytes = vec![0xcc; row.len() + 1];
            let job = Row {
                from: row.as_ptr().cast(),
                format: Format::F32,
                head_dim: row.len(),
                scale,
                to: bytes.as_mut_ptr(),
            };
            // SAFETY: the row has that many singles, and there is a byte for each.
            let scale = unsafe { RowWriter::choose(format, set).write(&job) };
            assert_eq!(bytes.pop(), Some(0xcc), "nothing is written past the row");
            (scale.to_bits(), bytes)
        });
        assert!(results.iter().all(|result| *result == results[0]), "{row:?}");
        let [(scale, bytes), ..] = results;
        (f32::from_bits(scale), bytes)
    }

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
        let (_, bytes) = written(&numbers, Some(1.0), Format::Int8);
        assert_eq!(bytes.iter().map(|&byte| byte as i8).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn rows_of_every_length_have_their_own_scale() {
        for length in (1..=2 * CHUNK + 1).chain([128, 200]) {
            let row: Vec<f32> = (0..length).map(|i| ((i * 7919) % 211) as f32 - 105.0).collect();
            let largest = row.iter().fold(0f32, |most, number| most.max(number.abs()));
            for (format, most) in [(Format::Int8, INT8_MAX), (Format::Fp8, FP8_MAX)] {
                let (scale, bytes) = written(&row, None, format);
                assert_eq!(scale, largest / most);
                for (byte, number) in bytes.iter().zip(&row) {
                    let expected = (number / scale).clamp(-most, most);
                    let found =
                        if format == Format::Int8 { f32::from(*byte as i8) } else { widen_fp8(*byte) };
                    let step =
                        if format == Format::Int8 { 1.0 } else { expected.abs() / 8.0 + 2f32.powi(-8) };
                    assert!((found - expected).abs() <= step / 2.0, "{number} is {found} times {scale}");
                }
            }
        }
    }

    #[test]
    fn every_wider_format_gives_the_bytes_of_singles() {
        let numbers: Vec<f32> = (0..77).map(|i| ((i * 37) % 101) as f32 / 8.0 - 6.0).collect();
        let brains: Vec<half::bf16> = numbers.iter().map(|&number| half::bf16::from_f32(number)).collect();
        let halves: Vec<half::f16> = numbers.iter().map(|&number| half::f16::from_f32(number)).collect();
        let sources: [(*const u8, Format); 2] =
            [(brains.as_ptr().cast(), Format::Bf16), (halves.as_ptr().cast(), Format::F16)];
        for target in [Format::Int8, Format::Fp8] {
            let expected = written(&numbers, None, target);
            for (from, format) in sources {
                for set in SETS {
                    let mut bytes = vec![0; numbers.len()];
                    let row =
                        Row { from, format, head_dim: numbers.len(), scale: None, to: bytes.as_mut_ptr() };
                    // SAFETY: the row has that many numbers, which the format holds exactly, and as many bytes.
                    let scale = unsafe { RowWriter::choose(target, set).write(&row) };
                    assert_eq!((scale, bytes), expected, "{format:?} with {}", set.name());
                }
            }
        }
    }

    #[test]
    fn scales_are_finite_for_every_row_of_numbers() {
        for largest in [0.0, 1e-45, 1e-38, 1e-8, 3.0, 6e4, f32::MAX, f32::INFINITY] {
            for format in [Format::Int8, Format::Fp8] {
                let (scale, bytes) = written(&[0.0, -largest, largest / 3.0], None, format);
                assert!(scale.is_normal() && scale > 0.0, "{largest}: {scale}");
                assert_eq!(bytes[0], 0);
            }
        }
        let (scale, _) = written(&[1.0, f32::NAN], None, Format::Int8);
        assert!(scale.is_nan());
    }
}
