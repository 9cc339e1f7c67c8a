//! The tree of published blocks. A child is found by (parent, its tokens, and below the root its scope); the tokens are
//! compared, so that a hash that collides costs time and never gives a false hit.
//!
//! A node is named by its block: the arrays here have one entry a block. A node's parent stays in the tree for as long
//! as the node does, since only leaves are removed.

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::scope::ScopeId;
use crate::units::{BlockId, BlockSize, TokenId};

/// How a block is looked for: below which node, in which scope, with which tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key<'a> {
    pub(crate) parent: BlockId,
    pub(crate) scope: ScopeId,
    pub(crate) tokens: &'a [TokenId],
}

#[derive(Clone, Copy, Debug)]
struct Node {
    hash: u64,
    parent: BlockId,
    scope: ScopeId,
    num_children: u32,
}

/// The published blocks, as a tree of token runs.
#[derive(Debug)]
pub(crate) struct Tree {
    block_size: BlockSize,
    children: HashTable<BlockId>,
    nodes: Vec<Option<Node>>,
    tokens: Vec<TokenId>,
    seed: u64,
    hash_mask: u64,
}

impl Tree {
    /// A tree of no blocks. Of each hash only the bits of `hash_mask` are used: fewer make collisions, for tests.
    pub(crate) fn new(num_blocks: usize, block_size: BlockSize, seed: u64, hash_mask: u64) -> Self {
        Self {
            block_size,
            children: HashTable::new(),
            nodes: vec![None; num_blocks],
            tokens: vec![0; num_blocks * block_size.tokens()],
            seed,
            hash_mask,
        }
    }

    /// Published blocks.
    pub(crate) fn len(&self) -> usize {
        self.children.len()
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.nodes[block.index()].is_some()
    }

    pub(crate) fn parent(&self, block: BlockId) -> Option<BlockId> {
        self.nodes[block.index()].map(|node| node.parent)
    }

    pub(crate) fn num_children(&self, block: BlockId) -> u32 {
        self.nodes[block.index()].map_or(0, |node| node.num_children)
    }

    /// The block with exactly these tokens below exactly this parent.
    pub(crate) fn find(&self, key: Key<'_>) -> Option<BlockId> {
        self.children.find(self.hash(key), |&block| self.matches(block, key)).copied()
    }

    /// Hangs a block below its parent. No equal block is in the tree.
    pub(crate) fn insert(&mut self, block: BlockId, key: Key<'_>) {
        let hash = self.hash(key);
        let start = block.index() * self.block_size.tokens();
        self.tokens[start..start + key.tokens.len()].copy_from_slice(key.tokens);
        self.nodes[block.index()] =
            Some(Node { hash, parent: key.parent, scope: key.scope, num_children: 0 });
        self.change_children(key.parent, 1);
        let nodes = &self.nodes;
        self.children.insert_unique(hash, block, |block| nodes[block.index()].map_or(0, |node| node.hash));
    }

    /// Takes a leaf out. Returns the scope to leave, if the block was a first one.
    pub(crate) fn remove(&mut self, block: BlockId) -> Option<ScopeId> {
        let node = self.nodes[block.index()].take()?;
        if let Ok(entry) = self.children.find_entry(node.hash, |&other| other == block) {
            entry.remove();
        }
        self.change_children(node.parent, -1);
        (node.parent == BlockId::NULL).then_some(node.scope)
    }

    /// All published blocks.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> {
        self.children.iter().copied()
    }

    fn matches(&self, block: BlockId, key: Key<'_>) -> bool {
        let start = block.index() * self.block_size.tokens();
        self.nodes[block.index()].is_some_and(|node| node.parent == key.parent && node.scope == key.scope)
            && self.tokens[start..start + self.block_size.tokens()] == *key.tokens
    }

    fn hash(&self, key: Key<'_>) -> u64 {
        let place = (u64::from(key.parent.get()) << 32) | u64::from(key.scope.get());
        let seed = self.seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        xxh3_64_with_seed(bytemuck::cast_slice(key.tokens), seed) & self.hash_mask
    }

    fn change_children(&mut self, parent: BlockId, change: i32) {
        if let Some(node) = self.nodes[parent.index()].as_mut() {
            node.num_children = node.num_children.saturating_add_signed(change);
        }
    }
}
