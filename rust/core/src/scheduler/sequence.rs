//! One sequence: a prompt and what was sampled so far.
//!
//! ```text
//! [0, num_computed)             their K and V are in the table's blocks
//! [num_computed, num_planned)   the steps in flight compute them
//! [num_planned, tokens.len())   known, not yet computed
//! the last `num_drafts`         proposed: they may be taken back by the step in flight that checks them
//! the last, if a placeholder    sampled by the older of two steps in flight, computed by the newer
//! ```

use smallvec::{SmallVec, smallvec};

use super::request::Submission;
use super::sequence_states::SequenceStates;
use crate::groups::Tables;
use crate::prefix::{Cursor, ScopeId};
use crate::table::BlockTable;
use crate::units::{BlockSize, RequestId, Row, TokenId};

/// Who a sequence is, and who comes first: by rank, then requests by age, then the samples of one in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SeqKey {
    pub(super) rank: u64,
    pub(super) request: RequestId,
    pub(super) child: u32,
}

/// Where a sequence stands in the arena.
pub(super) type SeqIndex = u32;

/// What the host keeps of a preempted sequence.
#[derive(Debug)]
pub(super) struct Swapped {
    /// Host blocks, those of each group.
    pub(super) tables: Tables,
    /// Tokens whose K and V they hold.
    pub(super) num_tokens: usize,
    /// How far they were published: whether the sequence still publishes when it comes back.
    pub(super) cursor: Cursor,
    /// The step that copied them out.
    pub(super) step: u64,
}

/// Tokens to come that a sequence has room for when it starts; the lists of a longer one double as it grows.
const RESERVED_TOKENS: usize = 2048;

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) key: SeqKey,
    pub(super) scope: ScopeId,
    pub(super) tokens: Vec<TokenId>,
    pub(super) prompt_len: usize,
    /// The limit on its output that came with the request.
    pub(super) max_tokens: Option<usize>,
    /// Tokens at which it ends with `length`.
    pub(super) max_len: usize,
    pub(super) num_computed: usize,
    pub(super) num_planned: usize,
    /// Steps in flight that have a row for it. While there is one, it keeps its rows and blocks.
    pub(super) num_in_flight: u8,
    /// Its first sample's place among those of the newest step that has a row for it.
    pub(super) sample: u32,
    /// The sample of the older step in flight that its last token stands for; none: all its tokens are known.
    pub(super) placeholder: Option<u32>,
    /// Whether nothing more is planned for it: it ends, or starts again, with its last row in flight.
    pub(super) is_leaving: bool,
    /// Whether its end was told with an older step than its last one.
    pub(super) has_ended: bool,
    /// Whether what the steps in flight compute of it counts for nothing.
    pub(super) is_void: bool,
    /// Drafts behind its last known token, which the step in flight checks.
    pub(super) num_drafts: usize,
    /// The most tokens whose K and V it has held so far, computed or found: what lies below it is computed again.
    pub(super) high_water: usize,
    /// Whether a failed step ever took its state: as long as it is the first that runs, no other one does.
    pub(super) is_guarded: bool,
    pub(super) tables: Tables,
    pub(super) cursor: Cursor,
    /// Changes whenever what stands in the tables' rows may have changed other than by growing.
    pub(super) epoch: u64,
    /// Its own row while it runs; then those of the samples that are not forked off yet.
    pub(super) rows: SmallVec<[Row; 2]>,
    pub(super) states: SequenceStates,
    /// Samples that its next token is drawn for: above 1 until they are forked off.
    pub(super) num_samples: usize,
    /// Whether it was forked off, or others from it: its last block may be theirs too.
    pub(super) is_fork: bool,
    /// Blocks that it shared when it started: they are not its own to give back.
    pub(super) shared_blocks: usize,
    pub(super) reuse_cached: bool,
    /// Whether it starts without what it would find, because that does not fit.
    pub(super) starts_cold: bool,
    /// Whether a step has computed something of it: until then, no start of it counts.
    pub(super) has_computed: bool,
    /// Whether it stands among the prompts that are known to be computed in chunks.
    pub(super) is_listed: bool,
    /// How often a sequence that came later started before it.
    pub(super) passed: usize,
    /// Tokens of its rows in the steps that were applied, whatever came of them.
    pub(super) spent_tokens: usize,
    /// Tokens of its prompt that were counted when it started, under fair shares, less what was found.
    pub(super) counted_prompt: usize,
    /// Output tokens that were counted for each of its samples then.
    pub(super) counted_output: usize,
    pub(super) swapped: Option<Swapped>,
    /// Since when it waits to go on after a preemption.
    pub(super) stalled_since: Option<f64>,
}

impl Sequence {
    /// The first sequence of a request, which waits: nothing of it is computed. `tables` hold nothing, `root` is where nothing
    /// is published yet, and `cap` is the most tokens that it can ever have.
    pub(super) fn first(
        key: SeqKey,
        scope: ScopeId,
        submission: &Submission<'_>,
        cap: usize,
        tables: Tables,
        root: Cursor,
    ) -> Self {
        let prompt_len = submission.prompt.len();
        Self {
            key,
            scope,
            tokens: submission.prompt.to_vec(),
            prompt_len,
            max_tokens: submission.max_tokens,
            max_len: prompt_len.saturating_add(submission.max_tokens.unwrap_or(cap)).min(cap),
            num_computed: 0,
            num_planned: 0,
            num_in_flight: 0,
            sample: 0,
            placeholder: None,
            is_leaving: false,
            has_ended: false,
            is_void: false,
            num_drafts: 0,
            high_water: 0,
            is_guarded: false,
            tables,
            cursor: root,
            epoch: 0,
            rows: SmallVec::new(),
            states: SequenceStates::default(),
            num_samples: submission.num_samples,
            is_fork: false,
            shared_blocks: 0,
            reuse_cached: submission.reuse_cached,
            starts_cold: false,
            has_computed: false,
            is_listed: false,
            passed: 0,
            spent_tokens: 0,
            counted_prompt: 0,
            counted_output: 0,
            swapped: None,
            stalled_since: None,
        }
    }

    /// A further sample, which goes on from where this one is: with the same blocks, of which the first `shared_blocks` are
    /// full, and with a row and a slot that were kept for it.
    pub(super) fn fork(&self, child: usize, shared_blocks: usize, epoch: u64) -> Self {
        let slot = self.states.working.get(child).copied();
        Self {
            key: SeqKey { child: self.key.child + child as u32, ..self.key },
            scope: self.scope,
            tokens: self.tokens.clone(),
            prompt_len: self.prompt_len,
            max_tokens: self.max_tokens,
            max_len: self.max_len,
            num_computed: self.num_computed,
            num_planned: self.num_planned,
            num_in_flight: 0,
            sample: 0,
            placeholder: None,
            is_leaving: false,
            has_ended: false,
            is_void: false,
            num_drafts: 0,
            high_water: self.high_water,
            is_guarded: false,
            tables: self.tables.iter().map(BlockTable::fork).collect(),
            cursor: self.cursor,
            epoch,
            rows: smallvec![self.rows[child]],
            states: slot.map(SequenceStates::forked).unwrap_or_default(),
            num_samples: 1,
            is_fork: true,
            shared_blocks,
            reuse_cached: self.reuse_cached,
            starts_cold: false,
            has_computed: true,
            is_listed: false,
            passed: 0,
            spent_tokens: 0,
            counted_prompt: 0,
            counted_output: self.counted_output,
            swapped: None,
            stalled_since: None,
        }
    }

    /// Tokens that are known and in no plan yet.
    pub(super) fn num_unplanned(&self) -> usize {
        self.tokens.len() - self.num_planned
    }

    /// Whether one more token is all that is left to plan.
    pub(super) fn decodes(&self) -> bool {
        self.num_unplanned() == 1
    }

    /// Blocks that it holds, over all groups.
    pub(super) fn num_held(&self) -> usize {
        self.tables.iter().map(|table| table.held().len()).sum()
    }

    /// Makes its lists large enough for the tokens to come, so that most steps allocate nothing.
    pub(super) fn reserve(&mut self, size: BlockSize) {
        let room = (self.max_len - self.tokens.len()).min(RESERVED_TOKENS);
        let num_blocks = size.blocks_for(self.tokens.len() + room);
        self.tokens.reserve_exact(room);
        self.tables.iter_mut().for_each(|table| table.reserve(num_blocks));
    }

    /// Whether it starts with what it finds in the cache.
    pub(super) fn shares(&self) -> bool {
        self.reuse_cached && !self.starts_cold
    }

    pub(super) fn row(&self) -> Row {
        self.rows[0]
    }

    pub(super) fn is_in_flight(&self) -> bool {
        self.num_in_flight > 0
    }

    pub(super) fn is_running(&self) -> bool {
        !self.rows.is_empty()
    }
}

/// Sequences by number. The number of one that was removed is used again only after [`Arena::recycle`], when no list
/// holds it any more.
#[derive(Debug, Default)]
pub(super) struct Arena {
    places: Vec<Option<Sequence>>,
    removed: Vec<SeqIndex>,
    vacant: Vec<SeqIndex>,
}

impl Arena {
    pub(super) fn insert(&mut self, sequence: Sequence) -> SeqIndex {
        if let Some(index) = self.vacant.pop() {
            self.places[index as usize] = Some(sequence);
            return index;
        }
        self.places.push(Some(sequence));
        (self.places.len() - 1) as SeqIndex
    }

    pub(super) fn remove(&mut self, index: SeqIndex) -> Sequence {
        self.removed.push(index);
        self.places[index as usize].take().expect("a listed sequence lives")
    }

    pub(super) fn recycle(&mut self) {
        self.vacant.append(&mut self.removed);
    }

    pub(super) fn contains(&self, index: SeqIndex) -> bool {
        self.places[index as usize].is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - self.vacant.len() - self.removed.len()
    }
}

impl std::ops::Index<SeqIndex> for Arena {
    type Output = Sequence;

    fn index(&self, index: SeqIndex) -> &Sequence {
        self.places[index as usize].as_ref().expect("a listed sequence lives")
    }
}

impl std::ops::IndexMut<SeqIndex> for Arena {
    fn index_mut(&mut self, index: SeqIndex) -> &mut Sequence {
        self.places[index as usize].as_mut().expect("a listed sequence lives")
    }
}
