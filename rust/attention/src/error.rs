use thiserror::Error;

/// What the caller's index arrays or views have wrong; nothing was read or written then.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// The query ranges do not rise from 0 to the number of tokens.
    #[error(
        "query_starts must rise from 0 to at most {num_tokens}, the number of query tokens; entry {index} is {value}"
    )]
    QueryStarts {
        /// Which entry.
        index: usize,
        /// What it holds.
        value: i32,
        /// How many query tokens there are.
        num_tokens: usize,
    },
    /// A batch row points outside the block tables.
    #[error("table_rows[{index}] is {value}; block_tables has {num_table_rows} rows")]
    TableRow {
        /// Which batch row.
        index: usize,
        /// The table row that it names.
        value: i64,
        /// How many there are.
        num_table_rows: usize,
    },
    /// A sequence is shorter than its new tokens, or its length is negative.
    #[error("seq_lens[{index}] is {value}; the row has {num_queries} query tokens")]
    TooShort {
        /// Which batch row.
        index: usize,
        /// Its length.
        value: i32,
        /// Its query tokens.
        num_queries: usize,
    },
    /// A sequence is longer than its row of the block tables.
    #[error("seq_lens[{index}] is {value}; a row of block_tables holds {capacity} tokens")]
    TooLong {
        /// Which batch row.
        index: usize,
        /// Its length.
        value: i32,
        /// What a table row can hold.
        capacity: usize,
    },
    /// A table names a block that the cache does not have.
    #[error("block_tables[{row}][{column}] is {value}; the cache has {num_blocks} blocks")]
    Block {
        /// The table row.
        row: usize,
        /// The entry of the row.
        column: usize,
        /// The block id.
        value: i32,
        /// How many blocks the cache has.
        num_blocks: usize,
    },
    /// A slot lies outside the cache.
    #[error("slot_mapping[{index}] is {value}: allowed are -1 to {last}")]
    Slot {
        /// Which token.
        index: usize,
        /// Its slot.
        value: i64,
        /// The last slot of the cache.
        last: i64,
    },
    /// A copy names a block that the cache does not have.
    #[error("pairs[{index}] names block {value}; the cache has {num_blocks} blocks")]
    Pair {
        /// Which pair.
        index: usize,
        /// The block id.
        value: i64,
        /// How many blocks the cache has.
        num_blocks: usize,
    },
    /// A call panicked earlier.
    #[error("refused after an earlier call panicked")]
    Poisoned,
    /// Two views that belong together differ in shape or format.
    #[error("{0}")]
    Mismatch(&'static str),
}
