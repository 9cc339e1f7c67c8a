//! The prompts that steps in flight compute in chunks, sorted by their blocks: the most that another prompt has in common
//! with any of them it has in common with one of the two that it stands between.

use std::cmp::Ordering;

use super::sequence::{SeqIndex, SeqKey};

/// A prompt that is being computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefill {
    pub(super) index: SeqIndex,
    pub(super) key: SeqKey,
    pub(super) num_tokens: usize,
}

#[derive(Debug)]
struct Listed {
    prefill: Prefill,
    /// Blocks that it has in common with the one before it.
    common: usize,
}

/// Where a prompt stands among those that are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    place: usize,
    /// Blocks that it has in common with the one before it there, and with the one behind.
    before: usize,
    behind: usize,
}

/// The prompts, in order.
#[derive(Debug, Default)]
pub(super) struct Prefilling {
    listed: Vec<Listed>,
    /// Rows of the step at hand that were looked at; none: the list is that of an earlier step.
    pub(super) num_rows: Option<usize>,
}

impl Prefilling {
    /// The most blocks that a prompt has in common with a listed one. `compare` is given a listed one and a number of blocks
    /// that the two have in common; it returns how many they have, and how the prompt compares with the listed one.
    pub(super) fn longest(&self, compare: impl Fn(SeqIndex, usize) -> (usize, Ordering)) -> usize {
        let Place { before, behind, .. } = self.place(compare);
        before.max(behind)
    }

    pub(super) fn insert(
        &mut self,
        prefill: Prefill,
        compare: impl Fn(SeqIndex, usize) -> (usize, Ordering),
    ) {
        let Place { place, before, behind } = self.place(compare);
        self.listed.insert(place, Listed { prefill, common: before });
        if let Some(next) = self.listed.get_mut(place + 1) {
            next.common = behind;
        }
    }

    pub(super) fn retain(&mut self, mut stays: impl FnMut(&Prefill) -> bool) {
        // Two that become neighbours have as much in common as all between them had.
        let mut common = usize::MAX;
        self.listed.retain_mut(|listed| {
            common = common.min(listed.common);
            let stays = stays(&listed.prefill);
            if stays {
                listed.common = std::mem::replace(&mut common, usize::MAX);
            }
            stays
        });
    }

    /// No block of the prompt is compared twice, but for one of each listed prompt: what it has in common with the last
    /// one that comes before it says how it compares with all that share more with that one, or less.
    fn place(&self, compare: impl Fn(SeqIndex, usize) -> (usize, Ordering)) -> Place {
        let mut before = 0;
        for (place, listed) in self.listed.iter().enumerate() {
            match listed.common.cmp(&before) {
                Ordering::Greater => {}
                Ordering::Less => return Place { place, before, behind: listed.common },
                Ordering::Equal => match compare(listed.prefill.index, before) {
                    (behind, Ordering::Less) => return Place { place, before, behind },
                    (common, _) => before = common,
                },
            }
        }
        Place { place: self.listed.len(), before, behind: 0 }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::units::RequestId;

    fn prefill(index: usize) -> Prefill {
        let key = SeqKey { rank: 0, request: RequestId::new(index as u64), child: 0 };
        Prefill { index: index as SeqIndex, key, num_tokens: 0 }
    }

    fn common(first: &[u8], second: &[u8]) -> usize {
        first.iter().zip(second).take_while(|(first, second)| first == second).count()
    }

    /// Prompts whose blocks are bytes, and how many of those were compared.
    struct Prompts {
        prompts: Vec<Vec<u8>>,
        num_compared: Cell<usize>,
    }

    impl Prompts {
        fn compare(&self, prompt: &[u8]) -> impl Fn(SeqIndex, usize) -> (usize, Ordering) {
            move |other, from| {
                let other = &self.prompts[other as usize];
                let both = from + common(&prompt[from..], &other[from..]);
                assert_eq!(both, common(prompt, other), "the first {from} blocks are in common");
                self.num_compared.set(self.num_compared.get() + both - from + 1);
                (both, prompt.cmp(other))
            }
        }
    }

    proptest! {
        #[test]
        fn the_longest_common_run_is_found_wherever_prompts_come_and_go(
            prompts in vec(vec(0u8..2, 0..9), 1..24),
            leaves in vec(any::<bool>(), 24),
            wanted in vec(0u8..2, 0..9),
        ) {
            let prompts = Prompts { prompts, num_compared: Cell::new(0) };
            let mut prefilling = Prefilling::default();
            for (index, prompt) in prompts.prompts.iter().enumerate() {
                prefilling.insert(prefill(index), prompts.compare(prompt));
            }
            for round in 0..2 {
                let lists = |index: usize| round == 0 || !leaves[index];
                prefilling.retain(|prefill| lists(prefill.index as usize));
                let listed = (0..prompts.prompts.len()).filter(|&index| lists(index));
                let expected = listed.map(|index| common(&prompts.prompts[index], &wanted)).max();
                prop_assert_eq!(prefilling.longest(prompts.compare(&wanted)), expected.unwrap_or(0));
            }
        }
    }

    #[test]
    fn a_prompt_is_compared_once_however_many_begin_like_it() {
        let prompt = |index: usize| {
            let mut prompt = vec![1; 1000];
            // Some part early, each a block behind the one before it, and some late.
            prompt[if index.is_multiple_of(2) { index } else { 999 }] = index as u8 + 2;
            prompt
        };
        let prompts = Prompts { prompts: (0..200).map(prompt).collect(), num_compared: Cell::new(0) };
        let mut prefilling = Prefilling::default();
        for (index, prompt) in prompts.prompts.iter().enumerate() {
            prompts.num_compared.set(0);
            prefilling.insert(prefill(index), prompts.compare(prompt));
            assert!(prompts.num_compared.get() <= prompt.len() + index + 1);
        }
        prompts.num_compared.set(0);
        assert_eq!(prefilling.longest(prompts.compare(&[1; 1000])), 999);
        assert!(prompts.num_compared.get() <= 1000 + 200);
    }
}
