//! The spans of one segment: scores, weights and sums, left to right.

use std::ops::Range;

use super::scratch::{Scratch, SpanRows};
use super::span;
use super::unit::UnitRun;
use crate::gather::Gather;
use crate::plan::Unit;
use crate::product::Product;
use crate::softmax::Softmax;
use crate::view::Scales;
use crate::{SEGMENT, SPAN};

/// Tokens in a row of which each sees the same positions of a span.
struct Run {
    tokens: Range<usize>,
    seen: Range<usize>,
}

impl UnitRun<'_> {
    /// Reduces one segment into the scratch's segment results. `rows` are those of the unit's next span.
    ///
    /// # Safety
    /// The call's views are valid.
    pub(super) unsafe fn reduce_segment(
        &self,
        unit: &Unit,
        segment: usize,
        scratch: &mut Scratch,
        rows: &mut SpanRows,
    ) {
        let end = ((segment + 1) * SEGMENT).min(unit.seen.end);
        let mut start = (segment * SEGMENT).max(unit.seen.start / SPAN * SPAN);
        while start < end {
            let mut next_rows = SpanRows::none(scratch.zero_row());
            if start + SPAN < unit.seen.end.min(unit.segments.end * SEGMENT) {
                self.find_rows(unit, start + SPAN, &mut next_rows);
            }
            // SAFETY: the same contract; the rows are those of this span.
            unsafe { self.reduce_span(unit, start, scratch, rows, &next_rows) };
            *rows = next_rows;
            start += SPAN;
        }
    }

    /// Finds the rows of the unit's first span.
    pub(super) fn find_first_rows(&self, unit: &Unit, rows: &mut SpanRows) {
        let start = (unit.segments.start * SEGMENT).max(unit.seen.start / SPAN * SPAN);
        self.find_rows(unit, start, rows);
    }

    fn find_rows(&self, unit: &Unit, start: usize, rows: &mut SpanRows) {
        let caches = [&self.call.key_cache, &self.call.value_cache];
        span::find_rows(unit, &self.plan.blocks, caches, start, rows);
    }

    /// # Safety
    /// The call's views are valid, and `rows` those of the span.
    unsafe fn reduce_span(
        &self,
        unit: &Unit,
        start: usize,
        scratch: &mut Scratch,
        rows: &SpanRows,
        next_rows: &SpanRows,
    ) {
        // SAFETY: the scratch memory has the sizes of the geometry, and the rows are readable.
        unsafe {
            self.read_scales(unit, start, scratch);
            (self.kernels.gather_keys)(&Gather {
                rows: &rows.keys,
                next_rows: &next_rows.keys,
                head_dim: self.geometry.head_dim_k,
                to: scratch.keys.floats(),
                stride: SPAN,
            });
            self.for_each_run(unit, start, |run| self.weigh(&run, scratch));
            (self.kernels.gather_values)(&Gather {
                rows: &rows.values,
                next_rows: &next_rows.values,
                head_dim: self.geometry.head_dim_v,
                to: scratch.values.floats(),
                stride: self.geometry.value_words,
            });
            let read = span::read_positions(unit, start);
            let read = read.start - start..read.end - start;
            self.for_each_run(unit, start, |run| self.sum(&run, &read, scratch));
        }
    }

    /// Calls `visit` for each run of tokens that see some of the span.
    fn for_each_run(&self, unit: &Unit, start: usize, mut visit: impl FnMut(Run)) {
        let tokens = self.tokens(unit);
        let seen = |index: usize| span::seen_positions(&tokens[index], start, self.shape);
        let mut first = 0;
        while first < tokens.len() {
            let range = seen(first);
            let mut end = first + 1;
            while end < tokens.len() && seen(end) == range {
                end += 1;
            }
            if !range.is_empty() {
                visit(Run { tokens: first..end, seen: range });
            }
            first = end;
        }
    }

    /// # Safety
    /// The scales of the unit's blocks can be read.
    unsafe fn read_scales(&self, unit: &Unit, start: usize, scratch: &mut Scratch) {
        if let Scales::Token(scales) = &self.call.scales {
            let to = [scratch.key_scales.as_floats(), scratch.value_scales.as_floats()];
            // SAFETY: by this function's contract.
            unsafe { span::read_scales(unit, &self.plan.blocks, self.shape.block_size, start, scales, to) }
        }
    }

    /// Scores a run's rows and turns the scores into weights.
    ///
    /// # Safety
    /// The keys are gathered.
    unsafe fn weigh(&self, run: &Run, scratch: &mut Scratch) {
        let (row, num_rows) = self.rows_of(run);
        let has_scales = matches!(self.call.scales, Scales::Token(_));
        let scale = match self.call.scales {
            Scales::Tensor { key, .. } => self.call.options.scale * key,
            _ => self.call.options.scale,
        };
        let scales = |buffer: *const f32| if has_scales { buffer } else { std::ptr::null() };
        // SAFETY: the scratch memory has these rows, and the sizes of the geometry.
        unsafe {
            let scores = scratch.scores.floats().add(row * SPAN);
            (self.kernels.multiply)(&Product {
                left: scratch.queries.words().add(row * self.geometry.query_words),
                left_stride: self.geometry.query_words,
                right: scratch.keys.floats(),
                right_stride: SPAN,
                sums: scores,
                sums_stride: SPAN,
                factors: std::ptr::null(),
                num_rows,
                num_steps: self.geometry.key_steps(&self.kernels),
                num_columns: SPAN,
            });
            (self.kernels.soften)(&Softmax {
                scores,
                weights: scratch.weights.words().add(row * self.geometry.weight_words),
                weights_stride: self.geometry.weight_words,
                maxima: scratch.segment.maxima.floats().add(row),
                totals: scratch.segment.totals.floats().add(row),
                factors: scratch.factors.floats().add(row),
                num_rows,
                first: run.seen.start,
                end: run.seen.end,
                scale,
                softcap: self.call.options.softcap.unwrap_or(0.0),
                key_scales: scales(scratch.key_scales.floats()),
                value_scales: scales(scratch.value_scales.floats()),
            });
        }
    }

    fn rows_of(&self, run: &Run) -> (usize, usize) {
        let group = self.shape.group();
        (run.tokens.start * group, run.tokens.len() * group)
    }

    /// Adds the weighted values of the span to a run's sums. Only the values that the run sees are multiplied.
    ///
    /// # Safety
    /// The values are gathered, and the run's rows weighed.
    unsafe fn sum(&self, run: &Run, read: &Range<usize>, scratch: &mut Scratch) {
        let values = self.kernels.values;
        let mut seen = run.seen.clone();
        let mut factors = scratch.factors.floats();
        // A lane of two positions of which only one is seen: the other one's value must not be multiplied, even by 0.
        if !seen.start.is_multiple_of(values) && read.contains(&(seen.start - 1)) {
            // SAFETY: the position lies in the span.
            unsafe { self.sum_half(run, seen.start, factors, scratch) };
            factors = scratch.ones.floats();
            seen.start += 1;
        }
        let is_cut = !seen.end.is_multiple_of(values) && read.contains(&seen.end) && !seen.is_empty();
        let end = if is_cut { seen.end - 1 } else { seen.end };
        if seen.start < end {
            let steps = seen.start / values..end.div_ceil(values);
            // SAFETY: the steps lie in the span.
            unsafe {
                let right = scratch.values.floats().add(steps.start * self.geometry.value_words);
                self.add_steps(run, steps, right, factors, scratch);
            }
            factors = scratch.ones.floats();
        }
        if is_cut {
            // SAFETY: the position lies in the span.
            unsafe { self.sum_half(run, end, factors, scratch) };
        }
    }

    /// Adds the one position that is seen of a lane of two.
    ///
    /// # Safety
    /// As for [`UnitRun::sum`].
    unsafe fn sum_half(&self, run: &Run, position: usize, factors: *const f32, scratch: &mut Scratch) {
        let step = position / 2;
        let mask = if position.is_multiple_of(2) { 0x0000_ffff } else { 0xffff_0000 };
        let words = self.geometry.value_words;
        // SAFETY: the step lies in the span, and the edge is as long as a line.
        unsafe {
            let from = scratch.values.words().add(step * words);
            let to = scratch.edge.words();
            for word in 0..words {
                to.add(word).write(from.add(word).read() & mask);
            }
            self.add_steps(run, step..step + 1, to.cast(), factors, scratch);
        }
    }

    /// # Safety
    /// `right` holds a line of values for each step, and the run's rows have weights for them.
    unsafe fn add_steps(
        &self,
        run: &Run,
        steps: Range<usize>,
        right: *const f32,
        factors: *const f32,
        scratch: &mut Scratch,
    ) {
        let (row, num_rows) = self.rows_of(run);
        // SAFETY: the scratch memory has these rows, and the sizes of the geometry.
        unsafe {
            (self.kernels.multiply)(&Product {
                left: scratch.weights.words().add(row * self.geometry.weight_words + steps.start),
                left_stride: self.geometry.weight_words,
                right,
                right_stride: self.geometry.value_words,
                sums: scratch.segment.sums.floats().add(row * self.geometry.sums_words),
                sums_stride: self.geometry.sums_words,
                factors: factors.add(row),
                num_rows,
                num_steps: steps.len(),
                num_columns: self.geometry.head_dim_v,
            });
        }
    }
}
