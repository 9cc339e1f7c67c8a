//! At which tokens a sequence's states are worth a checkpoint, and where a chunk ends so that one can be taken.
//!
//! A state cannot be cut back, so a checkpoint is taken where a step ends. Every `interval` tokens is a place for one;
//! a chunk that passes several of them ends at the last and has that one only. Besides, a prompt whose beginning is
//! cached further than its hit reaches has one at the end of what is cached: where two prompts have parted, a third may.

/// Where a chunk over the tokens `start..end` ends.
pub fn chunk_end(start: usize, end: usize, interval: usize, parting: usize) -> usize {
    if start < parting && parting <= end {
        return parting;
    }
    let last = end - end % interval;
    if last > start { last } else { end }
}

/// Whether a step that ends behind `end` tokens of a sequence takes a checkpoint.
pub fn takes_checkpoint(end: usize, interval: usize, parting: usize) -> bool {
    end.is_multiple_of(interval) || end == parting
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_ends_at_the_last_place_that_it_passes() {
        let end = |start, end| chunk_end(start, end, 8, 0);
        assert_eq!([end(0, 5), end(0, 8), end(0, 23), end(16, 23), end(5, 8)], [5, 8, 16, 23, 8]);
    }

    #[test]
    fn where_prompts_have_parted_comes_first() {
        let end = |start, end| chunk_end(start, end, 8, 12);
        assert_eq!([end(0, 30), end(0, 12), end(12, 30), end(0, 11)], [12, 12, 24, 8]);
        assert_eq!([8, 12, 13].map(|end| takes_checkpoint(end, 8, 12)), [true, true, false]);
    }

    #[test]
    fn every_chunk_computes_something() {
        for start in 0..40 {
            for end in start + 1..48 {
                for parting in 0..48 {
                    assert!((start + 1..=end).contains(&chunk_end(start, end, 8, parting)));
                }
            }
        }
    }
}
