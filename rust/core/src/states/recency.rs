//! Slots by when they were last used: every operation takes constant time and allocates nothing.

use super::StateSlot;

const UNLISTED: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Links {
    older: u32,
    younger: u32,
}

/// A doubly linked list through one array. Slot 0 is never listed: its place is the list's anchor.
#[derive(Debug)]
pub(super) struct Recency {
    links: Vec<Links>,
    len: usize,
}

impl Recency {
    /// An empty list for so many slots, slot 0 included.
    pub(super) fn new(num_slots: usize) -> Self {
        let mut links = vec![Links { older: UNLISTED, younger: UNLISTED }; num_slots];
        links[0] = Links { older: 0, younger: 0 };
        Self { links, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn contains(&self, slot: StateSlot) -> bool {
        slot != StateSlot::INITIAL && self.links[slot.index()].older != UNLISTED
    }

    /// The slot that was used least recently.
    pub(super) fn oldest(&self) -> Option<StateSlot> {
        Some(StateSlot::new(self.links[0].younger)).filter(|&slot| slot != StateSlot::INITIAL)
    }

    /// Lists a slot as the one used last.
    pub(super) fn push(&mut self, slot: StateSlot) {
        debug_assert!(!self.contains(slot), "{slot:?} is listed already");
        let youngest = self.links[0].older;
        self.links[slot.index()] = Links { older: youngest, younger: 0 };
        self.links[youngest as usize].younger = slot.get();
        self.links[0].older = slot.get();
        self.len += 1;
    }

    /// Takes a listed slot out.
    pub(super) fn remove(&mut self, slot: StateSlot) {
        let Links { older, younger } = self.links[slot.index()];
        self.links[older as usize].younger = younger;
        self.links[younger as usize].older = older;
        self.links[slot.index()] = Links { older: UNLISTED, younger: UNLISTED };
        self.len -= 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn order(mut list: Recency) -> Vec<u32> {
        std::iter::from_fn(|| list.oldest().inspect(|&slot| list.remove(slot)).map(StateSlot::get)).collect()
    }

    #[test]
    fn what_was_used_again_goes_last() {
        let mut list = Recency::new(6);
        [3, 1, 4, 2].map(StateSlot::new).into_iter().for_each(|slot| list.push(slot));
        list.remove(StateSlot::new(1));
        list.push(StateSlot::new(1));
        assert_eq!((list.len(), list.contains(StateSlot::new(5))), (4, false));
        assert_eq!(order(list), [3, 4, 2, 1]);
    }
}
