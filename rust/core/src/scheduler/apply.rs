//! `apply`: what the step's results mean, and `discard` for a step that gave none.

use hashbrown::HashSet;

use super::sequence::{SeqIndex, Sequence};
use super::step::{Scheduled, Step};
use super::{RequestSummary, Scheduler};
use crate::error::{Error, Result};
use crate::policy::length::OutputEstimate;
use crate::units::TokenId;

/// What the caller makes of one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// The sequence goes on.
    #[default]
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
    /// Takes the results of the oldest step in flight in: appends tokens, ends what is done, publishes full blocks now that
    /// they were computed. `finished` is told what became of each sample. Returns the requests that have ended since last asked.
    ///
    /// # Errors
    /// [`Error::NotInFlight`], [`Error::OutOfOrder`], [`Error::ArrayLength`], [`Error::ArrayValue`]; nothing was changed.
    pub fn apply(
        &mut self,
        plan: u64,
        sampled: Sampled<'_>,
        mut finished: impl FnMut(usize, FinishReason),
    ) -> Result<Vec<RequestSummary>> {
        self.check_results(plan, &sampled)?;
        // Nothing below can fail.
        let mut step = self.in_flight.take_oldest().expect("it was checked");
        step.sources.clear();
        step.fail(sampled.failed_rows.iter().copied());
        self.withdraw_failed(&step);
        let mut first = 0;
        for (batch_row, scheduled) in step.rows.iter().enumerate() {
            let samples = first..first + scheduled.num_samples;
            first = samples.end;
            let sequence = &mut self.sequences[scheduled.sequence];
            sequence.num_in_flight -= 1;
            sequence.spent_tokens += scheduled.num_tokens;
            let has_failed = step.has_failed(batch_row);
            match self.fate(scheduled, has_failed) {
                FinishReason::None if self.sequences[scheduled.sequence].num_drafts > 0 => {
                    let agreeing = self.agreeing(scheduled, &sampled.tokens[samples.clone()]);
                    let accepted = sampled.accepted.map_or(agreeing, |accepted| accepted[batch_row]);
                    self.settle_drafts(scheduled, samples.start, accepted, &sampled, &mut finished);
                }
                FinishReason::None => self.settle(scheduled, samples.start, &sampled, &mut finished),
                reason => {
                    self.keep_drafts(scheduled.sequence, 0);
                    self.give_up(scheduled, reason, has_failed);
                    samples.for_each(|sample| finished(sample, reason));
                }
            }
        }
        self.finish_step(step);
        Ok(self.take_ended())
    }

    /// Takes a step back that failed as a whole: nothing of it was computed. Sequences that shared blocks which the step
    /// should have filled, or copied, start again later; with states, all of them do. What was planned after it is discarded
    /// first.
    ///
    /// # Errors
    /// [`Error::NotInFlight`]; nothing was changed.
    pub fn discard(&mut self, plan: u64) -> Result<()> {
        if !self.in_flight.contains(plan) {
            return Err(Error::NotInFlight { plan });
        }
        while self.in_flight.contains(plan) {
            let step = self.in_flight.take_newest().expect("there is one");
            self.discard_step(step);
        }
        Ok(())
    }

    /// Takes the newest step back.
    fn discard_step(&mut self, mut step: Step) {
        step.sources.clear();
        step.fail(0..step.rows.len());
        self.withdraw_failed(&step);
        let came_back: HashSet<SeqIndex> = step.swapped_in.iter().map(|&(index, _)| index).collect();
        let copied: HashSet<SeqIndex> = step.copied_for.iter().copied().collect();
        for scheduled in &step.rows {
            let index = scheduled.sequence;
            self.keep_drafts(index, 0);
            let sequence = &mut self.sequences[index];
            sequence.num_in_flight -= 1;
            if sequence.take_back(scheduled.start, self.block_size) {
                self.next_epoch += 1;
                sequence.epoch = self.next_epoch;
            }
            let sequence = &self.sequences[index];
            if sequence.is_in_flight() || came_back.contains(&index) {
                continue;
            }
            let is_lost =
                sequence.is_void || copied.contains(&index) || self.cache.awaits_step(sequence.cursor);
            if sequence.has_ended {
                self.end_sequence(index);
            } else if is_lost || (self.cache.has_states() && !self.restore_state(index)) {
                self.sequences[index].is_guarded = self.cache.has_states();
                self.preempt_without_copy(index);
            } else if !self.sequences[index].has_computed {
                let request = self.sequences[index].key.request;
                self.resume_deadline(request);
            }
        }
        self.discard_swaps(&mut step);
        self.finish_step(step);
    }

    /// The oldest step in flight, if it is this one.
    fn due(&self, plan: u64) -> Result<&Step> {
        match self.in_flight.oldest() {
            Some(step) if step.id == plan => Ok(step),
            Some(step) if self.in_flight.contains(plan) => Err(Error::OutOfOrder { plan, oldest: step.id }),
            _ => Err(Error::NotInFlight { plan }),
        }
    }

    fn check_results(&self, plan: u64, sampled: &Sampled<'_>) -> Result<()> {
        let step = self.due(plan)?;
        let needed = step.num_samples;
        for (array, length) in [("sampled", sampled.tokens.len()), ("outcomes", sampled.outcomes.len())] {
            if length != needed {
                return Err(Error::ArrayLength { array, length, needed });
            }
        }
        for (index, &row) in sampled.failed_rows.iter().enumerate() {
            if row >= step.rows.len() {
                let (array, allowed) = ("failed_rows", "a batch row of the plan");
                return Err(Error::ArrayValue { array, index, value: row as i64, allowed });
            }
        }
        sampled.accepted.map_or(Ok(()), |accepted| self.check_accepted(step, sampled.tokens, accepted))
    }

    /// Whether no draft is accepted that a row's samples do not agree with: its K and V would be another token's.
    fn check_accepted(&self, step: &Step, tokens: &[TokenId], accepted: &[usize]) -> Result<()> {
        let (array, length, needed) = ("accepted", accepted.len(), step.rows.len());
        if length != needed {
            return Err(Error::ArrayLength { array, length, needed });
        }
        let mut first = 0;
        for (index, (scheduled, &accepted)) in step.rows.iter().zip(accepted).enumerate() {
            let agreeing = self.agreeing(scheduled, &tokens[first..first + scheduled.num_samples]);
            if accepted > agreeing {
                let allowed = "at most the row's drafts up to the first that differs from its sample";
                return Err(Error::ArrayValue { array, index, value: accepted as i64, allowed });
            }
            first += scheduled.num_samples;
        }
        Ok(())
    }

    /// What becomes of a batch row before its samples are looked at.
    fn fate(&self, scheduled: &Scheduled, has_failed: bool) -> FinishReason {
        let sequence = &self.sequences[scheduled.sequence];
        if sequence.has_ended {
            return FinishReason::Rejected;
        }
        if has_failed {
            return FinishReason::Error;
        }
        if !self.aborts.is_empty() && self.requests[&sequence.key.request].summary.aborted {
            return FinishReason::Abort;
        }
        if sequence.is_void { FinishReason::Void } else { FinishReason::None }
    }

    /// What a void row computed must not be published, whatever else ends it.
    fn give_up(&mut self, scheduled: &Scheduled, reason: FinishReason, has_failed: bool) {
        let index = scheduled.sequence;
        self.sequences[index].is_void |= has_failed;
        let sequence = &self.sequences[index];
        match reason {
            FinishReason::Void if sequence.is_in_flight() => {}
            FinishReason::Void => self.preempt_without_copy(index),
            FinishReason::Error => {
                self.request_of(index).failed = true;
                self.learn_output(index, OutputEstimate::learn_cut);
                self.end_in_turn(index);
            }
            FinishReason::Abort | FinishReason::Rejected => {
                if !sequence.is_void {
                    self.computed(index, scheduled.end().min(sequence.num_sampled()));
                }
                if reason == FinishReason::Abort {
                    self.learn_output(index, OutputEstimate::learn_cut);
                }
                self.end_in_turn(index);
            }
            FinishReason::None | FinishReason::Stop | FinishReason::Length => {}
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
        self.computed(index, scheduled.end());
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
        leader.is_fork |= scheduled.num_samples > 1;
        leader.rows.truncate(1);
        leader.states.working.truncate(1);
        leader.num_samples = 1;
        finished(first, self.accept(index, sampled.tokens[first], sampled.outcomes[first]));
    }

    /// A sequence's tokens are computed up to `end`: counts them and publishes the blocks that they fill.
    pub(super) fn computed(&mut self, index: SeqIndex, end: usize) {
        let sequence = &mut self.sequences[index];
        let again = end.min(sequence.high_water).saturating_sub(sequence.num_computed);
        sequence.num_computed = end;
        sequence.high_water = sequence.high_water.max(end);
        if self.config.enable_prefix_caching && sequence.cursor.published < self.block_size.full_blocks(end) {
            self.publish_computed(index);
            while self.sequences[index].is_fork && self.fold_forks(index) {
                self.publish_computed(index);
            }
            let Sequence { cursor, scope, tokens, num_computed, .. } = &mut self.sequences[index];
            self.cache.end_where_stuck(cursor, *scope, tokens, *num_computed, self.config.chunk());
        }
        self.states_computed(index);
        if !std::mem::replace(&mut self.sequences[index].has_computed, true) {
            self.count_start(index);
        }
        if again > 0 {
            self.totals.recomputed_tokens += again as u64;
            self.request_of(index).recomputed_tokens += again;
        }
    }

    /// A further sample of a request: the same blocks, a row of its own.
    fn fork(&mut self, leader: SeqIndex, child: usize) -> SeqIndex {
        let epoch = self.new_epoch();
        let leader = &self.sequences[leader];
        let mut fork = leader.fork(child, self.block_size.full_blocks(leader.num_computed), epoch);
        fork.reserve(self.block_size);
        let index = self.sequences.insert(fork);
        self.forked.push(index);
        index
    }

    /// Appends a sample, or ends its sequence.
    pub(super) fn accept(&mut self, index: SeqIndex, token: TokenId, outcome: Outcome) -> FinishReason {
        if outcome == Outcome::Failed {
            self.request_of(index).failed = true;
            self.learn_output(index, OutputEstimate::learn_cut);
            self.end_in_turn(index);
            return FinishReason::Error;
        }
        let sequence = &mut self.sequences[index];
        sequence.push_sampled(token);
        let full = sequence.tokens.len() >= sequence.max_len;
        let reason = match (outcome, full) {
            (Outcome::Stop, _) => FinishReason::Stop,
            (_, true) => FinishReason::Length,
            (_, false) => return FinishReason::None,
        };
        self.learn_output(index, OutputEstimate::learn);
        self.end_in_turn(index);
        reason
    }

    /// Learns from the output of a sequence that ends, by itself or cut off.
    pub(super) fn learn_output(
        &mut self,
        index: SeqIndex,
        learn: impl Fn(OutputEstimate, Option<usize>, usize) -> OutputEstimate,
    ) {
        let sequence = &self.sequences[index];
        let (limit, num_tokens) = (sequence.max_tokens, sequence.num_sampled() - sequence.prompt_len);
        self.outputs = learn(self.outputs, limit, num_tokens);
        if let Some(tenant) = self.requests.get(&sequence.key.request).and_then(|request| request.tenant) {
            self.shares.learn(tenant, |outputs| learn(outputs, limit, num_tokens));
        }
    }

    /// Brings the running list up to date with who ended, gave way or was forked off, then ends what was aborted.
    fn finish_step(&mut self, mut step: Step) {
        // The copies from the host are done: its blocks are free.
        step.swapped_in.clear();
        self.in_flight.recycle(step);
        let sequences = &self.sequences;
        let runs = |&index: &SeqIndex| sequences.contains(index) && sequences[index].is_running();
        if std::mem::take(&mut self.has_stopped) {
            self.running.retain(runs);
        }
        let mut forked = std::mem::take(&mut self.forked);
        forked.retain(runs);
        // Only now that no list holds them may the numbers of ended sequences be used again.
        self.sequences.recycle();
        forked.drain(..).for_each(|index| self.run(index));
        self.forked = forked;
        self.end_aborted();
    }

    pub(super) fn request_of(&mut self, index: SeqIndex) -> &mut RequestSummary {
        let request = self.sequences[index].key.request;
        &mut self.requests.get_mut(&request).expect("a live sequence has a request").summary
    }
}
