//! Why a prompt's blocks were not found: counted for each request, so that an operator knows what would help.

use hashbrown::HashMap;

use super::tree::{Fingerprint, Key, NodeId};
use super::{PrefixCache, ScopeId};
use crate::units::TokenId;

/// A prompt's full blocks that were not found, by the reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissCounts {
    /// Not computed before in this scope, or so long ago that the cache has forgotten that it evicted them.
    pub never_seen: usize,
    /// Computed once, and not there any more: evicted, or cached without what a hit needs besides, which is the blocks of a
    /// window or a checkpoint of states.
    pub evicted: usize,
    /// Cached in another scope; only counted where the operator has allowed to look there.
    pub other_scope: usize,
    /// Being computed by a request that runs, and not in this very step.
    pub in_flight: usize,
    /// Cached, and computed all the same: a prompt's last token always is, and so is all that a request could have shared
    /// where it fits alone only without (a hit of windows can hold more blocks than the request needs).
    pub cap: usize,
}

impl MissCounts {
    /// Adds another count.
    pub(crate) fn add(&mut self, other: &Self) {
        self.never_seen += other.never_seen;
        self.evicted += other.evicted;
        self.other_scope += other.other_scope;
        self.in_flight += other.in_flight;
        self.cap += other.cap;
    }
}

/// Keys of a bucket: the oldest goes when one more comes.
const WAYS: usize = 4;

/// Keys that are remembered at the most, in 4 bytes each.
const MAX_KEYS: usize = 1 << 16;

/// What was evicted, as far as it is remembered: the last keys of each bucket, by 31 bits of their hashes: of
/// those that were never there one in some ten thousand is taken for evicted.
#[derive(Debug)]
pub(super) struct EvictedKeys {
    tags: Vec<[u32; WAYS]>,
    forgotten: u64,
}

impl EvictedKeys {
    /// A memory of half as many keys as the pool has blocks or fewer, up to [`MAX_KEYS`].
    pub(super) fn new(num_blocks: usize) -> Self {
        let num_keys = (num_blocks / 4).next_power_of_two().clamp(64, MAX_KEYS);
        Self { tags: vec![[0; WAYS]; num_keys / WAYS], forgotten: 0 }
    }

    /// Keys that have made room for others. As long as there is none more, what is not remembered was not evicted since the
    /// last [`clear`](Self::clear).
    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    pub(super) fn clear(&mut self) {
        self.tags.fill([0; WAYS]);
    }

    fn insert(&mut self, key: Fingerprint) {
        let (bucket, tag) = self.place(key);
        let tags = &mut self.tags[bucket];
        if !tags.contains(&tag) {
            self.forgotten += u64::from(tags[WAYS - 1] != 0);
            tags.rotate_right(1);
            tags[0] = tag;
        }
    }

    fn contains(&self, key: Fingerprint) -> bool {
        let (bucket, tag) = self.place(key);
        self.tags[bucket].contains(&tag)
    }

    fn place(&self, key: Fingerprint) -> (usize, u32) {
        let len = self.tags.len() as u32;
        ((key.get() % len) as usize, key.get() / len + 1)
    }
}

/// The cached blocks by their tokens alone, for an operator who wants to know what scopes keep apart.
#[derive(Debug, Default)]
pub(super) struct AllScopes {
    by_node: Vec<Fingerprint>,
    counts: HashMap<u32, usize>,
}

/// The fingerprint above every first block, whatever its scope.
const ANY_SCOPE: Fingerprint = Fingerprint::of_root(0);

impl AllScopes {
    pub(super) fn clear(&mut self) {
        self.by_node.clear();
        self.counts.clear();
    }

    fn above(&self, parent: NodeId) -> Fingerprint {
        if parent == NodeId::ROOT { ANY_SCOPE } else { self.by_node[parent.index()] }
    }

    fn add(&mut self, node: NodeId, fingerprint: Fingerprint) {
        if node.index() >= self.by_node.len() {
            self.by_node.resize(node.index() + 1, ANY_SCOPE);
        }
        self.by_node[node.index()] = fingerprint;
        *self.counts.entry(fingerprint.get()).or_insert(0) += 1;
    }

    fn remove(&mut self, node: NodeId) {
        let fingerprint = self.by_node[node.index()].get();
        if let Some(count) = self.counts.get_mut(&fingerprint) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&fingerprint);
            }
        }
    }
}

impl PrefixCache {
    /// Why the blocks of a prompt behind its hits were not found. Comes right after the lookup: [`share`](Self::share) or
    /// [`probe`](Self::probe). The next `in_flight` blocks are known to be computed by somebody else.
    pub fn misses(&self, scope: ScopeId, tokens: &[TokenId], hits: usize, in_flight: usize) -> MissCounts {
        let size = self.pool.block_size();
        let num_blocks = size.full_blocks(tokens.len());
        let in_flight = in_flight.min(num_blocks - hits);
        let mut counts = MissCounts { in_flight, ..MissCounts::default() };
        if hits == size.full_blocks(tokens.len() - 1) && hits < num_blocks && in_flight == 0 {
            let (own, binding) = self.scopes.of_block(scope, hits);
            let run = &tokens[hits * size.tokens()..(hits + 1) * size.tokens()];
            let parent = hits.checked_sub(1).map_or(NodeId::ROOT, |last| self.path[last]);
            let key = Key { parent, scope: own, binding, tokens: run };
            counts.cap = usize::from(self.tree.find(key).is_some());
        }
        let first = hits + in_flight + counts.cap;
        // Where a window's blocks or a checkpoint are gone, nodes are there and serve nobody.
        counts.evicted = self.path.len().clamp(first, num_blocks) - first;
        let first = first + counts.evicted;
        if first < num_blocks {
            self.count_absent(scope, tokens, first..num_blocks, &mut counts);
        }
        counts
    }

    /// Counts blocks that have no node.
    fn count_absent(
        &self,
        scope: ScopeId,
        tokens: &[TokenId],
        absent: std::ops::Range<usize>,
        counts: &mut MissCounts,
    ) {
        let size = self.pool.block_size();
        let known = self.path.len().min(absent.start);
        let node = known.checked_sub(1).map_or(NodeId::ROOT, |last| self.path[last]);
        let mut own = Some(self.tree.fingerprint(node));
        let mut any = self.all_scopes.as_ref().map(|scopes| scopes.above(node));
        for index in known..absent.end {
            let run = &tokens[index * size.tokens()..(index + 1) * size.tokens()];
            let (_, binding) = self.scopes.of_block(scope, index);
            own = own.map(|above| self.tree.fingerprint_below(above, binding, run));
            any = any.map(|above| self.tree.fingerprint_below(above, media_binding(index, binding), run));
            if index < absent.start {
                continue;
            }
            let was_evicted = own.is_some_and(|key| self.evicted_keys.contains(key));
            let is_elsewhere = any.is_some_and(|key| self.is_anywhere(key));
            if was_evicted {
                counts.evicted += 1;
            } else if is_elsewhere {
                counts.other_scope += 1;
            } else {
                counts.never_seen += 1;
            }
            // What hangs below a block that was never there was never there.
            own = own.filter(|_| was_evicted);
            any = any.filter(|_| is_elsewhere);
            if own.is_none() && any.is_none() {
                counts.never_seen += absent.end - index - 1;
                return;
            }
        }
    }

    fn is_anywhere(&self, key: Fingerprint) -> bool {
        self.all_scopes.as_ref().is_some_and(|scopes| scopes.counts.contains_key(&key.get()))
    }

    /// Evicted keys that the cache has forgotten to make room for others: as long as there is none more,
    /// [`MissCounts::never_seen`] is exact for what happened since the last reset.
    pub fn forgotten_keys(&self) -> u64 {
        self.evicted_keys.forgotten()
    }

    pub(super) fn note_added(&mut self, node: NodeId, key: Key<'_>) {
        if let Some(scopes) = &mut self.all_scopes {
            let binding = media_binding(usize::from(key.parent != NodeId::ROOT), key.binding);
            let fingerprint = self.tree.fingerprint_below(scopes.above(key.parent), binding, key.tokens);
            scopes.add(node, fingerprint);
        }
    }

    /// Remembers a node that makes room, if it was ever computed.
    pub(super) fn note_evicted(&mut self, node: NodeId) {
        if self.tree.is_computed(node) {
            self.evicted_keys.insert(self.tree.fingerprint(node));
        }
    }

    pub(super) fn note_removed(&mut self, node: NodeId) {
        if let Some(scopes) = &mut self.all_scopes {
            scopes.remove(node);
        }
    }
}

/// What a block binds whatever its scope: in the first block that would be the scope, so nothing.
fn media_binding(index: usize, binding: u64) -> u64 {
    if index == 0 { 0 } else { binding }
}
