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

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// How a block is looked for: below which node, in which scope, with which tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key<'a> {
    pub(crate) parent: NodeId,
    pub(crate) scope: ScopeId,
    /// The scope's fingerprint, or 0 for a block that binds none.
    pub(crate) binding: u64,
    pub(crate) tokens: &'a [TokenId],
}

/// A way down the tree, and by how much its nodes' numbers rise. The blocks of a prompt are published one after the other,
/// or in turn with those of its batch: the next node is mostly where the last step leads once more, and then nothing has
/// to be hashed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descent {
    node: NodeId,
    stride: u32,
}

impl Descent {
    /// From the root.
    pub(crate) const fn new() -> Self {
        Self { node: NodeId::ROOT, stride: 1 }
    }
}

/// What a block begins with: below which node, in which scope, with which first tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head<'a> {
    pub(crate) parent: NodeId,
    pub(crate) scope: ScopeId,
    pub(crate) tokens: &'a [TokenId],
}

/// A hash over a block's scope and all tokens up to its end: one block of a kind has one, whatever its node's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint(u32);

impl Fingerprint {
    /// What first blocks are chained to.
    pub(crate) const fn of_root(seed: u64) -> Self {
        Self((seed >> 33) as u32)
    }

    /// 31 bits.
    pub(crate) const fn get(self) -> u32 {
        self.0
    }
}

const COMPUTED: u32 = 1 << 31;

#[derive(Clone, Copy, Debug)]
struct Node {
    /// The fingerprint, and whether the content was computed by a step that was applied.
    fingerprint: u32,
    parent: NodeId,
    scope: ScopeId,
    /// `VACANT` for a number that waits to be used again.
    num_children: u32,
}

impl Node {
    fn fingerprint(&self) -> Fingerprint {
        Fingerprint(self.fingerprint & !COMPUTED)
    }
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
    /// How often hits have found each node, up to 255; as long as a policy looks at it.
    hits: Vec<u8>,
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
        let root = Node {
            // What hangs below the root waits for nobody.
            fingerprint: Fingerprint::of_root(seed).get() | COMPUTED,
            parent: NodeId::ROOT,
            scope: ScopeId::default(),
            num_children: 0,
        };
        let expected = num_blocks.div_ceil(num_groups);
        let mut tree = Self {
            key_size,
            num_groups,
            max_nodes: num_blocks.saturating_mul(NODES_PER_BLOCK).min(VACANT as usize - 1),
            children: touched_table(expected),
            nodes: touched(expected + 1, root),
            blocks: touched((expected + 1) * num_groups, BlockId::NULL),
            tokens: touched((expected + 1) * key_size.tokens(), TokenId::MAX),
            vacant: Vec::new(),
            hits: Vec::new(),
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

    pub(crate) fn tokens(&self, node: NodeId) -> &[TokenId] {
        let start = node.index() * self.key_size.tokens();
        &self.tokens[start..start + self.key_size.tokens()]
    }

    /// What a node begins with, up to so many tokens.
    pub(crate) fn head(&self, node: NodeId, len: usize) -> Head<'_> {
        let Node { parent, scope, .. } = self.nodes[node.index()];
        Head { parent, scope, tokens: &self.tokens(node)[..len] }
    }

    pub(crate) fn hash_head(&self, head: Head<'_>) -> u64 {
        let above = u64::from(head.parent.0) << 32 | u64::from(head.scope.get());
        let hash = xxh3_64_with_seed(bytemuck::cast_slice(head.tokens), self.seed ^ spread(above));
        spread(hash & self.hash_mask)
    }

    pub(crate) fn scope(&self, node: NodeId) -> ScopeId {
        self.nodes[node.index()].scope
    }

    pub(crate) fn hits(&self, node: NodeId) -> u8 {
        self.hits.get(node.index()).copied().unwrap_or(0)
    }

    /// Counts that a hit has found a node.
    pub(crate) fn count_hit(&mut self, node: NodeId) {
        if node.index() >= self.hits.len() {
            self.hits.resize(node.index() + 1, 0);
        }
        let hits = &mut self.hits[node.index()];
        *hits = hits.saturating_add(1);
    }

    pub(crate) fn is_computed(&self, node: NodeId) -> bool {
        self.nodes[node.index()].fingerprint & COMPUTED != 0
    }

    /// Notes that a node's content was computed. Returns whether that is new.
    pub(crate) fn set_computed(&mut self, node: NodeId) -> bool {
        let is_new = !self.is_computed(node);
        self.nodes[node.index()].fingerprint |= COMPUTED;
        is_new
    }

    pub(crate) fn fingerprint(&self, node: NodeId) -> Fingerprint {
        self.nodes[node.index()].fingerprint()
    }

    /// The fingerprint of what is looked for.
    pub(crate) fn fingerprint_of(&self, key: Key<'_>) -> Fingerprint {
        self.fingerprint_below(self.nodes[key.parent.index()].fingerprint(), key.binding, key.tokens)
    }

    /// The fingerprint of a block below one that need not be there.
    pub(crate) fn fingerprint_below(
        &self,
        parent: Fingerprint,
        binding: u64,
        tokens: &[TokenId],
    ) -> Fingerprint {
        chain(parent, binding, self.seed, self.content(tokens))
    }

    /// The node with exactly these tokens below exactly this parent.
    pub(crate) fn find(&self, key: Key<'_>) -> Option<NodeId> {
        self.find_at(self.fingerprint_of(key), key)
    }

    /// The same, if the fingerprint is known.
    pub(crate) fn find_at(&self, fingerprint: Fingerprint, key: Key<'_>) -> Option<NodeId> {
        self.children.find(self.spread(fingerprint), |&node| self.matches(node, key)).copied()
    }

    /// Goes on to the node with exactly these tokens below where the way has come to, if there is one.
    pub(crate) fn descend(
        &self,
        way: &mut Descent,
        scope: ScopeId,
        binding: u64,
        tokens: &[TokenId],
    ) -> Option<NodeId> {
        let parent = way.node;
        let key = Key { parent, scope, binding, tokens };
        let guess = NodeId(parent.0.wrapping_add(way.stride));
        if parent == NodeId::ROOT || !self.is_at(guess, key) {
            way.node = self.find(key)?;
            way.stride = way.node.0.wrapping_sub(parent.0);
        } else {
            way.node = guess;
        }
        Some(way.node)
    }

    /// Hangs a node without blocks below its parent, or none if the tree holds as many as it may. No equal node is there.
    pub(crate) fn insert(&mut self, fingerprint: Fingerprint, key: Key<'_>) -> Option<NodeId> {
        if self.children.len() >= self.max_nodes {
            return None;
        }
        let (parent, scope) = (key.parent, key.scope);
        let node = Node { fingerprint: fingerprint.get(), parent, scope, num_children: 0 };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.nodes[id.index()] = node;
                if let Some(hits) = self.hits.get_mut(id.index()) {
                    *hits = 0;
                }
                id
            }
            None => self.grow(node),
        };
        let start = id.index() * self.key_size.tokens();
        let content = self.content(key.tokens);
        self.tokens[start..start + content.len()].copy_from_slice(content);
        self.nodes[key.parent.index()].num_children += 1;
        let (nodes, mask) = (&self.nodes, self.hash_mask);
        let hash = |node: &NodeId| spread(u64::from(nodes[node.index()].fingerprint().0) & mask);
        self.children.insert_unique(spread(u64::from(fingerprint.0) & mask), id, hash);
        Some(id)
    }

    /// Takes a leaf without blocks out.
    pub(crate) fn remove(&mut self, id: NodeId) {
        let node = self.nodes[id.index()];
        if let Ok(entry) = self.children.find_entry(self.spread(node.fingerprint()), |&other| other == id) {
            entry.remove();
        }
        self.nodes[id.index()].num_children = VACANT;
        self.nodes[node.parent.index()].num_children -= 1;
        self.vacant.push(id);
    }

    /// Takes all nodes out. Their numbers start anew.
    pub(crate) fn clear(&mut self) {
        self.children.clear();
        self.nodes.truncate(1);
        self.nodes[NodeId::ROOT.index()].num_children = 0;
        self.blocks.truncate(self.num_groups);
        self.tokens.truncate(self.key_size.tokens());
        self.vacant.clear();
        self.hits.clear();
    }

    /// The blocks of all nodes, by falling number of the nodes.
    pub(crate) fn all_blocks(&self) -> impl Iterator<Item = BlockId> {
        // Of a node that was taken out no block is left.
        self.blocks.iter().rev().copied().filter(|&block| block != BlockId::NULL)
    }

    /// What nodes bind, once for each node that binds anything.
    pub(crate) fn scopes(&self) -> impl Iterator<Item = ScopeId> {
        let nodes = self.nodes[1..].iter().filter(|node| node.num_children != VACANT);
        nodes.map(|node| node.scope).filter(|&scope| scope != ScopeId::UNBOUND)
    }

    /// One more than the highest number that a node has had.
    pub(crate) fn num_numbers(&self) -> usize {
        self.nodes.len()
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

    /// Whether a number is that of a node, and that node the one that is looked for.
    fn is_at(&self, id: NodeId, key: Key<'_>) -> bool {
        self.nodes.get(id.index()).is_some_and(|node| node.num_children != VACANT) && self.matches(id, key)
    }

    #[inline]
    fn matches(&self, id: NodeId, key: Key<'_>) -> bool {
        let node = &self.nodes[id.index()];
        node.parent == key.parent && node.scope == key.scope && self.tokens(id) == self.content(key.tokens)
    }

    /// What of a block's tokens is looked at.
    fn content<'a>(&self, tokens: &'a [TokenId]) -> &'a [TokenId] {
        &tokens[..self.key_size.tokens()]
    }

    fn spread(&self, fingerprint: Fingerprint) -> u64 {
        spread(u64::from(fingerprint.0) & self.hash_mask)
    }
}

fn chain(parent: Fingerprint, binding: u64, seed: u64, tokens: &[TokenId]) -> Fingerprint {
    let own = xxh3_64_with_seed(bytemuck::cast_slice(tokens), seed ^ binding);
    let mixed = u64::from(parent.0).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ own;
    Fingerprint((mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u32)
}

/// A table that has room for so many nodes, in memory that was used once: later insertions meet no page fault.
fn touched_table(capacity: usize) -> HashTable<NodeId> {
    let mut table = HashTable::with_capacity(capacity);
    for number in 0..capacity as u32 {
        table.insert_unique(spread(number.into()), NodeId(number), |node| spread(node.0.into()));
    }
    table.clear();
    table
}

/// The same as a list.
fn touched<T: Copy>(capacity: usize, any: T) -> Vec<T> {
    let mut list = vec![any; capacity];
    list.clear();
    list
}

/// A table wants a hash's bits all over the word, also where few of them are used.
fn spread(hash: u64) -> u64 {
    hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
