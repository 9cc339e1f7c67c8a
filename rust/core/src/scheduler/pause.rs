//! Requests that are paused: they neither run nor wait.
//!
//! A paused sequence keeps its rows and blocks until somebody else needs them: it gives way before all that run, whoever
//! came first. So those that are not paused make progress as if it were not there.

use std::collections::{BTreeMap, BTreeSet};

use super::Scheduler;
use super::ranks::Relief;
use super::sequence::{SeqIndex, SeqKey};
use super::step::Step;
use crate::units::RequestId;

/// The requests that are paused and, once no step in flight has a row for them, their sequences.
#[derive(Debug, Default)]
pub(super) struct Paused {
    requests: BTreeSet<RequestId>,
    /// Those with rows hold blocks too.
    sequences: BTreeMap<SeqKey, SeqIndex>,
}

impl Paused {
    /// The sequences, in their order.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = SeqIndex> {
        self.sequences.values().copied()
    }

    /// Takes the sequences of a request out.
    pub(super) fn take(&mut self, request: RequestId) -> Vec<SeqIndex> {
        take_from(&mut self.sequences, |of| of == request)
    }

    fn take_resumed(&mut self) -> Vec<SeqIndex> {
        let Self { requests, sequences } = self;
        take_from(sequences, |of| !requests.contains(&of))
    }

    /// A request has ended.
    pub(super) fn forget(&mut self, request: RequestId) {
        self.requests.remove(&request);
    }
}

impl Scheduler {
    /// Keeps a request out of the plans to come until [`resume`](Self::resume). Its blocks stay its own as long as nobody
    /// else needs them; the time until it is resumed does not count as a stall. Returns whether it lived.
    pub fn pause(&mut self, request: RequestId) -> bool {
        let lives = self.requests.contains_key(&request);
        if lives {
            self.paused.requests.insert(request);
            if self.in_flight.is_empty() {
                self.set_paused_aside();
            }
        }
        lives
    }

    /// Lets a paused request go on, from the next plan on. Returns whether there was one.
    pub fn resume(&mut self, request: RequestId) -> bool {
        self.paused.requests.remove(&request)
    }

    /// Brings the lists from which a step is planned up to date with who is paused. Only a plan knows what time it is.
    pub(super) fn settle_pauses(&mut self) {
        for index in self.paused.take_resumed() {
            if self.sequences[index].is_running() {
                self.run(index);
                continue;
            }
            let sequence = &mut self.sequences[index];
            sequence.stalled_since = sequence.started_before.then_some(self.now);
            self.enqueue(index);
        }
        self.set_paused_aside();
    }

    /// Takes the sequences of paused requests out of the lists from which a step is planned. Who is in a step in flight stays
    /// there and is left out of the plan.
    fn set_paused_aside(&mut self) {
        if self.paused.requests.is_empty() {
            return;
        }
        let num_running = self.running.len();
        let Self { running, sequences, paused, held_back, .. } = self;
        running.retain(|&index| {
            let key = sequences[index].key;
            let is_paused = paused.requests.contains(&key.request);
            if is_paused && sequences[index].is_in_flight() {
                held_back.push(index);
                return true;
            }
            if is_paused {
                paused.sequences.insert(key, index);
            }
            !is_paused
        });
        let waiting: Vec<_> =
            self.paused.requests.iter().flat_map(|&request| self.waiting_of(request)).collect();
        // Who waits may be the first now, or alone.
        self.queue_changed |= self.running.len() < num_running || !waiting.is_empty();
        for (key, index) in waiting {
            self.dequeue(key);
            self.end_stall(index);
            self.paused.sequences.insert(key, index);
        }
    }

    /// Takes rows and blocks from paused sequences until the first that waits can start, or there is none left.
    pub(super) fn preempt_paused_for_waiting(&mut self, step: &mut Step) {
        while let Some((_, first)) = self.first_waiting()
            && self.paused.iter().any(|index| self.sequences[index].is_running())
            && !self.fits(first, Relief::default())
        {
            self.preempt_paused(step);
        }
    }

    /// Takes the rows and blocks of the last paused sequence that has some. Returns whether there was one.
    pub(super) fn preempt_paused(&mut self, step: &mut Step) -> bool {
        let last = self.paused.iter().rev().find(|&index| self.sequences[index].is_running());
        let Some(index) = last else { return false };
        self.preempt(step, index);
        // It does not wait to go on.
        self.dequeue(self.sequences[index].key);
        self.sequences[index].stalled_since = None;
        true
    }
}

fn take_from(
    sequences: &mut BTreeMap<SeqKey, SeqIndex>,
    is_taken: impl Fn(RequestId) -> bool,
) -> Vec<SeqIndex> {
    let mut taken = Vec::new();
    sequences.retain(|key, &mut index| {
        let takes = is_taken(key.request);
        taken.extend(takes.then_some(index));
        !takes
    });
    taken
}
