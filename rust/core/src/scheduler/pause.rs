//! Requests that are paused: they neither run nor wait.
//!
//! A paused sequence keeps its rows and blocks until somebody else needs them: it gives way before all that run, whoever
//! came first. So those that are not paused make progress as if it were not there.

use std::collections::{BTreeMap, BTreeSet};

use super::Scheduler;
use super::sequence::{SeqIndex, SeqKey, Sequence};
use super::step::Step;
use crate::error::{Error, Result};
use crate::units::RequestId;

/// The requests that are paused and, once no step in flight has a row for them, their sequences. What a step costs does not
/// grow with them: only what has changed since the last one is looked at.
#[derive(Debug, Default)]
pub(super) struct Paused {
    requests: BTreeSet<RequestId>,
    /// Those of them whose sequences may still be among those that run or wait.
    unsettled: BTreeSet<RequestId>,
    /// Requests that were resumed since the last plan.
    resumed: BTreeSet<RequestId>,
    sequences: BTreeMap<SeqKey, SeqIndex>,
    /// Those of the sequences that hold rows and blocks.
    placed: BTreeMap<SeqKey, SeqIndex>,
    /// Samples of the sequences.
    num_samples: usize,
}

impl Paused {
    /// The sequences, in their order.
    pub(super) fn iter(&self) -> impl Iterator<Item = SeqIndex> {
        self.sequences.values().copied()
    }

    /// Those of them that hold rows and blocks.
    pub(super) fn iter_placed(&self) -> impl DoubleEndedIterator<Item = SeqIndex> {
        self.placed.values().copied()
    }

    /// Samples of the sequences, those included that are not forked off yet.
    pub(super) fn num_samples(&self) -> usize {
        self.num_samples
    }

    fn insert(&mut self, index: SeqIndex, sequence: &Sequence) {
        self.num_samples += sequence.num_samples;
        self.sequences.insert(sequence.key, index);
        if sequence.is_running() {
            self.placed.insert(sequence.key, index);
        }
    }

    /// A request has ended.
    pub(super) fn forget(&mut self, request: RequestId) {
        self.requests.remove(&request);
        self.unsettled.remove(&request);
        self.resumed.remove(&request);
    }
}

impl Scheduler {
    /// Keeps a request out of the plans to come until [`resume`](Self::resume). Its blocks stay its own as long as nobody
    /// else needs them; the time until it is resumed does not count as a stall. Returns whether it lived.
    pub fn pause(&mut self, request: RequestId) -> bool {
        let lives = self.requests.contains_key(&request);
        if lives {
            self.paused.requests.insert(request);
            self.paused.unsettled.insert(request);
            if self.in_flight.is_empty() {
                self.set_paused_aside();
            }
        }
        lives
    }

    /// Lets a paused request go on, from the next plan on. Returns whether there was one.
    pub fn resume(&mut self, request: RequestId) -> bool {
        let was_paused = self.paused.requests.remove(&request);
        if was_paused {
            self.paused.resumed.insert(request);
        }
        was_paused
    }

    /// Takes the sequences of a request out of those that are paused.
    pub(super) fn take_paused(&mut self, request: RequestId) -> Vec<SeqIndex> {
        let Some(entry) = self.requests.get(&request) else { return Vec::new() };
        let first = SeqKey { rank: entry.rank, request, child: 0 };
        let of_request = first..=SeqKey { child: u32::MAX, ..first };
        let taken: Vec<_> =
            self.paused.sequences.range(of_request).map(|(&key, &index)| (key, index)).collect();
        let take = |(key, index)| {
            self.paused.sequences.remove(&key);
            self.paused.placed.remove(&key);
            self.paused.num_samples -= self.sequences[index].num_samples;
            index
        };
        taken.into_iter().map(take).collect()
    }

    /// Brings the lists from which a step is planned up to date with who is paused. Only a plan knows what time it is.
    pub(super) fn settle_pauses(&mut self) {
        let resumed = std::mem::take(&mut self.paused.resumed);
        let is_resumed = |request: &RequestId| !self.paused.requests.contains(request);
        let resumed: Vec<_> = resumed.into_iter().filter(is_resumed).collect();
        let indices: Vec<_> = resumed.into_iter().flat_map(|request| self.take_paused(request)).collect();
        for index in indices {
            if self.sequences[index].is_running() {
                self.run(index);
                continue;
            }
            let sequence = &mut self.sequences[index];
            sequence.stalled_since = sequence.has_computed.then_some(self.now);
            self.enqueue(index);
        }
        self.set_paused_aside();
    }

    /// Takes the sequences of paused requests out of the lists from which a step is planned. Who is in a step in flight stays
    /// there and is left out of the plan.
    fn set_paused_aside(&mut self) {
        if self.paused.unsettled.is_empty() {
            return;
        }
        let unsettled = std::mem::take(&mut self.paused.unsettled);
        let num_running = self.running.len();
        let Self { running, sequences, paused, held_back, .. } = self;
        running.retain(|&index| {
            let key = sequences[index].key;
            let is_paused = paused.requests.contains(&key.request);
            if is_paused && sequences[index].is_in_flight() {
                held_back.insert(index);
                paused.unsettled.insert(key.request);
                return true;
            }
            if is_paused {
                paused.insert(index, &sequences[index]);
            }
            !is_paused
        });
        let still_paused = unsettled.into_iter().filter(|request| self.paused.requests.contains(request));
        let waiting: Vec<_> = still_paused.flat_map(|request| self.waiting_of(request)).collect();
        // Who waits may be the first now, or alone.
        self.queue_changed |= self.running.len() < num_running || !waiting.is_empty();
        for (key, index) in waiting {
            self.dequeue(key);
            self.end_stall(index);
            self.paused.insert(index, &self.sequences[index]);
        }
    }

    /// Whether what is kept besides the paused sequences agrees with them.
    pub(super) fn check_paused(&self) -> Result<()> {
        let paused: Vec<_> = self.paused.sequences.iter().map(|(&key, &index)| (key, index)).collect();
        let placed = paused.iter().filter(|(_, index)| self.sequences[*index].is_running()).count();
        let num_samples: usize = paused.iter().map(|&(_, index)| self.sequences[index].num_samples).sum();
        let is_misplaced = |&(key, index): &(SeqKey, SeqIndex)| self.sequences[index].key != key;
        let counted = (self.paused.placed.len(), self.paused.num_samples);
        if counted != (placed, num_samples) || paused.iter().any(is_misplaced) {
            let detail = format!(
                "{placed} paused sequences are placed, of {num_samples} samples, counted are {counted:?}"
            );
            return Err(Error::broken("I8 lists", detail));
        }
        let is_settled = |key: &SeqKey| {
            self.paused.requests.contains(&key.request) && !self.paused.unsettled.contains(&key.request)
        };
        let running = self.running.iter().map(|&index| &self.sequences[index].key);
        match running.chain(self.waiting.keys()).find(|key| is_settled(key)) {
            Some(key) => {
                let detail = format!("request {} is paused and set aside, and goes on", key.request.get());
                Err(Error::broken("I8 lists", detail))
            }
            None => Ok(()),
        }
    }

    /// Takes the rows and blocks of the last paused sequence that has some. Returns whether there was one.
    pub(super) fn preempt_paused(&mut self, step: &mut Step) -> bool {
        let Some((_, index)) = self.paused.placed.pop_last() else { return false };
        self.preempt(step, index);
        // It does not wait to go on.
        self.dequeue(self.sequences[index].key);
        self.sequences[index].stalled_since = None;
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::scheduler::{OwnedArrays, SchedulerConfig, Submission, TableSync};

    #[test]
    fn a_step_looks_only_at_pauses_that_changed() {
        let config = SchedulerConfig { num_blocks: 16, block_size: 4, ..SchedulerConfig::default() };
        let mut scheduler = Scheduler::new(config.clone()).unwrap();
        let (mut arrays, mut sync) = (OwnedArrays::new(&config), TableSync::default());
        let requests: Vec<_> = (0..9)
            .map(|_| {
                scheduler.submit(Submission { max_tokens: Some(2), ..Submission::new(&[1; 5]) }).unwrap()
            })
            .collect();
        requests[1..].iter().for_each(|&request| assert!(scheduler.pause(request)));
        let plan = scheduler.plan(&arrays.borrow(), &mut sync, 0.0).unwrap().unwrap();
        scheduler.discard(plan.id).unwrap();
        assert!(scheduler.paused.unsettled.is_empty() && scheduler.paused.placed.is_empty());
        assert_eq!((scheduler.stats().num_paused, scheduler.stats().num_running), (8, 1));
        assert!(scheduler.resume(requests[3]) && !scheduler.resume(requests[3]));
        assert!(scheduler.abort(requests[4]));
        scheduler.check().unwrap();
        let plan = scheduler.plan(&arrays.borrow(), &mut sync, 0.0).unwrap().unwrap();
        assert_eq!(plan.num_batch_rows, 2);
        assert!(scheduler.paused.resumed.is_empty());
        assert_eq!(scheduler.stats().num_paused, 6);
        scheduler.check().unwrap();
    }
}
