//! One span's step of the online softmax: from scores to weights, a new maximum and a new sum.

use crate::SPAN;
use crate::ahead::{Ahead, Stage};
use crate::simd::{self, Arithmetic};

/// Rows of one span that see the same positions.
pub(crate) struct Softmax {
    /// `[num_rows][SPAN]` plain products of query and key.
    pub(crate) scores: *const f32,
    /// `[num_rows][SPAN / VALUES]` lanes: the weights, 0 where a position is not seen.
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
const MOST_VECTORS: usize = SPAN / 8;

/// Turns the scores of each row into weights.
///
/// # Safety
/// The job's pointers are valid for the sizes that it names, and overlap nowhere.
#[inline(always)]
pub(crate) unsafe fn soften<A: Arithmetic>(arithmetic: A, job: &Softmax, ahead: &mut Ahead) {
    ahead.enter(Stage::Weights, job.num_rows);
    for row in 0..job.num_rows {
        ahead.ask(arithmetic);
        // SAFETY: the row exists.
        unsafe {
            if job.first == 0 && job.end == SPAN {
                soften_row::<A, false>(arithmetic, job, row);
            } else {
                soften_row::<A, true>(arithmetic, job, row);
            }
        }
    }
}

/// Turns the scores of one row into weights. Unless `CUT`, the row sees the whole span.
///
/// # Safety
/// As for [`soften`]; the row exists.
#[inline(always)]
unsafe fn soften_row<A: Arithmetic, const CUT: bool>(arithmetic: A, job: &Softmax, row: usize) {
    let mut scores = [arithmetic.splat(0.0); MOST_VECTORS];
    // SAFETY: the row has an entry in each of the job's arrays, and `SPAN` scores and weights.
    unsafe {
        let largest = finish_scores::<A, CUT>(arithmetic, job, job.scores.add(row * SPAN), &mut scores);
        let old = *job.maxima.add(row);
        // Mostly no score is above the maximum: then nothing is scaled, and the lanes need not be compared.
        let (new, factor) = if arithmetic.exceeds(largest, old) {
            let new = old.max(arithmetic.maximum(largest));
            (new, arithmetic.lane0(simd::exp2(arithmetic, arithmetic.splat(old - new))))
        } else {
            (old, 1.0)
        };
        // Scores of minus infinity weigh nothing, also where there was no other yet.
        let zero = if new == f32::NEG_INFINITY { 0.0 } else { new };
        let weights = job.weights.add(row * job.weights_stride);
        let total = weigh::<A, CUT>(arithmetic, job, &scores, weights, zero);
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
unsafe fn finish_scores<A: Arithmetic, const CUT: bool>(
    arithmetic: A,
    job: &Softmax,
    products: *const f32,
    scores: &mut [A::Floats; MOST_VECTORS],
) -> A::Floats {
    let (inner, outer) = if job.softcap > 0.0 {
        (job.scale / job.softcap, job.softcap * std::f32::consts::LOG2_E)
    } else {
        (job.scale * std::f32::consts::LOG2_E, 1.0)
    };
    let mut largest = arithmetic.splat(f32::NEG_INFINITY);
    for (place, score) in scores.iter_mut().enumerate().take(SPAN / A::LANES) {
        let position = place * A::LANES;
        // SAFETY: the vector lies in the span.
        unsafe {
            *score = arithmetic.mul(arithmetic.load(products.add(position)), arithmetic.splat(inner));
            if !job.key_scales.is_null() {
                *score = arithmetic.mul(*score, arithmetic.load(job.key_scales.add(position)));
            }
        }
        if job.softcap > 0.0 {
            *score = arithmetic.mul(simd::tanh(arithmetic, *score), arithmetic.splat(outer));
        }
        *score = keep_seen::<A, CUT>(arithmetic, job, position, *score, f32::NEG_INFINITY);
        largest = arithmetic.max(*score, largest);
    }
    largest
}

/// Writes the weights of one row of scores, powers of two of what they are above `zero`, and returns their sum.
///
/// # Safety
/// The job's value scales can be read, and `SPAN / VALUES` words of weights written.
#[inline(always)]
unsafe fn weigh<A: Arithmetic, const CUT: bool>(
    arithmetic: A,
    job: &Softmax,
    scores: &[A::Floats; MOST_VECTORS],
    weights: *mut u32,
    zero: f32,
) -> f32 {
    let mut total = arithmetic.splat(0.0);
    for (place, score) in scores.iter().enumerate().take(SPAN / A::LANES) {
        let position = place * A::LANES;
        let weight = simd::exp2(arithmetic, arithmetic.sub(*score, arithmetic.splat(zero)));
        let seen = keep_seen::<A, CUT>(arithmetic, job, position, weight, 0.0);
        // SAFETY: the vector lies in the span.
        let counted = unsafe {
            if job.value_scales.is_null() {
                arithmetic.store_weights(weights, position, seen)
            } else {
                // A scale that is not seen may be no number: it must not be multiplied, even by 0.
                let scales = arithmetic.load(job.value_scales.add(position));
                let scaled = arithmetic.mul(weight, scales);
                let scaled = keep_seen::<A, CUT>(arithmetic, job, position, scaled, 0.0);
                arithmetic.store_weights(weights, position, scaled);
                seen
            }
        };
        total = arithmetic.add(total, counted);
    }
    arithmetic.sum(total)
}

/// `numbers` of the positions from `position` on, `fill` where a position is not seen. Unless `CUT`, all are.
#[inline(always)]
fn keep_seen<A: Arithmetic, const CUT: bool>(
    arithmetic: A,
    job: &Softmax,
    position: usize,
    numbers: A::Floats,
    fill: f32,
) -> A::Floats {
    if !CUT {
        return numbers;
    }
    let (first, end) = (job.first as i32 - position as i32, job.end as i32 - position as i32);
    arithmetic.keep(numbers, first, end, fill)
}
