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

/// The prompts, in order.
#[derive(Debug, Default)]
pub(super) struct Prefilling {
    prefills: Vec<Prefill>,
    /// Their places there, sorted: what moves when one more comes is small.
    sorted: Vec<u32>,
    /// Rows of the step at hand that were looked at; none: the list is that of an earlier step.
    pub(super) num_rows: Option<usize>,
}

/// Where a prompt stands among those that are listed.
#[derive(Clone, Copy, Debug)]
struct Bound {
    place: usize,
    /// Blocks that it has in common with the one there.
    common: usize,
}

impl Prefilling {
    /// The most blocks that a prompt has in common with a listed one. `compare` is given a listed one and a number of blocks
    /// that the two have in common; it returns how many they have, and how the prompt compares with the listed one.
    pub(super) fn longest(&self, compare: impl Fn(SeqIndex, usize) -> (usize, Ordering)) -> usize {
        let [before, behind] = self.bounds(compare);
        before.map_or(0, |before| before.common).max(behind.map_or(0, |behind| behind.common))
    }

    pub(super) fn insert(
        &mut self,
        prefill: Prefill,
        compare: impl Fn(SeqIndex, usize) -> (usize, Ordering),
    ) {
        let [_, behind] = self.bounds(compare);
        let place = behind.map_or(self.sorted.len(), |behind| behind.place);
        self.sorted.insert(place, self.prefills.len() as u32);
        self.prefills.push(prefill);
    }

    pub(super) fn retain(&mut self, mut stays: impl FnMut(&Prefill) -> bool) {
        const GONE: u32 = u32::MAX;
        let mut num_left = 0;
        let mut place_of = |prefill: &Prefill| {
            let place = if stays(prefill) { num_left } else { GONE };
            num_left += u32::from(place != GONE);
            place
        };
        let places: Vec<u32> = self.prefills.iter().map(&mut place_of).collect();
        let mut stayed = places.iter().map(|&place| place != GONE);
        self.prefills.retain(|_| stayed.next().unwrap_or(false));
        self.sorted.iter_mut().for_each(|place| *place = places[*place as usize]);
        self.sorted.retain(|&place| place != GONE);
    }

    /// The listed prompts that a prompt stands between. It is compared with few of them: of those between two others, it has
    /// as many blocks in common with each as with one of the two at least.
    fn bounds(&self, compare: impl Fn(SeqIndex, usize) -> (usize, Ordering)) -> [Option<Bound>; 2] {
        let (mut before, mut behind): (Option<Bound>, Option<Bound>) = (None, None);
        let mut narrow = |place: usize| {
            let known = before.zip(behind).map_or(0, |(before, behind)| before.common.min(behind.common));
            let (common, order) = compare(self.prefills[self.sorted[place] as usize].index, known);
            let bound = if order == Ordering::Less { &mut behind } else { &mut before };
            *bound = Some(Bound { place, common });
            order
        };
        // The ends first: all that are listed may begin alike.
        let Some(last) = self.sorted.len().checked_sub(1) else { return [None, None] };
        if narrow(last) == Ordering::Less && last > 0 && narrow(0) != Ordering::Less {
            let (mut low, mut high) = (0, last);
            while high - low > 1 {
                let place = low.midpoint(high);
                match narrow(place) {
                    Ordering::Less => high = place,
                    _ => low = place,
                }
            }
        }
        [before, behind]
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
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

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
    fn a_prompt_is_compared_with_few_however_many_are_listed() {
        let num_prompts = 4000;
        let prompts =
            (0..num_prompts).map(|index: u32| index.wrapping_mul(2_654_435_761).to_be_bytes().to_vec());
        let prompts = Prompts { prompts: prompts.collect(), num_compared: Cell::new(0) };
        let mut prefilling = Prefilling::default();
        for (index, prompt) in prompts.prompts.iter().enumerate() {
            prefilling.insert(prefill(index), prompts.compare(prompt));
        }
        let listed = prefilling.sorted.iter().map(|&place| &prompts.prompts[place as usize]);
        assert!(listed.is_sorted());
        // Each comparison looks at one block at least, and at no more than the four that there are.
        assert!(prompts.num_compared.get() <= num_prompts as usize * (2 + 12) * 4);
    }

    #[test]
    fn what_all_prompts_begin_with_is_compared_twice() {
        let prompt = |index: usize| {
            let mut prompt = vec![1; 1000];
            prompt[990 + index % 10] = index as u8 + 2;
            prompt
        };
        let prompts = Prompts { prompts: (0..200).map(prompt).collect(), num_compared: Cell::new(0) };
        let mut prefilling = Prefilling::default();
        for (index, prompt) in prompts.prompts.iter().enumerate() {
            prompts.num_compared.set(0);
            prefilling.insert(prefill(index), prompts.compare(prompt));
            assert!(prompts.num_compared.get() <= 2 * 1000 + 8 * 10);
        }
        prompts.num_compared.set(0);
        assert_eq!(prefilling.longest(prompts.compare(&[1; 1000])), 999);
        assert!(prompts.num_compared.get() <= 2 * 1000 + 8 * 10);
    }
}
