//! Units as types, and the one place that converts between them.

use crate::error::{Error, Result};

/// A token's number in the model's vocabulary.
pub type TokenId = u32;

/// The highest token id: arrays of ids are int32.
pub const MAX_TOKEN_ID: TokenId = i32::MAX as TokenId;

/// A block of the pool. Block 0 is the null block: never handed out, never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockId(u32);

impl BlockId {
    /// The block that stands for "no block": padding, and the parent of every first block.
    pub const NULL: Self = Self(0);

    /// The block with this number.
    pub const fn new(id: u32) -> Self {
        Self(id)
    }

    /// The number, as it stands in a block table.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number, to index an array that has one entry a block.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A running sequence's row in the block tables, kept for as long as the sequence runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Row(u32);

impl Row {
    /// The row with this number.
    pub const fn new(row: u32) -> Self {
        Self(row)
    }

    /// The number, as it stands in `table_rows`.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number, to index an array that has one entry a row.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A request's number: given once, never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

impl RequestId {
    /// The request with this number.
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// The number that the caller knows the request by.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// How many tokens a block holds: converts between tokens, blocks and slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    tokens: u32,
    /// The exponent of a size that is a power of two, else `NONE`: a shift costs a tenth of a division.
    shift: u32,
}

const NONE: u32 = u32::MAX;

impl BlockSize {
    /// The most tokens of a block.
    pub const MAX_TOKENS: usize = 65_536;

    /// Blocks of one token.
    pub(crate) const ONE: Self = Self { tokens: 1, shift: 0 };

    /// A block of this many tokens.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if it is zero or above 65,536.
    pub fn new(tokens: usize) -> Result<Self> {
        match u32::try_from(tokens) {
            Ok(tokens) if (1..=Self::MAX_TOKENS).contains(&(tokens as usize)) => {
                let shift = if tokens.is_power_of_two() { tokens.trailing_zeros() } else { NONE };
                Ok(Self { tokens, shift })
            }
            _ => Err(Error::config("block_size", tokens, format!("1 to {}", Self::MAX_TOKENS))),
        }
    }

    /// Tokens a block.
    pub const fn tokens(self) -> usize {
        self.tokens as usize
    }

    /// The fewest blocks that hold so many tokens.
    pub const fn blocks_for(self, num_tokens: usize) -> usize {
        self.full_blocks(num_tokens + (self.tokens() - 1))
    }

    /// The blocks that so many tokens fill completely.
    pub const fn full_blocks(self, num_tokens: usize) -> usize {
        if self.shift == NONE { num_tokens / self.tokens() } else { num_tokens >> self.shift }
    }

    /// Where in its block a position lies.
    pub const fn offset(self, position: usize) -> usize {
        position - self.full_blocks(position) * self.tokens()
    }

    /// The slot of a position whose block is known.
    pub const fn slot(self, block: BlockId, position: usize) -> i64 {
        (block.index() * self.tokens() + self.offset(position)) as i64
    }
}
