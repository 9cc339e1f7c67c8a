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
    /// The rows that these hold.
    num_rows: usize,
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

    /// Rows that the sequences hold.
    pub(super) fn num_rows(&self) -> usize {
        self.num_rows
    }

    fn insert(&mut self, index: SeqIndex, sequence: &Sequence) {
        self.num_samples += sequence.num_samples;
        self.sequences.insert(sequence.key, index);
        if sequence.is_running() {
            self.placed.insert(sequence.key, index);
            self.num_rows += sequence.rows.len();
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
            if self.in_flight.is_empty() {
                self.set_aside(request);
            } else {
                self.paused.unsettled.insert(request);
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
            if self.paused.placed.remove(&key).is_some() {
                self.paused.num_rows -= self.sequences[index].rows.len();
            }
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
        let num_running = self.running.len();
        let unsettled = std::mem::take(&mut self.paused.unsettled);
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
        // Who waits may be the first now, or alone.
        self.queue_changed |= self.running.len() < num_running;
        for request in unsettled {
            if self.paused.requests.contains(&request) {
                self.set_waiting_aside(request);
            }
        }
    }

    /// The same of one request, while no step is in flight.
    fn set_aside(&mut self, request: RequestId) {
        self.paused.unsettled.remove(&request);
        let running = self.running_of(request);
        self.queue_changed |= !running.is_empty();
        for index in self.running.drain(running) {
            self.paused.insert(index, &self.sequences[index]);
        }
        self.set_waiting_aside(request);
    }

    fn set_waiting_aside(&mut self, request: RequestId) {
        let waiting = self.waiting_of(request);
        self.queue_changed |= !waiting.is_empty();
        for (key, index) in waiting {
            self.dequeue(key);
            self.end_stall(index);
            self.paused.insert(index, &self.sequences[index]);
        }
    }

    /// Whether what is kept besides the paused sequences agrees with them.
    pub(super) fn check_paused(&self) -> Result<()> {
        let paused: Vec<_> = self.paused.sequences.iter().map(|(&key, &index)| (key, index)).collect();
        let placed =
            paused.iter().map(|&(_, index)| &self.sequences[index]).filter(|paused| paused.is_running());
        let (placed, num_rows) = (placed.clone().count(), placed.map(|paused| paused.rows.len()).sum());
        let num_samples: usize = paused.iter().map(|&(_, index)| self.sequences[index].num_samples).sum();
        let is_misplaced = |&(key, index): &(SeqKey, SeqIndex)| self.sequences[index].key != key;
        let counted = (self.paused.placed.len(), self.paused.num_rows, self.paused.num_samples);
        if counted != (placed, num_rows, num_samples) || paused.iter().any(is_misplaced) {
            let detail = format!(
                "{placed} paused sequences are placed in {num_rows} rows, all have {num_samples} samples, counted are {counted:?}"
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
        self.paused.num_rows -= self.sequences[index].rows.len();
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
    use crate::scheduler::{Outcome, OwnedArrays, Sampled, SchedulerConfig, Submission, TableSync};

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
        assert_eq!(scheduler.stats().peak_num_running, 1);
        assert!(scheduler.resume(requests[3]) && !scheduler.resume(requests[3]));
        assert!(scheduler.abort(requests[4]));
        scheduler.check().unwrap();
        let plan = scheduler.plan(&arrays.borrow(), &mut sync, 0.0).unwrap().unwrap();
        assert_eq!(plan.num_batch_rows, 2);
        assert!(scheduler.paused.resumed.is_empty());
        assert_eq!(scheduler.stats().num_paused, 6);
        scheduler.check().unwrap();
    }

    #[test]
    fn a_pause_between_steps_leaves_the_others_as_they_are() {
        let config = SchedulerConfig {
            num_blocks: 400,
            block_size: 4,
            max_num_seqs: 60,
            max_num_batched_tokens: 600,
            max_model_len: 16,
            ..SchedulerConfig::default()
        };
        let mut scheduler = Scheduler::new(config.clone()).unwrap();
        let (mut arrays, mut sync) = (OwnedArrays::new(&config), TableSync::default());
        let submit = |scheduler: &mut Scheduler, num_samples| {
            let submission = Submission { num_samples, max_tokens: Some(4), ..Submission::new(&[1; 5]) };
            scheduler.submit(submission).unwrap()
        };
        let requests: Vec<_> = (0..24).map(|place| submit(&mut scheduler, 1 + place % 3)).collect();
        let plan = scheduler.plan(&arrays.borrow(), &mut sync, 0.0).unwrap().unwrap();
        let (tokens, outcomes) = (vec![1; plan.num_samples], vec![Outcome::Ok; plan.num_samples]);
        let sampled = Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows: &[], accepted: None };
        scheduler.apply(plan.id, sampled, |_, _| ()).unwrap();
        let late = submit(&mut scheduler, 2);
        let keys = |scheduler: &Scheduler| -> Vec<_> {
            scheduler.running.iter().map(|&index| scheduler.sequences[index].key).collect()
        };
        for request in [requests[0], requests[23], requests[7], requests[8], requests[2], late] {
            let left: Vec<_> = keys(&scheduler).into_iter().filter(|key| key.request != request).collect();
            assert!(scheduler.pause(request) && scheduler.pause(request));
            assert_eq!(keys(&scheduler), left);
            assert!(scheduler.paused.unsettled.is_empty());
            scheduler.check().unwrap();
        }
        assert!(scheduler.waiting.is_empty(), "what waits is set aside too");
        assert_eq!(scheduler.stats().num_paused, 1 + 3 + 2 + 3 + 3 + 2);
        assert_eq!(scheduler.stats().num_running, 48 - 12);
        for request in [requests[8], late] {
            assert!(scheduler.resume(request));
        }
        let plan = scheduler.plan(&arrays.borrow(), &mut sync, 0.0).unwrap().unwrap();
        assert_eq!(plan.num_batch_rows, 48 - 12 + 3 + 1);
        assert_eq!(scheduler.stats().peak_num_running, 48);
        scheduler.check().unwrap();
    }
}
