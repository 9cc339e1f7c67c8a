//! Small runs whose times can be counted by hand.

use pykv_core::prefix::eviction::eviction_policy;
use pykv_core::scheduler::AdmissionPolicy;
use pykv_core::{LayerGroup, SchedulerConfig};

use super::*;
use crate::trace::Run as BlockRun;

const SECOND: CostModel = CostModel {
    fixed: 1.0,
    per_sequence: 0.0,
    per_token: 0.0,
    per_pair: 0.0,
    weights: 0.0,
    experts: 0.0,
    expert_share: 0.0,
    per_context_token: 0.0,
    window: 0,
    per_window_pair: 0.0,
    per_window_token: 0.0,
    per_swapped_block: 0.0,
    overlaps: false,
};
const AS_TRACED: Arrivals = Arrivals::Trace { speed: 1.0 };

/// Requests (arrival, prompt, output) with these first blocks, of 4 tokens each.
fn trace_of(requests: &[(f64, u32, u32, &[u32])]) -> Trace {
    let mut trace = Trace::new(4).unwrap();
    for &(arrival, prompt_tokens, output_tokens, blocks) in requests {
        let request = Request { arrival, prompt_tokens, output_tokens, session: None };
        trace.push(request, blocks.iter().map(|&start| BlockRun { start, length: 1 })).unwrap();
    }
    trace
}

fn config(num_blocks: usize) -> SchedulerConfig {
    let admission = AdmissionPolicy::Watermark;
    SchedulerConfig { num_blocks, block_size: 4, watermark: 0.0, admission, ..SchedulerConfig::default() }
}

fn paged(trace: &Trace, num_blocks: usize, arrivals: Arrivals) -> Outcome {
    let mut engine = Paged::new(config(num_blocks), false).unwrap();
    replay(trace, &mut engine, &SECOND, arrivals, || true).unwrap()
}

fn contiguous(trace: &Trace, num_slots: usize, reservation: Reservation) -> Outcome {
    let limits = Limits { num_slots, max_model_len: 32, max_num_seqs: 8, max_num_batched_tokens: 64 };
    replay(trace, &mut Contiguous::new(limits, reservation), &SECOND, AS_TRACED, || true).unwrap()
}

#[test]
fn a_request_alone_gets_a_token_a_step() {
    let trace = trace_of(&[(2.0, 6, 3, &[])]);
    let outcome = paged(&trace, 10, AS_TRACED);
    let served = outcome.requests[0];
    assert_eq!((served.started, served.first_token, served.ended), (2.0, 3.0, 5.0));
    assert_eq!((served.output_tokens, outcome.steps, outcome.computed_tokens), (3, 3, 8));
    assert_eq!(outcome.decode_held_slots, 7 + 8);
    assert_eq!(outcome.decode_reserved_slots, 8 + 8);
}

#[test]
fn a_prefix_is_found_once_it_was_computed_and_every_block_has_a_reason() {
    let trace = trace_of(&[(0.0, 9, 1, &[0, 1, 2]), (5.0, 9, 1, &[0, 1, 3]), (9.0, 8, 1, &[0, 9])]);
    let outcome = paged(&trace, 20, AS_TRACED);
    let cached: Vec<_> = outcome.requests.iter().map(|served| served.cached_tokens).collect();
    assert_eq!(cached, [0, 8, 4]);
    let expected = Lookups { hit: 3, never_seen: 2, evicted: 0, not_yet_computed: 0, last: 3 };
    assert_eq!(outcome.lookups, expected);
}

#[test]
fn a_block_that_made_room_is_missed_as_evicted() {
    let trace = trace_of(&[(0.0, 9, 1, &[0, 1]), (5.0, 12, 1, &[2, 3, 4]), (9.0, 9, 1, &[0, 1])]);
    let outcome = paged(&trace, 5, AS_TRACED);
    // The deeper block was evicted first, and it sufficed.
    assert_eq!((outcome.lookups.hit, outcome.lookups.evicted), (1, 1));
}

#[test]
fn a_full_pool_preempts_and_the_work_is_done_again() {
    let trace = trace_of(&[(0.0, 8, 12, &[]), (0.0, 8, 12, &[])]);
    let outcome = paged(&trace, 8, AS_TRACED);
    let pressure = outcome.requests[1].pressure;
    assert!(pressure.preemptions > 0 && pressure.stalled_seconds > 0.0, "{pressure:?}");
    assert_eq!(outcome.preempting_steps as usize, pressure.preemptions);
    assert!(outcome.requests.iter().all(|served| served.output_tokens == 12));
}

#[test]
fn what_can_never_fit_is_refused_and_the_others_run() {
    let trace = trace_of(&[(0.0, 100, 1, &[]), (0.0, 4, 1, &[])]);
    let outcome = paged(&trace, 8, AS_TRACED);
    assert_eq!(outcome.refused, 1);
    assert!(outcome.requests[0].started.is_nan() && outcome.requests[1].ended == 1.0);
    assert_eq!(contiguous(&trace, 64, Reservation::Exact).refused, 1);
}

#[test]
fn a_closed_loop_keeps_so_many_there() {
    let trace = trace_of(&[(7.0, 4, 2, &[][..]); 6]);
    let outcome = paged(&trace, 100, Arrivals::Closed { concurrency: 2 });
    let arrivals: Vec<_> = outcome.requests.iter().map(|served| served.arrival).collect();
    assert_eq!(arrivals, [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]);
    assert_eq!(outcome.max_running, 2);
}

#[test]
fn one_piece_for_the_cap_runs_one_request_where_blocks_run_all() {
    let trace = trace_of(&[(0.0, 4, 4, &[][..]); 4]);
    let cap = contiguous(&trace, 32, Reservation::Cap);
    let exact = contiguous(&trace, 32, Reservation::Exact);
    assert_eq!((cap.max_running, exact.max_running, paged(&trace, 9, AS_TRACED).max_running), (1, 4, 4));
    assert_eq!((cap.decode_held_slots, cap.decode_reserved_slots), (4 * (5 + 6 + 7), 4 * 3 * 32));
    assert_eq!(exact.decode_reserved_slots, 4 * 3 * 8);
    assert_eq!((cap.seconds, exact.seconds), (16.0, 4.0));
}

#[test]
fn the_scheduler_and_one_piece_give_each_request_its_tokens_at_the_same_time_where_both_have_room() {
    let requests = (0..40u32).map(|i| (f64::from(i * 7 % 13), 3 + i * 11 % 50, 1 + i * 5 % 9, &[][..]));
    let mut requests: Vec<_> = requests.collect();
    requests.sort_by(|a, b| a.0.total_cmp(&b.0));
    let trace = trace_of(&requests);
    let mut engine =
        Paged::new(SchedulerConfig { max_num_batched_tokens: 64, ..config(2000) }, false).unwrap();
    let in_blocks = replay(&trace, &mut engine, &SECOND, AS_TRACED, || true).unwrap();
    let limits =
        Limits { num_slots: 8000, max_model_len: 100, max_num_seqs: 256, max_num_batched_tokens: 64 };
    let mut engine = Contiguous::new(limits, Reservation::Cap);
    let in_one_piece = replay(&trace, &mut engine, &SECOND, AS_TRACED, || true).unwrap();
    let times = |outcome: &Outcome| -> Vec<_> {
        outcome.requests.iter().map(|served| (served.started, served.first_token, served.ended)).collect()
    };
    assert_eq!(times(&in_blocks), times(&in_one_piece));
}

#[test]
fn a_replay_that_may_not_go_on_ends() {
    let trace = trace_of(&[(0.0, 4, 20_000, &[])]);
    let config = SchedulerConfig { max_model_len: 30_000, ..config(8000) };
    let mut asked = 0;
    let goes_on = || {
        asked += 1;
        asked < 3
    };
    let outcome =
        replay(&trace, &mut Paged::new(config, false).unwrap(), &SECOND, AS_TRACED, goes_on).unwrap();
    assert_eq!(outcome.steps, 2 * STEPS_BETWEEN_LOOKS);
}

#[test]
fn impossible_arrivals_and_costs_are_refused() {
    let trace = trace_of(&[(0.0, 4, 1, &[])]);
    let mut engine = Paged::new(config(8), false).unwrap();
    for arrivals in [Arrivals::Trace { speed: 0.0 }, Arrivals::Closed { concurrency: 0 }] {
        assert!(replay(&trace, &mut engine, &SECOND, arrivals, || true).is_err());
    }
    assert!(replay(&trace, &mut engine, &CostModel::default(), AS_TRACED, || true).is_err());
}

#[test]
fn the_last_token_of_a_prompt_in_chunks_is_no_decode() {
    let trace = trace_of(&[(0.0, 9, 1, &[])]);
    let config = SchedulerConfig { max_num_batched_tokens: 8, ..config(10) };
    let outcome =
        replay(&trace, &mut Paged::new(config, false).unwrap(), &SECOND, AS_TRACED, || true).unwrap();
    assert_eq!((outcome.steps, outcome.decode_reserved_slots), (2, 0));
}

#[test]
fn a_request_that_ends_at_the_cap_is_counted_with_what_it_did_not_get() {
    let trace = trace_of(&[(0.0, 8, 30, &[]), (0.0, 8, 2, &[]), (0.0, 20, 2, &[])]);
    let config = SchedulerConfig { max_model_len: 16, ..config(40) };
    let in_blocks =
        replay(&trace, &mut Paged::new(config, false).unwrap(), &SECOND, AS_TRACED, || true).unwrap();
    let limits = Limits { num_slots: 160, max_model_len: 16, max_num_seqs: 8, max_num_batched_tokens: 64 };
    let mut engine = Contiguous::new(limits, Reservation::Cap);
    let in_one_piece = replay(&trace, &mut engine, &SECOND, AS_TRACED, || true).unwrap();
    for outcome in [in_blocks, in_one_piece] {
        assert_eq!((outcome.cut, outcome.cut_tokens, outcome.refused), (1, 22, 1));
        assert_eq!(outcome.queried_tokens, 16, "the refused prompt was not looked up");
    }
}

#[test]
fn blocks_that_left_a_window_serve_others() {
    let trace = trace_of(&[(0.0, 40, 8, &[][..]); 2]);
    let with_groups = |groups: &[LayerGroup]| {
        let config = SchedulerConfig { groups: groups.to_vec(), max_num_batched_tokens: 8, ..config(18) };
        replay(&trace, &mut Paged::new(config, false).unwrap(), &SECOND, AS_TRACED, || true).unwrap()
    };
    let window = with_groups(&[LayerGroup::Window { tokens: 8 }, LayerGroup::Window { tokens: 8 }]);
    assert_eq!((window.refused, window.max_running), (0, 2));
    // Of 48 tokens in two groups none reaches beyond three blocks of 4.
    assert!(window.decode_reserved_slots <= 2 * 7 * 2 * 12, "{}", window.decode_reserved_slots);
    assert_eq!(with_groups(&[LayerGroup::Full, LayerGroup::Full]).refused, 2);
}

#[test]
fn what_is_told_of_sessions_is_worth_hits() {
    let mut trace = Trace::new(4).unwrap();
    // The first session comes back; the others are over at once. The pool holds two of them.
    for (arrival, session, start) in [(0.0, 0, 0), (10.0, 1, 10), (20.0, 2, 20), (30.0, 0, 0)] {
        let request = Request { arrival, prompt_tokens: 17, output_tokens: 1, session: Some(session) };
        trace.push(request, [BlockRun { start, length: 4 }]).unwrap();
    }
    let replayed = |retention: &str, arrivals| {
        let told = Told { retention: Retention::from_name(retention).unwrap(), ..Told::default() };
        Allocator::Paged.replay(&trace, config(11), told, &SECOND, arrivals, || true)
    };
    let hits = |retention: &str| replayed(retention, AS_TRACED).unwrap().hit_tokens;
    assert_eq!((hits("none"), hits("session_end"), hits("next_turn")), (4, 16, 16));
    // The first one's time is over before the second's, and nobody comes back before a guess can be made.
    assert_eq!((hits("ttl:5"), hits("ttl:100"), hits("session_idle")), (4, 4, 4));
    let closed = Arrivals::Closed { concurrency: 1 };
    assert!(replayed("session_idle", closed).is_err() && replayed("session_end", closed).is_ok());
}

#[test]
fn the_replay_evicts_by_the_policy_that_it_is_given() {
    // A prefix that was hit, then blocks that nobody asks for again, as many as the pool has.
    let mut requests = vec![(0.0, 9, 1, vec![0, 1]), (5.0, 9, 1, vec![0, 1])];
    requests.extend((0..5).map(|i| (10.0 + f64::from(i), 9, 1, vec![100 + 10 * i, 101 + 10 * i])));
    requests.push((50.0, 9, 1, vec![0, 1]));
    let requests: Vec<_> = requests
        .iter()
        .map(|(arrival, prompt, output, blocks)| (*arrival, *prompt, *output, blocks.as_slice()))
        .collect();
    let trace = trace_of(&requests);
    let hits = |name: &str| {
        let config = SchedulerConfig { eviction: eviction_policy(name).unwrap(), ..config(10) };
        let mut engine = Paged::new(config, false).unwrap();
        replay(&trace, &mut engine, &SECOND, AS_TRACED, || true).unwrap().hit_tokens
    };
    assert_eq!((hits("lru"), hits("segmented_lru")), (8, 16));
}
