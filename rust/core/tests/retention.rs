//! What the cache keeps: sessions, times to live, expected turns, priorities, shares and pins.
#![cfg(not(loom))]

mod support;

use pykv_core::prefix::eviction::eviction_policy;
use pykv_core::prefix::{PinId, PinQuota, Retention};
use pykv_core::scheduler::{AdmissionPolicy, Submission};
use pykv_core::{Error, LayerGroup, SchedulerConfig, TokenId};
use support::Engine;

/// Block size 4; so many usable blocks.
fn engine(num_blocks: usize) -> Engine {
    Engine::new(config(num_blocks))
}

fn config(num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: num_blocks + 1,
        block_size: 4,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 64,
        admission: AdmissionPolicy::Watermark,
        watermark: 0.0,
        ..SchedulerConfig::default()
    }
}

fn prompt(first: TokenId, num_blocks: usize) -> Vec<TokenId> {
    (0..4 * num_blocks as TokenId).map(|offset| first + offset).collect()
}

fn session(name: &[u8]) -> Retention<'_> {
    Retention { session: Some(name), ..Retention::default() }
}

/// Runs a prompt and one token more to its end.
fn run_for(engine: &mut Engine, tokens: &[TokenId], tenant: &[u8], retention: Retention<'_>) {
    let submission = Submission { max_tokens: Some(1), tenant, retention, ..Submission::new(tokens) };
    let request = engine.scheduler.submit(submission).unwrap();
    engine.run();
    assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(tokens, 0, 1));
}

fn run(engine: &mut Engine, tokens: &[TokenId], retention: Retention<'_>) {
    run_for(engine, tokens, b"", retention);
}

/// How many blocks of a prompt are cached.
fn cached(engine: &mut Engine, tokens: &[TokenId]) -> usize {
    engine.scheduler.cached_tokens(tokens, b"") / 4
}

#[test]
fn what_an_ended_session_leaves_goes_before_what_was_used_longer_ago() {
    let mut engine = engine(12);
    run(&mut engine, &prompt(0, 4), session(b"old"));
    run(&mut engine, &prompt(100, 4), session(b"ended"));
    assert!(engine.scheduler.end_session(b"", b"ended"));
    assert!(!engine.scheduler.end_session(b"", b"ended"), "it was ended before");
    run(&mut engine, &prompt(200, 7), session(b"new"));
    assert_eq!(cached(&mut engine, &prompt(0, 4)), 4);
    assert_eq!(cached(&mut engine, &prompt(100, 4)), 1);
}

#[test]
fn a_prefix_that_a_live_session_shares_stays_until_that_one_ends_too() {
    for (second_ends, left) in [(false, 2), (true, 0)] {
        let mut engine = engine(12);
        let (mut a, mut b) = (prompt(0, 2), prompt(0, 2));
        a.extend(prompt(50, 2));
        b.extend(prompt(70, 2));
        run(&mut engine, &a, session(b"a"));
        run(&mut engine, &b, session(b"b"));
        run(&mut engine, &prompt(300, 3), session(b"c"));
        engine.scheduler.end_session(b"", b"a");
        if second_ends {
            engine.scheduler.end_session(b"", b"b");
        }
        // 9 of 12 blocks are cached; the request takes 3 free ones and 2 or 6 of those that only ended sessions used.
        run(&mut engine, &prompt(500, if second_ends { 9 } else { 5 }), session(b"d"));
        assert_eq!(cached(&mut engine, &prompt(300, 3)), 3);
        assert_eq!(cached(&mut engine, &a), left);
    }
}

#[test]
fn a_prefix_that_requests_without_a_session_use_outlives_every_session() {
    let mut engine = engine(12);
    run(&mut engine, &prompt(0, 2), session(b"a"));
    run(&mut engine, &prompt(0, 3), Retention::default());
    run(&mut engine, &prompt(100, 4), session(b"b"));
    engine.scheduler.end_session(b"", b"a");
    engine.scheduler.end_session(b"", b"b");
    run(&mut engine, &prompt(200, 9), session(b"c"));
    assert_eq!(cached(&mut engine, &prompt(0, 3)), 3);
    assert_eq!(cached(&mut engine, &prompt(100, 4)), 0);
}

#[test]
fn a_session_that_comes_back_is_live_again() {
    let mut engine = engine(12);
    run(&mut engine, &prompt(0, 3), session(b"a"));
    run(&mut engine, &prompt(100, 3), session(b"b"));
    engine.scheduler.end_session(b"", b"a");
    engine.scheduler.end_session(b"", b"b");
    // Its request is queued only: that is enough.
    let back = Submission { max_tokens: Some(1), retention: session(b"b"), ..Submission::new(&[9]) };
    engine.scheduler.submit(back).unwrap();
    run(&mut engine, &prompt(200, 7), session(b"c"));
    assert_eq!(cached(&mut engine, &prompt(100, 3)), 3);
    assert!(cached(&mut engine, &prompt(0, 3)) < 3);
}

#[test]
fn what_has_left_the_window_of_a_running_request_makes_room_after_what_was_used_before_it() {
    for retention in [Retention::default(), session(b"old")] {
        let groups = vec![LayerGroup::Full, LayerGroup::Window { tokens: 8 }];
        let mut engine = Engine::new(SchedulerConfig { groups, max_num_batched_tokens: 16, ..config(48) });
        run(&mut engine, &prompt(0, 4), retention);
        engine.submit(&prompt(100, 8), 30, 1);
        (0..3).for_each(|_| assert!(engine.step()));
        assert_eq!(cached(&mut engine, &prompt(100, 2)), 2);
        engine.submit(&prompt(200, 10), 20, 1);
        while engine.scheduler.stats().evictions < 4 {
            assert!(engine.step());
        }
        assert!(cached(&mut engine, &prompt(0, 4)) < 4, "nothing of it went, with {retention:?}");
        assert_eq!(cached(&mut engine, &prompt(100, 2)), 2, "evicted first with {retention:?}");
    }
}

#[test]
fn what_is_expected_no_more_goes_by_when_it_was_used() {
    let mut engine = engine(8);
    run(&mut engine, &prompt(0, 3), Retention { next_turn: Some(10.0), ..session(b"a") });
    engine.now = 9.0;
    run(&mut engine, &prompt(100, 3), Retention::default());
    engine.now = 11.0;
    run(&mut engine, &prompt(200, 3), Retention::default());
    assert_eq!((cached(&mut engine, &prompt(0, 3)), cached(&mut engine, &prompt(100, 3))), (2, 3));
}

#[test]
fn a_session_belongs_to_its_tenant() {
    let mut engine = engine(12);
    run_for(&mut engine, &prompt(0, 3), b"tenant", session(b"s"));
    assert!(!engine.scheduler.end_session(b"", b"s"));
    assert!(!engine.scheduler.end_session(b"tenants", b""));
    assert!(engine.scheduler.end_session(b"tenant", b"s"));
}

#[test]
fn what_has_outlived_its_time_goes_first_with_or_without_a_session() {
    for name in [Some(&b"s"[..]), None] {
        let mut engine = engine(12);
        run(&mut engine, &prompt(0, 3), session(b"a"));
        engine.now = 10.0;
        run(
            &mut engine,
            &prompt(100, 3),
            Retention { session: name, ttl: Some(5.0), ..Retention::default() },
        );
        engine.now = 15.0;
        assert!(!engine.step(), "a plan without work looks at the time too");
        assert_eq!(cached(&mut engine, &prompt(100, 3)), 3, "expired, and still there while there is room");
        engine.now = 15.5;
        run(&mut engine, &prompt(200, 8), session(b"c"));
        assert_eq!(cached(&mut engine, &prompt(0, 3)), 3);
        assert_eq!(cached(&mut engine, &prompt(100, 3)), 1);
    }
}

#[test]
fn a_request_of_the_session_puts_its_end_off() {
    let mut engine = engine(12);
    let kept = Retention { ttl: Some(5.0), ..session(b"a") };
    run(&mut engine, &prompt(0, 3), kept);
    engine.now = 4.0;
    run(&mut engine, &prompt(0, 3), kept);
    run(&mut engine, &prompt(100, 3), session(b"b"));
    engine.now = 8.0;
    run(&mut engine, &prompt(200, 7), session(b"c"));
    assert!(cached(&mut engine, &prompt(0, 3)) < 3, "it was used least recently");
    assert_eq!(cached(&mut engine, &prompt(100, 3)), 3);
}

#[test]
fn an_expected_turn_keeps_blocks_over_later_ones_until_its_time_has_passed() {
    for (now, expected) in [(1.0, (3, 2)), (30.0, (2, 3))] {
        let mut engine = engine(12);
        run(&mut engine, &prompt(0, 3), Retention { next_turn: Some(20.0), ..session(b"a") });
        run(&mut engine, &prompt(100, 3), session(b"b"));
        engine.now = now;
        run(&mut engine, &prompt(200, 7), session(b"c"));
        let left = (cached(&mut engine, &prompt(0, 3)), cached(&mut engine, &prompt(100, 3)));
        assert_eq!(left, expected, "at {now}: a turn that did not come leaves the last use as it was");
    }
}

#[test]
fn a_higher_priority_is_kept_among_live_ones_and_does_not_save_an_ended_one() {
    let mut engine = engine(12);
    run(&mut engine, &prompt(0, 3), Retention { priority: 1, ..Retention::default() });
    run(&mut engine, &prompt(100, 3), Retention { priority: 2, ..session(b"b") });
    run(&mut engine, &prompt(200, 3), Retention::default());
    engine.scheduler.end_session(b"", b"b");
    run(&mut engine, &prompt(300, 7), Retention::default());
    let left = [0, 100, 200].map(|first| cached(&mut engine, &prompt(first, 3)));
    assert_eq!(left, [3, 0, 2]);
}

#[test]
fn a_tenant_above_its_share_loses_its_own_blocks_first() {
    let mut engine = Engine::new(SchedulerConfig { tenant_cache_share: 0.25, ..config(20) });
    run_for(&mut engine, &prompt(0, 4), b"modest", Retention::default());
    run_for(&mut engine, &prompt(100, 6), b"greedy", Retention::default());
    run_for(&mut engine, &prompt(200, 6), b"greedy", Retention::default());
    // 16 of 20 blocks are cached: greedy has 12, and may have 5. 8 are needed: 4 free, 4 evicted.
    run_for(&mut engine, &prompt(300, 8), b"other", Retention::default());
    let left = [0, 100, 200].map(|first| cached(&mut engine, &prompt(first, 6)));
    assert_eq!(left, [4, 2, 6]);
    engine.scheduler.set_cache_share(b"greedy", 1.0).unwrap();
    run_for(&mut engine, &prompt(400, 2), b"last", Retention::default());
    assert_eq!(cached(&mut engine, &prompt(200, 6)), 6, "other is above its share now, greedy no longer is");
    assert!(engine.scheduler.set_cache_share(b"greedy", 1.5).is_err());
}

#[test]
fn what_two_tenants_use_is_nobodys_own() {
    let mut engine = Engine::new(SchedulerConfig { tenant_cache_share: 0.0, ..config(16) });
    run_for(&mut engine, &prompt(0, 4), b"a", Retention::default());
    run_for(&mut engine, &prompt(0, 4), b"b", Retention::default());
    run_for(&mut engine, &prompt(100, 4), b"b", Retention::default());
    run_for(&mut engine, &prompt(200, 9), b"c", Retention::default());
    // 9 blocks are needed; 8 are free; b's own goes although what both use was used longer ago.
    assert_eq!([0, 100].map(|first| cached(&mut engine, &prompt(first, 4))), [4, 3]);
}

#[test]
fn a_pinned_prefix_stays_whatever_comes_and_counts_against_the_quota() {
    let quota = PinQuota { blocks: 6, blocks_per_tenant: 4 };
    let mut engine = Engine::new(SchedulerConfig { pin_quota: quota, ..config(20) });
    run(&mut engine, &prompt(0, 4), Retention::default());
    run(&mut engine, &prompt(100, 4), Retention::default());
    let pinned = engine.scheduler.pin(&prompt(0, 4), b"", b"a").unwrap().unwrap();
    assert_eq!((pinned.num_tokens, pinned.num_blocks), (16, 4));
    assert_eq!(engine.scheduler.pin(&prompt(50, 4), b"", b"a").unwrap(), None, "nothing is cached of it");
    let error = engine.scheduler.pin(&prompt(0, 1), b"", b"a").unwrap_err();
    let option = "max_pinned_blocks_per_tenant";
    assert_eq!(error, Error::PinQuota { whose: "the tenant's ", option, held: 4, asked: 1, limit: 4 });
    let error = engine.scheduler.pin(&prompt(100, 4), b"", b"b").unwrap_err();
    let option = "max_pinned_blocks";
    assert_eq!(error, Error::PinQuota { whose: "", option, held: 4, asked: 4, limit: 6 });
    for first in [200, 300, 400, 500] {
        run(&mut engine, &prompt(first, 10), Retention::default());
    }
    let again = engine.scheduler.pin(&prompt(0, 2), b"", b"b").unwrap().unwrap();
    assert_eq!((again.num_blocks, engine.scheduler.stats().pinned_blocks), (2, 6));
    assert_eq!(engine.scheduler.stats().blocks.active, 4);
    engine.scheduler.check().unwrap();
    assert!(engine.scheduler.unpin(pinned.pin) && !engine.scheduler.unpin(pinned.pin));
    assert!(engine.scheduler.unpin(again.pin) && !engine.scheduler.unpin(PinId::new(99)));
    assert_eq!(engine.scheduler.stats().blocks.active, 0);
    for first in [600, 700] {
        run(&mut engine, &prompt(first, 13), Retention::default());
    }
    assert_eq!(cached(&mut engine, &prompt(0, 4)), 0, "it is evicted like any other again");
}

#[test]
fn a_sequence_fits_beside_all_that_may_be_pinned() {
    let quota = PinQuota { blocks: 10, blocks_per_tenant: 10 };
    let mut engine = Engine::new(SchedulerConfig { pin_quota: quota, ..config(16) });
    assert_eq!(engine.scheduler.config().cap(), 24);
    run(&mut engine, &prompt(0, 5), Retention::default());
    run(&mut engine, &prompt(100, 5), Retention::default());
    for first in [0, 100] {
        assert_eq!(engine.scheduler.pin(&prompt(first, 5), b"", b"a").unwrap().unwrap().num_blocks, 5);
    }
    run(&mut engine, &prompt(200, 5), Retention::default());
    assert!(engine.scheduler.submit(Submission::new(&prompt(300, 6))).is_err());
}

#[test]
fn a_reset_ends_pins_and_leaves_no_session_behind() {
    let quota = PinQuota { blocks: 10, blocks_per_tenant: 10 };
    let mut engine = Engine::new(SchedulerConfig { pin_quota: quota, ..config(16) });
    run(&mut engine, &prompt(0, 4), session(b"a"));
    let pinned = engine.scheduler.pin(&prompt(0, 4), b"", b"a").unwrap().unwrap();
    engine.scheduler.reset_prefix_cache();
    engine.scheduler.check().unwrap();
    let stats = engine.scheduler.stats();
    assert_eq!((stats.blocks.free, stats.num_sessions, stats.pinned_blocks), (16, 0, 0));
    assert!(!engine.scheduler.unpin(pinned.pin));
    engine.submit(&prompt(0, 4), 3, 2);
    engine.run();
    assert_eq!(engine.scheduler.stats().num_sessions, 0);
}

#[test]
fn sessions_are_forgotten_with_their_last_block() {
    let mut engine = engine(12);
    for first in 0..50 {
        let name = [first as u8];
        run(&mut engine, &prompt(100 * first, 3), Retention { ttl: Some(1.0), ..session(&name) });
    }
    assert!(engine.scheduler.stats().num_sessions <= 4);
    run(&mut engine, &[1], session(b"no block"));
    engine.scheduler.reset_prefix_cache();
    assert_eq!(engine.scheduler.stats().num_sessions, 0);
}

#[test]
fn of_many_conversations_of_one_session_the_last_32_count() {
    let mut engine = engine(40);
    for first in 0..40 {
        run(&mut engine, &prompt(100 * first, 1), session(b"a"));
    }
    run(&mut engine, &prompt(100 * 9, 1), session(b"a"));
    run(&mut engine, &prompt(9000, 8), session(b"b"));
    let left: Vec<usize> = (0..40).map(|first| cached(&mut engine, &prompt(100 * first, 1))).collect();
    assert_eq!((left[..8].iter().sum::<usize>(), left[8..].iter().sum()), (0, 32));
    assert!(engine.scheduler.end_session(b"", b"a"));
    run(&mut engine, &prompt(8000, 12), session(b"b"));
    assert_eq!(cached(&mut engine, &prompt(9000, 8)), 8);
}

#[test]
fn what_was_hit_stays_over_a_scan_under_segmented_lru_and_not_under_lru() {
    for (name, left) in [("lru", 0), ("segmented_lru", 3)] {
        let eviction = eviction_policy(name).unwrap();
        let mut engine = Engine::new(SchedulerConfig { eviction, ..config(16) });
        run(&mut engine, &prompt(0, 4), Retention::default());
        run(&mut engine, &prompt(0, 4), Retention::default());
        for first in 1..20 {
            run(&mut engine, &prompt(100 * first, 6), Retention::default());
        }
        // The prompt's last block is computed again each time: its last token is never a hit.
        assert_eq!(cached(&mut engine, &prompt(0, 4)), left, "{name}");
    }
}

#[test]
fn retention_that_makes_no_sense_is_refused_before_anything_changes() {
    let mut engine = engine(12);
    for (retention, field) in [
        (Retention { ttl: Some(-1.0), ..Retention::default() }, "ttl"),
        (Retention { ttl: Some(f64::NAN), ..Retention::default() }, "ttl"),
        (Retention { next_turn: Some(f64::INFINITY), ..session(b"a") }, "next_turn"),
        (Retention { next_turn: Some(1.0), ..Retention::default() }, "next_turn"),
        (Retention { priority: 3, ..Retention::default() }, "retention_priority"),
    ] {
        let error = engine.scheduler.submit(Submission { retention, ..Submission::new(&[1]) }).unwrap_err();
        assert!(error.to_string().starts_with(field), "{error}");
    }
    assert_eq!(engine.scheduler.stats().num_requests, 0);
}
