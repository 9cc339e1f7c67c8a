//! One span's step of the online softmax: from scores to weights, a new maximum and a new sum.

use crate::SPAN;
use crate::ahead::{Ahead, Stage};
use crate::simd::{self, Arithmetic, Simd};

/// Rows of one span that see the same positions.
pub(crate) struct Softmax {
    /// `[num_rows][SPAN]` plain products of query and key.
    pub(crate) scores: *const f32,
    /// `[num_rows]` packed rows of `SPAN` weights, 0 where a position is not seen.
    pub(crate) weights: *mut u32,
    /// The distance between two rows of `weights`, in words.
    pub(crate) weights_stride: usize,
    /// Each row's largest score so far, in powers of two; minus infinity at first.
    pub(crate) maxima: *mut f32,
    /// Each row's sum of weights so far.
    pub(crate) totals: *mut f32,
    /// By which each row's earlier sums must be multiplied now.
    pub(crate) factors: *mut f32,
    pub(crate) num_rows: usize,
    /// The positions that the rows see, relative to the span.
    pub(crate) first: usize,
    pub(crate) end: usize,
    /// Turns a product into a score.
    pub(crate) scale: f32,
    /// The bound of the scores; 0: none.
    pub(crate) softcap: f32,
    /// `[SPAN]` factors of the keys, or null.
    pub(crate) key_scales: *const f32,
    /// `[SPAN]` factors of the values, or null.
    pub(crate) value_scales: *const f32,
}

/// As many vectors as the narrowest unit needs for a span.
pub(crate) const MOST_VECTORS: usize = SPAN / 8;

/// How the products want a row's weights.
pub(crate) trait PackWeights: Simd {
    /// Writes a span's weights, and returns the sum of what they were rounded to. Vectors beyond the span mean nothing.
    ///
    /// # Safety
    /// The words of a packed row can be written at `to`.
    unsafe fn pack_weights(self, to: *mut u32, weights: &[Self::Floats; MOST_VECTORS]) -> f32;
}

impl<A: Arithmetic> PackWeights for A {
    #[inline(always)]
    unsafe fn pack_weights(self, to: *mut u32, weights: &[Self::Floats; MOST_VECTORS]) -> f32 {
        let mut total = self.splat(0.0);
        for (place, weights) in weights.iter().enumerate().take(SPAN / A::LANES) {
            // SAFETY: the vector lies in the span.
            total = self.add(total, unsafe { self.store_weights(to, place * A::LANES, *weights) });
        }
        self.sum(total)
    }
}

/// Turns the scores of each row into weights.
///
/// # Safety
/// The job's pointers are valid for the sizes that it names, and overlap nowhere.
#[inline(always)]
pub(crate) unsafe fn soften<P: PackWeights>(simd: P, job: &Softmax, ahead: &mut Ahead) {
    ahead.enter(Stage::Weights, job.num_rows);
    for row in 0..job.num_rows {
        ahead.ask(simd);
        // SAFETY: the row exists.
        unsafe {
            if job.first == 0 && job.end == SPAN {
                soften_row::<P, false>(simd, job, row);
            } else {
                soften_row::<P, true>(simd, job, row);
            }
        }
    }
}

/// Turns the scores of one row into weights. Unless `CUT`, the row sees the whole span.
///
/// # Safety
/// As for [`soften`]; the row exists.
#[inline(always)]
unsafe fn soften_row<P: PackWeights, const CUT: bool>(simd: P, job: &Softmax, row: usize) {
    let mut scores = [simd.splat(0.0); MOST_VECTORS];
    // SAFETY: the row has an entry in each of the job's arrays, and `SPAN` scores and weights.
    unsafe {
        let largest = finish_scores::<P, CUT>(simd, job, job.scores.add(row * SPAN), &mut scores);
        let old = *job.maxima.add(row);
        // Mostly no score is above the maximum: then nothing is scaled, and the lanes need not be compared.
        let (new, factor) = if simd.exceeds(largest, old) {
            let new = old.max(simd.maximum(largest));
            (new, simd.lane0(simd::exp2(simd, simd.splat(old - new))))
        } else {
            (old, 1.0)
        };
        // Scores of minus infinity weigh nothing, also where there was no other yet.
        let zero = if new == f32::NEG_INFINITY { 0.0 } else { new };
        let weights = job.weights.add(row * job.weights_stride);
        let total = weigh::<P, CUT>(simd, job, &scores, weights, zero);
        *job.maxima.add(row) = new;
        *job.factors.add(row) = factor;
        *job.totals.add(row) = *job.totals.add(row) * factor + total;
    }
}

/// Scales, bends and masks one row of products, and returns the largest score, lane by lane.
///
/// # Safety
/// `SPAN` products can be read, and the job's key scales.
#[inline(always)]
unsafe fn finish_scores<P: PackWeights, const CUT: bool>(
    simd: P,
    job: &Softmax,
    products: *const f32,
    scores: &mut [P::Floats; MOST_VECTORS],
) -> P::Floats {
    let (inner, outer) = if job.softcap > 0.0 {
        (job.scale / job.softcap, job.softcap * std::f32::consts::LOG2_E)
    } else {
        (job.scale * std::f32::consts::LOG2_E, 1.0)
    };
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for (place, score) in scores.iter_mut().enumerate().take(SPAN / P::LANES) {
        let position = place * P::LANES;
        // SAFETY: the vector lies in the span.
        unsafe {
            *score = simd.mul(simd.load(products.add(position)), simd.splat(inner));
            if !job.key_scales.is_null() {
                *score = simd.mul(*score, simd.load(job.key_scales.add(position)));
            }
        }
        if job.softcap > 0.0 {
            *score = simd.mul(simd::tanh(simd, *score), simd.splat(outer));
        }
        *score = keep_seen::<P, CUT>(simd, job, position, *score, f32::NEG_INFINITY);
        largest = simd.max(*score, largest);
    }
    largest
}

/// Writes the weights of one row of scores, powers of two of what they are above `zero`, and returns their sum.
///
/// # Safety
/// The job's value scales can be read, and a packed row of weights written.
#[inline(always)]
unsafe fn weigh<P: PackWeights, const CUT: bool>(
    simd: P,
    job: &Softmax,
    scores: &[P::Floats; MOST_VECTORS],
    weights: *mut u32,
    zero: f32,
) -> f32 {
    let mut packed = [simd.splat(0.0); MOST_VECTORS];
    let mut total = simd.splat(0.0);
    for (place, score) in scores.iter().enumerate().take(SPAN / P::LANES) {
        let position = place * P::LANES;
        let weight = simd::exp2(simd, simd.sub(*score, simd.splat(zero)));
        let seen = keep_seen::<P, CUT>(simd, job, position, weight, 0.0);
        packed[place] = if job.value_scales.is_null() {
            seen
        } else {
            total = simd.add(total, seen);
            // SAFETY: the vector lies in the span.
            let scales = unsafe { simd.load(job.value_scales.add(position)) };
            // A scale that is not seen may be no number: it must not be multiplied, even by 0.
            keep_seen::<P, CUT>(simd, job, position, simd.mul(weight, scales), 0.0)
        };
    }
    // SAFETY: by this function's contract.
    let rounded = unsafe { simd.pack_weights(weights, &packed) };
    if job.value_scales.is_null() { rounded } else { simd.sum(total) }
}

/// `numbers` of the positions from `position` on, `fill` where a position is not seen. Unless `CUT`, all are.
#[inline(always)]
fn keep_seen<P: PackWeights, const CUT: bool>(
    simd: P,
    job: &Softmax,
    position: usize,
    numbers: P::Floats,
    fill: f32,
) -> P::Floats {
    if !CUT {
        return numbers;
    }
    let (first, end) = (job.first as i32 - position as i32, job.end as i32 - position as i32);
    simd.keep(numbers, first, end, fill)
}
