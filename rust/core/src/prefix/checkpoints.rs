//! Checkpoints of states at the tree's nodes: with states, a hit lands only on a node that has one.
//!
//! A node has at most one checkpoint and loses it alone, when a slot is needed for a later one or for a sequence that
//! starts, or when the node itself goes. Its blocks stay: who computes on from an earlier checkpoint up to the node goes
//! over to them, and may leave a new one.

use super::tree::NodeId;
use super::{Cursor, PrefixCache};
use crate::error::{Error, Result};
use crate::states::{Home, StateArena, StateCounts, StateSlot};

/// The arena, and which node has which of its checkpoints.
#[derive(Debug)]
pub(super) struct Checkpoints {
    arena: StateArena,
    /// Each node's checkpoint; slot 0 where there is none.
    of_node: Vec<StateSlot>,
    /// Each checkpoint's node.
    node_of: Vec<NodeId>,
    evictions: u64,
}

impl Checkpoints {
    fn new(num_slots: usize, num_nodes: usize) -> Self {
        Self {
            arena: StateArena::new(num_slots),
            of_node: Vec::with_capacity(num_nodes),
            node_of: vec![NodeId::ROOT; num_slots],
            evictions: 0,
        }
    }

    /// The checkpoint of a node, if it has one.
    pub(super) fn at(&self, node: NodeId) -> Option<StateSlot> {
        self.of_node.get(node.index()).copied().filter(|&slot| slot != StateSlot::INITIAL)
    }

    /// Whether a node has a checkpoint that nobody reads.
    pub(super) fn is_idle_at(&self, node: NodeId) -> bool {
        self.at(node).is_some_and(|slot| self.arena.is_idle(slot))
    }

    /// A node leaves the tree.
    pub(super) fn forget(&mut self, node: NodeId) {
        if let Some(slot) = self.at(node) {
            self.of_node[node.index()] = StateSlot::INITIAL;
            self.arena.drop_checkpoint(slot);
        }
    }

    /// All nodes leave the tree.
    pub(super) fn clear(&mut self) {
        for slot in self.of_node.drain(..).filter(|&slot| slot != StateSlot::INITIAL) {
            self.arena.drop_checkpoint(slot);
        }
    }

    fn attach(&mut self, node: NodeId, slot: StateSlot) {
        if node.index() >= self.of_node.len() {
            self.of_node.resize(node.index() + 1, StateSlot::INITIAL);
        }
        self.of_node[node.index()] = slot;
        self.node_of[slot.index()] = node;
        self.arena.keep(slot);
    }

    /// Takes a slot for a sequence, or for a checkpoint; one that held a checkpoint is not found any more.
    fn take(&mut self, is_working: bool) -> Option<StateSlot> {
        let taken = if is_working { self.arena.take() } else { self.arena.begin_checkpoint() }?;
        if taken.was_checkpoint {
            self.of_node[self.node_of[taken.slot.index()].index()] = StateSlot::INITIAL;
            self.evictions += 1;
        }
        Some(taken.slot)
    }

    /// Whether nodes and checkpoints name each other, and all of them.
    pub(super) fn check(&self, mut lives: impl FnMut(NodeId) -> bool) -> Result<()> {
        let broken = |detail: String| Err(Error::broken("I17 states", detail));
        let mut attached = 0;
        for (number, &slot) in self.of_node.iter().enumerate().filter(|(_, slot)| slot.get() > 0) {
            let node = self.node_of[slot.index()];
            attached += 1;
            if node.index() != number || !lives(node) || !self.arena.is_checkpoint(slot) {
                return broken(format!("state slot {} is no checkpoint of node {number}", slot.get()));
            }
        }
        let num_slots = self.node_of.len() as u32;
        let found = (1..num_slots).filter(|&slot| self.arena.is_checkpoint(StateSlot::new(slot))).count();
        if found != attached {
            return broken(format!("{found} checkpoints, {attached} of them at nodes"));
        }
        Ok(())
    }
}

impl PrefixCache {
    /// Has hits land on checkpoints only, which live in `num_slots` slots (slot 0 included) along with the states of the
    /// sequences that run. Comes before the first block is published.
    pub fn keep_states(&mut self, num_slots: usize) {
        let num_nodes = self.pool.num_blocks();
        self.checkpoints = Some(Box::new(Checkpoints::new(num_slots, num_nodes)));
    }

    /// Whether sequences have states.
    pub fn has_states(&self) -> bool {
        self.checkpoints.is_some()
    }

    /// The slots of the states, if sequences have some.
    pub fn state_arena(&self) -> Option<&StateArena> {
        self.checkpoints.as_ref().map(|checkpoints| &checkpoints.arena)
    }

    /// How many slots of states are in which state; none without states.
    pub fn state_counts(&self) -> StateCounts {
        self.state_arena().map(StateArena::counts).unwrap_or_default()
    }

    /// Checkpoints that made room for others, or for sequences.
    pub fn checkpoint_evictions(&self) -> u64 {
        self.checkpoints.as_ref().map_or(0, |checkpoints| checkpoints.evictions)
    }

    /// The blocks of the lookup at hand that are cached, whether or not a checkpoint serves them. Comes right after the
    /// lookup: [`share`](Self::share) or [`probe`](Self::probe).
    pub fn num_known(&self) -> usize {
        self.path.len()
    }

    /// Takes the checkpoint that a hit landed on, to be copied by the step being planned, or slot 0 for a sequence that
    /// found nothing. It is kept until [`end_read`](Self::end_read).
    pub fn begin_read(&mut self, cursor: Cursor) -> StateSlot {
        let checkpoints = self.states();
        let slot = checkpoints.at(cursor.parent);
        slot.inspect(|&slot| checkpoints.arena.begin_read(slot)).unwrap_or(StateSlot::INITIAL)
    }

    /// The step that copied a checkpoint is over.
    pub fn end_read(&mut self, slot: StateSlot) {
        if slot != StateSlot::INITIAL {
            self.states().arena.end_read(slot);
        }
    }

    /// Takes a slot for a sequence that starts. None if all are worked in, or read.
    pub fn take_working(&mut self) -> Option<StateSlot> {
        self.states().take(true)
    }

    /// Has a sequence hold the checkpoint at its last published block, if there is one: it goes after those that nobody
    /// holds. `before` is what it held until now.
    pub fn hold_checkpoint(&mut self, cursor: Cursor, before: Option<Home>) -> Option<Home> {
        let checkpoints = self.states();
        let home = checkpoints.at(cursor.parent).map(|slot| checkpoints.arena.hold(slot));
        before.into_iter().for_each(|before| checkpoints.arena.release(before));
        home
    }

    /// A sequence that held a checkpoint is over.
    pub fn release_checkpoint(&mut self, home: Home) {
        self.states().arena.release(home);
    }

    /// Takes a slot that the step being planned fills with the states at the end of the sequence's next block. None if
    /// all are worked in or read, or if the sequence publishes no more.
    pub fn begin_checkpoint(&mut self, cursor: Cursor) -> Option<StateSlot> {
        if self.goes_on(cursor) { self.states().take(false) } else { None }
    }

    /// The states at the end of a sequence's first `num_blocks` blocks were copied to `slot`: the node there has them, if
    /// those blocks are published and it has none yet.
    pub fn finish_checkpoint(&mut self, slot: StateSlot, cursor: Cursor, num_blocks: usize) {
        let is_there = self.goes_on(cursor) && cursor.published == num_blocks && num_blocks > 0;
        let checkpoints = self.states();
        if is_there && checkpoints.at(cursor.parent).is_none() {
            checkpoints.attach(cursor.parent, slot);
        } else {
            checkpoints.arena.give_back(slot);
        }
    }

    /// Gives back a slot of a sequence that stops, or of a checkpoint whose step failed.
    pub fn give_back_state(&mut self, slot: StateSlot) {
        self.states().arena.give_back(slot);
    }

    fn states(&mut self) -> &mut Checkpoints {
        self.checkpoints.as_mut().expect("only sequences with states have slots")
    }
}
