//! The prefix cache through its public verbs; block size 4 unless said otherwise.

use super::*;
use crate::error::Error;
use crate::units::BlockSize;

struct Fixture {
    cache: PrefixCache,
    scope: ScopeId,
}

fn fixture(num_blocks: usize, mask: u64) -> Fixture {
    let pool = BlockPool::new(num_blocks, BlockSize::new(4).unwrap()).unwrap();
    let mut cache = PrefixCache::new(pool, HashOptions { seed: 7, mask });
    let scope = cache.enter_scope(b"");
    Fixture { cache, scope }
}

impl Fixture {
    /// Runs a prompt to its end: shares what it can, computes the rest, publishes all full blocks. Returns the hits.
    fn run(&mut self, tokens: &[TokenId]) -> usize {
        self.run_in(self.scope, tokens)
    }

    fn run_in(&mut self, scope: ScopeId, tokens: &[TokenId]) -> usize {
        let (mut tables, mut cursor) = self.cache.share(scope, tokens, usize::MAX);
        let hits = cursor.published;
        for table in &mut tables {
            self.cache.extend(table, tokens.len().div_ceil(4) - hits).unwrap();
        }
        self.cache.publish(&mut tables, &mut cursor, scope, tokens, tokens.len());
        drop(tables);
        self.cache.check().unwrap();
        hits
    }

    fn hits(&mut self, tokens: &[TokenId]) -> usize {
        self.cache.probe(self.scope, tokens, usize::MAX).hits
    }
}

fn prompt(first: TokenId, len: usize) -> Vec<TokenId> {
    (0..len as TokenId).map(|offset| first + offset).collect()
}

#[test]
fn a_prompt_run_again_hits_all_its_full_blocks() {
    let mut fixture = fixture(16, u64::MAX);
    assert_eq!(fixture.run(&prompt(0, 10)), 0);
    assert_eq!(fixture.run(&prompt(0, 10)), 2);
    assert_eq!(fixture.hits(&prompt(0, 7)), 1);
    assert_eq!(fixture.hits(&prompt(1, 10)), 0);
}

/// A lookup first tries the node where the last step of its way would lead once more.
#[test]
fn a_block_with_the_same_tokens_below_another_one_is_no_hit_where_the_next_is_looked_for_first() {
    let mut fixture = fixture(16, u64::MAX);
    let [a, b, x, c] = [0, 4, 8, 12].map(|first| prompt(first, 4));
    for (number, prompt) in
        [&a, &b, &[a.clone(), x].concat(), &[a.clone(), c.clone()].concat()].iter().enumerate()
    {
        fixture.run(prompt);
        assert_eq!(fixture.cache.tree.num_numbers(), number + 2, "numbers rise by one");
    }
    assert_eq!(fixture.hits(&[a, c.clone()].concat()), 2);
    // `b` is the second number, and two more is `c` below `a`.
    assert_eq!(fixture.hits(&[b, c].concat()), 1);
}

#[test]
fn a_block_that_was_evicted_is_no_hit_where_the_next_is_looked_for_first() {
    let mut fixture = fixture(6, u64::MAX);
    fixture.run(&prompt(0, 20));
    assert_eq!(fixture.hits(&prompt(0, 20)), 5);
    let mut table = BlockTable::starting_at(fixture.cache.pool(), 0);
    fixture.cache.extend(&mut table, 2).unwrap();
    assert_eq!(fixture.hits(&prompt(0, 20)), 3);
}

#[test]
fn prompts_that_agree_in_low_bytes_or_digits_never_hit_each_other() {
    let mut fixture = fixture(32, u64::MAX);
    for token in [65, 321, 65_601, 65 + (1 << 24), 0] {
        assert_eq!(fixture.run(&[token; 8]), 0, "token {token}");
    }
    fixture.run(&[1, 23, 1, 1]);
    assert_eq!(fixture.hits(&[12, 3, 1, 1]), 0);
}

#[test]
fn colliding_hashes_give_no_false_hit() {
    let mut fixture = fixture(64, 0b1);
    for first in 0..20 {
        assert_eq!(fixture.run(&prompt(100 * first, 8)), 0);
    }
    for first in 0..20 {
        assert_eq!(fixture.run(&prompt(100 * first, 8)), 2);
    }
}

#[test]
fn scopes_do_not_see_each_other_and_bind_every_block() {
    let mut fixture = fixture(32, u64::MAX);
    let (a, b) = (fixture.cache.enter_scope(b"a"), fixture.cache.enter_scope(b"b"));
    fixture.run_in(a, &prompt(0, 12));
    assert_eq!(fixture.run_in(b, &prompt(0, 12)), 0);
    assert_eq!(fixture.run(&prompt(0, 12)), 0);
    assert_eq!(fixture.run_in(a, &prompt(0, 12)), 3);
}

#[test]
fn a_scope_outlives_its_requests_while_its_blocks_are_cached_and_not_longer() {
    let mut fixture = fixture(4, u64::MAX);
    let scope = fixture.cache.enter_scope(b"tenant");
    fixture.run_in(scope, &prompt(0, 8));
    fixture.cache.leave_scope(scope);
    let again = fixture.cache.enter_scope(b"tenant");
    assert_eq!(fixture.run_in(again, &prompt(0, 8)), 2);
    fixture.cache.leave_scope(again);
    fixture.run(&prompt(50, 12));
    assert_eq!(fixture.cache.num_scopes(), 1, "evicted blocks leave their scope");
}

#[test]
fn a_recycled_block_is_not_found_under_its_old_tokens() {
    let mut fixture = fixture(5, u64::MAX);
    for _ in 0..100 {
        assert_eq!(fixture.run(&prompt(0, 8)), 0);
        fixture.run(&prompt(100, 16));
        assert_eq!(fixture.hits(&prompt(0, 8)), 0);
        assert_eq!(fixture.hits(&prompt(100, 16)), 4);
    }
}

#[test]
fn the_tail_of_a_chain_is_evicted_before_its_head() {
    for _ in 0..50 {
        let mut fixture = fixture(4, u64::MAX);
        fixture.run(&prompt(0, 12));
        fixture.run(&prompt(100, 4));
        assert_eq!(fixture.hits(&prompt(0, 12)), 2);
    }
}

#[test]
fn what_was_used_last_is_evicted_last() {
    let mut fixture = fixture(4, u64::MAX);
    fixture.run(&prompt(0, 4));
    fixture.run(&prompt(100, 4));
    fixture.run(&prompt(200, 4));
    fixture.run(&prompt(0, 4));
    fixture.run(&prompt(300, 4));
    assert_eq!([0, 100, 200].map(|first| fixture.hits(&prompt(first, 4))), [1, 0, 1]);
}

#[test]
fn a_block_in_use_is_never_evicted() {
    let mut fixture = fixture(4, u64::MAX);
    fixture.run(&prompt(0, 4));
    let (held, _) = fixture.cache.share(fixture.scope, &prompt(0, 4), usize::MAX);
    let mut table = BlockTable::new(fixture.cache.pool());
    let error = fixture.cache.extend(&mut table, 3).unwrap_err();
    assert_eq!(error, Error::OutOfBlocks { needed: 3, available: 2 });
    fixture.cache.extend(&mut table, 2).unwrap();
    assert_eq!(held[0].len(), 1);
    assert_eq!(fixture.hits(&prompt(0, 4)), 1);
}

#[test]
fn an_equal_block_computed_twice_is_folded_into_the_first() {
    let mut fixture = fixture(8, u64::MAX);
    let tokens = prompt(0, 8);
    let mut tables: Vec<_> = (0..2).map(|_| BlockTable::new(fixture.cache.pool())).collect();
    for table in &mut tables {
        fixture.cache.extend(table, 2).unwrap();
    }
    let mut folded = Vec::new();
    for table in &mut tables {
        let mut cursor = fixture.cache.root();
        folded.push(fixture.cache.publish(
            std::slice::from_mut(table),
            &mut cursor,
            fixture.scope,
            &tokens,
            8,
        ));
    }
    assert_eq!(folded, [false, true]);
    assert_eq!(tables[0].blocks(), tables[1].blocks());
    assert_eq!(fixture.cache.counts().active, 2);
    fixture.cache.check().unwrap();
}

#[test]
fn a_reset_makes_nothing_findable_and_frees_what_is_in_use_only_later() {
    let mut fixture = fixture(8, u64::MAX);
    let tokens = prompt(0, 8);
    fixture.run(&prompt(100, 8));
    let mut table = BlockTable::new(fixture.cache.pool());
    let mut cursor = fixture.cache.root();
    fixture.cache.extend(&mut table, 2).unwrap();
    fixture.cache.publish(std::slice::from_mut(&mut table), &mut cursor, fixture.scope, &tokens, 4);
    fixture.cache.reset();
    assert_eq!((fixture.hits(&tokens), fixture.hits(&prompt(100, 8))), (0, 0));
    assert_eq!(fixture.cache.counts(), BlockCounts { free: 5, cached: 0, active: 2, total: 7 });
    fixture.cache.publish(std::slice::from_mut(&mut table), &mut cursor, fixture.scope, &tokens, 8);
    assert_eq!(fixture.hits(&tokens), 0, "a sequence from before the reset publishes nothing more");
    drop(table);
    assert_eq!(fixture.cache.counts().free, 7);
    fixture.cache.check().unwrap();
}

/// Runs prompts of a tenant's session and tells all that can be asked of the cache afterwards, but for what counts on.
fn run_and_ask(cache: &mut PrefixCache) -> impl PartialEq + std::fmt::Debug + use<> {
    let retention = Retention { session: Some(b"session"), tenant: b"tenant", ..Retention::default() };
    let mut found = Vec::new();
    for (scope, first, len) in [("a", 0, 12), ("b", 0, 12), ("a", 50, 24), ("a", 0, 10), ("a", 2, 6)] {
        let (scope, tokens) = (cache.enter_scope(scope.as_bytes()), prompt(first, len));
        let lease = cache.open_lease(&retention);
        let (mut tables, mut cursor) = cache.share(scope, &tokens, usize::MAX);
        let partial = cache.probe_partial(scope, &tokens);
        found.push((cursor.published, partial, cache.misses(scope, &tokens, cursor.published, 0)));
        let missing = len.div_ceil(4) - cursor.published;
        cache.extend(&mut tables[0], missing).unwrap();
        cache.publish(&mut tables, &mut cursor, scope, &tokens, tokens.len());
        cache.mark(cursor, &lease);
        drop(tables);
        cache.close_lease(lease, 0.0);
        cache.leave_scope(scope);
        cache.check().unwrap();
    }
    let events = cache.take_events();
    let asked = (cache.counts(), cache.owned_blocks(b"tenant"), cache.num_sessions(), cache.num_scopes());
    (found, asked, events.kinds, events.keys)
}

#[test]
fn after_a_reset_a_cache_is_as_new() {
    let options = CacheOptions {
        eviction: &eviction::SegmentedLru,
        tenant_share: 0.5,
        max_events: 100,
        tells_other_scopes: true,
        partial_reuse: 1,
        ..CacheOptions::default()
    };
    let pool = BlockPool::new(10, BlockSize::new(4).unwrap()).unwrap();
    let mut cache = PrefixCache::with_options(pool, &[LayerGroup::Full], options).unwrap();
    let first = run_and_ask(&mut cache);
    assert!(cache.evictions() > 0 && cache.owned_blocks(b"tenant") > 0);
    for _ in 0..2 {
        cache.reset();
        assert_eq!(cache.counts(), BlockCounts { free: 9, cached: 0, active: 0, total: 9 });
        assert_eq!((cache.num_scopes(), cache.num_sessions(), cache.owned_blocks(b"tenant")), (0, 0, 0));
        assert_eq!(cache.take_events().kinds, [EventKind::Cleared as u8]);
        assert_eq!(run_and_ask(&mut cache), first);
    }
}

#[test]
fn announced_blocks_are_shared_at_once_and_gone_when_withdrawn() {
    let mut fixture = fixture(8, u64::MAX);
    let tokens = prompt(0, 8);
    let mut table = BlockTable::new(fixture.cache.pool());
    fixture.cache.extend(&mut table, 2).unwrap();
    let mut announced = Vec::new();
    let cursor = fixture.cache.root();
    fixture.cache.announce(std::slice::from_ref(&table), cursor, fixture.scope, &tokens, 0..8, |block| {
        announced.push(block)
    });
    assert_eq!((announced.len(), fixture.hits(&tokens)), (2, 2));
    announced.iter().rev().for_each(|&block| fixture.cache.withdraw(block));
    assert_eq!(fixture.hits(&tokens), 0);
    drop(table);
    assert_eq!(fixture.cache.counts().free, 7);
    fixture.cache.check().unwrap();
}

#[test]
fn what_others_announced_is_not_cached_before_they_publish_it() {
    let pool = BlockPool::new(16, BlockSize::new(4).unwrap()).unwrap();
    let options = CacheOptions { max_events: 100, ..CacheOptions::default() };
    let mut cache = PrefixCache::with_options(pool, &[LayerGroup::Full], options).unwrap();
    let scope = cache.enter_scope(b"");
    let tokens = prompt(0, 12);
    let mut writer = [BlockTable::new(cache.pool())];
    cache.extend(&mut writer[0], 2).unwrap();
    let mut at_writer = cache.root();
    cache.announce(&writer, at_writer, scope, &tokens, 0..8, |_| ());
    // One shares both blocks and computes the next one, another one computes all three.
    let (mut sharer, mut at_sharer) = cache.share(scope, &tokens, 2);
    let mut twin = [BlockTable::new(cache.pool())];
    let mut at_twin = cache.root();
    cache.extend(&mut sharer[0], 1).unwrap();
    cache.extend(&mut twin[0], 3).unwrap();
    assert!(!cache.publish(&mut sharer, &mut at_sharer, scope, &tokens, 12));
    assert!(!cache.publish(&mut twin, &mut at_twin, scope, &tokens, 12));
    assert_eq!((at_sharer.published, at_twin.published), (2, 0));
    assert_eq!((cache.snapshot_events().keys.len(), cache.take_events().keys.len()), (0, 0));
    cache.check().unwrap();
    cache.publish(&mut writer, &mut at_writer, scope, &tokens, 8);
    assert!(!cache.publish(&mut sharer, &mut at_sharer, scope, &tokens, 12));
    assert!(cache.publish(&mut twin, &mut at_twin, scope, &tokens, 12));
    assert_eq!((at_sharer.published, at_twin.published), (3, 3));
    assert_eq!(cache.snapshot_events().keys, cache.take_events().keys);
    cache.check().unwrap();
}

#[test]
fn a_block_that_is_given_back_after_those_above_it_goes_before_them() {
    let pool = BlockPool::new(8, BlockSize::new(4).unwrap()).unwrap();
    let options = CacheOptions { partial_reuse: 1, ..CacheOptions::default() };
    let mut cache = PrefixCache::with_options(pool, &[LayerGroup::Full], options).unwrap();
    let scope = cache.enter_scope(b"");
    let mut fixture = Fixture { cache, scope };
    let tokens = [1; 12];
    fixture.run(&tokens);
    let (tables, cursor) = fixture.cache.share(scope, &tokens, 2);
    let hit = fixture.cache.partial_hit(cursor, scope, &tokens[..11]).unwrap();
    assert_eq!(hit.num_tokens, 3);
    drop(tables);
    assert_eq!(fixture.cache.counts().cached, 2, "those above are listed now");
    drop(hit);
    fixture.cache.check().unwrap();
    fixture.cache.make_room(5).unwrap();
    assert_eq!(fixture.hits(&tokens), 2);
}
