//! Layer groups: layers that keep their K and V for the same positions share one block table.
//!
//! All groups take their blocks from one pool, so every group has as many layers as the others: block `b` is the same
//! bytes whichever group holds it. Layers with full attention keep every position; layers with a sliding window of `W`
//! tokens keep those that a later query reads, `q - k < W`, and give the blocks before them back.

use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::table::BlockTable;
use crate::units::BlockSize;

/// One sequence's block tables, a group each.
pub type Tables = SmallVec<[BlockTable; 1]>;

/// Which positions the layers of a group keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerGroup {
    /// All of them.
    Full,
    /// The last `tokens`, the query's own included.
    Window {
        /// The window, in tokens.
        tokens: usize,
    },
}

/// The most groups that a model may have.
pub const MAX_GROUPS: usize = 64;

/// The most tokens of a window.
pub const MAX_WINDOW: usize = 1 << 30;

impl LayerGroup {
    /// Whether every position is kept.
    pub const fn is_full(self) -> bool {
        matches!(self, Self::Full)
    }

    /// The first block that a query at `position` reads, or any later one.
    pub const fn first_block(self, position: usize, size: BlockSize) -> usize {
        match self {
            Self::Full => 0,
            Self::Window { tokens } => size.full_blocks((position + 1).saturating_sub(tokens)),
        }
    }

    /// How many of `num_blocks` whole blocks the token after them reads: the last so many.
    pub const fn reads_back(self, num_blocks: usize, size: BlockSize) -> usize {
        num_blocks - self.first_block(num_blocks * size.tokens(), size)
    }

    /// The most blocks that a sequence of `num_tokens` holds at once, if a step computes at most `chunk` of them.
    pub fn most_blocks(self, num_tokens: usize, chunk: usize, size: BlockSize) -> usize {
        let all = size.blocks_for(num_tokens);
        match self {
            Self::Full => all,
            // The window before the chunk and the chunk lie anywhere between two block borders.
            Self::Window { tokens } => {
                all.min(size.blocks_for((tokens - 1).saturating_add(chunk).saturating_add(size.tokens() - 1)))
            }
        }
    }

    /// Checks a model's groups.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if there is none, if there are more than [`MAX_GROUPS`], or if a window is empty or above
    /// [`MAX_WINDOW`].
    pub fn validate(groups: &[Self]) -> Result<()> {
        if !(1..=MAX_GROUPS).contains(&groups.len()) {
            return Err(Error::config(
                "groups",
                format!("{} groups", groups.len()),
                format!("1 to {MAX_GROUPS}"),
            ));
        }
        let wrong = groups.iter().find_map(|group| match *group {
            Self::Window { tokens } if !(1..=MAX_WINDOW).contains(&tokens) => Some(tokens),
            _ => None,
        });
        wrong.map_or(Ok(()), |tokens| {
            let (value, allowed) = (format!("a window of {tokens} tokens"), format!("1 to {MAX_WINDOW}"));
            Err(Error::config("groups", value, allowed))
        })
    }
}

/// The most blocks that a sequence of `num_tokens` holds at once over all groups.
pub fn most_blocks(groups: &[LayerGroup], num_tokens: usize, chunk: usize, size: BlockSize) -> usize {
    groups.iter().map(|group| group.most_blocks(num_tokens, chunk, size)).sum()
}

/// The longest sequence, at most `limit` tokens, that never holds more than `num_blocks` blocks.
pub fn longest(
    groups: &[LayerGroup],
    num_blocks: usize,
    limit: usize,
    chunk: usize,
    size: BlockSize,
) -> usize {
    let fits = |num_tokens: usize| most_blocks(groups, num_tokens, chunk, size) <= num_blocks;
    // Holds for `low`, fails for `high`.
    let (mut low, mut high) = (0, limit + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn size(tokens: usize) -> BlockSize {
        BlockSize::new(tokens).unwrap()
    }

    /// The blocks that hold the keys of a query, position by position.
    fn blocks_read(window: usize, position: usize, block: usize) -> usize {
        (0..=position).find(|key| position - key < window).unwrap() / block
    }

    #[test]
    fn the_first_block_is_the_one_of_the_first_key_that_is_read() {
        for (window, block) in [(1, 1), (1, 4), (3, 4), (4, 4), (5, 4), (9, 3), (100, 4)] {
            let group = LayerGroup::Window { tokens: window };
            for position in 0..40 {
                let first = blocks_read(window, position, block);
                assert_eq!(group.first_block(position, size(block)), first, "window {window} at {position}");
            }
        }
        assert_eq!(LayerGroup::Full.first_block(1000, size(4)), 0);
    }

    #[test]
    fn a_hit_needs_the_blocks_that_its_next_token_reads() {
        let reads = |tokens| LayerGroup::Window { tokens }.reads_back(10, size(4));
        assert_eq!([1, 2, 5, 6, 9, 1000].map(reads), [0, 1, 1, 2, 2, 10]);
        assert_eq!(LayerGroup::Full.reads_back(10, size(4)), 10);
    }

    #[test]
    fn no_chunk_at_any_place_needs_more_than_the_most() {
        for (window, block, chunk) in [(1, 4, 1), (5, 4, 1), (8, 4, 8), (7, 3, 5), (16, 16, 2)] {
            let group = LayerGroup::Window { tokens: window };
            let most = group.most_blocks(usize::MAX / 2, chunk, size(block));
            let held =
                |start: usize| size(block).blocks_for(start + chunk) - group.first_block(start, size(block));
            assert_eq!(
                (0..200).map(held).max().unwrap(),
                most,
                "window {window}, block {block}, chunk {chunk}"
            );
        }
    }

    #[test]
    fn the_longest_sequence_fits_and_one_token_more_does_not() {
        let groups = [LayerGroup::Full, LayerGroup::Window { tokens: 9 }];
        let longest = |num_blocks| longest(&groups, num_blocks, 1000, 4, size(4));
        assert_eq!(longest(2), 4);
        assert_eq!(longest(20), 64);
        assert_eq!(most_blocks(&groups, 64, 4, size(4)), 20);
        assert_eq!(longest(usize::MAX), 1000);
    }

    #[test]
    fn no_group_and_an_empty_window_are_refused() {
        assert!(LayerGroup::validate(&[]).is_err());
        assert!(LayerGroup::validate(&[LayerGroup::Window { tokens: 0 }]).is_err());
        assert!(LayerGroup::validate(&[LayerGroup::Full; 65]).is_err());
        assert!(LayerGroup::validate(&[LayerGroup::Full]).is_ok());
    }
}
