//! The tree of published blocks. A child is found by (parent, its tokens, and below the root its scope); the tokens are
//! compared, so that a hash that collides costs time and never gives a false hit.
//!
//! A node stands for one run of `block_size` tokens and names the block that each layer group has for it. With a group
//! that keeps all positions, a node lives for as long as that group's block does, and only leaves are removed. Without
//! one, a node whose blocks are all gone stays for as long as others hang below it.

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::scope::ScopeId;
use crate::units::{BlockId, BlockSize, TokenId};

/// A node of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u32);

impl NodeId {
    /// What every first block hangs below.
    pub(crate) const ROOT: Self = Self(0);

    const fn index(self) -> usize {
        self.0 as usize
    }
}

/// How a block is looked for: below which node, in which scope, with which tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key<'a> {
    pub(crate) parent: NodeId,
    pub(crate) scope: ScopeId,
    pub(crate) tokens: &'a [TokenId],
}

#[derive(Clone, Copy, Debug)]
struct Node {
    hash: u32,
    parent: NodeId,
    scope: ScopeId,
    /// `VACANT` for a number that waits to be used again.
    num_children: u32,
}

const VACANT: u32 = u32::MAX;

/// The published blocks, as a tree of token runs.
#[derive(Debug)]
pub(crate) struct Tree {
    /// Tokens of a block that are hashed, kept and compared: all, or those that stand for it.
    key_size: BlockSize,
    num_groups: usize,
    max_nodes: usize,
    children: HashTable<NodeId>,
    /// The root, then the nodes by number.
    nodes: Vec<Node>,
    /// Each node's block in each group, or the null block.
    blocks: Vec<BlockId>,
    tokens: Vec<TokenId>,
    vacant: Vec<NodeId>,
    seed: u64,
    hash_mask: u64,
}

/// Nodes that the tree holds at the most, in units of the pool's blocks. Without a group that keeps all positions a node
/// can outlive its blocks: a bound on what bookkeeping may take.
const NODES_PER_BLOCK: usize = 16;

impl Tree {
    /// A tree of no blocks. Of each hash only the bits of `hash_mask` are used: fewer make collisions, for tests.
    pub(crate) fn new(
        num_blocks: usize,
        num_groups: usize,
        key_size: BlockSize,
        seed: u64,
        hash_mask: u64,
    ) -> Self {
        let root = Node { hash: 0, parent: NodeId::ROOT, scope: ScopeId::default(), num_children: 0 };
        let expected = num_blocks.div_ceil(num_groups);
        let mut tree = Self {
            key_size,
            num_groups,
            max_nodes: num_blocks.saturating_mul(NODES_PER_BLOCK).min(VACANT as usize - 1),
            children: touched(expected),
            nodes: Vec::with_capacity(expected + 1),
            blocks: Vec::with_capacity((expected + 1) * num_groups),
            tokens: Vec::with_capacity((expected + 1) * key_size.tokens()),
            vacant: Vec::new(),
            seed,
            hash_mask,
        };
        tree.grow(root);
        tree
    }

    pub(crate) fn contains(&self, node: NodeId) -> bool {
        self.nodes[node.index()].num_children != VACANT
    }

    pub(crate) fn parent(&self, node: NodeId) -> NodeId {
        self.nodes[node.index()].parent
    }

    pub(crate) fn num_children(&self, node: NodeId) -> u32 {
        self.nodes[node.index()].num_children
    }

    /// The node's block in each group; the null block where it has none.
    pub(crate) fn blocks(&self, node: NodeId) -> &[BlockId] {
        let start = node.index() * self.num_groups;
        &self.blocks[start..start + self.num_groups]
    }

    pub(crate) fn set_block(&mut self, node: NodeId, group: usize, block: BlockId) {
        self.blocks[node.index() * self.num_groups + group] = block;
    }

    /// The node with exactly these tokens below exactly this parent.
    pub(crate) fn find(&self, key: Key<'_>) -> Option<NodeId> {
        self.children.find(spread(self.hash(key)), |&node| self.matches(node, key)).copied()
    }

    /// Hangs a node without blocks below its parent, or none if the tree holds as many as it may. No equal node is there.
    pub(crate) fn insert(&mut self, key: Key<'_>) -> Option<NodeId> {
        if self.children.len() >= self.max_nodes {
            return None;
        }
        let hash = self.hash(key);
        let node = Node { hash, parent: key.parent, scope: key.scope, num_children: 0 };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.nodes[id.index()] = node;
                id
            }
            None => self.grow(node),
        };
        let start = id.index() * self.key_size.tokens();
        let content = self.content(key);
        self.tokens[start..start + content.len()].copy_from_slice(content);
        self.nodes[key.parent.index()].num_children += 1;
        let nodes = &self.nodes;
        self.children.insert_unique(spread(hash), id, |node| spread(nodes[node.index()].hash));
        Some(id)
    }

    /// Takes a leaf without blocks out. Returns the scope to leave, if it hung below the root.
    pub(crate) fn remove(&mut self, id: NodeId) -> Option<ScopeId> {
        let node = self.nodes[id.index()];
        if let Ok(entry) = self.children.find_entry(spread(node.hash), |&other| other == id) {
            entry.remove();
        }
        self.nodes[id.index()].num_children = VACANT;
        self.nodes[node.parent.index()].num_children -= 1;
        self.vacant.push(id);
        (node.parent == NodeId::ROOT).then_some(node.scope)
    }

    /// All nodes but the root.
    pub(crate) fn iter(&self) -> impl Iterator<Item = NodeId> {
        self.children.iter().copied()
    }

    fn grow(&mut self, node: Node) -> NodeId {
        let id = NodeId(self.nodes.len() as u32);
        self.nodes.push(node);
        self.blocks.resize(self.nodes.len() * self.num_groups, BlockId::NULL);
        self.tokens.resize(self.nodes.len() * self.key_size.tokens(), 0);
        id
    }

    fn matches(&self, id: NodeId, key: Key<'_>) -> bool {
        let (node, start) = (&self.nodes[id.index()], id.index() * self.key_size.tokens());
        node.parent == key.parent
            && node.scope == key.scope
            && self.tokens[start..start + self.key_size.tokens()] == *self.content(key)
    }

    fn content<'a>(&self, key: Key<'a>) -> &'a [TokenId] {
        &key.tokens[..self.key_size.tokens()]
    }

    fn hash(&self, key: Key<'_>) -> u32 {
        let place = (u64::from(key.parent.0) << 32) | u64::from(key.scope.get());
        let seed = self.seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = xxh3_64_with_seed(bytemuck::cast_slice(self.content(key)), seed) & self.hash_mask;
        (hash ^ (hash >> 32)) as u32
    }
}

/// A table that has room for so many nodes, in memory that was used once: later insertions meet no page fault.
fn touched(capacity: usize) -> HashTable<NodeId> {
    let mut table = HashTable::with_capacity(capacity);
    for number in 0..capacity as u32 {
        table.insert_unique(spread(number), NodeId(number), |node| spread(node.0));
    }
    table.clear();
    table
}

/// A node keeps half of its hash; a table wants its bits all over the word.
fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
