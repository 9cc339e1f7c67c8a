//! After how many resets what lies in the memory was computed: no hit may find what is older than the last one.

use std::collections::{HashMap, HashSet};

use super::{Engine, visible};

/// After how many resets. What was computed from something older is as old.
pub(crate) type Age = u64;

/// The initial state was not computed.
const EVER: Age = Age::MAX;

/// A sequence that was placed and has no row yet.
#[derive(Debug)]
struct Start {
    age: Age,
    /// Blocks that came back from the host: they may be old.
    came_back: HashSet<i64>,
}

/// The age of each slot.
#[derive(Debug)]
pub(crate) struct Ages {
    pub(crate) now: Age,
    slots: Vec<Age>,
    host_slots: Vec<Age>,
    states: Vec<Age>,
    starts: HashMap<(u64, u32), Start>,
}

impl Ages {
    pub(super) fn new(num_slots: usize, num_host_slots: usize, num_states: usize) -> Self {
        Self {
            now: 0,
            slots: vec![0; num_slots],
            host_slots: vec![0; num_host_slots],
            states: vec![EVER; num_states],
            starts: HashMap::new(),
        }
    }
}

impl Engine {
    /// Does to the ages what a step does to the memory, and checks what its new sequences have found.
    pub(super) fn age(&mut self, place: usize) {
        let queued = &self.queue[place];
        let (plan, arrays, ages) = (queued.plan, &self.arrays[queued.side], &mut self.ages);
        let size = self.block_size;
        let pairs = |pairs: &[i64], count: usize| -> Vec<(i64, i64)> {
            pairs.chunks_exact(2).take(count).map(|pair| (pair[0], pair[1])).collect()
        };
        let range = |block: i64| block as usize * size..(block as usize + 1) * size;
        for (source, target) in pairs(&arrays.swap_out_pairs, plan.num_swap_outs) {
            ages.host_slots[range(target)].copy_from_slice(&ages.slots[range(source)]);
        }
        let swap_ins = pairs(&arrays.swap_in_pairs, plan.num_swap_ins);
        for &(source, target) in &swap_ins {
            ages.slots[range(target)].copy_from_slice(&ages.host_slots[range(source)]);
        }
        for (source, target) in pairs(&arrays.copy_pairs, plan.num_copies) {
            ages.slots.copy_within(range(source), range(target).start);
        }
        for (source, target) in pairs(&arrays.state_restore_pairs, plan.num_state_restores) {
            ages.states[target as usize] = ages.states[source as usize];
        }
        let came_back: HashSet<i64> = swap_ins.iter().map(|&(_, target)| target).collect();
        for place in 0..plan.num_placed {
            let sequence = (arrays.placed_requests[place] as u64, arrays.placed_children[place] as u32);
            ages.starts.insert(sequence, Start { age: queued.age, came_back: came_back.clone() });
        }
        for batch_row in 0..plan.num_batch_rows {
            let tokens = arrays.query_starts[batch_row] as usize..arrays.query_starts[batch_row + 1] as usize;
            let start = arrays.positions[tokens.start] as usize;
            let row = arrays.table_rows[batch_row] as usize;
            let state = arrays.state_slots.get(batch_row).map(|&slot| slot as usize);
            let started = ages.starts.remove(&self.placed[&(row as i32)]);
            let mut age = queued.age.min(state.map_or(EVER, |state| ages.states[state]));
            if let (Some(started), Some(state)) = (&started, state) {
                assert!(ages.states[state] >= started.age, "a checkpoint is older than the last reset");
            }
            for (group, &window) in self.config.groups.iter().enumerate() {
                let line = group * self.config.max_num_seqs + row;
                for position in visible(window, start + 1).start..start {
                    let block = arrays.block_tables[line * self.columns + position / size];
                    let held = ages.slots[block as usize * size + position % size];
                    age = age.min(held);
                    if let Some(started) = &started
                        && !started.came_back.contains(&i64::from(block))
                    {
                        assert!(
                            held >= started.age,
                            "block {block} was found and is older than the last reset"
                        );
                    }
                }
                let slots = &arrays.slot_mapping[group * self.config.max_num_batched_tokens..];
                slots[tokens.clone()].iter().for_each(|&slot| ages.slots[slot as usize] = age);
            }
            state.into_iter().for_each(|state| ages.states[state] = age);
        }
        // Samples that are forked off now have found nothing themselves.
        for row in &arrays.sample_rows[..plan.num_samples] {
            ages.starts.remove(&self.placed[row]);
        }
        for (source, target) in pairs(&arrays.state_save_pairs, plan.num_state_saves) {
            ages.states[target as usize] = ages.states[source as usize];
        }
    }
}
