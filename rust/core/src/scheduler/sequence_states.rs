//! The slots of one sequence of a model with states.

use crate::states::StateSlot;

/// What a sequence has of the arena. Nothing, while it waits.
#[derive(Debug, Default)]
pub(super) struct SequenceStates {
    /// A slot for each of its rows, as long as it runs.
    pub(super) working: Vec<StateSlot>,
    /// What the step in flight copies to its working slot, if it starts with that step.
    pub(super) reads: Option<StateSlot>,
    /// The slot that the step in flight fills with a checkpoint.
    pub(super) fills: Option<StateSlot>,
    /// Where its state stood before the step in flight, which works in another slot: if that step fails, it still does.
    pub(super) before: Option<StateSlot>,
    /// Tokens whose blocks were cached when it started, if they are more than its hit: another prompt has parted there.
    pub(super) parting: usize,
}

impl SequenceStates {
    /// Of a further sample that goes on in a slot of its own.
    pub(super) fn forked(slot: StateSlot) -> Self {
        Self { working: vec![slot], ..Self::default() }
    }
}
