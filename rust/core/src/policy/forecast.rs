//! How many blocks the running sequences will need at the worst moment to come.
//!
//! All grow by a token a step until they end and give their own blocks back, so the worst moments are those just before
//! an end. A sequence that is admitted only if the worst moment fits is not preempted, as long as lengths come true.

use crate::units::BlockSize;

/// A sequence as the forecast sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Tokens that it has.
    pub num_tokens: usize,
    /// Its first blocks that others hold too: they are not given back when it ends.
    pub shared_blocks: usize,
    /// Steps until it ends.
    pub remaining: usize,
}

/// The most blocks that are held at once, if `base` blocks are held by others all along. Sorts `sequences`.
pub fn peak_blocks(base: usize, sequences: &mut [Growth], block_size: BlockSize) -> usize {
    sequences.sort_unstable_by_key(|sequence| std::cmp::Reverse(sequence.remaining));
    // Seen in this order, the sequences so far are those that live when the one at hand ends.
    let (mut tokens, mut shared, mut peak) = (0, 0, 0);
    for (index, sequence) in sequences.iter().enumerate() {
        let living = index + 1;
        tokens += sequence.num_tokens;
        shared += sequence.shared_blocks;
        let slots = tokens + living * sequence.remaining;
        // On average half of each last block is empty.
        let blocks = slots / block_size.tokens() + living.div_ceil(2);
        peak = peak.max(blocks.saturating_sub(shared));
    }
    base + peak
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn growth(num_tokens: usize, remaining: usize) -> Growth {
        Growth { num_tokens, shared_blocks: 0, remaining }
    }

    fn peak(sequences: &[Growth]) -> usize {
        peak_blocks(0, &mut sequences.to_vec(), BlockSize::new(16).unwrap())
    }

    #[test]
    fn one_sequence_peaks_at_its_end() {
        assert_eq!(peak(&[growth(160, 160)]), 20 + 1);
        assert_eq!(peak(&[]), 0);
    }

    #[test]
    fn a_sequence_that_ends_first_makes_room_for_the_other() {
        let apart = peak(&[growth(160, 16), growth(160, 320)]);
        let together = peak(&[growth(160, 320), growth(160, 320)]);
        assert_eq!((apart, together), (30 + 1, 60 + 1));
    }

    #[test]
    fn shared_blocks_count_once_in_the_base() {
        let sequences = [Growth { shared_blocks: 8, ..growth(160, 16) }; 2];
        assert_eq!(
            peak_blocks(8, &mut sequences.to_vec(), BlockSize::new(16).unwrap()),
            8 + 2 * (11 - 8) + 1
        );
    }
}
