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
    /// The same two in layers with a window, which neither read nor attend to what left it.
    pub window_context: u64,
    /// See `window_context`.
    pub window_pairs: u64,
    /// Blocks that are copied to or from the host.
    pub swapped_blocks: u64,
}

impl Work {
    /// Adds a sequence that computes `num_tokens` after `num_computed` others, of a model some of whose layers have a
    /// window of so many tokens; 0: none has.
    pub fn add(&mut self, num_computed: usize, num_tokens: usize, window: usize) {
        let (before, new) = (num_computed as u64, num_tokens as u64);
        if window > 0 {
            let window = window as u64;
            self.window_context += before.min(window - 1) + new;
            // The first tokens attend to all before them and to themselves, the others to a window.
            let growing = window.saturating_sub(before).min(new);
            self.window_pairs += growing * before + growing * (growing + 1) / 2 + (new - growing) * window;
        }
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
    /// Memory: of reading the weights that every step reads.
    pub weights: f64,
    /// Memory: of reading all experts. A step reads those that one of its tokens is sent to.
    pub experts: f64,
    /// The share of the experts that one token is sent to, any as likely as another.
    pub expert_share: f64,
    /// Memory: of each token of context that is read.
    pub per_context_token: f64,
    /// Tokens that layers with a window see; 0: there is none.
    pub window: usize,
    /// Compute: of each pair of tokens in the attention of layers with a window.
    pub per_window_pair: f64,
    /// Memory: of each token that layers with a window read.
    pub per_window_token: f64,
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
            ("experts", self.experts),
            ("per_context_token", self.per_context_token),
            ("per_window_pair", self.per_window_pair),
            ("per_window_token", self.per_window_token),
            ("per_swapped_block", self.per_swapped_block),
        ];
        for (field, seconds) in parts {
            if !(0.0..=MAX_SECONDS).contains(&seconds) {
                return Err(Error::config(field, seconds, "seconds from 0 to 3600"));
            }
        }
        if !(0.0..=1.0).contains(&self.expert_share) {
            return Err(Error::config("expert_share", self.expert_share, "0 to 1"));
        }
        if self.window > MAX_WINDOW {
            return Err(Error::config("window", self.window, format!("0 to {MAX_WINDOW} tokens")));
        }
        let mut one = Work::default();
        one.add(0, 1, self.window);
        if self.seconds(one) < MIN_SECONDS {
            return Err(Error::config("cost", "no time", "a model under which a step takes at least 1 ns"));
        }
        Ok(())
    }

    /// How long a step takes, in seconds.
    pub fn seconds(&self, work: Work) -> f64 {
        let attention = self.per_pair * work.pairs as f64 + self.per_window_pair * work.window_pairs as f64;
        let compute = self.per_token * work.tokens as f64 + attention;
        let cache =
            self.per_context_token * work.context as f64 + self.per_window_token * work.window_context as f64;
        let memory = self.weights + self.experts * self.share_of_experts(work.tokens) + cache;
        let both = if self.overlaps { compute.max(memory) } else { compute + memory };
        let swaps = self.per_swapped_block * work.swapped_blocks as f64;
        self.fixed + self.per_sequence * work.sequences as f64 + swaps + both
    }

    /// The share of the experts that at least one of so many tokens is sent to, on average.
    fn share_of_experts(&self, tokens: u64) -> f64 {
        // Squared and multiplied by hand: a library's power may differ in the last bit from machine to machine.
        let (mut missed, mut factor, mut left) = (1.0, 1.0 - self.expert_share, tokens);
        while left > 0 {
            if left & 1 == 1 {
                missed *= factor;
            }
            factor *= factor;
            left >>= 1;
        }
        1.0 - missed
    }
}

const MAX_WINDOW: usize = 1 << 30;
const MAX_SECONDS: f64 = 3600.0;
const MIN_SECONDS: f64 = 1e-9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_attends_to_what_lies_before_it_and_to_itself() {
        let mut work = Work::default();
        work.add(10, 3, 0);
        work.add(5, 1, 0);
        assert_eq!(work, Work { sequences: 2, tokens: 4, context: 19, pairs: 36 + 6, ..Work::default() });
    }

    #[test]
    fn layers_with_a_window_see_no_more_than_it() {
        for (before, new, window) in [(0, 5, 8), (0, 20, 8), (6, 5, 8), (30, 1, 8), (30, 9, 8), (3, 2, 1)] {
            let mut work = Work::default();
            work.add(before, new, window);
            let seen = |position: usize| (position + 1).min(window);
            let pairs: usize = (before..before + new).map(seen).sum();
            let first = (before + 1).saturating_sub(window);
            assert_eq!(
                (work.window_pairs as usize, work.window_context as usize),
                (pairs, before + new - first),
                "{new} after {before}, window {window}"
            );
        }
    }

    #[test]
    fn a_step_reads_the_experts_that_its_tokens_are_sent_to() {
        let model = CostModel { experts: 1.0, expert_share: 0.25, ..CostModel::default() };
        let seconds = |tokens| model.seconds(Work { tokens, ..Work::default() });
        assert_eq!((seconds(0), seconds(1), seconds(2)), (0.0, 0.25, 1.0 - 0.75 * 0.75));
        assert!((seconds(11) - (1.0 - 0.75_f64.powi(11))).abs() < 1e-12);
        assert_eq!(seconds(1_000_000), 1.0);
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
