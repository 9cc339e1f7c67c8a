//! Two steps in flight: what each sequence gets, who may be planned, and what a failure takes with it.
#![cfg(not(loom))]

#[path = "support/discard.rs"]
mod discard;
mod support;

use pykv_core::policy::preemption::PreemptionMode;
use pykv_core::scheduler::{
    AdmissionPolicy, FinishReason, Outcome, OwnedArrays, Plan, Sampled, Submission, TableSync,
};
use pykv_core::{Error, LayerGroup, RequestId, Scheduler, SchedulerConfig, TokenId};
use support::Engine;

const FULL: LayerGroup = LayerGroup::Full;
const WINDOW: LayerGroup = LayerGroup::Window { tokens: 20 };

fn config(num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks,
        block_size: 4,
        max_num_seqs: 8,
        max_num_batched_tokens: 24,
        max_model_len: 64,
        max_steps_in_flight: 2,
        admission: AdmissionPolicy::Watermark,
        ..SchedulerConfig::default()
    }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|place| (place * 7 + seed) % 50).collect()
}

/// A scheduler with two sets of arrays, used in turn.
struct Pair {
    scheduler: Scheduler,
    buffers: [(OwnedArrays, TableSync); 2],
}

impl Pair {
    fn new(config: &SchedulerConfig) -> Self {
        let buffers = [0, 1].map(|_| (OwnedArrays::new(config), TableSync::default()));
        Self { scheduler: Scheduler::new(config.clone()).unwrap(), buffers }
    }

    fn submit(&mut self, prompt: &[TokenId], max_tokens: usize) {
        let submission = Submission { max_tokens: Some(max_tokens), ..Submission::new(prompt) };
        self.scheduler.submit(submission).unwrap();
    }

    fn plan(&mut self, side: usize) -> Result<Option<Plan>, Error> {
        let (arrays, sync) = &mut self.buffers[side];
        let plan = self.scheduler.plan(&arrays.borrow(), sync, 0.0);
        self.scheduler.check().unwrap();
        plan
    }

    /// Returns what became of the samples, and how many requests have ended.
    fn apply(&mut self, plan: Plan, tokens: &[TokenId], outcomes: &[Outcome]) -> (Vec<FinishReason>, usize) {
        let mut reasons = Vec::new();
        let sampled = Sampled { tokens, outcomes, failed_rows: &[], accepted: None };
        let ended = self.scheduler.apply(plan.id, sampled, |_, reason| reasons.push(reason)).unwrap();
        self.scheduler.check().unwrap();
        (reasons, ended.len())
    }
}

#[test]
fn a_step_goes_on_behind_tokens_that_the_one_before_it_samples() {
    let mut pair = Pair::new(&config(16));
    pair.submit(&[1, 2, 3], 3);
    pair.submit(&[4, 5], 1);
    pair.submit(&[6, 7], 3);
    let first = pair.plan(0).unwrap().unwrap();
    let second = pair.plan(1).unwrap().unwrap();
    // The one in the middle has reached its limit.
    let arrays = &pair.buffers[1].0;
    assert_eq!((second.num_decodes, second.num_samples), (2, 2));
    assert_eq!((&arrays.token_sources[..2], &arrays.positions[..2]), (&[0, 2][..], &[3, 2][..]));
    assert_eq!(pair.apply(first, &[10, 11, 12], &[Outcome::Ok; 3]).1, 1);
    let third = pair.plan(0).unwrap().unwrap();
    assert_eq!(pair.buffers[0].0.token_sources[..2], [0, 1]);
    pair.apply(second, &[20, 22], &[Outcome::Ok; 2]);
    assert_eq!(pair.plan(1).unwrap(), None, "all have reached their limits");
    assert_eq!(pair.apply(third, &[30, 32], &[Outcome::Ok; 2]).1, 2);
}

#[test]
fn a_plan_after_an_apply_knows_the_token() {
    let mut pair = Pair::new(&config(16));
    pair.submit(&[1, 2, 3], 3);
    let first = pair.plan(0).unwrap().unwrap();
    pair.apply(first, &[10], &[Outcome::Ok]);
    pair.plan(1).unwrap().unwrap();
    let arrays = &pair.buffers[1].0;
    assert_eq!((arrays.token_sources[0], arrays.token_ids[0]), (-1, 10));
}

#[test]
fn what_is_out_of_turn_is_refused() {
    let mut pair = Pair::new(&config(16));
    pair.submit(&[1, 2, 3], 9);
    let first = pair.plan(0).unwrap().unwrap();
    assert_eq!(pair.plan(0), Err(Error::ArraysInFlight { plan: 0, whose: "" }));
    let second = pair.plan(1).unwrap().unwrap();
    assert_eq!(pair.plan(0), Err(Error::StepInFlight { plan: 1 }));
    let sampled = Sampled { tokens: &[5], outcomes: &[Outcome::Ok], failed_rows: &[], accepted: None };
    let refused = pair.scheduler.apply(second.id, sampled, |_, _| ()).unwrap_err();
    assert_eq!(refused, Error::OutOfOrder { plan: 1, oldest: 0 });
    pair.scheduler.discard(first.id).unwrap();
    assert_eq!(pair.scheduler.discard(second.id), Err(Error::NotInFlight { plan: 1 }), "it went first");
    pair.scheduler.check().unwrap();
    let drafting = SchedulerConfig { num_lookahead_tokens: 1, ..config(16) };
    assert!(drafting.validate().unwrap_err().to_string().contains("num_lookahead_tokens is 1"));
    assert!(SchedulerConfig { max_steps_in_flight: 3, ..config(16) }.validate().is_err());
}

#[test]
fn arrays_that_hold_a_step_in_flight_of_another_scheduler_are_refused() {
    let (mut one, mut other) = (Pair::new(&config(16)), Pair::new(&config(16)));
    one.submit(&[1, 2, 3], 9);
    other.submit(&[4, 5], 9);
    let (arrays, sync) = &mut one.buffers[0];
    let plan = one.scheduler.plan(&arrays.borrow(), sync, 0.0).unwrap().unwrap();
    let refused = other.scheduler.plan(&arrays.borrow(), sync, 0.0).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the arrays hold plan 0 of another scheduler, which is in flight: give the next plan others"
    );
    assert_eq!(arrays.token_ids[..3], [1, 2, 3]);
    one.scheduler.discard(plan.id).unwrap();
    other.scheduler.plan(&arrays.borrow(), sync, 0.0).unwrap().unwrap();
    assert_eq!(arrays.token_ids[..2], [4, 5]);
    // Nobody can finish a step of a scheduler that is gone.
    drop(other);
    one.scheduler.plan(&arrays.borrow(), sync, 0.0).unwrap().unwrap();
    assert_eq!(arrays.token_ids[..3], [1, 2, 3]);
}

#[test]
fn arrays_that_were_offered_to_a_plan_of_nothing_are_free() {
    let mut pair = Pair::new(&config(16));
    pair.submit(&[1, 2, 3], 1);
    let first = pair.plan(0).unwrap().unwrap();
    assert_eq!(pair.plan(1).unwrap(), None);
    pair.apply(first, &[10], &[Outcome::Ok]);
    pair.submit(&[4, 5, 6], 3);
    pair.plan(0).unwrap().unwrap();
    assert!(pair.plan(1).unwrap().is_some());
}

#[test]
fn who_ends_while_a_later_step_runs_keeps_its_blocks_until_that_is_over() {
    for outcome in [Outcome::Stop, Outcome::Failed] {
        let mut pair = Pair::new(&config(16));
        pair.submit(&[1, 2, 3], 9);
        let first = pair.plan(0).unwrap().unwrap();
        let second = pair.plan(1).unwrap().unwrap();
        let told = if outcome == Outcome::Stop { FinishReason::Stop } else { FinishReason::Error };
        assert_eq!(pair.apply(first, &[10], &[outcome]), (vec![told], 0));
        assert_eq!(pair.scheduler.stats().blocks.active, 1);
        assert_eq!(pair.plan(0).unwrap(), None, "nothing more is planned for it");
        assert_eq!(pair.apply(second, &[11], &[Outcome::Ok]), (vec![FinishReason::Rejected], 1));
        assert_eq!(pair.scheduler.stats().blocks.active, 0);
    }
}

#[test]
fn who_is_aborted_gets_no_row_in_the_next_plan() {
    let mut pair = Pair::new(&config(16));
    pair.submit(&[1, 2, 3], 9);
    let first = pair.plan(0).unwrap().unwrap();
    pair.submit(&[4, 5, 6], 9);
    for request in 0..2 {
        assert!(pair.scheduler.abort(pykv_core::RequestId::new(request)));
    }
    assert_eq!(pair.plan(1).unwrap(), None);
    assert_eq!(pair.scheduler.take_ended().len(), 1, "the one that waited");
    assert_eq!(pair.apply(first, &[10], &[Outcome::Ok]), (vec![FinishReason::Abort], 1));
}

#[test]
fn who_joined_a_failed_writer_in_the_later_step_starts_again() {
    let mut engine = Engine::new(SchedulerConfig { max_chunk_tokens: 8, ..config(32) });
    let tokens = prompt(3, 18);
    engine.submit(&tokens, 4, 1);
    let first = engine.plan().unwrap();
    let twin = engine.submit(&tokens, 4, 1);
    let second = engine.plan().unwrap();
    assert_eq!((second.num_batch_rows, second.num_tokens), (2, 10), "the twin shares both chunks");
    let sampled = engine.compute_failing(first, &[0]);
    engine.apply(first, &sampled, &[], &[0]);
    let sampled = engine.compute(second);
    engine.apply(second, &sampled, &[Outcome::Ok], &[]);
    engine.run();
    assert_eq!(engine.outputs[&(twin.get(), 0)], engine.expected(&tokens, 0, 4));
    assert_eq!(engine.outputs.len(), 1);
}

#[test]
fn nobody_publishes_into_a_block_that_a_later_step_may_fail_to_fill() {
    let mut engine = Engine::new(config(32));
    let tokens = prompt(1, 7);
    let writer = engine.submit(&tokens, 12, 1);
    let first = engine.plan().unwrap();
    let second = engine.plan().unwrap();
    let sampled = engine.compute(first);
    engine.apply(first, &sampled, &[Outcome::Ok], &[]);
    // It holds the block that the writer fills in the step in flight, and computes it again.
    let longer = [tokens.clone(), engine.expected(&tokens, 0, 3)].concat();
    engine.submit(&longer, 4, 1);
    let third = engine.plan().unwrap();
    assert_eq!((third.num_decodes, third.num_tokens), (1, 7));
    let sampled = engine.compute(second);
    engine.apply(second, &sampled, &[Outcome::Ok], &[]);
    let sampled = engine.compute_failing(third, &[1]);
    engine.apply(third, &sampled, &[Outcome::Ok; 2], &[1]);
    engine.run();
    assert_eq!(engine.outputs[&(writer.get(), 0)], engine.expected(&tokens, 0, 12));
    // The writer has kept its own block, so the failure was not its own.
    assert_eq!(engine.scheduler.stats().recomputed_tokens, 0);
}

#[test]
fn a_plan_made_again_after_a_discard_takes_the_same_samples() {
    let mut engine = Engine::new(config(32));
    engine.submit(&prompt(1, 5), 1, 1);
    let tokens = prompt(2, 6);
    let request = engine.submit(&tokens, 5, 1);
    engine.plan().unwrap();
    let second = engine.plan().unwrap();
    engine.discard(second);
    engine.run();
    assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&tokens, 0, 5));
}

#[test]
fn outputs_do_not_depend_on_preemption_with_two_steps_in_flight() {
    let mut counts = (0, 0);
    for groups in [vec![LayerGroup::Full], vec![LayerGroup::Full, LayerGroup::Window { tokens: 9 }]] {
        for num_blocks in [17, 19, 22, 27, 34] {
            for (num_host_blocks, preemption) in [(0, PreemptionMode::Recompute), (40, PreemptionMode::Swap)]
            {
                let mut engine = Engine::new(SchedulerConfig {
                    num_host_blocks,
                    preemption,
                    groups: groups.clone(),
                    ..config(num_blocks * groups.len())
                });
                let prompts: Vec<_> = (0..8).map(|seed| prompt(seed % 3, 6 + 3 * seed as usize)).collect();
                prompts.iter().for_each(|prompt| _ = engine.submit(prompt, 20, 2));
                engine.run();
                for (request, prompt) in prompts.iter().enumerate() {
                    for child in 0..2 {
                        let expected = engine.expected(prompt, child, 20);
                        assert_eq!(engine.outputs[&(request as u64, child as u32)], expected);
                    }
                }
                let stats = engine.scheduler.stats();
                assert_eq!((stats.num_requests, stats.blocks.active), (0, 0));
                counts.0 += stats.preemptions;
                counts.1 += stats.swapped_in_blocks;
            }
        }
    }
    assert!(counts.0 > 20 && counts.1 > 20, "the pools were small enough: {counts:?}");
}

#[test]
fn a_waiting_request_of_an_earlier_rank_pushes_out_who_is_in_flight() {
    use pykv_core::policy::order::QueueOrder;
    let mut engine = Engine::new(SchedulerConfig {
        queue_order: QueueOrder::Priority,
        preempt_lower_ranks: true,
        max_num_seqs: 1,
        ..config(32)
    });
    let (late, early) = (prompt(1, 6), prompt(2, 6));
    let waits =
        engine.scheduler.submit(Submission { max_tokens: Some(20), priority: 1, ..Submission::new(&late) });
    let waits = waits.unwrap();
    (0..4).for_each(|_| assert!(engine.step()));
    let first = engine.submit(&early, 3, 1);
    engine.run();
    assert_eq!(engine.outputs[&(first.get(), 0)], engine.expected(&early, 0, 3));
    assert_eq!(engine.outputs[&(waits.get(), 0)], engine.expected(&late, 0, 20));
    let order: Vec<_> = engine.ended.iter().map(|summary| (summary.request, summary.preemptions)).collect();
    assert_eq!(order, [(first, 0), (waits, 1)]);
}

#[test]
fn samples_go_over_together_to_a_block_that_another_request_has_published_first() {
    for groups in [vec![LayerGroup::Full], vec![LayerGroup::Window { tokens: 100 }]] {
        let mut engine =
            Engine::new(SchedulerConfig { max_chunk_tokens: 7, groups: groups.clone(), ..config(64) });
        let tokens = prompt(0, 8);
        let first = engine.submit(&tokens, 20, 2);
        let chunk = engine.plan().unwrap();
        let sampled = engine.compute(chunk);
        engine.apply(chunk, &sampled, &[], &[]);
        // The last token of the prompt's last block is planned as a decode, which announces nothing. The other request
        // announces that block a step later, so the first one, whose samples share it by then, may not publish it.
        let last = engine.plan().unwrap();
        engine.submit(&tokens, 1, 1);
        // A third one shares it, so that it stays the other one's.
        engine.submit(&[tokens.as_slice(), &[1, 2]].concat(), 1, 1);
        let twin = engine.plan().unwrap();
        assert_eq!((last.num_tokens, last.num_samples, twin.num_samples), (1, 2, 2));
        for plan in [last, twin] {
            let sampled = engine.compute(plan);
            engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &[]);
        }
        engine.run();
        for child in 0..2 {
            let output = engine.outputs[&(first.get(), child)].clone();
            assert_eq!(output, engine.expected(&tokens, child.into(), 20));
            let all = [tokens.clone(), output].concat();
            let cached = engine.scheduler.cached_tokens(&all, b"");
            assert_eq!(cached, 24, "all that was computed and fills a block, {groups:?}");
        }
    }
}

/// The first prompt gets chunks of 32 tokens, all others together what is left of a step.
fn fast_and_slow(groups: &[LayerGroup], rest: usize) -> Engine {
    Engine::new(SchedulerConfig {
        max_chunk_tokens: 32,
        max_num_batched_tokens: 32 + rest,
        max_model_len: 1000,
        groups: groups.to_vec(),
        ..config(400)
    })
}

fn apply(engine: &mut Engine, plan: Plan, failed_rows: &[usize]) {
    let sampled = engine.compute_failing(plan, failed_rows);
    engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], failed_rows);
}

/// Of two equal prompts the second gets few tokens a step. Each of its blocks is announced by a step that is in flight when
/// the first one has computed the same.
fn two_equal_prompts(groups: &[LayerGroup], plans: usize) -> (Engine, [RequestId; 2], Vec<TokenId>) {
    let (mut engine, tokens) = (fast_and_slow(groups, 4), prompt(0, 600));
    let first = engine.submit(&tokens, 4, 1);
    engine.plan().unwrap();
    let second = engine.submit(&tokens, 4, 1);
    for _ in 0..plans {
        engine.step();
    }
    (engine, [first, second], tokens)
}

#[test]
fn who_computes_a_block_first_publishes_it_though_a_later_step_has_announced_it() {
    for groups in [vec![FULL], vec![WINDOW], vec![FULL, WINDOW]] {
        let (mut engine, requests, tokens) = two_equal_prompts(&groups, 0);
        let mut most = 0;
        while engine.ended.is_empty() {
            assert!(engine.step());
            most = most.max(engine.scheduler.stats().blocks.active);
        }
        assert_eq!(engine.ended[0].request, requests[0]);
        let all = [tokens.clone(), engine.outputs[&(requests[0].get(), 0)].clone()].concat();
        assert_eq!(engine.scheduler.cached_tokens(&all, b""), 600, "all that was computed, {groups:?}");
        engine.run();
        for request in requests {
            assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&tokens, 0, 4), "{groups:?}");
        }
        if groups == [WINDOW] {
            // Of each the window and three of its chunks, wherever they lie between two borders of blocks.
            let bound = |chunk: usize| (20 + 3 * chunk) / 4 + 1;
            assert!(most <= bound(32) + bound(4), "{most} blocks");
        }
    }
}

#[test]
fn what_was_taken_over_stays_though_the_step_that_announced_it_fails() {
    for groups in [vec![FULL], vec![WINDOW], vec![FULL, WINDOW]] {
        for (plans, discards) in (1..12).flat_map(|plans| [(plans, false), (plans, true)]) {
            let (mut engine, requests, tokens) = two_equal_prompts(&groups, plans);
            let Some(plan) = engine.oldest() else { panic!("a step is in flight") };
            if discards {
                engine.discard(plan);
            } else {
                apply(&mut engine, plan, &[plan.num_batch_rows - 1]);
            }
            engine.run();
            let output = engine.outputs[&(requests[0].get(), 0)].clone();
            assert_eq!(output, engine.expected(&tokens, 0, 4));
            assert_eq!(engine.scheduler.cached_tokens(&tokens, b""), 600, "{groups:?} {plans} {discards}");
        }
    }
}

#[test]
fn what_others_share_of_an_announced_block_is_not_taken_over() {
    for groups in [vec![FULL], vec![WINDOW], vec![FULL, WINDOW]] {
        let (mut engine, tokens) = (fast_and_slow(&groups, 11), prompt(0, 600));
        let first = engine.submit(&tokens, 4, 1);
        let mut plans = vec![engine.plan().unwrap()];
        engine.submit(&tokens[..96], 4, 1);
        for _ in 0..2 {
            plans.push(engine.plan().unwrap());
            apply(&mut engine, plans[plans.len() - 2], &[]);
        }
        // The second one ends its prompt in this step, and a third one shares what it is to compute.
        let third = engine.submit(&tokens, 4, 1);
        let last = engine.plan().unwrap();
        assert_eq!((last.num_batch_rows, last.num_tokens), (3, 32 + 10 + 1));
        // The first one has computed the same by now. Yet it is the second one's block that the third one reads.
        apply(&mut engine, plans[2], &[]);
        apply(&mut engine, last, &[1]);
        engine.run();
        for request in [first, third] {
            let output = engine.outputs[&(request.get(), 0)].clone();
            assert_eq!(output, engine.expected(&tokens, 0, 4), "{groups:?}");
        }
    }
}

#[test]
fn of_blocks_that_one_step_is_to_fill_none_is_taken_over_unless_all_are() {
    for groups in [vec![FULL], vec![WINDOW], vec![FULL, WINDOW]] {
        let (mut engine, tokens) = (fast_and_slow(&groups, 12), prompt(0, 600));
        engine.submit(&tokens[..96], 1, 1);
        let mut plans = vec![engine.plan().unwrap()];
        let second = engine.submit(&tokens, 4, 1);
        for _ in 0..2 {
            plans.push(engine.plan().unwrap());
            apply(&mut engine, plans[plans.len() - 2], &[]);
        }
        let last = engine.plan().unwrap();
        assert_eq!((last.num_batch_rows, last.num_tokens), (1, 32));
        // The first one ends with the first two of the blocks that the second one is to fill in the step in flight. If they
        // took the place of these, others would hang below what nobody holds.
        apply(&mut engine, plans[2], &[]);
        assert_eq!(engine.ended.len(), 1);
        apply(&mut engine, last, &[]);
        engine.run();
        assert_eq!(engine.outputs[&(second.get(), 0)], engine.expected(&tokens, 0, 4), "{groups:?}");
    }
}

#[test]
fn prompts_that_part_publish_all_that_they_compute() {
    let mut bad = Vec::new();
    for (groups, common) in [vec![FULL], vec![WINDOW]]
        .into_iter()
        .flat_map(|groups| (96..128).map(move |common| (groups.clone(), common)))
    {
        let mut engine = Engine::new(SchedulerConfig {
            max_chunk_tokens: 33,
            max_num_batched_tokens: 66,
            max_model_len: 1000,
            groups: groups.clone(),
            ..config(1000)
        });
        let prompts = [7, 8].map(|rest| [prompt(0, common), vec![rest; 240 - common]].concat());
        for prompt in &prompts {
            engine.submit(prompt, 1, 1);
        }
        engine.run();
        let cached = prompts.map(|prompt| engine.scheduler.cached_tokens(&prompt, b""));
        if cached != [240, 240] {
            bad.push((groups, common, cached));
        }
    }
    assert!(bad.is_empty(), "{bad:?}");
}
