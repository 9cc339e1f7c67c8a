//! How many blocks the running sequences will need at the worst moment to come.
//!
//! All grow by a token a step until they end and give their own blocks back, so the worst moments are those just before
//! an end. A sequence that is admitted only if the worst moment fits is not preempted, as long as lengths come true.

use crate::groups::LayerGroup;
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
pub fn peak_blocks(
    base: usize,
    sequences: &mut [Growth],
    groups: &[LayerGroup],
    block_size: BlockSize,
) -> usize {
    let num_full = groups.iter().filter(|group| group.is_full()).count();
    let mut peak = base;
    if num_full > 0 {
        peak += num_full * peak_of_one_group(sequences, block_size);
    }
    // A window soon holds all that it ever will: taken at its most for everybody at once.
    for group in groups.iter().filter(|group| !group.is_full()) {
        let at_end = |sequence: &Growth| sequence.num_tokens + sequence.remaining;
        let most = |sequence| group.most_blocks(at_end(sequence), 1, block_size);
        peak += sequences.iter().map(most).sum::<usize>();
    }
    peak
}

fn peak_of_one_group(sequences: &mut [Growth], block_size: BlockSize) -> usize {
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
    peak
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn growth(num_tokens: usize, remaining: usize) -> Growth {
        Growth { num_tokens, shared_blocks: 0, remaining }
    }

    fn peak(sequences: &[Growth]) -> usize {
        peak_blocks(0, &mut sequences.to_vec(), &[LayerGroup::Full], BlockSize::new(16).unwrap())
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
        let peak = |groups: &[LayerGroup]| {
            peak_blocks(8, &mut sequences.to_vec(), groups, BlockSize::new(16).unwrap())
        };
        assert_eq!(peak(&[LayerGroup::Full]), 8 + 2 * (11 - 8) + 1);
        assert_eq!(peak(&[LayerGroup::Full; 2]), 8 + 2 * (2 * (11 - 8) + 1));
    }

    #[test]
    fn a_window_counts_what_it_holds_at_most() {
        let window = LayerGroup::Window { tokens: 33 };
        let sequences = [growth(160, 16), growth(8, 8)];
        let peak = peak_blocks(0, &mut sequences.to_vec(), &[window], BlockSize::new(16).unwrap());
        assert_eq!(peak, 3 + 1);
    }
}
