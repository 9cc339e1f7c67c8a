//! Request traces in virtual time, on the production prefix tree and scheduler: no tensors, no clock, no I/O.
//!
//! | module | holds |
//! |---|---|
//! | [`trace`] | requests with arrivals, lengths and the blocks of their prompts, by number |
//! | [`recorded`] | a recording of a scheduler as a trace |
//! | [`gaps`] | the rule by which the end of a session is guessed |
//! | [`future`] | when each block is used next |
//! | [`serial`] | one request at a time: hit rates of a policy beside the two bounds |
//! | [`timed`] | virtual time: latencies, throughput and memory under a cost model |
//!
//! A block of a trace is a symbol: one number that stands for `block_size` tokens and for all blocks before it. So a
//! prompt of 100,000 tokens is some hundred numbers, and the tree compares numbers where it would compare tokens.

#![forbid(unsafe_code)]

pub mod future;
pub mod gaps;
pub mod recorded;
pub mod serial;
pub mod timed;
pub mod trace;

pub use trace::Trace;
