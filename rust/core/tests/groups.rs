//! Layer groups: windows give blocks back, hits are as long as every group can serve.
#![cfg(not(loom))]

mod support;

use pykv_core::policy::order::QueueOrder;
use pykv_core::scheduler::{AdmissionPolicy, Outcome, Submission};
use pykv_core::{LayerGroup, SchedulerConfig, TokenId};
use support::Engine;

const FULL: LayerGroup = LayerGroup::Full;

fn window(tokens: usize) -> LayerGroup {
    LayerGroup::Window { tokens }
}

fn config(num_blocks: usize, groups: &[LayerGroup]) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks,
        block_size: 4,
        groups: groups.to_vec(),
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 10_000,
        admission: AdmissionPolicy::Watermark,
        ..SchedulerConfig::default()
    }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|place| (place * 7 + seed) % 50).collect()
}

/// Runs a prompt to its end and checks its tokens. Returns how many were found.
fn run(engine: &mut Engine, tokens: &[TokenId], max_tokens: usize) -> usize {
    let request = engine.submit(tokens, max_tokens, 1);
    engine.run();
    assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(tokens, 0, max_tokens));
    engine.ended.pop().unwrap().cached_tokens
}

/// The most blocks that are active while a prompt of 400 tokens runs and 40 are sampled.
fn most_active(groups: &[LayerGroup], enable_prefix_caching: bool) -> usize {
    let mut engine = Engine::new(SchedulerConfig { enable_prefix_caching, ..config(400, groups) });
    run(&mut engine, &prompt(0, 400), 40);
    engine.scheduler.stats().peak.active_blocks
}

#[test]
fn a_window_holds_its_own_blocks_and_the_chunks_however_long_the_sequence() {
    // A window of 20 and a chunk of 16 tokens span at most 10 blocks of 4; 439 tokens fill 110.
    for caching in [false, true] {
        assert_eq!(most_active(&[FULL], caching), 110);
        assert_eq!(most_active(&[window(20)], caching), 10);
        assert_eq!(most_active(&[FULL, window(20)], caching), 110 + 6);
    }
}

#[test]
fn a_sequence_far_longer_than_the_pool_runs_through_windows_alone() {
    let mut engine = Engine::new(config(20, &[window(20)]));
    assert_eq!(engine.scheduler.config().cap(), 10_000);
    run(&mut engine, &prompt(0, 1000), 30);
}

#[test]
fn a_prompt_beyond_what_all_groups_hold_is_refused() {
    let groups = [FULL, window(20)];
    // 10 blocks for the window leave 9 of 19 for all positions.
    let cap = config(20, &groups).cap();
    assert_eq!(cap, 36);
    let mut engine = Engine::new(config(20, &groups));
    let error = engine.scheduler.submit(Submission::new(&prompt(0, cap))).unwrap_err();
    assert!(error.to_string().contains("total of 36 tokens"), "{error}");
    run(&mut engine, &prompt(0, cap - 1), 1);
}

#[test]
fn a_hit_is_as_long_as_every_group_can_serve() {
    for groups in [vec![window(9)], vec![FULL, window(9)], vec![window(9), FULL, window(5)]] {
        let mut engine = Engine::new(config(400, &groups));
        assert_eq!(run(&mut engine, &prompt(0, 100), 2), 0);
        assert_eq!(run(&mut engine, &prompt(0, 100), 2), 96, "{groups:?}: nothing was evicted");
        let mut branch = prompt(0, 42);
        branch.extend(prompt(33, 20));
        assert_eq!(run(&mut engine, &branch, 2), 40, "{groups:?}: what left the window is cached");
    }
}

#[test]
fn blocks_of_a_window_are_evicted_one_by_one_and_shorten_the_hit() {
    let groups = [FULL, window(9)];
    let mut engine = Engine::new(config(110, &groups));
    run(&mut engine, &prompt(0, 100), 1);
    let before = engine.scheduler.stats();
    assert_eq!((before.blocks.cached, before.evictions), (50, 0));
    // Needs more than what is free: the first that left the window go first.
    run(&mut engine, &prompt(1, 150), 1);
    assert!(engine.scheduler.stats().evictions > 0);
    let cached = run(&mut engine, &prompt(0, 100), 1);
    assert_eq!(cached, 96, "the end of the first prompt is still there");
    let mut branch = prompt(0, 10);
    branch.extend(prompt(33, 20));
    assert_eq!(run(&mut engine, &branch, 1), 0, "what it would have read at its start is gone");
    assert_eq!(run(&mut engine, &branch, 1), 28, "and was put back by whoever computed it again");
}

#[test]
fn twins_share_in_every_group() {
    let groups = [FULL, window(9)];
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 64, ..config(200, &groups) });
    let tokens = prompt(0, 30);
    let requests = [engine.submit(&tokens, 3, 1), engine.submit(&tokens, 3, 1)];
    engine.run();
    for request in requests {
        assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&tokens, 0, 3));
    }
    let stats = engine.scheduler.stats();
    assert_eq!(stats.hit_tokens, 28);
    assert!(stats.peak.active_blocks <= 8 + 2 + 8 + 2, "{stats:?}");
}

#[test]
fn groups_that_are_none_or_empty_are_refused() {
    for groups in [vec![], vec![window(0)]] {
        let error = config(20, &groups).validate().unwrap_err();
        assert!(error.to_string().starts_with("groups is "), "{error}");
    }
}

#[test]
fn a_long_prompt_whose_beginning_is_cached_runs_in_a_pool_that_it_fills() {
    for (groups, num_blocks) in
        [(vec![window(8)], 21), (vec![FULL, window(40)], 60), (vec![FULL, window(9), FULL], 90)]
    {
        let config =
            SchedulerConfig { max_chunk_tokens: 7, max_model_len: 400, ..config(num_blocks, &groups) };
        let cap = config.cap();
        for cached in [10, cap / 3, cap - 9] {
            let mut engine = Engine::new(config.clone());
            run(&mut engine, &prompt(0, cached), 1);
            run(&mut engine, &prompt(0, cap - 4), 3);
        }
    }
}

#[test]
fn who_waits_starts_when_windows_give_back_and_not_only_when_somebody_ends() {
    let config =
        SchedulerConfig { max_num_batched_tokens: 64, max_model_len: 400, ..config(21, &[window(8)]) };
    let mut engine = Engine::new(config);
    engine.submit(&prompt(0, 60), 300, 1);
    engine.submit(&prompt(1, 32), 300, 1);
    for _ in 0..6 {
        engine.step();
    }
    assert_eq!(engine.scheduler.stats().num_running, 2);
}

#[test]
fn who_starts_without_its_hit_because_that_does_not_fit_has_all_its_blocks_counted_and_hits_later() {
    // A window of 1 token: what a hit holds besides, the block that the next one hangs below, is one block too many.
    let config = SchedulerConfig {
        max_num_seqs: 2,
        queue_order: QueueOrder::LongestPrefix,
        ..config(8, &[window(1)])
    };
    let mut engine = Engine::new(config);
    engine.submit(&prompt(0, 9), 1, 1);
    engine.run();
    // Paused, it holds two blocks: five are left.
    let paused = engine.submit(&prompt(30, 7), 30, 1);
    assert!(engine.step() && engine.scheduler.pause(paused));
    assert_eq!(engine.scheduler.stats().blocks.active, 2);
    engine.submit(&prompt(20, 3), 1, 1);
    let tokens = [prompt(0, 8), prompt(9, 20)].concat();
    let cold = engine.submit(&tokens, 12, 1);
    assert_eq!(engine.scheduler.cached_tokens(&tokens, b""), 8);
    (0..4).for_each(|_| assert!(engine.step()));
    let hit_tokens = engine.scheduler.stats().hit_tokens;
    // Who comes next takes its row from it, and leaves its blocks in the cache.
    engine.scheduler.pause(cold);
    for seed in 40..42 {
        engine.submit(&prompt(seed, 3), 2, 1);
    }
    engine.run();
    engine.scheduler.resume(cold);
    engine.scheduler.resume(paused);
    engine.run();
    let summary = engine.ended.iter().find(|summary| summary.request == cold).unwrap();
    assert_eq!((hit_tokens, summary.cached_tokens), (0, 0));
    assert_eq!((summary.misses.cap, summary.misses.never_seen), (2, 5), "all of its full blocks");
    assert_eq!((summary.preemptions, summary.recomputed_tokens < 28), (1, true), "{summary:?}");
    assert_eq!(engine.outputs[&(cold.get(), 0)], engine.expected(&tokens, 0, 12));
}

/// A tree of 22 blocks has 16 nodes for each. When it is full the long prompt publishes no more, its last node goes in time,
/// and others get its number.
#[test]
fn who_publishes_no_more_loses_nothing_by_failures_of_others() {
    let config =
        SchedulerConfig { max_num_batched_tokens: 20, max_chunk_tokens: 16, ..config(22, &[window(16)]) };
    let mut engine = Engine::new(config);
    let tokens: Vec<TokenId> = (0..1600).collect();
    let first = engine.submit(&tokens, 20, 1);
    let mut num_failed = 0;
    while engine.ended.iter().all(|summary| summary.request != first) {
        assert!(engine.num_steps < 400, "{num_failed} rows of others have failed");
        if engine.num_steps > 2 && engine.scheduler.stats().num_requests < 2 {
            let start = 10_000 + 100 * num_failed;
            engine.submit(&(start..start + 40).collect::<Vec<TokenId>>(), 2, 1);
        }
        let plan = engine.plan().unwrap();
        let others: Vec<usize> = (1..plan.num_batch_rows).collect();
        num_failed += others.len() as u32;
        let sampled = engine.compute_failing(plan, &others);
        engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &others);
    }
    assert!(num_failed > 50);
    assert_eq!(engine.outputs[&(first.get(), 0)], engine.expected(&tokens, 0, 20));
}
