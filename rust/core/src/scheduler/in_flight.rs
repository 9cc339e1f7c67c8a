//! The steps that were planned and are neither applied nor discarded, and what waits for them.
//!
//! ```text
//! plan n    plan n+1    apply n    plan n+2    apply n+1   ...
//! [n]       [n, n+1]    [n+1]      [n+1, n+2]  [n+2]
//! ```
//! A step is applied in its turn, so a sequence that has a row in a later step can learn too late that it should not:
//! it keeps its rows and blocks until that step is over, and nothing more is planned for it.

use std::collections::VecDeque;

use super::Scheduler;
use super::sequence::{SeqIndex, Sequence};
use super::step::Step;
use crate::units::{BlockSize, TokenId};

/// What stands for a token that a step in flight samples.
const PLACEHOLDER: TokenId = 0;

/// The steps in flight, the oldest first, and the lists of those that are over: planning allocates nothing in the long
/// run.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    steps: VecDeque<Step>,
    spare: Vec<Step>,
}

impl InFlight {
    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    /// The oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Step> {
        self.steps.iter()
    }

    pub(super) fn oldest(&self) -> Option<&Step> {
        self.steps.front()
    }

    pub(super) fn newest(&self) -> Option<&Step> {
        self.steps.back()
    }

    pub(super) fn oldest_mut(&mut self) -> Option<&mut Step> {
        self.steps.front_mut()
    }

    pub(super) fn contains(&self, plan: u64) -> bool {
        self.steps.iter().any(|step| step.id == plan)
    }

    pub(super) fn push(&mut self, step: Step) {
        step.watched.begin(step.id);
        self.steps.push_back(step);
    }

    pub(super) fn take_oldest(&mut self) -> Option<Step> {
        self.steps.pop_front().inspect(|step| step.watched.end())
    }

    pub(super) fn take_newest(&mut self) -> Option<Step> {
        self.steps.pop_back().inspect(|step| step.watched.end())
    }

    /// An empty step.
    pub(super) fn fresh(&mut self, id: u64) -> Step {
        let mut step = self.spare.pop().unwrap_or_default();
        step.clear(id);
        step
    }

    pub(super) fn recycle(&mut self, step: Step) {
        self.spare.push(step);
    }
}

impl Sequence {
    /// Whether the next step may go on behind a token that the newest step in flight samples.
    pub(super) fn can_go_on_unseen(&self) -> bool {
        self.num_unplanned() == 0 && self.num_samples == 1 && self.tokens.len() + 1 < self.max_len
    }

    /// Appends a stand-in for the token that the newest step in flight samples.
    pub(super) fn push_placeholder(&mut self) {
        self.placeholder = Some(self.sample);
        self.tokens.push(PLACEHOLDER);
    }

    /// Its tokens without the stand-in.
    pub(super) fn num_sampled(&self) -> usize {
        self.tokens.len() - usize::from(self.placeholder.is_some())
    }

    /// Takes the stand-in out again, if there is one. Returns the sample that it stood for.
    pub(super) fn pop_placeholder(&mut self) -> Option<u32> {
        let sample = self.placeholder.take()?;
        self.tokens.pop();
        Some(sample)
    }

    /// Appends a sampled token, or puts it where its stand-in is.
    pub(super) fn push_sampled(&mut self, token: TokenId) {
        self.pop_placeholder();
        self.tokens.push(token);
    }

    /// Takes back what a step at hand had planned from position `start` on. Returns whether blocks were given back.
    pub(super) fn take_back(&mut self, start: usize, size: BlockSize) -> bool {
        if let Some(sample) = self.pop_placeholder() {
            // The step before it is the newest again.
            self.sample = sample;
        }
        self.num_planned = start;
        let len = size.blocks_for(self.tokens.len());
        let is_longer = self.tables.iter().any(|table| table.len() > len);
        self.tables.iter_mut().for_each(|table| table.truncate(len));
        is_longer
    }
}

impl Scheduler {
    /// Ends a sequence as soon as no step in flight has a row for it. The caller takes it out of `running`.
    pub(super) fn end_in_turn(&mut self, index: SeqIndex) {
        let sequence = &mut self.sequences[index];
        if sequence.num_in_flight == 0 {
            self.end_sequence(index);
        } else {
            (sequence.has_ended, sequence.is_leaving) = (true, true);
        }
    }

    /// Ends what is left of aborted requests, but for sequences that a step in flight has a row for: nothing more is
    /// planned for those.
    pub(super) fn end_aborted(&mut self) {
        for request in std::mem::take(&mut self.aborts) {
            self.end_request(request);
            if !self.requests.contains_key(&request) {
                continue;
            }
            self.aborts.push(request);
            for place in self.running_of(request) {
                self.sequences[self.running[place]].is_leaving = true;
            }
        }
    }

    /// Whether a plan may have a row for a sequence.
    pub(super) fn may_be_planned(&self, index: SeqIndex) -> bool {
        !self.sequences[index].is_leaving && !self.held_back.contains(&index)
    }

    /// Leaves the running sequence at `place` out of the plan at hand, so that the next one can preempt it.
    pub(super) fn hold_back(&mut self, place: Option<usize>) {
        self.held_back.extend(place.map(|place| self.running[place]));
    }
}
