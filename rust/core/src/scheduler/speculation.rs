//! Speculative decoding: drafts that a step computes behind a sequence's last token, and what of them is kept.
//!
//! ```text
//! tokens     [ ... last | d0 d1 d2 ]      the drafts stand there only while the step is in flight
//! samples              s0 s1 s2 s3       s0 checks d0, s1 checks d1, ...: the first that differs is the last to count
//! accepted 1           ok ok            s0 (= d0) and s1 count; the blocks beyond s0's K and V are given back
//! ```
//! Drafts are guests: they take budget and blocks that are left when all others of the step have theirs, and preempt
//! nobody. A draft that finds no slot or no budget is left out.

use super::Scheduler;
use super::apply::{FinishReason, Outcome, Sampled};
use super::buffers::StepArrays;
use super::sequence::{SeqIndex, Sequence};
use super::step::{Scheduled, Step};
use crate::error::{Error, Result};
use crate::table::BlockTable;
use crate::units::{Row, TokenId};

/// Drafts for the sequences that run, as flat arrays.
#[derive(Clone, Copy, Debug)]
pub struct Proposal<'a> {
    /// The rows of the sequences that get drafts.
    pub rows: &'a [usize],
    /// Row `rows[i]` gets the drafts `tokens[starts[i]..starts[i + 1]]`.
    pub starts: &'a [usize],
    /// What the sequences may go on with.
    pub tokens: &'a [TokenId],
}

/// What was proposed for the next plan.
#[derive(Debug, Default)]
pub(super) struct Drafts {
    /// By row: where its drafts stand in `tokens`.
    spans: Vec<Span>,
    tokens: Vec<TokenId>,
    seen: Vec<bool>,
    /// The batch rows of the plan at hand that check drafts.
    checking: Vec<Scheduled>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Span {
    start: usize,
    len: usize,
}

impl Drafts {
    pub(super) fn clear(&mut self) {
        if !self.tokens.is_empty() {
            self.tokens.clear();
            self.spans.fill(Span::default());
        }
    }

    fn of(&self, row: Row) -> &[TokenId] {
        let span = self.spans[row.index()];
        &self.tokens[span.start..span.start + span.len]
    }
}

impl Proposal<'_> {
    /// `seen` is overwritten: an entry a row.
    fn check(&self, max_num_seqs: usize, max_drafts: usize, seen: &mut Vec<bool>) -> Result<()> {
        let needed = self.rows.len() + 1;
        if self.starts.len() != needed {
            return Err(Error::ArrayLength { array: "starts", length: self.starts.len(), needed });
        }
        let value = |array, index, value: usize, allowed| {
            Err(Error::ArrayValue { array, index, value: value as i64, allowed })
        };
        if self.starts[0] != 0 {
            return value("starts", 0, self.starts[0], "0");
        }
        seen.clear();
        seen.resize(max_num_seqs, false);
        for (index, (&row, span)) in self.rows.iter().zip(self.starts.windows(2)).enumerate() {
            if row >= max_num_seqs || std::mem::replace(&mut seen[row], true) {
                return value("rows", index, row, "a row of the block tables, each at most once");
            }
            if span[1] < span[0] || span[1] - span[0] > max_drafts {
                let allowed = "at least the one before it, and at most num_lookahead_tokens more";
                return value("starts", index + 1, span[1], allowed);
            }
        }
        let (length, needed) = (self.tokens.len(), self.starts[needed - 1]);
        if length != needed {
            return Err(Error::ArrayLength { array: "tokens", length, needed });
        }
        Ok(())
    }
}

impl Scheduler {
    /// Proposes what running sequences may go on with: the next plan computes it along with their last token. Replaces
    /// what was proposed before.
    ///
    /// A row whose sequence has ended, or that has more than one token to compute, is passed over; the drafts of others
    /// are cut where the budget, the blocks or the sequence's limit end.
    ///
    /// # Errors
    /// [`Error::StepInFlight`], [`Error::ArrayLength`], [`Error::ArrayValue`]; nothing was changed.
    pub fn propose(&mut self, proposal: Proposal<'_>) -> Result<()> {
        if let Some(step) = self.in_flight.oldest() {
            return Err(Error::StepInFlight { plan: step.id });
        }
        let drafts = &mut self.drafts;
        proposal.check(self.config.max_num_seqs, self.config.num_lookahead_tokens, &mut drafts.seen)?;
        drafts.clear();
        drafts.spans.resize(self.config.max_num_seqs, Span::default());
        drafts.tokens.extend_from_slice(proposal.tokens);
        for (&row, span) in proposal.rows.iter().zip(proposal.starts.windows(2)) {
            drafts.spans[row] = Span { start: span[0], len: span[1] - span[0] };
        }
        Ok(())
    }

    /// Has the decodes of a step check what was proposed for them, with the budget and the blocks that nobody else took:
    /// those that do come after the other decodes.
    pub(super) fn add_drafts(&mut self, step: &mut Step) {
        if self.drafts.tokens.is_empty() {
            return;
        }
        let mut checking = std::mem::take(&mut self.drafts.checking);
        let mut num_plain = 0;
        for batch_row in 0..step.num_decodes {
            let decode = step.rows[batch_row];
            let num_drafts = self.add_drafts_to(decode.sequence, step.num_tokens);
            if num_drafts == 0 {
                step.rows[num_plain] = decode;
                num_plain += 1;
                continue;
            }
            let num_rows = 1 + num_drafts;
            checking.push(Scheduled { num_tokens: num_rows, num_samples: num_rows, ..decode });
            step.num_tokens += num_drafts;
            step.num_samples += num_drafts;
        }
        step.rows[num_plain..step.num_decodes].copy_from_slice(&checking);
        (step.num_decodes, step.num_draft_rows) = (num_plain, checking.len());
        checking.clear();
        self.drafts.checking = checking;
        self.drafts.clear();
    }

    /// Puts a decoding sequence's drafts behind its last token, as many as there is room for. Returns how many.
    fn add_drafts_to(&mut self, index: SeqIndex, num_tokens: usize) -> usize {
        let sequence = &mut self.sequences[index];
        let drafts = self.drafts.of(sequence.row());
        let (known, size) = (sequence.tokens.len(), self.block_size);
        let budget = self.config.max_num_batched_tokens - num_tokens;
        let wanted = drafts.len().min(sequence.max_len - known - 1).min(budget);
        if wanted == 0 || sequence.num_samples != 1 {
            return 0;
        }
        let more = self.cache.available() / sequence.tables.len();
        let len = size.blocks_for(known + wanted).min(size.blocks_for(known) + more);
        for table in &mut sequence.tables {
            let missing = len.saturating_sub(table.len());
            self.cache.extend(table, missing).expect("so many blocks are there");
        }
        let num_drafts = wanted.min(len * size.tokens() - known);
        sequence.tokens.extend_from_slice(&drafts[..num_drafts]);
        sequence.num_drafts = num_drafts;
        sequence.num_planned += num_drafts;
        self.totals.draft_tokens += num_drafts as u64;
        num_drafts
    }

    /// The most drafts of a batch row that may be accepted: those that its samples agree with, from the first on.
    pub(super) fn agreeing(&self, scheduled: &Scheduled, samples: &[TokenId]) -> usize {
        let drafts = self.sequences[scheduled.sequence].drafts();
        drafts.iter().zip(samples).take_while(|(draft, sample)| draft == sample).count()
    }

    /// Takes in a row that checked drafts and of which so many were accepted; its samples begin at `first`.
    pub(super) fn settle_drafts(
        &mut self,
        scheduled: &Scheduled,
        first: usize,
        accepted: usize,
        sampled: &Sampled<'_>,
        finished: &mut impl FnMut(usize, FinishReason),
    ) {
        let index = scheduled.sequence;
        let outcomes = &sampled.outcomes[first..=first + accepted];
        let counted = outcomes.iter().take_while(|&&outcome| outcome == Outcome::Ok).count();
        let counted = (counted + 1).min(outcomes.len());
        self.totals.accepted_draft_tokens += (counted - 1) as u64;
        let known = self.sequences[index].num_known();
        self.keep_drafts(index, counted - 1);
        // What is published from here on was computed and accepted. Then each sample takes its place, as any other does.
        self.computed(index, self.sequences[index].num_planned);
        self.sequences[index].tokens.truncate(known);
        for sample in first..first + counted {
            finished(sample, self.accept(index, sampled.tokens[sample], sampled.outcomes[sample]));
        }
        let rest = first + counted..first + scheduled.num_samples;
        rest.for_each(|sample| finished(sample, FinishReason::Rejected));
    }

    /// Takes the drafts out of a sequence but for the first `kept`, and gives back the blocks that were taken for the rest.
    pub(super) fn keep_drafts(&mut self, index: SeqIndex, kept: usize) {
        let sequence = &mut self.sequences[index];
        if sequence.num_drafts == 0 {
            return;
        }
        let len = sequence.num_known() + kept;
        sequence.num_drafts = 0;
        sequence.tokens.truncate(len);
        sequence.num_planned = len;
        let num_blocks = self.block_size.blocks_for(len);
        sequence.tables.iter_mut().for_each(|table| table.truncate(num_blocks));
    }
}

impl Sequence {
    /// Its tokens without the drafts.
    pub(super) fn num_known(&self) -> usize {
        self.tokens.len() - self.num_drafts
    }

    fn drafts(&self) -> &[TokenId] {
        &self.tokens[self.num_known()..]
    }

    /// Blocks of one of its tables that stay there whatever becomes of the drafts.
    pub(super) fn num_lasting_blocks(&self, table: &BlockTable) -> usize {
        if self.num_drafts == 0 {
            return table.len();
        }
        table.block_size().blocks_for(self.num_known()).min(table.len())
    }
}

/// Writes the samples of a row that checks drafts, the first of its tokens being the step's token `token`.
pub(super) fn write_draft_samples(
    arrays: &StepArrays<'_>,
    sample: usize,
    token: usize,
    row: Row,
    scheduled: &Scheduled,
) {
    for place in 0..scheduled.num_samples {
        arrays.sample_indices[sample + place].set((token + place) as i64);
        arrays.sample_rows[sample + place].set(row.get() as i32);
        arrays.sample_positions[sample + place].set((scheduled.start + place + 1) as i64);
    }
}
