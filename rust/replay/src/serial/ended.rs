//! Least recently used first, except that what is known to be over goes before it: what that knowledge is worth.

use std::convert::Infallible;

use super::ranked::{Ranking, Use};
use crate::future::{Future, NEVER};
use crate::trace::{BlockNumber, Run, Trace};

/// Ranks of what is over lie below all others.
const OVER: f64 = -1e12;

/// Knows exactly which blocks are never used again.
#[derive(Debug)]
pub struct UnusedAgain {
    future: Future,
}

impl UnusedAgain {
    /// Looks into a trace's future, as it matters to a pool of `num_blocks` blocks.
    pub fn new(trace: &Trace, num_blocks: usize) -> Self {
        Self { future: Future::new(trace, num_blocks) }
    }
}

impl Ranking for UnusedAgain {
    type Error = Infallible;

    fn rank(&mut self, used: Use<'_>, ranks: &mut Vec<f64>) -> Result<(), Infallible> {
        let request = used.request as f64;
        let rank = |next| if next == NEVER { OVER + request } else { request };
        ranks.extend(self.future.next_uses(used.request).map(rank));
        Ok(())
    }
}

/// Is told when a session ends: a block is over once all sessions that have used it are.
#[derive(Debug)]
pub struct SessionEnds<'a> {
    trace: &'a Trace,
    /// Whether a request is its session's last.
    is_last: Vec<bool>,
    sessions: Vec<Session>,
    /// Living sessions that have used a block; a request without a session counts as one that never ends.
    users: Vec<u32>,
    changed: Vec<(BlockNumber, f64)>,
}

#[derive(Clone, Debug, Default)]
struct Session {
    /// The request before, whose blocks are counted already.
    last: Option<usize>,
    /// What it counts as a user of.
    used: Vec<Run>,
}

impl<'a> SessionEnds<'a> {
    /// Knows the sessions of a trace.
    pub fn new(trace: &'a Trace) -> Self {
        let num_sessions = trace.requests().iter().filter_map(|request| request.session).max();
        let num_sessions = num_sessions.map_or(0, |last| last as usize + 1);
        let mut is_last = vec![false; trace.requests().len()];
        let mut seen = vec![false; num_sessions];
        for (place, request) in trace.requests().iter().enumerate().rev() {
            if let Some(session) = request.session {
                is_last[place] = !std::mem::replace(&mut seen[session as usize], true);
            }
        }
        Self {
            trace,
            is_last,
            sessions: vec![Session::default(); num_sessions],
            users: vec![0; trace.num_blocks()],
            changed: Vec::new(),
        }
    }

    fn begin(&mut self, request: usize, session: usize) {
        let state = &mut self.sessions[session];
        let counted = state.last.replace(request).map_or(0, |last| {
            let pairs = self.trace.blocks(last).zip(self.trace.blocks(request));
            pairs.take_while(|(before, now)| before == now).count()
        });
        for block in self.trace.blocks(request).skip(counted) {
            self.users[block as usize] += 1;
            match state.used.last_mut() {
                Some(run) if run.start + run.length == block => run.length += 1,
                _ => state.used.push(Run { start: block, length: 1 }),
            }
        }
    }

    fn end(&mut self, request: usize, session: usize) {
        for run in std::mem::take(&mut self.sessions[session].used) {
            for block in run.start..run.start + run.length {
                self.users[block as usize] -= 1;
                if self.users[block as usize] == 0 {
                    self.changed.push((block, OVER + request as f64));
                }
            }
        }
    }
}

impl Ranking for SessionEnds<'_> {
    type Error = Infallible;

    fn rank(&mut self, used: Use<'_>, ranks: &mut Vec<f64>) -> Result<(), Infallible> {
        ranks.extend(used.blocks.iter().map(|_| used.request as f64));
        match self.trace.requests()[used.request].session {
            None => used.blocks.iter().for_each(|&block| self.users[block as usize] |= 1 << 31),
            Some(session) => {
                self.begin(used.request, session as usize);
                if self.is_last[used.request] {
                    self.end(used.request, session as usize);
                }
            }
        }
        Ok(())
    }

    fn changed(&mut self) -> Vec<(BlockNumber, f64)> {
        std::mem::take(&mut self.changed)
    }
}
