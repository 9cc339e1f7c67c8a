//! What the cache tells about itself: why blocks were missed, and events about those that can be found.
#![cfg(not(loom))]

mod support;

use std::collections::HashSet;

use proptest::prelude::*;
use pykv_core::prefix::content_key::{ContentKey, content_keys, root_key};
use pykv_core::prefix::{EventKind, Events, Media, MissCounts};
use pykv_core::scheduler::{AdmissionPolicy, Submission};
use pykv_core::{BlockSize, LayerGroup, SchedulerConfig, TokenId};
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

#[derive(Clone, Debug)]
enum Action {
    Submit { seed: TokenId, len: usize, scope: bool, samples: usize },
    Step { fail: bool },
    Discard,
    Reset,
    Take,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0..3u32, 1..40usize, any::<bool>(), 1..3usize)
            .prop_map(|(seed, len, scope, samples)| Action::Submit { seed, len, scope, samples }),
        10 => prop::bool::weighted(0.1).prop_map(|fail| Action::Step { fail }),
        1 => Just(Action::Discard),
        1 => Just(Action::Reset),
        3 => Just(Action::Take),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn events_played_in_order_give_what_can_be_found(
        window in prop_oneof![Just(None), (1..12usize).prop_map(Some)],
        with_full in any::<bool>(),
        spare in 0..8usize,
        actions in prop::collection::vec(action(), 1..80),
    ) {
        let window = window.map(|tokens| LayerGroup::Window { tokens });
        let full = (with_full || window.is_none()).then_some(LayerGroup::Full);
        let groups: Vec<LayerGroup> = full.into_iter().chain(window).collect();
        let num_blocks = groups.len() * (17 + spare);
        let mut engine = Engine::new(SchedulerConfig {
            groups, max_kv_events: 100_000, report_other_scopes: true, ..config(num_blocks)
        });
        let mut known = HashSet::new();
        for action in &actions {
            match *action {
                Action::Submit { seed, len, scope, samples } => {
                    let tokens: Vec<TokenId> = (0..len as u32).map(|place| (place + seed / 2) % 7).collect();
                    let scope: &[u8] = if scope { b"a" } else { b"b" };
                    let _ = engine.scheduler.submit(Submission {
                        max_tokens: Some(9), num_samples: samples, scope, ..Submission::new(&tokens)
                    });
                }
                Action::Step { fail } => {
                    if let Some(plan) = engine.plan() {
                        let tokens = engine.compute(plan);
                        let outcomes = vec![pykv_core::scheduler::Outcome::Ok; tokens.len()];
                        engine.apply(plan, &tokens, &outcomes, if fail { &[0] } else { &[] });
                    }
                }
                Action::Discard => {
                    if let Some(plan) = engine.plan() {
                        engine.scheduler.discard(plan.id).unwrap();
                    }
                }
                Action::Reset => engine.scheduler.reset_prefix_cache(),
                Action::Take => {
                    play(&engine.scheduler.take_events(), &mut known);
                    let mut now = HashSet::new();
                    play(&engine.scheduler.snapshot_events(), &mut now);
                    prop_assert_eq!(&known, &now);
                }
            }
        }
    }
}
