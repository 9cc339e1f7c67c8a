//! Which waiting sequence may start, and what it starts with: all its blocks and rows, or nothing.

use hashbrown::HashSet;
use smallvec::SmallVec;

use super::AdmissionPolicy;
use super::ranks::Relief;
use super::request::Found;
use super::sequence::SeqIndex;
use super::step::{Placed, Step};
use super::{Scheduler, sequence::Sequence};
use crate::error::Result;
use crate::policy::admission::Admission;
use crate::policy::forecast::{Growth, peak_blocks};
use crate::prefix::Probe;
use crate::units::{BlockId, RequestId};

/// Steps after which those that wait are looked at again though there is no more room than before.
const STEPS_BETWEEN_LOOKS: u64 = 16;

/// What sequences that wait could have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Vacancy {
    rows: usize,
    blocks: usize,
    slots: usize,
}

/// What a waiting sequence needs to start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    index: SeqIndex,
    rows: usize,
    new_blocks: usize,
    probe: Probe,
}

impl Scheduler {
    pub(super) fn vacancy(&mut self) -> Vacancy {
        Vacancy {
            rows: self.free_rows.len(),
            blocks: self.cache.available(),
            slots: self.state_arena().map_or(0, |arena| arena.available()),
        }
    }

    /// Has those that wait looked at again when there is more of anything than when they did not fit, whoever gave it
    /// back: a sequence that goes on can also leave blocks, or a slot whose checkpoint has been read. What they would share,
    /// and what the running ones are expected to need, changes with each step: that is looked at every few steps.
    pub(super) fn notice_vacancy(&mut self) {
        let (now, seen) = (self.vacancy(), self.vacancy_seen);
        let has_risen = now.rows > seen.rows || now.blocks > seen.blocks || now.slots > seen.slots;
        self.queue_changed |= has_risen || self.next_step >= self.last_look + STEPS_BETWEEN_LOOKS;
    }

    /// Gives a waiting sequence all its blocks and its rows, or nothing.
    pub(super) fn admit(&mut self, step: &mut Step, index: SeqIndex) -> Result<bool> {
        if !self.fits(index) && !self.fits_cold(index) {
            return Ok(false);
        }
        // Nothing below can fail: between the last probe and here nobody else takes blocks.
        self.start(step, index)?;
        Ok(true)
    }

    /// Whether a sequence that nobody else keeps from starting fits if it shares nothing: a hit of windows can pin more
    /// than the sequence needs.
    fn fits_cold(&mut self, index: SeqIndex) -> bool {
        if !self.running.is_empty() || !self.sequences[index].reuse_cached {
            return false;
        }
        self.sequences[index].starts_cold = true;
        let fits = self.fits(index);
        self.sequences[index].starts_cold = fits;
        fits
    }

    /// Whether a waiting sequence may start.
    fn fits(&mut self, index: SeqIndex) -> bool {
        // Without a row there is nothing to look up.
        self.sequences[index].num_samples <= self.free_rows.len() && {
            let demand = self.demand(index);
            self.fit(&[demand], Relief::default())
        }
    }

    /// What a waiting sequence needs, as its prompt is found now.
    pub(super) fn demand(&mut self, index: SeqIndex) -> Demand {
        let probe = self.probe(index);
        let new_blocks = self.first_blocks(index, probe.hits).sum();
        Demand { index, rows: self.sequences[index].num_samples, new_blocks, probe }
    }

    /// Whether waiting sequences may start together, if so much is given back first.
    pub(super) fn fit(&mut self, demands: &[Demand], relief: Relief) -> bool {
        let sum = |part: fn(&Demand) -> usize| demands.iter().map(part).sum::<usize>();
        if sum(|demand| demand.rows) > self.free_rows.len() + relief.rows {
            return false;
        }
        let slots_fit = |demand: &Demand| self.slots_fit(demand.index, relief, demand.probe.idle_checkpoint);
        if !demands.iter().all(slots_fit) {
            return false;
        }
        let admission = Admission {
            new_blocks: sum(|demand| demand.new_blocks),
            idle_hits: sum(|demand| demand.probe.idle_hits) + relief.hits,
            available: (self.cache.available() + relief.blocks).saturating_sub(relief.taken),
            watermark: self.config.watermark_blocks(),
            alone: self.running.len() == relief.sequences,
        };
        admission.fits() && self.forecast_fits(demands, admission.idle_hits, relief)
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

    pub(super) fn probe(&mut self, index: SeqIndex) -> Probe {
        let sequence = &self.sequences[index];
        self.cache.probe(sequence.scope, &sequence.tokens, self.max_hits(sequence))
    }

    /// Blocks that a sequence may share at most. Its last token is always computed: its logits are wanted.
    fn max_hits(&self, sequence: &Sequence) -> usize {
        if sequence.shares() { self.block_size.full_blocks(sequence.tokens.len() - 1) } else { 0 }
    }

    /// Whether the worst moment to come fits the pool with some more sequences running. Alone, a sequence always fits.
    fn forecast_fits(&mut self, demands: &[Demand], idle_hits: usize, relief: Relief) -> bool {
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
        for demand in demands {
            self.push_growths(&mut growths, &self.sequences[demand.index], demand.probe.hits);
        }
        let counts = self.cache.counts();
        let base = (counts.active + idle_hits).saturating_sub(relief.blocks + own);
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
        self.dequeue(self.sequences[index].key);
        let key = self.charge_start(index);
        let epoch = self.new_epoch();
        let (mut tables, mut cursor) = self.cache.share_found();
        let misses = self.misses(step, index, cursor.published);
        let sequence = &self.sequences[index];
        let counts: SmallVec<[usize; 8]> = self.first_blocks(index, cursor.published).collect();
        let swapped = sequence.swapped.as_ref().map_or(0, |swapped| swapped.num_tokens);
        let shared = cursor.published * self.block_size.tokens();
        for ((table, group), count) in tables.iter_mut().zip(&self.config.groups).zip(counts) {
            // Of a hit that reaches as far, all that was pinned stays: the next block may hang below its last.
            if swapped > shared {
                table.skip_to(group.first_block(swapped, self.block_size));
            }
            self.cache.extend(table, count)?;
        }
        let copied = if swapped > shared { 0 } else { self.copy_partial_hit(step, index, &tables, cursor) };
        let cached = shared + copied;
        let sequence = &mut self.sequences[index];
        sequence.passed = 0;
        if let Some(swapped) = sequence.swapped.as_ref().filter(|swapped| swapped.num_tokens > cached) {
            self.cache.come_back(&mut cursor, swapped.cursor);
        }
        (sequence.tables, sequence.cursor, sequence.epoch) = (tables, cursor, epoch);
        (sequence.num_computed, sequence.num_planned) = (cached, cached);
        sequence.shared_blocks = sequence.cursor.published;
        self.start_states(step, index);
        self.swap_in(step, index);
        let sequence = &mut self.sequences[index];
        sequence.reserve(self.block_size);
        for child in 0..sequence.num_samples {
            let row = self.free_rows.pop().expect("admission saw enough rows");
            sequence.rows.push(row);
            step.placed.push(Placed { request: key.request, child: key.child + child as u32, row });
        }
        sequence.starts_cold = false;
        if !sequence.has_computed {
            let queried = if sequence.reuse_cached { sequence.tokens.len() } else { 0 };
            if let Some(request) = self.requests.get_mut(&key.request) {
                request.found = Found { queried, cached, copied, misses };
            }
        }
        self.end_stall(index);
        self.run(index);
        Ok(())
    }

    /// Counts the start of a request of which something was computed for the first time, and what it had found then: finding
    /// its own blocks again is no hit. From now on it does not expire.
    pub(super) fn count_start(&mut self, index: SeqIndex) {
        let request = self.sequences[index].key.request;
        let Some(entry) = self.requests.get_mut(&request) else { return };
        let (summary, Found { queried, cached, copied, misses }) = (&mut entry.summary, entry.found);
        (summary.cached_tokens, summary.partial_hit_tokens, summary.misses) = (cached, copied, misses);
        if let Some(deadline) = entry.deadline {
            self.deadlines.remove(&(deadline, request));
        }
        self.totals.queried_tokens += queried as u64;
        self.totals.hit_tokens += cached as u64;
        self.totals.partial_hit_tokens += copied as u64;
        self.totals.misses.add(&misses);
        self.settle_hit(index, cached);
    }

    /// A start of which nothing was computed is taken back.
    pub(super) fn resume_deadline(&mut self, request: RequestId) {
        if let Some(deadline) = self.requests.get(&request).and_then(|entry| entry.deadline) {
            self.deadlines.insert((deadline, request));
        }
    }

    pub(super) fn end_stall(&mut self, index: SeqIndex) {
        let sequence = &mut self.sequences[index];
        if let Some(since) = sequence.stalled_since.take()
            && let Some(request) = self.requests.get_mut(&sequence.key.request)
        {
            request.summary.stalled_seconds += self.now - since;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::groups::LayerGroup;
    use crate::scheduler::{
        AdmissionPolicy, Outcome, OwnedArrays, Sampled, Scheduler, SchedulerConfig, Submission, TableSync,
    };

    #[test]
    fn blocks_that_windows_let_go_and_take_again_have_nobody_looked_at() {
        let config = SchedulerConfig {
            num_blocks: 700,
            block_size: 4,
            max_num_seqs: 64,
            max_model_len: 4096,
            max_chunk_tokens: 64,
            groups: vec![LayerGroup::Full, LayerGroup::Window { tokens: 9 }],
            admission: AdmissionPolicy::Watermark,
            watermark: 0.0,
            ..SchedulerConfig::default()
        };
        let mut scheduler = Scheduler::new(config.clone()).unwrap();
        let (mut arrays, mut sync) = (OwnedArrays::new(&config), TableSync::default());
        let mut submit = |tokens: &[u32]| {
            let submission = Submission { max_tokens: Some(90), ..Submission::new(tokens) };
            scheduler.submit(submission).unwrap();
        };
        // In each step some let a block of their window go, and as many take one.
        (0..16).for_each(|index| submit(&vec![index; 10 + index as usize]));
        submit(&[99; 2400]);
        let (mut num_looks, mut last_look) = (0, 0);
        for _ in 0..64 {
            let plan = scheduler.plan(&arrays.borrow(), &mut sync, 0.0).unwrap().unwrap();
            num_looks += usize::from(scheduler.last_look != last_look);
            last_look = scheduler.last_look;
            let (tokens, outcomes) = (vec![7; plan.num_samples], vec![Outcome::Ok; plan.num_samples]);
            let sampled = Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows: &[], accepted: None };
            scheduler.apply(plan.id, sampled, |_, _| ()).unwrap();
        }
        assert_eq!(scheduler.stats().num_waiting, 1);
        assert!(num_looks <= 64 / 4, "{num_looks} looks in 64 steps");
    }
}
