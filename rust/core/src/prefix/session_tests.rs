//! Sessions against a model that keeps, for each cached prefix, the set of those who have used it.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::order::Class;
use super::*;

#[derive(Clone, Debug)]
enum Action {
    /// Runs a prompt: of which session (0: none), with which time to live.
    Run {
        prompt: Vec<TokenId>,
        session: u8,
        ttl: Option<u8>,
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
    let ttl = prop_oneof![3 => Just(None), 1 => (0..9u8).prop_map(Some)];
    prop_oneof![
        8 => (prompt, 0..5u8, ttl).prop_map(|(prompt, session, ttl)| Action::Run { prompt, session, ttl }),
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
}

impl Model {
    fn class(&self, prefix: &[TokenId]) -> Class {
        let users = &self.users[prefix];
        let is_live = users.iter().any(|user| *user == 0 || !self.ended.contains(user));
        if is_live { Class::Live } else { Class::Ended }
    }

    fn expire(&mut self, now: f64) {
        let passed: Vec<u32> =
            self.expiry.iter().filter(|(_, at)| **at < now).map(|(&user, _)| user).collect();
        for user in passed {
            self.expiry.remove(&user);
            self.ended.insert(user);
        }
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
    fn a_block_is_ended_exactly_when_all_who_used_it_are(
        num_blocks in 8..20usize,
        actions in prop::collection::vec(action(), 1..60),
    ) {
        let pool = BlockPool::new(num_blocks, BlockSize::new(1).unwrap()).unwrap();
        let mut cache = PrefixCache::new(pool, HashOptions::default());
        let scope = cache.enter_scope(b"");
        // Something is tracked from the start, so that the model knows all users.
        let first = cache.open_lease(&Retention { priority: 1, ..Retention::default() });
        cache.close_lease(first, 0.0);
        let (mut model, mut now, mut anonymous) = (Model::default(), 0.0, 100);
        for action in actions {
            match action {
                Action::Run { prompt, session, ttl } => {
                    let name = [session];
                    let session_id = (session > 0).then_some(&name[..]);
                    let ttl = ttl.map(f64::from);
                    let lease = cache.open_lease(&Retention { session: session_id, ttl, ..Retention::default() });
                    let user = match (session, ttl) {
                        (0, Some(_)) => { anonymous += 1; anonymous }
                        _ => u32::from(session),
                    };
                    model.ended.remove(&user);
                    model.expiry.remove(&user);
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
                    }
                    if let Some(ttl) = ttl {
                        model.expiry.insert(user, now + ttl);
                    }
                }
                Action::End { session } => {
                    cache.end_session(b"", &[session]);
                    model.ended.insert(session.into());
                    model.expiry.remove(&session.into());
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
            for (prefix, node) in cached(&cache) {
                prop_assert_eq!(cache.standing(node).class, model.class(&prefix), "{:?}", prefix);
            }
        }
        cache.reset();
        prop_assert_eq!(cache.num_sessions(), 0);
    }
}
