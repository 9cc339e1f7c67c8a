//! States of fixed size: where checkpoints are taken, what hits land on, and who has which slot.
#![cfg(not(loom))]

mod support;

use pykv_core::policy::order::QueueOrder;
use pykv_core::prefix::PinQuota;
use pykv_core::scheduler::{AdmissionPolicy, Outcome, Submission};
use pykv_core::states::StateCounts;
use pykv_core::{LayerGroup, SchedulerConfig, TokenId};
use support::Engine;

/// Blocks of 4 tokens, a place for a checkpoint every 2 of them, 16 tokens a step.
fn config(num_blocks: usize, num_state_slots: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks,
        block_size: 4,
        num_state_slots,
        checkpoint_every: 2,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 1000,
        admission: AdmissionPolicy::Watermark,
        ..SchedulerConfig::default()
    }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|place| (place * 7 + seed) % 50).collect()
}

/// `common` tokens that all such prompts begin with, then `len - common` of their own.
fn branch(seed: u32, common: usize, len: usize) -> Vec<TokenId> {
    [prompt(0, common), prompt(seed, len - common)].concat()
}

/// Runs a prompt to its end and checks its tokens. Returns how many were found.
fn run(engine: &mut Engine, tokens: &[TokenId], max_tokens: usize) -> usize {
    let request = engine.submit(tokens, max_tokens, 1);
    engine.run();
    assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(tokens, 0, max_tokens));
    engine.ended.pop().unwrap().cached_tokens
}

fn counts(engine: &mut Engine) -> (usize, usize, usize) {
    let StateCounts { free, working, checkpoints, total } = engine.scheduler.stats().state_slots;
    assert_eq!(free + working + checkpoints, total);
    (free, working, checkpoints)
}

#[test]
fn a_hit_lands_on_the_last_checkpoint_before_what_is_cached() {
    let mut engine = Engine::new(config(200, 20));
    // Chunks end at 16, 32 and 40; decodes pass 48 and 56.
    assert_eq!(run(&mut engine, &prompt(0, 43), 16), 0);
    assert_eq!(counts(&mut engine), (14, 0, 5));
    for (common, found) in [(15, 0), (16, 16), (31, 16), (32, 32), (39, 32), (40, 40)] {
        let cached = engine.scheduler.cached_tokens(&branch(common as u32 + 20, common, 60), b"");
        assert_eq!(cached, found, "{common} tokens in common");
    }
    let conversation = [prompt(0, 43), engine.outputs[&(0, 0)].clone()].concat();
    assert_eq!(run(&mut engine, &[conversation, prompt(9, 20)].concat(), 3), 56, "the next turn");
}

#[test]
fn where_two_prompts_have_parted_a_third_hits() {
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 64, ..config(200, 20) });
    // 5 blocks in common: no place for a checkpoint, and the only one that the first prompt leaves lies behind it.
    assert_eq!(run(&mut engine, &branch(1, 22, 50), 2), 0);
    assert_eq!(run(&mut engine, &branch(2, 22, 50), 2), 0);
    assert_eq!(run(&mut engine, &branch(3, 22, 50), 2), 20);
}

#[test]
fn a_chunk_ends_where_a_checkpoint_is_taken() {
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 30, ..config(200, 20) });
    engine.submit(&prompt(0, 61), 1, 1);
    let mut chunks = Vec::new();
    while let Some(plan) = engine.plan() {
        chunks.push((plan.num_tokens, plan.num_state_restores, plan.num_state_saves));
        let tokens = engine.compute(plan);
        engine.apply(plan, &tokens, &vec![Outcome::Ok; tokens.len()], &[]);
    }
    assert_eq!(chunks, [(24, 1, 1), (24, 0, 1), (8, 0, 1), (5, 0, 0)]);
}

#[test]
fn without_a_prefix_cache_chunks_are_whole_and_nothing_is_kept() {
    let mut engine = Engine::new(SchedulerConfig { enable_prefix_caching: false, ..config(200, 3) });
    engine.submit(&prompt(0, 30), 20, 1);
    assert_eq!(engine.plan().map(|plan| (plan.num_tokens, plan.num_state_saves)), Some((16, 0)));
    engine.scheduler.discard(0).unwrap();
    assert_eq!(run(&mut engine, &prompt(1, 30), 20), 0);
    assert_eq!(counts(&mut engine), (2, 0, 0));
}

#[test]
fn a_hit_is_as_long_as_blocks_and_checkpoints_can_serve() {
    let groups = vec![LayerGroup::Full, LayerGroup::Window { tokens: 9 }];
    let mut engine = Engine::new(SchedulerConfig { groups, ..config(110, 30) });
    run(&mut engine, &prompt(0, 100), 1);
    run(&mut engine, &prompt(1, 150), 1);
    assert!(engine.scheduler.stats().evictions > 0);
    assert_eq!(run(&mut engine, &prompt(0, 100), 1), 96);
    let early = branch(33, 18, 40);
    assert_eq!(run(&mut engine, &early, 1), 0, "there is a checkpoint, and the window's blocks are gone");
    assert_eq!(run(&mut engine, &early, 1), 32);
}

#[test]
fn a_checkpoint_goes_alone_and_its_blocks_stay() {
    let mut engine = Engine::new(config(400, 5));
    assert_eq!(run(&mut engine, &prompt(0, 41), 1), 0);
    assert_eq!(counts(&mut engine), (1, 0, 3));
    let before = engine.scheduler.stats();
    // Takes a slot to work in and two for checkpoints: the oldest two of the first prompt go.
    assert_eq!(run(&mut engine, &prompt(1, 33), 1), 0);
    let after = engine.scheduler.stats();
    assert_eq!((after.checkpoint_evictions, after.evictions), (2, 0));
    assert_eq!(after.blocks.cached, before.blocks.cached + 8);
    assert_eq!(engine.scheduler.cached_tokens(&prompt(0, 41), b""), 40);
    assert_eq!(engine.scheduler.cached_tokens(&branch(3, 33, 41), b""), 0);
    assert_eq!(run(&mut engine, &branch(3, 33, 41), 1), 0);
    assert_eq!(run(&mut engine, &branch(3, 33, 41), 1), 40, "whoever computes it again puts one back");
    assert_eq!(engine.scheduler.stats().blocks.cached, after.blocks.cached + 2, "the blocks were the same");
}

#[test]
fn a_node_that_is_evicted_takes_its_checkpoint_along() {
    let mut engine = Engine::new(config(14, 20));
    run(&mut engine, &prompt(0, 41), 1);
    assert_eq!(counts(&mut engine), (16, 0, 3));
    run(&mut engine, &prompt(1, 41), 1);
    assert_eq!(engine.scheduler.stats().evictions, 8);
    assert_eq!(counts(&mut engine), (16, 0, 3), "the first prompt's are gone");
    engine.scheduler.reset_prefix_cache();
    assert_eq!(counts(&mut engine), (19, 0, 0));
}

#[test]
fn twins_do_not_share_what_one_of_them_is_just_computing() {
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 64, ..config(200, 20) });
    let tokens = prompt(0, 30);
    let requests = [engine.submit(&tokens, 3, 1), engine.submit(&tokens, 3, 1)];
    engine.run();
    for request in requests {
        assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&tokens, 0, 3));
    }
    assert_eq!(engine.scheduler.stats().hit_tokens, 0);
    assert_eq!(run(&mut engine, &tokens, 3), 24);
    assert_eq!(engine.scheduler.stats().blocks.cached, 8, "equal blocks were folded");
}

#[test]
fn samples_are_forked_off_with_the_state_behind_the_prompt() {
    let mut engine = Engine::new(config(200, 9));
    let tokens = prompt(0, 26);
    let request = engine.submit(&tokens, 12, 4);
    engine.run();
    for child in 0..4 {
        let expected = engine.expected(&tokens, child.into(), 12);
        assert_eq!(engine.outputs[&(request.get(), child)], expected, "sample {child}");
    }
    assert_eq!(counts(&mut engine).1, 0);
}

#[test]
fn who_is_preempted_goes_on_from_the_last_checkpoint() {
    let mut engine = Engine::new(config(24, 12));
    let requests: Vec<_> =
        (0..3).map(|seed| (engine.submit(&prompt(seed, 20), 25, 1), prompt(seed, 20))).collect();
    engine.run();
    for (request, tokens) in requests {
        assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&tokens, 0, 25));
    }
    let stats = engine.scheduler.stats();
    assert!(stats.preemptions > 0, "{stats:?}");
    assert!(stats.recomputed_tokens < 30 * stats.preemptions, "{stats:?}");
}

#[test]
fn a_step_that_failed_as_a_whole_is_computed_again_from_the_last_checkpoint() {
    let mut engine = Engine::new(config(200, 12));
    let tokens = prompt(0, 40);
    let request = engine.submit(&tokens, 10, 1);
    (0..5).for_each(|_| assert!(engine.step()));
    let plan = engine.plan().unwrap();
    engine.compute(plan);
    engine.scheduler.discard(plan.id).unwrap();
    engine.scheduler.check().unwrap();
    let plan = engine.plan().unwrap();
    assert_eq!((plan.num_state_restores, plan.num_tokens), (1, 3), "what lies behind the checkpoint at 40");
    let sampled = engine.compute(plan);
    engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &[]);
    engine.run();
    assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&tokens, 0, 10));
}

#[test]
fn a_checkpoint_of_a_row_that_failed_is_found_by_nobody() {
    let mut engine = Engine::new(config(200, 12));
    engine.submit(&prompt(0, 40), 1, 1);
    let plan = engine.plan().unwrap();
    assert_eq!(plan.num_state_saves, 1);
    engine.apply(plan, &[], &[], &[0]);
    assert_eq!(counts(&mut engine), (11, 0, 0));
    assert_eq!(run(&mut engine, &prompt(0, 40), 4), 0);
}

#[test]
fn a_checkpoint_that_a_step_reads_outlives_a_reset() {
    let mut engine = Engine::new(config(200, 12));
    run(&mut engine, &prompt(0, 33), 1);
    let request = engine.submit(&prompt(0, 37), 4, 1);
    let plan = engine.plan().unwrap();
    engine.scheduler.reset_prefix_cache();
    engine.scheduler.check().unwrap();
    assert_eq!(counts(&mut engine), (9, 1, 1));
    let sampled = engine.compute(plan);
    engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &[]);
    assert_eq!(counts(&mut engine), (10, 1, 0));
    engine.run();
    assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&prompt(0, 37), 0, 4));
}

#[test]
fn a_checkpoint_that_a_step_fills_comes_to_nothing_after_a_reset() {
    let mut engine = Engine::new(config(200, 12));
    engine.submit(&prompt(0, 40), 4, 1);
    let plan = engine.plan().unwrap();
    assert_eq!(plan.num_state_saves, 1);
    engine.scheduler.reset_prefix_cache();
    let sampled = engine.compute(plan);
    engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &[]);
    assert_eq!(counts(&mut engine), (10, 1, 0));
    assert_eq!(run(&mut engine, &prompt(0, 40), 4), 0);
}

#[test]
fn sequences_wait_for_slots_as_they_do_for_rows() {
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 64, ..config(200, 3) });
    let requests: Vec<_> =
        (0..4).map(|seed| (engine.submit(&prompt(seed, 9), 5, 1), prompt(seed, 9))).collect();
    engine.step();
    let stats = engine.scheduler.stats();
    assert_eq!((stats.num_running, stats.num_waiting), (2, 2));
    engine.run();
    for (request, tokens) in requests {
        assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&tokens, 0, 5));
    }
}

#[test]
fn the_fewest_slots_are_enough_for_as_many_samples_as_may_be_and_their_hit() {
    for (num_slots, num_samples) in [(3, 1), (5, 3)] {
        let mut engine = Engine::new(config(200, num_slots));
        assert_eq!(run(&mut engine, &prompt(0, 20), 1), 0);
        let tokens = prompt(0, 24);
        let request = engine.submit(&tokens, 3, num_samples);
        engine.run();
        for child in 0..num_samples as u32 {
            assert_eq!(engine.outputs[&(request.get(), child)], engine.expected(&tokens, child.into(), 3));
        }
        assert_eq!(engine.ended.pop().unwrap().cached_tokens, 16, "{num_slots} slots");
    }
}

#[test]
fn more_samples_than_slots_are_refused() {
    let mut engine = Engine::new(config(200, 4));
    let submission = Submission { num_samples: 3, ..Submission::new(&[1, 2]) };
    let error = engine.scheduler.submit(submission).unwrap_err().to_string();
    assert!(error.contains("num_samples is 3: allowed is 1 to 2 (of num_state_slots 4)"), "{error}");
}

#[test]
fn what_states_cannot_do_is_refused() {
    let pinned = PinQuota { blocks: 2, blocks_per_tenant: 2 };
    for (config, field) in [
        (config(20, 1), "num_state_slots is 1"),
        (config(20, 2), "num_state_slots is 2: allowed is 0, or at least 3"),
        (SchedulerConfig { num_host_blocks: 8, ..config(20, 4) }, "num_host_blocks is 8: allowed is 0"),
        (
            SchedulerConfig { num_lookahead_tokens: 2, ..config(20, 4) },
            "num_lookahead_tokens is 2: allowed is 0",
        ),
        (SchedulerConfig { pin_quota: pinned, ..config(20, 4) }, "max_pinned_blocks is 2: allowed is 0"),
        (SchedulerConfig { checkpoint_every: 0, ..config(20, 4) }, "checkpoint_every is 0"),
        (
            SchedulerConfig { max_steps_in_flight: 2, ..config(20, 4) },
            "max_steps_in_flight is 2: allowed is 1 with num_state_slots",
        ),
    ] {
        let error = config.validate().unwrap_err().to_string();
        assert!(error.starts_with(field), "{error}");
    }
}

#[test]
fn steps_that_fail_time_and_again_keep_nobody_from_its_end() {
    // A step computes one token, and there is room for one checkpoint: the step that fills the second one fails, and so
    // does every sixth after it. From the beginning, nobody gets as far as the next place for a checkpoint any more.
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 1, ..config(60, 3) });
    let tokens = prompt(0, 30);
    let request = engine.submit(&tokens, 10, 1);
    let mut num_steps = 0;
    while let Some(plan) = engine.plan() {
        num_steps += 1;
        assert!(num_steps < 1_000, "nothing makes progress");
        let sampled = engine.compute(plan);
        if num_steps >= 16 && num_steps % 6 == 4 {
            engine.scheduler.discard(plan.id).unwrap();
        } else {
            engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &[]);
        }
    }
    assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&tokens, 0, 10));
}

/// Has each of several prompts sampled to its end, while the step after every `num_good` that succeed fails. Returns how
/// many steps that took.
fn run_with_failures(
    config: SchedulerConfig,
    prompts: &[Vec<TokenId>],
    max_tokens: usize,
    num_good: usize,
) -> usize {
    let mut engine = Engine::new(config);
    let requests: Vec<_> = prompts.iter().map(|tokens| engine.submit(tokens, max_tokens, 1)).collect();
    let mut num_steps = 0;
    while let Some(plan) = engine.plan() {
        num_steps += 1;
        assert!(num_steps < 2_000, "nothing makes progress");
        let sampled = engine.compute(plan);
        if num_steps % (num_good + 1) == 0 {
            engine.scheduler.discard(plan.id).unwrap();
        } else {
            engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &[]);
        }
        engine.scheduler.check().unwrap();
    }
    for (request, tokens) in requests.iter().zip(prompts) {
        assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(tokens, 0, max_tokens));
    }
    num_steps
}

#[test]
fn failures_where_all_reach_a_blocks_end_keep_nobody_from_its_end() {
    // Every step in which all reach a block's end is followed by one that fails and would have filled as many slots.
    for (num_seqs, num_spare) in [(2, 2), (2, 3), (4, 2), (4, 4), (8, 2), (8, 8)] {
        let config = SchedulerConfig {
            max_num_seqs: num_seqs,
            max_num_batched_tokens: 8192,
            max_chunk_tokens: 8192,
            ..config(400, 1 + num_seqs + num_spare)
        };
        let prompts: Vec<_> = (0..num_seqs as u32).map(|seed| prompt(seed, 2)).collect();
        run_with_failures(config, &prompts, 30, 1);
    }
}

#[test]
fn the_longest_prefix_first_keeps_nobody_from_its_end() {
    let config = SchedulerConfig {
        block_size: 8,
        max_num_seqs: 5,
        max_num_batched_tokens: 3,
        max_chunk_tokens: 2,
        max_model_len: 60,
        checkpoint_every: 16,
        queue_order: QueueOrder::LongestPrefix,
        ..config(400, 20)
    };
    let prompts = [vec![1, 0, 1, 0, 1, 2, 1, 0], vec![1], vec![1, 0, 1, 0, 1, 2, 1, 0, 0]];
    run_with_failures(config, &prompts, 50, 4);
}

#[test]
fn what_left_a_window_serves_the_last_checkpoint_until_the_step_is_over() {
    let groups = vec![LayerGroup::Full, LayerGroup::Window { tokens: 2 }];
    let config = SchedulerConfig {
        groups,
        block_size: 2,
        max_num_seqs: 1,
        max_num_batched_tokens: 1,
        max_chunk_tokens: 1,
        max_model_len: 20,
        checkpoint_every: 1,
        ..config(6, 8)
    };
    run_with_failures(config, &[prompt(0, 5)], 1, 3);
}
