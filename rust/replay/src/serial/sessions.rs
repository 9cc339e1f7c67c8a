//! What it is worth to know, or to guess, which sessions are over.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::convert::Infallible;

use super::ended::OVER;
use super::ranked::{Ranking, Use};
use crate::gaps::Gaps;
use crate::trace::{BlockNumber, Run, Trace};

/// How it is known that a session is over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum End {
    /// Exactly, when its last request comes.
    Told,
    /// It is taken for over once it was idle for so many times its mean gap, or the mean of all gaps so far where it has
    /// none; a guess that is taken back when it comes again.
    Idle {
        /// How many times.
        gaps: f64,
    },
}

/// Least recently used first, except that what only ended sessions have used goes before it.
#[derive(Debug)]
pub struct SessionEnds<'a> {
    trace: &'a Trace,
    end: End,
    /// Whether a request is its session's last.
    is_last: Vec<bool>,
    sessions: Vec<Session>,
    /// Living sessions that have used a block; a request without a session counts as one that never ends.
    users: Vec<u32>,
    /// When sessions will have been idle for too long: the bits of the seconds, the session, the request that said so.
    idle: BinaryHeap<Reverse<(u64, u32, usize)>>,
    gaps: Gaps,
    changed: Vec<(BlockNumber, f64)>,
}

#[derive(Clone, Debug, Default)]
struct Session {
    /// The request before, whose blocks are counted already; none after an end.
    counted: Option<usize>,
    /// The request before.
    last: Option<usize>,
    /// What it counts as a user of.
    used: Vec<Run>,
    gaps: Gaps,
}

/// Marks a block as used by a request that belongs to no session.
const NEVER_ENDS: u32 = 1 << 31;

impl<'a> SessionEnds<'a> {
    /// Knows the sessions of a trace.
    pub fn new(trace: &'a Trace, end: End) -> Self {
        let sessions = trace.requests().iter().filter_map(|request| request.session);
        let num_sessions = sessions.max().map_or(0, |last| last as usize + 1);
        let mut is_last = vec![false; trace.requests().len()];
        let mut seen = vec![false; num_sessions];
        for (place, request) in trace.requests().iter().enumerate().rev() {
            if let Some(session) = request.session {
                is_last[place] = !std::mem::replace(&mut seen[session as usize], true);
            }
        }
        Self {
            trace,
            end,
            is_last,
            sessions: vec![Session::default(); num_sessions],
            users: vec![0; trace.num_blocks()],
            idle: BinaryHeap::new(),
            gaps: Gaps::default(),
            changed: Vec::new(),
        }
    }

    fn begin(&mut self, request: usize, session: usize) {
        let state = &mut self.sessions[session];
        let counted = state.counted.replace(request).map_or(0, |last| {
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
        let arrival = |request: usize| self.trace.requests()[request].arrival;
        if let Some(last) = state.last.replace(request) {
            let seconds = arrival(request) - arrival(last);
            state.gaps.add(seconds);
            self.gaps.add(seconds);
        }
    }

    /// Sees to it that the session ends when it should.
    fn foresee_end(&mut self, request: usize, session: usize) {
        match self.end {
            End::Told if self.is_last[request] => self.over(request, session),
            End::Told => {}
            End::Idle { gaps } => {
                if let Some(mean) = self.sessions[session].gaps.mean().or(self.gaps.mean()) {
                    // Numbers of at least 0 sort as their bits do.
                    let seconds = self.trace.requests()[request].arrival + gaps * mean;
                    self.idle.push(Reverse((seconds.to_bits(), session as u32, request)));
                }
            }
        }
    }

    fn over(&mut self, request: usize, session: usize) {
        let state = &mut self.sessions[session];
        state.counted = None;
        for run in std::mem::take(&mut state.used) {
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
            None => used.blocks.iter().for_each(|&block| self.users[block as usize] |= NEVER_ENDS),
            Some(session) => {
                self.begin(used.request, session as usize);
                self.foresee_end(used.request, session as usize);
            }
        }
        Ok(())
    }

    fn changes(&mut self, request: usize) -> Vec<(BlockNumber, f64)> {
        let now = self.trace.requests()[request].arrival.to_bits();
        while let Some(&Reverse((end, session, said))) = self.idle.peek()
            && end < now
        {
            self.idle.pop();
            if self.sessions[session as usize].last == Some(said) {
                self.over(said, session as usize);
            }
        }
        std::mem::take(&mut self.changed)
    }
}
