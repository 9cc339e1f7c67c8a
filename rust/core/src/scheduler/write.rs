//! A decided step as the caller's arrays; of the block tables only what has changed.

use std::cell::Cell;
use std::ops::Range;

use super::Scheduler;
use super::buffers::{StepArrays, TableSync};
use super::sequence::Sequence;
use super::speculation::write_draft_samples;
use super::step::{Scheduled, Step};
use crate::states::StateCopy;
use crate::table::{BlockCopy, BlockTable};
use crate::units::{BlockSize, Row};

impl Scheduler {
    pub(super) fn write(&self, step: &Step, arrays: &StepArrays<'_>, sync: &mut TableSync) {
        let has_states = self.cache.has_states();
        let mut token = 0;
        let mut sample = 0;
        arrays.query_starts[0].set(0);
        for (batch_row, scheduled) in step.rows.iter().enumerate() {
            let sequence = &self.sequences[scheduled.sequence];
            self.write_tokens(arrays, token, sequence, scheduled);
            token += scheduled.num_tokens;
            arrays.query_starts[batch_row + 1].set(token as i32);
            arrays.seq_lens[batch_row].set(sequence.num_planned as i32);
            arrays.table_rows[batch_row].set(sequence.row().get() as i32);
            if batch_row < step.num_decodes {
                arrays.token_sources[batch_row].set(sequence.placeholder.map_or(-1, |sample| sample as i32));
            }
            if has_states && let Some(slot) = sequence.states.working.first() {
                arrays.state_slots[batch_row].set(slot.get() as i32);
            }
            self.write_tables(arrays, sequence, sync);
            if sequence.num_drafts > 0 {
                let first = token - scheduled.num_tokens;
                write_draft_samples(arrays, sample, first, sequence.row(), scheduled);
                sample += scheduled.num_samples;
                continue;
            }
            for row in &sequence.rows[..scheduled.num_samples] {
                write_sample(arrays, sample, token - 1, *row, sequence.tokens.len());
                sample += 1;
            }
        }
        write_copies(&step.swap_outs, arrays.swap_out_pairs);
        write_copies(&step.swap_ins, arrays.swap_in_pairs);
        write_copies(&step.copies, arrays.copy_pairs);
        write_state_copies(&step.state_restores, arrays.state_restore_pairs);
        write_state_copies(&step.state_saves, arrays.state_save_pairs);
        write_placed(step, arrays);
        if let Some(lists) = arrays.page_lists {
            lists.write(step, &self.sequences, &self.config, &mut sync.pages);
        }
    }

    fn write_tokens(
        &self,
        arrays: &StepArrays<'_>,
        first: usize,
        sequence: &Sequence,
        scheduled: &Scheduled,
    ) {
        let positions = scheduled.start..scheduled.start + scheduled.num_tokens;
        for (place, position) in (first..).zip(positions.clone()) {
            arrays.token_ids[place].set(i64::from(sequence.tokens[position]));
            arrays.positions[place].set(position as i64);
        }
        for (group, table) in sequence.tables.iter().enumerate() {
            let slots = &arrays.slot_mapping[group * self.config.max_num_batched_tokens..][first..];
            write_slots(slots, table, positions.clone(), self.block_size);
        }
    }

    fn write_tables(&self, arrays: &StepArrays<'_>, sequence: &Sequence, sync: &mut TableSync) {
        for (group, table) in sequence.tables.iter().enumerate() {
            let row = group * self.config.max_num_seqs + sequence.row().index();
            let lasting = sequence.num_lasting_blocks(table);
            let (given_back, new) =
                sync.advance(row, sequence.epoch, table.len(), lasting, table.num_dropped());
            if given_back.is_empty() && new.is_empty() {
                continue;
            }
            let columns = self.config.max_blocks_per_seq();
            let line = &arrays.block_tables[row * columns..(row + 1) * columns];
            for places in [given_back, new] {
                let blocks = &table.blocks()[places.clone()];
                line[places].iter().zip(blocks).for_each(|(cell, block)| cell.set(block.get() as i32));
            }
        }
    }
}

fn write_slots(slots: &[Cell<i64>], table: &BlockTable, positions: Range<usize>, size: BlockSize) {
    let (mut position, mut place) = (positions.start, 0);
    while position < positions.end {
        let block = size.full_blocks(position);
        let run = positions.end.min((block + 1) * size.tokens()) - position;
        let slot = size.slot(table.blocks()[block], position);
        slots[place..place + run].iter().zip(slot..).for_each(|(cell, slot)| cell.set(slot));
        position += run;
        place += run;
    }
}

fn write_sample(arrays: &StepArrays<'_>, sample: usize, token: usize, row: Row, position: usize) {
    arrays.sample_indices[sample].set(token as i64);
    arrays.sample_rows[sample].set(row.get() as i32);
    arrays.sample_positions[sample].set(position as i64);
}

fn write_copies(copies: &[BlockCopy], pairs: &[Cell<i64>]) {
    for (copy, pair) in copies.iter().zip(pairs.chunks_exact(2)) {
        set_pair(pair, i64::from(copy.source.get()), i64::from(copy.target.get()));
    }
}

fn write_state_copies(copies: &[StateCopy], pairs: &[Cell<i64>]) {
    for (copy, pair) in copies.iter().zip(pairs.chunks_exact(2)) {
        set_pair(pair, i64::from(copy.source.get()), i64::from(copy.target.get()));
    }
}

fn set_pair(pair: &[Cell<i64>], source: i64, target: i64) {
    pair[0].set(source);
    pair[1].set(target);
}

fn write_placed(step: &Step, arrays: &StepArrays<'_>) {
    for (index, placed) in step.placed.iter().enumerate() {
        arrays.placed_requests[index].set(placed.request.get() as i64);
        arrays.placed_children[index].set(placed.child as i32);
        arrays.placed_rows[index].set(placed.row.get() as i32);
    }
}
