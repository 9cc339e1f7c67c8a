//! What admission by forecast learns from outputs that end by themselves, and from those that are cut off.
#![cfg(not(loom))]

use std::collections::HashMap;

use pykv_core::scheduler::{Outcome, OwnedArrays, Sampled, Submission, TableSync};
use pykv_core::{RequestId, Scheduler, SchedulerConfig};

/// How outputs end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Stop,
    Abort,
    AbortInFlight,
    FailedSample,
    FailedRow,
}

struct Run {
    scheduler: Scheduler,
    arrays: OwnedArrays,
    sync: TableSync,
    /// The request in each row, and the tokens that it has got.
    rows: HashMap<i32, (RequestId, usize)>,
}

impl Run {
    fn new() -> Self {
        let config = SchedulerConfig {
            num_blocks: 65,
            block_size: 4,
            max_num_seqs: 16,
            max_model_len: 200,
            enable_prefix_caching: false,
            ..SchedulerConfig::default()
        };
        Self {
            scheduler: Scheduler::new(config.clone()).unwrap(),
            arrays: OwnedArrays::new(&config),
            sync: TableSync::default(),
            rows: HashMap::new(),
        }
    }

    fn submit(&mut self) {
        let submission = Submission { max_tokens: Some(100), ..Submission::new(&[1; 8]) };
        self.scheduler.submit(submission).unwrap();
    }

    /// One step, in which outputs end that have got so many tokens.
    fn step(&mut self, end: End, length: usize) {
        let plan = self.scheduler.plan(&self.arrays.borrow(), &mut self.sync, 0.0).unwrap().unwrap();
        for place in 0..plan.num_placed {
            let request = RequestId::new(self.arrays.placed_requests[place] as u64);
            self.rows.entry(self.arrays.placed_rows[place]).or_insert((request, 0)).0 = request;
        }
        let mut outcomes = vec![Outcome::Ok; plan.num_samples];
        let (mut failed_rows, mut aborted) = (Vec::new(), Vec::new());
        for (sample, row) in self.arrays.sample_rows[..plan.num_samples].iter().enumerate() {
            let (request, count) = self.rows.get_mut(row).unwrap();
            *count += 1;
            if *count < length {
                continue;
            }
            *count = 0;
            match end {
                End::Stop => outcomes[sample] = Outcome::Stop,
                End::FailedSample => outcomes[sample] = Outcome::Failed,
                // All rows have a sample: prompts are short.
                End::FailedRow => failed_rows.push(sample),
                End::AbortInFlight => assert!(self.scheduler.abort(*request)),
                End::Abort => aborted.push(*request),
            }
        }
        let tokens = vec![1; plan.num_samples];
        let sampled =
            Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows: &failed_rows, accepted: None };
        self.scheduler.apply(plan.id, sampled, |_, _| ()).unwrap();
        aborted.into_iter().for_each(|request| assert!(self.scheduler.abort(request)));
        self.scheduler.take_ended();
    }

    /// Steps with some requests always waiting. Returns how many run in the end, at most, in as many steps as one takes.
    fn steps(&mut self, end: End, length: usize, steps: usize) -> usize {
        let mut most = 0;
        for step in 0..steps {
            while self.scheduler.stats().num_waiting < 4 {
                self.submit();
            }
            self.step(end, length);
            most = if step + length < steps { 0 } else { most.max(self.scheduler.stats().num_running) };
        }
        self.scheduler.check().unwrap();
        most
    }
}

#[test]
fn as_many_run_whether_outputs_stop_or_are_cut_off_at_the_same_length() {
    let mut run = Run::new();
    assert_eq!(run.steps(End::Stop, 100, 300), 3, "as long as limits are believed");
    for end in [End::Stop, End::Abort, End::AbortInFlight, End::FailedSample, End::FailedRow] {
        let mut run = Run::new();
        let most = run.steps(end, 40, 4000);
        assert_eq!(most, 5, "{end:?}");
        assert_eq!(run.scheduler.stats().preemptions, 0);
    }
}

#[test]
fn a_flood_of_early_cancels_does_not_make_admission_reckless() {
    for end in [End::Abort, End::AbortInFlight, End::FailedSample] {
        let mut run = Run::new();
        run.steps(End::Stop, 100, 300);
        run.steps(end, 1, 50);
        run.steps(End::Stop, 100, 1000);
        assert_eq!(run.scheduler.stats().preemptions, 0, "{end:?}");
    }
}

#[test]
fn who_is_cancelled_before_it_starts_teaches_nothing() {
    let mut run = Run::new();
    run.steps(End::Stop, 40, 3000);
    for _ in 0..1000 {
        let request = run.scheduler.submit(Submission::new(&[1; 8])).unwrap();
        assert!(run.scheduler.abort(request));
    }
    let most = run.steps(End::Stop, 40, 200);
    assert_eq!(most, 5);
    assert_eq!(run.scheduler.stats().preemptions, 0);
}
