//! Which slot holds what: free + working + checkpoints = total at every instant.

use super::StateSlot;
use super::recency::Recency;
use crate::error::{Error, Result};

/// How many slots are in which state. Slot 0 is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCounts {
    /// Slots that hold nothing.
    pub free: usize,
    /// Slots of sequences that run.
    pub working: usize,
    /// Slots that hold a checkpoint, or that the step in flight fills with one or still reads one from.
    pub checkpoints: usize,
    /// All slots but slot 0.
    pub total: usize,
}

/// What a slot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    Working,
    /// The step in flight writes a checkpoint to it, which nobody finds yet.
    Filling,
    Checkpoint,
    /// Was a checkpoint; a step that was planned before still reads it.
    Retired,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    role: Use,
    /// Sequences whose working slots the step in flight copies from it.
    readers: u32,
    /// Sequences that would start again from it.
    holders: u32,
    /// Tells the checkpoints apart that a slot has held one after the other.
    serial: u64,
}

/// The checkpoint that a sequence would start again from, for as long as it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// Its slot.
    pub slot: StateSlot,
    serial: u64,
}

/// A slot that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The slot.
    pub slot: StateSlot,
    /// Whether a checkpoint had to go for it.
    pub was_checkpoint: bool,
}

/// The slots for the states of all sequences, and who has which.
#[derive(Debug)]
pub struct StateArena {
    slots: Vec<Slot>,
    free: Vec<StateSlot>,
    /// Checkpoints that nobody reads, and that no sequence would start again from.
    idle: Recency,
    /// Those that some sequence would start again from, and that nobody reads.
    held: Recency,
    next_serial: u64,
    num_working: usize,
}

impl StateArena {
    /// An arena of `num_slots` slots, slot 0 included, all others free.
    pub fn new(num_slots: usize) -> Self {
        Self {
            slots: vec![Slot { role: Use::Free, readers: 0, holders: 0, serial: 0 }; num_slots],
            free: (1..num_slots as u32).rev().map(StateSlot::new).collect(),
            idle: Recency::new(num_slots),
            held: Recency::new(num_slots),
            next_serial: 0,
            num_working: 0,
        }
    }

    /// Slots that can be had: free ones, and checkpoints that nobody reads.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len() + self.held.len()
    }

    /// How many slots are in which state, in constant time.
    pub fn counts(&self) -> StateCounts {
        let (free, working, total) = (self.free.len(), self.num_working, self.slots.len() - 1);
        StateCounts { free, working, checkpoints: total - free - working, total }
    }

    /// Whether a slot holds nothing.
    pub fn is_free(&self, slot: StateSlot) -> bool {
        slot != StateSlot::INITIAL && self.role(slot) == Use::Free
    }

    /// Whether a checkpoint can be evicted.
    pub(crate) fn is_idle(&self, slot: StateSlot) -> bool {
        self.idle.contains(slot) || self.held.contains(slot)
    }

    pub(crate) fn is_checkpoint(&self, slot: StateSlot) -> bool {
        slot != StateSlot::INITIAL && self.role(slot) == Use::Checkpoint
    }

    /// Takes a slot for a sequence to work in. If none is free, the checkpoint used least recently goes; one that a sequence
    /// would start again from only if there is no other.
    pub fn take(&mut self) -> Option<Taken> {
        let taken = self.take_for(Use::Working)?;
        self.num_working += 1;
        Some(taken)
    }

    /// Takes a slot in the same way that the step being planned fills with a checkpoint.
    pub fn begin_checkpoint(&mut self) -> Option<Taken> {
        self.take_for(Use::Filling)
    }

    fn take_for(&mut self, role: Use) -> Option<Taken> {
        let oldest = || self.idle.oldest().or_else(|| self.held.oldest());
        let evicted = if self.free.is_empty() { oldest() } else { None };
        if let Some(slot) = evicted {
            self.drop_checkpoint(slot);
        }
        let slot = self.free.pop()?;
        self.slots[slot.index()].role = role;
        Some(Taken { slot, was_checkpoint: evicted.is_some() })
    }

    /// Gives back a working slot, or one whose checkpoint came to nothing.
    pub fn give_back(&mut self, slot: StateSlot) {
        let role = self.role(slot);
        debug_assert!(matches!(role, Use::Working | Use::Filling), "{slot:?} is given back and is {role:?}");
        self.num_working -= usize::from(role == Use::Working);
        self.set_free(slot);
    }

    /// The checkpoint that a slot was taken for is there.
    pub fn keep(&mut self, slot: StateSlot) {
        debug_assert_eq!(self.role(slot), Use::Filling, "{slot:?} is kept");
        self.next_serial += 1;
        self.slots[slot.index()] =
            Slot { role: Use::Checkpoint, readers: 0, holders: 0, serial: self.next_serial };
        self.list(slot);
    }

    /// A sequence would start again from a checkpoint from now on, until [`release`](Self::release).
    pub(crate) fn hold(&mut self, slot: StateSlot) -> Home {
        debug_assert_eq!(self.role(slot), Use::Checkpoint, "{slot:?} is held");
        let is_idle = self.unlist(slot);
        self.slots[slot.index()].holders += 1;
        if is_idle {
            self.list(slot);
        }
        Home { slot, serial: self.slots[slot.index()].serial }
    }

    /// Whether what a sequence would start again from is still there.
    pub(crate) fn is_there(&self, home: Home) -> bool {
        self.role(home.slot) == Use::Checkpoint && self.slots[home.slot.index()].serial == home.serial
    }

    /// A sequence that held a checkpoint starts from another one, or is over. The checkpoint may be gone.
    pub(crate) fn release(&mut self, home: Home) {
        if !self.is_there(home) {
            return;
        }
        let is_idle = self.unlist(home.slot);
        self.slots[home.slot.index()].holders -= 1;
        if is_idle {
            self.list(home.slot);
        }
    }

    /// The step being planned reads a checkpoint: it stays what it is until [`end_read`](Self::end_read).
    pub fn begin_read(&mut self, slot: StateSlot) {
        self.unlist(slot);
        self.slots[slot.index()].readers += 1;
    }

    /// A step that read a checkpoint is over.
    pub fn end_read(&mut self, slot: StateSlot) {
        self.slots[slot.index()].readers -= 1;
        if self.slots[slot.index()].readers > 0 {
            return;
        }
        match self.role(slot) {
            Use::Retired => self.set_free(slot),
            _ => self.list(slot),
        }
    }

    /// Nobody shall find a checkpoint any more: its slot is free, or will be when those that read it are done.
    pub fn drop_checkpoint(&mut self, slot: StateSlot) {
        debug_assert_eq!(self.role(slot), Use::Checkpoint, "{slot:?} is dropped");
        if self.slots[slot.index()].readers > 0 {
            self.slots[slot.index()].role = Use::Retired;
        } else {
            self.unlist(slot);
            self.set_free(slot);
        }
    }

    /// Lists a checkpoint that nobody reads as the one used last.
    fn list(&mut self, slot: StateSlot) {
        if self.slots[slot.index()].holders > 0 { self.held.push(slot) } else { self.idle.push(slot) }
    }

    /// Takes a checkpoint out of its list. Returns whether it was in one.
    fn unlist(&mut self, slot: StateSlot) -> bool {
        let is_held = self.held.contains(slot);
        let is_listed = is_held || self.idle.contains(slot);
        if is_listed {
            if is_held { self.held.remove(slot) } else { self.idle.remove(slot) }
        }
        is_listed
    }

    fn role(&self, slot: StateSlot) -> Use {
        self.slots[slot.index()].role
    }

    fn set_free(&mut self, slot: StateSlot) {
        self.slots[slot.index()].role = Use::Free;
        self.free.push(slot);
    }

    /// Compares what each slot is with the lists, given the slots that running sequences work in, fill and read.
    ///
    /// # Errors
    /// [`Error::Broken`] with the first slot that is lost, or had twice.
    pub(crate) fn check(
        &self,
        working: &[StateSlot],
        filling: &[StateSlot],
        read: &[StateSlot],
    ) -> Result<()> {
        let (mut expected, mut readers) = (vec![None; self.slots.len()], vec![0; self.slots.len()]);
        let held = [(&self.free[..], Use::Free), (working, Use::Working), (filling, Use::Filling)];
        for (slots, role) in held {
            for &slot in slots {
                if slot == StateSlot::INITIAL || expected[slot.index()].replace(role).is_some() {
                    return Err(broken(slot, "is slot 0, or had twice"));
                }
            }
        }
        read.iter().for_each(|slot| readers[slot.index()] += 1);
        for number in 1..self.slots.len() {
            let (slot, Slot { role, readers: counted, holders, .. }) =
                (StateSlot::new(number as u32), self.slots[number]);
            let is_cached = matches!(role, Use::Checkpoint | Use::Retired);
            if expected[number].map_or(!is_cached, |expected| expected != role) {
                return Err(broken(slot, &format!("is {role:?}, and had as {:?}", expected[number])));
            }
            if counted != readers[number] || (counted > 0 && !is_cached) {
                return Err(broken(slot, &format!("counts {counted} readers of {}", readers[number])));
            }
            let is_idle = role == Use::Checkpoint && counted == 0;
            if self.idle.contains(slot) != (is_idle && holders == 0)
                || self.held.contains(slot) != (is_idle && holders > 0)
                || (role == Use::Retired && counted == 0)
            {
                return Err(broken(slot, "is an idle checkpoint or listed as one, not both"));
            }
        }
        if self.num_working != working.len() {
            return Err(Error::broken("I17 states", format!("{} slots count as working", self.num_working)));
        }
        Ok(())
    }
}

fn broken(slot: StateSlot, detail: &str) -> Error {
    Error::broken("I17 states", format!("state slot {} {detail}", slot.get()))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn counts(arena: &StateArena) -> (usize, usize, usize) {
        let StateCounts { free, working, checkpoints, total } = arena.counts();
        assert_eq!(free + working + checkpoints, total);
        (free, working, checkpoints)
    }

    fn checkpoint(arena: &mut StateArena) -> StateSlot {
        let taken = arena.begin_checkpoint().unwrap();
        arena.keep(taken.slot);
        taken.slot
    }

    #[test]
    fn every_slot_but_the_initial_one_is_handed_out_once() {
        let mut arena = StateArena::new(4);
        let mut taken: Vec<u32> = (0..3).map(|_| arena.take().unwrap().slot.get()).collect();
        taken.sort_unstable();
        assert_eq!((taken, arena.take()), (vec![1, 2, 3], None));
        assert_eq!(counts(&arena), (0, 3, 0));
    }

    #[test]
    fn the_oldest_checkpoint_makes_room_and_the_one_that_is_read_does_not() {
        let mut arena = StateArena::new(4);
        let [first, second, third] = [(); 3].map(|()| checkpoint(&mut arena));
        arena.begin_read(first);
        assert_eq!(arena.available(), 2);
        assert_eq!(arena.take(), Some(Taken { slot: second, was_checkpoint: true }));
        arena.end_read(first);
        assert_eq!(arena.take().unwrap().slot, third, "what was read last goes last");
        assert_eq!(counts(&arena), (0, 2, 1));
        arena.check(&[second, third], &[], &[]).unwrap();
    }

    #[test]
    fn a_checkpoint_that_is_dropped_while_it_is_read_is_free_when_the_last_reader_is_done() {
        let mut arena = StateArena::new(3);
        let slot = checkpoint(&mut arena);
        arena.begin_read(slot);
        arena.begin_read(slot);
        arena.drop_checkpoint(slot);
        arena.end_read(slot);
        assert_eq!((counts(&arena), arena.available()), ((1, 0, 1), 1));
        arena.check(&[], &[], &[slot]).unwrap();
        arena.end_read(slot);
        assert_eq!(counts(&arena), (2, 0, 0));
    }

    #[test]
    fn a_checkpoint_that_came_to_nothing_is_given_back() {
        let mut arena = StateArena::new(3);
        let slot = arena.begin_checkpoint().unwrap().slot;
        assert_eq!(counts(&arena), (1, 0, 1));
        arena.check(&[], &[slot], &[]).unwrap();
        arena.give_back(slot);
        assert_eq!(counts(&arena), (2, 0, 0));
    }

    #[test]
    fn a_slot_that_is_lost_or_had_twice_is_found() {
        let mut arena = StateArena::new(4);
        let slot = arena.take().unwrap().slot;
        for (working, filling, read) in
            [(vec![], vec![], vec![]), (vec![slot, slot], vec![], vec![]), (vec![slot], vec![], vec![slot])]
        {
            assert!(arena.check(&working, &filling, &read).is_err(), "{working:?} {read:?}");
        }
        arena.check(&[slot], &[], &[]).unwrap();
    }
}
