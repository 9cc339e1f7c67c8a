//! Who gives way when no block is left.

/// A running sequence that may be preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Where it stands in the running list: older ones come first.
    pub place: usize,
    /// Tokens that would have to be computed again.
    pub lost_tokens: usize,
}

/// The candidate that costs the least to bring back; among equals the youngest.
pub fn victim(candidates: impl Iterator<Item = Candidate>) -> Option<Candidate> {
    candidates.min_by_key(|candidate| (candidate.lost_tokens, std::cmp::Reverse(candidate.place)))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn chosen(lost: &[usize]) -> Option<usize> {
        let all = lost.iter().enumerate().map(|(place, &lost_tokens)| Candidate { place, lost_tokens });
        victim(all).map(|candidate| candidate.place)
    }

    #[test]
    fn the_cheapest_gives_way_and_among_equals_the_youngest() {
        assert_eq!(chosen(&[30, 10, 20]), Some(1));
        assert_eq!(chosen(&[10, 10, 10]), Some(2));
        assert_eq!(chosen(&[]), None);
    }
}
