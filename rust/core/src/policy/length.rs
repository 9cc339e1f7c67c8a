//! How long outputs turn out, learnt from those that ended or were cut off.

/// An estimate of output lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OutputEstimate {
    /// Mean share of its limit that an output with a limit of its own has reached.
    share: f64,
    /// Mean length of an output without one.
    unlimited: f64,
}

/// Weight of one more observation.
const WEIGHT: f64 = 0.02;

/// Tokens that an output without a limit is taken to have while nothing is known.
const FIRST_GUESS: f64 = 512.0;

impl Default for OutputEstimate {
    /// Who sets a limit is taken at his word, until outputs turn out shorter.
    fn default() -> Self {
        Self { share: 1.0, unlimited: FIRST_GUESS }
    }
}

impl OutputEstimate {
    /// Tokens that an output is expected to have: its own limit, if it has one, or room up to the cap.
    pub fn expected(self, limit: Option<usize>, room: usize) -> usize {
        let tokens = limit.map_or(self.unlimited, |limit| limit as f64 * self.share);
        (tokens.ceil() as usize).clamp(1, room.max(1))
    }

    /// The estimate after one more output has ended by itself with so many tokens.
    pub fn learn(self, limit: Option<usize>, num_tokens: usize) -> Self {
        self.learn_weighted(limit, num_tokens, |_| 1.0)
    }

    /// The estimate after one more output was cut off behind so many tokens. It would have had at least as many, and it
    /// held blocks for no more. It counts for the part of the expected length that it got to: who gives up early says little
    /// about those that go on, and they are the ones that hold the blocks.
    pub fn learn_cut(self, limit: Option<usize>, num_tokens: usize) -> Self {
        self.learn_weighted(limit, num_tokens, |part| part.min(1.0))
    }

    /// `weight` is given the observed length as a multiple of the expected one.
    fn learn_weighted(self, limit: Option<usize>, num_tokens: usize, weight: impl Fn(f64) -> f64) -> Self {
        let toward = |mean: f64, observed: f64| mean + WEIGHT * weight(observed / mean) * (observed - mean);
        let observed = num_tokens as f64;
        match limit {
            Some(limit) => Self { share: toward(self.share, observed / limit.max(1) as f64), ..self },
            None => Self { unlimited: toward(self.unlimited, observed), ..self },
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_believed_until_outputs_turn_out_shorter() {
        let mut estimate = OutputEstimate::default();
        assert_eq!(estimate.expected(Some(1000), 8000), 1000);
        for _ in 0..500 {
            estimate = estimate.learn(Some(1000), 100);
        }
        assert_eq!(estimate.expected(Some(1000), 8000), 101);
    }

    #[test]
    fn without_a_limit_the_mean_counts_within_the_room_that_is_left() {
        let mut estimate = OutputEstimate::default();
        assert_eq!(estimate.expected(None, 100), 100);
        for _ in 0..500 {
            estimate = estimate.learn(None, 50);
        }
        assert_eq!(estimate.expected(None, 8000), 51);
    }

    #[test]
    fn outputs_that_are_always_cut_off_are_expected_as_long_as_they_come() {
        let mut estimate = OutputEstimate::default();
        (0..3000).for_each(|_| estimate = estimate.learn_cut(None, 50).learn_cut(Some(1000), 100));
        assert_eq!((estimate.expected(None, 8000), estimate.expected(Some(1000), 8000)), (51, 101));
    }

    #[test]
    fn what_is_cut_off_early_says_little_and_what_never_began_nothing() {
        let mut estimate = OutputEstimate::default();
        (0..500).for_each(|_| estimate = estimate.learn(None, 1000));
        let before = estimate;
        (0..1000).for_each(|_| estimate = estimate.learn_cut(None, 0));
        assert_eq!(estimate, before);
        (0..1000).for_each(|_| estimate = estimate.learn_cut(None, 2));
        assert!(estimate.expected(None, 8000) > 900, "{estimate:?}");
    }
}
