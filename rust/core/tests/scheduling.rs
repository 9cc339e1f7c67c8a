//! What the scheduler promises about single requests: limits, order, pressure, progress.
#![cfg(not(loom))]

mod support;

use pykv_core::scheduler::{
    AdmissionPolicy, FinishReason, Outcome, OwnedArrays, Sampled, Submission, TableSync,
};
use pykv_core::{Error, RequestId, Scheduler, SchedulerConfig, TokenId};
use support::Engine;

fn config(num_blocks: usize, block_size: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks,
        block_size,
        max_num_seqs: 16,
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

fn refusal(engine: &mut Engine, submission: Submission<'_>) -> Error {
    let before = engine.scheduler.stats();
    let error = engine.scheduler.submit(submission).unwrap_err();
    assert_eq!(engine.scheduler.stats(), before, "a refused request changes nothing");
    error
}

#[test]
fn a_prompt_beyond_the_usable_pool_is_refused_and_the_next_one_runs() {
    let mut engine = Engine::new(config(8, 16));
    for len in [112, 120] {
        let error = refusal(&mut engine, Submission::new(&prompt(0, len)));
        assert_eq!(error, Error::NeverFits { prompt: len, cap: 112, max_model_len: 512, pool: 112 });
    }
    let request = engine.submit(&prompt(0, 111), 1, 1);
    engine.submit(&prompt(1, 10), 5, 1);
    engine.run();
    assert_eq!(engine.ended.len(), 2);
    assert_eq!(engine.outputs[&(request.get(), 0)].len(), 1);
}

#[test]
fn an_empty_prompt_no_tokens_and_no_or_too_many_samples_are_refused_by_name() {
    let mut engine = Engine::new(config(8, 16));
    let tokens = prompt(0, 4);
    let ok = Submission::new(&tokens);
    for (submission, field) in [
        (Submission::new(&[]), "prompt"),
        (Submission { max_tokens: Some(0), ..ok }, "max_tokens"),
        (Submission { num_samples: 0, ..ok }, "num_samples"),
        (Submission { num_samples: 17, ..ok }, "num_samples"),
    ] {
        let error = refusal(&mut engine, submission);
        assert!(matches!(error, Error::InvalidRequest { field: named, .. } if named == field), "{error}");
    }
}

#[test]
fn the_queue_counts_every_sample_and_takes_requests_again_when_it_drains() {
    let mut engine = Engine::new(SchedulerConfig { max_queued_requests: 8, ..config(40, 16) });
    let tokens = prompt(0, 4);
    engine.submit(&tokens, 2, 5);
    let error = refusal(&mut engine, Submission { num_samples: 4, ..Submission::new(&tokens) });
    assert_eq!(
        error,
        Error::QueueFull { unit: "sequences", option: "max_queued_requests", queued: 5, asked: 4, limit: 8 }
    );
    engine.submit(&tokens, 2, 3);
    engine.run();
    engine.submit(&tokens, 2, 8);
    engine.run();
    assert_eq!(engine.ended.len(), 3);
}

#[test]
fn what_no_queue_ever_has_room_for_is_a_wrong_request_and_not_a_full_queue() {
    let limits = SchedulerConfig { max_queued_requests: 3, max_queued_tokens: 5, ..config(40, 16) };
    let mut engine = Engine::new(limits);
    let tokens = prompt(0, 6);
    let many = Submission { num_samples: 4, ..Submission::new(&tokens[..2]) };
    for (submission, field) in [(many, "num_samples"), (Submission::new(&tokens), "prompt")] {
        let error = refusal(&mut engine, submission);
        assert!(matches!(error, Error::InvalidRequest { field: named, .. } if named == field), "{error}");
    }
}

#[test]
fn a_sequence_without_a_limit_ends_at_the_context_cap() {
    for len in [10, 62, 63] {
        let mut engine = Engine::new(SchedulerConfig { max_model_len: 64, ..config(40, 16) });
        let request = engine.scheduler.submit(Submission::new(&prompt(0, len))).unwrap();
        engine.run();
        assert_eq!(engine.outputs[&(request.get(), 0)].len(), 64 - len);
        assert_eq!(engine.scheduler.stats().blocks.active, 0);
    }
    let mut engine = Engine::new(SchedulerConfig { max_model_len: 64, ..config(40, 16) });
    for len in [64, 65] {
        assert!(matches!(
            refusal(&mut engine, Submission::new(&prompt(0, len))),
            Error::NeverFits { cap: 64, .. }
        ));
    }
}

#[test]
fn a_full_hit_still_computes_its_last_token() {
    for (block_size, lens) in [(4, [8, 4, 1]), (1, [8, 4, 1])] {
        for len in lens {
            let mut engine = Engine::new(config(40, block_size));
            let tokens = prompt(0, len);
            engine.submit(&tokens, 3, 1);
            engine.run();
            let second = engine.submit(&tokens, 3, 1);
            let plan = engine.plan().unwrap();
            assert!(plan.num_tokens >= 1);
            let sampled = engine.compute(plan);
            engine.apply(plan, &sampled, &[Outcome::Ok], &[]);
            engine.run();
            assert_eq!(engine.outputs[&(second.get(), 0)], engine.expected(&tokens, 0, 3));
            let cached = engine.ended[1].cached_tokens;
            assert_eq!(cached, (len - 1) / block_size * block_size);
        }
    }
}

#[test]
fn a_hit_that_is_evicted_before_the_request_starts_is_not_counted() {
    let mut engine = Engine::new(SchedulerConfig { max_num_seqs: 1, ..config(9, 4) });
    engine.submit(&prompt(0, 16), 1, 1);
    engine.run();
    engine.submit(&prompt(30, 30), 1, 1);
    let late = engine.submit(&prompt(0, 16), 2, 1);
    engine.run();
    assert_eq!(engine.ended[2].cached_tokens, 0);
    assert_eq!(engine.outputs[&(late.get(), 0)], engine.expected(&prompt(0, 16), 0, 2));
}

#[test]
fn twins_in_one_step_share_what_the_first_of_them_computes() {
    let mut engine = Engine::new(config(40, 4));
    let tokens = prompt(0, 18);
    let requests: Vec<_> = (0..3).map(|_| engine.submit(&tokens, 4, 1)).collect();
    let plan = engine.plan().unwrap();
    assert_eq!((plan.num_batch_rows, plan.num_tokens), (3, 18 + 2 + 2));
    let sampled = engine.compute(plan);
    engine.apply(plan, &sampled, &[Outcome::Ok; 3], &[]);
    engine.run();
    let cached: Vec<_> = engine.ended.iter().map(|ended| ended.cached_tokens).collect();
    assert_eq!(cached, [0, 16, 16]);
    for request in requests {
        assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&tokens, 0, 4));
    }
}

#[test]
fn a_failed_writer_takes_nothing_from_its_twins_but_time() {
    let mut engine = Engine::new(config(40, 4));
    let tokens = prompt(0, 18);
    let failing = engine.submit(&tokens, 4, 1);
    let twin = engine.submit(&tokens, 4, 1);
    let plan = engine.plan().unwrap();
    let sampled = engine.compute(plan);
    engine.apply(plan, &sampled, &[Outcome::Ok; 2], &[0]);
    assert!(!engine.outputs.contains_key(&(twin.get(), 0)), "a void sample does not count");
    engine.run();
    assert!(!engine.outputs.contains_key(&(failing.get(), 0)));
    assert!(engine.ended.iter().any(|ended| ended.request == failing && ended.failed));
    assert_eq!(engine.outputs[&(twin.get(), 0)], engine.expected(&tokens, 0, 4));
}

#[test]
fn an_aborted_twin_of_a_failed_writer_publishes_nothing() {
    let mut engine = Engine::new(config(40, 4));
    engine.submit(&[1, 2, 3, 4, 5], 4, 1);
    let twin = engine.submit(&[1, 2, 3, 4, 9, 9, 9, 9, 9], 4, 1);
    let plan = engine.plan().unwrap();
    let sampled = engine.compute(plan);
    engine.scheduler.abort(twin);
    engine.apply(plan, &sampled, &[Outcome::Ok; 2], &[0]);
    for prompt in [vec![60, 60, 60, 60, 1], vec![60, 60, 60, 60, 9, 9, 9, 9, 1]] {
        engine.submit(&prompt, 1, 1);
        engine.run();
    }
    assert_eq!(engine.ended.last().unwrap().cached_tokens, 4);
}

#[test]
fn one_buffer_may_serve_two_schedulers() {
    let config = config(20, 4);
    let (mut arrays, mut sync) = (OwnedArrays::new(&config), TableSync::default());
    for seed in [0, 1] {
        let mut scheduler = Scheduler::new(config.clone()).unwrap();
        (0..=seed).for_each(|_| {
            scheduler
                .submit(Submission { reuse_cached: false, ..Submission::new(&prompt(seed, 5)) })
                .unwrap();
        });
        scheduler.plan(&arrays.borrow(), &mut sync, 0.0).unwrap().unwrap();
        let (row, block) = (arrays.table_rows[0] as usize, arrays.slot_mapping[0] / 4);
        assert_eq!(i64::from(arrays.block_tables[row * config.max_blocks_per_seq()]), block);
        arrays.block_tables.fill(0);
    }
}

#[test]
fn an_aborted_prefill_publishes_only_what_was_computed() {
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 8, ..config(40, 4) });
    let tokens = prompt(0, 30);
    let request = engine.submit(&tokens, 4, 1);
    engine.step();
    let plan = engine.plan().unwrap();
    assert!(engine.scheduler.abort(request));
    engine.scheduler.discard(plan.id).unwrap();
    assert_eq!(engine.scheduler.take_ended().len(), 1);
    engine.submit(&tokens, 1, 1);
    engine.run();
    assert_eq!(engine.ended[0].cached_tokens, 8);
}

#[test]
fn under_pressure_every_request_ends_and_nobody_is_preempted_for_ever() {
    let mut engine = Engine::new(config(10, 16));
    let requests: Vec<_> = (0..6).map(|seed| engine.submit(&prompt(seed, 40), 60, 1)).collect();
    engine.run();
    for (seed, request) in requests.iter().enumerate() {
        assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&prompt(seed as u32, 40), 0, 60));
    }
    let one_after_the_other = 6 * 60;
    assert!(engine.num_steps < one_after_the_other, "{} steps", engine.num_steps);
    let worst = engine.ended.iter().map(|ended| ended.preemptions).max();
    assert!(worst <= Some(4), "{worst:?} preemptions of one request");
}

#[test]
fn a_forecast_that_comes_true_preempts_nobody() {
    let mut engine = Engine::new(SchedulerConfig { admission: AdmissionPolicy::Forecast, ..config(40, 4) });
    for seed in 0..12 {
        engine.submit(&prompt(seed, 10 + seed as usize), 30, 1);
    }
    engine.run();
    assert_eq!(engine.ended.len(), 12);
    assert_eq!(engine.scheduler.stats().preemptions, 0);
}

#[test]
fn a_forecast_counts_a_shared_prefix_once() {
    let mut engine = Engine::new(SchedulerConfig { admission: AdmissionPolicy::Forecast, ..config(30, 4) });
    let shared = prompt(0, 41);
    (0..8).for_each(|_| {
        engine.submit(&shared, 6, 1);
    });
    engine.step();
    assert_eq!(engine.scheduler.stats().num_running, 8, "10 shared blocks and 8 times 2 fit 29");
    engine.run();
    assert_eq!(engine.scheduler.stats().preemptions, 0);
}

#[test]
fn finding_ones_own_blocks_again_after_a_preemption_is_no_hit() {
    let mut engine = Engine::new(config(10, 4));
    (0..3).for_each(|seed| {
        engine.submit(&prompt(seed * 11, 8), 16, 1);
    });
    engine.run();
    let stats = engine.scheduler.stats();
    assert!(stats.preemptions > 0);
    assert_eq!(stats.hit_tokens, 0);
    assert!(engine.ended.iter().all(|ended| ended.cached_tokens == 0));
}

#[test]
fn an_aborted_request_with_four_samples_leaves_nothing_behind() {
    let mut engine = Engine::new(config(60, 4));
    for round in 0..1000 {
        let request = engine.submit(&prompt(round % 7, 9), 50, 4);
        for _ in 0..round % 4 {
            engine.step();
        }
        assert!(engine.scheduler.abort(request));
        assert!(!engine.scheduler.abort(request));
    }
    let stats = engine.scheduler.stats();
    assert_eq!((stats.num_requests, stats.num_running, stats.num_waiting, stats.blocks.active), (0, 0, 0, 0));
    assert_eq!(stats.num_scopes, 1, "the empty scope lives on in cached blocks");
}

#[test]
fn samples_of_one_prompt_share_its_blocks_and_end_one_by_one() {
    let mut engine = Engine::new(config(60, 4));
    let tokens = prompt(0, 10);
    let request = engine.submit(&tokens, 9, 4);
    engine.step();
    assert_eq!(engine.scheduler.stats().blocks.active, 3);
    let plan = engine.plan().unwrap();
    assert_eq!((plan.num_samples, plan.num_copies), (4, 3), "the last holder writes in place");
    let sampled = engine.compute(plan);
    engine.apply(plan, &sampled, &[Outcome::Stop, Outcome::Ok, Outcome::Ok, Outcome::Stop], &[]);
    assert_eq!(engine.scheduler.stats().num_running, 2);
    assert!(engine.ended.is_empty());
    engine.run();
    let lengths: Vec<_> = (0..4).map(|child| engine.outputs[&(request.get(), child)].len()).collect();
    assert_eq!(lengths, [2, 9, 9, 2]);
    assert_eq!(engine.ended.len(), 1);
}

#[test]
fn scopes_share_nothing() {
    let mut engine = Engine::new(config(60, 4));
    let tokens = prompt(0, 17);
    let cached: Vec<_> = [b"a", b"a", b"b"]
        .into_iter()
        .map(|scope| {
            engine
                .scheduler
                .submit(Submission { max_tokens: Some(1), scope, ..Submission::new(&tokens) })
                .unwrap();
            engine.run();
            engine.ended.last().unwrap().cached_tokens
        })
        .collect();
    assert_eq!(cached, [0, 16, 0]);
}

#[test]
fn verbs_in_the_wrong_order_change_nothing() {
    let config = config(20, 4);
    let mut scheduler = Scheduler::new(config.clone()).unwrap();
    let (mut arrays, mut sync) = (OwnedArrays::new(&config), TableSync::default());
    scheduler.submit(Submission::new(&prompt(0, 5))).unwrap();
    let plan = scheduler.plan(&arrays.borrow(), &mut sync, 0.0).unwrap().unwrap();
    assert_eq!(
        scheduler.plan(&arrays.borrow(), &mut sync, 0.0).unwrap_err(),
        Error::StepInFlight { plan: plan.id }
    );
    let nothing = Sampled { tokens: &[], outcomes: &[], failed_rows: &[], accepted: None };
    let error = scheduler.apply(plan.id, nothing, |_, _| ()).unwrap_err();
    assert_eq!(error, Error::ArrayLength { array: "sampled", length: 0, needed: 1 });
    let one = Sampled { tokens: &[1], outcomes: &[Outcome::Ok], failed_rows: &[], accepted: None };
    assert!(scheduler.apply(plan.id + 1, one, |_, _| ()).is_err());
    let wild = Sampled { failed_rows: &[1], ..one };
    assert!(matches!(scheduler.apply(plan.id, wild, |_, _| ()), Err(Error::ArrayValue { .. })));
    let mut reasons = Vec::new();
    scheduler.apply(plan.id, one, |_, reason| reasons.push(reason)).unwrap();
    assert_eq!(reasons, [FinishReason::None]);
    assert_eq!(scheduler.discard(plan.id).unwrap_err(), Error::NotInFlight { plan: plan.id });
    scheduler.check().unwrap();
}

#[test]
fn buffers_that_are_too_short_are_refused_before_anything_is_planned() {
    let config = config(20, 4);
    let mut scheduler = Scheduler::new(config.clone()).unwrap();
    let (mut arrays, mut sync) = (OwnedArrays::new(&config), TableSync::default());
    arrays.block_tables.push(0);
    assert!(scheduler.plan(&arrays.borrow(), &mut sync, 0.0).is_err(), "longer tables have other columns");
    arrays.block_tables.truncate(arrays.block_tables.len() - 2);
    scheduler.submit(Submission::new(&prompt(0, 5))).unwrap();
    let error = scheduler.plan(&arrays.borrow(), &mut sync, 0.0).unwrap_err();
    assert!(matches!(error, Error::ArrayLength { array: "block_tables", .. }));
    assert_eq!(scheduler.stats().num_waiting, 1);
}

#[test]
fn the_second_buffer_gets_every_change_that_the_first_one_saw() {
    let mut engine = Engine::new(config(60, 2));
    for seed in 0..4 {
        engine.submit(&prompt(seed, 5), 20, 2);
    }
    engine.run();
    assert_eq!(engine.ended.len(), 4);
}

#[test]
fn after_a_reset_a_strangers_failure_harms_nobody() {
    let mut engine = Engine::new(config(64, 4));
    engine.submit(&prompt(0, 9), 8, 1);
    engine.step();
    engine.scheduler.reset_prefix_cache();
    let stranger = engine.submit(&prompt(7, 9), 8, 1);
    let plan = engine.plan().unwrap();
    let tokens = engine.compute(plan);
    engine.apply(plan, &tokens, &vec![Outcome::Ok; tokens.len()], &[1]);
    assert_eq!(engine.ended.iter().map(|summary| summary.request).collect::<Vec<_>>(), [stranger]);
    assert_eq!(engine.scheduler.stats().preemptions, 0);
    engine.run();
}

#[test]
fn a_paused_request_keeps_its_blocks_takes_no_step_and_goes_on_with_the_same_tokens() {
    let mut engine = Engine::new(config(40, 4));
    let (first, other) = (prompt(0, 6), prompt(1, 6));
    let paused = engine.submit(&first, 30, 1);
    let goes_on = engine.submit(&other, 30, 1);
    (0..5).for_each(|_| assert!(engine.step()));
    let active = engine.scheduler.stats().blocks.active;
    assert!(engine.scheduler.pause(paused));
    engine.run();
    assert_eq!(engine.outputs[&(goes_on.get(), 0)], engine.expected(&other, 0, 30));
    assert_eq!(engine.outputs[&(paused.get(), 0)].len(), 5, "nothing was computed for it");
    let stats = engine.scheduler.stats();
    assert_eq!((stats.num_paused, stats.num_running, stats.num_waiting), (1, 0, 0));
    assert_eq!(stats.blocks.active, active / 2, "its blocks are kept while nobody needs them");
    assert!(engine.scheduler.resume(paused));
    assert!(!engine.scheduler.resume(paused));
    engine.run();
    assert_eq!(engine.outputs[&(paused.get(), 0)], engine.expected(&first, 0, 30));
    let summary = engine.ended.iter().find(|summary| summary.request == paused).unwrap();
    assert_eq!((summary.preemptions, summary.recomputed_tokens, summary.stalled_seconds), (0, 0, 0.0));
}

#[test]
fn a_paused_request_gives_way_before_younger_ones_and_its_pause_is_no_stall() {
    // Either request fills the pool on its own.
    let mut engine = Engine::new(config(9, 4));
    let (old, young) = (prompt(0, 6), prompt(1, 6));
    let paused = engine.submit(&old, 24, 1);
    engine.step();
    assert!(engine.scheduler.pause(paused));
    let goes_on = engine.submit(&young, 24, 1);
    engine.now = 10.0;
    engine.run();
    assert_eq!(engine.outputs[&(goes_on.get(), 0)], engine.expected(&young, 0, 24));
    engine.now = 100.0;
    engine.submit(&young, 24, 1);
    engine.step();
    assert!(engine.scheduler.resume(paused));
    engine.now = 103.0;
    engine.run();
    assert_eq!(engine.outputs[&(paused.get(), 0)], engine.expected(&old, 0, 24));
    let of = |request| engine.ended.iter().find(|summary| summary.request == request).unwrap();
    assert_eq!((of(paused).preemptions, of(goes_on).preemptions), (1, 0));
    assert!(of(paused).stalled_seconds <= 3.0, "{} s", of(paused).stalled_seconds);
}

#[test]
fn a_request_that_waits_takes_the_rows_and_blocks_of_a_paused_one() {
    for narrow in [SchedulerConfig { max_num_seqs: 2, ..config(40, 4) }, config(9, 4)] {
        let mut engine = Engine::new(narrow);
        let (old, young) = (prompt(0, 20), prompt(1, 20));
        let paused = engine.submit(&old, 5, 2);
        engine.step();
        engine.scheduler.pause(paused);
        let starts = engine.submit(&young, 5, 2);
        engine.run();
        assert_eq!(engine.outputs[&(starts.get(), 1)], engine.expected(&young, 1, 5));
        assert_eq!(engine.scheduler.stats().num_paused, 2);
        assert_eq!(engine.scheduler.stats().blocks.active, 0);
        assert!(engine.scheduler.abort(paused));
        assert!(!engine.scheduler.pause(paused) && !engine.scheduler.resume(paused));
        assert_eq!(engine.scheduler.stats().num_requests, 0);
        engine.scheduler.check().unwrap();
    }
}

/// Has a request that is paused pushed out, and everything that is cached evicted.
fn push_out(engine: &mut Engine, paused: RequestId) {
    engine.scheduler.pause(paused);
    engine.submit(&prompt(1, 6), 24, 1);
    engine.run();
    engine.scheduler.resume(paused);
}

#[test]
fn what_a_preempted_sequence_had_found_counts_as_computed_again_too() {
    let tokens = [prompt(0, 9), prompt(30, 4)].concat();
    let mut engine = Engine::new(SchedulerConfig { max_num_batched_tokens: 4, ..config(9, 4) });
    let preempted = engine.submit(&tokens, 4, 1);
    engine.step();
    push_out(&mut engine, preempted);
    engine.scheduler.pause(preempted);
    engine.submit(&tokens, 1, 1);
    engine.run();
    engine.scheduler.resume(preempted);
    // Finds 12 tokens, of which it had computed 4.
    let plan = engine.plan().unwrap();
    engine.scheduler.discard(plan.id).unwrap();
    push_out(&mut engine, preempted);
    engine.run();
    assert_eq!(engine.outputs[&(preempted.get(), 0)], engine.expected(&tokens, 0, 4));
    let summary = engine.ended.iter().find(|summary| summary.request == preempted).unwrap();
    assert_eq!((summary.cached_tokens, summary.preemptions), (0, 2), "what its first start found");
    assert_eq!(summary.recomputed_tokens, 12);
    assert_eq!(engine.scheduler.stats().recomputed_tokens, 12);
}

#[test]
fn a_first_hit_of_which_nothing_came_is_none() {
    let tokens = [prompt(0, 9), prompt(30, 4)].concat();
    for (computes, counts) in [(true, (8, 1, 13)), (false, (0, 0, 0))] {
        let mut engine = Engine::new(config(9, 4));
        engine.submit(&prompt(0, 9), 1, 1);
        engine.run();
        let preempted = engine.submit(&tokens, 4, 1);
        if computes {
            engine.step();
        } else {
            let plan = engine.plan().unwrap();
            engine.scheduler.discard(plan.id).unwrap();
        }
        push_out(&mut engine, preempted);
        engine.run();
        assert_eq!(engine.outputs[&(preempted.get(), 0)], engine.expected(&tokens, 0, 4));
        let summary = engine.ended.iter().find(|summary| summary.request == preempted).unwrap();
        assert_eq!((summary.cached_tokens, summary.preemptions, summary.recomputed_tokens), counts);
        assert_eq!(engine.scheduler.stats().recomputed_tokens, counts.2 as u64);
    }
}

#[test]
fn slots_of_a_block_that_samples_share_are_counted_once() {
    let mut engine = Engine::new(config(40, 4));
    engine.submit(&prompt(0, 6), 5, 3);
    engine.step();
    assert_eq!(engine.scheduler.stats().held_tokens, 6);
    engine.step();
    assert_eq!(engine.scheduler.stats().held_tokens, 4 + 3 * 3, "each has written to a copy of its own");
    assert_eq!(engine.scheduler.stats().peak.held_tokens, 4 + 3 * 3);
}
