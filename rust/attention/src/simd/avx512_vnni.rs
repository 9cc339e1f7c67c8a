//! 512-bit vectors of bytes, of which four neighbours each are multiplied and summed as whole numbers of 32 bits.

use std::arch::x86_64::*;

use super::avx512::{Avx512, computed, forwarded};
use super::avx512_bf16::Avx512Bf16;

/// AVX-512 with BF16 and VNNI is there.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Vnni(Avx512);

impl Avx512Vnni {
    pub(crate) fn detect() -> bool {
        Avx512Bf16::detect() && is_x86_feature_detected!("avx512vnni")
    }

    /// # Safety
    /// `detect` returned true.
    pub(crate) unsafe fn assume() -> Avx512Vnni {
        // SAFETY: `detect` asks for AVX-512, too.
        Avx512Vnni(unsafe { Avx512::assume() })
    }
}

forwarded!(Avx512Vnni);

impl Avx512Vnni {
    computed! {
        pub(crate) zero() -> __m512i { _mm512_setzero_si512() }
        pub(crate) add_whole(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        /* Adds four products each of unsigned and signed bytes; what does not fit 32 bits wraps. */
        pub(crate) accumulate(sum: __m512i, raised: __m512i, signed: __m512i) -> __m512i {
            _mm512_dpbusd_epi32(sum, raised, signed)
        }
        /* What two digits' sums stand for together. */
        pub(crate) join(high: __m512i, low: __m512i) -> __m512i {
            _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low)
        }
        /* Four rows of bytes as lanes of one byte of each row: block b of vector v holds the columns 16 b + 4 v onwards. */
        pub(crate) interleave(rows: [__m512i; 4]) -> [__m512i; 4] { {
            let [a, b, c, d] = rows;
            let (low_ab, high_ab) = (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b));
            let (low_cd, high_cd) = (_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d));
            [
                _mm512_unpacklo_epi16(low_ab, low_cd),
                _mm512_unpackhi_epi16(low_ab, low_cd),
                _mm512_unpacklo_epi16(high_ab, high_cd),
                _mm512_unpackhi_epi16(high_ab, high_cd),
            ]
        } }
    }

    /// Block b of vector v is block v of vector b.
    #[inline(always)]
    pub(crate) fn transpose_blocks_of_bytes(self, vectors: [__m512i; 4]) -> [__m512i; 4] {
        use super::Simd;
        // SAFETY: a value of this type exists only where the instructions do; these change the type alone.
        unsafe {
            let vectors = vectors.map(|vector| _mm512_castsi512_ps(vector));
            self.transpose_blocks(vectors).map(|vector| _mm512_castps_si512(vector))
        }
    }

    /// Lane i of vector v is lane v of vector i.
    #[inline(always)]
    pub(crate) fn transpose(self, rows: [__m512i; 16]) -> [__m512i; 16] {
        let mut pairs = [self.zero(); 16];
        let mut fours = pairs;
        let mut result = pairs;
        // SAFETY: a value of this type exists only where the instructions do.
        unsafe {
            for i in (0..16).step_by(2) {
                pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
                pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
            }
            for i in (0..16).step_by(4) {
                fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
                fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
                fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
                fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
            }
        }
        // Block b of vector 4 q + j holds lane 4 b + j of the rows 4 q onwards.
        for j in 0..4 {
            let blocks = [fours[j], fours[4 + j], fours[8 + j], fours[12 + j]];
            for (block, vector) in self.transpose_blocks_of_bytes(blocks).into_iter().enumerate() {
                result[4 * block + j] = vector;
            }
        }
        result
    }

    /// 64 bytes of a row from byte `first` on, 128 larger and so unsigned; those beyond `count` become 128.
    ///
    /// # Safety
    /// The bytes `first..first + min(count, 64)` of the row can be read.
    #[inline(always)]
    pub(crate) unsafe fn load_raised(self, row: *const u8, first: usize, count: usize) -> __m512i {
        let mask = if count >= 64 { u64::MAX } else { (1 << count) - 1 };
        // SAFETY: the instructions exist; only the bytes that exist are read.
        unsafe {
            let bytes = _mm512_maskz_loadu_epi8(mask, row.wrapping_add(first).cast());
            _mm512_xor_si512(bytes, _mm512_set1_epi8(i8::MIN))
        }
    }

    /// 16 numbers of a row of bf16 from number `first` on; only `count` of them exist, the others become 0.
    ///
    /// # Safety
    /// The numbers `first..first + min(count, 16)` of the row can be read.
    #[inline(always)]
    pub(crate) unsafe fn load_brains(self, row: *const u8, first: usize, count: usize) -> __m512 {
        // SAFETY: the same contract.
        unsafe { self.0.load_values::<crate::element::Brain>(row, first, count) }
    }
}
