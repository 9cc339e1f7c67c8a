//! What is asked for once, and what is told when it has ended.

use crate::policy::fair::tenant_of;
use crate::prefix::{Lease, Media, MissCounts, Retention, ScopeId};
use crate::units::{RequestId, TokenId};

/// A request as it is submitted.
#[derive(Clone, Copy, Debug)]
pub struct Submission<'a> {
    /// The prompt's tokens: at least one.
    pub prompt: &'a [TokenId],
    /// The most tokens that each sample may get; none: up to the context cap.
    pub max_tokens: Option<usize>,
    /// Sequences that continue the prompt.
    pub num_samples: usize,
    /// What may share: see [`prefix`](crate::prefix).
    pub scope: &'a [u8],
    /// Whether published blocks may stand in for computing the prompt.
    pub reuse_cached: bool,
    /// Who pays for it, under fair shares.
    pub tenant: &'a [u8],
    /// Under the order by priority: the lowest number comes first.
    pub priority: i32,
    /// The time, in seconds, after which it must not start any more, nor again if a failed step took its start back.
    pub deadline: Option<f64>,
    /// How long its blocks are kept once it has ended; the tenant is `tenant`.
    pub retention: Retention<'a>,
    /// What the placeholders among the prompt's tokens stand for, by rising offset.
    pub media: &'a [Media<'a>],
}

impl<'a> Submission<'a> {
    /// A request for one sample, without limit but the cap, in the empty scope.
    pub fn new(prompt: &'a [TokenId]) -> Self {
        Self {
            prompt,
            max_tokens: None,
            num_samples: 1,
            scope: &[],
            reuse_cached: true,
            tenant: &[],
            priority: 0,
            deadline: None,
            retention: Retention::default(),
            media: &[],
        }
    }
}

/// A request that has ended, whose blocks were given back.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestSummary {
    /// Its number.
    pub request: RequestId,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were found in the cache when it started first. What it finds when it comes back from a
    /// preemption changes nothing; a start that a failed step took back is none.
    pub cached_tokens: usize,
    /// Those of them that were copied from the beginning of a block.
    pub partial_hit_tokens: usize,
    /// Full blocks of the prompt that were not found when it started, by the reason.
    pub misses: MissCounts,
    /// Tokens that were sampled, over all samples.
    pub output_tokens: usize,
    /// How often one of its sequences was preempted of which something had been computed: not because a step failed.
    pub preemptions: usize,
    /// Tokens that were computed after a preemption though the sequence had held their K and V before: computed by it, or
    /// found when it started.
    pub recomputed_tokens: usize,
    /// Blocks that were copied to the host at preemptions.
    pub swapped_blocks: usize,
    /// Seconds that its sequences waited to go on after preemptions and failed steps, or until they ended, added up.
    pub stalled_seconds: f64,
    /// Whether its deadline passed before anything of it was computed.
    pub expired: bool,
    /// Whether it ended because it was aborted.
    pub aborted: bool,
    /// Whether one of its samples failed.
    pub failed: bool,
}

/// A time that can be sorted by: seconds of at least 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Deadline(u64);

impl Deadline {
    /// Numbers of at least 0 sort as their bits do.
    pub(super) fn at(seconds: f64) -> Self {
        Self((seconds.max(0.0) + 0.0).to_bits())
    }
}

/// What a request found when it started first.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    /// Tokens that were looked for.
    pub(super) queried: usize,
    /// Tokens of them that need not be computed.
    pub(super) cached: usize,
    /// Those of them that were copied from the beginning of a block.
    pub(super) copied: usize,
    pub(super) misses: MissCounts,
}

/// A request that lives.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) summary: RequestSummary,
    pub(super) scope: ScopeId,
    pub(super) lease: Lease,
    pub(super) rank: u64,
    /// Who pays for it, under fair shares.
    pub(super) tenant: Option<u32>,
    pub(super) deadline: Option<Deadline>,
    /// Kept until that start counts.
    pub(super) found: Found,
    /// Samples that have not ended yet, those included that are not forked off yet.
    pub(super) num_live: usize,
}

impl Request {
    pub(super) fn new(
        request: RequestId,
        scope: ScopeId,
        lease: Lease,
        rank: u64,
        submission: &Submission<'_>,
    ) -> Self {
        let summary = RequestSummary {
            request,
            prompt_tokens: submission.prompt.len(),
            cached_tokens: 0,
            partial_hit_tokens: 0,
            misses: MissCounts::default(),
            output_tokens: 0,
            preemptions: 0,
            recomputed_tokens: 0,
            swapped_blocks: 0,
            stalled_seconds: 0.0,
            expired: false,
            aborted: false,
            failed: false,
        };
        let deadline = submission.deadline.map(Deadline::at);
        Self {
            summary,
            scope,
            lease,
            rank,
            tenant: tenant_of(rank),
            deadline,
            found: Found::default(),
            num_live: submission.num_samples,
        }
    }
}
