//! The tokens of a request do not depend on its neighbours, on chunks, hits, block size, preemption, forks, or on
//! aborts, failures and discarded steps of others.
#![cfg(not(loom))]

#[path = "support/discard.rs"]
mod discard;
#[path = "support/reset.rs"]
mod reset;
mod support;

use proptest::prelude::*;
use pykv_core::policy::order::QueueOrder;
use pykv_core::policy::preemption::PreemptionMode;
use pykv_core::prefix::eviction::POLICIES;
use pykv_core::prefix::{Media, PinId, PinQuota, Retention};
use pykv_core::scheduler::{AdmissionPolicy, Outcome, Submission};
use pykv_core::{Error, LayerGroup, RequestId, SchedulerConfig, TokenId};
use support::Engine;

fn config(num_blocks: usize, block_size: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks,
        block_size,
        max_num_seqs: 8,
        max_num_batched_tokens: 24,
        max_model_len: 64,
        admission: AdmissionPolicy::Watermark,
        ..SchedulerConfig::default()
    }
}

fn swaps_to(num_host_blocks: usize) -> PreemptionMode {
    if num_host_blocks > 1 { PreemptionMode::Swap } else { PreemptionMode::Recompute }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|place| (place * 7 + seed) % 50).collect()
}

fn assert_outputs(engine: &Engine, requests: &[(RequestId, Vec<TokenId>, usize, usize)]) {
    for (request, prompt, num_tokens, num_samples) in requests {
        for child in 0..*num_samples {
            let output = &engine.outputs[&(request.get(), child as u32)];
            assert_eq!(
                output,
                &engine.expected(prompt, child as u64, *num_tokens),
                "request {}.{child}",
                request.get()
            );
        }
    }
}

fn run_all(config: SchedulerConfig, samples: usize) -> Engine {
    let mut engine = Engine::new(config);
    let mut requests = Vec::new();
    for (seed, len) in [(0, 1), (0, 17), (3, 30), (0, 17), (3, 24), (9, 5)] {
        let tokens = prompt(seed, len);
        requests.push((engine.submit(&tokens, 12, samples), tokens, 12, samples));
    }
    engine.run();
    assert_outputs(&engine, &requests);
    assert_eq!(engine.ended.len(), requests.len());
    let stats = engine.scheduler.stats();
    assert_eq!(stats.blocks.active, 0);
    assert_eq!(stats.num_requests, 0);
    engine
}

#[test]
fn outputs_do_not_depend_on_the_block_size() {
    for block_size in [1, 2, 3, 5, 16, 48] {
        run_all(config(64 * 8 / block_size + 20, block_size), 1);
    }
}

#[test]
fn outputs_do_not_depend_on_chunks() {
    for chunk in [1, 3, 7, 16] {
        run_all(SchedulerConfig { max_chunk_tokens: chunk, ..config(100, 4) }, 1);
        run_all(SchedulerConfig { max_num_batched_tokens: chunk, ..config(100, 4) }, 1);
    }
}

#[test]
fn outputs_do_not_depend_on_preemption() {
    let mut preemptions = 0;
    for num_blocks in [12, 14, 17, 22, 30] {
        preemptions += run_all(config(num_blocks, 4), 1).scheduler.stats().preemptions;
    }
    assert!(preemptions > 5, "the pools were small enough to preempt: {preemptions}");
}

#[test]
fn outputs_do_not_depend_on_swapping_wherever_the_host_is_full() {
    let mut counts = Vec::new();
    for num_host_blocks in [0, 2, 3, 6, 30] {
        let preemption = swaps_to(num_host_blocks);
        let swapping = SchedulerConfig { num_host_blocks, preemption, ..config(17, 4) };
        let stats = run_all(swapping, 2).scheduler.stats();
        assert_eq!(stats.host_blocks_free, stats.host_blocks_total);
        counts.push((stats.preemptions, stats.swapped_in_blocks, stats.recomputed_tokens));
    }
    assert_eq!(counts[0].1, 0);
    assert!(counts[3].1 > 0 && counts[3].2 > 0, "some are copied, some computed again: {counts:?}");
    assert!(counts[4].1 > 0 && counts[4].2 == 0, "all are copied: {counts:?}");
}

#[test]
fn outputs_do_not_depend_on_the_prefix_cache() {
    let mut cold = run_all(SchedulerConfig { enable_prefix_caching: false, ..config(100, 4) }, 1);
    assert_eq!(cold.scheduler.stats().hit_tokens, 0);
    let mut warm = run_all(config(100, 4), 1);
    assert!(warm.scheduler.stats().hit_tokens > 0);
}

#[test]
fn outputs_do_not_depend_on_partial_hits() {
    for groups in [vec![LayerGroup::Full], vec![window(6)], vec![LayerGroup::Full, window(9)]] {
        for chunk in [3, 8, 24] {
            let num_blocks = 40 * groups.len();
            let reusing = SchedulerConfig {
                partial_block_reuse: 2,
                max_chunk_tokens: chunk,
                groups: groups.clone(),
                ..config(num_blocks, 8)
            };
            let stats = run_all(reusing, 2).scheduler.stats();
            assert!(stats.partial_hit_tokens > 0 && stats.partial_hit_tokens < stats.hit_tokens, "{stats:?}");
        }
    }
}

#[test]
fn every_sample_of_a_fork_follows_its_own_history() {
    run_all(config(200, 4), 3);
    run_all(config(40, 16), 3);
    let mut small = run_all(config(17, 4), 3);
    assert!(small.scheduler.stats().preemptions > 0);
}

#[test]
fn colliding_hashes_change_no_token() {
    run_all(SchedulerConfig { hash_mask: 0b1, ..config(40, 4) }, 2);
}

fn window(tokens: usize) -> LayerGroup {
    LayerGroup::Window { tokens }
}

#[test]
fn outputs_do_not_depend_on_layer_groups_however_small_the_pool() {
    let mut counts = (0, 0);
    for groups in [vec![window(1)], vec![window(7)], vec![LayerGroup::Full, window(9), window(5)]] {
        for num_blocks in [14, 20, 30, 60, 200] {
            for num_host_blocks in [0, 12] {
                let groups = groups.clone();
                let num_blocks = groups.len() * num_blocks;
                let preemption = swaps_to(num_host_blocks);
                let small = SchedulerConfig { groups, num_host_blocks, preemption, ..config(num_blocks, 4) };
                let stats = run_all(small, 2).scheduler.stats();
                counts.0 += stats.preemptions;
                counts.1 += stats.swapped_in_blocks;
            }
        }
    }
    assert!(counts.0 > 5 && counts.1 > 5, "the pools were small enough: {counts:?}");
}

fn groups() -> impl Strategy<Value = Vec<LayerGroup>> {
    let full = LayerGroup::Full;
    prop_oneof![
        3 => Just(vec![full]),
        1 => (1..20usize).prop_map(|tokens| vec![window(tokens)]),
        1 => (1..20usize).prop_map(move |tokens| vec![full, window(tokens)]),
        1 => (1..20usize, 1..20usize).prop_map(|(first, second)| vec![window(first), window(second)]),
        1 => (1..20usize).prop_map(move |tokens| vec![window(tokens), full, full]),
    ]
}

#[derive(Clone, Debug)]
enum Action {
    Submit {
        seed: u32,
        len: usize,
        max_tokens: usize,
        samples: usize,
        reuse: bool,
        priority: i32,
        keep: Keep,
    },
    EndSession {
        session: u8,
    },
    Pin {
        seed: u32,
        len: usize,
    },
    Unpin {
        pin: u64,
    },
    SetShare {
        share: f64,
    },
    Wait {
        seconds: f64,
    },
    Step,
    StepWithAbort {
        request: usize,
    },
    StepWithFailure {
        row: usize,
        request: usize,
    },
    StepWithStop {
        sample: usize,
    },
    StepWithFailedSample {
        sample: usize,
    },
    Discard {
        newest: bool,
    },
    Drain,
    Abort {
        request: usize,
    },
    /// In the midst of a step, or between two.
    Pause {
        request: usize,
        in_flight: bool,
    },
    Resume {
        request: usize,
        in_flight: bool,
    },
    Reset,
}

/// How long a request's blocks are kept; session 0: none.
#[derive(Clone, Copy, Debug)]
struct Keep {
    session: u8,
    ttl: Option<f64>,
    next_turn: Option<f64>,
    priority: i8,
    media: bool,
}

const SESSIONS: [&[u8]; 4] = [b"", b"x", b"y", b"z"];

/// Half of all requests say nothing.
fn keep() -> impl Strategy<Value = Keep> {
    let nothing = Keep { session: 0, ttl: None, next_turn: None, priority: 0, media: false };
    let times = || prop_oneof![Just(None), (0..9u8).prop_map(|seconds| Some(f64::from(seconds)))];
    let something = (0..4u8, times(), times(), -2..3i8, any::<bool>()).prop_map(
        |(session, ttl, next_turn, priority, media)| Keep {
            session,
            ttl,
            next_turn: next_turn.filter(|_| session > 0),
            priority,
            media,
        },
    );
    prop_oneof![Just(nothing), something]
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0..3u32, 1..40usize, 1..20usize, 1..4usize, any::<bool>(), 0..3i32, keep()).prop_map(
            |(seed, len, max_tokens, samples, reuse, priority, keep)| Action::Submit {
                seed, len, max_tokens, samples, reuse, priority, keep
            }
        ),
        1 => (1..4u8).prop_map(|session| Action::EndSession { session }),
        1 => (0..3u32, 1..40usize).prop_map(|(seed, len)| Action::Pin { seed, len }),
        1 => (0..9u64).prop_map(|pin| Action::Unpin { pin }),
        1 => (0..5u8).prop_map(|quarters| Action::SetShare { share: f64::from(quarters) / 4.0 }),
        1 => (0..6u8).prop_map(|seconds| Action::Wait { seconds: seconds.into() }),
        12 => Just(Action::Step),
        1 => (0..30usize).prop_map(|request| Action::StepWithAbort { request }),
        1 => (0..8usize, 0..60usize).prop_map(|(row, request)| Action::StepWithFailure { row, request }),
        1 => (0..8usize).prop_map(|sample| Action::StepWithStop { sample }),
        1 => (0..8usize).prop_map(|sample| Action::StepWithFailedSample { sample }),
        1 => any::<bool>().prop_map(|newest| Action::Discard { newest }),
        1 => Just(Action::Drain),
        1 => (0..30usize).prop_map(|request| Action::Abort { request }),
        1 => (0..30usize, any::<bool>()).prop_map(|(request, in_flight)| Action::Pause { request, in_flight }),
        1 => (0..30usize, any::<bool>()).prop_map(|(request, in_flight)| Action::Resume { request, in_flight }),
        1 => Just(Action::Reset),
    ]
}

struct Submitted {
    request: RequestId,
    prompt: Vec<TokenId>,
    max_tokens: usize,
    samples: usize,
}

fn act(engine: &mut Engine, submitted: &mut Vec<Submitted>, action: &Action) {
    match *action {
        Action::Submit { seed, len, max_tokens, samples, reuse, priority, keep } => {
            let prompt = prompt(seed, len);
            let session = (keep.session > 0).then_some(SESSIONS[usize::from(keep.session)]);
            // The toy model does not see media: they only split the cache.
            let media = [Media { offset: len / 2, hash: SESSIONS[1 + len % 3] }];
            let submission = Submission {
                max_tokens: Some(max_tokens),
                num_samples: samples,
                reuse_cached: reuse,
                priority,
                tenant: if priority == 0 { b"a" } else { b"b" },
                retention: Retention {
                    session,
                    ttl: keep.ttl,
                    next_turn: keep.next_turn,
                    priority: keep.priority,
                    tenant: b"",
                },
                media: if keep.media { &media } else { &[] },
                ..Submission::new(&prompt)
            };
            if let Ok(request) = engine.scheduler.submit(submission) {
                engine.prompts.insert(request.get(), prompt.clone());
                submitted.push(Submitted { request, prompt, max_tokens, samples });
            }
        }
        Action::Abort { request } => {
            submitted.get(request).map(|entry| engine.scheduler.abort(entry.request));
        }
        Action::Pause { request, in_flight: false } => {
            submitted.get(request).map(|entry| engine.scheduler.pause(entry.request));
        }
        Action::Resume { request, in_flight: false } => {
            submitted.get(request).map(|entry| engine.scheduler.resume(entry.request));
        }
        Action::EndSession { session } => {
            let session = SESSIONS[usize::from(session)];
            engine.scheduler.end_session(b"a", session);
            engine.scheduler.end_session(b"b", session);
        }
        Action::Pin { seed, len } => match engine.scheduler.pin(&prompt(seed, len), b"", b"a") {
            Ok(pinned) => assert!(pinned.is_none_or(|pinned| (1..=len).contains(&pinned.num_tokens))),
            Err(error) => assert!(matches!(error, Error::PinQuota { .. }), "{error}"),
        },
        Action::Unpin { pin } => {
            engine.scheduler.unpin(PinId::new(pin));
        }
        Action::SetShare { share } => engine.scheduler.set_cache_share(b"a", share).unwrap(),
        Action::Wait { seconds } => engine.now += seconds,
        Action::Reset => engine.reset(),
        Action::Discard { newest } => {
            let planned = engine.plan().filter(|_| newest);
            if let Some(plan) = planned.or(engine.oldest()) {
                engine.discard(plan);
            }
        }
        Action::Drain => {
            while let Some(plan) = engine.oldest() {
                let tokens = engine.compute(plan);
                engine.apply(plan, &tokens, &vec![Outcome::Ok; tokens.len()], &[]);
            }
        }
        _ => step_with(engine, submitted, action),
    }
    engine.scheduler.check().unwrap();
}

fn step_with(engine: &mut Engine, submitted: &[Submitted], action: &Action) {
    if engine.plan().is_some() && engine.has_room() {
        return;
    }
    let Some(plan) = engine.oldest() else { return };
    let mut outcomes = vec![Outcome::Ok; plan.num_samples];
    let mut failed = Vec::new();
    match *action {
        Action::StepWithAbort { request } => {
            submitted.get(request).map(|entry| engine.scheduler.abort(entry.request));
        }
        Action::StepWithFailure { row, request } => {
            failed.extend((row < plan.num_batch_rows).then_some(row));
            submitted.get(request).map(|entry| engine.scheduler.abort(entry.request));
        }
        Action::Pause { request, .. } => {
            submitted.get(request).map(|entry| engine.scheduler.pause(entry.request));
        }
        Action::Resume { request, .. } => {
            submitted.get(request).map(|entry| engine.scheduler.resume(entry.request));
        }
        Action::StepWithStop { sample } if sample < plan.num_samples => outcomes[sample] = Outcome::Stop,
        Action::StepWithFailedSample { sample } if sample < plan.num_samples => {
            outcomes[sample] = Outcome::Failed
        }
        _ => {}
    }
    let tokens = engine.compute_failing(plan, &failed);
    engine.apply(plan, &tokens, &outcomes, &failed);
}

/// Whatever was cut short got a beginning of what it would have got; all others got everything.
fn assert_prefixes(engine: &Engine, submitted: &[Submitted]) {
    for entry in submitted {
        for child in 0..entry.samples {
            let full = engine.expected(&entry.prompt, child as u64, entry.max_tokens);
            let output =
                engine.outputs.get(&(entry.request.get(), child as u32)).cloned().unwrap_or_default();
            assert_eq!(output, full[..output.len()], "request {}.{child}", entry.request.get());
        }
    }
    for summary in engine.ended.iter().filter(|summary| !summary.aborted && !summary.failed) {
        assert!(summary.output_tokens > 0);
    }
}

const ORDERS: [QueueOrder; 4] =
    [QueueOrder::Fcfs, QueueOrder::Priority, QueueOrder::LongestPrefix, QueueOrder::FairShare];

/// Histories that are tried: a few seconds' worth, or what `PROPTEST_CASES` says.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(4_000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history_keeps_the_invariants_and_the_tokens(
        block_size in prop_oneof![Just(1usize), Just(3), Just(4), Just(16)],
        groups in groups(),
        spare in 0..12usize,
        budget in 4..40usize,
        caching in any::<bool>(),
        collide in any::<bool>(),
        forecast in any::<bool>(),
        order in 0..4usize,
        num_host_blocks in 0..12usize,
        max_passes in 0..3usize,
        preempt_lower_ranks in any::<bool>(),
        num_lookahead_tokens in prop_oneof![2 => Just(0usize), 3 => 1..6usize],
        draft_seed in any::<u64>(),
        max_steps_in_flight in prop_oneof![2 => Just(1usize), 3 => Just(2)],
        eviction in 0..POLICIES.len(),
        tenant_cache_share in prop_oneof![Just(1.0), Just(0.2)],
        max_pinned in prop_oneof![Just(0usize), 0..12usize],
        // Slots of states besides slot 0, and blocks between their checkpoints; none in every other history.
        states in prop_oneof![Just(None), (2..14usize, 1..4usize).prop_map(Some)],
        partial in prop_oneof![1 => Just(0usize), 2 => 1..4usize],
        actions in prop::collection::vec(action(), 1..120),
    ) {
        // What a model with states cannot have.
        let (num_host_blocks, num_lookahead_tokens, max_pinned, max_steps_in_flight) = if states.is_some() {
            (0, 0, 0, 1)
        } else {
            (num_host_blocks, num_lookahead_tokens, max_pinned, max_steps_in_flight)
        };
        let num_blocks = groups.len() * (64usize.div_ceil(block_size) + 1 + spare) + max_pinned;
        let config = SchedulerConfig {
            max_num_batched_tokens: budget,
            groups,
            enable_prefix_caching: caching,
            max_queued_requests: 20,
            queue_order: ORDERS[order],
            max_passes,
            num_host_blocks,
            preemption: swaps_to(num_host_blocks),
            preempt_lower_ranks,
            max_steps_in_flight,
            num_lookahead_tokens: if max_steps_in_flight == 1 { num_lookahead_tokens } else { 0 },
            eviction: POLICIES[eviction],
            tenant_cache_share,
            partial_block_reuse: if states.is_some() { 0 } else { partial.min(block_size - 1) },
            pin_quota: PinQuota { blocks: max_pinned, blocks_per_tenant: max_pinned },
            admission: if forecast { AdmissionPolicy::Forecast } else { AdmissionPolicy::Watermark },
            hash_mask: if collide { 1 } else { u64::MAX },
            num_state_slots: states.map_or(0, |(slots, _)| slots + 1),
            checkpoint_every: states.map_or(1, |(_, every)| every),
            ..config(num_blocks, block_size)
        };
        let mut engine = Engine::new(config);
        engine.draft_seed = draft_seed;
        let mut submitted = Vec::new();
        for action in &actions {
            act(&mut engine, &mut submitted, action);
        }
        engine.run();
        let stats = engine.scheduler.stats();
        prop_assert_eq!(stats.num_waiting + stats.num_running, 0, "those that are paused keep nobody from the end");
        for entry in &submitted {
            engine.scheduler.resume(entry.request);
        }
        engine.run();
        engine.ended.extend(engine.scheduler.take_ended());
        assert_prefixes(&engine, &submitted);
        prop_assert_eq!(engine.ended.len(), submitted.len());
        for pin in 0..99 {
            engine.scheduler.unpin(PinId::new(pin));
        }
        let stats = engine.scheduler.stats();
        prop_assert_eq!(stats.blocks.active, 0);
        prop_assert_eq!(stats.num_waiting + stats.num_running + stats.num_requests, 0);
        engine.scheduler.reset_prefix_cache();
        prop_assert_eq!(engine.scheduler.stats().blocks.free, num_blocks - 1);
        prop_assert_eq!(engine.scheduler.stats().num_scopes, 0);
        prop_assert_eq!(engine.scheduler.stats().num_sessions, 0);
    }
}
