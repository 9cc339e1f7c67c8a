//! The allocators by name.

use pykv_core::{Error, Result, SchedulerConfig};

use super::{Arrivals, Contiguous, CostModel, Limits, Outcome, Paged, Reservation, replay};
use crate::trace::Trace;

/// How requests get their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocator {
    /// In blocks, by the production scheduler.
    Paged,
    /// In one piece, reserved when a request starts.
    Contiguous(Reservation),
}

impl Allocator {
    /// The allocator with this name.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an unknown name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "paged" => Ok(Self::Paged),
            "contiguous" => Ok(Self::Contiguous(Reservation::Cap)),
            "contiguous-exact" => Ok(Self::Contiguous(Reservation::Exact)),
            _ => Err(Error::config("allocator", name, "paged, contiguous or contiguous-exact")),
        }
    }

    /// Replays a trace on the memory that a scheduler with these options would have: see [`replay`].
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for options, costs or arrivals that cannot be.
    pub fn replay(
        self,
        trace: &Trace,
        config: SchedulerConfig,
        knows_outputs: bool,
        cost: &CostModel,
        arrivals: Arrivals,
        goes_on: impl FnMut() -> bool,
    ) -> Result<Outcome> {
        config.validate()?;
        match self {
            Self::Paged => replay(trace, &mut Paged::new(config, knows_outputs)?, cost, arrivals, goes_on),
            Self::Contiguous(reservation) => {
                let limits = Limits {
                    num_slots: (config.num_blocks - 1) * config.block_size,
                    max_model_len: config.max_model_len,
                    max_num_seqs: config.max_num_seqs,
                    max_num_batched_tokens: config.max_num_batched_tokens,
                };
                replay(trace, &mut Contiguous::new(limits, reservation), cost, arrivals, goes_on)
            }
        }
    }
}
