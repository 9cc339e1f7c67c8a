//! 512-bit vectors whose lanes hold two neighbours in bf16, multiplied and summed by one instruction.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::avx512::{Avx512, computed, low_lanes};
use super::{Arithmetic, MOST_LANES, Simd};
use crate::element::Element;
use crate::view::Format;

/// AVX-512 with BF16 is there.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16(Avx512);

impl Avx512Bf16 {
    pub(crate) fn detect() -> bool {
        Avx512::detect() && is_x86_feature_detected!("avx512bf16")
    }

    /// # Safety
    /// `detect` returned true.
    pub(crate) unsafe fn assume() -> Avx512Bf16 {
        // SAFETY: `detect` asks for AVX-512, too.
        Avx512Bf16(unsafe { Avx512::assume() })
    }
}

/// Methods of the wider unit.
macro_rules! forwarded {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: $type),*) -> $result {
            self.0.$name($($argument),*)
        }
    )*};
}

impl Simd for Avx512Bf16 {
    type Floats = __m512;
    const LANES: usize = Avx512::LANES;
    const TILE_VECTORS: usize = Avx512::TILE_VECTORS;

    forwarded! {
        splat(value: f32) -> __m512;
        add(a: __m512, b: __m512) -> __m512;
        sub(a: __m512, b: __m512) -> __m512;
        mul(a: __m512, b: __m512) -> __m512;
        div(a: __m512, b: __m512) -> __m512;
        multiply_add(a: __m512, b: __m512, c: __m512) -> __m512;
        max(a: __m512, b: __m512) -> __m512;
        min(a: __m512, b: __m512) -> __m512;
        round(a: __m512) -> __m512;
        scale(a: __m512, exponent: __m512) -> __m512;
        keep(a: __m512, first: i32, end: i32, fill: f32) -> __m512;
        sum(a: __m512) -> f32;
        lane0(a: __m512) -> f32;
        maximum(a: __m512) -> f32;
        prefetch(address: *const u8) -> ();
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: the same contract.
        unsafe { self.0.load(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: __m512) {
        // SAFETY: the same contract.
        unsafe { self.0.store(to, a) }
    }
}

impl Avx512Bf16 {
    computed! {
        /* Sixteen lanes of two signed bytes each; bf16 holds every one of them exactly. */
        pairs_of_bytes(bytes: __m256i) -> __m512i { {
            let wide = _mm512_cvtepi8_epi16(bytes);
            let magnitude = _mm512_abs_epi16(wide);
            // From 64 to 128 the bits of a number rise by 2 with it; below they are looked up.
            let twice = _mm512_add_epi16(magnitude, magnitude);
            let large = _mm512_add_epi16(twice, _mm512_set1_epi16(0x4200));
            let is_small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(64));
            let [low, high] = transmute::<[u16; 64], [__m512i; 2]>(SMALL_NUMBERS);
            let small = _mm512_permutex2var_epi16(low, magnitude, high);
            let value = _mm512_mask_mov_epi16(large, is_small, small);
            // value | (wide & sign)
            _mm512_ternarylogic_epi32::<0xf8>(value, wide, _mm512_set1_epi16(i16::MIN))
        } }
        /* Sixteen lanes of two e4m3 bytes each; bf16 holds every one of them exactly. */
        pairs_of_fp8(bytes: __m256i) -> __m512i { {
            let wide = _mm512_cvtepu8_epi16(bytes);
            let magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
            let sign = _mm512_slli_epi16::<8>(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), wide));
            let normal = _mm512_add_epi16(_mm512_slli_epi16::<4>(magnitude), _mm512_set1_epi16(120 << 7));
            let is_small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
            let is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
            // 0 to 7 times 2^-9, in bf16.
            let small = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0x3c60_3c40_3c20_3c00, 0x3bc0_3b80_3b00_0000);
            let value = _mm512_mask_permutexvar_epi16(normal, is_small, magnitude, small);
            let value = _mm512_mask_blend_epi16(is_nan, value, _mm512_set1_epi16(0x7fc0));
            _mm512_or_si512(value, sign)
        } }
        /* The even and the odd halves of two vectors of 32 values, as lanes (value of a, value of b). */
        interleaved(a: __m512i, b: __m512i) -> [__m512i; 2] { {
            let first = interleaving(0);
            let second = interleaving(16);
            [_mm512_permutex2var_epi16(a, first, b), _mm512_permutex2var_epi16(a, second, b)]
        } }
    }

    /// 32 values of a row from value `first` on, in bf16.
    ///
    /// # Safety
    /// See [`Arithmetic::load_values`].
    #[inline(always)]
    unsafe fn load_brains<E: Element>(self, row: *const u8, first: usize, count: usize) -> __m512i {
        let from = row.wrapping_add(first * E::FORMAT.bytes());
        let mask = low_lanes(count) as __mmask32;
        // SAFETY: the instructions exist; only the lanes of values that exist are read.
        unsafe {
            match E::FORMAT {
                Format::Bf16 => _mm512_maskz_loadu_epi16(mask, from.cast()),
                Format::Int8 => self.pairs_of_bytes(_mm256_maskz_loadu_epi8(mask, from.cast())),
                Format::Fp8 => self.pairs_of_fp8(_mm256_maskz_loadu_epi8(mask, from.cast())),
                Format::F32 | Format::F16 => unreachable!("these formats do not fit bf16"),
            }
        }
    }
}

/// The numbers below 64, in bf16.
const SMALL_NUMBERS: [u16; 64] = {
    let mut numbers = [0; 64];
    let mut number = 0;
    while number < 64 {
        numbers[number] = ((number as f32).to_bits() >> 16) as u16;
        number += 1;
    }
    numbers
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
    fn accumulate(self, sum: __m512, lanes: __m512, broadcast: __m512) -> __m512 {
        // SAFETY: a value of this type exists only where the instruction does; a vector's bits are reinterpreted.
        unsafe {
            let lanes = transmute::<__m512, __m512bh>(lanes);
            let broadcast = transmute::<__m512, __m512bh>(broadcast);
            _mm512_dpbf16_ps(sum, lanes, broadcast)
        }
    }

    #[inline(always)]
    unsafe fn load_values<E: Element>(self, row: *const u8, first: usize, count: usize) -> __m512 {
        // SAFETY: the same contract; a vector's bits are reinterpreted.
        unsafe { _mm512_castsi512_ps(self.load_brains::<E>(row, first, count)) }
    }

    #[inline(always)]
    unsafe fn store_transposed(self, rows: &[__m512; MOST_LANES], to: *mut f32, stride: usize) {
        // SAFETY: the same contract.
        unsafe { self.0.store_columns(rows, to, stride) }
    }

    #[inline(always)]
    unsafe fn load_step<E: Element>(self, rows: *const *const u8, first: usize, count: usize) -> [__m512; 2] {
        // SAFETY: two row pointers can be read, and their values; a vector's bits are reinterpreted.
        unsafe {
            let even = self.load_brains::<E>(*rows, first, count);
            let odd = self.load_brains::<E>(*rows.add(1), first, count);
            self.interleaved(even, odd).map(|lanes| _mm512_castsi512_ps(lanes))
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
