//! A reset of the cache: nothing computed before it is found after it, by whatever way it was kept.
#![cfg(not(loom))]

#[path = "support/discard.rs"]
mod discard;
#[path = "support/reset.rs"]
mod reset;
mod support;

use proptest::prelude::*;

use pykv_core::policy::order::QueueOrder;
use pykv_core::policy::preemption::PreemptionMode;
use pykv_core::prefix::{EventKind, PinQuota};
use pykv_core::scheduler::{AdmissionPolicy, Outcome, Submission};
use pykv_core::{LayerGroup, RequestId, SchedulerConfig, TokenId};
use support::Engine;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: 32,
        block_size: 4,
        max_num_seqs: 4,
        max_num_batched_tokens: 24,
        max_model_len: 64,
        num_host_blocks: 17,
        preemption: PreemptionMode::Swap,
        queue_order: QueueOrder::Priority,
        preempt_lower_ranks: true,
        admission: AdmissionPolicy::Watermark,
        watermark: 0.0,
        max_kv_events: 1000,
        ..SchedulerConfig::default()
    }
}

fn submit(
    engine: &mut Engine,
    prompt: &[TokenId],
    max_tokens: usize,
    samples: usize,
    priority: i32,
) -> RequestId {
    let submission = Submission {
        max_tokens: Some(max_tokens),
        num_samples: samples,
        priority,
        ..Submission::new(prompt)
    };
    let request = engine.scheduler.submit(submission).unwrap();
    engine.prompts.insert(request.get(), prompt.to_vec());
    request
}

#[test]
fn who_was_swapped_out_over_a_reset_publishes_nothing_more() {
    let mut engine = Engine::new(SchedulerConfig { max_num_seqs: 1, ..config() });
    let prompt: Vec<TokenId> = (1..17).collect();
    let old = submit(&mut engine, &prompt, 8, 1, 1);
    engine.step();
    submit(&mut engine, &[40], 1, 1, 0);
    engine.step();
    engine.reset();
    engine.scheduler.take_events();
    for _ in 0..3 {
        engine.step();
    }
    // It is back with what it held before, and is pushed out and comes back once more.
    submit(&mut engine, &[41], 1, 1, 0);
    engine.run();
    assert_eq!(engine.ended.iter().find(|ended| ended.request == old).unwrap().preemptions, 2);
    assert_eq!(engine.scheduler.stats().swapped_in_blocks, 4 + 5);
    assert_eq!(engine.scheduler.cached_tokens(&prompt, b""), 0);
    let stored = engine.scheduler.take_events().kinds;
    assert!(!stored.contains(&(EventKind::Stored as u8)), "no listener is told of what nobody can find");
    // Who computes the same after the reset is found.
    engine.submit(&prompt, 1, 1);
    engine.run();
    assert_eq!(engine.scheduler.cached_tokens(&prompt, b""), 16);
}

#[derive(Clone, Debug)]
enum Action {
    Submit { prompt: usize, len: usize, max_tokens: usize, samples: usize, priority: i32 },
    Step,
    Reset,
    Abort(usize),
    Discard(bool),
    FailRow(usize),
    Pause(usize),
    Resume(usize),
    Pin(usize),
}

fn action() -> impl Strategy<Value = Action> {
    let submit = (0..3usize, 1..30usize, 1..12usize, 1..3usize, 0..3i32).prop_map(
        |(prompt, len, max_tokens, samples, priority)| Action::Submit {
            prompt,
            len,
            max_tokens,
            samples,
            priority,
        },
    );
    prop_oneof![
        6 => submit,
        12 => Just(Action::Step),
        2 => Just(Action::Reset),
        1 => (0..20usize).prop_map(Action::Abort),
        1 => any::<bool>().prop_map(Action::Discard),
        1 => (0..4usize).prop_map(Action::FailRow),
        1 => (0..20usize).prop_map(Action::Pause),
        1 => (0..20usize).prop_map(Action::Resume),
        1 => (0..3usize).prop_map(Action::Pin),
    ]
}

/// The beginning of one of three prompts, two of which begin alike.
fn prompt(number: usize, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|place| place % 7 + if place < 6 { 0 } else { number as u32 }).collect()
}

fn act(engine: &mut Engine, requests: &mut Vec<RequestId>, action: &Action) {
    match *action {
        Action::Submit { prompt: number, len, max_tokens, samples, priority } => {
            requests.push(submit(engine, &prompt(number, len), max_tokens, samples, priority));
        }
        Action::Step => {
            engine.step();
        }
        Action::Reset => engine.reset(),
        Action::Abort(place) => {
            requests.get(place).map(|&request| engine.scheduler.abort(request));
        }
        Action::Discard(newest) => {
            let planned = if engine.has_room() { engine.plan() } else { None };
            if let Some(plan) = planned.filter(|_| newest).or(engine.oldest()) {
                engine.discard(plan);
            }
        }
        Action::FailRow(row) => {
            if engine.has_room() {
                engine.plan();
            }
            let Some(plan) = engine.oldest() else { return };
            let failed: Vec<usize> = Some(row).filter(|&row| row < plan.num_batch_rows).into_iter().collect();
            let tokens = engine.compute_failing(plan, &failed);
            engine.apply(plan, &tokens, &vec![Outcome::Ok; tokens.len()], &failed);
        }
        Action::Pause(place) => {
            requests.get(place).map(|&request| engine.scheduler.pause(request));
        }
        Action::Resume(place) => {
            requests.get(place).map(|&request| engine.scheduler.resume(request));
        }
        Action::Pin(number) => {
            let _ = engine.scheduler.pin(&prompt(number, 30), b"", b"");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// The memory itself knows after how many resets each slot was computed (`support/ages.rs`), and refuses a hit that
    /// is older than the last one.
    #[test]
    fn no_hit_is_older_than_the_last_reset(
        groups in prop_oneof![
            3 => Just(vec![LayerGroup::Full]),
            1 => Just(vec![LayerGroup::Window { tokens: 6 }]),
            1 => Just(vec![LayerGroup::Full, LayerGroup::Window { tokens: 6 }]),
        ],
        spare in 0..8usize,
        max_steps_in_flight in 1..3usize,
        num_state_slots in prop_oneof![2 => Just(0usize), 1 => 6..12usize],
        actions in prop::collection::vec(action(), 1..80),
    ) {
        let has_states = num_state_slots > 0;
        let config = SchedulerConfig {
            num_blocks: groups.len() * 17 + 6 + spare,
            groups,
            max_steps_in_flight: if has_states { 1 } else { max_steps_in_flight },
            num_host_blocks: if has_states { 0 } else { 24 },
            preemption: if has_states { PreemptionMode::Recompute } else { PreemptionMode::Swap },
            num_state_slots,
            checkpoint_every: 2,
            partial_block_reuse: if has_states { 0 } else { 1 },
            pin_quota: if has_states { PinQuota::default() } else { PinQuota { blocks: 5, blocks_per_tenant: 5 } },
            ..config()
        };
        let (mut engine, mut requests) = (Engine::new(config), Vec::new());
        for action in &actions {
            act(&mut engine, &mut requests, action);
        }
        for request in requests {
            engine.scheduler.resume(request);
        }
        engine.run();
        prop_assert_eq!(engine.scheduler.stats().num_requests, 0);
    }
}
