//! `plan`: what the next step computes, and for whom there is room.
//!
//! 1. Sequences with one token left to compute, the oldest first: each gets a block if it needs one, if need be by
//!    preempting younger ones.
//! 2. Chunks of the prompts that run already.
//! 3. Waiting sequences, the oldest first, each with all its blocks or not at all; none in a step that preempted.
//! 4. Drafts behind the decodes that were proposed some, with the budget and the blocks that are left.

use std::cell::Cell;
use std::ops::Range;

use smallvec::SmallVec;

use hashbrown::HashSet;

use super::AdmissionPolicy;
use super::buffers::{StepArrays, TableSync};
use super::ranks::Relief;
use super::sequence::SeqIndex;
use super::speculation::write_draft_samples;
use super::step::{Filled, Placed, Plan, Scheduled, Step};
use super::{Scheduler, sequence::Sequence};
use crate::error::{Error, Result};
use crate::groups::LayerGroup;
use crate::policy::admission::Admission;
use crate::policy::chunk::chunk;
use crate::policy::forecast::{Growth, peak_blocks};
use crate::policy::order::QueueOrder;
use crate::policy::victim::{Candidate, victim};
use crate::prefix::Probe;
use crate::table::{BlockCopy, BlockTable};
use crate::units::{BlockId, BlockSize, RequestId, Row};

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
        arrays.check(&self.config)?;
        self.plan_into(now, |scheduler, step| {
            sync.claim(&scheduler.identity, scheduler.config.groups.len() * scheduler.config.max_num_seqs);
            scheduler.write(step, arrays, sync);
        })
    }

    /// Decides the next step and hands it to `write`, which sees the scheduler as it is then.
    pub(super) fn plan_into(&mut self, now: f64, write: impl FnOnce(&Self, &Step)) -> Result<Option<Plan>> {
        if self.in_flight {
            return Err(Error::StepInFlight { plan: self.step.id });
        }
        if !(0.0..f64::INFINITY).contains(&now) {
            return Err(Error::request("now", now, "a finite number of seconds, at least 0"));
        }
        self.now = self.now.max(now);
        self.expire();
        self.cache.expire(self.now);
        let mut step = std::mem::take(&mut self.step);
        step.clear(self.next_step);
        self.preempt_lower_ranks(&mut step);
        let preempted = self.schedule_decodes(&mut step)?;
        let is_short = self.schedule_prefills(&mut step)?;
        if !preempted && !is_short {
            self.admit_waiting(&mut step)?;
        }
        self.add_drafts(&mut step);
        write(self, &step);
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

    /// Returns whether blocks were too few for somebody's chunk.
    fn schedule_prefills(&mut self, step: &mut Step) -> Result<bool> {
        let mut is_short = false;
        let mut place = 0;
        while place < self.running.len() {
            let index = self.running[place];
            let sequence = &self.sequences[index];
            if !sequence.decodes() {
                let num_tokens = self.chunk_for(step, sequence);
                if self.make_room_for_chunk(step, place, num_tokens)? {
                    self.schedule_prefill(step, index, num_tokens);
                } else {
                    is_short = true;
                }
            }
            place += 1;
        }
        Ok(is_short)
    }

    /// Sees to it that a chunk's blocks are there. A prompt has its blocks from the start where all positions are kept;
    /// where windows let some go, the next ones may have to be taken from younger prompts. Returns whether they are there:
    /// if not, the prompt waits for those that run to end.
    fn make_room_for_chunk(&mut self, step: &mut Step, place: usize, num_tokens: usize) -> Result<bool> {
        let index = self.running[place];
        let end = self.sequences[index].num_computed + num_tokens;
        loop {
            match self.advance_tables(index, end) {
                Ok(()) => return Ok(true),
                Err(Error::OutOfBlocks { .. }) => {}
                Err(error) => return Err(error),
            }
            // Those that decode are part of the step already.
            let younger = (place + 1..self.running.len()).filter(|&place| !self.at(place).decodes());
            let Some(chosen) = self.cheapest(younger) else { return Ok(false) };
            let index = self.running.remove(chosen);
            self.preempt(step, index);
        }
    }

    /// Starts waiting sequences in order. One that does not fit may be passed by those behind it, a bounded number of
    /// times.
    fn admit_waiting(&mut self, step: &mut Step) -> Result<()> {
        while self.queue_changed && step.num_tokens < self.config.max_num_batched_tokens {
            // Looked at again when something has changed; that some of these start is a change.
            self.queue_changed = false;
            let candidates = self.candidates();
            for &index in &candidates {
                if step.num_tokens < self.config.max_num_batched_tokens && self.admit(step, index)? {
                    self.queue_changed = true;
                    self.pass_waiting(index);
                    let num_tokens = self.chunk_for(step, &self.sequences[index]);
                    self.schedule_prefill(step, index, num_tokens);
                } else if self.must_not_be_passed() {
                    break;
                }
            }
            self.candidates = candidates;
        }
        Ok(())
    }

    /// The sequences that may start in this step, in the order in which they are tried.
    fn candidates(&mut self) -> Vec<SeqIndex> {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        candidates.extend(self.waiting.values().take(MAX_CANDIDATES));
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
        let end = self.sequences[index].num_computed + 1;
        self.advance_tables(index, end)?;
        let sequence = &mut self.sequences[index];
        let block = self.block_size.full_blocks(sequence.num_computed);
        for table in &mut sequence.tables {
            if !table.is_writable(block) {
                let copy = self.cache.copy_on_write(table, block)?;
                step.copies.push(copy);
                step.copied_for.push(index);
                self.next_epoch += 1;
                sequence.epoch = self.next_epoch;
            }
        }
        Ok(())
    }

    /// Gives back what left the windows, and takes the blocks of the tokens up to `end`.
    fn advance_tables(&mut self, index: SeqIndex, end: usize) -> Result<()> {
        let given_back = self.leave_windows(index);
        let sequence = &mut self.sequences[index];
        let size = self.block_size;
        for (table, given_back) in sequence.tables.iter_mut().zip(given_back) {
            if given_back == 0 && table.len() * size.tokens() >= end {
                continue;
            }
            let (last, needed) = (size.blocks_for(sequence.tokens.len()), size.blocks_for(end));
            // What was given back is taken again at once, so that a prompt keeps what it was admitted with.
            let wanted = (table.len() + given_back).min(last).max(needed);
            if table.len() < wanted {
                let (most, least) = (wanted - table.len(), needed.saturating_sub(table.len()));
                match self.cache.extend(table, most) {
                    Err(Error::OutOfBlocks { .. }) if least < most => self.cache.extend(table, least)?,
                    result => result?,
                }
            }
        }
        Ok(())
    }

    /// Gives back what left the windows, in all groups before any takes more. Returns how many blocks of each.
    fn leave_windows(&mut self, index: SeqIndex) -> SmallVec<[usize; 8]> {
        let sequence = &mut self.sequences[index];
        let caches = self.config.enable_prefix_caching;
        let most = if caches { self.cache.droppable(sequence.cursor) } else { usize::MAX };
        let give_back = |(table, group): (&mut BlockTable, &LayerGroup)| {
            let first = group.first_block(sequence.num_computed, self.block_size).min(most);
            if first > table.num_dropped() { table.drop_front(first) } else { 0 }
        };
        let given_back: SmallVec<[usize; 8]> =
            sequence.tables.iter_mut().zip(&self.config.groups).map(give_back).collect();
        self.queue_changed |= given_back.iter().any(|&count| count > 0);
        given_back
    }

    /// Who gives way to the sequence at `place`: one of those that are younger, or itself if there is none.
    fn choose_victim(&self, place: usize) -> usize {
        self.cheapest(place + 1..self.running.len()).unwrap_or(place)
    }

    /// The one of some running sequences that costs the least to bring back.
    fn cheapest(&self, places: impl Iterator<Item = usize>) -> Option<usize> {
        let candidate = |place| Candidate { place, lost_tokens: self.at(place).num_computed };
        victim(places.map(candidate)).map(|candidate| candidate.place)
    }

    fn at(&self, place: usize) -> &Sequence {
        &self.sequences[self.running[place]]
    }

    /// Gives a waiting sequence all its blocks and its rows, or nothing.
    fn admit(&mut self, step: &mut Step, index: SeqIndex) -> Result<bool> {
        if !self.fits(index, Relief::default()) && !self.fits_cold(index) {
            return Ok(false);
        }
        // Nothing below can fail: between the probe and here nobody else takes blocks.
        self.start(step, index)?;
        Ok(true)
    }

    /// Whether a sequence that nobody else keeps from starting fits if it shares nothing: a hit of windows can pin more
    /// than the sequence needs.
    fn fits_cold(&mut self, index: SeqIndex) -> bool {
        if !self.running.is_empty() || !self.sequences[index].reuse_cached {
            return false;
        }
        self.sequences[index].reuse_cached = false;
        let fits = self.fits(index, Relief::default());
        self.sequences[index].reuse_cached = !fits;
        fits
    }

    /// Whether a waiting sequence may start, if so much is given back first.
    pub(super) fn fits(&mut self, index: SeqIndex, relief: Relief) -> bool {
        let sequence = &self.sequences[index];
        if sequence.num_samples > self.free_rows.len() + relief.rows {
            return false;
        }
        let mut probe = self.probe(index);
        probe.idle_hits += relief.hits;
        let admission = Admission {
            new_blocks: self.first_blocks(index, probe.hits).sum(),
            idle_hits: probe.idle_hits,
            available: self.cache.available() + relief.blocks,
            watermark: self.config.watermark_blocks(),
            alone: self.running.len() == relief.sequences,
        };
        admission.fits() && self.forecast_fits(index, probe, relief)
    }

    /// The published blocks that a sequence would share.
    pub(super) fn hits(&mut self, index: SeqIndex) -> HashSet<BlockId> {
        let sequence = &self.sequences[index];
        let max_hits = self.max_hits(sequence);
        self.cache.hit_blocks(sequence.scope, &sequence.tokens, max_hits).collect()
    }

    /// The blocks that a sequence takes anew in each group when it starts with `hits` blocks found.
    fn first_blocks(&self, index: SeqIndex, hits: usize) -> impl Iterator<Item = usize> {
        let sequence = &self.sequences[index];
        let (num_tokens, swapped) =
            (sequence.tokens.len(), sequence.swapped.as_ref().map_or(0, |swapped| swapped.num_tokens));
        let (size, chunk) = (self.block_size, self.config.chunk());
        self.config.groups.iter().map(move |group| {
            let needed = group.first_block(swapped, size);
            let rest = size.blocks_for(num_tokens) - hits.max(needed);
            if group.is_full() {
                return rest;
            }
            // What a hit reads leaves the window as the prompt goes on: together they are the most that it holds.
            let first_read = hits - group.reads_back(hits, size);
            let read = hits.saturating_sub(first_read.max(needed));
            rest.min(group.most_blocks(num_tokens, chunk, size) - read)
        })
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
            own += sequence.num_held().saturating_sub(sequence.shared_blocks * self.config.groups.len());
            self.push_growths(&mut growths, sequence, sequence.shared_blocks);
        }
        self.push_growths(&mut growths, &self.sequences[index], probe.hits);
        let counts = self.cache.counts();
        let base = (counts.active + probe.idle_hits).saturating_sub(relief.blocks + own);
        let peak = peak_blocks(base, &mut growths, &self.config.groups, self.block_size);
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
        let sequence = &self.sequences[index];
        let (mut tables, mut cursor) = self.cache.share(sequence.scope, &sequence.tokens, max_hits);
        let misses = self.misses(step, index, cursor.published);
        let sequence = &self.sequences[index];
        let counts: SmallVec<[usize; 8]> = self.first_blocks(index, cursor.published).collect();
        let swapped = sequence.swapped.as_ref().map_or(0, |swapped| swapped.num_tokens);
        for ((table, group), count) in tables.iter_mut().zip(&self.config.groups).zip(counts) {
            table.skip_to(group.first_block(swapped, self.block_size));
            self.cache.extend(table, count)?;
        }
        let cached = cursor.published * self.block_size.tokens();
        if swapped > cached {
            self.cache.come_back(&mut cursor);
        }
        let sequence = &mut self.sequences[index];
        (sequence.tables, sequence.cursor, sequence.epoch) = (tables, cursor, epoch);
        (sequence.num_computed, sequence.num_planned) = (cached, cached);
        sequence.shared_blocks = sequence.cursor.published;
        self.swap_in(step, index);
        let sequence = &mut self.sequences[index];
        sequence.reserve(self.block_size);
        for child in 0..sequence.num_samples {
            let row = self.free_rows.pop().expect("admission saw enough rows");
            sequence.rows.push(row);
            step.placed.push(Placed { request: key.request, child: key.child + child as u32, row });
        }
        self.forget_deadline(key.request);
        self.count_hits(index, cached);
        self.count_misses(key.request, &misses);
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
            let Sequence { tables, cursor, scope, tokens, num_planned, .. } = sequence;
            let announced = |announced| step.announced.push(Filled { announced, batch_row });
            self.cache.announce(tables, *cursor, *scope, tokens, *num_planned, announced);
        }
    }

    fn write(&self, step: &Step, arrays: &StepArrays<'_>, sync: &mut TableSync) {
        let mut token = 0;
        let mut sample = 0;
        arrays.query_starts[0].set(0);
        for (batch_row, scheduled) in step.rows.iter().enumerate() {
            let sequence = &self.sequences[scheduled.sequence];
            self.write_tokens(arrays, token, sequence, scheduled);
            token += scheduled.num_tokens;
            arrays.query_starts[batch_row + 1].set(token as i32);
            arrays.seq_lens[batch_row].set(sequence.num_planned as i32);
            arrays.table_rows[batch_row].set(sequence.row().get() as i32);
            self.write_tables(arrays, sequence, sync);
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
            lists.write(step, &self.sequences, &self.config, &mut sync.pages);
        }
    }

    fn write_tokens(
        &self,
        arrays: &StepArrays<'_>,
        first: usize,
        sequence: &Sequence,
        scheduled: &Scheduled,
    ) {
        let positions = scheduled.start..scheduled.start + scheduled.num_tokens;
        for (place, position) in (first..).zip(positions.clone()) {
            arrays.token_ids[place].set(i64::from(sequence.tokens[position]));
            arrays.positions[place].set(position as i64);
        }
        for (group, table) in sequence.tables.iter().enumerate() {
            let slots = &arrays.slot_mapping[group * self.config.max_num_batched_tokens..][first..];
            write_slots(slots, table, positions.clone(), self.block_size);
        }
    }

    fn write_tables(&self, arrays: &StepArrays<'_>, sequence: &Sequence, sync: &mut TableSync) {
        for (group, table) in sequence.tables.iter().enumerate() {
            let row = group * self.config.max_num_seqs + sequence.row().index();
            let lasting = sequence.num_lasting_blocks(table);
            let (given_back, new) =
                sync.advance(row, sequence.epoch, table.len(), lasting, table.num_dropped());
            if given_back.is_empty() && new.is_empty() {
                continue;
            }
            let columns = self.config.max_blocks_per_seq();
            let line = &arrays.block_tables[row * columns..(row + 1) * columns];
            for places in [given_back, new] {
                let blocks = &table.blocks()[places.clone()];
                line[places].iter().zip(blocks).for_each(|(cell, block)| cell.set(block.get() as i32));
            }
        }
    }
}

fn write_slots(slots: &[Cell<i64>], table: &BlockTable, positions: Range<usize>, size: BlockSize) {
    let (mut position, mut place) = (positions.start, 0);
    while position < positions.end {
        let block = size.full_blocks(position);
        let run = positions.end.min((block + 1) * size.tokens()) - position;
        let slot = size.slot(table.blocks()[block], position);
        slots[place..place + run].iter().zip(slot..).for_each(|(cell, slot)| cell.set(slot));
        position += run;
        place += run;
    }
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
