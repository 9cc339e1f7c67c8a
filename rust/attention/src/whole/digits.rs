//! Singles as whole numbers of two digits times a step.
//!
//! A packed row is, for each 64 numbers, their 64 high and their 64 low digits, a byte each: a number is
//! `step * (256 * high + low)`. Behind them come the step and the whole numbers' sum times 128.

use std::arch::x86_64::*;

use crate::SPAN;
use crate::simd::Simd;
use crate::simd::avx512_vnni::Avx512Vnni;
use crate::softmax::{MOST_VECTORS, PackWeights};
use crate::view::Format;

/// The largest magnitude of a whole number: both digits are 127.
pub(crate) const MOST: i32 = 127 * 256 + 127;

/// Numbers whose digits lie together.
pub(super) const CHUNK: usize = 64;

/// The bytes of such a chunk: its high digits, then its low ones.
pub(super) const CHUNK_BYTES: usize = 2 * CHUNK;

/// Words behind the digits, of which two are used. So rows are whole cache lines.
const TAIL_WORDS: usize = 16;

/// Words of a packed row of `count` numbers.
pub(crate) fn packed_words(count: usize) -> usize {
    count.div_ceil(CHUNK) * CHUNK_BYTES / 4 + TAIL_WORDS
}

/// What the digits of a packed row of `count` numbers are times, and what must be taken from their products' sums.
///
/// # Safety
/// The row can be read.
#[inline(always)]
pub(super) unsafe fn tail(row: *const u32, count: usize) -> (f32, i32) {
    // SAFETY: both words lie in the row.
    unsafe {
        let tail = row.add(packed_words(count) - TAIL_WORDS);
        (f32::from_bits(*tail), *tail.add(1) as i32)
    }
}

/// How singles of one row become whole: they are multiplied and rounded to the nearest.
///
/// The step of a row with an infinity or a NaN is no number, so no whole number times it is one.
#[derive(Clone, Copy)]
struct Rounding {
    factor: __m512,
    step: f32,
}

/// Rows are rounded as if they had a number of this size: smaller ones would need a factor that no single holds.
const LEAST: f32 = 1.0 / (1u128 << 110) as f32;

impl Rounding {
    #[inline(always)]
    fn new(unit: Avx512Vnni, magnitudes: impl Iterator<Item = __m512>) -> Rounding {
        // SAFETY: a value of the unit's type exists only where the instructions do.
        let largest = unsafe {
            // The bits of positive numbers are in their order, NaN above all.
            let no_sign = _mm512_set1_epi32(i32::MAX);
            let mut largest = _mm512_castps_si512(unit.splat(LEAST));
            for numbers in magnitudes {
                largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(numbers), no_sign));
            }
            f32::from_bits(_mm512_reduce_max_epi32(largest) as u32)
        };
        let most = MOST as f32;
        let step = if largest.is_finite() { largest / most } else { f32::NAN };
        Rounding { factor: unit.splat(most / largest), step }
    }

    /// Writes the digits of a chunk, and returns sums of its whole numbers.
    ///
    /// # Safety
    /// [`CHUNK_BYTES`] can be written at `to`.
    #[inline(always)]
    unsafe fn pack_chunk(&self, unit: Avx512Vnni, numbers: [__m512; 4], to: *mut u8) -> __m512i {
        // SAFETY: the instructions exist, and the digits can be written.
        unsafe {
            let [a, b, c, d] = numbers;
            let whole = |numbers| _mm512_cvtps_epi32(unit.mul(numbers, self.factor));
            let [ab, cd] = [_mm512_packs_epi32(whole(a), whole(b)), _mm512_packs_epi32(whole(c), whole(d))];
            // A low digit of 128 or more counts as negative: the high one makes up for it.
            let high = |whole| _mm512_srai_epi16::<8>(_mm512_add_epi16(whole, _mm512_set1_epi16(128)));
            let low = |whole| _mm512_and_si512(whole, _mm512_set1_epi16(255));
            let high = _mm512_packs_epi16(high(ab), high(cd));
            let low = _mm512_packus_epi16(low(ab), low(cd));
            // Packed are four numbers of each vector in turn.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi32(order, high));
            _mm512_storeu_si512(to.add(CHUNK).cast(), _mm512_permutexvar_epi32(order, low));
            let ones = _mm512_set1_epi16(1);
            _mm512_add_epi32(_mm512_madd_epi16(ab, ones), _mm512_madd_epi16(cd, ones))
        }
    }

    /// Writes what comes behind the digits, and returns the sum of the rounded numbers.
    ///
    /// # Safety
    /// The words can be written.
    #[inline(always)]
    unsafe fn pack_tail(&self, sums: __m512i, tail: *mut u32) -> f32 {
        // SAFETY: the instruction exists, and by this function's contract.
        unsafe {
            let sum = _mm512_reduce_add_epi32(sums);
            tail.write(self.step.to_bits());
            tail.add(1).write((sum as u32).wrapping_mul(128));
            sum as f32 * self.step
        }
    }
}

/// Packs a query, which is of bf16.
///
/// # Safety
/// The row can be read for `head_dim` numbers, and `to` written for as many words as [`packed_words`] says.
#[inline(always)]
pub(crate) unsafe fn pack_query(
    unit: Avx512Vnni,
    row: *const u8,
    format: Format,
    head_dim: usize,
    to: *mut u32,
) {
    debug_assert_eq!(format, Format::Bf16);
    let load = |first: usize| {
        // SAFETY: only numbers of the row are read.
        unsafe { unit.load_brains(row, first, head_dim.saturating_sub(first)) }
    };
    let rounding = Rounding::new(unit, (0..head_dim).step_by(Avx512Vnni::LANES).map(load));
    let mut sums = unit.zero();
    // SAFETY: the chunks and the tail lie in the packed row.
    unsafe {
        for (chunk, first) in (0..head_dim).step_by(CHUNK).enumerate() {
            let numbers = [load(first), load(first + 16), load(first + 32), load(first + 48)];
            let to = to.cast::<u8>().add(chunk * CHUNK_BYTES);
            sums = unit.add_whole(sums, rounding.pack_chunk(unit, numbers, to));
        }
        rounding.pack_tail(sums, to.add(packed_words(head_dim) - TAIL_WORDS));
    }
}

impl PackWeights for Avx512Vnni {
    #[inline(always)]
    unsafe fn pack_weights(self, to: *mut u32, weights: &[__m512; MOST_VECTORS]) -> f32 {
        let [a, b, c, d, ..] = *weights;
        let rounding = Rounding::new(self, [a, b, c, d].into_iter());
        // SAFETY: the chunk and the tail lie in the packed row.
        unsafe {
            let sums = rounding.pack_chunk(self, [a, b, c, d], to.cast());
            rounding.pack_tail(sums, to.add(packed_words(SPAN) - TAIL_WORDS))
        }
    }
}

// A span's weights are one chunk.
const _: () = assert!(SPAN == CHUNK);
