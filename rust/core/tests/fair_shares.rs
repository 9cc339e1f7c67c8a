//! Tenants get equal shares of the tokens that are really computed, whatever their limits say.
#![cfg(not(loom))]

use std::collections::HashMap;

use pykv_core::policy::order::QueueOrder;
use pykv_core::scheduler::{
    AdmissionPolicy, Outcome, OwnedArrays, Plan, Proposal, Sampled, Submission, TableSync,
};
use pykv_core::{RequestId, Scheduler, SchedulerConfig};

/// What a tenant's requests are like.
#[derive(Clone, Copy)]
struct Load {
    prompt: usize,
    max_tokens: Option<usize>,
    num_samples: usize,
    /// Tokens at which each sample stops.
    output: usize,
    /// Requests that it keeps in the system.
    live: usize,
    /// How its requests end after the first chunk of their prompts, if at all.
    cut: Option<Cut>,
}

#[derive(Clone, Copy)]
enum Cut {
    Abort,
    AbortInFlight,
    FailedRow,
}

struct Run {
    scheduler: Scheduler,
    arrays: OwnedArrays,
    sync: TableSync,
    loads: Vec<Load>,
    owner: HashMap<RequestId, usize>,
    rows: HashMap<i32, (RequestId, usize)>,
    live: Vec<usize>,
    /// Tokens of each tenant's rows in the steps so far.
    tokens: Vec<usize>,
}

impl Run {
    fn new(loads: &[Load]) -> Self {
        Self::with(loads, SchedulerConfig { enable_prefix_caching: false, ..SchedulerConfig::default() })
    }

    fn with(loads: &[Load], options: SchedulerConfig) -> Self {
        let config = SchedulerConfig {
            num_blocks: 200,
            block_size: 4,
            max_num_seqs: 16,
            max_model_len: 256,
            max_num_batched_tokens: 128,
            max_queued_requests: 1 << 20,
            queue_order: QueueOrder::FairShare,
            ..options
        };
        Self {
            scheduler: Scheduler::new(config.clone()).unwrap(),
            arrays: OwnedArrays::new(&config),
            sync: TableSync::default(),
            loads: loads.to_vec(),
            owner: HashMap::new(),
            rows: HashMap::new(),
            live: vec![0; loads.len()],
            tokens: vec![0; loads.len()],
        }
    }

    fn submit(&mut self, tenant: usize) {
        let Load { prompt, max_tokens, num_samples, .. } = self.loads[tenant];
        let (prompt, name) = (vec![1; prompt], tenant.to_le_bytes());
        let submission = Submission { max_tokens, num_samples, tenant: &name, ..Submission::new(&prompt) };
        let request = self.scheduler.submit(submission).unwrap();
        self.owner.insert(request, tenant);
        self.live[tenant] += 1;
    }

    fn step(&mut self) {
        for tenant in 0..self.loads.len() {
            while self.live[tenant] < self.loads[tenant].live {
                self.submit(tenant);
            }
        }
        self.propose();
        let plan = self.scheduler.plan(&self.arrays.borrow(), &mut self.sync, 0.0).unwrap().unwrap();
        for place in 0..plan.num_placed {
            let request = RequestId::new(self.arrays.placed_requests[place] as u64);
            self.rows.insert(self.arrays.placed_rows[place], (request, 0));
        }
        let (failed_rows, aborted) = self.count_and_cut(plan);
        let outcomes: Vec<_> = self.arrays.sample_rows[..plan.num_samples]
            .iter()
            .map(|row| {
                let (request, count) = self.rows.get_mut(row).unwrap();
                *count += 1;
                let is_last = *count == self.loads[self.owner[request]].output;
                if is_last { Outcome::Stop } else { Outcome::Ok }
            })
            .collect();
        let tokens = vec![1; plan.num_samples];
        let sampled =
            Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows: &failed_rows, accepted: None };
        let mut ended = self.scheduler.apply(plan.id, sampled, |_, _| ()).unwrap();
        aborted.into_iter().for_each(|request| assert!(self.scheduler.abort(request)));
        ended.extend(self.scheduler.take_ended());
        for ended in ended {
            self.live[self.owner.remove(&ended.request).unwrap()] -= 1;
        }
    }

    /// Drafts of which none is what is sampled.
    fn propose(&mut self) {
        let config = self.scheduler.config();
        let (rows, most) = (config.max_num_seqs, config.num_lookahead_tokens);
        let starts: Vec<_> = (0..=rows).map(|row| row * most).collect();
        let (rows, tokens) = (Vec::from_iter(0..rows), vec![2; rows * most]);
        self.scheduler.propose(Proposal { rows: &rows, starts: &starts, tokens: &tokens }).unwrap();
    }

    /// Counts what a step computes. Returns the rows that fail, and who is aborted after it.
    fn count_and_cut(&mut self, plan: Plan) -> (Vec<usize>, Vec<RequestId>) {
        let (mut failed_rows, mut aborted) = (Vec::new(), Vec::new());
        for batch_row in 0..plan.num_batch_rows {
            let (request, _) = self.rows[&self.arrays.table_rows[batch_row]];
            let tenant = self.owner[&request];
            let span = &self.arrays.query_starts[batch_row..=batch_row + 1];
            self.tokens[tenant] += (span[1] - span[0]) as usize;
            match self.loads[tenant].cut {
                Some(Cut::FailedRow) => failed_rows.push(batch_row),
                Some(Cut::Abort) => aborted.push(request),
                Some(Cut::AbortInFlight) => assert!(self.scheduler.abort(request)),
                None => {}
            }
        }
        (failed_rows, aborted)
    }

    /// Each tenant's share of the tokens over so many steps, as a multiple of an equal one.
    fn shares(&mut self, steps: usize) -> Vec<f64> {
        self.tokens.fill(0);
        (0..steps).for_each(|_| self.step());
        self.scheduler.check().unwrap();
        let equal = self.tokens.iter().sum::<usize>() as f64 / self.tokens.len() as f64;
        self.tokens.iter().map(|&tokens| tokens as f64 / equal).collect()
    }
}

fn assert_equal_shares(shares: &[f64]) {
    assert!(shares.iter().all(|share| (0.95..1.05).contains(share)), "{shares:.3?}");
}

const FULL: Load =
    Load { prompt: 10, max_tokens: Some(100), num_samples: 1, output: 100, live: 100, cut: None };

#[test]
fn two_tenants_get_equal_shares_whatever_part_of_their_limits_they_use() {
    for other in [
        Load { output: 5, ..FULL },
        Load { output: 200, max_tokens: None, ..FULL },
        Load { output: 30, num_samples: 4, ..FULL },
        Load { prompt: 60, output: 10, max_tokens: Some(10), live: 20, ..FULL },
    ] {
        let mut run = Run::new(&[FULL, other]);
        run.shares(200);
        assert_equal_shares(&run.shares(6000));
    }
}

#[test]
fn what_is_found_in_the_cache_does_not_count() {
    let mut run = Run::with(&[FULL, Load { prompt: 61, output: 20, ..FULL }], SchedulerConfig::default());
    run.shares(200);
    assert_equal_shares(&run.shares(6000));
}

#[test]
fn fifty_tenants_get_equal_shares() {
    let load =
        |tenant: usize| Load { output: 2 + 7 * (tenant % 15), prompt: 1 + tenant % 9, live: 3, ..FULL };
    let loads: Vec<_> = (0..50).map(load).collect();
    let mut run = Run::new(&loads);
    run.shares(200);
    assert_equal_shares(&run.shares(30_000));
}

#[test]
fn requests_that_were_sent_at_once_are_counted_as_they_end_too() {
    let mut run = Run::new(&[FULL, Load { output: 5, live: 0, ..FULL }]);
    (0..10_000).for_each(|_| run.submit(1));
    run.shares(200);
    assert_equal_shares(&run.shares(4000));
}

#[test]
fn who_comes_back_has_saved_nothing_up() {
    let mut run = Run::new(&[FULL, Load { live: 0, ..FULL }]);
    run.shares(3000);
    run.loads[1].live = 100;
    run.shares(100);
    assert_equal_shares(&run.shares(3000));
}

#[test]
fn of_prompts_that_are_cut_off_only_what_was_computed_counts() {
    for cut in [Cut::Abort, Cut::AbortInFlight, Cut::FailedRow] {
        let cut_off = Load { prompt: 200, max_tokens: Some(2), cut: Some(cut), ..FULL };
        let options = SchedulerConfig {
            max_chunk_tokens: 16,
            enable_prefix_caching: false,
            ..SchedulerConfig::default()
        };
        let mut run = Run::with(&[cut_off, Load { prompt: 40, output: 2, ..FULL }], options);
        run.shares(200);
        assert_equal_shares(&run.shares(3000));
    }
}

#[test]
fn drafts_count_whether_they_are_accepted_or_not() {
    let options = SchedulerConfig {
        num_lookahead_tokens: 4,
        enable_prefix_caching: false,
        ..SchedulerConfig::default()
    };
    let decodes = Load { prompt: 4, ..FULL };
    let prefills = Load { prompt: 100, output: 2, max_tokens: Some(2), ..FULL };
    let mut run = Run::with(&[decodes, prefills], options);
    run.shares(200);
    assert_equal_shares(&run.shares(6000));
}

#[test]
fn what_is_computed_again_counts() {
    let options = SchedulerConfig {
        admission: AdmissionPolicy::Watermark,
        watermark: 0.0,
        enable_prefix_caching: false,
        ..SchedulerConfig::default()
    };
    let long = Load { prompt: 100, max_tokens: None, output: 140, live: 20, ..FULL };
    let mut run = Run::with(&[long, Load { output: 5, ..FULL }], options);
    run.shares(200);
    let shares = run.shares(6000);
    assert!(run.scheduler.stats().recomputed_tokens > 0);
    assert_equal_shares(&shares);
}
