//! The spans of one segment: scores, weights and sums, left to right.

use std::ops::Range;

use super::scratch::{Scratch, SpanRows};
use super::span;
use super::unit::UnitRun;
use crate::ahead::{Ahead, Load};
use crate::gather::Gather;
use crate::kernels::ManyRows;
use crate::plan::Unit;
use crate::product::Product;
use crate::score::Score;
use crate::softmax::Softmax;
use crate::sum::{MOST_ROWS, Sum};
use crate::view::Scales;
use crate::{SEGMENT, SPAN};

/// One KV head of one span of a unit.
struct Place<'a> {
    unit: &'a Unit,
    /// The span's first position.
    start: usize,
    kv_head: usize,
    /// The first of the unit's rows of this head.
    first_row: usize,
}

/// Tokens in a row of which each sees the same positions of a span.
struct Run {
    /// Their rows in the scratch.
    first_row: usize,
    num_rows: usize,
    /// What they see, relative to the span.
    seen: Range<usize>,
}

impl UnitRun<'_> {
    /// Reduces one segment into the scratch's segment results. `rows` are for its own use.
    ///
    /// # Safety
    /// The call's views are valid.
    pub(super) unsafe fn reduce_segment(
        &self,
        unit: &Unit,
        segment: usize,
        next: Option<&Unit>,
        scratch: &mut Scratch,
        rows: &mut SpanRows,
    ) {
        let end = ((segment + 1) * SEGMENT).min(unit.seen.end);
        let mut start = (segment * SEGMENT).max(unit.seen.start / SPAN * SPAN);
        while start < end {
            self.look_ahead(unit, start + SPAN, next, &mut scratch.ahead);
            let heads = unit.kv_heads.len();
            let load = if self.copies_values(unit).is_some() {
                Load::ManyRows
            } else {
                Load::of_few_rows(scratch.ahead.num_lines(), self.call.key_cache.format.bytes())
            };
            for (index, kv_head) in unit.kv_heads.clone().enumerate() {
                scratch.ahead.begin(index, heads, load);
                let first_row = index * unit.tokens.len() * self.shape.group();
                // SAFETY: the same contract.
                unsafe { self.reduce_span(&Place { unit, start, kv_head, first_row }, scratch, rows) };
            }
            // SAFETY: the views are valid, and what is ahead lies in them.
            unsafe { scratch.ahead.read_rest() };
            start += SPAN;
        }
    }

    /// Lists the memory of the span at `start`, or of the first one of the next unit if this one has no more.
    fn look_ahead(&self, unit: &Unit, start: usize, next: Option<&Unit>, ahead: &mut Ahead) {
        ahead.clear();
        let caches = [&self.call.key_cache, &self.call.value_cache];
        let scales = &self.call.scales;
        if start < unit.seen.end.min(unit.segments.end * SEGMENT) {
            span::look_ahead(unit, &self.plan.blocks, caches, scales, start, ahead);
        } else if let Some(next) = next {
            let start = (next.segments.start * SEGMENT).max(next.seen.start / SPAN * SPAN);
            span::look_ahead(next, &self.plan.blocks, caches, scales, start, ahead);
        }
    }

    /// # Safety
    /// The call's views are valid.
    unsafe fn reduce_span(&self, place: &Place, scratch: &mut Scratch, rows: &mut SpanRows) {
        self.find_rows(place, scratch.zero_row(), rows);
        // SAFETY: the scratch memory has the sizes of the geometry, and the rows are readable.
        unsafe {
            self.read_scales(place, scratch);
            self.score(place, rows, scratch);
            self.for_each_run(place, |run| self.weigh(&run, scratch));
            let Some(many_rows) = self.copies_values(place.unit) else {
                return self.for_each_run(place, |run| self.sum_in_place(&run, rows, scratch));
            };
            let values = Gather {
                rows: &rows.values,
                head_dim: self.geometry.head_dim_v,
                to: scratch.values.floats(),
                stride: self.geometry.value_words,
            };
            (many_rows.gather_values)(&values, &mut scratch.ahead);
            let read = span::read_positions(place.unit, place.start);
            let read = read.start - place.start..read.end - place.start;
            self.for_each_run(place, |run| self.sum(many_rows, &run, &read, scratch));
        }
    }

    /// Finds the rows of a place; those of a whole span are as far from the rows of the KV head before.
    fn find_rows(&self, place: &Place, zero_row: *const u8, rows: &mut SpanRows) {
        let caches = [&self.call.key_cache, &self.call.value_cache];
        let is_first = place.kv_head == place.unit.kv_heads.start;
        if is_first || span::read_positions(place.unit, place.start).len() < SPAN {
            span::find_rows(
                place.unit,
                &self.plan.blocks,
                caches,
                place.start,
                place.kv_head,
                zero_row,
                rows,
            );
        } else {
            let [keys, values] = caches;
            rows.shift(keys.strides[1], values.strides[1]);
        }
    }

    /// Calls `visit` for each run of tokens that see some of the span.
    fn for_each_run(&self, place: &Place, mut visit: impl FnMut(Run)) {
        let (tokens, group) = (self.tokens(place.unit), self.shape.group());
        let seen = |index: usize| span::seen_positions(&tokens[index], place.start, self.shape);
        let mut first = 0;
        while first < tokens.len() {
            let range = seen(first);
            let mut end = first + 1;
            while end < tokens.len() && seen(end) == range {
                end += 1;
            }
            if !range.is_empty() {
                let first_row = place.first_row + first * group;
                visit(Run { first_row, num_rows: (end - first) * group, seen: range });
            }
            first = end;
        }
    }

    /// # Safety
    /// The scales of the unit's blocks can be read.
    unsafe fn read_scales(&self, place: &Place, scratch: &mut Scratch) {
        if let Scales::Token(scales) = &self.call.scales {
            let to = [scratch.key_scales.as_floats(), scratch.value_scales.as_floats()];
            // SAFETY: by this function's contract.
            unsafe {
                span::read_scales(
                    place.unit,
                    &self.plan.blocks,
                    self.shape.block_size,
                    place.start,
                    place.kv_head,
                    scales,
                    to,
                )
            }
        }
    }

    /// Scores the rows from the first to the last one that sees some of the span.
    ///
    /// # Safety
    /// The rows are readable.
    unsafe fn score(&self, place: &Place, rows: &SpanRows, scratch: &mut Scratch) {
        let mut seeing = 0..0;
        self.for_each_run(place, |run| {
            let first = if seeing.is_empty() { run.first_row } else { seeing.start };
            seeing = first..run.first_row + run.num_rows;
        });
        if seeing.is_empty() {
            return;
        }
        // SAFETY: the scratch memory has these rows, and the sizes of the geometry.
        unsafe {
            (self.kernels.score)(
                &Score {
                    rows: &rows.keys,
                    head_dim: self.geometry.head_dim_k,
                    keys: scratch.keys.floats(),
                    queries: scratch.queries.words().add(seeing.start * self.geometry.query_words),
                    queries_stride: self.geometry.query_words,
                    scores: scratch.scores.floats().add(seeing.start * SPAN),
                    num_rows: seeing.len(),
                },
                &mut scratch.ahead,
            );
        }
    }

    /// Turns the scores of a run's rows into weights.
    ///
    /// # Safety
    /// The rows are scored.
    unsafe fn weigh(&self, run: &Run, scratch: &mut Scratch) {
        let (row, num_rows) = (run.first_row, run.num_rows);
        let has_scales = matches!(self.call.scales, Scales::Token(_));
        let scale = match self.call.scales {
            Scales::Tensor { key, .. } => self.call.options.scale * key,
            _ => self.call.options.scale,
        };
        let scales = |buffer: *const f32| if has_scales { buffer } else { std::ptr::null() };
        // SAFETY: the scratch memory has these rows, and the sizes of the geometry.
        unsafe {
            (self.kernels.soften)(
                &Softmax {
                    scores: scratch.scores.floats().add(row * SPAN),
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
                },
                &mut scratch.ahead,
            );
        }
    }

    /// Adds the weighted values of the span to a run's sums. Only the values that the run sees are multiplied.
    ///
    /// # Safety
    /// The values are gathered, and the run's rows weighed.
    unsafe fn sum(&self, many_rows: ManyRows, run: &Run, read: &Range<usize>, scratch: &mut Scratch) {
        let values = self.kernels.values;
        let mut seen = run.seen.clone();
        let mut factors = scratch.factors.floats();
        // A lane of two positions of which only one is seen: the other one's value must not be multiplied, even by 0.
        if !seen.start.is_multiple_of(values) && read.contains(&(seen.start - 1)) {
            // SAFETY: the position lies in the span.
            unsafe { self.sum_half(many_rows, run, seen.start, factors, scratch) };
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
                self.add_steps(many_rows, run, steps, right, factors, scratch);
            }
            factors = scratch.ones.floats();
        }
        if is_cut {
            // SAFETY: the position lies in the span.
            unsafe { self.sum_half(many_rows, run, end, factors, scratch) };
        }
    }

    /// The kernels for many rows, unless the values are not worth a copy: they are read once, by one token.
    fn copies_values(&self, unit: &Unit) -> Option<ManyRows> {
        let are_many = unit.tokens.len() > 1 || self.shape.group() > MOST_ROWS;
        self.kernels.many_rows.filter(|_| are_many)
    }

    /// Adds the weighted values of the span to a run's sums, from where the values are.
    ///
    /// # Safety
    /// The rows are readable, and the run's rows weighed.
    unsafe fn sum_in_place(&self, run: &Run, rows: &SpanRows, scratch: &mut Scratch) {
        let values = self.kernels.values;
        // SAFETY: the scratch memory has these rows, and the sizes of the geometry.
        unsafe {
            (self.kernels.sum)(
                &Sum {
                    rows: &rows.values,
                    head_dim: self.geometry.head_dim_v,
                    weights: scratch.weights.words().add(run.first_row * self.geometry.weight_words),
                    sums: scratch.segment.sums.floats().add(run.first_row * self.geometry.sums_words),
                    sums_stride: self.geometry.sums_words,
                    factors: scratch.factors.floats().add(run.first_row),
                    num_rows: run.num_rows,
                    first_step: run.seen.start / values,
                    end_step: run.seen.end.div_ceil(values),
                },
                &mut scratch.ahead,
            );
        }
    }

    /// Adds the one position that is seen of a lane of two.
    ///
    /// # Safety
    /// As for [`UnitRun::sum`].
    unsafe fn sum_half(
        &self,
        many_rows: ManyRows,
        run: &Run,
        position: usize,
        factors: *const f32,
        scratch: &mut Scratch,
    ) {
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
            self.add_steps(many_rows, run, step..step + 1, to.cast(), factors, scratch);
        }
    }

    /// # Safety
    /// `right` holds a line of values for each step, and the run's rows have weights for them.
    unsafe fn add_steps(
        &self,
        many_rows: ManyRows,
        run: &Run,
        steps: Range<usize>,
        right: *const f32,
        factors: *const f32,
        scratch: &mut Scratch,
    ) {
        let (row, num_rows) = (run.first_row, run.num_rows);
        // SAFETY: the scratch memory has these rows, and the sizes of the geometry.
        unsafe {
            (many_rows.multiply)(
                &Product {
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
                },
                &mut scratch.ahead,
            );
        }
    }
}
