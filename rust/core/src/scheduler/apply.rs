//! `apply`: what the step's results mean, and `discard` for a step that gave none.

use hashbrown::HashSet;

use super::sequence::{SeqIndex, SeqKey, Sequence};
use super::states::SequenceStates;
use super::step::{Filled, Scheduled, Step};
use super::{RequestSummary, Scheduler};
use crate::error::{Error, Result};
use crate::prefix::NodeId;
use crate::table::BlockTable;
use crate::units::TokenId;

/// What the caller makes of one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// The sequence goes on.
    Ok = 0,
    /// The token is the last one: an end-of-sequence token, a stop token or a stop string.
    Stop = 1,
    /// The sample is no token: the sequence ends with an error.
    Failed = 2,
}

impl Outcome {
    /// The outcome with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Ok, Self::Stop, Self::Failed].get(usize::from(number)).copied()
    }
}

/// What became of one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FinishReason {
    /// The token counts and the sequence goes on.
    None = 0,
    /// The token counts and is the last: the caller said so.
    Stop = 1,
    /// The token counts and is the last: the limit on tokens or the context cap is reached.
    Length = 2,
    /// The sequence was aborted; the token does not count.
    Abort = 3,
    /// The sequence failed; the token does not count.
    Error = 4,
    /// The token does not count and will be sampled again: what it was computed from was not.
    Void = 5,
    /// The token does not count: it follows a draft that was not accepted, or the end of its sequence.
    Rejected = 6,
}

/// The results of a step.
#[derive(Clone, Copy, Debug)]
pub struct Sampled<'a> {
    /// A token for each sample of the plan.
    pub tokens: &'a [TokenId],
    /// What to make of each.
    pub outcomes: &'a [Outcome],
    /// Batch rows that failed as a whole, with or without a sample.
    pub failed_rows: &'a [usize],
    /// For each batch row, how many of its drafts are accepted; none: as many as its samples agree with.
    pub accepted: Option<&'a [usize]>,
}

impl Scheduler {
    /// Takes the results of a step in: appends tokens, ends what is done, publishes full blocks now that they were
    /// computed. `finished` is told what became of each sample. Returns the requests that have ended since last asked.
    ///
    /// # Errors
    /// [`Error::NotInFlight`], [`Error::ArrayLength`], [`Error::ArrayValue`]; nothing was changed.
    pub fn apply(
        &mut self,
        plan: u64,
        sampled: Sampled<'_>,
        mut finished: impl FnMut(usize, FinishReason),
    ) -> Result<Vec<RequestSummary>> {
        self.check_results(plan, &sampled)?;
        // Nothing below can fail.
        let step = std::mem::take(&mut self.step);
        let void = self.withdraw_failed(&step, |row| sampled.failed_rows.contains(&row));
        let mut first = 0;
        for (batch_row, scheduled) in step.rows.iter().enumerate() {
            let samples = first..first + scheduled.num_samples;
            first = samples.end;
            let fate = self.fate(batch_row, scheduled, &sampled, &void);
            match fate {
                FinishReason::None if self.sequences[scheduled.sequence].num_drafts > 0 => {
                    let agreeing = self.agreeing(scheduled, &sampled.tokens[samples.clone()]);
                    let accepted = sampled.accepted.map_or(agreeing, |accepted| accepted[batch_row]);
                    self.settle_drafts(scheduled, samples.start, accepted, &sampled, &mut finished);
                }
                FinishReason::None => self.settle(scheduled, samples.start, &sampled, &mut finished),
                reason => {
                    self.keep_drafts(scheduled.sequence, 0);
                    let is_void = void.contains(&batch_row);
                    self.give_up(scheduled.sequence, reason, is_void);
                    samples.for_each(|sample| finished(sample, reason));
                }
            }
        }
        self.finish_step(step);
        Ok(self.take_ended())
    }

    /// Takes a step back that failed as a whole: nothing of it was computed. Sequences that shared blocks which the step
    /// should have filled, or copied, start again later; with states, all of them do.
    ///
    /// # Errors
    /// [`Error::NotInFlight`]; nothing was changed.
    pub fn discard(&mut self, plan: u64) -> Result<()> {
        self.check_in_flight(plan)?;
        let mut step = std::mem::take(&mut self.step);
        let void = self.withdraw_failed(&step, |_| true);
        for (batch_row, scheduled) in step.rows.iter().enumerate() {
            self.keep_drafts(scheduled.sequence, 0);
            let sequence = &mut self.sequences[scheduled.sequence];
            sequence.num_planned = sequence.num_computed;
            let came_back = step.swapped_in.iter().any(|(index, _)| *index == scheduled.sequence);
            let is_lost = self.cache.has_states();
            if !came_back
                && (is_lost || void.contains(&batch_row) || step.copied_for.contains(&scheduled.sequence))
            {
                self.preempt_without_copy(scheduled.sequence);
            }
        }
        self.discard_swaps(&mut step);
        self.finish_step(step);
        Ok(())
    }

    fn check_in_flight(&self, plan: u64) -> Result<()> {
        if self.in_flight && self.step.id == plan { Ok(()) } else { Err(Error::NotInFlight { plan }) }
    }

    fn check_results(&self, plan: u64, sampled: &Sampled<'_>) -> Result<()> {
        self.check_in_flight(plan)?;
        let needed = self.step.num_samples;
        for (array, length) in [("sampled", sampled.tokens.len()), ("outcomes", sampled.outcomes.len())] {
            if length != needed {
                return Err(Error::ArrayLength { array, length, needed });
            }
        }
        for (index, &row) in sampled.failed_rows.iter().enumerate() {
            if row >= self.step.rows.len() {
                let (array, allowed) = ("failed_rows", "a batch row of the plan");
                return Err(Error::ArrayValue { array, index, value: row as i64, allowed });
            }
        }
        sampled.accepted.map_or(Ok(()), |accepted| self.check_accepted(sampled.tokens, accepted))
    }

    /// Whether no draft is accepted that a row's samples do not agree with: its K and V would be another token's.
    fn check_accepted(&self, tokens: &[TokenId], accepted: &[usize]) -> Result<()> {
        let (array, length, needed) = ("accepted", accepted.len(), self.step.rows.len());
        if length != needed {
            return Err(Error::ArrayLength { array, length, needed });
        }
        let mut first = 0;
        for (index, (scheduled, &accepted)) in self.step.rows.iter().zip(accepted).enumerate() {
            let agreeing = self.agreeing(scheduled, &tokens[first..first + scheduled.num_samples]);
            if accepted > agreeing {
                let allowed = "at most the row's drafts up to the first that differs from its sample";
                return Err(Error::ArrayValue { array, index, value: accepted as i64, allowed });
            }
            first += scheduled.num_samples;
        }
        Ok(())
    }

    /// Takes back the nodes that failed rows announced, and what others announced below them. Returns the batch rows
    /// that did not fail and yet share such a node's blocks: what they computed is void.
    fn withdraw_failed(&mut self, step: &Step, failed: impl Fn(usize) -> bool) -> HashSet<usize> {
        let mut bad: HashSet<(NodeId, u64)> = HashSet::new();
        for Filled { announced, batch_row } in &step.announced {
            if bad.contains(&announced.parent_place()) || failed(*batch_row) {
                bad.insert(announced.place());
            }
        }
        if bad.is_empty() {
            return HashSet::new();
        }
        let void = self.rows_that_share(step, &bad);
        for Filled { announced, .. } in step.announced.iter().rev() {
            if bad.contains(&announced.place()) {
                self.cache.withdraw(*announced);
            }
        }
        for &batch_row in &void {
            // Where it stood is gone.
            self.sequences[step.rows[batch_row].sequence].cursor = self.cache.root();
        }
        void
    }

    /// What hangs below a bad node is bad: a sequence shares one if the last that it shares is.
    fn rows_that_share(&self, step: &Step, bad: &HashSet<(NodeId, u64)>) -> HashSet<usize> {
        let shares = |scheduled: &Scheduled| bad.contains(&self.sequences[scheduled.sequence].cursor.place());
        step.rows.iter().enumerate().filter(|(_, scheduled)| shares(scheduled)).map(|(row, _)| row).collect()
    }

    /// What becomes of a batch row before its samples are looked at.
    fn fate(
        &self,
        batch_row: usize,
        scheduled: &Scheduled,
        sampled: &Sampled<'_>,
        void: &HashSet<usize>,
    ) -> FinishReason {
        if sampled.failed_rows.contains(&batch_row) {
            return FinishReason::Error;
        }
        if !self.aborts.is_empty()
            && self.requests[&self.sequences[scheduled.sequence].key.request].summary.aborted
        {
            return FinishReason::Abort;
        }
        if void.contains(&batch_row) { FinishReason::Void } else { FinishReason::None }
    }

    /// What a void row computed must not be published, whatever else ends it.
    fn give_up(&mut self, index: SeqIndex, reason: FinishReason, is_void: bool) {
        match reason {
            FinishReason::Void => self.preempt_without_copy(index),
            FinishReason::Error => {
                self.request_of(index).failed = true;
                self.end_sequence(index);
            }
            FinishReason::Abort => {
                if !is_void {
                    self.computed(index);
                }
                self.end_sequence(index);
            }
            FinishReason::None | FinishReason::Stop | FinishReason::Length | FinishReason::Rejected => {}
        }
    }

    /// Takes in a row whose tokens were computed, and its samples from `first` on.
    fn settle(
        &mut self,
        scheduled: &Scheduled,
        first: usize,
        sampled: &Sampled<'_>,
        finished: &mut impl FnMut(usize, FinishReason),
    ) {
        let index = scheduled.sequence;
        self.computed(index);
        if scheduled.num_samples == 0 {
            return;
        }
        // All forks are made before a sample ends one of them.
        for child in 1..scheduled.num_samples {
            let fork = self.fork(index, child);
            let sample = first + child;
            let reason = self.accept(fork, sampled.tokens[sample], sampled.outcomes[sample]);
            finished(sample, reason);
        }
        let leader = &mut self.sequences[index];
        leader.rows.truncate(1);
        leader.states.working.truncate(1);
        leader.num_samples = 1;
        finished(first, self.accept(index, sampled.tokens[first], sampled.outcomes[first]));
    }

    /// The step's tokens of a sequence are computed: counts them and publishes the blocks that they fill.
    pub(super) fn computed(&mut self, index: SeqIndex) {
        let sequence = &mut self.sequences[index];
        let again = sequence.num_planned.min(sequence.high_water).saturating_sub(sequence.num_computed);
        sequence.num_computed = sequence.num_planned;
        sequence.high_water = sequence.high_water.max(sequence.num_computed);
        if self.config.enable_prefix_caching {
            let Sequence { tables, cursor, scope, tokens, num_computed, .. } = sequence;
            if self.cache.publish(tables, cursor, *scope, tokens, *num_computed) {
                self.next_epoch += 1;
                sequence.epoch = self.next_epoch;
            }
        }
        self.states_computed(index);
        if again > 0 {
            self.totals.recomputed_tokens += again as u64;
            self.request_of(index).recomputed_tokens += again;
        }
    }

    /// A further sample of a request: the same blocks, a row of its own.
    fn fork(&mut self, leader: SeqIndex, child: usize) -> SeqIndex {
        let epoch = self.new_epoch();
        let leader = &self.sequences[leader];
        let mut fork = Sequence {
            key: SeqKey { child: leader.key.child + child as u32, ..leader.key },
            scope: leader.scope,
            tokens: leader.tokens.clone(),
            prompt_len: leader.prompt_len,
            max_tokens: leader.max_tokens,
            max_len: leader.max_len,
            num_computed: leader.num_computed,
            num_planned: leader.num_planned,
            num_drafts: 0,
            high_water: leader.high_water,
            tables: leader.tables.iter().map(BlockTable::fork).collect(),
            cursor: leader.cursor,
            epoch,
            rows: vec![leader.rows[child]],
            states: leader.states.working.get(child).copied().map(SequenceStates::forked).unwrap_or_default(),
            num_samples: 1,
            shared_blocks: self.block_size.full_blocks(leader.num_computed),
            reuse_cached: leader.reuse_cached,
            started_before: true,
            passed: 0,
            swapped: None,
            stalled_since: None,
        };
        fork.reserve(self.block_size);
        let index = self.sequences.insert(fork);
        self.forked.push(index);
        index
    }

    /// Appends a sample, or ends its sequence.
    pub(super) fn accept(&mut self, index: SeqIndex, token: TokenId, outcome: Outcome) -> FinishReason {
        if outcome == Outcome::Failed {
            self.request_of(index).failed = true;
            self.end_sequence(index);
            return FinishReason::Error;
        }
        let sequence = &mut self.sequences[index];
        sequence.tokens.push(token);
        let full = sequence.tokens.len() >= sequence.max_len;
        self.request_of(index).output_tokens += 1;
        let reason = match (outcome, full) {
            (Outcome::Stop, _) => FinishReason::Stop,
            (_, true) => FinishReason::Length,
            (_, false) => return FinishReason::None,
        };
        let sequence = &self.sequences[index];
        self.outputs = self.outputs.learn(sequence.max_tokens, sequence.tokens.len() - sequence.prompt_len);
        self.end_sequence(index);
        reason
    }

    /// Brings the running list up to date with who ended, gave way or was forked off, then ends what was aborted.
    fn finish_step(&mut self, mut step: Step) {
        // The copies from the host are done: its blocks are free.
        step.swapped_in.clear();
        self.step = step;
        self.in_flight = false;
        let sequences = &self.sequences;
        let runs = |&index: &SeqIndex| sequences.contains(index) && sequences[index].is_running();
        self.running.retain(runs);
        let mut forked = std::mem::take(&mut self.forked);
        forked.retain(runs);
        // Only now that no list holds them may the numbers of ended sequences be used again.
        self.sequences.recycle();
        forked.drain(..).for_each(|index| self.run(index));
        self.forked = forked;
        std::mem::take(&mut self.aborts).into_iter().for_each(|request| self.end_request(request));
    }

    pub(super) fn request_of(&mut self, index: SeqIndex) -> &mut RequestSummary {
        let request = self.sequences[index].key.request;
        &mut self.requests.get_mut(&request).expect("a live sequence has a request").summary
    }
}
