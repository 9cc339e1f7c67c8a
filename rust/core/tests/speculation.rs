//! Drafts: what of them counts, what they cost others, and what is refused. That they change no token in any history is
//! claimed in `equivalence.rs`.
#![cfg(not(loom))]

mod support;

use pykv_core::scheduler::{AdmissionPolicy, FinishReason, Outcome, OwnedArrays, Plan, Proposal, Sampled};
use pykv_core::scheduler::{Submission, TableSync};
use pykv_core::{Error, Scheduler, SchedulerConfig, TokenId};
use support::Engine;

const PROMPT: [TokenId; 6] = [1, 2, 3, 4, 5, 6];

fn config() -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: 40,
        block_size: 4,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        num_lookahead_tokens: 4,
        max_model_len: 64,
        watermark: 0.0,
        admission: AdmissionPolicy::Watermark,
        ..SchedulerConfig::default()
    }
}

/// A scheduler whose samples are made up: a sample is what the test says.
struct Run {
    scheduler: Scheduler,
    arrays: OwnedArrays,
    sync: TableSync,
}

impl Run {
    fn new(config: SchedulerConfig) -> Self {
        let (arrays, sync) = (OwnedArrays::new(&config), TableSync::default());
        Self { scheduler: Scheduler::new(config).unwrap(), arrays, sync }
    }

    /// Submits a prompt of 6 tokens and applies its first sample, 7.
    fn start(&mut self, prompt: &[TokenId], max_tokens: usize) {
        let submission = Submission { max_tokens: Some(max_tokens), ..Submission::new(prompt) };
        self.scheduler.submit(submission).unwrap();
        let plan = self.plan();
        self.apply(plan, &vec![7; plan.num_samples], None);
    }

    fn propose(&mut self, drafts: &[(usize, &[TokenId])]) -> Result<(), Error> {
        let rows: Vec<_> = drafts.iter().map(|(row, _)| *row).collect();
        let tokens: Vec<_> = drafts.iter().flat_map(|(_, tokens)| tokens.iter().copied()).collect();
        let mut starts = vec![0];
        starts.extend(drafts.iter().scan(0, |end, (_, tokens)| {
            *end += tokens.len();
            Some(*end)
        }));
        self.scheduler.propose(Proposal { rows: &rows, starts: &starts, tokens: &tokens })
    }

    fn plan(&mut self) -> Plan {
        let plan = self.scheduler.plan(&self.arrays.borrow(), &mut self.sync, 0.0).unwrap().unwrap();
        self.scheduler.check().unwrap();
        plan
    }

    fn apply(&mut self, plan: Plan, tokens: &[TokenId], accepted: Option<&[usize]>) -> Vec<FinishReason> {
        self.apply_outcomes(plan, tokens, &vec![Outcome::Ok; tokens.len()], accepted).unwrap()
    }

    fn apply_outcomes(
        &mut self,
        plan: Plan,
        tokens: &[TokenId],
        outcomes: &[Outcome],
        accepted: Option<&[usize]>,
    ) -> Result<Vec<FinishReason>, Error> {
        let mut reasons = Vec::new();
        let sampled = Sampled { tokens, outcomes, failed_rows: &[], accepted };
        self.scheduler.apply(plan.id, sampled, |_, reason| reasons.push(reason))?;
        self.scheduler.check().unwrap();
        Ok(reasons)
    }
}

#[test]
fn a_row_computes_its_drafts_and_samples_after_each() {
    let mut run = Run::new(config());
    run.start(&PROMPT, 20);
    run.propose(&[(0, &[11, 12, 13])]).unwrap();
    let plan = run.plan();
    assert_eq!((plan.num_tokens, plan.num_samples), (4, 4));
    assert_eq!((plan.num_decodes, plan.num_draft_rows), (0, 1));
    assert_eq!(run.arrays.token_ids[..4], [7, 11, 12, 13]);
    assert_eq!(run.arrays.positions[..4], [6, 7, 8, 9]);
    assert_eq!(run.arrays.seq_lens[0], 10);
    assert_eq!(run.arrays.sample_indices[..4], [0, 1, 2, 3]);
    assert_eq!(run.arrays.sample_positions[..4], [7, 8, 9, 10]);
    assert_eq!(run.arrays.sample_rows[..4], [0; 4]);
    let slots = &run.arrays.slot_mapping[..4];
    assert_eq!((slots[1], slots[3]), (slots[0] + 1, slots[2] + 1));
}

#[test]
fn accepted_drafts_and_the_next_sample_count_and_the_rest_is_given_back() {
    use FinishReason::{None as Goes, Rejected};
    for accepted in [None, Some([1].as_slice())] {
        let mut run = Run::new(config());
        run.start(&PROMPT, 20);
        run.propose(&[(0, &[11, 12, 13])]).unwrap();
        let plan = run.plan();
        assert_eq!(run.scheduler.stats().blocks.active, 3);
        let reasons = run.apply(plan, &[11, 99, 13, 14], accepted);
        assert_eq!(reasons, [Goes, Goes, Rejected, Rejected]);
        assert_eq!(run.scheduler.stats().blocks.active, 2, "8 tokens are computed");
        run.plan();
        assert_eq!((run.arrays.token_ids[0], run.arrays.positions[0]), (99, 8));
        let stats = run.scheduler.stats();
        assert_eq!((stats.draft_tokens, stats.accepted_draft_tokens), (3, 1));
    }
}

#[test]
fn fewer_drafts_than_agree_may_be_accepted_but_not_more() {
    let mut run = Run::new(config());
    run.start(&PROMPT, 20);
    run.propose(&[(0, &[11, 12])]).unwrap();
    let plan = run.plan();
    let ok = [Outcome::Ok; 3];
    for (accepted, array) in [([2].as_slice(), "accepted"), (&[], "accepted"), (&[0, 0], "accepted")] {
        let error = run.apply_outcomes(plan, &[11, 99, 13], &ok, Some(accepted)).unwrap_err();
        let named = match error {
            Error::ArrayValue { array, .. } | Error::ArrayLength { array, .. } => array,
            _ => panic!("{error}"),
        };
        assert_eq!(named, array);
    }
    run.apply(plan, &[11, 99, 13], Some(&[0]));
    run.plan();
    assert_eq!((run.arrays.token_ids[0], run.arrays.positions[0]), (11, 7));
}

#[test]
fn a_block_that_holds_a_rejected_token_or_one_after_the_end_is_never_found() {
    let (goes, stop) = (Outcome::Ok, Outcome::Stop);
    for (samples, outcomes, cached) in [
        ([11, 12, 13], [goes, stop, goes], 8),
        ([99, 12, 13], [goes, stop, goes], 4),
        ([11, 12, 13], [stop, goes, goes], 4),
    ] {
        let mut run = Run::new(config());
        run.start(&PROMPT, 20);
        run.propose(&[(0, &[11, 12])]).unwrap();
        let plan = run.plan();
        run.apply_outcomes(plan, &samples, &outcomes, None).unwrap();
        run.start(&[1, 2, 3, 4, 5, 6, 7, 11, 12], 1);
        assert_eq!(run.scheduler.stats().hit_tokens, cached);
    }
}

#[test]
fn a_stop_or_a_failure_inside_the_accepted_run_ends_it_there() {
    use FinishReason::{Error as Failed, None as Goes, Rejected, Stop};
    for (outcome, reason, output) in [(Outcome::Stop, Stop, 3), (Outcome::Failed, Failed, 2)] {
        let mut run = Run::new(config());
        run.start(&PROMPT, 20);
        run.propose(&[(0, &[11, 12, 13])]).unwrap();
        let plan = run.plan();
        let outcomes = [Outcome::Ok, outcome, Outcome::Ok, Outcome::Ok];
        let sampled =
            Sampled { tokens: &[11, 12, 13, 14], outcomes: &outcomes, failed_rows: &[], accepted: None };
        let mut reasons = Vec::new();
        let ended = run.scheduler.apply(plan.id, sampled, |_, reason| reasons.push(reason)).unwrap();
        assert_eq!(reasons, [Goes, reason, Rejected, Rejected]);
        assert_eq!((ended.len(), ended[0].output_tokens), (1, output));
        run.scheduler.check().unwrap();
        assert_eq!(run.scheduler.stats().blocks.active, 0);
    }
}

#[test]
fn what_a_rejected_sample_says_of_itself_is_not_looked_at() {
    let mut run = Run::new(config());
    run.start(&PROMPT, 20);
    run.propose(&[(0, &[11, 12])]).unwrap();
    let plan = run.plan();
    let outcomes = [Outcome::Ok, Outcome::Failed, Outcome::Stop];
    let reasons = run.apply_outcomes(plan, &[99, 12, 13], &outcomes, None).unwrap();
    assert_eq!(reasons, [FinishReason::None, FinishReason::Rejected, FinishReason::Rejected]);
    assert_eq!(run.scheduler.stats().num_running, 1);
}

#[test]
fn no_draft_passes_the_limit_of_its_sequence_or_the_context() {
    use FinishReason::{Length, None as Goes};
    for (max_tokens, max_model_len) in [(3, 64), (40, 9)] {
        let mut run = Run::new(SchedulerConfig { max_model_len, ..config() });
        run.start(&PROMPT, max_tokens);
        run.propose(&[(0, &[11, 12, 13, 14])]).unwrap();
        let plan = run.plan();
        assert_eq!(plan.num_tokens, 2, "one draft and the token after it reach the limit");
        assert_eq!(run.apply(plan, &[11, 12], None), [Goes, Length]);
        assert_eq!(run.scheduler.stats().num_requests, 0);
    }
}

#[test]
fn rows_with_and_without_drafts_share_a_step() {
    let mut run = Run::new(config());
    for seed in 0..4 {
        run.start(&[seed; 6], 40);
    }
    run.propose(&[(0, &[11, 12, 13]), (2, &[]), (3, &[21])]).unwrap();
    let plan = run.plan();
    assert_eq!((plan.num_decodes, plan.num_draft_rows, plan.num_batch_rows), (2, 2, 4));
    assert_eq!(run.arrays.table_rows[..4], [1, 2, 0, 3]);
    assert_eq!(run.arrays.query_starts[..5], [0, 1, 2, 6, 8]);
    let reasons = run.apply(plan, &[50, 60, 11, 12, 13, 14, 99, 98], None);
    assert_eq!(reasons.iter().filter(|&&reason| reason == FinishReason::Rejected).count(), 1);
    run.plan();
    assert_eq!(run.arrays.table_rows[..4], [0, 1, 2, 3]);
    assert_eq!(run.arrays.positions[..4], [13, 9, 8, 7], "four, one, one and one tokens further");
}

#[test]
fn drafts_keep_to_the_budget_after_every_decode() {
    let mut run = Run::new(SchedulerConfig { max_num_batched_tokens: 6, ..config() });
    for seed in 0..4 {
        run.start(&[seed; 2], 40);
    }
    run.propose(&[(0, &[1, 2, 3, 4]), (1, &[1, 2, 3, 4])]).unwrap();
    let plan = run.plan();
    assert_eq!((plan.num_tokens, plan.num_decodes, plan.num_draft_rows), (6, 3, 1));
}

#[test]
fn drafts_take_what_is_free_and_preempt_nobody() {
    let mut run = Run::new(SchedulerConfig { num_blocks: 7, max_model_len: 20, ..config() });
    for seed in 0..2 {
        run.start(&[seed; 7], 12);
    }
    assert_eq!(run.scheduler.stats().blocks.free, 2);
    run.propose(&[(0, &[1, 2, 3, 4]), (1, &[1, 2, 3, 4])]).unwrap();
    let plan = run.plan();
    assert_eq!(run.arrays.query_starts[..3], [0, 1, 6], "the second finds no slot");
    assert_eq!(run.scheduler.stats().preemptions, 0);
    run.apply(plan, &[7, 99, 2, 3, 4, 5], None);
    assert_eq!(run.scheduler.stats().blocks.free, 1, "the block is back");
}

#[test]
fn a_discarded_step_leaves_no_draft_behind() {
    let mut run = Run::new(config());
    run.start(&PROMPT, 20);
    run.propose(&[(0, &[11, 12, 13])]).unwrap();
    let plan = run.plan();
    run.scheduler.discard(plan.id).unwrap();
    run.scheduler.check().unwrap();
    let plan = run.plan();
    assert_eq!((plan.num_tokens, plan.num_draft_rows), (1, 0), "what was proposed is used once");
    assert_eq!((run.arrays.token_ids[0], run.arrays.positions[0]), (7, 6));
}

#[test]
fn a_row_that_nobody_has_any_more_is_passed_over() {
    let mut run = Run::new(config());
    run.start(&PROMPT, 20);
    run.scheduler.abort(pykv_core::RequestId::new(0));
    run.propose(&[(0, &[11]), (3, &[12])]).unwrap();
    run.scheduler.submit(Submission::new(&PROMPT)).unwrap();
    let plan = run.plan();
    assert_eq!(plan.num_draft_rows, 0);
}

#[test]
fn a_proposal_that_does_not_fit_is_refused_by_name() {
    let mut run = Run::new(config());
    run.start(&PROMPT, 20);
    type Case = (&'static [usize], &'static [usize], &'static [TokenId], &'static str);
    let cases: [Case; 8] = [
        (&[4], &[0, 1], &[1], "rows"),
        (&[0, 0], &[0, 1, 2], &[1, 2], "rows"),
        (&[0], &[0], &[], "starts"),
        (&[0], &[1, 1], &[1], "starts"),
        (&[0, 1], &[0, 2, 1], &[1, 2], "starts"),
        (&[0], &[0, 5], &[1; 5], "starts"),
        (&[0], &[0, 2], &[1], "tokens"),
        (&[0], &[0, 1], &[1, 2], "tokens"),
    ];
    for (rows, starts, tokens, named) in cases {
        match run.scheduler.propose(Proposal { rows, starts, tokens }).unwrap_err() {
            Error::ArrayValue { array, .. } | Error::ArrayLength { array, .. } => assert_eq!(array, named),
            error => panic!("{error}"),
        }
    }
    let plan = run.plan();
    let error = run.propose(&[(0, &[1])]).unwrap_err();
    assert_eq!(error, Error::StepInFlight { plan: plan.id });
    let mut without = Run::new(SchedulerConfig { num_lookahead_tokens: 0, ..config() });
    without.start(&PROMPT, 20);
    assert!(matches!(without.propose(&[(0, &[1])]).unwrap_err(), Error::ArrayValue { array: "starts", .. }));
}

#[test]
fn right_drafts_save_steps() {
    let mut steps = Vec::new();
    for num_lookahead_tokens in [0, 4] {
        let mut engine = Engine::new(SchedulerConfig { num_lookahead_tokens, ..config() });
        let request = engine.submit(&PROMPT, 40, 1);
        engine.run();
        assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&PROMPT, 0, 40));
        steps.push(engine.num_steps);
    }
    assert!(steps[1] * 3 < steps[0] * 2, "{steps:?}");
}
