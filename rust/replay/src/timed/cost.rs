//! How long a step takes.

use pykv_core::{Error, Result};

/// What one step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Sequences in the batch.
    pub sequences: u64,
    /// Tokens that are computed.
    pub tokens: u64,
    /// Tokens whose keys and values are read: the context of each sequence once.
    pub context: u64,
    /// (token, token that it attends to) pairs.
    pub pairs: u64,
    /// Blocks that are copied to or from the host.
    pub swapped_blocks: u64,
}

impl Work {
    /// Adds a sequence that computes `num_tokens` after `num_computed` others.
    pub fn add(&mut self, num_computed: usize, num_tokens: usize) {
        let (before, new) = (num_computed as u64, num_tokens as u64);
        self.sequences += 1;
        self.tokens += new;
        self.context += before + new;
        self.pairs += new * before + new * (new + 1) / 2;
    }
}

/// Seconds of a step: `fixed + sequences + swaps + (compute and memory, added up or the larger of both)`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostModel {
    /// Of every step.
    pub fixed: f64,
    /// Of each sequence in the batch.
    pub per_sequence: f64,
    /// Compute: of each token.
    pub per_token: f64,
    /// Compute: of each pair of tokens in attention.
    pub per_pair: f64,
    /// Memory: of reading the weights.
    pub weights: f64,
    /// Memory: of each token of context that is read.
    pub per_context_token: f64,
    /// Of each block that is copied to or from the host.
    pub per_swapped_block: f64,
    /// Whether compute and memory overlap perfectly, as a roofline has it, or add up.
    pub overlaps: bool,
}

impl CostModel {
    /// Checks that no part is negative and that a step takes time.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] with the part that is not allowed.
    pub fn validate(&self) -> Result<()> {
        let parts = [
            ("fixed", self.fixed),
            ("per_sequence", self.per_sequence),
            ("per_token", self.per_token),
            ("per_pair", self.per_pair),
            ("weights", self.weights),
            ("per_context_token", self.per_context_token),
            ("per_swapped_block", self.per_swapped_block),
        ];
        for (field, seconds) in parts {
            if !(0.0..=MAX_SECONDS).contains(&seconds) {
                return Err(Error::config(field, seconds, "seconds from 0 to 3600"));
            }
        }
        let one = Work { sequences: 1, tokens: 1, context: 1, pairs: 1, swapped_blocks: 0 };
        if self.seconds(one) < MIN_SECONDS {
            return Err(Error::config("cost", "no time", "a model under which a step takes at least 1 ns"));
        }
        Ok(())
    }

    /// How long a step takes, in seconds.
    pub fn seconds(&self, work: Work) -> f64 {
        let compute = self.per_token * work.tokens as f64 + self.per_pair * work.pairs as f64;
        let memory = self.weights + self.per_context_token * work.context as f64;
        let both = if self.overlaps { compute.max(memory) } else { compute + memory };
        let swaps = self.per_swapped_block * work.swapped_blocks as f64;
        self.fixed + self.per_sequence * work.sequences as f64 + swaps + both
    }
}

const MAX_SECONDS: f64 = 3600.0;
const MIN_SECONDS: f64 = 1e-9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_attends_to_what_lies_before_it_and_to_itself() {
        let mut work = Work::default();
        work.add(10, 3);
        work.add(5, 1);
        assert_eq!(work, Work { sequences: 2, tokens: 4, context: 19, pairs: 36 + 6, swapped_blocks: 0 });
    }

    #[test]
    fn a_roofline_takes_the_larger_side_and_a_sum_takes_both() {
        let sum = CostModel { per_token: 1.0, weights: 3.0, ..CostModel::default() };
        let work = Work { tokens: 2, ..Work::default() };
        assert_eq!(sum.seconds(work), 5.0);
        assert_eq!(CostModel { overlaps: true, ..sum }.seconds(work), 3.0);
    }

    #[test]
    fn a_model_without_time_or_with_negative_time_is_refused() {
        assert!(CostModel::default().validate().is_err());
        let negative = CostModel { fixed: 1.0, per_token: -0.1, ..CostModel::default() };
        assert!(negative.validate().unwrap_err().to_string().contains("per_token is -0.1"));
        assert!(CostModel { fixed: 1e-3, ..CostModel::default() }.validate().is_ok());
    }
}
