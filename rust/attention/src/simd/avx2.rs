//! 256-bit vectors with fused multiply-add.

use std::arch::x86_64::*;

use super::{Arithmetic, Simd};
use crate::element::Element;
use crate::view::Format;

/// AVX2, FMA and F16C are there.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    /// # Safety
    /// `detect` returned true.
    pub(crate) unsafe fn assume() -> Avx2 {
        Avx2(())
    }
}

/// Methods that only compute.
macro_rules! computed {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty { $body:expr })*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: $type),*) -> $result {
            // SAFETY: a value of this type exists only where the instructions do.
            unsafe { $body }
        }
    )*};
}

impl Simd for Avx2 {
    type Floats = __m256;
    const LANES: usize = 8;
    const TILE_VECTORS: usize = 2;

    computed! {
        splat(value: f32) -> __m256 { _mm256_set1_ps(value) }
        add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        multiply_add(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        min(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        split(a: __m256) -> [__m256; 2] { {
            let a = _mm256_min_ps(_mm256_set1_ps(128.0), _mm256_max_ps(_mm256_set1_ps(-150.0), a));
            let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
            [whole, _mm256_sub_ps(a, whole)]
        } }
        scale(a: __m256, exponent: __m256) -> __m256 { {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
            let biased = _mm256_max_epi32(biased, _mm256_setzero_si256());
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
        } }
        keep(a: __m256, first: i32, end: i32, fill: f32) -> __m256 { {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let below = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
            let inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
            let keep = _mm256_castsi256_ps(_mm256_andnot_si256(below, inside));
            _mm256_blendv_ps(_mm256_set1_ps(fill), a, keep)
        } }
        sum(a: __m256) -> f32 { {
            let half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps::<1>(quarter, quarter)))
        } }
        lane0(a: __m256) -> f32 { _mm256_cvtss_f32(a) }
        maximum(a: __m256) -> f32 { {
            let half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(quarter, _mm_shuffle_ps::<1>(quarter, quarter)))
        } }
        sum_in_blocks(vectors: [__m256; 4]) -> __m256 { {
            let [a, b, c, d] = vectors;
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xee>(ab, cd))
        } }
        transpose_blocks(vectors: [__m256; 4]) -> [__m256; 4] { {
            let [a, b, c, d] = vectors;
            [_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b), c, d]
        } }
        exceeds(a: __m256, bound: f32) -> bool {
            _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, _mm256_set1_ps(bound))) != 0
        }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: the instructions exist, and `from` is readable by this function's contract.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn repeat(self, from: *const f32) -> __m256 {
        // SAFETY: the instructions exist, and `from` is readable by this function's contract.
        unsafe { _mm256_broadcast_ps(&from.cast::<__m128>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: __m256) {
        // SAFETY: the instructions exist, and `to` is writable by this function's contract.
        unsafe { _mm256_storeu_ps(to, a) }
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

impl Avx2 {
    /// Eight values that start at `from`.
    ///
    /// # Safety
    /// They can be read.
    #[inline(always)]
    unsafe fn load_eight<E: Element>(self, from: *const u8) -> __m256 {
        // SAFETY: the instructions exist; eight values of the format are read, as the contract allows.
        unsafe {
            match E::FORMAT {
                Format::F32 => _mm256_loadu_ps(from.cast()),
                Format::Bf16 => {
                    let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
                }
                Format::F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                Format::Int8 => _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))),
                Format::Fp8 => self.widen_fp8(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))),
            }
        }
    }

    computed! {
        widen_fp8(bytes: __m256i) -> __m256 { {
            let magnitude = _mm256_and_si256(bytes, _mm256_set1_epi32(0x7f));
            let sign = _mm256_slli_epi32::<24>(_mm256_and_si256(bytes, _mm256_set1_epi32(0x80)));
            let normal = _mm256_castsi256_ps(_mm256_slli_epi32::<20>(magnitude));
            let normal = _mm256_mul_ps(normal, _mm256_castsi256_ps(_mm256_set1_epi32((120 + 127) << 23)));
            let small = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(1.0 / 512.0));
            let is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
            let is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
            let value = _mm256_blendv_ps(normal, small, _mm256_castsi256_ps(is_small));
            let value = _mm256_blendv_ps(value, _mm256_set1_ps(f32::NAN), _mm256_castsi256_ps(is_nan));
            _mm256_or_ps(value, _mm256_castsi256_ps(sign))
        } }
    }
}

impl Avx2 {
    /// `LANES` values of a row from value `first` on; only `count` of them exist, the others become 0.
    ///
    /// # Safety
    /// The values `first..first + min(count, LANES)` of the row can be read.
    #[inline(always)]
    unsafe fn load_values<E: Element>(self, row: *const u8, first: usize, count: usize) -> __m256 {
        let from = row.wrapping_add(first * E::FORMAT.bytes());
        if count >= 8 {
            // SAFETY: eight values of the row exist from `first` on.
            return unsafe { self.load_eight::<E>(from) };
        }
        let mut padded = [0u8; 32];
        // SAFETY: `count` values of the row exist from `first` on, and eight fit into the array.
        unsafe {
            std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), count * E::FORMAT.bytes());
            self.load_eight::<E>(padded.as_ptr())
        }
    }
}

impl Arithmetic for Avx2 {
    const VALUES: usize = 1;
    type Chunk = [__m256; 1];

    #[inline(always)]
    fn accumulate(self, sum: __m256, lanes: __m256, other: __m256) -> __m256 {
        self.multiply_add(lanes, other, sum)
    }

    #[inline(always)]
    unsafe fn load_two<E: Element>(self, rows: *const *const u8, first: usize, count: usize) -> [__m256; 2] {
        // SAFETY: two row pointers can be read, and their values.
        unsafe {
            [self.load_values::<E>(*rows, first, count), self.load_values::<E>(*rows.add(1), first, count)]
        }
    }

    #[inline(always)]
    unsafe fn load_step<E: Element>(self, rows: *const *const u8, first: usize, count: usize) -> [__m256; 1] {
        // SAFETY: one row pointer can be read, and its values.
        unsafe { [self.load_values::<E>(*rows, first, count)] }
    }

    #[inline(always)]
    unsafe fn store_weights(self, to: *mut u32, first: usize, weights: __m256) -> __m256 {
        // SAFETY: eight words from `first` on can be written.
        unsafe { self.store(to.add(first).cast(), weights) }
        weights
    }
}
