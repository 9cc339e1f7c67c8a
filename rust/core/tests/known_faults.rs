//! Faults that other schedulers had, each with the input that showed it and the right outcome.
#![cfg(not(loom))]

mod support;

use pykv_core::policy::preemption::PreemptionMode;
use pykv_core::scheduler::{AdmissionPolicy, Outcome, Submission};
use pykv_core::{LayerGroup, SchedulerConfig, TokenId};
use support::Engine;

fn config(num_blocks: usize, block_size: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks,
        block_size,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 512,
        watermark: 0.0,
        admission: AdmissionPolicy::Watermark,
        ..SchedulerConfig::default()
    }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|place| (place * 7 + seed) % 50).collect()
}

fn window(tokens: usize) -> Vec<LayerGroup> {
    vec![LayerGroup::Window { tokens }]
}

fn assert_output(engine: &Engine, request: u64, tokens: &[TokenId], num_tokens: usize) {
    assert_eq!(engine.outputs[&(request, 0)], engine.expected(tokens, 0, num_tokens), "request {request}");
}

#[test]
fn forks_that_pass_the_window_free_each_block_once() {
    for stops in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        let mut engine = Engine::new(SchedulerConfig { groups: window(8), ..config(60, 4) });
        let tokens = prompt(0, 16);
        engine.submit(&tokens, 12, 3);
        // The samples end one after the other, in each order, after they have left the shared window.
        for step in 0.. {
            let Some(plan) = engine.plan() else { break };
            let sampled = engine.compute(plan);
            let mut outcomes = vec![Outcome::Ok; sampled.len()];
            if step >= 8 && sampled.len() > 1 {
                outcomes[stops[step - 8] % sampled.len()] = Outcome::Stop;
            }
            engine.apply(plan, &sampled, &outcomes, &[]);
        }
        for child in 0..3 {
            let output = &engine.outputs[&(0, child)];
            assert!(output.len() >= 9);
            assert_eq!(*output, engine.expected(&tokens, u64::from(child), 12)[..output.len()]);
        }
        engine.scheduler.reset_prefix_cache();
        assert_eq!(engine.scheduler.stats().blocks.free, 59);
    }
}

#[test]
fn a_window_reads_its_positions_and_holds_their_blocks_at_every_length() {
    for block_size in [1, 3, 4, 16] {
        for chunk in [1, 5] {
            for len in [1, 6, 7, 8, 9, 15, 16, 17] {
                let options = SchedulerConfig {
                    groups: window(8),
                    max_chunk_tokens: chunk,
                    enable_prefix_caching: false,
                    ..config(60, block_size)
                };
                let (mut engine, tokens) = (Engine::new(options), prompt(0, len));
                engine.submit(&tokens, 20, 1);
                let mut computed = 0;
                while let Some(plan) = engine.plan() {
                    // What the step reads at least, and what is taken for tokens that come later at most.
                    let first = (computed + 1usize).saturating_sub(8) / block_size;
                    computed += plan.num_tokens;
                    let least = computed.div_ceil(block_size) - first;
                    let most = (7 + chunk + block_size - 1).div_ceil(block_size);
                    let active = engine.scheduler.stats().blocks.active;
                    assert!(
                        (least..=most.max(least)).contains(&active),
                        "{active} blocks of {block_size} hold {computed} tokens, {least} to {most} are right"
                    );
                    let sampled = engine.compute(plan);
                    engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &[]);
                }
                assert_output(&engine, 0, &tokens, 20);
            }
        }
    }
}

#[test]
fn what_a_failed_row_or_a_discarded_step_should_have_computed_is_never_found() {
    for discards in [false, true] {
        let mut engine = Engine::new(config(40, 4));
        let tokens = prompt(0, 18);
        let first = engine.submit(&tokens, 1, 1);
        let plan = engine.plan().unwrap();
        if discards {
            engine.scheduler.discard(plan.id).unwrap();
            engine.scheduler.abort(first);
        } else {
            engine.apply(plan, &[0], &[Outcome::Ok], &[0]);
        }
        engine.scheduler.take_ended();
        let second = engine.submit(&tokens, 1, 1);
        engine.run();
        assert_eq!(engine.ended.last().map(|ended| ended.cached_tokens), Some(0));
        assert_output(&engine, second.get(), &tokens, 1);
    }
}

#[test]
fn a_late_abort_never_reaches_a_later_request() {
    let mut engine = Engine::new(config(40, 4));
    let tokens = prompt(0, 9);
    let mut before = engine.submit(&tokens, 3, 1);
    for _ in 0..200 {
        assert!(engine.scheduler.abort(before));
        let request = engine.submit(&tokens, 3, 1);
        assert!(!engine.scheduler.abort(before), "its number is never used again");
        engine.step();
        before = request;
    }
    engine.run();
    assert_output(&engine, before.get(), &tokens, 3);
    engine.ended.extend(engine.scheduler.take_ended());
    assert_eq!(engine.ended.len(), 201);
    assert_eq!(engine.scheduler.stats().blocks.active, 0);
}

/// Two sequences that start together and each come to hold 60 % of 20 blocks.
fn two_that_do_not_fit_together(num_host_blocks: usize) -> Engine {
    let preemption = if num_host_blocks > 0 { PreemptionMode::Swap } else { PreemptionMode::Recompute };
    let mut engine = Engine::new(SchedulerConfig { num_host_blocks, preemption, ..config(21, 4) });
    for seed in 0..2 {
        engine.submit(&prompt(seed, 30), 18, 1);
    }
    engine
}

#[test]
fn of_two_that_do_not_fit_together_one_wins_and_the_other_follows() {
    for num_host_blocks in [0, 8, 30] {
        let mut engine = two_that_do_not_fit_together(num_host_blocks);
        engine.run();
        for seed in 0..2 {
            assert_output(&engine, u64::from(seed), &prompt(seed, 30), 18);
        }
        let preemptions: Vec<_> = engine.ended.iter().map(|ended| ended.preemptions).collect();
        assert_eq!(preemptions, [0, 1], "the older one is never preempted, the younger one once");
    }
}

#[test]
fn a_victim_that_is_aborted_on_its_way_back_gives_both_copies_up_once() {
    let mut engine = two_that_do_not_fit_together(30);
    let mut came_back = false;
    while let Some(plan) = engine.plan() {
        let sampled = engine.compute(plan);
        if plan.num_swap_ins > 0 {
            came_back = true;
            assert!(engine.scheduler.abort(pykv_core::RequestId::new(1)));
            let stats = engine.scheduler.stats();
            assert!(stats.host_blocks_free < stats.host_blocks_total, "the step in flight reads them");
            engine.scheduler.check().unwrap();
        }
        engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &[]);
    }
    let stats = engine.scheduler.stats();
    assert!(came_back);
    assert_eq!(stats.host_blocks_free, stats.host_blocks_total);
    assert_eq!(stats.blocks.active, 0);
}

#[test]
fn at_a_block_border_one_preemption_makes_room() {
    // Three sequences of 32 tokens fill 6 blocks of 16; the next token of each needs a block.
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 200, ..config(7, 16) });
    for seed in 0..3 {
        engine.submit(&prompt(seed, 32), 3, 1);
    }
    engine.step();
    assert_eq!(engine.scheduler.stats().preemptions, 0);
    engine.step();
    let stats = engine.scheduler.stats();
    assert_eq!((stats.preemptions, stats.num_running), (1, 2));
    engine.run();
    for seed in 0..3 {
        assert_output(&engine, u64::from(seed), &prompt(seed, 32), 3);
    }
}

#[test]
fn what_a_hit_leaves_is_one_chunk_if_it_fits_one() {
    let options = SchedulerConfig { max_num_batched_tokens: 512, max_model_len: 1024, ..config(100, 16) };
    let mut engine = Engine::new(options);
    let cached = prompt(0, 560);
    engine.submit(&cached, 1, 1);
    engine.run();
    let tokens = [cached, prompt(31, 40)].concat();
    let request = engine.submit(&tokens, 1, 1);
    let before = engine.num_steps;
    let plan = engine.plan().unwrap();
    assert_eq!((plan.num_tokens, plan.num_samples), (40, 1));
    let sampled = engine.compute(plan);
    engine.apply(plan, &sampled, &[Outcome::Ok], &[]);
    assert!(engine.plan().is_none());
    assert_eq!(engine.num_steps - before, 2);
    assert_output(&engine, request.get(), &tokens, 1);
}

#[test]
fn a_pool_of_idle_cached_blocks_makes_room_for_whoever_comes() {
    let mut engine = Engine::new(config(9, 4));
    for seed in 0..12 {
        let tokens = prompt(seed * 3, 30);
        let request = engine.submit(&tokens, 2, 1);
        engine.run();
        assert_output(&engine, request.get(), &tokens, 2);
        assert_eq!(engine.scheduler.stats().blocks.cached, 7);
    }
    assert_eq!(engine.scheduler.stats().preemptions, 0);
}

#[test]
fn a_request_preempted_in_the_step_that_would_have_run_it_resumes_where_it_was() {
    let order = pykv_core::policy::order::QueueOrder::Priority;
    let mut engine =
        Engine::new(SchedulerConfig { preempt_lower_ranks: true, queue_order: order, ..config(12, 4) });
    let victim = Submission { priority: 5, max_tokens: Some(12), ..Submission::new(&[1, 2, 3, 4, 5, 6, 7]) };
    engine.scheduler.submit(victim).unwrap();
    engine.step();
    for round in 0..6 {
        let tokens = prompt(20 + round, 38);
        let urgent = Submission { priority: 0, max_tokens: Some(2), ..Submission::new(&tokens) };
        let request = engine.scheduler.submit(urgent).unwrap();
        engine.step();
        engine.step();
        assert_output(&engine, request.get(), &tokens, 2);
    }
    engine.run();
    assert!(engine.scheduler.stats().preemptions >= 1);
    assert_output(&engine, 0, &[1, 2, 3, 4, 5, 6, 7], 12);
}

#[test]
fn who_comes_back_to_a_hit_as_long_as_its_copy_keeps_the_block_that_the_next_one_hangs_below() {
    for block_size in [1, 4] {
        let mut engine = Engine::new(SchedulerConfig {
            groups: window(1),
            num_host_blocks: 8,
            preemption: PreemptionMode::Swap,
            max_num_seqs: 1,
            max_num_batched_tokens: block_size,
            ..config(16, block_size)
        });
        let tokens = prompt(0, 4 * block_size);
        let request = engine.submit(&tokens, 3, 1);
        (0..2).for_each(|_| assert!(engine.step()));
        engine.scheduler.pause(request);
        engine.submit(&prompt(30, 1), 1, 1);
        assert!(engine.step());
        engine.scheduler.resume(request);
        engine.run();
        let stats = engine.scheduler.stats();
        assert!(stats.swapped_out_blocks > 0 && stats.swapped_in_blocks == 0, "all of it is still cached");
        assert_output(&engine, request.get(), &tokens, 3);
    }
}
