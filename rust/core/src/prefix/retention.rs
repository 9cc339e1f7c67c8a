//! What the cache keeps, and how long: what sessions, priorities and tenants make of a block's standing.
//!
//! Each request takes a *lease*: on whose behalf it uses blocks. Before a sequence gives its blocks back, all of them are
//! marked with its lease, from the last up to the root. So a block's marks are those of everybody who has used it, and
//! what hangs below a block never has marks that it lacks. As long as no request names a session, a priority or a share,
//! nothing is marked and nothing costs.
//!
//! A node counts its own tips and the children that count some: what one more or less changes ends where others are left.
//! So what a session's end costs grows with what it alone has kept, not with what it shared.

use smallvec::SmallVec;

use super::order::{Class, PRIORITIES, Standing};
use super::session::{MAX_TIPS, SessionId, Sessions, Timer, TipId, TipListId};
use super::shares::{Owner, Shares};
use super::tree::NodeId;
use super::{Cursor, PrefixCache};
use crate::error::{Error, Result};
use crate::units::BlockId;

/// What a request says about the blocks that it uses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Retention<'a> {
    /// The session that it belongs to, by any bytes; a tenant's sessions are its own.
    pub session: Option<&'a [u8]>,
    /// Seconds after the session's last request, after which it counts as ended.
    pub ttl: Option<f64>,
    /// Seconds after this request within which the session's next one is expected.
    pub next_turn: Option<f64>,
    /// What has the higher one is kept longer, among blocks that sessions do not tell apart.
    pub priority: i8,
    /// Who it counts for.
    pub tenant: &'a [u8],
}

/// The lowest and the highest retention priority.
pub const PRIORITY_RANGE: std::ops::RangeInclusive<i8> = -2..=2;

const NORMAL: u8 = (PRIORITIES / 2) as u8;

impl Retention<'_> {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] with the first that is not allowed.
    pub fn validate(&self) -> Result<()> {
        for (field, value) in [("ttl", self.ttl), ("next_turn", self.next_turn)] {
            if let Some(seconds) = value.filter(|seconds| !(0.0..f64::INFINITY).contains(seconds)) {
                return Err(Error::request(field, seconds, "a finite number of seconds, at least 0"));
            }
        }
        if self.next_turn.is_some() && self.session.is_none() {
            return Err(Error::request("next_turn", "given without a session", "with a session"));
        }
        if !PRIORITY_RANGE.contains(&self.priority) {
            let allowed = format!("{} to {}", PRIORITY_RANGE.start(), PRIORITY_RANGE.end());
            return Err(Error::request("retention_priority", self.priority, allowed));
        }
        Ok(())
    }

    fn is_plain(&self) -> bool {
        self.session.is_none() && self.ttl.is_none() && self.priority == 0
    }
}

/// On whose behalf a request uses blocks, from its submission to its end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lease {
    session: Option<SessionId>,
    tenant: Option<u32>,
    /// None where nothing was tracked when the request came.
    priority: Option<u8>,
    ttl: Option<f64>,
    next_turn: Option<f64>,
}

/// What is known about a node's users.
#[derive(Clone, Copy, Debug)]
struct Marks {
    /// Live sessions' tips at the node, and the nodes right below that count some.
    live: u32,
    /// The same of sessions whose next turn is expected.
    expected: u32,
    tips: Option<TipListId>,
    owner: Owner,
    priority: u8,
    /// Whether requests without a session have used it, so that no session's end matters.
    is_open: bool,
}

/// What a tip is counted for.
#[derive(Clone, Copy, Debug)]
enum Count {
    Live,
    Expected,
}

impl Count {
    fn of(self, marks: &mut Marks) -> &mut u32 {
        match self {
            Self::Live => &mut marks.live,
            Self::Expected => &mut marks.expected,
        }
    }
}

/// A node that was there before anything was tracked.
const UNTRACKED: Marks =
    Marks { live: 0, expected: 0, tips: None, owner: Owner::Several, priority: NORMAL, is_open: true };

/// A node that nobody has given back yet. Of a running sequence's, only what has left a window is idle: it stands as if
/// nothing was said about it until the sequence ends.
const FRESH: Marks = Marks { owner: Owner::Nobody, priority: 0, is_open: false, ..UNTRACKED };

/// All that is tracked.
#[derive(Debug)]
pub(super) struct Tracked {
    pub(super) is_active: bool,
    marks: Vec<Marks>,
    sessions: Sessions,
    max_sessions: usize,
    pub(super) shares: Shares,
    /// How often a session that ended or was waited for has counted less at a node.
    pub(super) num_changes: u64,
    /// The nodes that the change at hand lifts.
    lifted: Vec<NodeId>,
}

/// Changes after which the end of further sessions waits for the next call: about a millisecond's.
pub(super) const MAX_CHANGES: u64 = 8192;

/// Sessions that are remembered at the most, or one a block where there are more blocks.
const MAX_SESSIONS: usize = 65_536;

impl Tracked {
    pub(super) fn new(num_blocks: usize, share: f64) -> Self {
        Self {
            is_active: share < 1.0,
            marks: Vec::new(),
            sessions: Sessions::default(),
            max_sessions: num_blocks.max(MAX_SESSIONS),
            shares: Shares::new(share),
            num_changes: 0,
            lifted: Vec::new(),
        }
    }

    /// All nodes are gone, and with them the sessions that have no request.
    pub(super) fn clear(&mut self) {
        for marks in self.marks.drain(..) {
            if let Owner::Tenant(owner) = marks.owner {
                self.shares.leave(owner);
            }
        }
        self.sessions.drop_all_tips();
    }

    fn marks(&self, node: NodeId) -> Marks {
        self.marks.get(node.index()).copied().unwrap_or(UNTRACKED)
    }

    fn marks_mut(&mut self, node: NodeId) -> &mut Marks {
        if node.index() >= self.marks.len() {
            self.marks.resize(node.index() + 1, UNTRACKED);
        }
        &mut self.marks[node.index()]
    }
}

impl PrefixCache {
    /// Begins a request's use of blocks. Give the lease back with [`close_lease`](Self::close_lease).
    pub fn open_lease(&mut self, retention: &Retention<'_>) -> Lease {
        let tracked = &mut self.tracked;
        tracked.is_active |= !retention.is_plain();
        if !tracked.is_active {
            return Lease::default();
        }
        let session = match retention.session {
            Some(session) => Some(self.begin_session(&session_key(retention.tenant, session))),
            None => retention.ttl.map(|_| self.tracked.sessions.add(None)),
        };
        if let Some(session) = session {
            self.tracked.sessions.get_mut(session).num_requests += 1;
        }
        Lease {
            session,
            tenant: self.tracked.shares.are_kept().then(|| self.enter_tenant(retention.tenant)),
            priority: Some((retention.priority + NORMAL as i8) as u8),
            ttl: retention.ttl,
            next_turn: retention.next_turn,
        }
    }

    /// Marks the published blocks of a sequence that is about to give them back.
    pub fn mark(&mut self, cursor: Cursor, lease: &Lease) {
        if !self.tracked.is_active || !self.goes_on(cursor) {
            return;
        }
        self.adopt_returned();
        self.mark_path(cursor.node(), lease);
        if let Some(session) = lease.session {
            self.unexpect(session);
            self.add_tip(session, cursor.node());
        }
    }

    /// Ends a request's use of blocks, all of which it has given back.
    pub fn close_lease(&mut self, lease: Lease, now: f64) {
        if let Some(tenant) = lease.tenant {
            self.tracked.shares.leave(tenant);
        }
        let Some(session) = lease.session else { return };
        let entry = self.tracked.sessions.get_mut(session);
        entry.num_requests -= 1;
        if entry.num_requests > 0 {
            return;
        }
        if entry.tips.is_empty() {
            self.tracked.sessions.remove(session);
            return;
        }
        let is_live = entry.is_live;
        self.tracked.sessions.set_idle(session);
        if is_live && let Some(seconds) = lease.next_turn {
            self.expect(session);
            self.tracked.sessions.start_timer(session, Timer::NextTurn, now + seconds);
        }
        if is_live && let Some(seconds) = lease.ttl {
            self.tracked.sessions.start_timer(session, Timer::Expiry, now + seconds);
        }
        if self.tracked.sessions.len() > self.tracked.max_sessions
            && let Some(oldest) = self.tracked.sessions.longest_idle()
        {
            self.forget(oldest);
        }
    }

    /// Says that a session has no further turn: what only ended sessions have used goes before anything else. A request
    /// of it that comes all the same makes it live again. Returns whether it was live.
    pub fn end_session(&mut self, tenant: &[u8], session: &[u8]) -> bool {
        let Some(id) = self.tracked.sessions.find(&session_key(tenant, session)) else { return false };
        self.end(id)
    }

    /// Ends what has outlived its time, given the present in seconds: as much as a step can spare, the longest overdue first.
    /// The rest goes on as before until a later call.
    pub fn expire(&mut self, now: f64) {
        let most = self.tracked.num_changes + MAX_CHANGES;
        while self.tracked.num_changes < most
            && let Some((session, timer)) = self.tracked.sessions.pop_timer(now)
        {
            self.tracked.num_changes += 1;
            match timer {
                Timer::NextTurn => self.unexpect(session),
                Timer::Expiry => drop(self.end(session)),
            }
        }
    }

    /// Sessions that have a request or a cached block.
    pub fn num_sessions(&self) -> usize {
        self.tracked.sessions.len()
    }

    /// Where the blocks of a node stand while they are idle.
    pub(super) fn standing(&self, node: NodeId) -> Standing {
        let marks = self.tracked.marks(node);
        let class = match marks {
            Marks { expected: 1.., .. } => Class::Expected,
            Marks { is_open: false, live: 0, owner, .. } if owner != Owner::Nobody => Class::Ended,
            _ => Class::Live,
        };
        let (owner, priority) = match marks.owner {
            Owner::Nobody => (None, NORMAL),
            Owner::Tenant(owner) => (Some(owner), marks.priority),
            Owner::Several => (None, marks.priority),
        };
        Standing { class, priority, hits: self.tree.hits(node), owner }
    }

    /// Notes that a node was added.
    pub(super) fn track_added(&mut self, node: NodeId) {
        if self.tracked.is_active {
            *self.tracked.marks_mut(node) = FRESH;
        }
    }

    /// Notes that a node was taken out from below `parent`.
    pub(super) fn track_removed(&mut self, node: NodeId, parent: NodeId) {
        let Some(place) = self.tracked.marks.get_mut(node.index()) else { return };
        let marks = std::mem::replace(place, UNTRACKED);
        if let Owner::Tenant(owner) = marks.owner {
            self.tracked.shares.leave(owner);
        }
        let Some(list) = marks.tips else { return };
        if parent == NodeId::ROOT {
            for session in self.tracked.sessions.drop_list(list) {
                self.tracked.sessions.remove(session);
            }
            return;
        }
        let above = self.tracked.marks(parent).tips;
        let moved = self.tracked.sessions.move_up(list, parent, above);
        let above = self.tracked.marks_mut(parent);
        above.tips = Some(moved);
        // It was a leaf, so that all it counted were its own tips; its parent has counted it as one.
        above.live += marks.live.saturating_sub(1);
        above.expected += marks.expected.saturating_sub(1);
    }

    fn mark_path(&mut self, mut node: NodeId, lease: &Lease) {
        let is_open = lease.session.is_none();
        let priority = lease.priority.unwrap_or(NORMAL);
        while node != NodeId::ROOT {
            let marks = self.tracked.marks_mut(node);
            let owner = match (marks.owner, lease.tenant) {
                (Owner::Nobody, Some(tenant)) => Owner::Tenant(tenant),
                (Owner::Tenant(owner), Some(tenant)) if owner == tenant => marks.owner,
                _ => Owner::Several,
            };
            let before = std::mem::replace(&mut marks.owner, owner);
            if before == owner && marks.priority >= priority && (marks.is_open || !is_open) {
                // So it is for all above.
                break;
            }
            marks.priority = marks.priority.max(priority);
            marks.is_open |= is_open;
            self.tracked.shares.change_owner(before, owner);
            self.tracked.lifted.push(node);
            node = self.tree.parent(node);
        }
        self.relist_lifted();
    }

    /// A session's conversation has come to a node: it goes on from the tip above, or from the root.
    fn add_tip(&mut self, session: SessionId, last: NodeId) {
        if last == NodeId::ROOT {
            return;
        }
        let before = self.tip_above(session, last);
        let list = self.tracked.marks(last).tips;
        let list = self.tracked.sessions.add_tip(session, last, list);
        self.tracked.marks_mut(last).tips = Some(list);
        let entry = self.tracked.sessions.get(session);
        let (is_live, tips) = (entry.is_live, &entry.tips);
        let surplus = before.or_else(|| tips.first().copied().filter(|_| tips.len() > MAX_TIPS));
        if is_live {
            self.raise(last, Count::Live);
        }
        let Some(tip) = surplus else { return };
        if is_live && let Some(node) = self.tracked.sessions.tip_node(tip) {
            self.lower(node, Count::Live);
        }
        self.remove_tip(tip);
    }

    /// The session's deepest tip at a node or above it.
    fn tip_above(&self, session: SessionId, mut node: NodeId) -> Option<TipId> {
        let sessions = &self.tracked.sessions;
        let tips = &sessions.get(session).tips;
        if tips.is_empty() {
            return None;
        }
        let tips: SmallVec<[_; MAX_TIPS]> = tips.iter().map(|&tip| (tip, sessions.tip_node(tip))).collect();
        while node != NodeId::ROOT {
            if let Some(&(tip, _)) = tips.iter().find(|(_, at)| *at == Some(node)) {
                return Some(tip);
            }
            node = self.tree.parent(node);
        }
        None
    }

    fn remove_tip(&mut self, tip: TipId) {
        if let Some(node) = self.tracked.sessions.remove_tip(tip) {
            self.tracked.marks_mut(node).tips = None;
        }
    }

    fn begin_session(&mut self, key: &[u8]) -> SessionId {
        let Some(session) = self.tracked.sessions.find(key) else {
            return self.tracked.sessions.add(Some(key));
        };
        self.tracked.sessions.set_busy(session);
        self.tracked.sessions.stop_timer(session, Timer::Expiry);
        if !std::mem::replace(&mut self.tracked.sessions.get_mut(session).is_live, true) {
            self.change_tips(session, Self::raise, Count::Live);
        }
        session
    }

    fn end(&mut self, session: SessionId) -> bool {
        self.unexpect(session);
        self.tracked.sessions.stop_timers(session);
        let was_live = std::mem::replace(&mut self.tracked.sessions.get_mut(session).is_live, false);
        if was_live {
            self.change_tips(session, Self::lower, Count::Live);
        }
        was_live
    }

    fn forget(&mut self, session: SessionId) {
        self.end(session);
        for tip in self.tracked.sessions.get(session).tips.clone() {
            self.remove_tip(tip);
        }
        self.tracked.sessions.remove(session);
    }

    fn expect(&mut self, session: SessionId) {
        if !std::mem::replace(&mut self.tracked.sessions.get_mut(session).is_expected, true) {
            self.change_tips(session, Self::raise, Count::Expected);
        }
    }

    fn unexpect(&mut self, session: SessionId) {
        self.tracked.sessions.stop_timer(session, Timer::NextTurn);
        if std::mem::replace(&mut self.tracked.sessions.get_mut(session).is_expected, false) {
            self.change_tips(session, Self::lower, Count::Expected);
        }
    }

    /// Changes a count of all blocks of a session, once for each of its tips.
    fn change_tips(&mut self, session: SessionId, change: fn(&mut Self, NodeId, Count), count: Count) {
        self.adopt_returned();
        for tip in self.tracked.sessions.get(session).tips.clone() {
            if let Some(node) = self.tracked.sessions.tip_node(tip) {
                change(self, node, count);
            }
        }
    }

    /// Counts a tip more at a node.
    fn raise(&mut self, mut node: NodeId, count: Count) {
        while node != NodeId::ROOT {
            let counted = count.of(self.tracked.marks_mut(node));
            *counted += 1;
            if *counted > 1 {
                break;
            }
            self.tracked.lifted.push(node);
            node = self.tree.parent(node);
        }
        self.relist_lifted();
    }

    /// Counts a tip less at a node.
    fn lower(&mut self, mut node: NodeId, count: Count) {
        while node != NodeId::ROOT {
            self.tracked.num_changes += 1;
            let counted = count.of(self.tracked.marks_mut(node));
            *counted -= 1;
            if *counted > 0 {
                break;
            }
            self.relist(node);
            node = self.tree.parent(node);
        }
    }

    /// What is lifted comes before what it hangs below: that is lifted first.
    fn relist_lifted(&mut self) {
        let mut lifted = std::mem::take(&mut self.tracked.lifted);
        lifted.drain(..).rev().for_each(|node| self.relist(node));
        self.tracked.lifted = lifted;
    }

    /// Puts a node's idle blocks where they stand now.
    fn relist(&mut self, node: NodeId) {
        let (standing, parent) = (self.standing(node), self.tree.parent(node));
        for group in 0..self.groups.len() {
            let block = self.tree.blocks(node)[group];
            if block != BlockId::NULL {
                // A block of a window stands for itself.
                let above = self.tree.blocks(parent)[group];
                let above = (self.groups[group].is_full() && above != BlockId::NULL).then_some(above);
                self.order.relist(block, standing, above);
            }
        }
    }
}

/// A tenant's session, such that no two give the same bytes.
fn session_key(tenant: &[u8], session: &[u8]) -> Vec<u8> {
    let mut key = (tenant.len() as u64).to_le_bytes().to_vec();
    key.extend(tenant);
    key.extend(session);
    key
}
