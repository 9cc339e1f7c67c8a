//! Who waits starts in the step after there is room for it, whoever has given that back.
#![cfg(not(loom))]

#[path = "support/discard.rs"]
mod discard;
mod support;

use pykv_core::policy::order::QueueOrder;
use pykv_core::scheduler::{AdmissionPolicy, Submission};
use pykv_core::{RequestId, SchedulerConfig, TokenId};
use support::Engine;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: 400,
        block_size: 4,
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        admission: AdmissionPolicy::Watermark,
        watermark: 0.0,
        ..SchedulerConfig::default()
    }
}

fn prompt(token: TokenId, len: usize) -> Vec<TokenId> {
    vec![token; len]
}

/// Steps until a request has ended.
fn steps_to_the_end_of(engine: &mut Engine, request: RequestId) -> usize {
    (1..).find(|_| !engine.step() || engine.ended.iter().any(|summary| summary.request == request)).unwrap()
}

#[test]
fn a_slot_whose_checkpoint_was_read_starts_who_waits_for_it() {
    let mut engine = Engine::new(SchedulerConfig { num_state_slots: 4, checkpoint_every: 1, ..config() });
    engine.submit(&prompt(7, 9), 1, 1);
    engine.run();
    engine.submit(&prompt(1, 3), 200, 1);
    engine.step();
    // It reads the checkpoint that holds the last slot.
    engine.submit(&[prompt(7, 9), prompt(5, 1)].concat(), 200, 1);
    let waits = engine.submit(&prompt(2, 3), 5, 1);
    assert!(steps_to_the_end_of(&mut engine, waits) <= 7);
}

#[test]
fn blocks_that_equal_prompts_fold_start_who_waits_for_them() {
    let mut engine =
        Engine::new(SchedulerConfig { num_blocks: 25, num_state_slots: 16, max_model_len: 60, ..config() });
    for _ in 0..2 {
        engine.submit(&prompt(7, 40), 15, 1);
    }
    let waits = engine.submit(&prompt(2, 17), 3, 1);
    assert!(steps_to_the_end_of(&mut engine, waits) <= 6);
}

#[test]
fn the_block_that_a_partial_hit_was_copied_from_starts_who_waits_for_it() {
    let mut engine = Engine::new(SchedulerConfig {
        num_blocks: 3,
        block_size: 64,
        partial_block_reuse: 8,
        max_model_len: 100,
        ..config()
    });
    engine.submit(&prompt(7, 65), 1, 1);
    engine.run();
    engine.submit(&[prompt(7, 30), prompt(5, 1)].concat(), 30, 1);
    let waits = engine.submit(&prompt(2, 3), 3, 1);
    assert!(steps_to_the_end_of(&mut engine, waits) <= 6);
}

#[test]
fn an_urgent_request_starts_beside_one_that_a_failed_step_has_set_back() {
    for (num_state_slots, num_low, num_samples) in [(3, 1, 1), (5, 3, 1), (6, 4, 1), (5, 3, 2)] {
        let mut engine = Engine::new(SchedulerConfig {
            num_state_slots,
            queue_order: QueueOrder::Priority,
            preempt_lower_ranks: true,
            ..config()
        });
        for token in 0..num_low {
            let prompt = [1, 2, 3, token];
            let low = Submission { max_tokens: Some(100), priority: 5, ..Submission::new(&prompt) };
            engine.scheduler.submit(low).unwrap();
        }
        (0..2).for_each(|_| assert!(engine.step()));
        let failed = engine.plan().unwrap();
        engine.discard(failed);
        (0..2).for_each(|_| assert!(engine.step()));
        let urgent = engine.submit(&prompt(9, 3), 1, num_samples);
        assert_eq!(steps_to_the_end_of(&mut engine, urgent), 1, "{num_state_slots} slots");
        let preempted = engine.scheduler.stats().preemptions;
        assert!(preempted <= num_samples as u64, "{preempted} were preempted for {num_samples}");
        engine.run();
    }
}

#[test]
fn who_was_held_back_starts_when_the_one_before_it_is_gone() {
    let mut engine = Engine::new(SchedulerConfig { num_blocks: 11, max_passes: 0, ..config() });
    engine.submit(&prompt(1, 8), 20, 1);
    engine.step();
    let large = engine.submit(&prompt(2, 36), 1, 1);
    let small = engine.submit(&prompt(3, 4), 1, 1);
    (0..3).for_each(|_| assert!(engine.step()));
    assert_eq!(engine.scheduler.stats().num_waiting, 2);
    assert!(engine.scheduler.abort(large));
    assert_eq!(steps_to_the_end_of(&mut engine, small), 1);
}

#[test]
fn each_of_several_urgent_requests_pushes_out_who_is_in_its_way() {
    let order = QueueOrder::Priority;
    let config =
        SchedulerConfig { max_num_seqs: 2, queue_order: order, preempt_lower_ranks: true, ..config() };
    let mut engine = Engine::new(config);
    for token in 0..2 {
        let prompt = prompt(token, 9);
        let low = Submission { max_tokens: Some(100), priority: 5, ..Submission::new(&prompt) };
        engine.scheduler.submit(low).unwrap();
    }
    engine.step();
    let urgent = [3, 4].map(|token| engine.submit(&prompt(token, 9), 4, 1));
    assert!(steps_to_the_end_of(&mut engine, urgent[1]) <= 6);
    engine.run();
}

#[test]
fn urgent_requests_start_one_after_the_other_with_two_steps_in_flight() {
    for (max_num_seqs, num_urgent) in [(4, 4), (2, 2), (8, 4)] {
        let mut engine = Engine::new(SchedulerConfig {
            max_num_seqs,
            queue_order: QueueOrder::Priority,
            preempt_lower_ranks: true,
            max_steps_in_flight: 2,
            ..config()
        });
        for token in 0..max_num_seqs as TokenId {
            let prompt = prompt(token, 9);
            let low = Submission { max_tokens: Some(100), priority: 5, ..Submission::new(&prompt) };
            engine.scheduler.submit(low).unwrap();
        }
        (0..9).for_each(|_| assert!(engine.step()));
        let planned = engine.num_plans;
        let urgent: Vec<_> =
            (0..num_urgent).map(|token| engine.submit(&prompt(20 + token, 9), 50, 1)).collect();
        for (place, request) in urgent.iter().enumerate() {
            while !engine.outputs.contains_key(&(request.get(), 0)) {
                assert!(engine.step());
            }
            let num_plans = engine.num_plans - planned;
            // One plan leaves out who must go; the plan behind that of the first token is made before it is known.
            assert!(num_plans <= place + 4, "number {place} took {num_plans} plans, of {max_num_seqs} rows");
        }
        engine.run();
    }
}

#[test]
fn a_paused_request_keeps_its_blocks_where_they_help_nobody() {
    // It is in the way of neither: blocks, and rows, are short without it too.
    for (len, num_samples, preemptions) in [(100, 1, 0), (9, 4, 1)] {
        let mut engine = Engine::new(SchedulerConfig {
            num_blocks: 41,
            max_num_seqs: 4,
            max_model_len: 140,
            enable_prefix_caching: false,
            ..config()
        });
        engine.submit(&prompt(1, 80), 20, 1);
        let paused = engine.submit(&prompt(2, 40), 20, 1);
        (0..2).for_each(|_| assert!(engine.step()));
        assert!(engine.scheduler.pause(paused));
        let waits = engine.submit(&prompt(3, len), 10, num_samples);
        for _ in 0..3 {
            engine.step();
            assert_eq!(engine.scheduler.stats().preemptions, 0, "{len} tokens, {num_samples} samples");
        }
        // Beside it alone there are blocks enough, and too few rows.
        while !engine.ended.iter().any(|summary| summary.request == waits) {
            assert!(engine.step());
        }
        assert!(engine.scheduler.resume(paused));
        engine.run();
        assert_eq!(engine.outputs[&(paused.get(), 0)], engine.expected(&prompt(2, 40), 0, 20));
        assert_eq!(engine.scheduler.stats().preemptions, preemptions);
    }
}

#[test]
fn only_as_many_paused_requests_give_way_as_must() {
    let mut engine =
        Engine::new(SchedulerConfig { num_blocks: 41, enable_prefix_caching: false, ..config() });
    let paused = [1, 2, 3].map(|token| engine.submit(&prompt(token, 38), 20, 1));
    engine.step();
    paused.iter().for_each(|&request| assert!(engine.scheduler.pause(request)));
    let starts = engine.submit(&prompt(4, 60), 1, 1);
    assert_eq!(steps_to_the_end_of(&mut engine, starts), 1);
    assert_eq!(engine.scheduler.stats().preemptions, 1);
    paused.iter().for_each(|&request| assert!(engine.scheduler.resume(request)));
    engine.run();
}

#[test]
fn a_prompt_that_somebody_else_has_published_meanwhile_starts_soon() {
    let mut engine = Engine::new(SchedulerConfig { num_blocks: 61, max_chunk_tokens: 8, ..config() });
    let tokens: Vec<TokenId> = (0..160).map(|place| place % 47).collect();
    engine.submit(&tokens, 70, 1);
    engine.step();
    let same = engine.submit(&[tokens, prompt(1, 1)].concat(), 1, 1);
    assert!(steps_to_the_end_of(&mut engine, same) <= 20 + 16, "a look each 16 steps");
    engine.run();
}
