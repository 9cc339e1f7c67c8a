//! The longest run that a prompt has in common with a cached block inside the first block that it did not find: it is
//! reused by copying that block.
//!
//! Among the children of the last node that a prompt found, those that begin with its next `min_run` tokens in its own
//! scope are listed together, the newest first. A hash finds the list, the tokens are compared. Only what a step has
//! computed is listed: a copy is made before the model runs.

use hashbrown::HashTable;

use super::tree::{Head, NodeId, Tree};
use super::{Cursor, PrefixCache, ScopeId};
use crate::table::BlockTable;
use crate::units::{BlockId, TokenId};

/// Blocks that begin alike and that one lookup compares at the most.
const MAX_COMPARED: usize = 8;

/// What a copy saves.
#[derive(Debug)]
pub struct PartialHit {
    /// A block to copy in each group, held until this is dropped.
    pub sources: BlockTable,
    /// How many of the blocks' first tokens are those that were looked for.
    pub num_tokens: usize,
}

/// Where a node stands among those that begin alike; the root: nowhere.
#[derive(Clone, Copy, Debug)]
struct Neighbours {
    newer: NodeId,
    older: NodeId,
}

const ALONE: Neighbours = Neighbours { newer: NodeId::ROOT, older: NodeId::ROOT };

/// Computed nodes by what they begin with.
#[derive(Debug)]
pub(super) struct Heads {
    min_run: usize,
    newest: HashTable<NodeId>,
    /// By node number.
    neighbours: Vec<Neighbours>,
}

impl Heads {
    /// Lists runs of at least `min_run` tokens.
    pub(super) fn new(min_run: usize) -> Self {
        Self { min_run, newest: HashTable::new(), neighbours: Vec::new() }
    }

    pub(super) fn clear(&mut self) {
        self.newest.clear();
        self.neighbours.clear();
    }

    fn list(&mut self, tree: &Tree, node: NodeId) {
        if node.index() >= self.neighbours.len() {
            self.neighbours.resize(node.index() + 1, ALONE);
        }
        let (len, head) = (self.min_run, tree.head(node, self.min_run));
        let hash = tree.hash_head(head);
        let Some(newest) = self.newest.find_mut(hash, |&other| tree.head(other, len) == head) else {
            self.newest.insert_unique(hash, node, |&other| tree.hash_head(tree.head(other, len)));
            return;
        };
        let older = std::mem::replace(newest, node);
        self.neighbours[node.index()].older = older;
        self.neighbours[older.index()].newer = node;
    }

    fn unlist(&mut self, tree: &Tree, node: NodeId) {
        let Neighbours { newer, older } = std::mem::replace(&mut self.neighbours[node.index()], ALONE);
        if older != NodeId::ROOT {
            self.neighbours[older.index()].newer = newer;
        }
        if newer != NodeId::ROOT {
            self.neighbours[newer.index()].older = older;
            return;
        }
        let hash = tree.hash_head(tree.head(node, self.min_run));
        let Ok(mut entry) = self.newest.find_entry(hash, |&other| other == node) else { return };
        if older == NodeId::ROOT {
            entry.remove();
        } else {
            *entry.get_mut() = older;
        }
    }

    /// Some nodes that begin like `tokens`, the newest first.
    fn alike<'a>(
        &'a self,
        tree: &Tree,
        parent: NodeId,
        scope: ScopeId,
        tokens: &[TokenId],
    ) -> impl Iterator<Item = NodeId> + 'a {
        let newest = tokens.get(..self.min_run).and_then(|tokens| {
            let head = Head { parent, scope, tokens };
            self.newest.find(tree.hash_head(head), |&other| tree.head(other, self.min_run) == head)
        });
        let older =
            |node: &NodeId| Some(self.neighbours[node.index()].older).filter(|&older| older != NodeId::ROOT);
        std::iter::successors(newest.copied(), older).take(MAX_COMPARED)
    }
}

impl PrefixCache {
    /// The longest run inside one cached block that goes on with `tokens` where their last hit ends, if every group has
    /// that block. The block is pinned by what is returned. `tokens` does not hold the one that must be computed.
    pub fn partial_hit(&mut self, cursor: Cursor, scope: ScopeId, tokens: &[TokenId]) -> Option<PartialHit> {
        let (num_tokens, node) = self.longest_run(cursor.node(), cursor.published, scope, tokens)?;
        if self.counts_hits {
            self.tree.count_hit(node);
        }
        let mut sources = BlockTable::new(&self.pool);
        for group in 0..self.groups.len() {
            let block = self.tree.blocks(node)[group];
            self.pin(block);
            sources.push_retained(block);
        }
        Some(PartialHit { sources, num_tokens })
    }

    /// The tokens that [`partial_hit`](Self::partial_hit) would save where the lookup at hand ends.
    pub(crate) fn probe_partial(&self, scope: ScopeId, tokens: &[TokenId]) -> usize {
        self.longest_run(self.found(), self.hits, scope, tokens).map_or(0, |(num_tokens, _)| num_tokens)
    }

    /// The longest run inside one cached block that goes on with `tokens` behind their first `hits` blocks, which end at a
    /// node, and the node of that block.
    fn longest_run(
        &self,
        found: NodeId,
        hits: usize,
        scope: ScopeId,
        tokens: &[TokenId],
    ) -> Option<(usize, NodeId)> {
        let heads = self.heads.as_ref()?;
        let size = self.pool.block_size().tokens();
        let start = hits * size;
        let wanted = tokens.get(start..tokens.len().min(start + size))?;
        let (own, _) = self.scopes.of_block(scope, hits);
        let common = |node: NodeId| {
            let tokens = self.tree.tokens(node).iter().zip(wanted);
            (tokens.take_while(|(cached, wanted)| cached == wanted).count(), node)
        };
        heads
            .alike(&self.tree, found, own, wanted)
            .filter(|&node| !self.tree.blocks(node).contains(&BlockId::NULL))
            .map(common)
            .max_by_key(|&(num_tokens, _)| num_tokens)
    }

    /// Notes that a node was computed.
    pub(super) fn list_head(&mut self, node: NodeId) {
        if let Some(heads) = &mut self.heads {
            heads.list(&self.tree, node);
        }
    }

    /// Notes that a node will be taken out.
    pub(super) fn unlist_head(&mut self, node: NodeId) {
        if let Some(heads) = &mut self.heads
            && self.tree.is_computed(node)
        {
            heads.unlist(&self.tree, node);
        }
    }
}
