//! What the cache tells about itself: why blocks were missed, and events about those that can be found.
#![cfg(not(loom))]

#[path = "support/discard.rs"]
mod discard;
#[path = "support/reset.rs"]
mod reset;
mod support;

use std::collections::HashSet;

use proptest::prelude::*;
use pykv_core::prefix::content_key::{ContentKey, content_keys, root_key};
use pykv_core::prefix::{EventKind, Events, Media, MissCounts};
use pykv_core::scheduler::{AdmissionPolicy, Outcome, Submission};
use pykv_core::{BlockSize, LayerGroup, RequestId, SchedulerConfig, TokenId};
use support::Engine;

fn config(num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: num_blocks + 1,
        block_size: 4,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 64,
        admission: AdmissionPolicy::Watermark,
        watermark: 0.0,
        max_kv_events: 1000,
        ..SchedulerConfig::default()
    }
}

fn prompt(first: TokenId, num_tokens: usize) -> Vec<TokenId> {
    (first..).take(num_tokens).collect()
}

#[test]
fn what_was_forgotten_stays_counted_over_a_reset() {
    let mut engine = Engine::new(config(8));
    let forgotten = |engine: &mut Engine| engine.scheduler.stats().forgotten_keys;
    let mut scope = 0..=u8::MAX;
    let mut forget = |engine: &mut Engine| {
        let before = forgotten(engine);
        while forgotten(engine) == before {
            run_in(engine, &[scope.next().unwrap()], &prompt(0, 26));
        }
    };
    forget(&mut engine);
    let before = forgotten(&mut engine);
    engine.scheduler.reset_prefix_cache();
    assert_eq!(forgotten(&mut engine), before, "what a reset drops was not evicted");
    forget(&mut engine);
    assert!(forgotten(&mut engine) > before);
}

fn run_in(engine: &mut Engine, scope: &[u8], tokens: &[TokenId]) -> MissCounts {
    let submission = Submission { max_tokens: Some(1), scope, ..Submission::new(tokens) };
    let request = engine.scheduler.submit(submission).unwrap();
    engine.run();
    assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(tokens, 0, 1));
    engine.ended.pop().unwrap().misses
}

fn run(engine: &mut Engine, tokens: &[TokenId]) -> MissCounts {
    run_in(engine, b"", tokens)
}

fn misses() -> MissCounts {
    MissCounts::default()
}

#[test]
fn what_is_new_was_never_seen_and_what_was_evicted_was() {
    let mut engine = Engine::new(config(8));
    assert_eq!(run(&mut engine, &prompt(0, 18)), MissCounts { never_seen: 4, ..misses() });
    assert_eq!(run(&mut engine, &prompt(0, 18)), misses());
    run(&mut engine, &prompt(100, 26));
    let mut longer = prompt(0, 14);
    longer.extend(prompt(50, 9));
    assert_eq!(run(&mut engine, &longer), MissCounts { evicted: 2, never_seen: 2, ..misses() });
    assert_eq!(engine.scheduler.stats().misses, MissCounts { evicted: 2, never_seen: 12, ..misses() });
    assert_eq!(engine.scheduler.stats().forgotten_keys, 0);
}

#[test]
fn the_block_of_the_last_token_is_computed_whatever_is_cached() {
    let mut engine = Engine::new(config(16));
    run(&mut engine, &prompt(0, 8));
    assert_eq!(run(&mut engine, &prompt(0, 8)), MissCounts { cap: 1, ..misses() });
    assert_eq!(run(&mut engine, &prompt(0, 4)), MissCounts { cap: 1, ..misses() });
    assert_eq!(run(&mut engine, &prompt(0, 9)), misses());
    assert_eq!(run(&mut engine, &prompt(9, 4)), MissCounts { never_seen: 1, ..misses() });
}

#[test]
fn blocks_that_another_request_will_compute_are_in_flight() {
    let mut engine = Engine::new(SchedulerConfig { max_chunk_tokens: 8, ..config(32) });
    let mut second = prompt(0, 18);
    second.extend(prompt(70, 10));
    engine.submit(&prompt(0, 30), 1, 1);
    engine.submit(&second, 1, 1);
    engine.run();
    let found = engine.ended.iter().find(|summary| summary.request.get() == 1).unwrap();
    assert_eq!(found.cached_tokens, 8, "the first chunk is shared at once");
    assert_eq!(found.misses, MissCounts { in_flight: 2, never_seen: 3, ..misses() });
}

#[test]
fn blocks_in_flight_are_those_up_to_the_first_medium_that_differs() {
    for (hash, in_flight) in [(b"cat", 2), (b"dog", 1)] {
        let mut engine = Engine::new(SchedulerConfig { max_chunk_tokens: 8, ..config(32) });
        for hash in [b"cat", hash] {
            let (tokens, media) = (prompt(0, 18), [Media { offset: 13, hash }]);
            let submission = Submission { max_tokens: Some(1), media: &media, ..Submission::new(&tokens) };
            engine.scheduler.submit(submission).unwrap();
        }
        engine.run();
        let found = engine.ended.iter().find(|summary| summary.request.get() == 1).unwrap();
        assert_eq!(found.cached_tokens, 8);
        assert_eq!(found.misses, MissCounts { in_flight, never_seen: 2 - in_flight, ..misses() });
    }
}

#[test]
fn another_scope_is_looked_into_only_where_that_is_allowed() {
    for (report_other_scopes, expected) in [
        (false, MissCounts { never_seen: 3, ..misses() }),
        (true, MissCounts { other_scope: 2, never_seen: 1, ..misses() }),
    ] {
        let mut engine = Engine::new(SchedulerConfig { report_other_scopes, ..config(32) });
        run_in(&mut engine, b"a", &prompt(0, 9));
        assert_eq!(run_in(&mut engine, b"b", &prompt(0, 13)), expected);
        assert_eq!(run_in(&mut engine, b"b", &prompt(0, 13)), misses());
    }
}

#[test]
fn a_request_that_wants_no_cache_misses_nothing_and_a_preempted_one_not_again() {
    let mut engine = Engine::new(config(16));
    let submission = Submission { max_tokens: Some(1), reuse_cached: false, ..Submission::new(&[1; 9]) };
    engine.scheduler.submit(submission).unwrap();
    engine.run();
    assert_eq!(engine.scheduler.stats().misses, misses());
    let mut small = Engine::new(config(9));
    for first in [0, 100] {
        small.submit(&prompt(first, 13), 16, 1);
    }
    small.run();
    assert!(small.scheduler.stats().preemptions > 0);
    assert_eq!(small.scheduler.stats().misses, MissCounts { never_seen: 6, ..misses() });
}

/// Plays events into the set of keys that can be found.
fn play(events: &Events, known: &mut HashSet<ContentKey>) {
    for (index, &kind) in events.kinds.iter().enumerate() {
        let (key, parent) = (events.keys[index], events.parents[index]);
        if kind == EventKind::Stored as u8 {
            assert!(
                events.is_first[index] == 1 || known.contains(&parent),
                "a parent is stored before its children"
            );
            assert!(known.insert(key), "what is stored was not");
        } else if kind == EventKind::Removed as u8 {
            assert!(known.remove(&key), "what is removed was stored");
        } else {
            known.clear();
        }
    }
}

#[test]
fn events_name_blocks_by_their_content_keys() {
    let mut engine = Engine::new(config(16));
    let (scope, tokens) = (b"scope", prompt(0, 13));
    let media = [Media { offset: 6, hash: b"cat" }];
    let submission = Submission { max_tokens: Some(1), scope, media: &media, ..Submission::new(&tokens) };
    engine.scheduler.submit(submission).unwrap();
    engine.run();
    let events = engine.scheduler.take_events();
    let size = BlockSize::new(4).unwrap();
    let keys = content_keys(size, scope, &tokens, &media);
    assert_eq!(events.keys, keys);
    assert_eq!(events.parents, [root_key(size, scope), keys[0], keys[1]]);
    assert_eq!((events.kinds, events.is_first, events.tokens), (vec![0; 3], vec![1, 0, 0], prompt(0, 12)));
    assert_ne!(content_keys(size, scope, &tokens, &[])[1..], keys[1..]);
    assert!(engine.scheduler.take_events().keys.is_empty());
}

#[test]
fn a_gap_is_known_by_its_numbers_and_a_snapshot_mends_it() {
    let mut engine = Engine::new(SchedulerConfig { max_kv_events: 4, ..config(12) });
    run(&mut engine, &prompt(0, 29));
    let first = engine.scheduler.take_events();
    assert_eq!((first.sequence, first.dropped, first.keys.len()), (3, 3, 4));
    run(&mut engine, &prompt(100, 30));
    let snapshot = engine.scheduler.snapshot_events();
    let mut known = HashSet::new();
    play(&snapshot, &mut known);
    engine.scheduler.take_events();
    run(&mut engine, &prompt(200, 9));
    let next = engine.scheduler.take_events();
    assert_eq!(next.sequence, snapshot.sequence);
    play(&next, &mut known);
    let mut now = HashSet::new();
    play(&engine.scheduler.snapshot_events(), &mut now);
    assert_eq!(known, now);
}

#[test]
fn a_reset_is_one_event_and_events_that_nobody_asked_for_are_not_kept() {
    let mut engine = Engine::new(config(12));
    run(&mut engine, &prompt(0, 29));
    engine.scheduler.take_events();
    engine.scheduler.reset_prefix_cache();
    assert_eq!(engine.scheduler.take_events().kinds, [EventKind::Cleared as u8]);
    let mut silent = Engine::new(SchedulerConfig { max_kv_events: 0, ..config(12) });
    run(&mut silent, &prompt(0, 29));
    assert_eq!(silent.scheduler.take_events(), Events::default());
    assert_eq!(silent.scheduler.snapshot_events(), Events::default());
}

#[test]
fn what_a_step_in_flight_computes_is_stored_once_it_was_applied() {
    let mut engine =
        Engine::new(SchedulerConfig { max_steps_in_flight: 2, max_chunk_tokens: 8, ..config(32) });
    let tokens = prompt(0, 21);
    // The second one shares what the steps compute of the first.
    (0..2).for_each(|_| _ = engine.submit(&tokens, 1, 1));
    let keys = content_keys(BlockSize::new(4).unwrap(), b"", &tokens, &[]);
    let mut known = HashSet::new();
    for num_stored in [0, 4, 5] {
        while engine.has_room() && engine.plan().is_some() {}
        play(&engine.scheduler.take_events(), &mut known);
        assert_eq!(known, keys[..num_stored].iter().copied().collect());
        assert_eq!(engine.scheduler.snapshot_events().keys, keys[..num_stored]);
        act(&mut engine, &Action::Apply { fail: false });
    }
}

#[derive(Clone, Debug)]
enum Action {
    Submit { seed: TokenId, len: usize, scope: bool, samples: usize },
    Plan,
    Apply { fail: bool },
    Discard,
    Abort(u64),
    Reset,
    Take,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0..3u32, 1..40usize, any::<bool>(), 1..3usize)
            .prop_map(|(seed, len, scope, samples)| Action::Submit { seed, len, scope, samples }),
        10 => Just(Action::Plan),
        10 => prop::bool::weighted(0.1).prop_map(|fail| Action::Apply { fail }),
        1 => Just(Action::Discard),
        1 => (0..20u64).prop_map(Action::Abort),
        1 => Just(Action::Reset),
        3 => Just(Action::Take),
    ]
}

fn act(engine: &mut Engine, action: &Action) {
    match *action {
        Action::Submit { seed, len, scope, samples } => {
            let tokens: Vec<TokenId> = (0..len as u32).map(|place| (place + seed / 2) % 7).collect();
            let scope: &[u8] = if scope { b"a" } else { b"b" };
            let _ = engine.scheduler.submit(Submission {
                max_tokens: Some(9),
                num_samples: samples,
                scope,
                ..Submission::new(&tokens)
            });
        }
        Action::Plan if engine.has_room() => drop(engine.plan()),
        Action::Apply { fail } => {
            let Some(plan) = engine.oldest() else { return };
            let failed_rows = if fail { &[0][..] } else { &[] };
            let tokens = engine.compute_failing(plan, failed_rows);
            engine.apply(plan, &tokens, &vec![Outcome::Ok; tokens.len()], failed_rows);
        }
        Action::Discard => {
            let Some(queued) = engine.queue.back() else { return };
            engine.discard(queued.plan);
        }
        Action::Abort(request) => drop(engine.scheduler.abort(RequestId::new(request))),
        Action::Reset => engine.reset(),
        Action::Plan | Action::Take => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn events_played_in_order_give_what_can_be_found(
        window in prop_oneof![Just(None), (1..12usize).prop_map(Some)],
        with_full in any::<bool>(),
        spare in 0..8usize,
        max_steps_in_flight in 1..3usize,
        max_chunk_tokens in prop_oneof![Just(5usize), Just(16)],
        actions in prop::collection::vec(action(), 1..120),
    ) {
        let window = window.map(|tokens| LayerGroup::Window { tokens });
        let full = (with_full || window.is_none()).then_some(LayerGroup::Full);
        let groups: Vec<LayerGroup> = full.into_iter().chain(window).collect();
        let num_blocks = groups.len() * (17 + spare);
        let mut engine = Engine::new(SchedulerConfig {
            groups,
            max_kv_events: 100_000,
            report_other_scopes: true,
            max_steps_in_flight,
            max_chunk_tokens,
            ..config(num_blocks)
        });
        let mut known = HashSet::new();
        for action in &actions {
            act(&mut engine, action);
            if let Action::Take = action {
                play(&engine.scheduler.take_events(), &mut known);
                let mut now = HashSet::new();
                play(&engine.scheduler.snapshot_events(), &mut now);
                prop_assert_eq!(&known, &now);
            }
        }
    }
}
