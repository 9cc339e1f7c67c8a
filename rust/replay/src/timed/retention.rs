//! What the scheduler is told of sessions: when they are over, or how long they may still live.

use std::collections::HashMap;

use pykv_core::{Error, Result};

use crate::gaps::{Gaps, IDLE_GAPS};
use crate::trace::Trace;

/// What is known, or guessed, of sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Retention {
    /// Nothing: no request names its session.
    #[default]
    Nothing,
    /// Exactly when a session is over: with the end of its last request.
    SessionEnd,
    /// That, and how long after each request the next one comes.
    NextTurn,
    /// A guess: a session is over once it was idle for some of its own mean gaps, or of the mean of all gaps so far
    /// where it has none.
    SessionIdle,
    /// A session is over so many seconds after its last request, unless another one comes.
    TimeToLive {
        /// How many.
        seconds: f64,
    },
}

impl Retention {
    /// The rule of this name: `none`, `session_end`, `next_turn`, `session_idle`, or `ttl:SECONDS`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for another one, or for seconds that are no time.
    pub fn from_name(name: &str) -> Result<Self> {
        let unknown =
            || Error::config("retention", name, "none, session_end, next_turn, session_idle or ttl:SECONDS");
        match (name, name.strip_prefix("ttl:")) {
            ("none", _) => Ok(Self::Nothing),
            ("session_end", _) => Ok(Self::SessionEnd),
            ("next_turn", _) => Ok(Self::NextTurn),
            ("session_idle", _) => Ok(Self::SessionIdle),
            (_, Some(seconds)) => match seconds.parse() {
                Ok(seconds) if (0.0..=MAX_SECONDS).contains(&seconds) => Ok(Self::TimeToLive { seconds }),
                _ => Err(unknown()),
            },
            _ => Err(unknown()),
        }
    }

    /// Whether it goes by the times at which the trace says that requests come.
    pub fn goes_by_arrivals(self) -> bool {
        matches!(self, Self::NextTurn | Self::SessionIdle)
    }
}

const MAX_SECONDS: f64 = 1e9;

/// What a request says of its session.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Terms {
    pub(super) ttl: Option<f64>,
    pub(super) next_turn: Option<f64>,
}

/// The terms of all requests of a trace, and which sessions are still to go on.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    /// By place; empty: nothing is told.
    terms: Vec<Terms>,
    /// Requests of each session that have not ended; only where ends are told.
    left: HashMap<u32, usize>,
}

impl Sessions {
    /// What a rule says of a trace whose requests come `speed` times as fast.
    pub(super) fn new(trace: &Trace, retention: Retention, speed: f64) -> Self {
        let mut sessions = Self::default();
        if retention == Retention::Nothing {
            return sessions;
        }
        if matches!(retention, Retention::SessionEnd | Retention::NextTurn) {
            for session in trace.requests().iter().filter_map(|request| request.session) {
                *sessions.left.entry(session).or_default() += 1;
            }
        }
        sessions.terms = match retention {
            Retention::NextTurn => next_turns(trace, speed),
            Retention::SessionIdle => guesses(trace, speed),
            Retention::TimeToLive { seconds } => {
                vec![Terms { ttl: Some(seconds), next_turn: None }; trace.requests().len()]
            }
            Retention::SessionEnd | Retention::Nothing => vec![Terms::default(); trace.requests().len()],
        };
        sessions
    }

    /// What a request says, if sessions are named at all.
    pub(super) fn terms(&self, place: usize) -> Option<Terms> {
        self.terms.get(place).copied()
    }

    /// Notes that a request has ended. Returns whether its session is over with it, and that is told.
    pub(super) fn end(&mut self, session: u32) -> bool {
        self.left.get_mut(&session).is_some_and(|left| {
            *left -= 1;
            *left == 0
        })
    }
}

fn next_turns(trace: &Trace, speed: f64) -> Vec<Terms> {
    let mut next: HashMap<u32, f64> = HashMap::new();
    let requests = trace.requests().iter().rev().map(|request| {
        let later = request.session.and_then(|session| next.insert(session, request.arrival));
        Terms { ttl: None, next_turn: later.map(|later| (later - request.arrival) / speed) }
    });
    let mut terms: Vec<_> = requests.collect();
    terms.reverse();
    terms
}

fn guesses(trace: &Trace, speed: f64) -> Vec<Terms> {
    let mut last: HashMap<u32, (f64, Gaps)> = HashMap::new();
    let mut all = Gaps::default();
    let guess = |request: &crate::trace::Request| {
        let Some(session) = request.session else { return Terms::default() };
        let (arrival, gaps) = last.entry(session).or_insert((request.arrival, Gaps::default()));
        if *arrival < request.arrival {
            gaps.add(request.arrival - *arrival);
            all.add(request.arrival - *arrival);
            *arrival = request.arrival;
        }
        let mean = gaps.mean().or(all.mean());
        Terms { ttl: mean.map(|mean| IDLE_GAPS * mean / speed), next_turn: None }
    };
    trace.requests().iter().map(guess).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Request;

    fn trace(requests: &[(f64, Option<u32>)]) -> Trace {
        let mut trace = Trace::new(4).unwrap();
        for &(arrival, session) in requests {
            trace.push(Request { arrival, prompt_tokens: 4, output_tokens: 1, session }, []).unwrap();
        }
        trace
    }

    fn terms(trace: &Trace, retention: Retention, speed: f64) -> Vec<Terms> {
        let sessions = Sessions::new(trace, retention, speed);
        (0..trace.requests().len()).map(|place| sessions.terms(place).unwrap()).collect()
    }

    #[test]
    fn a_next_turn_is_as_far_away_as_the_trace_says() {
        let trace = trace(&[(0.0, Some(1)), (1.0, None), (4.0, Some(1)), (5.0, Some(2))]);
        let next: Vec<_> =
            terms(&trace, Retention::NextTurn, 2.0).iter().map(|terms| terms.next_turn).collect();
        assert_eq!(next, [Some(2.0), None, None, None]);
    }

    #[test]
    fn a_guess_goes_by_the_gaps_so_far() {
        let trace = trace(&[(0.0, Some(1)), (2.0, Some(1)), (3.0, Some(2)), (8.0, Some(1))]);
        let ttl: Vec<_> = terms(&trace, Retention::SessionIdle, 1.0).iter().map(|terms| terms.ttl).collect();
        assert_eq!(ttl, [None, Some(16.0), Some(16.0), Some(32.0)]);
    }

    #[test]
    fn a_session_is_over_with_the_last_of_its_requests() {
        let trace = trace(&[(0.0, Some(1)), (1.0, Some(2)), (2.0, Some(1))]);
        let mut sessions = Sessions::new(&trace, Retention::SessionEnd, 1.0);
        assert_eq!([1, 2, 1].map(|session| sessions.end(session)), [false, true, true]);
        assert!(Sessions::new(&trace, Retention::Nothing, 1.0).terms(0).is_none());
    }

    #[test]
    fn rules_have_names() {
        assert_eq!(Retention::from_name("ttl:1.5").unwrap(), Retention::TimeToLive { seconds: 1.5 });
        for name in ["ttl:", "ttl:-1", "ttl:nan", "forever"] {
            assert!(Retention::from_name(name).unwrap_err().to_string().contains("retention is"), "{name}");
        }
    }
}
