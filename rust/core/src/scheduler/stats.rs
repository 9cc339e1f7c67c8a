//! What can be counted, at one moment and over the scheduler's life.

use super::Scheduler;
use super::sequence::Sequence;
use crate::pool::{BlockCounts, BlockPool};
use crate::prefix::MissCounts;
use crate::states::StateCounts;
use crate::units::BlockId;

/// What only ever grows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) steps: u64,
    pub(super) preemptions: u64,
    pub(super) recomputed_tokens: u64,
    pub(super) swapped_out_blocks: u64,
    pub(super) swapped_in_blocks: u64,
    pub(super) queried_tokens: u64,
    pub(super) hit_tokens: u64,
    pub(super) partial_hit_tokens: u64,
    pub(super) misses: MissCounts,
    pub(super) draft_tokens: u64,
    pub(super) accepted_draft_tokens: u64,
    pub(super) peak: Peak,
    pub(super) peak_num_running: usize,
}

/// The moment at which the most blocks were active, the first such one. Its numbers belong together: but for the first they
/// are no maxima, and fall where more blocks are active for fewer tokens or sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// Active blocks.
    pub active_blocks: usize,
    /// Their slots that held a token, a shared one counted once.
    pub held_tokens: usize,
    /// Blocks that the same sequences would have needed without sharing.
    pub unshared_blocks: usize,
    /// Tokens of the same sequences, a shared one counted for each.
    pub unshared_tokens: usize,
    /// The same sequences: those that ran or were paused with their blocks, the samples that were not forked off yet included.
    pub num_sequences: usize,
}

/// One moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Blocks by state.
    pub blocks: BlockCounts,
    /// Sequences that wait, the samples that are not forked off yet included.
    pub num_waiting: usize,
    /// Sequences that run, the samples that are not forked off yet included.
    pub num_running: usize,
    /// Sequences that are paused, the samples that are not forked off yet included.
    pub num_paused: usize,
    /// Requests that live.
    pub num_requests: usize,
    /// Scopes in use.
    pub num_scopes: usize,
    /// Slots of active blocks that hold a token, a shared one counted once.
    pub held_tokens: usize,
    /// Steps that were planned.
    pub steps: u64,
    /// How often a sequence was preempted.
    pub preemptions: u64,
    /// Tokens that were computed after a preemption though their sequence had held their K and V before.
    pub recomputed_tokens: u64,
    /// Blocks that were copied to the host.
    pub swapped_out_blocks: u64,
    /// Blocks that were copied from the host.
    pub swapped_in_blocks: u64,
    /// Blocks of the host's pool, the null block left out.
    pub host_blocks_total: usize,
    /// Those of them that are free.
    pub host_blocks_free: usize,
    /// Prompt tokens that were looked up when their requests started, once a step of the start was applied.
    pub queried_tokens: u64,
    /// Those of them that were found.
    pub hit_tokens: u64,
    /// Those of the found ones that were copied from the beginning of a block.
    pub partial_hit_tokens: u64,
    /// Draft tokens that were computed.
    pub draft_tokens: u64,
    /// Those of them that were accepted.
    pub accepted_draft_tokens: u64,
    /// Full blocks of prompts that were not found when their requests started, by the reason.
    pub misses: MissCounts,
    /// Evicted blocks that are not remembered any more, over the scheduler's life: as long as there is none more, what was
    /// never seen since the last reset was not there.
    pub forgotten_keys: u64,
    /// Cached blocks that made room for others.
    pub evictions: u64,
    /// Sessions that have a request or a cached block.
    pub num_sessions: usize,
    /// Blocks that pins hold, one for each pin that holds it.
    pub pinned_blocks: usize,
    /// Slots of states by what they hold; none in models without states.
    pub state_slots: StateCounts,
    /// Checkpoints of states that made room for others, or for sequences.
    pub checkpoint_evictions: u64,
    /// The moment at which the most blocks were active.
    pub peak: Peak,
    /// The most sequences that ever ran at once, the samples that are not forked off yet included.
    pub peak_num_running: usize,
}

impl Scheduler {
    /// Counts what there is, in time that grows only with the sequences that hold blocks: those that run, and paused
    /// ones that have not given way.
    pub fn stats(&mut self) -> SchedulerStats {
        let blocks = self.cache.counts();
        SchedulerStats {
            blocks,
            num_waiting: self.num_queued,
            num_running: self.num_running(),
            num_paused: self.paused.num_samples(),
            num_requests: self.requests.len(),
            num_scopes: self.cache.num_scopes(),
            held_tokens: blocks.active * self.block_size.tokens() - self.empty_slots(|_| ()),
            steps: self.totals.steps,
            preemptions: self.totals.preemptions,
            recomputed_tokens: self.totals.recomputed_tokens,
            swapped_out_blocks: self.totals.swapped_out_blocks,
            swapped_in_blocks: self.totals.swapped_in_blocks,
            host_blocks_total: self.host.as_ref().map_or(0, |host| host.num_blocks() - 1),
            host_blocks_free: self.host.as_ref().map_or(0, BlockPool::num_free),
            queried_tokens: self.totals.queried_tokens,
            hit_tokens: self.totals.hit_tokens,
            partial_hit_tokens: self.totals.partial_hit_tokens,
            draft_tokens: self.totals.draft_tokens,
            accepted_draft_tokens: self.totals.accepted_draft_tokens,
            misses: self.totals.misses,
            forgotten_keys: self.cache.forgotten_keys(),
            evictions: self.cache.evictions(),
            num_sessions: self.cache.num_sessions(),
            pinned_blocks: self.cache.pinned_blocks(),
            state_slots: self.cache.state_counts(),
            checkpoint_evictions: self.cache.checkpoint_evictions(),
            peak: self.totals.peak,
            peak_num_running: self.totals.peak_num_running,
        }
    }

    /// Each sample that runs has a row, forked off or not.
    fn num_running(&self) -> usize {
        self.num_placed() - self.paused.num_rows()
    }

    /// The same with those that are paused and have not given way.
    fn num_placed(&self) -> usize {
        self.config.max_num_seqs - self.free_rows.len()
    }

    /// Looks whether more sequences run, or more blocks are active, than ever before.
    pub(super) fn record_peak(&mut self) {
        self.totals.peak_num_running = self.totals.peak_num_running.max(self.num_running());
        let active_blocks = self.cache.counts().active;
        if active_blocks <= self.totals.peak.active_blocks {
            return;
        }
        let (mut unshared_blocks, mut unshared_tokens) = (0, 0);
        let empty = self.empty_slots(|sequence| {
            unshared_blocks += sequence.num_held();
            unshared_tokens += sequence.num_planned;
        });
        self.totals.peak = Peak {
            active_blocks,
            held_tokens: active_blocks * self.block_size.tokens() - empty,
            unshared_blocks,
            unshared_tokens,
            num_sequences: self.num_placed(),
        };
    }

    /// Slots of active blocks that hold no token once the step in flight is done. Only a table's last written block can
    /// be partly filled, and only that one can be shared with a fork while it is. Shows all that hold blocks to `visit`.
    fn empty_slots(&self, mut visit: impl FnMut(&Sequence)) -> usize {
        let mut shared: Vec<BlockId> = Vec::new();
        let mut empty = 0;
        for sequence in self.placed() {
            visit(sequence);
            let (filled, last) = (sequence.num_planned, self.block_size.full_blocks(sequence.num_planned));
            for table in sequence.tables.iter().filter(|table| table.len() > last) {
                let own = table.len() * self.block_size.tokens() - filled;
                if !sequence.is_fork || table.is_writable(last) {
                    empty += own;
                } else if !shared.contains(&table.blocks()[last]) {
                    empty += own;
                    shared.push(table.blocks()[last]);
                }
            }
        }
        empty
    }
}
