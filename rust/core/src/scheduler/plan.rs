//! `plan`: what the next step computes, and for whom there is room.
//!
//! 1. Sequences with one token left to compute, the oldest first: each gets a block if it needs one, if need be by
//!    preempting younger ones. Where earlier ranks push later ones out, their prompts come first, up to half of the budget.
//! 2. Chunks of the prompts that run already, in the same order. Those of a rank behind the one that is about to start leave
//!    it the same half.
//! 3. Waiting sequences, the oldest first, each with all its blocks or not at all; none in a step that preempted.
//! 4. Drafts behind the decodes that were proposed some, with the budget and the blocks that are left.

use smallvec::SmallVec;

use super::buffers::{StepArrays, TableSync};
use super::sequence::SeqIndex;
use super::step::{Filled, Plan, Scheduled, Step};
use super::{Scheduler, sequence::Sequence};
use crate::error::{Error, Result};
use crate::groups::LayerGroup;
use crate::policy::chunk::chunk;
use crate::policy::order::QueueOrder;
use crate::policy::victim::{Candidate, victim};
use crate::table::BlockTable;

/// Waiting sequences that are looked at in one step.
const MAX_CANDIDATES: usize = 32;

/// A waiting sequence that may start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    index: SeqIndex,
    /// Its place in the queue.
    place: usize,
}

/// What came of the search for a block.
enum NextBlock {
    /// It is there.
    Made,
    /// The sequence that needed it was preempted.
    GaveWay,
    /// Only those could give way that a step in flight has a row for: the sequence is left out of this plan.
    Lacking,
}

impl Scheduler {
    /// Decides the next step and writes it into `arrays`. Returns none if there is nothing to compute; with a step in
    /// flight: nothing that need not wait for it.
    ///
    /// `sync` belongs to `arrays`: it remembers what stands in the block tables there. `now` is the time in seconds, on the
    /// clock of the deadlines; it never goes back.
    ///
    /// # Errors
    /// [`Error::StepInFlight`], [`Error::ArraysInFlight`], [`Error::ArrayLength`], [`Error::InvalidRequest`]; nothing
    /// was changed.
    pub fn plan(&mut self, arrays: &StepArrays<'_>, sync: &mut TableSync, now: f64) -> Result<Option<Plan>> {
        arrays.check(&self.config)?;
        if let Some(plan) = sync.plan_in_flight() {
            let is_own = sync.is_of(&self.identity);
            if !is_own || self.in_flight.len() < self.config.max_steps_in_flight {
                let whose = if is_own { "" } else { " of another scheduler" };
                return Err(Error::ArraysInFlight { plan, whose });
            }
        }
        self.plan_into(now, |scheduler, step| {
            let num_tables = scheduler.config.groups.len() * scheduler.config.max_num_seqs;
            sync.claim(&scheduler.identity, num_tables, step.watched.watch(step.id));
            scheduler.write(step, arrays, sync);
        })
    }

    /// Decides the next step and hands it to `write`, which sees the scheduler as it is then.
    pub(super) fn plan_into(&mut self, now: f64, write: impl FnOnce(&Self, &Step)) -> Result<Option<Plan>> {
        if let Some(newest) = self.in_flight.newest()
            && self.in_flight.len() == self.config.max_steps_in_flight
        {
            return Err(Error::StepInFlight { plan: newest.id });
        }
        if !(0.0..f64::INFINITY).contains(&now) {
            return Err(Error::request("now", now, "a finite number of seconds, at least 0"));
        }
        self.now = self.now.max(now);
        self.end_aborted();
        self.expire();
        self.cache.expire(self.now);
        let mut step = self.in_flight.fresh(self.next_step);
        self.held_back.clear();
        self.settle_pauses();
        self.notice_vacancy();
        let leaves_out = self.make_way_for_waiting(&mut step);
        self.make_spare_slot(&mut step);
        let preempted = self.schedule_decodes(&mut step)?;
        let is_short = self.schedule_prefills(&mut step)?;
        self.guard_first(&mut step);
        if !leaves_out && !preempted && !is_short {
            // What left the windows of those that go on.
            self.notice_vacancy();
            self.admit_waiting(&mut step)?;
        }
        self.add_drafts(&mut step);
        self.plan_state_saves(&mut step);
        let plan = step.plan();
        if plan.num_batch_rows == 0 {
            return self.nothing_to_run(step);
        }
        write(self, &step);
        self.in_flight.push(step);
        self.next_step += 1;
        self.totals.steps += 1;
        self.record_peak();
        Ok(Some(plan))
    }

    /// Who lives waits for the step in flight, or nobody lives.
    fn nothing_to_run(&mut self, step: Step) -> Result<Option<Plan>> {
        self.forget_swap_outs(&step);
        self.in_flight.recycle(step);
        if !self.in_flight.is_empty() || (self.running.is_empty() && self.waiting.is_empty()) {
            return Ok(None);
        }
        let detail = format!("{} run, {} wait, and none can go on", self.running.len(), self.waiting.len());
        Err(Error::broken("I9 progress", detail))
    }

    /// Returns whether somebody was preempted, or left out for want of a block.
    fn schedule_decodes(&mut self, step: &mut Step) -> Result<bool> {
        let free_rows = self.free_rows.len();
        let (budget, yields) = (self.config.max_num_batched_tokens, step.reserve.is_on());
        let (mut place, mut is_short) = (0, false);
        while place < self.running.len() && step.num_tokens < budget {
            let index = self.running[place];
            let sequence = &self.sequences[index];
            step.has_chunks |= sequence.num_unplanned() > 1;
            let has_next = sequence.decodes() || sequence.can_go_on_unseen();
            if !has_next || !self.may_be_planned(index) {
                if yields && self.may_be_planned(index) {
                    let (rank, chunk) = (sequence.key.rank, self.chunk_of(sequence, usize::MAX));
                    step.reserve.add(rank, chunk);
                }
                place += 1;
                continue;
            }
            if yields && step.num_tokens + step.reserve.kept_from(sequence.key.rank) >= budget {
                break;
            }
            match self.make_writable(step, place)? {
                NextBlock::Made => {
                    self.schedule(step, index, 1);
                    place += 1;
                }
                NextBlock::GaveWay => {}
                NextBlock::Lacking => {
                    is_short = true;
                    step.reserve.nobody_starts();
                    place += 1;
                }
            }
        }
        step.has_chunks |= place < self.running.len();
        step.num_decodes = step.rows.len();
        Ok(is_short || self.free_rows.len() > free_rows)
    }

    /// Returns whether blocks were too few for somebody's chunk.
    fn schedule_prefills(&mut self, step: &mut Step) -> Result<bool> {
        let mut is_short = false;
        let mut place = 0;
        while step.has_chunks && place < self.running.len() {
            let index = self.running[place];
            let sequence = &self.sequences[index];
            if sequence.num_unplanned() > 1 && self.may_be_planned(index) {
                let left = self.config.max_num_batched_tokens - step.num_tokens;
                let kept = step.reserve.kept_to_start(sequence.key.rank);
                let num_tokens = self.chunk_of(sequence, left.saturating_sub(kept));
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
        let (end, is_in_flight) =
            (self.sequences[index].num_planned + num_tokens, self.sequences[index].is_in_flight());
        loop {
            match self.advance_tables(index, end) {
                Ok(()) => return Ok(true),
                Err(Error::OutOfBlocks { .. }) => {}
                Err(error) => return Err(error),
            }
            if self.preempt_paused(step) {
                continue;
            }
            if is_in_flight {
                // The step in flight may be all that keeps it from giving back what left its windows.
                return Ok(false);
            }
            // Those that decode are part of the step already.
            let younger =
                || (place + 1..self.running.len()).filter(|&place| self.at(place).num_unplanned() > 1);
            let Some(chosen) = self.cheapest(younger().filter(|&place| !self.at(place).is_in_flight()))
            else {
                self.hold_back(self.cheapest(younger()));
                return Ok(false);
            };
            let index = self.running.remove(chosen);
            self.preempt(step, index);
        }
    }

    /// Starts waiting sequences in order. One that does not fit may be passed by those behind it, a bounded number of
    /// times.
    fn admit_waiting(&mut self, step: &mut Step) -> Result<()> {
        self.prefilling.num_rows = None;
        while self.queue_changed && step.num_tokens < self.config.max_num_batched_tokens {
            // Looked at again when something has changed; that some of these start is a change.
            self.queue_changed = false;
            let candidates = self.candidates();
            let mut last = self.last_to_start(&candidates);
            for &Waiting { index, place } in &candidates {
                if place > last || step.num_tokens >= self.config.max_num_batched_tokens {
                    continue;
                }
                if self.admit(step, index)? {
                    self.queue_changed = true;
                    self.pass_waiting(&candidates, place);
                    last = self.last_to_start(&candidates);
                    let num_tokens = self.chunk_for(step, &self.sequences[index]).min(self.slots_left(index));
                    self.schedule_prefill(step, index, num_tokens);
                }
            }
            self.candidates = candidates;
            self.vacancy_seen = self.vacancy();
            self.last_look = self.next_step;
        }
        Ok(())
    }

    /// The sequences that may start in this step, in the order in which they are tried.
    fn candidates(&mut self) -> Vec<Waiting> {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        let mut push = |index| candidates.push(Waiting { index, place: candidates.len() });
        match self.config.queue_order {
            QueueOrder::FairShare => self.fair_order(MAX_CANDIDATES, push),
            _ => self.waiting.values().take(MAX_CANDIDATES).for_each(|&index| push(index)),
        }
        if self.config.queue_order == QueueOrder::LongestPrefix {
            candidates.sort_by_cached_key(|waiting| std::cmp::Reverse(self.probe(waiting.index).hits));
        }
        candidates
    }

    /// The last place in the queue from which a sequence may start: that of the first one that was passed as often as may
    /// be. Nobody starts from behind the candidates, so those behind them are passed by none and need not be looked at.
    fn last_to_start(&self, candidates: &[Waiting]) -> usize {
        let waiting = candidates.iter().filter(|waiting| !self.sequences[waiting.index].is_running());
        let held = waiting.filter(|waiting| self.sequences[waiting.index].passed >= self.config.max_passes);
        held.map(|waiting| waiting.place).min().unwrap_or(MAX_CANDIDATES)
    }

    /// Counts that the sequence at a place of the queue has started before those that wait and come before it.
    fn pass_waiting(&mut self, candidates: &[Waiting], started: usize) {
        for &Waiting { index, place } in candidates {
            let sequence = &mut self.sequences[index];
            sequence.passed += usize::from(place < started && !sequence.is_running());
        }
    }

    fn chunk_for(&self, step: &Step, sequence: &Sequence) -> usize {
        self.chunk_of(sequence, self.config.max_num_batched_tokens - step.num_tokens)
    }

    /// The next chunk of a sequence with so much budget left.
    fn chunk_of(&self, sequence: &Sequence, budget: usize) -> usize {
        let num_tokens = chunk(sequence.num_unplanned(), budget.min(self.config.max_chunk_tokens));
        self.cut_chunk(sequence.num_planned, num_tokens, sequence.states.parting)
    }

    /// The first chunk of a sequence that waits, as it is found now and with any budget.
    pub(super) fn first_chunk(&mut self, index: SeqIndex) -> usize {
        let (hits, known) = (self.probe(index).hits, self.cache.num_known());
        let sequence = &self.sequences[index];
        let found = hits * self.block_size.tokens() + self.probe_partial_hit(sequence);
        let start = sequence.swapped.as_ref().map_or(found, |swapped| swapped.num_tokens.max(found));
        let num_tokens = chunk(sequence.tokens.len() - start, self.config.max_chunk_tokens);
        self.cut_chunk(start, num_tokens, self.parting(sequence, hits, known))
    }

    /// Sees to it that the block of a sequence's next token is there and its own, if need be by having others give way, or
    /// the sequence itself.
    fn make_writable(&mut self, step: &mut Step, place: usize) -> Result<NextBlock> {
        loop {
            match self.try_make_writable(step, self.running[place]) {
                Ok(()) => return Ok(NextBlock::Made),
                Err(Error::OutOfBlocks { .. }) => {}
                Err(error) => return Err(error),
            }
            if self.preempt_paused(step) {
                continue;
            }
            let Some(chosen) = self.choose_victim(place) else {
                self.hold_back(self.cheapest(place + 1..self.running.len()));
                return Ok(NextBlock::Lacking);
            };
            let index = self.running.remove(chosen);
            self.preempt(step, index);
            if chosen == place {
                return Ok(NextBlock::GaveWay);
            }
        }
    }

    fn try_make_writable(&mut self, step: &mut Step, index: SeqIndex) -> Result<()> {
        let end = self.sequences[index].num_planned + 1;
        self.advance_tables(index, end)?;
        let sequence = &mut self.sequences[index];
        let block = self.block_size.full_blocks(sequence.num_planned);
        if !self.in_flight.is_empty() {
            // Who is left out must not have some of the copies in a plan that may come to nothing.
            let needed = sequence.tables.iter().filter(|table| !table.is_writable(block)).count();
            let available = self.cache.available();
            if needed > available {
                return Err(Error::OutOfBlocks { needed, available });
            }
        }
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
        let size = self.block_size;
        let has_all = |table: &BlockTable| table.len() * size.tokens() >= end;
        if !self.has_windows && self.sequences[index].tables.iter().all(has_all) {
            return Ok(());
        }
        let given_back = self.leave_windows(index);
        let sequence = &mut self.sequences[index];
        if given_back.iter().all(|&count| count == 0) && sequence.tables.iter().all(has_all) {
            return Ok(());
        }
        let (last, needed) = (size.blocks_for(sequence.tokens.len()), size.blocks_for(end));
        let missing = |table: &BlockTable, wanted: usize| wanted.saturating_sub(table.len());
        let wanted: SmallVec<[usize; 8]> = (sequence.tables.iter().zip(&given_back))
            .map(|(table, given_back)| (table.len() + given_back).min(last).max(needed))
            .collect();
        // Every group takes what it needs before any takes more, or none does.
        let all: usize = sequence.tables.iter().map(|table| missing(table, needed)).sum();
        let available = if all > 0 { self.cache.available() } else { 0 };
        if all > available {
            return Err(Error::OutOfBlocks { needed: all, available });
        }
        for table in &mut sequence.tables {
            self.cache.extend(table, missing(table, needed))?;
        }
        if self.cache.has_states() {
            // What left the windows since the last checkpoint stays findable: the step may fail.
            return Ok(());
        }
        // What was given back is taken again at once, so that a prompt keeps what it was admitted with.
        for (table, wanted) in sequence.tables.iter_mut().zip(wanted) {
            match self.cache.extend(table, missing(table, wanted)) {
                Err(Error::OutOfBlocks { .. }) => break,
                result => result?,
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
        let given_back = sequence.tables.iter_mut().zip(&self.config.groups).map(give_back).collect();
        self.cache.leave_behind(&mut sequence.cursor, &sequence.tables);
        given_back
    }

    /// Who gives way to the sequence at `place`: one of those that are younger, or itself if there is none. Nobody whom a
    /// step in flight has a row for, and not itself while a step is in flight: others may be about to end.
    fn choose_victim(&self, place: usize) -> Option<usize> {
        let younger = (place + 1..self.running.len()).filter(|&place| !self.at(place).is_in_flight());
        self.cheapest(younger).or_else(|| self.in_flight.is_empty().then_some(place))
    }

    /// The one of some running sequences that costs the least to bring back.
    pub(super) fn cheapest(&self, places: impl Iterator<Item = usize>) -> Option<usize> {
        let candidate = |place| Candidate { place, lost_tokens: self.at(place).num_computed };
        victim(places.map(candidate)).map(|candidate| candidate.place)
    }

    fn at(&self, place: usize) -> &Sequence {
        &self.sequences[self.running[place]]
    }

    fn schedule(&mut self, step: &mut Step, index: SeqIndex, num_tokens: usize) {
        let sequence = &mut self.sequences[index];
        if sequence.num_unplanned() == 0 {
            sequence.push_placeholder();
        }
        let start = sequence.num_planned;
        sequence.num_planned += num_tokens;
        sequence.num_in_flight += 1;
        sequence.sample = step.num_samples as u32;
        let num_samples =
            if sequence.num_planned == sequence.tokens.len() { sequence.num_samples } else { 0 };
        step.push(Scheduled { sequence: index, start, num_tokens, num_samples });
    }

    fn schedule_prefill(&mut self, step: &mut Step, index: SeqIndex, num_tokens: usize) {
        if num_tokens == 0 {
            return;
        }
        let batch_row = step.rows.len();
        self.schedule(step, index, num_tokens);
        // With states there is no hit before the checkpoint is copied.
        if self.config.enable_prefix_caching && !self.cache.has_states() {
            let sequence = &self.sequences[index];
            let Sequence { tables, cursor, scope, tokens, num_planned, .. } = sequence;
            let announced = |announced| step.announced.push(Filled { announced, batch_row });
            let filled = *num_planned - num_tokens..*num_planned;
            self.cache.announce(tables, *cursor, *scope, tokens, filled, announced);
        }
    }
}
