//! The prefix cache alone: what two sequences may share, and when.
#![cfg(not(loom))]

use pykv_core::prefix::{HashOptions, ScopeId};
use pykv_core::{BlockPool, BlockSize, BlockTable, Error, PrefixCache, TokenId};

const BLOCK: usize = 4;

fn cache(num_blocks: usize, mask: u64) -> PrefixCache {
    let pool = BlockPool::new(num_blocks, BlockSize::new(BLOCK).unwrap()).unwrap();
    PrefixCache::new(pool, HashOptions { seed: 3, mask })
}

/// Computes and publishes a prompt of whole blocks. Returns its table and how many blocks were found.
fn run(cache: &mut PrefixCache, scope: ScopeId, tokens: &[TokenId]) -> (BlockTable, usize) {
    let (mut tables, mut cursor) = cache.share(scope, tokens, usize::MAX);
    let hits = cursor.published;
    cache.extend(&mut tables[0], tokens.len() / BLOCK - hits).unwrap();
    cache.publish(&mut tables, &mut cursor, scope, tokens, tokens.len());
    cache.check().unwrap();
    (tables.pop().unwrap(), hits)
}

#[test]
fn scopes_whose_hashes_collide_share_nothing() {
    let mut cache = cache(200, 0);
    let scopes: Vec<_> = (0..20u8).map(|scope| cache.enter_scope(&[scope])).collect();
    let tokens: Vec<TokenId> = (0..8).collect();
    for expected in [0, 2] {
        for &scope in &scopes {
            assert_eq!(run(&mut cache, scope, &tokens).1, expected, "all keys have one hash");
        }
    }
}

#[test]
fn a_scope_whose_number_is_used_again_finds_nothing_of_the_one_before() {
    let mut cache = cache(16, u64::MAX);
    let tokens: Vec<TokenId> = (0..8).collect();
    let first = cache.enter_scope(b"adapter 7, first load");
    drop(run(&mut cache, first, &tokens));
    cache.leave_scope(first);
    cache.reset();
    let second = cache.enter_scope(b"adapter 7, second load");
    assert_eq!(second, first, "numbers are used again");
    assert_eq!(run(&mut cache, second, &tokens).1, 0);
}

#[test]
fn what_a_fork_holds_too_is_not_folded_before_the_fork_lets_it_go() {
    let mut cache = cache(6, u64::MAX);
    let scope = cache.enter_scope(b"");
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    let mut tables = vec![BlockTable::new(cache.pool())];
    cache.extend(&mut tables[0], 2).unwrap();
    let fork = tables[0].fork();
    drop(run(&mut cache, scope, &tokens[..BLOCK]));
    let mut cursor = cache.root();
    assert!(!cache.publish(&mut tables, &mut cursor, scope, &tokens, tokens.len()));
    // The second block would hang below one that the fork does not hold.
    assert_eq!((tables[0].blocks(), cursor.published), (fork.blocks(), 0));
    cache.check().unwrap();
    drop(fork);
    assert!(cache.publish(&mut tables, &mut cursor, scope, &tokens, tokens.len()));
    assert_eq!(cursor.published, 2);
    drop(tables);
    let mut others = BlockTable::new(cache.pool());
    cache.extend(&mut others, 5).unwrap();
    cache.check().unwrap();
}

#[test]
fn a_block_that_is_given_back_and_folded_onto_at_once_is_not_evicted() {
    let mut cache = cache(4, u64::MAX);
    let scope = cache.enter_scope(b"");
    let tokens = [1, 2, 3, 4];
    let mut twin = BlockTable::new(cache.pool());
    cache.extend(&mut twin, 1).unwrap();
    let (first, _) = run(&mut cache, scope, &tokens);
    let block = first.blocks()[0];
    // Given back, not yet listed as idle, and in use again.
    drop(first);
    let mut cursor = cache.root();
    assert!(cache.publish(std::slice::from_mut(&mut twin), &mut cursor, scope, &tokens, 4));
    assert_eq!((twin.blocks(), cache.available()), ([block].as_slice(), 2));
    let mut greedy = BlockTable::new(cache.pool());
    let error = cache.extend(&mut greedy, 3).unwrap_err();
    assert_eq!(error, Error::OutOfBlocks { needed: 3, available: 2 });
    assert_eq!(cache.probe(scope, &tokens, 1).hits, 1);
    cache.check().unwrap();
}

#[test]
fn equal_tokens_below_different_beginnings_are_different_blocks() {
    let mut cache = cache(32, u64::MAX);
    let scope = cache.enter_scope(b"");
    let end: Vec<TokenId> = (50..58).collect();
    let prompt = |first: TokenId| [vec![first; BLOCK], end.clone()].concat();
    let (one, _) = run(&mut cache, scope, &prompt(1));
    let (other, hits) = run(&mut cache, scope, &prompt(2));
    assert_eq!(hits, 0);
    assert!(one.blocks().iter().all(|block| !other.blocks().contains(block)));
    assert_eq!(run(&mut cache, scope, &end).1, 0, "a block in the middle is no beginning");
}

#[test]
fn any_number_of_blocks_up_to_what_is_available_can_be_had_after_any_history() {
    let mut cache = cache(33, u64::MAX);
    let scope = cache.enter_scope(b"");
    let mut kept: Vec<BlockTable> = Vec::new();
    for round in 0..500u32 {
        let tokens: Vec<TokenId> = (0..8 + 4 * (round % 5)).map(|place| (place + round % 7) / 4).collect();
        if cache.available() >= tokens.len() / BLOCK {
            kept.push(run(&mut cache, scope, &tokens).0);
        }
        if kept.len() > 4 || cache.available() < 8 {
            kept.remove(round as usize % kept.len());
        }
        let available = cache.available();
        let mut all = BlockTable::new(cache.pool());
        assert!(cache.extend(&mut all, available + 1).is_err());
        if round.is_multiple_of(3) {
            cache.extend(&mut all, available).unwrap();
            assert_eq!(all.len(), available);
        }
        drop(all);
        cache.check().unwrap();
    }
}

#[test]
fn a_check_sees_nothing_broken_while_other_threads_give_blocks_back() {
    let mut cache = cache(65, u64::MAX);
    let scope = cache.enter_scope(b"");
    std::thread::scope(|threads| {
        let droppers: Vec<_> = (0..3)
            .map(|_| {
                let (give, take) = std::sync::mpsc::channel::<BlockTable>();
                threads.spawn(move || take.into_iter().for_each(drop));
                give
            })
            .collect();
        for round in 0..100_000u32 {
            let tokens: Vec<TokenId> = (0..48).map(|place| (place + round % 3) / 4).collect();
            let (mut tables, mut cursor) = cache.share(scope, &tokens, usize::MAX);
            let missing = 12 - cursor.published;
            // Too few are free while the others lag behind.
            if cache.extend(&mut tables[0], missing).is_ok() {
                cache.publish(&mut tables, &mut cursor, scope, &tokens, tokens.len());
                droppers[round as usize % 3].send(tables.remove(0)).unwrap();
            }
            cache.check().unwrap();
        }
    });
    assert_eq!(cache.counts().active, 0);
    cache.check().unwrap();
}
