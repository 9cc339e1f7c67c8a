//! Partial hits: a prompt's prefill starts inside a block, behind what was copied from a cached one.
//!
//! ```text
//! cached     [ a b c d ][ e f g h ]
//! prompt     [ a b c d ][ e f x y ] ...      "a b c d" is shared, "e f" is copied, "x y ..." is computed
//! ```

use super::Scheduler;
use super::sequence::{SeqIndex, Sequence};
use super::step::Step;
use crate::prefix::Cursor;
use crate::table::{BlockCopy, BlockTable};
use crate::units::TokenId;

impl Scheduler {
    /// Has the first block that a starting sequence did not find filled by a copy, as far as a cached block goes on like
    /// the sequence. Returns how many tokens that saves.
    pub(super) fn copy_partial_hit(
        &mut self,
        step: &mut Step,
        index: SeqIndex,
        tables: &[BlockTable],
        cursor: Cursor,
    ) -> usize {
        let sequence = &self.sequences[index];
        let is_taken = tables.iter().all(|table| table.len() > cursor.published);
        if !sequence.shares() || !is_taken {
            return 0;
        }
        let Some(hit) = self.cache.partial_hit(cursor, sequence.scope, sequence.all_but_last()) else {
            return 0;
        };
        for (&source, table) in hit.sources.held().iter().zip(tables) {
            step.copies.push(BlockCopy { source, target: table.blocks()[cursor.published] });
            step.copied_for.push(index);
        }
        step.sources.push(hit.sources);
        hit.num_tokens
    }

    /// How many tokens such a copy would save the sequence that was just looked up.
    pub(super) fn probe_partial_hit(&self, sequence: &Sequence) -> usize {
        if sequence.shares() { self.cache.probe_partial(sequence.scope, sequence.all_but_last()) } else { 0 }
    }

    /// Slots behind a sequence's computed tokens. A prefill that starts inside a block can need a block more than the
    /// sequence was admitted with where a window has let none go yet: its first chunk is shorter then.
    pub(super) fn slots_left(&self, index: SeqIndex) -> usize {
        let sequence = &self.sequences[index];
        let len = sequence.tables.iter().map(BlockTable::len).min().unwrap_or(0);
        len * self.block_size.tokens() - sequence.num_computed
    }
}

impl Sequence {
    /// Its last token is always computed.
    fn all_but_last(&self) -> &[TokenId] {
        &self.tokens[..self.tokens.len() - 1]
    }
}
