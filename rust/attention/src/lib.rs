//! Paged attention and KV cache kernels for the CPU.
//!
//! The crate reads and writes a paged cache in place, through raw views ([`CacheView`]) of memory that the caller
//! owns. [`Attention`] holds the threads and the scratch memory; its methods are the kernels.
//!
//! # How a row is reduced
//!
//! One query token and one query head make a *row*. A row's keys are cut at absolute positions: into *spans* of
//! [`SPAN`] tokens, and the spans into *segments* of [`SEGMENT`] tokens. Inside a segment the spans are reduced left
//! to right by an online softmax; the segments' results are merged left to right. Nothing else takes part: which
//! thread reduces which segment, how the sequence is laid into blocks, and which other rows are computed beside it
//! change no bit of the result.
//!
//! # How the work is done
//!
//! [`Attention::paged_attention`] makes a *plan*: the validated block ids and a list of *units*, each a few query
//! tokens of one KV head over a range of segments. Threads claim units. For each span a unit copies the owned keys, a
//! few at a time, and the values from their pages into dense scratch memory (arranged for the products, narrow formats
//! widened), which every query head of the KV head then reads from the nearest cache. Values that few rows read, and those
//! of int8 in whole numbers, are read where they are. A slot that the sequence does not own is never loaded.

mod ahead;
mod attend;
mod buffer;
mod copy;
mod element;
mod error;
mod gather;
mod kernels;
mod merge;
mod plan;
mod pool;
mod product;
mod quantize;
mod query;
mod read;
mod score;
mod simd;
mod softmax;
mod sum;
mod view;
#[cfg(target_arch = "x86_64")]
mod whole;
mod write;

pub use attend::{Attention, AttentionCall, Options};
pub use error::Error;
pub use kernels::InstructionSet;
pub use view::{ActivationView, CacheView, Format, LogSumExpView, Scales, ScalesView, Side, StepView};
pub use write::WriteCall;

/// Tokens that are scored together; cut at absolute positions.
pub const SPAN: usize = 64;

/// Tokens whose spans share one running softmax; cut at absolute positions, a multiple of [`SPAN`].
pub const SEGMENT: usize = 512;
