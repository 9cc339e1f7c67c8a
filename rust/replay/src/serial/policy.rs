//! The policies by name.

use pykv_core::prefix::eviction::{EvictionPolicy, POLICIES, eviction_policy};
use pykv_core::{Error, Result};

use super::{End, Hits, SessionEnds, UnusedAgain, optimum, production, ranked};
use crate::gaps::IDLE_GAPS;
use crate::trace::Trace;

const IDLE: End = End::Idle { gaps: IDLE_GAPS };

/// Which cached block makes room.
#[derive(Clone, Copy, Debug)]
pub enum Policy {
    /// One of the production tree.
    Production(&'static dyn EvictionPolicy),
    /// As `lru`, but blocks of which it is known that all sessions that used them are over go first.
    SessionEnd,
    /// As `lru`, but blocks of which it is guessed that all sessions that used them are over go first.
    SessionIdle,
    /// As `lru`, but blocks of which it is known that nobody uses them again go first.
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
            "session_end" => Ok(Self::SessionEnd),
            "session_idle" => Ok(Self::SessionIdle),
            "dead" => Ok(Self::Dead),
            "opt" => Ok(Self::Opt),
            _ => eviction_policy(name).map(Self::Production).map_err(|_| {
                let production = POLICIES.map(EvictionPolicy::name).join(", ");
                let allowed = format!("{production}, session_end, session_idle, dead or opt");
                Error::config("policy", name, allowed)
            }),
        }
    }

    /// Replays a trace under this policy on a cache of `num_blocks` blocks.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if such a cache cannot be.
    pub fn replay(self, trace: &Trace, num_blocks: usize) -> Result<Hits> {
        match self {
            Self::Production(policy) => production(trace, num_blocks, policy),
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
