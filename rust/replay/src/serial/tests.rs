//! The policies against each other, and the optimum against all choices.

use std::collections::{BTreeSet, HashMap};
use std::convert::Infallible;

use proptest::prelude::*;
use pykv_core::prefix::eviction::Lru;

use super::*;
use crate::trace::{BlockNumber, Request, Run};

/// A trace of these prompts, each full blocks of one token.
pub(crate) fn trace_of(prompts: &[&[BlockNumber]]) -> Trace {
    let mut trace = Trace::new(1).unwrap();
    for (place, prompt) in prompts.iter().enumerate() {
        let prompt_tokens = prompt.len() as u32;
        let request = Request { arrival: place as f64, prompt_tokens, output_tokens: 1, session: None };
        trace.push(request, prompt.iter().map(|&start| Run { start, length: 1 })).unwrap();
    }
    trace
}

fn least_recent(trace: &Trace, num_blocks: usize) -> pykv_core::Result<Hits> {
    production(trace, num_blocks, &Lru)
}

struct LeastRecent;

impl Ranking for LeastRecent {
    type Error = Infallible;

    fn rank(&mut self, used: Use<'_>, ranks: &mut Vec<f64>) -> std::result::Result<(), Infallible> {
        ranks.extend(used.blocks.iter().map(|_| used.request as f64));
        Ok(())
    }
}

/// The most hits that any choice of victims gives: all of them are tried.
fn exhaustive(trace: &Trace, capacity: usize) -> u64 {
    let mut best: HashMap<BTreeSet<BlockNumber>, u64> = HashMap::from([(BTreeSet::new(), 0)]);
    for request in 0..trace.requests().len() {
        let chain: Vec<_> = trace.blocks(request).take(capacity).collect();
        let mut after: HashMap<BTreeSet<BlockNumber>, u64> = HashMap::new();
        for (cached, hits) in best {
            let found = chain.iter().take_while(|block| cached.contains(block)).count() as u64;
            let others: Vec<_> = cached.iter().copied().filter(|block| !chain.contains(block)).collect();
            for choice in 0..1_u32 << others.len() {
                let kept = others.iter().enumerate().filter(|(place, _)| choice >> place & 1 == 1);
                let next: BTreeSet<_> = kept.map(|(_, &block)| block).chain(chain.iter().copied()).collect();
                if next.len() <= capacity {
                    let value = after.entry(next).or_default();
                    *value = (*value).max(hits + found);
                }
            }
        }
        best = after;
    }
    best.into_values().max().unwrap_or(0)
}

/// Prompts over a small tree: each a path, by turning left or right; a block's number says the whole path.
fn prompts() -> impl Strategy<Value = Vec<Vec<BlockNumber>>> {
    let path = prop::collection::vec(0..2_u32, 1..4).prop_map(|turns| {
        turns
            .into_iter()
            .scan(1, |node, turn| {
                *node = 2 * *node + turn;
                Some(*node)
            })
            .collect::<Vec<_>>()
    });
    prop::collection::vec(path, 1..9)
}

fn small(prompts: &[Vec<BlockNumber>]) -> Trace {
    trace_of(&prompts.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_optimum_is_what_trying_all_choices_finds(prompts in prompts(), capacity in 1..7_usize) {
        let trace = small(&prompts);
        prop_assert_eq!(optimum(&trace, capacity).blocks, exhaustive(&trace, capacity));
    }

    #[test]
    fn the_tree_evicts_as_a_ranking_by_last_use_does(prompts in prompts(), capacity in 1..7_usize) {
        let trace = small(&prompts);
        let tree = least_recent(&trace, capacity).unwrap();
        let Ok(ranked) = ranked(&trace, capacity, &mut LeastRecent);
        prop_assert_eq!(tree, ranked);
    }

    #[test]
    fn policies_lie_below_the_bounds(prompts in prompts(), capacity in 1..7_usize) {
        let trace = small(&prompts);
        let best = optimum(&trace, capacity).blocks;
        let Ok(told) = ranked(&trace, capacity, &mut UnusedAgain::new(&trace, capacity));
        prop_assert!(told.blocks <= best && best <= infinite(&trace).blocks);
        prop_assert!(least_recent(&trace, capacity).unwrap().blocks <= best);
    }

    #[test]
    fn with_room_for_all_every_policy_is_the_infinite_cache(prompts in prompts()) {
        let trace = small(&prompts);
        prop_assert_eq!(optimum(&trace, 64), infinite(&trace));
        prop_assert_eq!(least_recent(&trace, 64).unwrap(), infinite(&trace));
    }
}

#[test]
fn what_is_over_goes_first() {
    // Block 9 is never used again, and was used last.
    let trace = trace_of(&[&[1], &[9], &[2], &[1]]);
    let Ok(told) = ranked(&trace, 2, &mut UnusedAgain::new(&trace, 2));
    assert_eq!((told.blocks, least_recent(&trace, 2).unwrap().blocks), (1, 0));
}

#[test]
fn an_ended_session_leaves_what_another_one_uses() {
    let mut trace = Trace::new(1).unwrap();
    let mut add = |session, blocks: &[BlockNumber]| {
        let prompt_tokens = blocks.len() as u32;
        let request = Request { arrival: 0.0, prompt_tokens, output_tokens: 1, session: Some(session) };
        trace.push(request, blocks.iter().map(|&start| Run { start, length: 1 })).unwrap();
    };
    add(0, &[1, 2]);
    add(1, &[1, 3]);
    add(2, &[5]);
    add(0, &[1, 2]);
    let Ok(told) = ranked(&trace, 3, &mut SessionEnds::new(&trace, End::Told));
    // Session 1 is over after its only request: 3 goes, 1 stays since session 0 uses it too.
    assert_eq!(told.blocks, 1 + 2);
    assert_eq!(least_recent(&trace, 3).unwrap().blocks, 1 + 1);
}

#[test]
fn a_session_that_is_idle_for_long_is_taken_for_over_until_it_comes_again() {
    let mut trace = Trace::new(1).unwrap();
    let mut add = |arrival: f64, session, start: BlockNumber| {
        let request = Request { arrival, prompt_tokens: 1, output_tokens: 1, session: Some(session) };
        trace.push(request, [Run { start, length: 1 }]).unwrap();
    };
    // Session 0 has gaps of 1 second, session 1 of 50: at 60 seconds 0 is idle for long, 1 is not.
    add(0.0, 0, 5);
    add(0.0, 1, 6);
    add(1.0, 0, 5);
    add(50.0, 1, 6);
    add(51.0, 0, 5);
    add(130.0, 2, 7);
    add(131.0, 1, 6);
    add(132.0, 0, 5);
    let idle = End::Idle { gaps: 2.0 };
    let Ok(guessed) = ranked(&trace, 2, &mut SessionEnds::new(&trace, idle));
    // At 130 the mean gap of session 0 is 25.5 seconds, so it is over since 102, and its block makes room, although that
    // of session 1 was used earlier.
    assert_eq!((guessed.blocks, least_recent(&trace, 2).unwrap().blocks), (4, 3));
}

#[test]
fn tokens_of_a_last_block_that_is_filled_in_part_count_as_they_are() {
    let mut trace = Trace::new(16).unwrap();
    let request = Request { arrival: 0.0, prompt_tokens: 20, output_tokens: 1, session: None };
    for _ in 0..2 {
        trace.push(request, [Run { start: 0, length: 2 }]).unwrap();
    }
    let hits = least_recent(&trace, 2).unwrap();
    assert_eq!((hits.blocks, hits.tokens, hits.queried_tokens), (2, 20, 40));
}
