//! Guaranteed progress: whatever steps fail, as long as some do not, every request ends, with the tokens that it would
//! have got alone.
#![cfg(not(loom))]

#[path = "support/discard.rs"]
mod discard;
mod support;

use proptest::prelude::*;
use pykv_core::policy::order::QueueOrder;
use pykv_core::scheduler::{AdmissionPolicy, Outcome, Plan, Submission};
use pykv_core::{LayerGroup, SchedulerConfig, TokenId};
use support::Engine;

/// One sample a request, and room for all; blocks of 4 tokens, a place for a checkpoint every 16 of them.
fn config(num_state_slots: usize, max_num_seqs: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: 400,
        block_size: 4,
        num_state_slots,
        max_num_seqs,
        max_num_batched_tokens: 64,
        max_model_len: 60,
        admission: AdmissionPolicy::Watermark,
        ..SchedulerConfig::default()
    }
}

/// Which steps fail. None lets more than a few fail in a row.
#[derive(Clone, Copy, Debug)]
enum Failures {
    /// Each but every so many-th.
    AllBut(usize),
    /// Every so many-th.
    Every(usize),
    /// So many of a hundred, by chance.
    Percent(u64),
    /// Those that would leave a checkpoint.
    WithCheckpoints,
    /// Those in which a token is sampled.
    WithSamples,
    /// Those with several rows.
    WithSeveralRows,
    /// Those in which nobody starts.
    WithoutStarts,
}

impl Failures {
    fn fails(self, step: usize, seed: u64, plan: Plan) -> bool {
        match self {
            Self::AllBut(count) => !step.is_multiple_of(count),
            Self::Every(count) => step.is_multiple_of(count),
            Self::Percent(percent) => {
                let chance = (seed ^ step as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                (chance ^ (chance >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32 < (percent << 32) / 100
            }
            Self::WithCheckpoints => plan.num_state_saves > 0,
            Self::WithSamples => plan.num_samples > 0,
            Self::WithSeveralRows => plan.num_batch_rows > 1,
            Self::WithoutStarts => plan.num_state_restores == 0,
        }
    }
}

/// Steps that fail in a row at the most.
const MAX_IN_A_ROW: usize = 5;

struct Request {
    prompt: Vec<TokenId>,
    max_tokens: usize,
    num_samples: usize,
    reuse_cached: bool,
    priority: i32,
}

impl Request {
    fn new(prompt: Vec<TokenId>, max_tokens: usize, num_samples: usize) -> Self {
        Self { prompt, max_tokens, num_samples, reuse_cached: true, priority: 0 }
    }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|place| (place * 7 + seed) % 50).collect()
}

/// Runs requests to their end while steps fail; what those wrote is worth nothing. Panics if they take more steps that
/// do not fail than there are tokens, several times over. Returns how many steps it took in all.
fn run(config: SchedulerConfig, requests: &[Request], failures: Failures, seed: u64) -> usize {
    let mut engine = Engine::new(config);
    let ids: Vec<_> = (requests.iter())
        .map(|request| {
            let submission = Submission {
                max_tokens: Some(request.max_tokens),
                num_samples: request.num_samples,
                reuse_cached: request.reuse_cached,
                priority: request.priority,
                ..Submission::new(&request.prompt)
            };
            engine.scheduler.submit(submission).unwrap()
        })
        .collect();
    let of_one = |request: &Request| (request.prompt.len() + request.max_tokens) * request.num_samples;
    let most = 40 + 4 * requests.iter().map(of_one).sum::<usize>();
    let (mut num_steps, mut num_good, mut in_a_row) = (0, 0, 0);
    while let Some(plan) = engine.plan() {
        num_steps += 1;
        if in_a_row < MAX_IN_A_ROW && failures.fails(num_steps, seed, plan) {
            in_a_row += 1;
            engine.compute(plan);
            engine.discard(plan);
            continue;
        }
        (in_a_row, num_good) = (0, num_good + 1);
        assert!(num_good <= most, "{num_good} steps of {num_steps} did not fail, and there is no end");
        let sampled = engine.compute(plan);
        engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &[]);
        engine.scheduler.check().unwrap();
    }
    for (id, request) in ids.iter().zip(requests) {
        for child in 0..request.num_samples as u32 {
            let expected = engine.expected(&request.prompt, child.into(), request.max_tokens);
            assert_eq!(engine.outputs[&(id.get(), child)], expected, "request {}.{child}", id.get());
        }
    }
    let stats = engine.scheduler.stats();
    assert_eq!((stats.num_requests, stats.blocks.active, stats.state_slots.working), (0, 0, 0));
    num_steps
}

#[test]
fn one_slot_to_start_again_from_is_enough() {
    // Room for one that runs; no block is ever filled between two failures.
    let requests: Vec<_> = (0..3).map(|seed| Request::new(prompt(seed, 9), 20, 1)).collect();
    let config = SchedulerConfig { max_num_batched_tokens: 1, ..config(3, 4) };
    run(config, &requests, Failures::AllBut(2), 0);
}

#[test]
fn every_step_that_does_not_fail_counts() {
    let one = [Request::new(prompt(0, 8), 40, 1)];
    let steps = run(config(3, 1), &one, Failures::AllBut(3), 0);
    assert!(steps <= 3 * (40 + 2), "{steps} steps, of which every third does not fail, for 40 tokens");
}

#[test]
fn a_request_that_uses_no_checkpoint_ends_too() {
    for enable_prefix_caching in [true, false] {
        let request = |seed| Request { reuse_cached: false, ..Request::new(prompt(seed, 20), 20, 1) };
        let config = SchedulerConfig { enable_prefix_caching, max_num_batched_tokens: 8, ..config(4, 3) };
        run(config, &[0, 1, 2].map(request), Failures::AllBut(2), 0);
    }
}

#[test]
fn samples_of_one_prompt_end_too() {
    // As many as there may be: a slot for each and one more.
    let requests = [Request::new(prompt(0, 10), 20, 3), Request::new(prompt(1, 13), 20, 2)];
    for failures in [Failures::AllBut(2), Failures::WithSamples, Failures::WithCheckpoints] {
        let config = SchedulerConfig { max_num_batched_tokens: 2, ..config(5, 4) };
        run(config, &requests, failures, 0);
    }
}

#[test]
fn who_comes_later_gives_its_slot_up_for_the_first() {
    // All slots are worked in when the first comes back from a pause that began after a failure.
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 16, ..config(4, 3) });
    let first = engine.submit(&prompt(0, 8), 20, 1);
    let plan = engine.plan().unwrap();
    engine.compute(plan);
    engine.discard(plan);
    assert!(engine.step() && engine.scheduler.pause(first));
    let others = [1, 2].map(|seed| engine.submit(&prompt(seed, 8), 30, 1));
    assert!(engine.step());
    assert_eq!(engine.scheduler.stats().state_slots.working, 3, "nobody else needs one yet");
    engine.scheduler.resume(first);
    let before = engine.scheduler.stats().preemptions;
    assert!(engine.step());
    assert_eq!(engine.scheduler.stats().preemptions, before + 1);
    engine.run();
    for (request, seed, num_tokens) in [(first, 0, 20), (others[0], 1, 30), (others[1], 2, 30)] {
        let expected = engine.expected(&prompt(seed, 8), 0, num_tokens);
        assert_eq!(engine.outputs[&(request.get(), 0)], expected);
    }
}

fn groups() -> impl Strategy<Value = Vec<LayerGroup>> {
    let window = (1..12usize).prop_map(|tokens| LayerGroup::Window { tokens });
    let one = prop_oneof![2 => Just(LayerGroup::Full), 1 => window.clone()];
    prop_oneof![3 => Just(vec![LayerGroup::Full]), 2 => (one, window).prop_map(|(one, other)| vec![one, other])]
}

fn failures() -> impl Strategy<Value = Failures> {
    prop_oneof![
        (2..4usize).prop_map(Failures::AllBut),
        (2..9usize).prop_map(Failures::Every),
        (30..70u64).prop_map(Failures::Percent),
        Just(Failures::WithCheckpoints),
        Just(Failures::WithSamples),
        Just(Failures::WithSeveralRows),
        Just(Failures::WithoutStarts),
    ]
}

const ORDERS: [QueueOrder; 4] =
    [QueueOrder::Fcfs, QueueOrder::Priority, QueueOrder::LongestPrefix, QueueOrder::FairShare];

/// Runs that are tried: a second's worth, or what `PROPTEST_CASES` says.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(1_000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_whatever_steps_fail(
        block_size in 1..9usize,
        groups in groups(),
        spare_blocks in prop_oneof![0..8usize, Just(300)],
        max_num_seqs in 1..6usize,
        budget in prop_oneof![1..9usize, Just(64)],
        max_chunk_tokens in prop_oneof![Just(1usize), Just(usize::MAX)],
        num_state_slots in prop_oneof![2 => 3..6usize, 1 => 6..16usize],
        checkpoint_every in prop_oneof![1..3usize, Just(16)],
        enable_prefix_caching in prop_oneof![1 => Just(false), 4 => Just(true)],
        order in 0..4usize,
        preempt_lower_ranks in any::<bool>(),
        max_passes in 0..3usize,
        requests in prop::collection::vec((0..2u32, 1..30usize, 1..20usize, 1..4usize, any::<bool>(), 0..3), 1..6),
        failures in failures(),
        seed in any::<u64>(),
    ) {
        let num_blocks = 2 + (groups.len() * (50usize.div_ceil(block_size) + 1)) + spare_blocks;
        let config = SchedulerConfig {
            num_blocks,
            block_size,
            groups,
            max_num_batched_tokens: budget,
            max_chunk_tokens,
            checkpoint_every,
            enable_prefix_caching,
            queue_order: ORDERS[order],
            preempt_lower_ranks,
            max_passes,
            ..config(num_state_slots, max_num_seqs)
        };
        let requests: Vec<_> = (requests.into_iter())
            .map(|(seed, len, max_tokens, samples, reuse_cached, priority)| Request {
                prompt: prompt(seed, len),
                max_tokens,
                num_samples: samples.min(max_num_seqs).min(num_state_slots - 2),
                reuse_cached,
                priority,
            })
            .collect();
        run(config, &requests, failures, seed);
    }
}
