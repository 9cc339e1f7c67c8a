//! 512-bit vectors whose lanes hold two neighbours in bf16, multiplied and summed by one instruction. Bytes are
//! widened by looking them up, 64 at a time.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::Arithmetic;
use super::avx512::{Avx512, computed, forwarded, low_lanes};
use crate::element::Element;
use crate::view::Format;

/// AVX-512 with BF16 is there; for caches of bytes VBMI, too.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16(Avx512);

impl Avx512Bf16 {
    pub(crate) fn detect() -> bool {
        Avx512::detect() && is_x86_feature_detected!("avx512bf16")
    }

    /// Whether bytes can be looked up, too.
    pub(crate) fn detect_bytes() -> bool {
        Avx512Bf16::detect() && is_x86_feature_detected!("avx512vbmi")
    }

    /// # Safety
    /// `detect` returned true; `detect_bytes`, if bytes are loaded.
    pub(crate) unsafe fn assume() -> Avx512Bf16 {
        // SAFETY: `detect` asks for AVX-512, too.
        Avx512Bf16(unsafe { Avx512::assume() })
    }
}

forwarded!(Avx512Bf16);

impl Avx512Bf16 {
    computed! {
        /* The even and the odd halves of two vectors of 32 values, as lanes (value of a, value of b). */
        interleaved(a: __m512i, b: __m512i) -> [__m512i; 2] { {
            let first = interleaving(0);
            let second = interleaving(16);
            [_mm512_permutex2var_epi16(a, first, b), _mm512_permutex2var_epi16(a, second, b)]
        } }
    }

    /// 32 values of a row of bf16 from value `first` on.
    ///
    /// # Safety
    /// The values `first..first + min(count, 32)` of the row can be read.
    #[inline(always)]
    unsafe fn load_brains(self, row: *const u8, first: usize, count: usize) -> __m512i {
        // SAFETY: the instructions exist; only the lanes of values that exist are read.
        unsafe { _mm512_maskz_loadu_epi16(low_lanes(count) as __mmask32, row.wrapping_add(first * 2).cast()) }
    }

    /// 32 bytes from byte `first` on of each of two rows.
    ///
    /// # Safety
    /// Two row pointers can be read at `rows`, as [`Arithmetic::load_two`] asks.
    #[inline(always)]
    unsafe fn load_bytes(self, rows: *const *const u8, first: usize, count: usize) -> [__m512i; 2] {
        let mask = low_lanes(count) as __mmask32;
        // SAFETY: the instructions exist; only the lanes of bytes that exist are read.
        unsafe {
            let [one, other] = [*rows, *rows.add(1)].map(|row| row.wrapping_add(first));
            [
                _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(mask, one.cast())),
                _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(mask, other.cast())),
            ]
        }
    }

    /// 64 bytes of a cache as bf16: the first eight of each sixteen, and the last eight. bf16 holds each exactly.
    #[inline(always)]
    fn widened<E: Element>(self, bytes: __m512i) -> [__m512i; 2] {
        let is_int8 = matches!(E::FORMAT, Format::Int8);
        let table = if is_int8 { &Magnitudes::INT8 } else { &Magnitudes::FP8 };
        // SAFETY: whoever loads bytes has seen that the instructions exist; the tables are vectors of bytes.
        unsafe {
            let [low, more_low, high, more_high] = transmute::<Magnitudes, [__m512i; 4]>(*table);
            let magnitude = if is_int8 { _mm512_abs_epi8(bytes) } else { bytes };
            let low = _mm512_permutex2var_epi8(low, magnitude, more_low);
            let high = if is_int8 {
                // The place of 0 holds 128: its lower seven bits are the same.
                let is_not_0 = _mm512_test_epi8_mask(bytes, bytes);
                _mm512_maskz_permutex2var_epi8(is_not_0, high, magnitude, more_high)
            } else {
                _mm512_permutex2var_epi8(high, magnitude, more_high)
            };
            // high | (bytes & sign)
            let high = _mm512_ternarylogic_epi32::<0xf8>(high, bytes, _mm512_set1_epi8(i8::MIN));
            [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
        }
    }
}

/// The low and the high halves of what bytes stand for in bf16, by their lower seven bits; the sign is left out.
#[derive(Clone, Copy)]
#[repr(C)]
struct Magnitudes {
    low: [u8; 128],
    high: [u8; 128],
}

impl Magnitudes {
    const INT8: Magnitudes = Magnitudes::of(false);
    const FP8: Magnitudes = Magnitudes::of(true);

    const fn of(is_fp8: bool) -> Magnitudes {
        let mut table = Magnitudes { low: [0; 128], high: [0; 128] };
        let mut code = 0;
        while code < 128 {
            let bits = match code {
                0 if !is_fp8 => brain(128.0),
                _ if !is_fp8 => brain(code as f32),
                0x7f => brain(f32::NAN),
                0..8 => brain(code as f32 / 512.0),
                // Four bits of exponent with a bias of 7, then three of the fraction.
                _ => ((code << 4) + ((127 - 7) << 7)) as u16,
            };
            [table.low[code], table.high[code]] = bits.to_le_bytes();
            code += 1;
        }
        table
    }
}

/// The upper half of a single: its bf16, if it is one.
const fn brain(number: f32) -> u16 {
    (number.to_bits() >> 16) as u16
}

/// Which bytes of two rows, those of the second from 64 on, [`Avx512Bf16::widened`] must get to give the lanes of a step:
/// the value of one row, and that of the other.
const STEP: [u8; 64] = {
    let mut indices = [0; 64];
    let mut place = 0;
    while place < 64 {
        let (sixteen, rest) = (place / 16, place % 16);
        let column = rest / 8 * 16 + sixteen * 4 + rest % 8 / 2;
        indices[place] = (column + rest % 2 * 64) as u8;
        place += 1;
    }
    indices
};

/// The indices that take 16 values each of two vectors in turn, from value `first` on.
#[inline(always)]
fn interleaving(first: i16) -> __m512i {
    let mut indices = [0i16; 32];
    for (place, index) in indices.iter_mut().enumerate() {
        *index = first + (place as i16) / 2 + 32 * ((place as i16) % 2);
    }
    // SAFETY: both types are 64 bytes that may hold anything.
    unsafe { transmute::<[i16; 32], __m512i>(indices) }
}

impl Arithmetic for Avx512Bf16 {
    const VALUES: usize = 2;
    type Chunk = [__m512; 2];

    #[inline(always)]
    fn accumulate(self, sum: __m512, lanes: __m512, other: __m512) -> __m512 {
        // SAFETY: a value of this type exists only where the instruction does; a vector's bits are reinterpreted.
        unsafe {
            let lanes = transmute::<__m512, __m512bh>(lanes);
            let other = transmute::<__m512, __m512bh>(other);
            _mm512_dpbf16_ps(sum, lanes, other)
        }
    }

    #[inline(always)]
    unsafe fn load_two<E: Element>(self, rows: *const *const u8, first: usize, count: usize) -> [__m512; 2] {
        // SAFETY: the same contract; a vector's bits are reinterpreted.
        unsafe {
            let values = match E::FORMAT {
                Format::Bf16 => [*rows, *rows.add(1)].map(|row| self.load_brains(row, first, count)),
                Format::Int8 | Format::Fp8 => {
                    let [one, other] = self.load_bytes(rows, first, count);
                    let eights = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
                    self.widened::<E>(_mm512_permutex2var_epi64(one, eights, other))
                }
                Format::F32 | Format::F16 => unreachable!("these formats do not fit bf16"),
            };
            values.map(|values| _mm512_castsi512_ps(values))
        }
    }

    #[inline(always)]
    unsafe fn load_step<E: Element>(self, rows: *const *const u8, first: usize, count: usize) -> [__m512; 2] {
        // SAFETY: two row pointers can be read, and their values; a vector's bits are reinterpreted.
        unsafe {
            let lanes = match E::FORMAT {
                Format::Bf16 => {
                    let [even, odd] = [*rows, *rows.add(1)].map(|row| self.load_brains(row, first, count));
                    self.interleaved(even, odd)
                }
                Format::Int8 | Format::Fp8 => {
                    let [one, other] = self.load_bytes(rows, first, count);
                    let order = transmute::<[u8; 64], __m512i>(STEP);
                    self.widened::<E>(_mm512_permutex2var_epi8(one, order, other))
                }
                Format::F32 | Format::F16 => unreachable!("these formats do not fit bf16"),
            };
            lanes.map(|lanes| _mm512_castsi512_ps(lanes))
        }
    }

    #[inline(always)]
    unsafe fn store_weights(self, to: *mut u32, first: usize, weights: __m512) -> __m512 {
        // SAFETY: the instructions exist; the 16 positions are 8 words from word `first / 2` on.
        unsafe {
            let brains = transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(weights));
            _mm256_storeu_si256(to.cast::<u16>().add(first).cast(), brains);
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(brains)))
        }
    }
}
