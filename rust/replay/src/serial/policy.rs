//! The policies by name.

use pykv_core::{Error, Result};

use super::{End, Hits, SessionEnds, UnusedAgain, least_recent, optimum, ranked};
use crate::trace::Trace;

/// Gaps after which an idle session is taken for over.
const IDLE: End = End::Idle { gaps: 8.0 };

/// Which cached block makes room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The production tree's own order: the leaf that was used least recently.
    Lru,
    /// As `Lru`, but blocks of which it is known that all sessions that used them are over go first.
    SessionEnd,
    /// As `Lru`, but blocks of which it is guessed that all sessions that used them are over go first.
    SessionIdle,
    /// As `Lru`, but blocks of which it is known that nobody uses them again go first.
    Dead,
    /// What is used again last: the most that any policy finds.
    Opt,
}

impl Policy {
    /// The policy with this name.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an unknown name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "lru" => Ok(Self::Lru),
            "session_end" => Ok(Self::SessionEnd),
            "session_idle" => Ok(Self::SessionIdle),
            "dead" => Ok(Self::Dead),
            "opt" => Ok(Self::Opt),
            _ => Err(Error::config("policy", name, "lru, session_end, session_idle, dead or opt")),
        }
    }

    /// Replays a trace under this policy on a cache of `num_blocks` blocks.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if such a cache cannot be.
    pub fn replay(self, trace: &Trace, num_blocks: usize) -> Result<Hits> {
        match self {
            Self::Lru => least_recent(trace, num_blocks),
            Self::SessionEnd => {
                let Ok(hits) = ranked(trace, num_blocks, &mut SessionEnds::new(trace, End::Told));
                Ok(hits)
            }
            Self::SessionIdle => {
                let Ok(hits) = ranked(trace, num_blocks, &mut SessionEnds::new(trace, IDLE));
                Ok(hits)
            }
            Self::Dead => {
                let Ok(hits) = ranked(trace, num_blocks, &mut UnusedAgain::new(trace, num_blocks));
                Ok(hits)
            }
            Self::Opt => Ok(optimum(trace, num_blocks)),
        }
    }
}
