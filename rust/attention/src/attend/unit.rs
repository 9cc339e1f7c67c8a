//! One unit of a call: packs its queries, reduces its segments, and writes or keeps the results.

use super::AttentionCall;
use super::part_at;
use super::scratch::{Geometry, Scratch, SpanRows};
use crate::buffer::Buffer;
use crate::kernels::Kernels;
use crate::merge::Part;
use crate::plan::{Plan, PlanShape, Token, Unit};
use crate::view::Scales;

/// What all units of a call share.
///
/// Its unsafe methods need the call's views to be valid, and the partial results to belong to this call alone.
pub(super) struct UnitRun<'a> {
    pub(super) call: &'a AttentionCall<'a>,
    pub(super) plan: &'a Plan,
    pub(super) shape: &'a PlanShape,
    pub(super) kernels: Kernels,
    pub(super) geometry: Geometry,
    partials: Partials,
}

/// Where results are kept that other units' are merged with.
struct Partials(*mut f32);

// SAFETY: threads reach disjoint parts of the memory, as their units and merges differ.
unsafe impl Sync for Partials {}

impl<'a> UnitRun<'a> {
    pub(super) fn new(
        call: &'a AttentionCall<'a>,
        plan: &'a Plan,
        shape: &'a PlanShape,
        kernels: Kernels,
        partials: &mut Buffer,
    ) -> UnitRun<'a> {
        let number_bytes = call.key_cache.format.bytes();
        let geometry = Geometry::new(call.query.head_dim, call.out.head_dim, number_bytes, &kernels);
        partials.reserve(plan.num_partials * shape.num_heads * geometry.partial_words());
        UnitRun { call, plan, shape, kernels, geometry, partials: Partials(partials.floats()) }
    }

    /// Computes a unit: writes its rows' outputs, or keeps their results if other units have the rest. Asks for the
    /// memory of the unit that comes `next`.
    ///
    /// # Safety
    /// No other thread has this unit.
    pub(super) unsafe fn compute(&self, unit: &Unit, next: Option<&Unit>, scratch: &mut Scratch) {
        let num_rows = self.num_rows(unit);
        scratch.reserve(num_rows, &self.geometry);
        scratch.whole.clear(num_rows);
        // SAFETY: the plan's tokens lie in the query.
        unsafe { self.pack_queries(unit, scratch) };
        let keeps_each = self.keeps_each_segment(unit);
        let mut rows = SpanRows::none(scratch.zero_row());
        for segment in unit.segments.clone() {
            scratch.segment.clear(num_rows);
            // SAFETY: the same contract.
            unsafe { self.reduce_segment(unit, segment, next, scratch, &mut rows) };
            if keeps_each {
                // SAFETY: the unit's rows have this segment from no other unit.
                unsafe { self.keep_segment(unit, segment, scratch) };
            } else {
                scratch.fold_segment(num_rows);
            }
        }
        if self.tokens(unit)[0].num_partials == 0 {
            // SAFETY: these rows are this unit's alone.
            unsafe { self.write_rows(unit, scratch) };
        } else if !keeps_each {
            // SAFETY: the unit's rows have these segments from no other unit.
            unsafe { self.keep_folded(unit, scratch) };
        }
    }

    /// The query heads times the tokens.
    fn num_rows(&self, unit: &Unit) -> usize {
        unit.tokens.len() * self.shape.group() * unit.kv_heads.len()
    }

    pub(super) fn tokens(&self, unit: &Unit) -> &[Token] {
        &self.plan.tokens[unit.tokens.clone()]
    }

    /// Whether other units have earlier segments of the unit's rows: then nothing may be merged here.
    fn keeps_each_segment(&self, unit: &Unit) -> bool {
        let first = self.tokens(unit).iter().map(|token| token.first_segment).min();
        first != Some(unit.segments.start)
    }

    /// Packs the unit's queries as the kernels want them.
    ///
    /// # Safety
    /// The plan's tokens lie in the query.
    unsafe fn pack_queries(&self, unit: &Unit, scratch: &mut Scratch) {
        let query = &self.call.query;
        let to = scratch.queries.words();
        for (row, token, head) in self.rows(unit) {
            // SAFETY: the row lies in the query; `reserve` made room for every row.
            unsafe {
                let to = to.add(row * self.geometry.query_words);
                to.write_bytes(0, self.geometry.query_words);
                (self.kernels.pack_query)(query.row(token.index, head), query.format, query.head_dim, to);
            }
        }
    }

    /// Keeps the rows' results of one segment.
    ///
    /// # Safety
    /// The unit's rows have this segment from no other unit.
    unsafe fn keep_segment(&self, unit: &Unit, segment: usize, scratch: &mut Scratch) {
        for (row, token, head) in self.rows(unit) {
            // SAFETY: by this function's contract.
            if let Some(mut kept) = unsafe { self.partial_of(token, segment, head) } {
                kept.copy(&scratch.segment.part(row));
            }
        }
    }

    /// Keeps the rows' folded results as those of the unit's first segment, and nothing for the others.
    ///
    /// # Safety
    /// The unit's rows have these segments from no other unit.
    unsafe fn keep_folded(&self, unit: &Unit, scratch: &mut Scratch) {
        for (row, token, head) in self.rows(unit) {
            let mut part = scratch.whole.part(row);
            for segment in unit.segments.clone() {
                // SAFETY: by this function's contract.
                if let Some(mut kept) = unsafe { self.partial_of(token, segment, head) } {
                    kept.copy(&part);
                    part.clear();
                }
            }
        }
    }

    /// The unit's rows: each one's place in the scratch, its token and its query head.
    fn rows<'b>(&'b self, unit: &'b Unit) -> impl Iterator<Item = (usize, &'b Token, usize)> {
        let (group, num_tokens) = (self.shape.group(), unit.tokens.len());
        unit.kv_heads.clone().flat_map(move |kv_head| {
            let first_row = (kv_head - unit.kv_heads.start) * num_tokens * group;
            self.tokens(unit).iter().enumerate().flat_map(move |(index, token)| {
                let first_row = first_row + index * group;
                (0..group).map(move |head| (first_row + head, token, kv_head * group + head))
            })
        })
    }

    /// Merges the results of one token and KV head left to right, and writes its rows.
    ///
    /// # Safety
    /// All units are done, and no other thread has this merge.
    pub(super) unsafe fn merge(&self, merge: usize, scratch: &mut Scratch) {
        let token = &self.plan.tokens[self.plan.merges[merge / self.shape.num_kv_heads]];
        let group = self.shape.group();
        scratch.reserve(1, &self.geometry);
        for head in (merge % self.shape.num_kv_heads) * group..(merge % self.shape.num_kv_heads + 1) * group {
            let mut whole = scratch.whole.part(0);
            whole.clear();
            for place in token.first_partial..token.first_partial + token.num_partials {
                // SAFETY: the units that wrote the result are done.
                let part = unsafe { self.partial(place, head) };
                whole.merge(&part);
            }
            // SAFETY: this row is this merge's alone.
            unsafe { self.write_row(token, head, &mut whole) };
        }
    }

    /// # Safety
    /// These rows are this unit's alone.
    unsafe fn write_rows(&self, unit: &Unit, scratch: &mut Scratch) {
        for (row, token, head) in self.rows(unit) {
            // SAFETY: by this function's contract.
            unsafe { self.write_row(token, head, &mut scratch.whole.part(row)) };
        }
    }

    /// # Safety
    /// No other thread writes this row.
    unsafe fn write_row(&self, token: &Token, head: usize, part: &mut Part) {
        if let Some(sinks) = self.call.options.sinks {
            part.add_sink(sinks[head]);
        }
        let value_scale = match self.call.scales {
            Scales::Tensor { value, .. } => value,
            _ => 1.0,
        };
        let out = &self.call.out;
        // SAFETY: the row lies in the output, and the entry in the log-sum-exps.
        unsafe {
            part.write_mean(out.head_dim, value_scale, out.format, out.row(token.index, head));
            if let Some(view) = self.call.log_sum_exp {
                view.entry(token.index, head).write_unaligned(part.log_sum_exp());
            }
        }
    }

    /// The kept result of a token's segment, if it sees the segment.
    ///
    /// # Safety
    /// No one else uses it for as long as this part lives.
    unsafe fn partial_of(&self, token: &Token, segment: usize, head: usize) -> Option<Part<'_>> {
        let offset =
            segment.checked_sub(token.first_segment).filter(|&offset| offset < token.num_partials)?;
        // SAFETY: by this function's contract.
        Some(unsafe { self.partial(token.first_partial + offset, head) })
    }

    /// A kept result.
    ///
    /// # Safety
    /// No one else uses it for as long as this part lives.
    unsafe fn partial(&self, place: usize, head: usize) -> Part<'_> {
        let words = self.geometry.partial_words();
        // SAFETY: `new` made room for each place and head.
        unsafe {
            let address = self.partials.0.add((place * self.shape.num_heads + head) * words);
            part_at(address, self.geometry.sums_words)
        }
    }
}
