//! KV events: which blocks became findable and which no longer are, for routers and tiers outside.
//!
//! Off unless asked for. Events wait in a ring of fixed size until they are taken; where nobody takes them in time the
//! oldest are dropped, and counted. Each has a sequence number, so that who misses some knows it and asks for a snapshot.

use std::collections::VecDeque;

use super::PrefixCache;
use super::content_key::{ContentKey, block_key, root_key};
use super::scope::ScopeId;
use super::tree::NodeId;
use crate::units::{BlockSize, TokenId};

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EventKind {
    /// A block was computed and can be found.
    Stored = 0,
    /// A block cannot be found any more.
    Removed = 1,
    /// No block can be found any more.
    Cleared = 2,
}

/// Events as flat arrays: an entry each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// The number of the first event; the others follow without a gap. Of a snapshot: the number of the next event.
    pub sequence: u64,
    /// How many events have been dropped in all, because nobody took them in time.
    pub dropped: u64,
    /// What has happened: [`EventKind`] as a number.
    pub kinds: Vec<u8>,
    /// The blocks' keys; zeros where all were cleared.
    pub keys: Vec<ContentKey>,
    /// The keys of the blocks that stored ones hang below, the scope's root key for first blocks; zeros for others.
    pub parents: Vec<ContentKey>,
    /// Whether a stored block is the first of its sequence.
    pub is_first: Vec<u8>,
    /// `block_size` tokens for each event; zeros where nothing was stored.
    pub tokens: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug)]
struct Event {
    kind: EventKind,
    key: ContentKey,
    parent: ContentKey,
    is_first: bool,
}

const NO_KEY: ContentKey = [0; 32];

/// The ring, and the keys of what is stored.
#[derive(Debug)]
pub(super) struct EventLog {
    block_size: BlockSize,
    capacity: usize,
    events: VecDeque<Event>,
    tokens: VecDeque<TokenId>,
    /// The number of the next event.
    sequence: u64,
    dropped: u64,
    /// Each node's key and its parent's.
    keys: Vec<(ContentKey, ContentKey)>,
}

impl EventLog {
    pub(super) fn new(block_size: BlockSize, capacity: usize) -> Self {
        Self {
            block_size,
            capacity,
            events: VecDeque::with_capacity(capacity),
            tokens: VecDeque::with_capacity(capacity * block_size.tokens()),
            sequence: 0,
            dropped: 0,
            keys: Vec::new(),
        }
    }

    fn push(&mut self, event: Event, tokens: &[TokenId]) {
        if self.events.len() == self.capacity {
            self.events.pop_front();
            self.tokens.drain(..self.block_size.tokens());
            self.dropped += 1;
        }
        self.events.push_back(event);
        self.tokens.extend(tokens);
        self.tokens.resize(self.events.len() * self.block_size.tokens(), 0);
        self.sequence += 1;
    }

    fn take(&mut self) -> Events {
        let mut taken = Events {
            sequence: self.sequence - self.events.len() as u64,
            dropped: self.dropped,
            tokens: self.tokens.drain(..).collect(),
            ..Events::default()
        };
        self.events.drain(..).for_each(|event| taken.push(event));
        taken
    }
}

impl Events {
    fn push(&mut self, event: Event) {
        self.kinds.push(event.kind as u8);
        self.keys.push(event.key);
        self.parents.push(event.parent);
        self.is_first.push(event.is_first.into());
    }
}

impl PrefixCache {
    /// Takes what has happened since the last call. Empty if no events are kept.
    pub fn take_events(&mut self) -> Events {
        self.events.as_mut().map(|log| log.take()).unwrap_or_default()
    }

    /// All blocks that can be found now, as if each had just been stored, parents before their children: what a listener
    /// knows who has missed nothing. Events that wait are older. Empty if no events are kept.
    pub fn snapshot_events(&self) -> Events {
        let Some(log) = &self.events else { return Events::default() };
        let mut snapshot = Events { sequence: log.sequence, dropped: log.dropped, ..Events::default() };
        for node in self.parents_first() {
            let (key, parent) = log.keys[node.index()];
            let is_first = self.tree.parent(node) == NodeId::ROOT;
            snapshot.push(Event { kind: EventKind::Stored, key, parent, is_first });
            snapshot.tokens.extend(self.tree.tokens(node));
        }
        snapshot
    }

    /// All computed nodes, each behind its parent, in time that grows with their number. Those above a computed one are
    /// computed (I6).
    fn parents_first(&self) -> Vec<NodeId> {
        let (mut ordered, mut chain) = (Vec::new(), Vec::new());
        let mut is_placed = vec![false; self.tree.num_numbers()];
        is_placed[NodeId::ROOT.index()] = true;
        for node in self.tree.iter().filter(|&node| self.tree.is_computed(node)) {
            let mut above = node;
            while !std::mem::replace(&mut is_placed[above.index()], true) {
                chain.push(above);
                above = self.tree.parent(above);
            }
            ordered.extend(chain.drain(..).rev());
        }
        ordered
    }

    /// A node's content was computed: it is stored from now on.
    pub(super) fn log_stored(&mut self, scope: ScopeId, node: NodeId) {
        let Some(log) = &mut self.events else { return };
        let (parent, own) = (self.tree.parent(node), self.tree.scope(node));
        let is_first = parent == NodeId::ROOT;
        let above = if is_first {
            root_key(log.block_size, self.scopes.base(scope))
        } else {
            log.keys[parent.index()].0
        };
        let tokens = self.tree.tokens(node);
        let key = block_key(&above, tokens, self.scopes.media_of(own));
        if node.index() >= log.keys.len() {
            log.keys.resize(node.index() + 1, (NO_KEY, NO_KEY));
        }
        log.keys[node.index()] = (key, above);
        log.push(Event { kind: EventKind::Stored, key, parent: above, is_first }, tokens);
    }

    /// A node that was stored is about to be taken out.
    pub(super) fn log_removed(&mut self, node: NodeId) {
        if let Some(log) = &mut self.events
            && self.tree.is_computed(node)
        {
            let key = log.keys[node.index()].0;
            log.push(Event { kind: EventKind::Removed, key, parent: NO_KEY, is_first: false }, &[]);
        }
    }

    /// All nodes were taken out at once.
    pub(super) fn log_cleared(&mut self) {
        if let Some(log) = &mut self.events {
            log.push(Event { kind: EventKind::Cleared, key: NO_KEY, parent: NO_KEY, is_first: false }, &[]);
        }
    }
}
