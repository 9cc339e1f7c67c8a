//! A memory that is given out in unbroken pieces, each at the first place where it fits.

use std::collections::BTreeMap;

/// Free pieces of a memory of some slots.
#[derive(Debug)]
pub(super) struct FirstFit {
    /// Start and length of each free piece; no two touch.
    free: BTreeMap<usize, usize>,
    num_free: usize,
}

impl FirstFit {
    /// A memory that is free.
    pub(super) fn new(num_slots: usize) -> Self {
        Self { free: BTreeMap::from([(0, num_slots)]), num_free: num_slots }
    }

    /// Slots that are free.
    pub(super) fn num_free(&self) -> usize {
        self.num_free
    }

    /// The longest free piece.
    pub(super) fn largest(&self) -> usize {
        self.free.values().copied().max().unwrap_or(0)
    }

    /// Takes a piece. Returns its start, or none if no free piece is that long.
    pub(super) fn take(&mut self, num_slots: usize) -> Option<usize> {
        let (&start, &length) = self.free.iter().find(|(_, length)| **length >= num_slots)?;
        self.free.remove(&start);
        if length > num_slots {
            self.free.insert(start + num_slots, length - num_slots);
        }
        self.num_free -= num_slots;
        Some(start)
    }

    /// Gives a piece back.
    pub(super) fn give_back(&mut self, start: usize, num_slots: usize) {
        self.num_free += num_slots;
        let (mut start, mut length) = (start, num_slots);
        if let Some((&before, &its_length)) = self.free.range(..start).next_back()
            && before + its_length == start
        {
            self.free.remove(&before);
            (start, length) = (before, its_length + length);
        }
        length += self.free.remove(&(start + length)).unwrap_or(0);
        self.free.insert(start, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_hole_that_is_too_short_is_passed_and_neighbours_grow_together() {
        let mut memory = FirstFit::new(10);
        let pieces: Vec<_> = [3, 3, 3].map(|length| memory.take(length).unwrap()).into();
        memory.give_back(pieces[0], 3);
        memory.give_back(pieces[2], 3);
        assert_eq!((memory.num_free(), memory.largest()), (7, 4));
        assert_eq!(memory.take(5), None);
        assert_eq!(memory.take(4), Some(6));
        memory.give_back(pieces[1], 3);
        assert_eq!(memory.take(6), Some(0));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_gives_out_what_a_row_of_slots_would(operations in prop::collection::vec((0..3_u8, 1..9_usize), 1..60)) {
            let mut memory = FirstFit::new(32);
            let mut slots = [false; 32];
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (kind, length) in operations {
                if kind == 0 && !taken.is_empty() {
                    let (start, length) = taken.swap_remove(length % taken.len());
                    memory.give_back(start, length);
                    slots[start..start + length].fill(false);
                } else {
                    let fits = |start: &usize| slots[*start..start + length].iter().all(|used| !used);
                    let expected = (0..=32 - length).find(fits);
                    prop_assert_eq!(memory.take(length), expected);
                    if let Some(start) = expected {
                        slots[start..start + length].fill(true);
                        taken.push((start, length));
                    }
                }
                prop_assert_eq!(memory.num_free(), slots.iter().filter(|used| !**used).count());
            }
        }
    }
}
