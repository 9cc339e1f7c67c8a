//! The prefix cache: published blocks that later sequences find again, and the order in which they make room.
//!
//! One owner changes it (`&mut self`); references to blocks are given back from any thread. A lookup and its pin are one
//! call, so that no hit grows stale. What is in the tree is exact: a hit has the same tokens in the same scope from
//! position 0 on, by comparison at each block. With several layer groups a hit is as long as all of them can serve,
//! and with states it ends where a checkpoint is.

mod check;
mod checkpoints;
pub mod content_key;
mod events;
pub mod eviction;
mod lanes;
mod miss;
mod order;
mod partial;
mod pin;
mod publish;
mod retention;
mod room;
mod scope;
mod session;
mod shares;
mod tree;

pub use events::{EventKind, Events};
pub use miss::MissCounts;
pub use partial::PartialHit;
pub use pin::{PinId, PinQuota, Pinned};
pub use publish::Announced;
pub use retention::{Lease, PRIORITY_RANGE, Retention};
pub use scope::{Media, ScopeId};
pub use tree::NodeId;

use std::cmp::Ordering;

use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::groups::{LayerGroup, Tables};
use crate::memory::check_memory;
use crate::pool::{BlockCounts, BlockPool};
use crate::table::{BlockCopy, BlockTable};
use crate::units::{BlockId, BlockSize, TokenId};
use checkpoints::Checkpoints;
use events::EventLog;
use eviction::{EvictionPolicy, Lru, check_policy};
use miss::{AllScopes, EvictedKeys};
use order::EvictionOrder;
use partial::Heads;
use pin::Pins;
use retention::Tracked;
use scope::Scopes;
use tree::{Descent, Tree};

/// How far a sequence's blocks are published: where the next one hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Blocks of the sequence that are in the tree, from the first on.
    pub published: usize,
    parent: NodeId,
    generation: u64,
    /// Whether the sequence publishes nothing more.
    has_ended: bool,
}

impl Cursor {
    /// The node of the last published block; the root's if there is none.
    pub(crate) fn node(self) -> NodeId {
        self.parent
    }

    /// The node of the last published block, or the root, and the reset that it comes after: numbers of nodes are used
    /// again.
    pub fn place(self) -> (NodeId, u64) {
        (self.parent, self.generation)
    }
}

/// What a lookup would find: the numbers that an admission is decided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Blocks of the prompt that need not be computed.
    pub hits: usize,
    /// Blocks that would be pinned and that nobody uses now, over all groups: so many fewer can be evicted.
    pub idle_hits: usize,
    /// Whether the hit would keep a checkpoint of states that could be evicted now.
    pub idle_checkpoint: bool,
}

/// How the tree hashes.
#[derive(Clone, Copy, Debug)]
pub struct HashOptions {
    /// Any number; the same tokens hash differently under another one.
    pub seed: u64,
    /// The bits of a hash that are used. Fewer bits make collisions, which must change nothing but time.
    pub mask: u64,
}

impl Default for HashOptions {
    fn default() -> Self {
        Self { seed: 0, mask: u64::MAX }
    }
}

/// What a cache is told once.
#[derive(Clone, Copy, Debug)]
pub struct CacheOptions {
    /// How the tree hashes.
    pub hash: HashOptions,
    /// Which idle blocks make room first, among those that nothing else tells apart.
    pub eviction: &'static dyn EvictionPolicy,
    /// The share of the pool, from 0 to 1, that a tenant's own idle blocks may fill before they go first; 1: any.
    pub tenant_share: f64,
    /// Blocks that may be pinned.
    pub pin_quota: PinQuota,
    /// Events that wait to be taken; 0: none are kept.
    pub max_events: usize,
    /// Whether misses tell that a block is cached in another scope.
    pub tells_other_scopes: bool,
    /// The fewest first tokens of a block that are worth a copy of it; 0: none are.
    pub partial_reuse: usize,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self {
            hash: HashOptions::default(),
            eviction: &Lru,
            tenant_share: 1.0,
            pin_quota: PinQuota::default(),
            max_events: 0,
            tells_other_scopes: false,
            partial_reuse: 0,
        }
    }
}

/// How many of a hit's last blocks each group pins: those that the next token reads. Where no group keeps all positions,
/// at least one: the next block hangs below it.
fn pins_back(groups: &[LayerGroup], size: BlockSize) -> SmallVec<[usize; 1]> {
    let least = usize::from(!groups.iter().any(|group| group.is_full()));
    groups.iter().map(|group| group.reads_back(FAR / size.tokens(), size).max(least)).collect()
}

/// A position that every window ends before.
const FAR: usize = 1 << 48;

/// A pool with a prefix tree over it.
#[derive(Debug)]
pub struct PrefixCache {
    pool: BlockPool,
    groups: SmallVec<[LayerGroup; 1]>,
    /// Of each group: how many of a hit's last blocks it pins.
    pins_back: SmallVec<[usize; 1]>,
    /// The groups that pin some only.
    windows: SmallVec<[usize; 1]>,
    /// Whether a group keeps all positions, so that a sequence holds a block of every node above it.
    keeps_all: bool,
    tree: Tree,
    /// The node of each published block.
    node_of: Vec<NodeId>,
    order: EvictionOrder,
    scopes: Scopes,
    tracked: Tracked,
    pins: Pins,
    evicted_keys: EvictedKeys,
    all_scopes: Option<Box<AllScopes>>,
    events: Option<Box<EventLog>>,
    /// Of models with states.
    checkpoints: Option<Box<Checkpoints>>,
    /// For partial hits.
    heads: Option<Box<Heads>>,
    /// Whether the policy looks at hits.
    counts_hits: bool,
    /// The nodes of the lookup at hand.
    path: Vec<NodeId>,
    /// How many of them every group can serve.
    hits: usize,
    returned: Vec<BlockId>,
    /// The pool's resets.
    generation: u64,
    evictions: u64,
}

impl PrefixCache {
    /// A cache over a pool that nobody else publishes in, for a model of one group of full attention.
    pub fn new(pool: BlockPool, options: HashOptions) -> Self {
        Self::with_groups(pool, &[LayerGroup::Full], options)
    }

    /// A cache over a pool that nobody else publishes in, which evicts what was used least recently.
    pub fn with_groups(pool: BlockPool, groups: &[LayerGroup], hash: HashOptions) -> Self {
        let key_size = pool.block_size();
        Self::build(pool, groups, key_size, CacheOptions { hash, ..CacheOptions::default() })
    }

    /// A cache over a pool that nobody else publishes in.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if the policy would not keep leaves first, or a share is out of its range;
    /// [`Error::OutOfMemory`].
    pub fn with_options(pool: BlockPool, groups: &[LayerGroup], options: CacheOptions) -> Result<Self> {
        let key_size = pool.block_size();
        Self::checked(pool, groups, key_size, options)
    }

    /// As [`with_options`](Self::with_options), for symbolic blocks: a block's first token stands for all its tokens, and
    /// only that one is looked at. For whoever knows what is equal without having the tokens, as a replay of a trace does.
    ///
    /// # Errors
    /// Those of `with_options`.
    pub fn symbolic(pool: BlockPool, groups: &[LayerGroup], options: CacheOptions) -> Result<Self> {
        Self::checked(pool, groups, BlockSize::ONE, options)
    }

    fn checked(
        pool: BlockPool,
        groups: &[LayerGroup],
        key_size: BlockSize,
        options: CacheOptions,
    ) -> Result<Self> {
        check_policy(options.eviction)?;
        if !(0.0..=1.0).contains(&options.tenant_share) {
            return Err(Error::config("tenant_cache_share", options.tenant_share, "0 to 1"));
        }
        // What the tree, the eviction order and the lists of blocks take; then the events.
        let (num_blocks, tokens) = (pool.num_blocks(), size_of::<TokenId>() * key_size.tokens());
        check_memory("a prefix cache over this many blocks", num_blocks, 64 + tokens)?;
        check_memory(
            "a log of max_kv_events",
            options.max_events,
            80 + size_of::<TokenId>() * pool.block_size().tokens(),
        )?;
        Ok(Self::build(pool, groups, key_size, options))
    }

    fn build(pool: BlockPool, groups: &[LayerGroup], key_size: BlockSize, options: CacheOptions) -> Self {
        let num_blocks = pool.num_blocks();
        let HashOptions { seed, mask } = options.hash;
        Self {
            groups: groups.into(),
            pins_back: pins_back(groups, pool.block_size()),
            windows: (0..groups.len()).filter(|&group| !groups[group].is_full()).collect(),
            keeps_all: groups.iter().any(|group| group.is_full()),
            tree: Tree::new(num_blocks, groups.len(), key_size, seed, mask),
            node_of: vec![NodeId::ROOT; num_blocks],
            order: EvictionOrder::new(num_blocks, options.eviction),
            scopes: Scopes::default(),
            tracked: Tracked::new(num_blocks, options.tenant_share),
            pins: Pins::new(options.pin_quota),
            evicted_keys: EvictedKeys::new(num_blocks),
            all_scopes: options.tells_other_scopes.then(Box::default),
            events: (options.max_events > 0)
                .then(|| Box::new(EventLog::new(pool.block_size(), options.max_events))),
            checkpoints: None,
            // Of symbolic blocks there is only a whole.
            heads: (options.partial_reuse > 0 && key_size == pool.block_size())
                .then(|| Box::new(Heads::new(options.partial_reuse))),
            counts_hits: options.eviction.lane(u8::MAX) > options.eviction.lane(0),
            path: Vec::new(),
            hits: 0,
            returned: Vec::with_capacity(num_blocks),
            generation: pool.num_resets(),
            evictions: 0,
            pool,
        }
    }

    /// The pool below.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The layer groups.
    pub fn groups(&self) -> &[LayerGroup] {
        &self.groups
    }

    /// The number of a scope. Give it back with [`leave_scope`](Self::leave_scope).
    pub fn enter_scope(&mut self, bytes: &[u8]) -> ScopeId {
        self.scopes.enter(bytes)
    }

    /// The number of the scope of a prompt that holds media, by rising offset. Give it back like any other.
    pub fn enter_scope_with_media(&mut self, bytes: &[u8], media: &[Media<'_>]) -> ScopeId {
        self.scopes.enter_with_media(bytes, media, self.pool.block_size())
    }

    /// Ends one use of a scope's number. Its published blocks stay findable for whoever enters the same scope.
    pub fn leave_scope(&mut self, scope: ScopeId) {
        self.scopes.leave(scope);
    }

    /// The first block in which two sequences bind different scopes or media, and how those compare.
    pub(crate) fn compare_bindings(&self, first: ScopeId, second: ScopeId) -> (usize, Ordering) {
        self.scopes.compare(first, second)
    }

    /// What a sequence's block binds.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn binding(&self, scope: ScopeId, index: usize) -> ScopeId {
        self.scopes.of_block(scope, index).0
    }

    /// Scopes in use: by whoever entered them, or by published blocks.
    pub fn num_scopes(&self) -> usize {
        self.scopes.len()
    }

    /// Blocks that can be had: free ones, and idle ones that can be evicted.
    pub fn available(&mut self) -> usize {
        self.adopt_returned();
        self.pool.num_free() + self.order.len()
    }

    /// How many blocks were evicted.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// How many blocks are in which state, in constant time.
    pub fn counts(&mut self) -> BlockCounts {
        self.adopt_returned();
        let (free, cached, total) = (self.pool.num_free(), self.order.len(), self.pool.num_blocks() - 1);
        BlockCounts { free, cached, active: total - free - cached, total }
    }

    /// The longest run of published blocks, at most `max_blocks`, that `tokens` begin with and that every group can serve.
    /// Changes nothing that others see.
    pub fn probe(&mut self, scope: ScopeId, tokens: &[TokenId], max_blocks: usize) -> Probe {
        self.adopt_returned();
        let hits = self.find_path(scope, tokens, max_blocks);
        let mut idle_hits = 0;
        for index in 0..self.groups.len() {
            for &node in &self.path[self.first_pinned(index, hits)..hits] {
                idle_hits += usize::from(self.order.contains(self.tree.blocks(node)[index]));
            }
        }
        let last = hits.checked_sub(1).map(|last| self.path[last]);
        let checkpoint = self.checkpoints.as_ref().zip(last);
        let idle_checkpoint = checkpoint.is_some_and(|(checkpoints, node)| checkpoints.is_idle_at(node));
        Probe { hits, idle_hits, idle_checkpoint }
    }

    /// Starts a sequence's tables with the longest run of published blocks, at most `max_blocks`, and pins them in the
    /// same step. Of a group with a window only those are pinned that the next token reads.
    pub fn share(&mut self, scope: ScopeId, tokens: &[TokenId], max_blocks: usize) -> (Tables, Cursor) {
        self.adopt_returned();
        self.find_path(scope, tokens, max_blocks);
        self.share_found()
    }

    /// The same with what the lookup at hand has found: nothing was published or evicted since.
    pub(crate) fn share_found(&mut self) -> (Tables, Cursor) {
        let hits = self.hits;
        if self.counts_hits {
            self.path[..hits].iter().for_each(|&node| self.tree.count_hit(node));
        }
        let mut tables = Tables::new();
        for index in 0..self.groups.len() {
            let first = self.first_pinned(index, hits);
            let mut table = BlockTable::starting_at(&self.pool, first);
            for place in first..hits {
                let block = self.tree.blocks(self.path[place])[index];
                self.pin(block);
                table.push_retained(block);
            }
            tables.push(table);
        }
        let parent = self.found();
        (tables, Cursor { published: hits, parent, generation: self.generation, has_ended: false })
    }

    /// The node at which the lookup at hand ends.
    fn found(&self) -> NodeId {
        self.hits.checked_sub(1).map_or(NodeId::ROOT, |last| self.path[last])
    }

    /// Takes `count` new blocks for a table, evicting idle ones where too few are free, or takes none.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`](crate::Error::OutOfBlocks) with the numbers.
    pub fn extend(&mut self, table: &mut BlockTable, count: usize) -> Result<()> {
        self.make_room(count)?;
        table.extend(count)
    }

    /// Gives a table a block of its own in the place of a shared one.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`](crate::Error::OutOfBlocks) if no block is free and none can be evicted.
    pub fn copy_on_write(&mut self, table: &mut BlockTable, index: usize) -> Result<BlockCopy> {
        self.make_room(1)?;
        table.copy_on_write(index)
    }

    /// Where a sequence without published blocks stands that holds nothing computed before the last reset.
    pub fn root(&self) -> Cursor {
        self.root_after(self.generation)
    }

    /// The same of a sequence that took its first block after so many resets: it publishes nothing if there was one since.
    pub fn root_after(&self, num_resets: u64) -> Cursor {
        Cursor { published: 0, parent: NodeId::ROOT, generation: num_resets, has_ended: false }
    }

    /// Where a sequence is of which nothing is published any more.
    pub(crate) fn nowhere(&self) -> Cursor {
        Cursor { has_ended: true, ..self.root() }
    }

    /// How many of a sequence's first blocks may be given back when they left the window. Where no group keeps all
    /// positions, its last published block must stay: the next one hangs below it.
    pub fn droppable(&self, cursor: Cursor) -> usize {
        let is_needed = !self.keeps_all && self.goes_on(cursor);
        if is_needed { cursor.published.saturating_sub(1) } else { usize::MAX }
    }

    /// Has a sequence stand nowhere once it publishes no more and holds nothing of its last published block: that block's node
    /// may go, and another one get its number.
    pub fn leave_behind(&self, cursor: &mut Cursor, tables: &[BlockTable]) {
        if cursor.has_ended && tables.iter().all(|table| table.num_dropped() >= cursor.published) {
            *cursor = self.nowhere();
        }
    }

    /// Notes that a sequence goes on behind what it found, with what it held where it had left off. It publishes nothing
    /// more if that was computed before a reset; nor where no group keeps all positions: the blocks between are gone.
    pub fn come_back(&self, cursor: &mut Cursor, left_off: Cursor) {
        if !self.keeps_all || !self.goes_on(left_off) {
            cursor.has_ended = true;
        }
    }

    /// Whether the last block that a sequence shares or has published is one that a step in flight has yet to compute.
    pub(crate) fn awaits_step(&self, cursor: Cursor) -> bool {
        cursor.generation == self.generation && !self.tree.is_computed(cursor.parent)
    }

    /// Whether a sequence may still publish.
    pub(crate) fn goes_on(&self, cursor: Cursor) -> bool {
        cursor.generation == self.generation && !cursor.has_ended
    }

    /// Makes every block unfindable: idle ones are free now, used ones as soon as their sequences end. Pins end.
    pub fn reset(&mut self) {
        self.pins.clear();
        self.adopt_returned();
        // List by list: one node after the other would look each up in a table far larger than a processor's caches.
        self.order.clear();
        self.pool.unpublish(self.tree.all_blocks());
        self.tree.scopes().for_each(|scope| self.scopes.leave(scope));
        self.tree.clear();
        self.tracked.clear();
        self.checkpoints.iter_mut().for_each(|checkpoints| checkpoints.clear());
        self.heads.iter_mut().for_each(|heads| heads.clear());
        self.all_scopes.iter_mut().for_each(|scopes| scopes.clear());
        self.evicted_keys.clear();
        self.path.clear();
        self.hits = 0;
        self.pool.note_reset();
        self.generation = self.pool.num_resets();
        self.log_cleared();
    }

    /// Fills `path` with the nodes that `tokens` begin with. Returns how many of them every group can serve.
    fn find_path(&mut self, scope: ScopeId, tokens: &[TokenId], max_blocks: usize) -> usize {
        let size = self.pool.block_size();
        self.path.clear();
        // The blocks that each window's group has without a gap up to the node at hand; the others have all.
        let mut runs: SmallVec<[usize; 8]> = SmallVec::from_elem(0, self.windows.len());
        let (mut way, mut hits) = (Descent::new(), 0);
        for run in tokens.chunks_exact(size.tokens()).take(max_blocks) {
            let (own, binding) = self.scopes.of_block(scope, self.path.len());
            let Some(node) = self.tree.descend(&mut way, own, binding, run) else { break };
            self.path.push(node);
            let mut is_served = self.checkpoints.as_ref().is_none_or(|states| states.at(node).is_some());
            for (&group, run) in self.windows.iter().zip(&mut runs) {
                let block = self.tree.blocks(node)[group];
                *run = if block == BlockId::NULL { 0 } else { *run + 1 };
                is_served &= *run >= self.pins_back[group].min(self.path.len());
            }
            if is_served {
                hits = self.path.len();
            }
        }
        self.hits = hits;
        hits
    }

    /// The first of `hits` blocks that a group pins.
    fn first_pinned(&self, group: usize, hits: usize) -> usize {
        hits - self.pins_back[group].min(hits)
    }

    /// The blocks that [`share`](Self::share) would pin, over all groups.
    pub(crate) fn hit_blocks(
        &mut self,
        scope: ScopeId,
        tokens: &[TokenId],
        max_blocks: usize,
    ) -> impl Iterator<Item = BlockId> {
        let hits = self.find_path(scope, tokens, max_blocks);
        let cache = &*self;
        (0..cache.groups.len()).flat_map(move |index| {
            let nodes = &cache.path[cache.first_pinned(index, hits)..hits];
            nodes.iter().map(move |&node| cache.tree.blocks(node)[index])
        })
    }

    fn pin(&mut self, block: BlockId) {
        self.pool.retain(block);
        if self.order.contains(block) {
            self.order.remove(block);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod session_tests;
#[cfg(all(test, not(loom)))]
mod tests;
