//! Reads a step's index arrays, checks every value that is used, and copies the block ids.

use std::ops::Range;

use super::{Plan, PlanShape, Row, Table};
use crate::{Error, StepView};

impl Plan {
    /// Fills the rows, their block ids and the tokens without keys.
    pub(super) fn read_rows(&mut self, step: &StepView, shape: &PlanShape) -> Result<(), Error> {
        let mut start = check_start(step, shape, 0, 0)?;
        self.add_empty(0..start);
        for index in 0..step.seq_lens.len() {
            let end = check_start(step, shape, index + 1, start)?;
            let length = check_length(step, shape, index, end - start)?;
            if length == 0 || start == end {
                self.add_empty(start..end);
            } else {
                let table = self.read_table(step, shape, index, end - start, length)?;
                self.rows.push(Row { first_token: start, num_tokens: end - start, length, table });
            }
            start = end;
        }
        self.add_empty(start..shape.num_tokens);
        Ok(())
    }

    fn add_empty(&mut self, tokens: Range<usize>) {
        if !tokens.is_empty() {
            self.empty.push(tokens);
        }
    }

    /// Copies the ids of the blocks that the row's tokens see; no others are looked at.
    fn read_table(
        &mut self,
        step: &StepView,
        shape: &PlanShape,
        index: usize,
        num_queries: usize,
        length: usize,
    ) -> Result<Table, Error> {
        let row = table_row(step, index)?;
        let first_block = shape.first_seen(length - num_queries) / shape.block_size;
        let columns = first_block..length.div_ceil(shape.block_size);
        let table = Table { start: self.blocks.len(), first_block };
        let ids = &step.block_tables[row * step.table_stride..][columns];
        for (offset, &value) in ids.iter().enumerate() {
            match usize::try_from(value) {
                Ok(block) if block < shape.num_blocks => self.blocks.push(block),
                _ => {
                    let column = first_block + offset;
                    return Err(Error::Block { row, column, value, num_blocks: shape.num_blocks });
                }
            }
        }
        Ok(table)
    }
}

fn check_start(step: &StepView, shape: &PlanShape, index: usize, at_least: usize) -> Result<usize, Error> {
    let value = step.query_starts[index];
    let bounds = if index == 0 { 0..=0 } else { at_least..=shape.num_tokens };
    match usize::try_from(value) {
        Ok(start) if bounds.contains(&start) => Ok(start),
        _ => Err(Error::QueryStarts { index, value, num_tokens: shape.num_tokens }),
    }
}

fn check_length(
    step: &StepView,
    shape: &PlanShape,
    index: usize,
    num_queries: usize,
) -> Result<usize, Error> {
    let value = step.seq_lens[index];
    let Ok(length) = usize::try_from(value) else {
        return Err(Error::TooShort { index, value, num_queries });
    };
    let capacity = step.num_columns * shape.block_size;
    match length {
        _ if length > capacity => Err(Error::TooLong { index, value, capacity }),
        _ if length > 0 && length < num_queries => Err(Error::TooShort { index, value, num_queries }),
        _ => Ok(length),
    }
}

fn table_row(step: &StepView, index: usize) -> Result<usize, Error> {
    let value = step.table_rows.map_or(index as i64, |rows| i64::from(rows[index]));
    match usize::try_from(value) {
        Ok(row) if row < step.num_table_rows => Ok(row),
        _ => Err(Error::TableRow { index, value, num_table_rows: step.num_table_rows }),
    }
}
