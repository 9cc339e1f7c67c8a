//! `plan`: what the next step computes, and for whom there is room.
//!
//! 1. Sequences with one token left to compute, the oldest first: each gets a block if it needs one, if need be by
//!    preempting younger ones.
//!    Then drafts for those that were proposed some.
//! 2. Chunks of the prompts that run already.
//! 3. Waiting sequences, the oldest first, each with all its blocks or not at all; none in a step that preempted.

use std::cell::Cell;

use hashbrown::HashSet;

use super::AdmissionPolicy;
use super::buffers::{StepArrays, TableSync};
use super::ranks::Relief;
use super::sequence::SeqIndex;
use super::speculation::write_draft_samples;
use super::step::{Announced, Placed, Plan, Scheduled, Step};
use super::{Scheduler, sequence::Sequence};
use crate::error::{Error, Result};
use crate::policy::admission::Admission;
use crate::policy::chunk::chunk;
use crate::policy::forecast::{Growth, peak_blocks};
use crate::policy::order::QueueOrder;
use crate::policy::victim::{Candidate, victim};
use crate::prefix::Probe;
use crate::table::BlockCopy;
use crate::units::{BlockId, RequestId, Row};

/// Waiting sequences that are looked at in one step.
const MAX_CANDIDATES: usize = 32;

impl Scheduler {
    /// Decides the next step and writes it into `arrays`. Returns none if there is nothing to compute.
    ///
    /// `sync` belongs to `arrays`: it remembers what stands in the block tables there. `now` is the time in seconds, on the
    /// clock of the deadlines; it never goes back.
    ///
    /// # Errors
    /// [`Error::StepInFlight`], [`Error::ArrayLength`], [`Error::InvalidRequest`]; nothing was changed.
    pub fn plan(&mut self, arrays: &StepArrays<'_>, sync: &mut TableSync, now: f64) -> Result<Option<Plan>> {
        if self.in_flight {
            return Err(Error::StepInFlight { plan: self.step.id });
        }
        if !(0.0..f64::INFINITY).contains(&now) {
            return Err(Error::request("now", now, "a finite number of seconds, at least 0"));
        }
        arrays.check(&self.config)?;
        sync.claim(&self.identity);
        self.now = self.now.max(now);
        self.expire();
        let mut step = std::mem::take(&mut self.step);
        step.clear(self.next_step);
        self.preempt_lower_ranks(&mut step);
        let preempted = self.schedule_decodes(&mut step)?;
        self.add_drafts(&mut step);
        self.schedule_prefills(&mut step);
        if !preempted {
            self.admit_waiting(&mut step)?;
        }
        self.write(&step, arrays, sync);
        let plan = step.plan();
        self.step = step;
        if plan.num_batch_rows == 0 {
            return self.nothing_to_run();
        }
        self.next_step += 1;
        self.in_flight = true;
        self.totals.steps += 1;
        self.record_peak();
        Ok(Some(plan))
    }

    fn nothing_to_run(&self) -> Result<Option<Plan>> {
        if self.running.is_empty() && self.waiting.is_empty() {
            return Ok(None);
        }
        let detail = format!("{} run, {} wait, and none can go on", self.running.len(), self.waiting.len());
        Err(Error::broken("I9 progress", detail))
    }

    /// Returns whether somebody was preempted.
    fn schedule_decodes(&mut self, step: &mut Step) -> Result<bool> {
        let before = self.totals.preemptions;
        let mut place = 0;
        while place < self.running.len() && step.num_tokens < self.config.max_num_batched_tokens {
            let index = self.running[place];
            if !self.sequences[index].decodes() {
                place += 1;
            } else if self.make_writable(step, place)? {
                self.schedule(step, index, 1);
                place += 1;
            }
        }
        step.num_decodes = step.rows.len();
        Ok(self.totals.preemptions > before)
    }

    fn schedule_prefills(&mut self, step: &mut Step) {
        for place in 0..self.running.len() {
            let index = self.running[place];
            let sequence = &self.sequences[index];
            if !sequence.decodes() {
                let num_tokens = self.chunk_for(step, sequence);
                self.schedule_prefill(step, index, num_tokens);
            }
        }
    }

    /// Starts waiting sequences in order. One that does not fit may be passed by those behind it, a bounded number of
    /// times.
    fn admit_waiting(&mut self, step: &mut Step) -> Result<()> {
        while self.queue_changed && step.num_tokens < self.config.max_num_batched_tokens {
            // Looked at again when something has changed; that some of these start is a change.
            self.queue_changed = false;
            for index in self.candidates() {
                if step.num_tokens < self.config.max_num_batched_tokens && self.admit(step, index)? {
                    self.queue_changed = true;
                    self.pass_waiting(index);
                    let num_tokens = self.chunk_for(step, &self.sequences[index]);
                    self.schedule_prefill(step, index, num_tokens);
                } else if self.must_not_be_passed() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// The sequences that may start in this step, in the order in which they are tried.
    fn candidates(&mut self) -> Vec<SeqIndex> {
        let mut candidates: Vec<SeqIndex> = self.waiting.values().take(MAX_CANDIDATES).copied().collect();
        if self.config.queue_order == QueueOrder::LongestPrefix && !self.must_not_be_passed() {
            candidates.sort_by_cached_key(|&index| std::cmp::Reverse(self.probe(index).hits));
        }
        candidates
    }

    /// Whether the first of the waiting was passed as often as may be.
    fn must_not_be_passed(&self) -> bool {
        let first = self.waiting.values().next();
        first.is_some_and(|&index| self.sequences[index].passed >= self.config.max_passes)
    }

    /// Counts that a sequence has started before those that wait and come before it.
    fn pass_waiting(&mut self, started: SeqIndex) {
        let key = self.sequences[started].key;
        for &index in self.waiting.range(..key).map(|(_, index)| index) {
            self.sequences[index].passed += 1;
        }
    }

    fn chunk_for(&self, step: &Step, sequence: &Sequence) -> usize {
        let budget = self.config.max_num_batched_tokens - step.num_tokens;
        chunk(sequence.num_uncomputed(), budget.min(self.config.max_chunk_tokens))
    }

    /// Sees to it that the block of a sequence's next token is there and its own. Returns whether it is: if not, the
    /// sequence itself had to give way.
    fn make_writable(&mut self, step: &mut Step, place: usize) -> Result<bool> {
        loop {
            match self.try_make_writable(step, self.running[place]) {
                Ok(()) => return Ok(true),
                Err(Error::OutOfBlocks { .. }) => {}
                Err(error) => return Err(error),
            }
            let chosen = self.choose_victim(place);
            let index = self.running.remove(chosen);
            self.preempt(step, index);
            if chosen == place {
                return Ok(false);
            }
        }
    }

    fn try_make_writable(&mut self, step: &mut Step, index: SeqIndex) -> Result<()> {
        let sequence = &mut self.sequences[index];
        let block = sequence.num_computed / self.block_size.tokens();
        if block == sequence.table.len() {
            return self.cache.extend(&mut sequence.table, 1);
        }
        if !sequence.table.is_writable(block) {
            let copy = self.cache.copy_on_write(&mut sequence.table, block)?;
            step.copies.push(copy);
            step.copied_for.push(index);
            self.next_epoch += 1;
            sequence.epoch = self.next_epoch;
        }
        Ok(())
    }

    /// Who gives way to the sequence at `place`: one of those that are younger, or itself if there is none.
    fn choose_victim(&self, place: usize) -> usize {
        let younger = (place + 1..self.running.len())
            .map(|place| Candidate { place, lost_tokens: self.sequences[self.running[place]].num_computed });
        victim(younger).map_or(place, |candidate| candidate.place)
    }

    /// Gives a waiting sequence all its blocks and its rows, or nothing.
    fn admit(&mut self, step: &mut Step, index: SeqIndex) -> Result<bool> {
        if !self.fits(index, Relief::default()) {
            return Ok(false);
        }
        // Nothing below can fail: between the probe and here nobody else takes blocks.
        self.start(step, index)?;
        Ok(true)
    }

    /// Whether a waiting sequence may start, if so much is given back first.
    pub(super) fn fits(&mut self, index: SeqIndex, relief: Relief) -> bool {
        let sequence = &self.sequences[index];
        if sequence.num_samples > self.free_rows.len() + relief.rows {
            return false;
        }
        let num_blocks = self.block_size.blocks_for(sequence.tokens.len());
        let mut probe = self.probe(index);
        probe.idle_hits += relief.hits;
        let admission = Admission {
            new_blocks: num_blocks - probe.hits,
            idle_hits: probe.idle_hits,
            available: self.cache.available() + relief.blocks,
            watermark: self.config.watermark_blocks(),
            alone: self.running.len() == relief.sequences,
        };
        admission.fits() && self.forecast_fits(index, probe, relief)
    }

    /// The published blocks that a sequence would share.
    pub(super) fn hits(&self, index: SeqIndex) -> HashSet<BlockId> {
        let sequence = &self.sequences[index];
        self.cache.path(sequence.scope, &sequence.tokens, self.max_hits(sequence)).collect()
    }

    fn probe(&mut self, index: SeqIndex) -> Probe {
        let sequence = &self.sequences[index];
        self.cache.probe(sequence.scope, &sequence.tokens, self.max_hits(sequence))
    }

    /// Blocks that a sequence may share at most. Its last token is always computed: its logits are wanted.
    fn max_hits(&self, sequence: &Sequence) -> usize {
        if sequence.reuse_cached { self.block_size.full_blocks(sequence.tokens.len() - 1) } else { 0 }
    }

    /// Whether the worst moment to come fits the pool with one more sequence running. Alone, a sequence always fits.
    fn forecast_fits(&mut self, index: SeqIndex, probe: Probe, relief: Relief) -> bool {
        let num_running = self.running.len() - relief.sequences;
        if self.config.admission == AdmissionPolicy::Watermark || num_running == 0 {
            return true;
        }
        let mut growths = std::mem::take(&mut self.growths);
        growths.clear();
        let mut own = 0;
        for &running in &self.running[..num_running] {
            let sequence = &self.sequences[running];
            own += sequence.table.len() - sequence.shared_blocks;
            self.push_growths(&mut growths, sequence, sequence.shared_blocks);
        }
        self.push_growths(&mut growths, &self.sequences[index], probe.hits);
        let counts = self.cache.counts();
        let base = (counts.active + probe.idle_hits).saturating_sub(relief.blocks + own);
        let peak = peak_blocks(base, &mut growths, self.block_size);
        self.growths = growths;
        peak <= counts.total
    }

    /// A sequence's expected growth; samples that are not forked off yet share all that is there.
    fn push_growths(&self, growths: &mut Vec<Growth>, sequence: &Sequence, shared_blocks: usize) {
        let num_tokens = sequence.tokens.len();
        let room = sequence.max_len - sequence.prompt_len;
        let end = sequence.prompt_len + self.outputs.expected(sequence.max_tokens, room);
        // Who has outlived the estimate is taken to go on for another block.
        let remaining = if end > num_tokens { end - num_tokens } else { self.block_size.tokens() };
        let growth =
            Growth { num_tokens, shared_blocks, remaining: remaining.min(sequence.max_len - num_tokens) };
        growths.push(growth);
        let full = self.block_size.full_blocks(num_tokens);
        growths.extend((1..sequence.num_samples).map(|_| Growth { shared_blocks: full, ..growth }));
    }

    fn start(&mut self, step: &mut Step, index: SeqIndex) -> Result<()> {
        let key = self.sequences[index].key;
        self.dequeue(key);
        self.virtual_time.advance(key.rank);
        let epoch = self.new_epoch();
        let max_hits = self.max_hits(&self.sequences[index]);
        let sequence = &mut self.sequences[index];
        let num_blocks = self.block_size.blocks_for(sequence.tokens.len());
        let (mut table, cursor) = self.cache.share(sequence.scope, &sequence.tokens, max_hits);
        self.cache.extend(&mut table, num_blocks - cursor.published)?;
        let cached = cursor.published * self.block_size.tokens();
        (sequence.table, sequence.cursor, sequence.epoch) = (table, cursor, epoch);
        (sequence.num_computed, sequence.num_planned) = (cached, cached);
        sequence.shared_blocks = sequence.cursor.published;
        self.swap_in(step, index);
        let sequence = &mut self.sequences[index];
        for child in 0..sequence.num_samples {
            let row = self.free_rows.pop().expect("admission saw enough rows");
            sequence.rows.push(row);
            step.placed.push(Placed { request: key.request, child: key.child + child as u32, row });
        }
        self.forget_deadline(key.request);
        self.count_hits(index, cached);
        self.end_stall(index);
        self.run(index);
        Ok(())
    }

    /// Counts what a request found when it started first; finding its own blocks again is no hit.
    fn count_hits(&mut self, index: SeqIndex, cached: usize) {
        let sequence = &mut self.sequences[index];
        if std::mem::replace(&mut sequence.started_before, true) {
            return;
        }
        if sequence.reuse_cached {
            self.totals.queried_tokens += sequence.tokens.len() as u64;
        }
        self.totals.hit_tokens += cached as u64;
        if let Some(request) = self.requests.get_mut(&sequence.key.request) {
            request.summary.cached_tokens = cached;
        }
    }

    /// A request that has started has kept its deadline.
    fn forget_deadline(&mut self, request: RequestId) {
        if let Some(entry) = self.requests.get_mut(&request)
            && let Some(deadline) = entry.deadline.take()
        {
            self.deadlines.remove(&(deadline, request));
        }
    }

    fn end_stall(&mut self, index: SeqIndex) {
        let sequence = &mut self.sequences[index];
        sequence.passed = 0;
        if let Some(since) = sequence.stalled_since.take()
            && let Some(request) = self.requests.get_mut(&sequence.key.request)
        {
            request.summary.stalled_seconds += self.now - since;
        }
    }

    fn schedule(&mut self, step: &mut Step, index: SeqIndex, num_tokens: usize) {
        let sequence = &mut self.sequences[index];
        sequence.num_planned = sequence.num_computed + num_tokens;
        let num_samples =
            if sequence.num_planned == sequence.tokens.len() { sequence.num_samples } else { 0 };
        step.push(Scheduled { sequence: index, start: sequence.num_computed, num_tokens, num_samples });
    }

    fn schedule_prefill(&mut self, step: &mut Step, index: SeqIndex, num_tokens: usize) {
        if num_tokens == 0 {
            return;
        }
        let batch_row = step.rows.len();
        self.schedule(step, index, num_tokens);
        if self.config.enable_prefix_caching {
            let sequence = &self.sequences[index];
            let Sequence { table, cursor, scope, tokens, num_planned, .. } = sequence;
            let announced = |block| step.announced.push(Announced { block, batch_row });
            self.cache.announce(table, *cursor, *scope, tokens, *num_planned, announced);
        }
    }

    fn write(&self, step: &Step, arrays: &StepArrays<'_>, sync: &mut TableSync) {
        let mut token = 0;
        let mut sample = 0;
        arrays.query_starts[0].set(0);
        for (batch_row, scheduled) in step.rows.iter().enumerate() {
            let sequence = &self.sequences[scheduled.sequence];
            write_tokens(arrays, token, sequence, scheduled, self.block_size.tokens());
            token += scheduled.num_tokens;
            arrays.query_starts[batch_row + 1].set(token as i32);
            arrays.seq_lens[batch_row].set(sequence.num_planned as i32);
            arrays.table_rows[batch_row].set(sequence.row().get() as i32);
            self.write_table(arrays, sequence, sync);
            if sequence.num_drafts > 0 {
                let first = token - scheduled.num_tokens;
                write_draft_samples(arrays, sample, first, sequence.row(), scheduled);
                sample += scheduled.num_samples;
                continue;
            }
            for row in &sequence.rows[..scheduled.num_samples] {
                write_sample(arrays, sample, token - 1, *row, sequence.tokens.len());
                sample += 1;
            }
        }
        write_copies(&step.swap_outs, arrays.swap_out_pairs);
        write_copies(&step.swap_ins, arrays.swap_in_pairs);
        write_copies(&step.copies, arrays.copy_pairs);
        write_placed(step, arrays);
        if let Some(lists) = arrays.page_lists {
            lists.write(step, &self.sequences, self.block_size, &mut sync.pages);
        }
    }

    fn write_table(&self, arrays: &StepArrays<'_>, sequence: &Sequence, sync: &mut TableSync) {
        let blocks = sequence.table.blocks();
        let row = sequence.row().index();
        let lasting = sequence.num_lasting_blocks(self.block_size);
        let start = sync.advance(row, sequence.epoch, lasting);
        if start == blocks.len() {
            return;
        }
        let columns = self.config.max_blocks_per_seq();
        let line = &arrays.block_tables[row * columns..(row + 1) * columns];
        line[start..].iter().zip(&blocks[start..]).for_each(|(cell, block)| cell.set(block.get() as i32));
    }
}

fn write_tokens(
    arrays: &StepArrays<'_>,
    first: usize,
    sequence: &Sequence,
    scheduled: &Scheduled,
    block_size: usize,
) {
    let end = scheduled.start + scheduled.num_tokens;
    let mut base = 0;
    for (place, position) in (first..).zip(scheduled.start..end) {
        let offset = position % block_size;
        if offset == 0 || position == scheduled.start {
            base = block_start(sequence.table.blocks()[position / block_size], block_size);
        }
        arrays.token_ids[place].set(i64::from(sequence.tokens[position]));
        arrays.positions[place].set(position as i64);
        arrays.slot_mapping[place].set(base + offset as i64);
    }
}

fn block_start(block: BlockId, block_size: usize) -> i64 {
    (block.index() * block_size) as i64
}

fn write_sample(arrays: &StepArrays<'_>, sample: usize, token: usize, row: Row, position: usize) {
    arrays.sample_indices[sample].set(token as i64);
    arrays.sample_rows[sample].set(row.get() as i32);
    arrays.sample_positions[sample].set(position as i64);
}

fn write_copies(copies: &[BlockCopy], pairs: &[Cell<i64>]) {
    for (copy, pair) in copies.iter().zip(pairs.chunks_exact(2)) {
        set_pair(pair, i64::from(copy.source.get()), i64::from(copy.target.get()));
    }
}

fn set_pair(pair: &[Cell<i64>], source: i64, target: i64) {
    pair[0].set(source);
    pair[1].set(target);
}

fn write_placed(step: &Step, arrays: &StepArrays<'_>) {
    for (index, placed) in step.placed.iter().enumerate() {
        arrays.placed_requests[index].set(placed.request.get() as i64);
        arrays.placed_children[index].set(placed.child as i32);
        arrays.placed_rows[index].set(placed.row.get() as i32);
    }
}
