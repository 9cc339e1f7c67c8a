//! What the kernels ask of a vector unit. Each unit is a token type: a value of it exists only where the unit does.

pub(crate) mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512_vnni;
#[cfg(test)]
mod tests;

use crate::element::Element;

/// Lanes that some operations treat together.
pub(crate) const BLOCK: usize = 4;

/// Operations on vectors of `LANES` singles.
pub(crate) trait Simd: Copy {
    /// A vector.
    type Floats: Copy;
    /// How many singles it holds; divides [`SPAN`](crate::SPAN).
    const LANES: usize;
    /// How many vectors wide a register tile of the matrix product is.
    const TILE_VECTORS: usize;

    fn splat(self, value: f32) -> Self::Floats;
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`, fused where the unit can.
    fn multiply_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// The larger; `b` where one is NaN.
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The smaller; `b` where one is NaN.
    fn min(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The whole number that `a` is nearest to, and the rest. Below -150 and above 128 it may be that of the bound:
    /// `scale` gives 0 and infinity there.
    fn split(self, a: Self::Floats) -> [Self::Floats; 2];
    /// `a * 2^exponent` for exponents from `split`.
    fn scale(self, a: Self::Floats, exponent: Self::Floats) -> Self::Floats;
    /// Lanes `first..end` of `a`, `fill` elsewhere; the bounds may lie outside the vector.
    fn keep(self, a: Self::Floats, first: i32, end: i32, fill: f32) -> Self::Floats;
    /// The sum of the lanes, in a fixed order.
    fn sum(self, a: Self::Floats) -> f32;
    /// Lane 0.
    fn lane0(self, a: Self::Floats) -> f32;
    /// The largest lane.
    fn maximum(self, a: Self::Floats) -> f32;
    /// Lane j of each block of four is the sum of that block of vector j.
    fn sum_in_blocks(self, vectors: [Self::Floats; 4]) -> Self::Floats;
    /// Block b of vector v is block v of vector b; vectors beyond the number of blocks are left as they are.
    fn transpose_blocks(self, vectors: [Self::Floats; 4]) -> [Self::Floats; 4];
    /// Whether any lane is above the bound.
    fn exceeds(self, a: Self::Floats, bound: f32) -> bool;

    /// # Safety
    /// `LANES` singles can be read at `from`.
    unsafe fn load(self, from: *const f32) -> Self::Floats;
    /// Every block of four lanes holds the four singles at `from`.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn repeat(self, from: *const f32) -> Self::Floats;
    /// # Safety
    /// `LANES` singles can be written at `to`.
    unsafe fn store(self, to: *mut f32, a: Self::Floats);
    /// Asks for the cache line at `address`, which need not exist.
    fn prefetch(self, address: *const u8);
}

/// How the kernels multiply: which values a 32-bit lane holds, and how two lanes are multiplied and summed.
pub(crate) trait Arithmetic: Simd {
    /// Values in a lane: one single, or two neighbours in bf16.
    const VALUES: usize;
    /// `VALUES` vectors.
    type Chunk: Copy + AsRef<[Self::Floats]>;

    /// `sum + lanes · other`, lane by lane.
    fn accumulate(self, sum: Self::Floats, lanes: Self::Floats, other: Self::Floats) -> Self::Floats;

    /// `LANES * VALUES` values of each of two rows from value `first` on; only `count` of them exist, the others
    /// become 0.
    ///
    /// # Safety
    /// Two row pointers can be read at `rows`, and of each row the values `first..first + min(count, LANES * VALUES)`.
    unsafe fn load_two<E: Element>(
        self,
        rows: *const *const u8,
        first: usize,
        count: usize,
    ) -> [Self::Floats; 2];

    /// One step of values: lane i holds value `first + i` of each of `VALUES` rows, for `LANES * VALUES` lanes.
    ///
    /// # Safety
    /// `VALUES` row pointers can be read at `rows`, and their values as `load_two` asks.
    unsafe fn load_step<E: Element>(self, rows: *const *const u8, first: usize, count: usize) -> Self::Chunk;

    /// Writes the weights of `LANES` positions as packed values, the first at position `first` of `to`, and
    /// returns them as they were rounded.
    ///
    /// # Safety
    /// The words that hold these positions can be written.
    unsafe fn store_weights(self, to: *mut u32, first: usize, weights: Self::Floats) -> Self::Floats;
}

/// `2^x` for x up to 127, at most 2 in the last place off; infinite somewhere above 127, and 0 below -150. What is
/// too small to be a normal number may be 0.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(simd: S, x: S::Floats) -> S::Floats {
    let [whole, part] = simd.split(x);
    simd.scale(simd.multiply_add(growth(simd, part), part, simd.splat(1.0)), whole)
}

/// `(2^x - 1) / x` for x from -0.5 to 0.5.
#[inline(always)]
fn growth<S: Simd>(simd: S, x: S::Floats) -> S::Floats {
    const COEFFICIENTS: [f32; 6] =
        [1.534_581_1e-4, 1.339_993_1e-3, 9.618_489e-3, 5.550_328_6e-2, 2.402_264_6e-1, 6.931_472e-1];
    let mut growth = simd.splat(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        growth = simd.multiply_add(growth, x, simd.splat(*coefficient));
    }
    growth
}

/// The hyperbolic tangent, off by at most 1e-6 of itself.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(simd: S, x: S::Floats) -> S::Floats {
    // Beyond 16 it is 1 in singles. Less than that, e^2x - 1 is formed without taking nearly all of it away again.
    let x = simd.min(simd.splat(16.0), simd.max(simd.splat(-16.0), x));
    let [whole, part] = simd.split(simd.mul(x, simd.splat(2.0 * std::f32::consts::LOG2_E)));
    let one = simd.splat(1.0);
    let rest = simd.scale(simd.mul(growth(simd, part), part), whole);
    let square = simd.add(rest, simd.sub(simd.scale(one, whole), one));
    simd.div(square, simd.add(square, simd.splat(2.0)))
}
