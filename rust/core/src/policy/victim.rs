//! Who gives way when no block is left, and how many.

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

/// The first of some offers that is enough, if each is more than the one before it. Few of them are asked.
pub fn fewest<T: Copy>(offers: &[T], mut is_enough: impl FnMut(T) -> bool) -> Option<T> {
    offers.get(offers.partition_point(|&offer| !is_enough(offer))).copied()
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

    #[test]
    fn few_offers_are_asked_to_find_the_first_that_is_enough() {
        let offers: Vec<usize> = (0..1024).collect();
        for wanted in [0, 1, 500, 1023, 2000] {
            let mut num_asked = 0;
            let found = fewest(&offers, |offer| {
                num_asked += 1;
                offer >= wanted
            });
            assert_eq!(found, (wanted < 1024).then_some(wanted));
            assert!(num_asked <= 11, "{num_asked} were asked");
        }
        assert_eq!(fewest(&[0; 0], |_| true), None);
    }
}
