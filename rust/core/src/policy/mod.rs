//! The scheduler's decisions, as functions from numbers to a decision: no state, no side effect, each tested alone.

pub mod admission;
pub mod checkpoint;
pub mod chunk;
pub mod fair;
pub mod forecast;
pub mod length;
pub mod order;
pub mod preemption;
pub mod victim;
