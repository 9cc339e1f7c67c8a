//! Who starts first, who may pass whom, who must give way, and who waits in vain.
#![cfg(not(loom))]

mod support;

use proptest::collection::vec;
use proptest::prelude::*;
use pykv_core::policy::order::QueueOrder;
use pykv_core::scheduler::{AdmissionPolicy, Outcome, Submission};
use pykv_core::{Error, RequestId, SchedulerConfig, TokenId};
use support::Engine;

fn config(order: QueueOrder) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: 21,
        block_size: 4,
        max_num_seqs: 8,
        max_num_batched_tokens: 100,
        max_model_len: 80,
        watermark: 0.0,
        admission: AdmissionPolicy::Watermark,
        queue_order: order,
        ..SchedulerConfig::default()
    }
}

/// One sequence at a time, so that the order of ends is the order of starts.
fn one_by_one(order: QueueOrder) -> Engine {
    Engine::new(SchedulerConfig { max_num_seqs: 1, ..config(order) })
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|place| (place * 7 + seed) % 50).collect()
}

/// The requests that have ended so far, in order.
fn ended_order(engine: &Engine) -> Vec<u64> {
    engine.ended.iter().map(|ended| ended.request.get()).collect()
}

fn submit(engine: &mut Engine, submission: Submission<'_>) -> RequestId {
    engine.scheduler.submit(Submission { max_tokens: Some(2), ..submission }).unwrap()
}

#[test]
fn fcfs_ignores_priorities() {
    let mut engine = one_by_one(QueueOrder::Fcfs);
    for priority in [5, 1, 3] {
        submit(&mut engine, Submission { priority, ..Submission::new(&prompt(0, 5)) });
    }
    engine.run();
    assert_eq!(ended_order(&engine), [0, 1, 2]);
}

#[test]
fn the_lowest_priority_number_starts_first_and_equals_by_age() {
    let mut engine = one_by_one(QueueOrder::Priority);
    for priority in [5, 1, 3, 1] {
        submit(&mut engine, Submission { priority, ..Submission::new(&prompt(0, 5)) });
    }
    engine.run();
    assert_eq!(ended_order(&engine), [1, 3, 2, 0]);
}

#[test]
fn a_request_of_an_earlier_rank_pushes_others_out_only_when_asked_to() {
    for preempt_lower_ranks in [false, true] {
        let mut engine = Engine::new(SchedulerConfig { preempt_lower_ranks, ..config(QueueOrder::Priority) });
        let tokens: Vec<_> = (0..2).map(|seed| prompt(seed, 30)).collect();
        for tokens in &tokens {
            let submission = Submission { priority: 9, max_tokens: Some(20), ..Submission::new(tokens) };
            engine.scheduler.submit(submission).unwrap();
        }
        engine.step();
        let urgent = prompt(7, 30);
        submit(&mut engine, Submission { priority: 0, ..Submission::new(&urgent) });
        engine.step();
        let started_at_once = engine.outputs.contains_key(&(2, 0));
        assert_eq!(started_at_once, preempt_lower_ranks);
        engine.run();
        for (request, tokens, num_tokens) in [(0, &tokens[0], 20), (1, &tokens[1], 20), (2, &urgent, 2)] {
            assert_eq!(engine.outputs[&(request, 0)], engine.expected(tokens, 0, num_tokens));
        }
    }
}

#[test]
fn decodes_of_a_later_rank_leave_half_of_the_budget_to_an_urgent_prompt() {
    for (preempt_lower_ranks, priority, max_steps) in [(true, 0, 10), (true, 5, 70), (false, 0, 70)] {
        let mut engine = Engine::new(SchedulerConfig {
            num_blocks: 400,
            max_num_seqs: 16,
            max_num_batched_tokens: 8,
            max_model_len: 200,
            queue_order: QueueOrder::Priority,
            preempt_lower_ranks,
            ..SchedulerConfig::default()
        });
        let low =
            Submission { priority: 5, max_tokens: Some(60), num_samples: 8, ..Submission::new(&[9; 8]) };
        engine.scheduler.submit(low).unwrap();
        (0..3).for_each(|_| assert!(engine.step()));
        let urgent = Submission { priority, max_tokens: Some(5), ..Submission::new(&[7; 40]) };
        let urgent = engine.scheduler.submit(urgent).unwrap();
        let before = engine.num_steps;
        while !engine.outputs.contains_key(&(urgent.get(), 0)) {
            assert!(engine.step());
        }
        let num_steps = engine.num_steps - before;
        assert!(num_steps <= max_steps, "{num_steps} steps, {preempt_lower_ranks}, {priority}");
        assert_eq!(num_steps <= 10, preempt_lower_ranks && priority == 0);
        // The first four of the others went on meanwhile, and all do now.
        let lengths =
            |engine: &Engine| (0..8).map(|child| engine.outputs[&(0, child)].len()).collect::<Vec<_>>();
        if max_steps == 10 {
            assert_eq!(lengths(&engine), [[13; 4], [3; 4]].concat());
        }
        engine.run();
        assert_eq!(lengths(&engine), [60; 8]);
        assert_eq!(engine.scheduler.stats().preemptions, 0);
    }
}

/// Decodes of a late rank in a large pool.
fn among_decodes(config: SchedulerConfig, num_decodes: usize) -> Engine {
    let mut engine = Engine::new(SchedulerConfig {
        num_blocks: 4000,
        block_size: 8,
        max_num_seqs: 100,
        max_model_len: 300,
        queue_order: QueueOrder::Priority,
        preempt_lower_ranks: true,
        ..config
    });
    // What they begin with is cached.
    engine.submit(&prompt(3, 45), 1, 1);
    engine.run();
    for seed in 0..num_decodes as u32 {
        let tokens = [seed];
        let submission = Submission { priority: 5, max_tokens: Some(200), ..Submission::new(&tokens) };
        engine.scheduler.submit(submission).unwrap();
    }
    while engine.scheduler.stats().num_waiting > 0 {
        engine.step();
    }
    engine
}

/// The steps until an urgent prompt has its first token, which comes when long prompts of a late rank are being computed.
fn steps_to_first_token(config: SchedulerConfig, late: &[usize], urgent_len: usize) -> usize {
    let mut engine = Engine::new(SchedulerConfig {
        num_blocks: 1000,
        max_model_len: 1000,
        queue_order: QueueOrder::Priority,
        ..config
    });
    for (seed, &len) in late.iter().enumerate() {
        submit(&mut engine, Submission { priority: 5, ..Submission::new(&prompt(seed as u32 + 1, len)) });
    }
    engine.step();
    let tokens = vec![77; urgent_len];
    let urgent = submit(&mut engine, Submission::new(&tokens)).get();
    let before = engine.num_steps;
    while !engine.outputs.contains_key(&(urgent, 0)) {
        assert!(engine.step());
    }
    let num_steps = engine.num_steps - before;
    engine.run();
    assert_eq!(engine.outputs[&(urgent, 0)], engine.expected(&tokens, 0, 2));
    for (request, &len) in late.iter().enumerate() {
        let tokens = prompt(request as u32 + 1, len);
        assert_eq!(engine.outputs[&(request as u64, 0)], engine.expected(&tokens, 0, 2));
    }
    assert_eq!(engine.scheduler.stats().preemptions, 0);
    num_steps
}

#[test]
fn an_urgent_prompt_does_not_wait_for_the_prompts_of_a_later_rank() {
    let cases = [(true, 6, 1), (true, 8, 1), (true, 9, 2), (true, 24, 2), (true, 40, 3), (false, 6, 19)];
    for (preempt_lower_ranks, urgent_len, num_steps) in cases {
        let config = SchedulerConfig {
            max_num_batched_tokens: 16,
            preempt_lower_ranks,
            ..config(QueueOrder::Priority)
        };
        let found = steps_to_first_token(config, &[300], urgent_len);
        assert_eq!(found, num_steps, "{preempt_lower_ranks}, {urgent_len} tokens");
    }
}

#[test]
fn what_an_urgent_prompt_cannot_use_of_a_step_the_decodes_of_later_ranks_have() {
    let mut engine = among_decodes(
        SchedulerConfig { max_num_batched_tokens: 64, max_chunk_tokens: 8, ..config(QueueOrder::Priority) },
        56,
    );
    submit(&mut engine, Submission::new(&[9; 40]));
    let plan = engine.plan().unwrap();
    assert_eq!((plan.num_decodes, plan.num_tokens), (56, 64));
}

/// Prompts that come one a step among decodes of a late rank, each as so many cached tokens, own tokens and its priority:
/// looks whether every step that leaves a decode out has spent its budget.
fn steps_leave_no_decode_out(
    max_chunk_tokens: usize,
    partial_block_reuse: usize,
    prompts: &[(usize, usize, i32)],
) {
    let config = SchedulerConfig {
        max_num_batched_tokens: 50,
        max_chunk_tokens,
        partial_block_reuse,
        ..config(QueueOrder::Priority)
    };
    let mut engine = among_decodes(config, 40);
    for (number, &(cached, own, priority)) in prompts.iter().enumerate() {
        let tokens = [&prompt(3, cached)[..], &vec![number as u32 + 100; own]].concat();
        let submission = Submission { priority, max_tokens: Some(4), ..Submission::new(&tokens) };
        engine.scheduler.submit(submission).unwrap();
        let plan = engine.plan().unwrap();
        let num_left_out = engine.scheduler.stats().num_running - plan.num_batch_rows;
        assert!(num_left_out == 0 || plan.num_tokens == 50, "{num_left_out} left out of {plan:?}");
        let tokens = engine.compute(plan);
        engine.apply(plan, &tokens, &vec![Outcome::Ok; tokens.len()], &[]);
    }
}

#[test]
fn no_decode_is_left_out_for_a_prompt_that_starts_inside_a_cached_block() {
    steps_leave_no_decode_out(8, 2, &[(0, 11, 0), (3, 5, 0)]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_decode_is_left_out_of_a_step_that_has_budget_left(
        max_chunk_tokens in prop_oneof![Just(3usize), Just(8), Just(20), Just(100)],
        partial_block_reuse in prop_oneof![Just(0usize), Just(2)],
        prompts in vec((0usize..45, 1usize..60, 0i32..3), 1..12),
    ) {
        steps_leave_no_decode_out(max_chunk_tokens, partial_block_reuse, &prompts);
    }

    #[test]
    fn an_urgent_prompt_takes_a_step_more_than_alone_at_most(
        max_num_batched_tokens in 2usize..40,
        max_chunk_tokens in prop_oneof![Just(usize::MAX), 1usize..40],
        late in vec(600usize..700, 1..4),
        urgent_len in 1usize..120,
    ) {
        let config = SchedulerConfig {
            max_num_batched_tokens,
            max_chunk_tokens,
            preempt_lower_ranks: true,
            ..config(QueueOrder::Priority)
        };
        let alone = steps_to_first_token(config.clone(), &[], urgent_len);
        prop_assert!(steps_to_first_token(config, &late, urgent_len) <= alone + 1);
    }
}

#[test]
fn nobody_is_pushed_out_for_a_request_that_does_not_fit_all_the_same() {
    for (urgent_len, preemptions) in [(50, 0), (36, 2), (20, 1), (4, 0)] {
        let mut engine =
            Engine::new(SchedulerConfig { preempt_lower_ranks: true, ..config(QueueOrder::Priority) });
        for (seed, priority, len) in [(0, 0, 37), (1, 9, 18), (2, 9, 12)] {
            let tokens = prompt(seed, len);
            let submission = Submission { priority, max_tokens: Some(9), ..Submission::new(&tokens) };
            engine.scheduler.submit(submission).unwrap();
        }
        engine.step();
        let urgent = prompt(7, urgent_len);
        let late = submit(&mut engine, Submission { priority: 5, ..Submission::new(&urgent) });
        engine.step();
        let stats = engine.scheduler.stats();
        assert_eq!(stats.preemptions, preemptions, "{urgent_len} tokens");
        assert_eq!(engine.outputs.contains_key(&(late.get(), 0)), urgent_len < 50);
        engine.run();
        assert_eq!(engine.outputs[&(late.get(), 0)], engine.expected(&urgent, 0, 2));
    }
}

#[test]
fn who_others_gave_way_to_starts_in_the_same_step_whatever_blocks_the_decodes_take() {
    for num_steps in 0..8 {
        let mut engine = Engine::new(SchedulerConfig {
            num_blocks: 60,
            max_num_seqs: 20,
            preempt_lower_ranks: true,
            ..config(QueueOrder::Priority)
        });
        // In each step three of them go on to their next blocks.
        for len in 1..13 {
            let tokens = prompt(len, len as usize);
            let submission = Submission { priority: 9, max_tokens: Some(60), ..Submission::new(&tokens) };
            engine.scheduler.submit(submission).unwrap();
        }
        while engine.scheduler.stats().blocks.free > 10 {
            engine.step();
        }
        (0..num_steps).for_each(|_| _ = engine.step());
        let before = engine.scheduler.stats();
        let urgent = submit(&mut engine, Submission::new(&prompt(30, 40)));
        engine.step();
        assert!(engine.outputs.contains_key(&(urgent.get(), 0)), "after {num_steps} steps: {before:?}");
    }
}

#[test]
fn blocks_that_a_victim_shares_with_the_urgent_one_count_once() {
    let mut engine =
        Engine::new(SchedulerConfig { preempt_lower_ranks: true, ..config(QueueOrder::Priority) });
    let shared = prompt(0, 60);
    let submission = Submission { priority: 9, max_tokens: Some(9), ..Submission::new(&shared) };
    engine.scheduler.submit(submission).unwrap();
    engine.step();
    let mut urgent = shared[..56].to_vec();
    urgent.extend(prompt(30, 23));
    let late = submit(&mut engine, Submission { priority: 5, ..Submission::new(&urgent) });
    engine.step();
    assert_eq!(engine.scheduler.stats().preemptions, 1);
    assert_eq!(engine.outputs[&(late.get(), 0)].len(), 1);
    engine.run();
    assert_eq!(engine.outputs[&(late.get(), 0)].len(), 1);
}

#[test]
fn the_longest_prefix_starts_first_but_nobody_is_passed_for_ever() {
    let mut engine =
        Engine::new(SchedulerConfig { max_num_seqs: 1, max_passes: 3, ..config(QueueOrder::LongestPrefix) });
    let cached = prompt(0, 16);
    submit(&mut engine, Submission::new(&cached));
    engine.run();
    submit(&mut engine, Submission::new(&prompt(30, 16)));
    (0..6).for_each(|_| {
        submit(&mut engine, Submission::new(&cached));
    });
    engine.run();
    assert_eq!(ended_order(&engine), [0, 2, 3, 4, 1, 5, 6, 7]);
}

#[test]
fn tenants_take_turns_whoever_sends_more() {
    let mut engine = one_by_one(QueueOrder::FairShare);
    for seed in 0..6 {
        submit(&mut engine, Submission { tenant: b"greedy", ..Submission::new(&prompt(seed, 8)) });
    }
    for seed in 6..8 {
        submit(&mut engine, Submission { tenant: b"modest", ..Submission::new(&prompt(seed, 8)) });
    }
    engine.run();
    assert_eq!(ended_order(&engine), [0, 6, 1, 7, 2, 3, 4, 5]);
}

#[test]
fn small_requests_pass_a_large_one_a_bounded_number_of_times() {
    let mut engine = Engine::new(SchedulerConfig { max_passes: 5, ..config(QueueOrder::Fcfs) });
    let long = engine.submit(&prompt(0, 40), 19, 1);
    engine.step();
    let large = engine.submit(&prompt(20, 46), 1, 1);
    let mut ended_before_large = 0;
    for round in 0..200 {
        let tokens = [round % 50];
        engine.submit(&tokens, 1, 1);
        engine.step();
        if ended_order(&engine).contains(&large.get()) {
            break;
        }
        ended_before_large = engine.ended.len();
    }
    assert!(ended_order(&engine).contains(&large.get()), "the large one starves");
    assert!(ended_before_large >= 5, "small ones passed it while it waited");
    let small_before = ended_order(&engine).iter().take_while(|&&id| id != large.get()).count();
    assert!(small_before <= 5 + 2, "{small_before} ended before it, {} among them", long.get());
}

#[test]
fn under_every_order_a_request_behind_others_that_wait_is_passed_a_bounded_number_of_times() {
    let orders = [QueueOrder::Fcfs, QueueOrder::Priority, QueueOrder::LongestPrefix, QueueOrder::FairShare];
    for order in orders {
        let mut engine =
            Engine::new(SchedulerConfig { max_passes: 2, enable_prefix_caching: false, ..config(order) });
        engine.submit(&prompt(0, 8), 70, 1);
        engine.step();
        let large = submit(
            &mut engine,
            Submission { priority: 1, tenant: b"large", ..Submission::new(&prompt(1, 72)) },
        );
        let mut small = Vec::new();
        for round in 0..20_u8 {
            // It does not fit either, and its client gives up soon.
            let urgent =
                submit(&mut engine, Submission { tenant: &[round, 0], ..Submission::new(&prompt(2, 76)) });
            let (tokens, tenant) = (prompt(3, 4), [round, 1]);
            let submission = Submission { priority: 1, tenant: &tenant, ..Submission::new(&tokens) };
            small.push(submit(&mut engine, submission).get());
            engine.step();
            engine.scheduler.abort(urgent);
        }
        let passed = small.iter().filter(|&&id| engine.outputs.contains_key(&(id, 0))).count();
        assert!(!engine.outputs.contains_key(&(large.get(), 0)));
        assert_eq!(passed, 2, "{order:?}");
    }
}

#[test]
fn an_expired_request_is_never_prefilled() {
    let mut engine = one_by_one(QueueOrder::Fcfs);
    engine.submit(&prompt(0, 5), 30, 1);
    let late = submit(&mut engine, Submission { deadline: Some(2.0), ..Submission::new(&prompt(0, 5)) });
    let early = submit(&mut engine, Submission { deadline: Some(1e9), ..Submission::new(&prompt(0, 5)) });
    for now in 0..4 {
        engine.now = f64::from(now);
        engine.step();
    }
    assert_eq!(ended_order(&engine), [late.get()]);
    assert!(engine.ended[0].expired);
    assert_eq!(engine.ended[0].output_tokens, 0);
    engine.run();
    assert_eq!(ended_order(&engine), [late.get(), 0, early.get()]);
}

#[test]
fn a_deadline_that_is_no_time_is_refused() {
    let mut engine = one_by_one(QueueOrder::Fcfs);
    for seconds in [f64::NAN, f64::INFINITY, -1.0] {
        let submission = Submission { deadline: Some(seconds), ..Submission::new(&[1]) };
        let error = engine.scheduler.submit(submission).unwrap_err();
        assert!(matches!(error, Error::InvalidRequest { field: "deadline", .. }));
    }
}

#[test]
fn the_queue_is_bounded_in_tokens_too() {
    let mut engine = Engine::new(SchedulerConfig { max_queued_tokens: 20, ..config(QueueOrder::Fcfs) });
    engine.submit(&prompt(0, 15), 2, 1);
    let error = engine.scheduler.submit(Submission::new(&prompt(0, 6))).unwrap_err();
    assert_eq!(
        error,
        Error::QueueFull { unit: "tokens", option: "max_queued_tokens", queued: 15, asked: 6, limit: 20 }
    );
    engine.run();
    engine.submit(&prompt(0, 20), 2, 1);
}

#[test]
fn a_stall_is_the_time_between_a_preemption_and_the_new_start() {
    let mut engine = Engine::new(SchedulerConfig { num_blocks: 10, ..config(QueueOrder::Fcfs) });
    for seed in 0..2 {
        engine.submit(&prompt(seed, 14), 12, 1);
    }
    while engine.step() {
        engine.now += 0.5;
    }
    let stalled: Vec<_> =
        engine.ended.iter().map(|ended| (ended.preemptions, ended.stalled_seconds)).collect();
    assert_eq!(stalled[0], (0, 0.0));
    assert_eq!(stalled[1].0, 1);
    assert!(stalled[1].1 >= 0.5, "{stalled:?}");
}

#[test]
fn one_step_starts_as_many_as_fit_however_many_wait() {
    let mut engine = Engine::new(SchedulerConfig {
        num_blocks: 400,
        max_num_seqs: 200,
        max_num_batched_tokens: 150,
        ..config(QueueOrder::Fcfs)
    });
    (0..200).for_each(|_| {
        engine.submit(&[1], 4, 1);
    });
    assert_eq!(engine.plan().map(|plan| plan.num_batch_rows), Some(150));
}
