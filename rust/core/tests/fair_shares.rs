//! Tenants get equal shares of the tokens that are really computed, whatever their limits say.
#![cfg(not(loom))]

use std::collections::HashMap;

use pykv_core::policy::order::QueueOrder;
use pykv_core::scheduler::{AdmissionPolicy, Outcome, OwnedArrays, Sampled, Submission, TableSync};
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
}

struct Run {
    scheduler: Scheduler,
    arrays: OwnedArrays,
    sync: TableSync,
    loads: Vec<Load>,
    owner: HashMap<RequestId, usize>,
    rows: HashMap<i32, (RequestId, usize)>,
    live: Vec<usize>,
    tokens: Vec<usize>,
}

impl Run {
    fn new(loads: &[Load]) -> Self {
        Self::with_cache(loads, false)
    }

    fn with_cache(loads: &[Load], enable_prefix_caching: bool) -> Self {
        let config = SchedulerConfig {
            num_blocks: 200,
            block_size: 4,
            max_num_seqs: 16,
            max_model_len: 256,
            max_num_batched_tokens: 128,
            max_queued_requests: 1 << 20,
            queue_order: QueueOrder::FairShare,
            admission: AdmissionPolicy::Forecast,
            enable_prefix_caching,
            ..SchedulerConfig::default()
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
        let plan = self.scheduler.plan(&self.arrays.borrow(), &mut self.sync, 0.0).unwrap().unwrap();
        for place in 0..plan.num_placed {
            let request = RequestId::new(self.arrays.placed_requests[place] as u64);
            self.rows.insert(self.arrays.placed_rows[place], (request, 0));
        }
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
        let sampled = Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows: &[], accepted: None };
        for ended in self.scheduler.apply(plan.id, sampled, |_, _| ()).unwrap() {
            let tenant = self.owner.remove(&ended.request).unwrap();
            self.live[tenant] -= 1;
            // The last token of each sample is not computed.
            let output = ended.output_tokens - self.loads[tenant].num_samples;
            self.tokens[tenant] +=
                ended.prompt_tokens - ended.cached_tokens + output + ended.recomputed_tokens;
        }
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

const FULL: Load = Load { prompt: 10, max_tokens: Some(100), num_samples: 1, output: 100, live: 100 };

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
    let mut run = Run::with_cache(&[FULL, Load { prompt: 61, output: 20, ..FULL }], true);
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
