//! One span's step of the online softmax: from scores to weights, a new maximum and a new sum.

use crate::SPAN;
use crate::ahead::{Ahead, Stage};
use crate::simd::{self, Arithmetic};

/// Rows of one span that see the same positions.
pub(crate) struct Softmax {
    /// `[num_rows][SPAN]` plain products of query and key; overwritten.
    pub(crate) scores: *mut f32,
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
            let scores = job.scores.add(row * SPAN);
            let old = *job.maxima.add(row);
            let new = old.max(finish_scores(arithmetic, job, scores));
            let factor = simd::exp2(arithmetic, arithmetic.splat(old - new));
            let factor = arithmetic.lane0(factor);
            let total = weigh(arithmetic, job, scores, job.weights.add(row * job.weights_stride), new);
            *job.maxima.add(row) = new;
            *job.factors.add(row) = factor;
            *job.totals.add(row) = *job.totals.add(row) * factor + total;
        }
    }
}

/// Scales, bends and masks one row of scores, and returns the largest.
///
/// # Safety
/// `SPAN` scores can be read and written, and the job's key scales read.
#[inline(always)]
unsafe fn finish_scores<A: Arithmetic>(arithmetic: A, job: &Softmax, scores: *mut f32) -> f32 {
    let (inner, outer) = if job.softcap > 0.0 {
        (job.scale / job.softcap, job.softcap * std::f32::consts::LOG2_E)
    } else {
        (job.scale * std::f32::consts::LOG2_E, 1.0)
    };
    let mut largest = arithmetic.splat(f32::NEG_INFINITY);
    for position in (0..SPAN).step_by(A::LANES) {
        // SAFETY: the vector lies in the span.
        unsafe {
            let mut score = arithmetic.mul(arithmetic.load(scores.add(position)), arithmetic.splat(inner));
            if !job.key_scales.is_null() {
                score = arithmetic.mul(score, arithmetic.load(job.key_scales.add(position)));
            }
            if job.softcap > 0.0 {
                score = arithmetic.mul(simd::tanh(arithmetic, score), arithmetic.splat(outer));
            }
            let (first, end) = (job.first as i32 - position as i32, job.end as i32 - position as i32);
            score = arithmetic.keep(score, first, end, f32::NEG_INFINITY);
            arithmetic.store(scores.add(position), score);
            largest = arithmetic.max(score, largest);
        }
    }
    arithmetic.maximum(largest)
}

/// Writes the weights of one row of scores, and returns their sum.
///
/// # Safety
/// `SPAN` scores and the job's value scales can be read, and `SPAN / VALUES` words of weights written.
#[inline(always)]
unsafe fn weigh<A: Arithmetic>(
    arithmetic: A,
    job: &Softmax,
    scores: *const f32,
    weights: *mut u32,
    maximum: f32,
) -> f32 {
    let mut total = arithmetic.splat(0.0);
    for position in (0..SPAN).step_by(A::LANES) {
        // SAFETY: the vector lies in the span.
        unsafe {
            let score = arithmetic.load(scores.add(position));
            let weight = simd::exp2(arithmetic, arithmetic.sub(score, arithmetic.splat(maximum)));
            let (first, end) = (job.first as i32 - position as i32, job.end as i32 - position as i32);
            let weight = arithmetic.keep(weight, first, end, 0.0);
            let counted = if job.value_scales.is_null() {
                arithmetic.store_weights(weights, position, weight)
            } else {
                let scales = arithmetic.load(job.value_scales.add(position));
                arithmetic.store_weights(weights, position, arithmetic.mul(weight, scales));
                weight
            };
            total = arithmetic.add(total, counted);
        }
    }
    arithmetic.sum(total)
}
