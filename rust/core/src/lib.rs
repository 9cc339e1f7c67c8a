//! Bookkeeping of a paged KV cache: which tokens of which sequence lie in which block, which blocks may be shared, and
//! what the model computes next.
//!
//! The crate moves no tensors and calls nobody: no I/O, no clock, no randomness. Time is an argument, a step is written
//! into buffers that the caller owns, and the same inputs give the same decisions.
//!
//! | module | holds |
//! |---|---|
//! | [`freelist`] | free block ids, lock-free, taken and given back in chains |
//! | [`pool`] | the state of each block: free, active, cached |
//! | [`block`] | single blocks with typed states |
//! | [`table`] | one sequence's blocks |
//! | [`groups`] | layers that keep the same positions |
//! | [`states`] | the slots of states of fixed size, and their checkpoints |
//! | [`prefix`] | the prefix tree, its eviction order, and scopes |
//! | [`policy`] | decisions as functions from numbers to a decision |
//! | [`scheduler`] | `submit`, `plan`, `apply`, `discard`, `abort` |
//! | [`recording`] | a run as bytes, and the same run again |

#![forbid(unsafe_code)]

pub mod block;
pub mod error;
pub mod freelist;
pub mod groups;
mod memory;
pub mod policy;
pub mod pool;
pub mod prefix;
pub mod recording;
pub mod scheduler;
pub mod states;
mod sync;
pub mod table;
pub mod units;

/// The code in the documents runs too.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/new-policy.md")]
mod documents {}

pub use error::{Error, Result};
pub use groups::LayerGroup;
pub use pool::{BlockCounts, BlockPool};
pub use prefix::PrefixCache;
pub use scheduler::{Scheduler, SchedulerConfig};
pub use table::{BlockCopy, BlockTable};
pub use units::{BlockId, BlockSize, MAX_TOKEN_ID, RequestId, Row, TokenId};
