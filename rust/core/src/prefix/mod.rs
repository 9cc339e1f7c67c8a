//! The prefix cache: published blocks that later sequences find again, and the order in which they make room.
//!
//! One owner changes it (`&mut self`); references to blocks are given back from any thread. A lookup and its pin are one
//! call, so that no hit grows stale. What is in the tree is exact: a hit has the same tokens in the same scope from
//! position 0 on, by comparison at each block.

mod eviction;
mod scope;
mod tree;

pub use scope::ScopeId;

use crate::error::{Error, Result};
use crate::pool::{BlockCounts, BlockPool};
use crate::sync::spin;
use crate::table::{BlockCopy, BlockTable};
use crate::units::{BlockId, TokenId};
use eviction::EvictionOrder;
use scope::Scopes;
use tree::{Key, Tree};

/// How far a sequence's blocks are published: where the next one hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Blocks of the table that are in the tree, from the first on.
    pub published: usize,
    parent: BlockId,
    generation: u64,
}

/// What a lookup would find: the numbers that an admission is decided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Blocks that would be shared.
    pub hits: usize,
    /// Those of them that nobody uses now: sharing them leaves that many fewer to evict.
    pub idle_hits: usize,
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

/// How often an eviction looks again for a block that another thread is giving back: far longer than that takes.
const MAX_WAITS: usize = 10_000_000;

/// A pool with a prefix tree over it.
#[derive(Debug)]
pub struct PrefixCache {
    pool: BlockPool,
    tree: Tree,
    order: EvictionOrder,
    scopes: Scopes,
    returned: Vec<BlockId>,
    generation: u64,
    evictions: u64,
}

impl PrefixCache {
    /// A cache over a pool that nobody else publishes in.
    pub fn new(pool: BlockPool, options: HashOptions) -> Self {
        let num_blocks = pool.num_blocks();
        Self {
            tree: Tree::new(num_blocks, pool.block_size(), options.seed, options.mask),
            order: EvictionOrder::new(num_blocks),
            scopes: Scopes::default(),
            returned: Vec::with_capacity(num_blocks),
            generation: 0,
            evictions: 0,
            pool,
        }
    }

    /// The pool below.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The number of a scope. Give it back with [`leave_scope`](Self::leave_scope).
    pub fn enter_scope(&mut self, bytes: &[u8]) -> ScopeId {
        self.scopes.enter(bytes)
    }

    /// Ends one use of a scope's number. Its published blocks stay findable for whoever enters the same scope.
    pub fn leave_scope(&mut self, scope: ScopeId) {
        self.scopes.leave(scope);
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

    /// How often a block was evicted.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// How many blocks are in which state, in constant time.
    pub fn counts(&mut self) -> BlockCounts {
        self.adopt_returned();
        let (free, cached, total) = (self.pool.num_free(), self.order.len(), self.pool.num_blocks() - 1);
        BlockCounts { free, cached, active: total - free - cached, total }
    }

    /// The longest run of published blocks, at most `max_blocks`, that `tokens` begin with. Changes nothing.
    pub fn probe(&mut self, scope: ScopeId, tokens: &[TokenId], max_blocks: usize) -> Probe {
        self.adopt_returned();
        let mut probe = Probe::default();
        for block in self.path(scope, tokens, max_blocks) {
            probe.hits += 1;
            probe.idle_hits += usize::from(self.order.contains(block));
        }
        probe
    }

    /// Starts a table with the longest run of published blocks, at most `max_blocks`, and pins them in the same step.
    pub fn share(&mut self, scope: ScopeId, tokens: &[TokenId], max_blocks: usize) -> (BlockTable, Cursor) {
        self.adopt_returned();
        let mut table = BlockTable::new(&self.pool);
        let mut cursor = self.root();
        let size = self.pool.block_size().tokens();
        for run in tokens.chunks_exact(size).take(max_blocks) {
            let Some(block) = self.tree.find(Key { parent: cursor.parent, scope, tokens: run }) else {
                break;
            };
            self.pin(block);
            table.push_retained(block);
            cursor.parent = block;
            cursor.published += 1;
        }
        (table, cursor)
    }

    /// Takes `count` new blocks for a table, evicting idle ones where too few are free, or takes none.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] with the numbers.
    pub fn extend(&mut self, table: &mut BlockTable, count: usize) -> Result<()> {
        self.make_room(count)?;
        table.extend(count)
    }

    /// Gives a table a block of its own in the place of a shared one.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] if no block is free and none can be evicted.
    pub fn copy_on_write(&mut self, table: &mut BlockTable, index: usize) -> Result<BlockCopy> {
        self.make_room(1)?;
        table.copy_on_write(index)
    }

    /// Where a sequence without published blocks stands.
    pub fn root(&self) -> Cursor {
        Cursor { published: 0, parent: BlockId::NULL, generation: self.generation }
    }

    /// Makes a table's full blocks findable up to the first `num_tokens` of `tokens`. Where an equal block is published
    /// already, the table goes over to that one and gives its own back. Returns whether the table changed.
    pub fn publish(
        &mut self,
        table: &mut BlockTable,
        cursor: &mut Cursor,
        scope: ScopeId,
        tokens: &[TokenId],
        num_tokens: usize,
    ) -> bool {
        let size = self.pool.block_size();
        let mut folded = false;
        while cursor.generation == self.generation && cursor.published < size.full_blocks(num_tokens) {
            let start = cursor.published * size.tokens();
            let key = Key { parent: cursor.parent, scope, tokens: &tokens[start..start + size.tokens()] };
            let own = table.blocks()[cursor.published];
            let block = self.tree.find(key).unwrap_or(own);
            if block != own {
                self.pin(block);
                table.replace_retained(cursor.published, block);
                folded = true;
            } else if !self.tree.contains(own) {
                self.hang(own, key);
            }
            cursor.parent = block;
            cursor.published += 1;
        }
        folded
    }

    /// Makes blocks findable that the step being planned will fill, so that others planned in it can share them.
    ///
    /// Stops at the first that is published already; hands each new one to `announced`. They are confirmed by
    /// [`publish`](Self::publish), or taken back by [`withdraw`](Self::withdraw), the one announced last first.
    pub fn announce(
        &mut self,
        table: &BlockTable,
        cursor: Cursor,
        scope: ScopeId,
        tokens: &[TokenId],
        num_tokens: usize,
        mut announced: impl FnMut(BlockId),
    ) {
        if cursor.generation != self.generation {
            return;
        }
        let size = self.pool.block_size();
        let mut parent = cursor.parent;
        for index in cursor.published..size.full_blocks(num_tokens) {
            let key =
                Key { parent, scope, tokens: &tokens[index * size.tokens()..(index + 1) * size.tokens()] };
            if self.tree.find(key).is_some() {
                return;
            }
            parent = table.blocks()[index];
            self.hang(parent, key);
            announced(parent);
        }
    }

    /// The published block that a published block follows; the null block for a first one.
    pub fn parent(&self, block: BlockId) -> Option<BlockId> {
        self.tree.parent(block)
    }

    /// Takes back a block whose content was announced and not computed. Nothing hangs below it.
    pub fn withdraw(&mut self, block: BlockId) {
        self.unhang(block);
    }

    /// Makes every block unfindable: idle ones are free now, used ones as soon as their sequences end.
    pub fn reset(&mut self) {
        self.adopt_returned();
        let published: Vec<BlockId> = self.tree.iter().collect();
        for block in published {
            self.unhang(block);
        }
        self.generation += 1;
    }

    /// Compares the tree, the eviction order and the pool with each other, block by block.
    ///
    /// # Errors
    /// [`Error::Broken`] with the first invariant that does not hold.
    pub fn check(&mut self) -> Result<()> {
        self.adopt_returned();
        let (fast, slow) = (self.counts(), self.pool.count());
        if fast != slow {
            return Err(Error::broken("I1 partition", format!("counted {slow:?}, accounted {fast:?}")));
        }
        let published =
            (1..self.pool.num_blocks() as u32).map(BlockId::new).filter(|&b| self.pool.is_published(b));
        for block in published.clone() {
            self.check_block(block)?;
        }
        if published.count() != self.tree.len() {
            return Err(Error::broken("I4 published", format!("the tree holds {} blocks", self.tree.len())));
        }
        self.check_eviction_order()
    }

    /// Whether each idle block stands before the one that it follows in its sequence: then the oldest is a leaf.
    fn check_eviction_order(&self) -> Result<()> {
        let mut seen = vec![false; self.pool.num_blocks()];
        for block in self.order.iter() {
            seen[block.index()] = true;
            if let Some(parent) = self.tree.parent(block).filter(|parent| seen[parent.index()]) {
                let detail = format!("block {} would go before {}", parent.get(), block.get());
                return Err(Error::broken("I5 evictable", detail));
            }
        }
        Ok(())
    }

    fn check_block(&self, block: BlockId) -> Result<()> {
        let id = block.get();
        let Some(parent) = self.tree.parent(block) else {
            return Err(Error::broken(
                "I4 published",
                format!("block {id} is published and not in the tree"),
            ));
        };
        if self.pool.is_idle(block) != self.order.contains(block) {
            return Err(Error::broken("I5 evictable", format!("block {id} is idle or listed, not both")));
        }
        if parent == BlockId::NULL {
            return Ok(());
        }
        if !self.tree.contains(parent) {
            return Err(Error::broken(
                "I6 chain",
                format!("block {id} hangs below {}, which is gone", parent.get()),
            ));
        }
        if self.pool.is_idle(parent) && !self.pool.is_idle(block) {
            return Err(Error::broken(
                "I6 chain",
                format!("block {id} is used, {} above it is not", parent.get()),
            ));
        }
        Ok(())
    }

    pub(crate) fn path(
        &self,
        scope: ScopeId,
        tokens: &[TokenId],
        max_blocks: usize,
    ) -> impl Iterator<Item = BlockId> {
        let size = self.pool.block_size().tokens();
        tokens.chunks_exact(size).take(max_blocks).scan(BlockId::NULL, move |parent, run| {
            *parent = self.tree.find(Key { parent: *parent, scope, tokens: run })?;
            Some(*parent)
        })
    }

    fn pin(&mut self, block: BlockId) {
        self.pool.retain(block);
        if self.order.contains(block) {
            self.order.remove(block);
        }
    }

    fn hang(&mut self, block: BlockId, key: Key<'_>) {
        if key.parent == BlockId::NULL {
            self.scopes.join(key.scope);
        }
        self.tree.insert(block, key);
        self.pool.publish(block);
    }

    fn unhang(&mut self, block: BlockId) {
        if self.order.contains(block) {
            self.order.remove(block);
        }
        if let Some(scope) = self.tree.remove(block) {
            self.scopes.leave(scope);
        }
        self.pool.unpublish(block);
    }

    fn make_room(&mut self, count: usize) -> Result<()> {
        let available = self.available();
        if count > available {
            return Err(Error::OutOfBlocks { needed: count, available });
        }
        let mut waits = 0;
        while self.pool.num_free() < count {
            let Some(oldest) = self.order.oldest() else { break };
            if self.tree.num_children(oldest) > 0 {
                // Another thread has given back a block below and is about to say so.
                waits += 1;
                if waits > MAX_WAITS {
                    let detail = format!("block {} is idle, and what hangs below it is not", oldest.get());
                    return Err(Error::broken("I6 chain", detail));
                }
                spin();
                self.adopt_returned();
                continue;
            }
            self.unhang(oldest);
            self.evictions += 1;
        }
        Ok(())
    }

    /// Lists the blocks whose last reference was given back meanwhile.
    fn adopt_returned(&mut self) {
        let mut returned = std::mem::take(&mut self.returned);
        self.pool.take_returned(&mut returned);
        for &block in &returned {
            if self.pool.is_idle(block) && !self.order.contains(block) {
                self.order.insert(block);
                self.lift_above(block);
            }
        }
        self.returned = returned;
    }

    /// Moves the listed blocks that a block follows behind it: they may have been given back by another thread, or
    /// earlier and used again meanwhile.
    fn lift_above(&mut self, block: BlockId) {
        let mut above = self.tree.parent(block);
        while let Some(parent) = above.filter(|&parent| self.order.contains(parent)) {
            self.order.remove(parent);
            self.order.insert(parent);
            above = self.tree.parent(parent);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
