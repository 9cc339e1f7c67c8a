//! The allocators by name.

use pykv_core::{Error, Result, SchedulerConfig};

use super::{Arrivals, Contiguous, CostModel, Limits, Outcome, Paged, Reservation, Retention, replay};
use crate::trace::Trace;

/// How requests get their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocator {
    /// In blocks, by the production scheduler.
    Paged,
    /// In one piece, reserved when a request starts.
    Contiguous(Reservation),
}

/// What the scheduler is told beforehand of the requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Told {
    /// The outputs' lengths.
    pub outputs: bool,
    /// When sessions are over.
    pub retention: Retention,
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
        told: Told,
        cost: &CostModel,
        arrivals: Arrivals,
        goes_on: impl FnMut() -> bool,
    ) -> Result<Outcome> {
        config.validate()?;
        match self {
            Self::Paged => {
                let speed = match arrivals {
                    Arrivals::Trace { speed } => speed,
                    Arrivals::Closed { .. } if told.retention.goes_by_arrivals() => {
                        let allowed =
                            "another one where so many requests are always there, whatever the times";
                        return Err(Error::config("retention", "a rule of times", allowed));
                    }
                    Arrivals::Closed { .. } => 1.0,
                };
                arrivals.validate()?;
                cost.validate()?;
                let mut engine = Paged::new(config, told.outputs)?.with_costs(cost)?.with_sessions(
                    trace,
                    told.retention,
                    speed,
                );
                replay(trace, &mut engine, cost, arrivals, goes_on)
            }
            Self::Contiguous(reservation) => {
                let limits = Limits {
                    // A token has a slot in each layer group: in one piece nothing leaves a window.
                    num_slots: (config.num_blocks - 1) / config.groups.len() * config.block_size,
                    max_model_len: config.max_model_len,
                    max_num_seqs: config.max_num_seqs,
                    max_num_batched_tokens: config.max_num_batched_tokens,
                };
                replay(trace, &mut Contiguous::new(limits, reservation), cost, arrivals, goes_on)
            }
        }
    }
}
