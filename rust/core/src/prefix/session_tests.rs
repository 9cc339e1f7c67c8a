//! Sessions against a model that keeps, for each cached prefix, the set of those who have used it.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::eviction::{POLICIES, SegmentedLru};
use super::order::Class;
use super::*;

#[derive(Clone, Debug)]
enum Action {
    /// Runs a prompt: of which session (0: none), with which time to live and until the next turn.
    Run {
        prompt: Vec<TokenId>,
        session: u8,
        ttl: Option<u8>,
        next_turn: Option<u8>,
    },
    End {
        session: u8,
    },
    Wait {
        seconds: u8,
    },
    Reset,
}

fn action() -> impl Strategy<Value = Action> {
    let prompt = prop::collection::vec(0..2u32, 1..7);
    let seconds = || prop_oneof![3 => Just(None), 1 => (0..9u8).prop_map(Some)];
    let run = (prompt, 0..5u8, seconds(), seconds());
    prop_oneof![
        8 => run.prop_map(|(prompt, session, ttl, next_turn)| Action::Run { prompt, session, ttl, next_turn }),
        3 => (1..5u8).prop_map(|session| Action::End { session }),
        1 => (0..6u8).prop_map(|seconds| Action::Wait { seconds }),
        1 => Just(Action::Reset),
    ]
}

/// Who has used a prefix: sessions by their number, 0 for a request without one.
#[derive(Default)]
struct Model {
    users: HashMap<Vec<TokenId>, HashSet<u32>>,
    ended: HashSet<u32>,
    expiry: HashMap<u32, f64>,
    expected: HashMap<u32, f64>,
    /// The run that has used a prefix last.
    used: HashMap<Vec<TokenId>, usize>,
}

impl Model {
    fn class(&self, prefix: &[TokenId]) -> Class {
        let users = &self.users[prefix];
        if users.iter().any(|user| self.expected.contains_key(user)) {
            return Class::Expected;
        }
        let is_live = users.iter().any(|user| *user == 0 || !self.ended.contains(user));
        if is_live { Class::Live } else { Class::Ended }
    }

    fn expire(&mut self, now: f64) {
        let passed: Vec<u32> =
            self.expiry.iter().filter(|(_, at)| **at < now).map(|(&user, _)| user).collect();
        passed.into_iter().for_each(|user| self.end(user));
        self.expected.retain(|_, at| *at >= now);
    }

    fn end(&mut self, user: u32) {
        self.expiry.remove(&user);
        self.expected.remove(&user);
        self.ended.insert(user);
    }
}

/// All cached prefixes, each with its node.
fn cached(cache: &PrefixCache) -> HashMap<Vec<TokenId>, NodeId> {
    let prefix = |node: NodeId| {
        let chain = std::iter::successors(Some(node), |&node| Some(cache.tree.parent(node)));
        let mut tokens: Vec<TokenId> =
            chain.take_while(|&node| node != NodeId::ROOT).map(|node| cache.tree.tokens(node)[0]).collect();
        tokens.reverse();
        tokens
    };
    cache.tree.iter().map(|node| (prefix(node), node)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_block_stands_by_who_used_it_and_then_by_when(
        num_blocks in 8..20usize,
        policy in 0..POLICIES.len(),
        actions in prop::collection::vec(action(), 1..60),
    ) {
        let pool = BlockPool::new(num_blocks, BlockSize::new(1).unwrap()).unwrap();
        let options = CacheOptions { eviction: POLICIES[policy], ..CacheOptions::default() };
        let mut cache = PrefixCache::with_options(pool, &[LayerGroup::Full], options).unwrap();
        let scope = cache.enter_scope(b"");
        // Something is tracked from the start, so that the model knows all users.
        let first = cache.open_lease(&Retention { priority: 1, ..Retention::default() });
        cache.close_lease(first, 0.0);
        let (mut model, mut now, mut anonymous) = (Model::default(), 0.0, 100);
        for (run, action) in actions.into_iter().enumerate() {
            match action {
                Action::Run { prompt, session, ttl, next_turn } => {
                    let name = [session];
                    let session_id = (session > 0).then_some(&name[..]);
                    let ttl = ttl.map(f64::from);
                    let next_turn = next_turn.filter(|_| session > 0).map(f64::from);
                    let retention = Retention { session: session_id, ttl, next_turn, ..Retention::default() };
                    let lease = cache.open_lease(&retention);
                    let user = match (session, ttl) {
                        (0, Some(_)) => { anonymous += 1; anonymous }
                        _ => u32::from(session),
                    };
                    model.ended.remove(&user);
                    model.expiry.remove(&user);
                    model.expected.remove(&user);
                    let (mut tables, mut cursor) = cache.share(scope, &prompt, usize::MAX);
                    cache.extend(&mut tables[0], prompt.len() - cursor.published).unwrap();
                    let left = cached(&cache);
                    model.users.retain(|prefix, _| left.contains_key(prefix));
                    cache.publish(&mut tables, &mut cursor, scope, &prompt, prompt.len());
                    cache.mark(cursor, &lease);
                    drop(tables);
                    cache.close_lease(lease, now);
                    for len in 1..=prompt.len() {
                        model.users.entry(prompt[..len].to_vec()).or_default().insert(user);
                        model.used.insert(prompt[..len].to_vec(), run);
                    }
                    if let Some(next_turn) = next_turn {
                        model.expected.insert(user, now + next_turn);
                    }
                    if let Some(ttl) = ttl {
                        model.expiry.insert(user, now + ttl);
                    }
                }
                Action::End { session } => {
                    cache.end_session(b"", &[session]);
                    model.end(session.into());
                }
                Action::Wait { seconds } => {
                    now += f64::from(seconds);
                    cache.expire(now);
                    model.expire(now);
                }
                Action::Reset => {
                    cache.reset();
                    model.users.clear();
                }
            }
            cache.check().unwrap();
            let cached = cached(&cache);
            for (prefix, &node) in &cached {
                prop_assert_eq!(cache.standing(node).class, model.class(prefix), "{:?}", prefix);
            }
            if options.eviction.name() != Lru.name() {
                continue;
            }
            let mut expected: Vec<_> = cached.keys().cloned().collect();
            expected.sort_by_key(|prefix| (model.class(prefix), model.used[prefix], Reverse(prefix.len())));
            let prefixes: HashMap<_, _> = cached.into_iter().map(|(prefix, node)| (node, prefix)).collect();
            let order: Vec<_> =
                cache.order.iter().map(|block| prefixes[&cache.place(block).0].clone()).collect();
            prop_assert_eq!(order, expected);
        }
        cache.reset();
        prop_assert_eq!(cache.num_sessions(), 0);
    }
}

/// Runs a prompt of a session of which the next turn is expected, and which expires.
fn run(cache: &mut PrefixCache, scope: ScopeId, session: u32, tokens: &[TokenId]) {
    let name = session.to_le_bytes();
    let retention = Retention {
        session: Some(&name[..]),
        ttl: Some(20.0),
        next_turn: Some(10.0),
        ..Retention::default()
    };
    let lease = cache.open_lease(&retention);
    let (mut tables, mut cursor) = cache.share(scope, tokens, usize::MAX);
    cache.extend(&mut tables[0], tokens.len() - cursor.published).unwrap();
    cache.publish(&mut tables, &mut cursor, scope, tokens, tokens.len());
    cache.mark(cursor, &lease);
    drop(tables);
    cache.close_lease(lease, 0.0);
}

fn cache_of(num_sessions: u32, shared: u32, own: u32) -> PrefixCache {
    let num_blocks = (1 + shared + num_sessions * own) as usize;
    let pool = BlockPool::new(num_blocks, BlockSize::new(1).unwrap()).unwrap();
    let mut cache = PrefixCache::new(pool, HashOptions::default());
    let scope = cache.enter_scope(b"");
    for session in 0..num_sessions {
        let tokens: Vec<_> =
            (0..shared).chain((0..own).map(|place| 1_000_000 + session * own + place)).collect();
        run(&mut cache, scope, session, &tokens);
    }
    cache
}

#[test]
fn what_the_end_of_sessions_costs_does_not_grow_with_what_they_share() {
    let changes = [10, 1000].map(|shared| {
        let mut cache = cache_of(100, shared, 2);
        let mut changes = Vec::new();
        for now in [11.0, 21.0] {
            let before = cache.tracked.num_changes;
            cache.expire(now);
            changes.push(cache.tracked.num_changes - before);
            cache.check().unwrap();
        }
        // The last one that leaves what is shared changes all of it.
        changes.into_iter().map(|changes| changes - u64::from(shared)).collect::<Vec<_>>()
    });
    assert_eq!(changes[0], changes[1]);
}

#[test]
fn blocks_that_the_policy_has_moved_stay_behind_what_has_come_down_before_them() {
    let pool = BlockPool::new(11, BlockSize::new(1).unwrap()).unwrap();
    let options = CacheOptions { eviction: &SegmentedLru, ..CacheOptions::default() };
    let mut cache = PrefixCache::with_options(pool, &[crate::LayerGroup::Full], options).unwrap();
    let scope = cache.enter_scope(b"");
    let (first, shorter, other) = ([0, 1, 2], [0, 1], [10, 11, 12, 13, 14, 15, 16]);
    (0..2).for_each(|_| run(&mut cache, scope, 1, &first));
    run(&mut cache, scope, 2, &shorter);
    cache.end_session(b"", &1_u32.to_le_bytes());
    // More than may be protected: the block of token 1 is on probation again, the one below it waits among the ended ones.
    (0..2).for_each(|_| run(&mut cache, scope, 3, &other));
    cache.end_session(b"", &2_u32.to_le_bytes());
    cache.check().unwrap();
    let order: Vec<_> =
        cache.order.iter().map(|block| cache.tree.tokens(cache.place(block).0)[0]).take(3).collect();
    assert_eq!(order, [2, 1, 0]);
}

#[test]
fn what_a_call_does_not_come_to_end_is_ended_by_the_next() {
    let mut cache = cache_of(5000, 10, 3);
    let live = |cache: &PrefixCache| {
        let nodes: Vec<_> = cache.tree.iter().filter(|&node| cache.tree.num_children(node) == 0).collect();
        nodes.into_iter().filter(|&node| cache.standing(node).class != Class::Ended).count()
    };
    let mut left = vec![live(&cache)];
    while left.last() != Some(&0) {
        let before = cache.tracked.num_changes;
        cache.expire(21.0);
        assert!(cache.tracked.num_changes - before < super::retention::MAX_CHANGES + 20);
        cache.check().unwrap();
        left.push(live(&cache));
    }
    assert!(left.len() > 3 && left.is_sorted_by(|before, after| before >= after), "{left:?}");
    cache.expire(21.0);
    assert!(cache.order.iter().all(|block| cache.standing(cache.place(block).0).class == Class::Ended));
}
