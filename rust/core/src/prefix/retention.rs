//! What the cache keeps, and how long: what sessions, priorities and tenants make of a block's standing.
//!
//! Each request takes a *lease*: on whose behalf it uses blocks. Before a sequence gives its blocks back, all of them are
//! marked with its lease, from the last up to the root. So a block's marks are those of everybody who has used it, and
//! what hangs below a block never has marks that it lacks. As long as no request names a session, a priority or a share,
//! nothing is marked and nothing costs.

use super::order::{Class, PRIORITIES, Standing};
use super::session::{MAX_TIPS, SessionId, Sessions, Timer, TipListId};
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
    /// Live sessions' tips at or below the node.
    live: u32,
    /// Those of them whose next turn is expected.
    expected: u32,
    tips: Option<TipListId>,
    owner: Owner,
    priority: u8,
    /// Whether requests without a session have used it, so that no session's end matters.
    is_open: bool,
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
}

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
        }
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

    /// Ends what has outlived its time, given the present in seconds.
    pub fn expire(&mut self, now: f64) {
        while let Some((session, timer)) = self.tracked.sessions.pop_timer(now) {
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
        self.tracked.marks_mut(parent).tips = Some(moved);
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
                return;
            }
            marks.priority = marks.priority.max(priority);
            marks.is_open |= is_open;
            self.tracked.shares.change_owner(before, owner);
            self.relist(node, true);
            node = self.tree.parent(node);
        }
    }

    /// A session's conversation has come to a node: it goes on from the tip above, or from the root.
    fn add_tip(&mut self, session: SessionId, last: NodeId) {
        let entry = self.tracked.sessions.get(session);
        let is_live = entry.is_live;
        let tips: Vec<_> = entry.tips.iter().map(|&tip| (tip, self.tracked.sessions.tip_node(tip))).collect();
        let mut node = last;
        while node != NodeId::ROOT {
            if let Some(&(tip, _)) = tips.iter().find(|(_, at)| *at == Some(node)) {
                self.remove_tip(tip);
                break;
            }
            if is_live {
                self.tracked.marks_mut(node).live += 1;
                self.relist(node, true);
            }
            node = self.tree.parent(node);
        }
        if last == NodeId::ROOT {
            return;
        }
        let list = self.tracked.marks(last).tips;
        let list = self.tracked.sessions.add_tip(session, last, list);
        self.tracked.marks_mut(last).tips = Some(list);
        let tips = &self.tracked.sessions.get(session).tips;
        if tips.len() > MAX_TIPS {
            let oldest = tips[0];
            if is_live && let Some(node) = self.tracked.sessions.tip_node(oldest) {
                self.change_path(node, false, |marks| marks.live -= 1);
            }
            self.remove_tip(oldest);
        }
    }

    fn remove_tip(&mut self, tip: super::session::TipId) {
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
            self.change_tips(session, true, |marks| marks.live += 1);
        }
        session
    }

    fn end(&mut self, session: SessionId) -> bool {
        self.unexpect(session);
        self.tracked.sessions.stop_timers(session);
        let was_live = std::mem::replace(&mut self.tracked.sessions.get_mut(session).is_live, false);
        if was_live {
            self.change_tips(session, false, |marks| marks.live -= 1);
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
            self.change_tips(session, true, |marks| marks.expected += 1);
        }
    }

    fn unexpect(&mut self, session: SessionId) {
        self.tracked.sessions.stop_timer(session, Timer::NextTurn);
        if std::mem::replace(&mut self.tracked.sessions.get_mut(session).is_expected, false) {
            self.change_tips(session, false, |marks| marks.expected -= 1);
        }
    }

    /// Changes the marks of all blocks of a session, once for each of its tips.
    fn change_tips(&mut self, session: SessionId, is_raise: bool, change: impl Fn(&mut Marks)) {
        self.adopt_returned();
        for tip in self.tracked.sessions.get(session).tips.clone() {
            if let Some(node) = self.tracked.sessions.tip_node(tip) {
                self.change_path(node, is_raise, &change);
            }
        }
    }

    fn change_path(&mut self, mut node: NodeId, is_raise: bool, change: impl Fn(&mut Marks)) {
        while node != NodeId::ROOT {
            change(self.tracked.marks_mut(node));
            self.relist(node, is_raise);
            node = self.tree.parent(node);
        }
    }

    /// Puts a node's idle blocks where they stand now: if they stand higher, behind those that hang below them.
    fn relist(&mut self, node: NodeId, is_raise: bool) {
        let standing = self.standing(node);
        for group in 0..self.groups.len() {
            let block = self.tree.blocks(node)[group];
            if block != BlockId::NULL
                && self.order.contains(block)
                && (is_raise || self.order.falls(block, standing))
            {
                self.order.remove(block);
                self.order.insert(block, standing);
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
