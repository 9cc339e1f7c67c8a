//! Sessions: requests that belong together, with a known end or a time to live.
//!
//! A session is kept as its *tips*: the deepest cached blocks of its conversations. All blocks from a tip up to the root
//! are its own. The blocks of one tip are counted once, so that ending a session costs what its requests have cost.

use std::collections::BTreeSet;

use hashbrown::HashMap;
use smallvec::SmallVec;

use super::tree::NodeId;

/// A session, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SessionId(u32);

/// A tip, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TipId(u32);

/// The tips at one node, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TipListId(u32);

/// Conversations that one session may have side by side: the one continued least recently is dropped beyond that.
pub(crate) const MAX_TIPS: usize = 32;

/// What happens to a session when its time has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// Its next turn was expected until now.
    NextTurn,
    /// It has outlived its time to live.
    Expiry,
}

/// A time that sorts as its bits do: seconds of at least 0.
pub(crate) fn time_bits(seconds: f64) -> u64 {
    (seconds.max(0.0) + 0.0).to_bits()
}

#[derive(Clone, Copy, Debug)]
struct Tip {
    session: SessionId,
    /// None once the last of its blocks was evicted.
    list: Option<TipListId>,
    /// Where it stands in the list.
    place: usize,
}

#[derive(Debug)]
struct TipList {
    node: NodeId,
    tips: Vec<TipId>,
}

/// One session.
#[derive(Debug)]
pub(crate) struct Session {
    /// None for a request without a session that has a time to live.
    key: Option<Box<[u8]>>,
    pub(crate) is_live: bool,
    /// Whether its tips are counted as expected.
    pub(crate) is_expected: bool,
    /// Requests that live.
    pub(crate) num_requests: usize,
    /// The one continued last at the end.
    pub(crate) tips: SmallVec<[TipId; 2]>,
    timers: [Option<u64>; 2],
    /// Its place among those without a request.
    idle_since: Option<u64>,
}

/// All sessions that have a request or a cached block.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    by_key: HashMap<Box<[u8]>, SessionId>,
    entries: Vec<Option<Session>>,
    vacant: Vec<SessionId>,
    tips: Vec<Tip>,
    vacant_tips: Vec<TipId>,
    lists: Vec<TipList>,
    vacant_lists: Vec<TipListId>,
    timers: BTreeSet<(u64, SessionId, Timer)>,
    idle: BTreeSet<(u64, SessionId)>,
    next_idle: u64,
}

impl Sessions {
    /// Sessions that are known.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    pub(crate) fn find(&self, key: &[u8]) -> Option<SessionId> {
        self.by_key.get(key).copied()
    }

    pub(crate) fn get(&self, session: SessionId) -> &Session {
        self.entries[session.0 as usize].as_ref().expect("a session in use is known")
    }

    pub(crate) fn get_mut(&mut self, session: SessionId) -> &mut Session {
        self.entries[session.0 as usize].as_mut().expect("a session in use is known")
    }

    /// A live session without blocks.
    pub(crate) fn add(&mut self, key: Option<&[u8]>) -> SessionId {
        let session = Session {
            key: key.map(Into::into),
            is_live: true,
            is_expected: false,
            num_requests: 0,
            tips: SmallVec::new(),
            timers: [None; 2],
            idle_since: None,
        };
        let id = self.vacant.pop().unwrap_or(SessionId(self.entries.len() as u32));
        match self.entries.get_mut(id.0 as usize) {
            Some(place) => *place = Some(session),
            None => self.entries.push(Some(session)),
        }
        if let Some(key) = key {
            self.by_key.insert(key.into(), id);
        }
        id
    }

    /// Forgets a session whose tips are all gone.
    pub(crate) fn remove(&mut self, id: SessionId) {
        self.stop_timers(id);
        self.set_busy(id);
        if let Some(session) = self.entries[id.0 as usize].take() {
            debug_assert!(session.tips.is_empty());
            if let Some(key) = session.key {
                self.by_key.remove(&key);
            }
            self.vacant.push(id);
        }
    }

    /// Notes that no request of a session lives.
    pub(crate) fn set_idle(&mut self, id: SessionId) {
        let since = self.next_idle;
        self.next_idle += 1;
        self.get_mut(id).idle_since = Some(since);
        self.idle.insert((since, id));
    }

    /// Notes that a request of a session lives.
    pub(crate) fn set_busy(&mut self, id: SessionId) {
        if let Some(since) = self.get_mut(id).idle_since.take() {
            self.idle.remove(&(since, id));
        }
    }

    /// The session without a request for the longest time.
    pub(crate) fn longest_idle(&self) -> Option<SessionId> {
        self.idle.first().map(|&(_, id)| id)
    }

    pub(crate) fn start_timer(&mut self, id: SessionId, timer: Timer, at: f64) {
        self.stop_timer(id, timer);
        self.get_mut(id).timers[timer as usize] = Some(time_bits(at));
        self.timers.insert((time_bits(at), id, timer));
    }

    pub(crate) fn stop_timer(&mut self, id: SessionId, timer: Timer) {
        if let Some(at) = self.get_mut(id).timers[timer as usize].take() {
            self.timers.remove(&(at, id, timer));
        }
    }

    pub(crate) fn stop_timers(&mut self, id: SessionId) {
        self.stop_timer(id, Timer::NextTurn);
        self.stop_timer(id, Timer::Expiry);
    }

    /// Takes out a timer whose time has passed.
    pub(crate) fn pop_timer(&mut self, now: f64) -> Option<(SessionId, Timer)> {
        let &(at, id, timer) = self.timers.first()?;
        if at >= time_bits(now) {
            return None;
        }
        self.stop_timer(id, timer);
        Some((id, timer))
    }

    /// The node of a tip, if any of its blocks is left.
    pub(crate) fn tip_node(&self, tip: TipId) -> Option<NodeId> {
        self.tips[tip.0 as usize].list.map(|list| self.lists[list.0 as usize].node)
    }

    /// Adds a tip to a session, at a node and its list, if it has one. Returns the node's list.
    pub(crate) fn add_tip(&mut self, session: SessionId, node: NodeId, list: Option<TipListId>) -> TipListId {
        let list = list.unwrap_or_else(|| self.add_list(node));
        let place = self.lists[list.0 as usize].tips.len();
        let tip = Tip { session, list: Some(list), place };
        let id = self.vacant_tips.pop().unwrap_or(TipId(self.tips.len() as u32));
        match self.tips.get_mut(id.0 as usize) {
            Some(entry) => *entry = tip,
            None => self.tips.push(tip),
        }
        self.lists[list.0 as usize].tips.push(id);
        self.get_mut(session).tips.push(id);
        list
    }

    fn add_list(&mut self, node: NodeId) -> TipListId {
        let list = TipList { node, tips: Vec::new() };
        let id = self.vacant_lists.pop().unwrap_or(TipListId(self.lists.len() as u32));
        match self.lists.get_mut(id.0 as usize) {
            Some(place) => *place = list,
            None => self.lists.push(list),
        }
        id
    }

    /// Takes a tip from its session. Returns its node if that has no tip any more.
    pub(crate) fn remove_tip(&mut self, tip: TipId) -> Option<NodeId> {
        let Tip { session, list, place } = self.tips[tip.0 as usize];
        self.get_mut(session).tips.retain(|&mut other| other != tip);
        self.vacant_tips.push(tip);
        let list = list?;
        let TipList { node, tips } = &mut self.lists[list.0 as usize];
        let node = *node;
        tips.swap_remove(place);
        if let Some(&moved) = tips.get(place) {
            self.tips[moved.0 as usize].place = place;
        }
        let is_empty = tips.is_empty();
        if is_empty {
            self.vacant_lists.push(list);
        }
        is_empty.then_some(node)
    }

    /// A node has left the cache: its tips stand at its parent now, which may have a list. Returns the parent's list.
    /// The shorter list is moved, so that a tip is moved a logarithmic number of times at most.
    pub(crate) fn move_up(&mut self, list: TipListId, parent: NodeId, above: Option<TipListId>) -> TipListId {
        let Some(above) = above else {
            self.lists[list.0 as usize].node = parent;
            return list;
        };
        let len = |list: TipListId| self.lists[list.0 as usize].tips.len();
        let (kept, moved) = if len(above) >= len(list) { (above, list) } else { (list, above) };
        for tip in std::mem::take(&mut self.lists[moved.0 as usize].tips) {
            let place = self.lists[kept.0 as usize].tips.len();
            self.lists[kept.0 as usize].tips.push(tip);
            let entry = &mut self.tips[tip.0 as usize];
            (entry.list, entry.place) = (Some(kept), place);
        }
        self.vacant_lists.push(moved);
        self.lists[kept.0 as usize].node = parent;
        kept
    }

    /// No block is left in the cache: all tips are gone, and with them the sessions that have no request.
    pub(crate) fn drop_all_tips(&mut self) {
        self.tips.clear();
        self.vacant_tips.clear();
        self.lists.clear();
        self.vacant_lists.clear();
        for number in 0..self.entries.len() {
            let Some(session) = &mut self.entries[number] else { continue };
            session.tips.clear();
            if session.num_requests == 0 {
                self.remove(SessionId(number as u32));
            }
        }
    }

    /// The last of some tips' blocks have left the cache: the tips are gone. Returns sessions that are left with nothing.
    pub(crate) fn drop_list(&mut self, list: TipListId) -> Vec<SessionId> {
        let tips = std::mem::take(&mut self.lists[list.0 as usize].tips);
        self.vacant_lists.push(list);
        let mut left = Vec::new();
        for tip in tips {
            let session = self.tips[tip.0 as usize].session;
            let entry = self.get_mut(session);
            entry.tips.retain(|&mut other| other != tip);
            if entry.tips.is_empty() && entry.num_requests == 0 {
                left.push(session);
            }
            self.vacant_tips.push(tip);
        }
        left
    }
}
