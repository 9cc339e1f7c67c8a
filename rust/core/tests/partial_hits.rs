//! Prefill that starts inside a block: what is copied, from where, for whom, and what becomes of it.
#![cfg(not(loom))]

mod support;

use pykv_core::prefix::Media;
use pykv_core::scheduler::{AdmissionPolicy, Outcome, Submission};
use pykv_core::{LayerGroup, SchedulerConfig, TokenId};
use support::Engine;

/// Blocks of 8 tokens, so many of them usable; runs of 2 tokens are worth a copy.
fn config(num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks: num_blocks + 1,
        block_size: 8,
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 64,
        admission: AdmissionPolicy::Watermark,
        watermark: 0.0,
        partial_block_reuse: 2,
        ..SchedulerConfig::default()
    }
}

fn prompt(first: TokenId, len: usize) -> Vec<TokenId> {
    (first..).take(len).collect()
}

/// The first tokens of a prompt, then others.
fn branch(tokens: &[TokenId], common: usize, len: usize) -> Vec<TokenId> {
    let mut branch = tokens[..common].to_vec();
    branch.extend(prompt(1000, len - common));
    branch
}

/// Runs a prompt and one token more to its end. Returns how many of its tokens were found, and how many were copied.
fn run_as(engine: &mut Engine, submission: Submission<'_>) -> (usize, usize) {
    let submission = Submission { max_tokens: Some(1), ..submission };
    let request = engine.scheduler.submit(submission).unwrap();
    engine.run();
    assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(submission.prompt, 0, 1));
    let summary = engine.ended.pop().unwrap();
    (summary.cached_tokens, summary.partial_hit_tokens)
}

fn run(engine: &mut Engine, tokens: &[TokenId]) -> (usize, usize) {
    run_as(engine, Submission::new(tokens))
}

#[test]
fn prefill_starts_where_the_longest_common_run_ends() {
    let mut engine = Engine::new(config(32));
    let cached = prompt(0, 33);
    assert_eq!(run(&mut engine, &cached), (0, 0));
    for (common, found) in
        [(21, (21, 5)), (19, (19, 3)), (18, (18, 2)), (17, (16, 0)), (6, (6, 6)), (1, (0, 0))]
    {
        assert_eq!(run(&mut engine, &branch(&cached, common, 40)), found, "{common} tokens in common");
        engine.scheduler.reset_prefix_cache();
        run(&mut engine, &cached);
    }
    let stats = engine.scheduler.stats();
    assert_eq!((stats.hit_tokens, stats.partial_hit_tokens), (21 + 19 + 18 + 16 + 6, 5 + 3 + 2 + 6));
}

#[test]
fn off_by_default_and_for_requests_that_want_no_cache() {
    let cached = prompt(0, 33);
    let mut off = Engine::new(SchedulerConfig { partial_block_reuse: 0, ..config(32) });
    run(&mut off, &cached);
    assert_eq!(run(&mut off, &branch(&cached, 21, 40)), (16, 0));
    let mut engine = Engine::new(config(32));
    run(&mut engine, &cached);
    let cold = Submission { reuse_cached: false, ..Submission::new(&cached[..21]) };
    assert_eq!(run_as(&mut engine, cold), (0, 0));
    assert_eq!(SchedulerConfig::default().partial_block_reuse, 0);
}

#[test]
fn of_a_prompt_that_is_cached_whole_only_the_last_token_is_computed() {
    let mut engine = Engine::new(config(32));
    run(&mut engine, &prompt(0, 32));
    assert_eq!(run(&mut engine, &prompt(0, 32)), (31, 7));
    assert_eq!(run(&mut engine, &prompt(0, 27)), (26, 2));
    assert_eq!(run(&mut engine, &prompt(0, 26)), (24, 0), "what is left is too short");
}

#[test]
fn the_longest_of_those_that_begin_alike_is_copied() {
    let mut engine = Engine::new(config(60));
    let cached = prompt(0, 33);
    for common in [2, 5, 3] {
        let mut other = cached[..8 + common].to_vec();
        other.extend(prompt(100 * common as TokenId, 10));
        run(&mut engine, &other);
    }
    assert_eq!(run(&mut engine, &cached[..20]), (13, 5));
}

#[test]
fn scopes_and_media_keep_apart_what_begins_alike() {
    let mut engine = Engine::new(config(60));
    let tokens = prompt(0, 20);
    let media = [Media { offset: 10, hash: b"cat" }];
    let other_media = [Media { offset: 10, hash: b"dog" }];
    let shown = |media| Submission { media, ..Submission::new(&tokens[..15]) };
    run_as(&mut engine, Submission { scope: b"a", ..Submission::new(&tokens[..8]) });
    run_as(&mut engine, Submission { media: &media, ..Submission::new(&tokens) });
    assert_eq!(run_as(&mut engine, Submission { scope: b"b", ..Submission::new(&tokens[..7]) }), (0, 0));
    assert_eq!(run_as(&mut engine, Submission { scope: b"a", ..Submission::new(&tokens[..7]) }), (6, 6));
    assert_eq!(run_as(&mut engine, shown(&other_media)), (8, 0));
    assert_eq!(run_as(&mut engine, shown(&[])), (8, 0));
    assert_eq!(run_as(&mut engine, shown(&media)), (14, 6));
}

#[test]
fn scopes_whose_hashes_collide_copy_nothing_from_each_other() {
    let mut engine = Engine::new(SchedulerConfig { hash_mask: 0, ..config(60) });
    for scope in [&b"a"[..], b"b", b"c"] {
        assert_eq!(run_as(&mut engine, Submission { scope, ..Submission::new(&prompt(0, 15)) }), (0, 0));
        assert_eq!(run_as(&mut engine, Submission { scope, ..Submission::new(&prompt(0, 7)) }), (6, 6));
    }
}

#[test]
fn a_source_is_held_until_its_step_is_over_whatever_else_needs_its_place() {
    // 5 blocks: a prompt's 2 cached ones; the branch shares one, copies from the other and takes 2 of the 3 free.
    let mut engine = Engine::new(config(5));
    let cached = prompt(0, 17);
    run(&mut engine, &cached);
    engine.submit(&branch(&cached, 12, 23), 2, 1);
    engine.submit(&prompt(500, 12), 1, 1);
    let plan = engine.plan().unwrap();
    assert_eq!((plan.num_copies, plan.num_batch_rows), (1, 1), "the second finds one block, and needs two");
    assert_eq!(engine.scheduler.stats().blocks.active, 4);
    let tokens = engine.compute(plan);
    engine.apply(plan, &tokens, &[Outcome::Ok], &[]);
    assert_eq!(engine.scheduler.stats().blocks.active, 3);
    engine.run();
    assert_eq!(engine.outputs[&(1, 0)], engine.expected(&branch(&cached, 12, 23), 0, 2));
}

#[test]
fn a_source_that_is_reset_meanwhile_is_free_when_the_step_is_over() {
    let mut engine = Engine::new(config(12));
    let cached = prompt(0, 17);
    run(&mut engine, &cached);
    engine.submit(&branch(&cached, 12, 23), 1, 1);
    let plan = engine.plan().unwrap();
    engine.scheduler.reset_prefix_cache();
    let tokens = engine.compute(plan);
    engine.apply(plan, &tokens, &[Outcome::Ok], &[]);
    assert_eq!(engine.scheduler.stats().blocks.free, 12);
}

#[test]
fn a_discarded_copy_is_made_again_and_counts_once() {
    let mut engine = Engine::new(config(12));
    let cached = prompt(0, 17);
    run(&mut engine, &cached);
    let tokens = branch(&cached, 12, 23);
    engine.submit(&tokens, 3, 1);
    for _ in 0..3 {
        let plan = engine.plan().unwrap();
        assert_eq!((plan.num_copies, plan.num_tokens), (1, 11));
        engine.scheduler.discard(plan.id).unwrap();
        engine.scheduler.check().unwrap();
    }
    engine.run();
    assert_eq!(engine.outputs[&(1, 0)], engine.expected(&tokens, 0, 3));
    assert_eq!(engine.scheduler.stats().partial_hit_tokens, 4);
}

#[test]
fn what_a_step_in_flight_computes_is_no_source() {
    let mut engine = Engine::new(config(32));
    let first = prompt(0, 24);
    engine.submit(&first, 1, 1);
    engine.submit(&branch(&first, 12, 23), 1, 1);
    let plan = engine.plan().unwrap();
    assert_eq!((plan.num_copies, plan.num_tokens), (0, 24 + 15), "the second shares the first's first block");
    let tokens = engine.compute(plan);
    engine.apply(plan, &tokens, &[Outcome::Ok; 2], &[]);
    engine.run();
}

#[test]
fn every_group_must_have_the_block() {
    let groups = vec![LayerGroup::Full, LayerGroup::Window { tokens: 9 }];
    let config = SchedulerConfig { groups, max_num_batched_tokens: 8, ..config(24) };
    let cached = prompt(0, 41);
    let mut warm = Engine::new(config.clone());
    run(&mut warm, &cached);
    assert_eq!(run(&mut warm, &branch(&cached, 6, 7)), (6, 6));
    let mut engine = Engine::new(config);
    run(&mut engine, &cached);
    // What has left the window goes first: of the first block, only the group that keeps all positions has its own.
    for first in (500..).step_by(100) {
        run(&mut engine, &prompt(first, 9));
        if engine.scheduler.stats().evictions > 0 {
            break;
        }
    }
    assert_eq!(run(&mut engine, &branch(&cached, 6, 7)), (0, 0));
    assert_eq!(run(&mut engine, &cached[..39]), (38, 6), "the last blocks are all there");
}

#[test]
fn a_first_chunk_inside_a_block_ends_with_the_blocks_that_were_admitted() {
    // A hit of 3 blocks pins 2 for the window and leaves 1 of the 3 that a window of 10 and a chunk of 8 ever span.
    let groups = vec![LayerGroup::Window { tokens: 10 }];
    let mut engine = Engine::new(SchedulerConfig { groups, max_num_batched_tokens: 8, ..config(32) });
    let cached = prompt(0, 33);
    run(&mut engine, &cached);
    let tokens = branch(&cached, 28, 48);
    let request = engine.submit(&tokens, 3, 1);
    let plan = engine.plan().unwrap();
    assert_eq!((plan.num_copies, plan.num_tokens), (1, 4), "from 28 to the end of the block");
    let sampled = engine.compute(plan);
    engine.apply(plan, &sampled, &vec![Outcome::Ok; sampled.len()], &[]);
    engine.run();
    assert_eq!(engine.outputs[&(request.get(), 0)], engine.expected(&tokens, 0, 3));
}
