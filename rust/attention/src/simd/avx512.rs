//! 512-bit vectors of singles.

use std::arch::x86_64::*;

use super::{Arithmetic, Simd};
use crate::element::Element;
use crate::view::Format;

/// AVX-512 F, BW, VL and DQ are there.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
    }

    /// # Safety
    /// `detect` returned true.
    pub(crate) unsafe fn assume() -> Avx512 {
        Avx512(())
    }
}

/// Methods that only compute.
macro_rules! computed {
    ($($visible:vis $name:ident($($argument:ident: $type:ty),*) -> $result:ty { $body:expr })*) => {$(
        #[inline(always)]
        $visible fn $name(self, $($argument: $type),*) -> $result {
            // SAFETY: a value of this type exists only where the instructions do.
            unsafe { $body }
        }
    )*};
}
pub(super) use computed;

/// Vectors of singles for a unit that has AVX-512 and more: those of its first field.
macro_rules! forwarded {
    ($unit:ty) => {
        forwarded! {
            $unit;
            splat(value: f32) -> __m512;
            add(a: __m512, b: __m512) -> __m512;
            sub(a: __m512, b: __m512) -> __m512;
            mul(a: __m512, b: __m512) -> __m512;
            div(a: __m512, b: __m512) -> __m512;
            multiply_add(a: __m512, b: __m512, c: __m512) -> __m512;
            max(a: __m512, b: __m512) -> __m512;
            min(a: __m512, b: __m512) -> __m512;
            split(a: __m512) -> [__m512; 2];
            scale(a: __m512, exponent: __m512) -> __m512;
            keep(a: __m512, first: i32, end: i32, fill: f32) -> __m512;
            sum(a: __m512) -> f32;
            lane0(a: __m512) -> f32;
            maximum(a: __m512) -> f32;
            sum_in_blocks(vectors: [__m512; 4]) -> __m512;
            transpose_blocks(vectors: [__m512; 4]) -> [__m512; 4];
            exceeds(a: __m512, bound: f32) -> bool;
            prefetch(address: *const u8) -> ();
        }
    };
    ($unit:ty; $($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl crate::simd::Simd for $unit {
            type Floats = __m512;
            const LANES: usize = <Avx512 as crate::simd::Simd>::LANES;
            const TILE_VECTORS: usize = <Avx512 as crate::simd::Simd>::TILE_VECTORS;

            $(
                #[inline(always)]
                fn $name(self, $($argument: $type),*) -> $result {
                    self.0.$name($($argument),*)
                }
            )*

            #[inline(always)]
            unsafe fn load(self, from: *const f32) -> __m512 {
                // SAFETY: the same contract.
                unsafe { self.0.load(from) }
            }

            #[inline(always)]
            unsafe fn repeat(self, from: *const f32) -> __m512 {
                // SAFETY: the same contract.
                unsafe { self.0.repeat(from) }
            }

            #[inline(always)]
            unsafe fn store(self, to: *mut f32, a: __m512) {
                // SAFETY: the same contract.
                unsafe { self.0.store(to, a) }
            }
        }
    };
}
pub(super) use forwarded;

/// A mask of the lowest `count` lanes of 32.
#[inline(always)]
pub(super) fn low_lanes(count: usize) -> u32 {
    if count >= 32 { u32::MAX } else { (1u32 << count) - 1 }
}

impl Simd for Avx512 {
    type Floats = __m512;
    const LANES: usize = 16;
    const TILE_VECTORS: usize = 4;

    computed! {
        splat(value: f32) -> __m512 { _mm512_set1_ps(value) }
        add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        multiply_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        split(a: __m512) -> [__m512; 2] { {
            // The rest of an infinity is 0, and the scaling takes any exponent.
            let rest = _mm512_reduce_ps::<0>(a);
            [_mm512_sub_ps(a, rest), rest]
        } }
        scale(a: __m512, exponent: __m512) -> __m512 { _mm512_scalef_ps(a, exponent) }
        keep(a: __m512, first: i32, end: i32, fill: f32) -> __m512 { {
            let below = low_lanes(first.clamp(0, 16) as usize);
            let inside = low_lanes(end.clamp(0, 16) as usize);
            _mm512_mask_blend_ps((inside & !below) as __mmask16, _mm512_set1_ps(fill), a)
        } }
        sum(a: __m512) -> f32 { _mm512_reduce_add_ps(a) }
        lane0(a: __m512) -> f32 { _mm512_cvtss_f32(a) }
        maximum(a: __m512) -> f32 { _mm512_reduce_max_ps(a) }
        sum_in_blocks(vectors: [__m512; 4]) -> __m512 { {
            let [a, b, c, d] = vectors;
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let halves = [_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd)];
            _mm512_add_ps(_mm512_castpd_ps(halves[0]), _mm512_castpd_ps(halves[1]))
        } }
        transpose_blocks(vectors: [__m512; 4]) -> [__m512; 4] { {
            let [a, b, c, d] = vectors;
            let (low_ab, high_ab) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            let (low_cd, high_cd) = (_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
            [
                _mm512_shuffle_f32x4::<0x88>(low_ab, low_cd),
                _mm512_shuffle_f32x4::<0xdd>(low_ab, low_cd),
                _mm512_shuffle_f32x4::<0x88>(high_ab, high_cd),
                _mm512_shuffle_f32x4::<0xdd>(high_ab, high_cd),
            ]
        } }
        exceeds(a: __m512, bound: f32) -> bool {
            _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, _mm512_set1_ps(bound)) != 0
        }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: the instructions exist, and `from` is readable by this function's contract.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn repeat(self, from: *const f32) -> __m512 {
        // SAFETY: the instructions exist, and `from` is readable by this function's contract.
        unsafe { _mm512_broadcast_f32x4(_mm_loadu_ps(from)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: __m512) {
        // SAFETY: the instructions exist, and `to` is writable by this function's contract.
        unsafe { _mm512_storeu_ps(to, a) }
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

impl Avx512 {
    computed! {
        widen_fp8(bytes: __m512i) -> __m512 { {
            let magnitude = _mm512_and_si512(bytes, _mm512_set1_epi32(0x7f));
            let sign = _mm512_slli_epi32::<24>(_mm512_andnot_si512(_mm512_set1_epi32(0x7f), bytes));
            let normal = _mm512_castsi512_ps(_mm512_slli_epi32::<20>(magnitude));
            let normal = _mm512_mul_ps(normal, _mm512_castsi512_ps(_mm512_set1_epi32((120 + 127) << 23)));
            let is_small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
            let is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
            let small = _mm512_cvtepi32_ps(magnitude);
            let value = _mm512_mask_mul_ps(normal, is_small, small, _mm512_set1_ps(1.0 / 512.0));
            let value = _mm512_mask_mov_ps(value, is_nan, _mm512_set1_ps(f32::NAN));
            _mm512_or_ps(value, _mm512_castsi512_ps(sign))
        } }
    }
}

impl Avx512 {
    /// `LANES` values of a row from value `first` on; only `count` of them exist, the others become 0.
    ///
    /// # Safety
    /// The values `first..first + min(count, LANES)` of the row can be read.
    #[inline(always)]
    pub(super) unsafe fn load_values<E: Element>(self, row: *const u8, first: usize, count: usize) -> __m512 {
        let from = row.wrapping_add(first * E::FORMAT.bytes());
        let mask = low_lanes(count.min(16)) as __mmask16;
        // SAFETY: the instructions exist; only the lanes of values that exist are read.
        unsafe {
            match E::FORMAT {
                Format::F32 => _mm512_maskz_loadu_ps(mask, from.cast()),
                Format::Bf16 => {
                    let wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                }
                Format::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast())),
                Format::Int8 => {
                    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, from.cast())))
                }
                Format::Fp8 => self.widen_fp8(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, from.cast()))),
            }
        }
    }
}

impl Arithmetic for Avx512 {
    const VALUES: usize = 1;
    type Chunk = [__m512; 1];

    #[inline(always)]
    fn accumulate(self, sum: __m512, lanes: __m512, other: __m512) -> __m512 {
        self.multiply_add(lanes, other, sum)
    }

    #[inline(always)]
    unsafe fn load_two<E: Element>(self, rows: *const *const u8, first: usize, count: usize) -> [__m512; 2] {
        // SAFETY: two row pointers can be read, and their values.
        unsafe {
            [self.load_values::<E>(*rows, first, count), self.load_values::<E>(*rows.add(1), first, count)]
        }
    }

    #[inline(always)]
    unsafe fn load_step<E: Element>(self, rows: *const *const u8, first: usize, count: usize) -> [__m512; 1] {
        // SAFETY: one row pointer can be read, and its values.
        unsafe { [self.load_values::<E>(*rows, first, count)] }
    }

    #[inline(always)]
    unsafe fn store_weights(self, to: *mut u32, first: usize, weights: __m512) -> __m512 {
        // SAFETY: sixteen words from `first` on can be written.
        unsafe { self.store(to.add(first).cast(), weights) }
        weights
    }
}
