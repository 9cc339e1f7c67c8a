//! What the summary of a request says it found, waited for and was done to, where steps fail and others come first.
#![cfg(not(loom))]

#[path = "support/discard.rs"]
mod discard;
mod support;

use pykv_core::policy::order::QueueOrder;
use pykv_core::policy::preemption::PreemptionMode;
use pykv_core::prefix::MissCounts;
use pykv_core::scheduler::{AdmissionPolicy, Outcome, RequestSummary, Submission};
use pykv_core::{RequestId, SchedulerConfig, TokenId};
use support::Engine;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: 32,
        block_size: 4,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 64,
        admission: AdmissionPolicy::Watermark,
        watermark: 0.0,
        ..SchedulerConfig::default()
    }
}

const PROMPT: [TokenId; 9] = [1; 9];

fn summary(engine: &Engine, request: RequestId) -> &RequestSummary {
    engine.ended.iter().find(|ended| ended.request == request).unwrap()
}

fn submit_until(engine: &mut Engine, deadline: f64) -> RequestId {
    let submission = Submission { max_tokens: Some(1), deadline: Some(deadline), ..Submission::new(&PROMPT) };
    let request = engine.scheduler.submit(submission).unwrap();
    engine.prompts.insert(request.get(), PROMPT.to_vec());
    request
}

#[test]
fn the_twin_of_a_row_that_failed_has_found_nothing() {
    for fails in [[0].as_slice(), &[0, 1]] {
        let mut engine = Engine::new(config());
        engine.submit(&PROMPT, 4, 1);
        let twin = engine.submit(&PROMPT, 1, 1);
        let plan = engine.plan().unwrap();
        let tokens = engine.compute_failing(plan, fails);
        engine.apply(plan, &tokens, &[Outcome::Ok; 2], fails);
        engine.run();
        let found = summary(&engine, twin);
        assert_eq!((found.cached_tokens, found.preemptions, found.recomputed_tokens), (0, 0, 0));
        assert_eq!(found.failed, fails.len() == 2);
        let computed = if found.failed { 0 } else { 9 };
        assert_eq!(found.misses.never_seen, computed / 4, "what it computed itself, as it found it then");
        let stats = engine.scheduler.stats();
        assert_eq!((stats.hit_tokens, stats.queried_tokens, stats.preemptions), (0, computed as u64, 0));
    }
}

#[test]
fn a_discarded_start_is_none() {
    let mut engine = Engine::new(SchedulerConfig { num_state_slots: 6, checkpoint_every: 1, ..config() });
    engine.submit(&PROMPT, 1, 1);
    engine.run();
    let request = engine.submit(&PROMPT, 1, 1);
    for _ in 0..3 {
        let plan = engine.plan().unwrap();
        engine.spoil_states(plan, 0..plan.num_batch_rows);
        engine.scheduler.discard(plan.id).unwrap();
    }
    engine.run();
    let found = summary(&engine, request);
    assert_eq!((found.cached_tokens, found.preemptions, found.stalled_seconds), (8, 0, 0.0));
    assert_eq!(engine.scheduler.stats().hit_tokens, 8);
}

#[test]
fn who_had_nothing_computed_expires_whatever_has_failed() {
    let mut engine = Engine::new(config());
    let keeps_its_row = submit_until(&mut engine, 5.0);
    let waits = submit_until(&mut engine, 5.0);
    let in_time = submit_until(&mut engine, 7.0);
    let plan = engine.plan().unwrap();
    engine.discard(plan);
    assert_eq!((engine.scheduler.stats().num_running, engine.scheduler.stats().num_waiting), (1, 2));
    engine.now = 6.0;
    engine.run();
    for request in [keeps_its_row, waits] {
        let expired = summary(&engine, request);
        assert_eq!((expired.expired, expired.cached_tokens, expired.output_tokens), (true, 0, 0));
    }
    assert!(!summary(&engine, in_time).expired);
}

#[test]
fn who_is_in_a_step_when_its_deadline_passes_goes_on_unless_that_step_fails() {
    for fails in [false, true] {
        let mut engine = Engine::new(SchedulerConfig { max_steps_in_flight: 2, ..config() });
        let request = submit_until(&mut engine, 5.0);
        let plan = engine.plan().unwrap();
        engine.now = 6.0;
        assert_eq!(engine.plan(), None);
        if fails {
            engine.discard(plan);
        }
        engine.run();
        engine.ended.extend(engine.scheduler.take_ended());
        assert_eq!(summary(&engine, request).expired, fails);
    }
}

#[test]
fn who_started_once_keeps_no_deadline() {
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 4, ..config() });
    let request = submit_until(&mut engine, 5.0);
    engine.step();
    let plan = engine.plan().unwrap();
    engine.scheduler.discard(plan.id).unwrap();
    engine.now = 6.0;
    engine.run();
    assert!(!summary(&engine, request).expired);
}

#[test]
fn who_waits_runs_or_is_paused_counts_each_of_its_samples() {
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 4, ..config() });
    let request = engine.submit(&PROMPT, 4, 3);
    let counts = |engine: &mut Engine| {
        let stats = engine.scheduler.stats();
        (stats.num_waiting, stats.num_running, stats.num_paused)
    };
    assert_eq!(counts(&mut engine), (3, 0, 0));
    engine.step();
    assert_eq!(counts(&mut engine), (0, 3, 0), "none is forked off yet");
    engine.scheduler.pause(request);
    assert_eq!(counts(&mut engine), (0, 0, 3));
    engine.scheduler.resume(request);
    engine.step();
    engine.step();
    assert_eq!(counts(&mut engine), (0, 3, 0));
    assert_eq!(engine.scheduler.stats().peak.num_sequences, 3);
}

#[test]
fn a_peak_of_sequences_never_falls_and_the_fullest_moment_is_one_moment() {
    let mut engine =
        Engine::new(SchedulerConfig { num_blocks: 60, max_num_seqs: 8, max_model_len: 200, ..config() });
    for token in 0..8 {
        engine.submit(&[token], 2, 1);
    }
    engine.run();
    let stats = engine.scheduler.stats();
    assert_eq!((stats.peak_num_running, stats.peak.num_sequences, stats.peak.active_blocks), (8, 8, 8));
    let prompt: Vec<_> = (0..100).map(|place| place % 50).collect();
    engine.submit(&prompt, 1, 1);
    engine.run();
    let stats = engine.scheduler.stats();
    assert_eq!((stats.peak_num_running, stats.peak.num_sequences), (8, 1));
    assert!(stats.peak.active_blocks > 8 && stats.peak.unshared_tokens > 8);
}

#[test]
fn the_stall_of_who_never_comes_back_counts() {
    let options = SchedulerConfig {
        max_num_seqs: 1,
        queue_order: QueueOrder::Priority,
        preempt_lower_ranks: true,
        ..config()
    };
    let mut engine = Engine::new(options);
    let submit = |engine: &mut Engine, priority| {
        let submission = Submission { max_tokens: Some(30), priority, ..Submission::new(&PROMPT) };
        let request = engine.scheduler.submit(submission).unwrap();
        engine.prompts.insert(request.get(), PROMPT.to_vec());
        request
    };
    let stalls = submit(&mut engine, 1);
    engine.step();
    engine.now = 1.0;
    submit(&mut engine, 0);
    engine.step();
    engine.now = 101.0;
    engine.step();
    engine.scheduler.abort(stalls);
    engine.step();
    let stalled = summary(&engine, stalls);
    assert_eq!((stalled.aborted, stalled.preemptions, stalled.stalled_seconds), (true, 1, 100.0));
}

#[test]
fn a_start_that_was_taken_back_counts_nothing_when_it_is_pushed_out() {
    let urgent = SchedulerConfig {
        max_num_seqs: 1,
        queue_order: QueueOrder::Priority,
        preempt_lower_ranks: true,
        num_host_blocks: 8,
        preemption: PreemptionMode::Swap,
        ..config()
    };
    for comes_back in [false, true] {
        let mut engine = Engine::new(urgent.clone());
        engine.submit(&PROMPT, 1, 1);
        engine.run();
        let deadline = Some(if comes_back { 9.0 } else { 5.0 });
        let submission =
            Submission { max_tokens: Some(1), priority: 1, deadline, ..Submission::new(&PROMPT) };
        let pushed_out = engine.scheduler.submit(submission).unwrap();
        engine.prompts.insert(pushed_out.get(), PROMPT.to_vec());
        let plan = engine.plan().unwrap();
        engine.discard(plan);
        engine.submit(&[2; 9], 3, 1);
        engine.now = 1.0;
        engine.step();
        let stats = engine.scheduler.stats();
        assert_eq!((stats.num_waiting, stats.preemptions, stats.swapped_out_blocks), (1, 0, 0));
        assert_eq!((stats.hit_tokens, stats.queried_tokens), (0, 18), "of the two that were computed");
        engine.now = 6.0;
        engine.run();
        let found = summary(&engine, pushed_out);
        assert_eq!((found.expired, found.preemptions, found.stalled_seconds), (!comes_back, 0, 0.0));
        assert_eq!((found.cached_tokens, found.recomputed_tokens), (if comes_back { 8 } else { 0 }, 0));
        assert_eq!(found.misses, MissCounts::default());
    }
}
