//! Plain arrays, which the compiler turns into whatever vectors the target has: SSE2, or NEON with its fused
//! multiply-add.

use super::{Arithmetic, Simd};
use crate::element::Element;

const LANES: usize = 8;

/// Runs everywhere.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Portable {
    /// # Safety
    /// None is needed: every machine can.
    pub(crate) unsafe fn assume() -> Portable {
        Portable
    }
}

type Array = [f32; LANES];

#[inline(always)]
fn map(a: Array, f: impl Fn(f32) -> f32) -> Array {
    let mut result = a;
    for value in &mut result {
        *value = f(*value);
    }
    result
}

#[inline(always)]
fn zip(a: Array, b: Array, f: impl Fn(f32, f32) -> f32) -> Array {
    let mut result = a;
    for (value, other) in result.iter_mut().zip(b) {
        *value = f(*value, other);
    }
    result
}

#[inline(always)]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    // Without the instruction a fused multiply-add is a slow library call.
    if cfg!(target_arch = "aarch64") { a.mul_add(b, c) } else { a * b + c }
}

impl Simd for Portable {
    type Floats = Array;
    const LANES: usize = LANES;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    fn splat(self, value: f32) -> Array {
        [value; LANES]
    }

    #[inline(always)]
    fn add(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn multiply_add(self, a: Array, b: Array, c: Array) -> Array {
        let mut result = c;
        for (lane, value) in result.iter_mut().enumerate() {
            *value = multiply_add(a[lane], b[lane], *value);
        }
        result
    }

    #[inline(always)]
    fn max(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Array, b: Array) -> Array {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn split(self, a: Array) -> [Array; 2] {
        const WHOLE: f32 = 12_582_912.0; // 1.5 * 2^23: adding it drops the fraction
        let a = self.min(self.splat(128.0), self.max(self.splat(-150.0), a));
        let whole = map(a, |a| (a + WHOLE) - WHOLE);
        [whole, self.sub(a, whole)]
    }

    #[inline(always)]
    fn scale(self, a: Array, exponent: Array) -> Array {
        zip(a, exponent, |a, exponent| {
            let biased = (exponent as i32 + 127).max(0);
            a * f32::from_bits((biased as u32) << 23)
        })
    }

    #[inline(always)]
    fn keep(self, a: Array, first: i32, end: i32, fill: f32) -> Array {
        let mut result = a;
        for (lane, value) in result.iter_mut().enumerate() {
            let lane = lane as i32;
            *value = if first <= lane && lane < end { *value } else { fill };
        }
        result
    }

    #[inline(always)]
    fn sum(self, a: Array) -> f32 {
        let [a, b, c, d, e, f, g, h] = a;
        ((a + e) + (b + f)) + ((c + g) + (d + h))
    }

    #[inline(always)]
    fn sum_in_blocks(self, vectors: [Array; 4]) -> Array {
        let mut result = [0.0; LANES];
        for (lane, sum) in result.iter_mut().enumerate() {
            let block = &vectors[lane % 4][lane / 4 * 4..];
            *sum = (block[0] + block[2]) + (block[1] + block[3]);
        }
        result
    }

    #[inline(always)]
    fn transpose_blocks(self, vectors: [Array; 4]) -> [Array; 4] {
        let [mut a, mut b, c, d] = vectors;
        a[4..].swap_with_slice(&mut b[..4]);
        [a, b, c, d]
    }

    #[inline(always)]
    fn exceeds(self, a: Array, bound: f32) -> bool {
        a.iter().fold(false, |exceeds, lane| exceeds | (*lane > bound))
    }

    #[inline(always)]
    fn lane0(self, a: Array) -> f32 {
        a[0]
    }

    #[inline(always)]
    fn maximum(self, a: Array) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Array {
        // SAFETY: by this function's contract; arrays are read unaligned.
        unsafe { from.cast::<Array>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn repeat(self, from: *const f32) -> Array {
        // SAFETY: by this function's contract; the array is read unaligned.
        let [a, b, c, d] = unsafe { from.cast::<[f32; 4]>().read_unaligned() };
        [a, b, c, d, a, b, c, d]
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: Array) {
        // SAFETY: by this function's contract; arrays are written unaligned.
        unsafe { to.cast::<Array>().write_unaligned(a) }
    }

    #[inline(always)]
    fn prefetch(self, _address: *const u8) {}
}

impl Portable {
    /// `LANES` values of a row from value `first` on; only `count` of them exist, the others become 0.
    ///
    /// # Safety
    /// The values `first..first + min(count, LANES)` of the row can be read.
    #[inline(always)]
    unsafe fn load_values<E: Element>(self, row: *const u8, first: usize, count: usize) -> Array {
        let mut result = [0.0; LANES];
        for (lane, value) in result.iter_mut().enumerate().take(count) {
            // SAFETY: value `first + lane` of the row exists, as lane < count.
            *value = unsafe { E::read(row.add((first + lane) * E::FORMAT.bytes())) };
        }
        result
    }
}

impl Arithmetic for Portable {
    const VALUES: usize = 1;
    type Chunk = [Array; 1];

    #[inline(always)]
    fn accumulate(self, sum: Array, lanes: Array, other: Array) -> Array {
        self.multiply_add(lanes, other, sum)
    }

    #[inline(always)]
    unsafe fn load_two<E: Element>(self, rows: *const *const u8, first: usize, count: usize) -> [Array; 2] {
        // SAFETY: two row pointers can be read, and their values.
        unsafe {
            [self.load_values::<E>(*rows, first, count), self.load_values::<E>(*rows.add(1), first, count)]
        }
    }

    #[inline(always)]
    unsafe fn load_step<E: Element>(self, rows: *const *const u8, first: usize, count: usize) -> [Array; 1] {
        // SAFETY: one row pointer can be read, and its values.
        unsafe { [self.load_values::<E>(*rows, first, count)] }
    }

    #[inline(always)]
    unsafe fn store_weights(self, to: *mut u32, first: usize, weights: Array) -> Array {
        // SAFETY: `LANES` words from `first` on can be written.
        unsafe { self.store(to.add(first).cast(), weights) }
        weights
    }
}
