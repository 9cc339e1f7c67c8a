//! How blocks become findable, and how that is taken back.

use std::ops::Range;

use super::scope::ScopeId;
use super::tree::{Fingerprint, Key, NodeId};
use super::{Cursor, PrefixCache};
use crate::table::BlockTable;
use crate::units::{BlockId, TokenId};

/// A node whose blocks the step being planned will fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announced {
    /// The node.
    pub node: NodeId,
    /// What it hangs below.
    pub parent: NodeId,
    generation: u64,
}

impl Announced {
    /// The node, and the reset that it comes after.
    pub fn place(self) -> (NodeId, u64) {
        (self.node, self.generation)
    }

    /// The same of what it hangs below.
    pub fn parent_place(self) -> (NodeId, u64) {
        (self.parent, self.generation)
    }
}

/// How far publishing has come.
pub(crate) struct Published {
    /// Whether a table went over to published blocks.
    pub(crate) is_folded: bool,
    /// The node at which it stopped, since a later step is to fill it.
    pub(crate) waits_for: Option<NodeId>,
}

impl PrefixCache {
    /// Makes a sequence's full blocks findable up to the first `num_tokens` of `tokens`. Where an equal block is published
    /// already, the table goes over to that one and gives its own back, unless a fork holds that too: then publishing goes on
    /// in a later call, when the fork has let it go, or ends, if no group keeps all positions. Where others have announced a
    /// block it goes on once they have published that. Returns whether a table changed.
    pub fn publish(
        &mut self,
        tables: &mut [BlockTable],
        cursor: &mut Cursor,
        scope: ScopeId,
        tokens: &[TokenId],
        num_tokens: usize,
    ) -> bool {
        let Published { is_folded, .. } =
            self.publish_until(tables, cursor, scope, tokens, num_tokens, |_| true);
        self.end_where_stuck(cursor, scope, tokens, num_tokens, usize::MAX);
        is_folded
    }

    /// The same, up to the first node that a later step has announced: whether that step computes its blocks is not known
    /// yet. The next call tries again.
    pub(crate) fn publish_until(
        &mut self,
        tables: &mut [BlockTable],
        cursor: &mut Cursor,
        scope: ScopeId,
        tokens: &[TokenId],
        num_tokens: usize,
        is_later: impl Fn((NodeId, u64)) -> bool,
    ) -> Published {
        let size = self.pool.block_size();
        let (mut is_folded, mut waits_for) = (false, None);
        while self.goes_on(*cursor)
            && cursor.published < size.full_blocks(num_tokens)
            && self.tree.is_computed(cursor.parent)
        {
            let start = cursor.published * size.tokens();
            let run = &tokens[start..start + size.tokens()];
            let (own, binding) = self.scopes.of_block(scope, cursor.published);
            let key = Key { parent: cursor.parent, scope: own, binding, tokens: run };
            let fingerprint = self.tree.fingerprint_of(key);
            let found = self.tree.find_at(fingerprint, key);
            waits_for = found.filter(|&node| {
                !self.tree.is_computed(node)
                    && !self.has_announced(tables, node, cursor.published)
                    && is_later((node, self.generation))
            });
            if waits_for.is_some() {
                break;
            }
            if found.is_some_and(|node| !self.folds_for(node, tables, cursor.published, 1)) {
                break;
            }
            let Some(node) = found.or_else(|| self.hang(fingerprint, key)) else {
                cursor.has_ended = true;
                break;
            };
            for (group, table) in tables.iter_mut().enumerate() {
                is_folded |= self.settle(node, group, table, cursor.published);
            }
            if self.tree.set_computed(node) {
                self.log_stored(scope, node);
                self.list_head(node);
            }
            cursor.parent = node;
            cursor.published += 1;
        }
        Published { is_folded, waits_for }
    }

    /// Gives nodes that a step in flight is to fill, one below the other, the blocks of a sequence whose `tokens` are computed,
    /// if these fill them all and nobody shares what was announced. Who announced them goes over to these blocks when it
    /// publishes its own. Returns whether that was done.
    pub(crate) fn take_over(
        &mut self,
        nodes: &[NodeId],
        tables: &[BlockTable],
        cursor: Cursor,
        scope: ScopeId,
        tokens: &[TokenId],
    ) -> bool {
        let is_shared = |&block: &BlockId| block != BlockId::NULL && self.pool.references(block) > 1;
        let mut next = cursor;
        for &node in nodes {
            if self.next_node(next, scope, tokens) != Some(node)
                || self.tree.blocks(node).iter().any(is_shared)
            {
                return false;
            }
            (next.parent, next.published) = (node, next.published + 1);
        }
        for (index, &node) in (cursor.published..).zip(nodes) {
            for (group, table) in tables.iter().enumerate() {
                self.detach(node, group);
                let own = table.blocks()[index];
                if own != BlockId::NULL {
                    self.attach(node, group, own);
                }
            }
        }
        true
    }

    /// Makes blocks findable that the step being planned will fill with the tokens `filled`, so that others planned in it can
    /// share them. Those before are another step's: where one of them is not findable, nothing can hang below it.
    ///
    /// Passes over those that the same table has announced before, and stops at the first that others have published;
    /// hands each new one to `announced`. They are confirmed by
    /// [`publish`](Self::publish), or taken back by [`withdraw`](Self::withdraw), the one announced last first.
    pub fn announce(
        &mut self,
        tables: &[BlockTable],
        cursor: Cursor,
        scope: ScopeId,
        tokens: &[TokenId],
        filled: Range<usize>,
        mut announced: impl FnMut(Announced),
    ) {
        if !self.goes_on(cursor) {
            return;
        }
        let size = self.pool.block_size();
        let mut parent = cursor.parent;
        let mut hung = 0..0;
        for index in cursor.published..size.full_blocks(filled.end) {
            let run = &tokens[index * size.tokens()..(index + 1) * size.tokens()];
            let (own, binding) = self.scopes.of_block(scope, index);
            let key = Key { parent, scope: own, binding, tokens: run };
            let fingerprint = self.tree.fingerprint_of(key);
            if let Some(node) = self.tree.find_at(fingerprint, key) {
                if !self.has_announced(tables, node, index) {
                    return;
                }
                parent = node;
                continue;
            }
            if (index + 1) * size.tokens() <= filled.start {
                return;
            }
            let Some(node) = self.hang(fingerprint, key) else { break };
            for (group, table) in tables.iter().enumerate() {
                self.hold(node, group, table.blocks()[index]);
            }
            hung = if hung.is_empty() { index..index + 1 } else { hung.start..index + 1 };
            announced(Announced { node, parent, generation: self.generation });
            parent = node;
        }
        // All at once: an atomic operation waits for what was written to the tree before it.
        for table in tables {
            let blocks = table.blocks()[hung.clone()].iter().filter(|&&block| block != BlockId::NULL);
            blocks.for_each(|&block| self.pool.publish(block));
        }
    }

    /// Whether the blocks of a node that is not computed yet are these tables' own.
    fn has_announced(&self, tables: &[BlockTable], node: NodeId, index: usize) -> bool {
        let mut blocks = self.tree.blocks(node).iter().zip(tables);
        !self.tree.is_computed(node) && blocks.all(|(&block, table)| block == table.blocks()[index])
    }

    /// Takes back a node whose content was announced and not computed. Nothing hangs below it.
    pub fn withdraw(&mut self, announced: Announced) {
        if announced.generation == self.generation {
            self.detach_all(announced.node);
            self.prune(announced.node);
        }
    }

    /// Whether nobody but `num_holders` tables holds the blocks that they give up for the published ones: what a fork holds
    /// besides would hang below a block that the fork does not hold.
    pub(crate) fn folds_for(
        &self,
        node: NodeId,
        tables: &[BlockTable],
        index: usize,
        num_holders: usize,
    ) -> bool {
        self.tree.blocks(node).iter().zip(tables).all(|(&published, table)| {
            let own = table.blocks()[index];
            own == BlockId::NULL
                || published == BlockId::NULL
                || own == published
                || self.pool.references(own) <= num_holders
        })
    }

    /// Has a sequence publish nothing more where no group keeps all positions, and what it has computed would be kept for as
    /// long as it waits: its next block equals one that is published and a fork holds it too, or more than `most_late` of its
    /// tokens wait for others to compute theirs.
    pub(crate) fn end_where_stuck(
        &self,
        cursor: &mut Cursor,
        scope: ScopeId,
        tokens: &[TokenId],
        num_tokens: usize,
        most_late: usize,
    ) {
        let size = self.pool.block_size();
        if self.keeps_all || cursor.published >= size.full_blocks(num_tokens) {
            return;
        }
        cursor.has_ended |= num_tokens - cursor.published * size.tokens() > most_late
            || self.computed_twin(*cursor, scope, tokens).is_some();
    }

    /// The node of a block that equals a sequence's next one to publish.
    fn next_node(&self, cursor: Cursor, scope: ScopeId, tokens: &[TokenId]) -> Option<NodeId> {
        let size = self.pool.block_size();
        let start = cursor.published * size.tokens();
        let tokens = tokens.get(start..start + size.tokens()).filter(|_| self.goes_on(cursor))?;
        let (own, binding) = self.scopes.of_block(scope, cursor.published);
        self.tree.find(Key { parent: cursor.parent, scope: own, binding, tokens })
    }

    /// The same of a block that is computed.
    pub(crate) fn computed_twin(&self, cursor: Cursor, scope: ScopeId, tokens: &[TokenId]) -> Option<NodeId> {
        self.next_node(cursor, scope, tokens).filter(|&node| self.tree.is_computed(node))
    }

    /// Has tables go over to a published block of theirs.
    pub(crate) fn go_over(&mut self, node: NodeId, tables: &mut [BlockTable], index: usize) {
        for (group, table) in tables.iter_mut().enumerate() {
            self.settle(node, group, table, index);
        }
    }

    /// Gives a node a table's block, or the table the node's. Returns whether the table changed.
    fn settle(&mut self, node: NodeId, group: usize, table: &mut BlockTable, index: usize) -> bool {
        let (own, published) = (table.blocks()[index], self.tree.blocks(node)[group]);
        if own == BlockId::NULL || own == published {
            return false;
        }
        if published == BlockId::NULL {
            self.attach(node, group, own);
            return false;
        }
        self.pin(published);
        table.replace_retained(index, published);
        true
    }

    /// Adds a node without blocks, if there may be one more.
    fn hang(&mut self, fingerprint: Fingerprint, key: Key<'_>) -> Option<NodeId> {
        let node = self.tree.insert(fingerprint, key)?;
        if key.scope != ScopeId::UNBOUND {
            self.scopes.join(key.scope);
        }
        self.track_added(node);
        self.note_added(node, key);
        Some(node)
    }

    fn attach(&mut self, node: NodeId, group: usize, block: BlockId) {
        self.hold(node, group, block);
        self.pool.publish(block);
    }

    /// Names a block at a node. The null block stands for none.
    fn hold(&mut self, node: NodeId, group: usize, block: BlockId) {
        self.tree.set_block(node, group, block);
        self.node_of[block.index()] = node;
    }

    /// Takes a node's block in one group out of the tree.
    pub(super) fn detach(&mut self, node: NodeId, group: usize) {
        let block = self.tree.blocks(node)[group];
        if block == BlockId::NULL {
            return;
        }
        if self.order.contains(block) {
            self.order.remove(block);
        }
        self.tree.set_block(node, group, BlockId::NULL);
        self.pool.unpublish([block]);
    }

    pub(super) fn detach_all(&mut self, node: NodeId) {
        (0..self.groups.len()).for_each(|group| self.detach(node, group));
    }

    /// Takes out a node that has no block and nothing below it, then those above it for which the same is true.
    pub(super) fn prune(&mut self, mut node: NodeId) {
        while node != NodeId::ROOT
            && self.tree.num_children(node) == 0
            && self.tree.blocks(node).iter().all(|&block| block == BlockId::NULL)
        {
            let parent = self.tree.parent(node);
            self.note_evicted(node);
            self.remove(node);
            node = parent;
        }
    }

    pub(super) fn remove(&mut self, node: NodeId) {
        let (parent, scope) = (self.tree.parent(node), self.tree.scope(node));
        self.note_removed(node);
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.forget(node);
        }
        self.log_removed(node);
        self.unlist_head(node);
        self.tree.remove(node);
        self.track_removed(node, parent);
        if scope != ScopeId::UNBOUND {
            self.scopes.leave(scope);
        }
    }
}
