//! A toy model with exact integer arithmetic over a paged memory: what the scheduler promises, made visible.
//!
//! The "K and V" of a token mixes it with its position; the next token is a hash over the K and V of all positions, read
//! through the block table. One wrong, stale or foreign slot changes every token after it.
//! With states, a running hash of all tokens is kept besides: the next token depends on it too.
//!
//! Steps run in the order in which they were planned, each when it is about to be applied: with two in flight, everything
//! that a plan and an `apply` do to the memory comes before the device gets to it, as it may on a real one.

mod ages;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use ages::{Age, Ages};
use pykv_core::scheduler::{
    FinishReason, Outcome, OwnedArrays, Plan, Proposal, RequestSummary, Sampled, Submission, TableSync,
};
use pykv_core::states::StateSlot;
use pykv_core::{BlockId, LayerGroup, RequestId, Scheduler, SchedulerConfig, TokenId};

pub(crate) const VOCABULARY: u64 = 50;

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn kv(group: usize, token: i64, position: i64) -> u64 {
    mix((group as u64) << 56 | (token as u64) << 32 | position as u64)
}

/// The positions that the last of `length` tokens reads in a group.
fn visible(group: LayerGroup, length: usize) -> Range<usize> {
    match group {
        LayerGroup::Full => 0..length,
        LayerGroup::Window { tokens } => length.saturating_sub(tokens)..length,
    }
}

fn next_token(history: impl Iterator<Item = u64>, child: u64) -> TokenId {
    let state = history.fold(child, |state, kv| mix(state.wrapping_mul(31).wrapping_add(kv)));
    (state % VOCABULARY) as TokenId
}

/// A running state: a hash of all tokens so far, and how many they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    hash: u64,
    num_tokens: i64,
}

impl State {
    const INITIAL: Self = Self { hash: 5, num_tokens: 0 };

    fn after(self, token: i64) -> Self {
        let hash = mix(self.hash.wrapping_mul(33) ^ token as u64);
        Self { hash, num_tokens: self.num_tokens + 1 }
    }
}

/// The tokens that a prompt gives when nothing is paged, shared, chunked or preempted.
pub(crate) fn expected(
    groups: &[LayerGroup],
    has_states: bool,
    prompt: &[TokenId],
    child: u64,
    num_tokens: usize,
) -> Vec<TokenId> {
    let mut tokens = prompt.to_vec();
    let mut state = tokens.iter().fold(State::INITIAL, |state, &token| state.after(token.into()));
    for _ in 0..num_tokens {
        let read = |group: usize| {
            let tokens = &tokens;
            visible(groups[group], tokens.len())
                .map(move |position| kv(group, i64::from(tokens[position]), position as i64))
        };
        let recurrent = has_states.then_some(state.hash);
        let next = next_token((0..groups.len()).flat_map(read).chain(recurrent), child);
        state = state.after(next.into());
        tokens.push(next);
    }
    tokens.split_off(prompt.len())
}

fn initial_states(num_slots: usize) -> Vec<Option<State>> {
    let mut states = vec![None; num_slots];
    states.iter_mut().take(1).for_each(|state| *state = Some(State::INITIAL));
    states
}

/// Copies in any order: no slot is written twice, and none that is written is read.
fn copy_states(states: &mut [Option<State>], pairs: &[i64], count: usize) {
    let pairs: Vec<(usize, usize)> =
        pairs.chunks_exact(2).take(count).map(|pair| (pair[0] as usize, pair[1] as usize)).collect();
    for (place, &(source, target)) in pairs.iter().enumerate().rev() {
        assert!(pairs.iter().all(|&(other, _)| other != target), "slot {target} is read and written");
        assert!(pairs[..place].iter().all(|&(_, other)| other != target), "slot {target} is written twice");
        states[target] = Some(states[source].expect("a state that is copied was written"));
    }
}

/// What is sampled after something was read that was not computed: it must never count.
const GARBAGE: TokenId = VOCABULARY as TokenId + 13;

/// A step in flight.
pub(crate) struct Queued {
    pub(crate) plan: Plan,
    pub(crate) side: usize,
    age: Age,
    /// Blocks that were free when it was planned.
    emptied: Vec<BlockId>,
    /// What it sampled, once it ran.
    pub(crate) samples: Option<Vec<TokenId>>,
}

/// A scheduler, the memory that it hands out, and what every sequence has got so far.
pub(crate) struct Engine {
    pub(crate) scheduler: Scheduler,
    pub(crate) outputs: HashMap<(u64, u32), Vec<TokenId>>,
    pub(crate) ended: Vec<RequestSummary>,
    pub(crate) num_steps: usize,
    pub(crate) now: f64,
    /// What the proposed drafts depend on.
    pub(crate) draft_seed: u64,
    pub(crate) prompts: HashMap<u64, Vec<TokenId>>,
    max_drafts: usize,
    max_num_seqs: usize,
    pub(crate) num_plans: usize,
    pub(crate) queue: VecDeque<Queued>,
    /// Of the step that ran last.
    device_samples: Vec<TokenId>,
    arrays: [OwnedArrays; 2],
    syncs: [TableSync; 2],
    slots: Vec<Option<u64>>,
    host_slots: Vec<Option<u64>>,
    /// Slot by slot; none holds anything that may be read.
    states: Vec<Option<State>>,
    pub(crate) ages: Ages,
    placed: HashMap<i32, (u64, u32)>,
    config: SchedulerConfig,
    block_size: usize,
    columns: usize,
}

impl Engine {
    pub(crate) fn new(config: SchedulerConfig) -> Self {
        let arrays = [OwnedArrays::with_page_lists(&config), OwnedArrays::with_page_lists(&config)];
        Self {
            outputs: HashMap::new(),
            ended: Vec::new(),
            num_steps: 0,
            now: 0.0,
            draft_seed: 0,
            prompts: HashMap::new(),
            max_drafts: config.num_lookahead_tokens,
            max_num_seqs: config.max_num_seqs,
            num_plans: 0,
            queue: VecDeque::new(),
            device_samples: Vec::new(),
            arrays,
            syncs: Default::default(),
            slots: vec![None; config.num_blocks * config.block_size],
            host_slots: vec![None; config.num_host_blocks * config.block_size],
            states: initial_states(config.num_state_slots),
            ages: Ages::new(
                config.num_blocks * config.block_size,
                config.num_host_blocks * config.block_size,
                config.num_state_slots,
            ),
            placed: HashMap::new(),
            block_size: config.block_size,
            columns: config.max_blocks_per_seq(),
            scheduler: Scheduler::new(config.clone()).unwrap(),
            config,
        }
    }

    pub(crate) fn submit(&mut self, prompt: &[TokenId], max_tokens: usize, num_samples: usize) -> RequestId {
        let submission = Submission { max_tokens: Some(max_tokens), num_samples, ..Submission::new(prompt) };
        let request = self.scheduler.submit(submission).unwrap();
        self.prompts.insert(request.get(), prompt.to_vec());
        request
    }

    /// What a sample of a prompt must get.
    pub(crate) fn expected(&self, prompt: &[TokenId], child: u64, num_tokens: usize) -> Vec<TokenId> {
        expected(&self.config.groups, self.config.has_states(), prompt, child, num_tokens)
    }

    /// What is free: it is emptied before the next step runs, so that whoever reads it without having written it is found
    /// out.
    fn free_blocks(&self) -> Vec<BlockId> {
        let pool = self.scheduler.pool();
        let blocks = (1..pool.num_blocks() as u32).map(BlockId::new);
        blocks.filter(|&block| pool.references(block) == 0 && !pool.is_published(block)).collect()
    }

    /// Empties the slots of states that are free. With states one step is in flight at a time: nothing still reads them.
    fn empty_free_states(&mut self) {
        let Some(arena) = self.scheduler.state_arena() else { return };
        for (slot, state) in (0..).map(StateSlot::new).zip(&mut self.states).skip(1) {
            if arena.is_free(slot) {
                *state = None;
            }
        }
    }

    /// Does to the states of some batch rows what a step that failed may have done.
    pub(crate) fn spoil_states(&mut self, plan: Plan, batch_rows: impl Iterator<Item = usize>) {
        if !self.config.has_states() {
            return;
        }
        let side = self.side(plan);
        let arrays = &self.arrays[side];
        for batch_row in batch_rows {
            let slot = i64::from(arrays.state_slots[batch_row]);
            self.states[slot as usize] = None;
            for pair in arrays.state_save_pairs.chunks_exact(2).take(plan.num_state_saves) {
                if pair[0] == slot {
                    self.states[pair[1] as usize] = None;
                }
            }
        }
    }

    /// Runs the recurrent part of the model: copies, a chunk of each batch row, copies. Returns each row's last hash.
    fn run_states(&mut self, plan: Plan) -> Vec<u64> {
        if !self.config.has_states() {
            return Vec::new();
        }
        let side = self.side(plan);
        let arrays = &self.arrays[side];
        copy_states(&mut self.states, &arrays.state_restore_pairs, plan.num_state_restores);
        let mut hashes = Vec::new();
        for batch_row in 0..plan.num_batch_rows {
            let slot = arrays.state_slots[batch_row] as usize;
            assert_ne!(slot, 0, "the initial state is never written");
            let mut state = self.states[slot].expect("a state that is read was written");
            let tokens = arrays.query_starts[batch_row]..arrays.query_starts[batch_row + 1];
            for token in tokens.map(|token| token as usize) {
                assert_eq!(state.num_tokens, arrays.positions[token], "a state has seen what lies before it");
                state = state.after(arrays.token_ids[token]);
            }
            self.states[slot] = Some(state);
            hashes.push(state.hash);
        }
        copy_states(&mut self.states, &arrays.state_save_pairs, plan.num_state_saves);
        assert_eq!(self.states[0], Some(State::INITIAL));
        hashes
    }

    /// Drafts for every row, that of an ended sequence included: some right, some wrong from a place on, some none.
    fn propose(&mut self) {
        let (mut rows, mut starts, mut tokens) = (Vec::new(), vec![0], Vec::new());
        for row in 0..self.max_num_seqs {
            let Some((request, child)) = self.placed.get(&(row as i32)) else { continue };
            let chance = mix(self.draft_seed ^ mix((self.num_steps * 64 + row) as u64));
            let count = chance as usize % (self.max_drafts + 1);
            let right = (chance >> 8) as usize % (self.max_drafts + 2);
            let mut known = self.prompts[request].clone();
            known.extend(self.outputs.get(&(*request, *child)).into_iter().flatten());
            let goes_on = self.expected(&known, u64::from(*child), count);
            let wrong = |token: TokenId| (token + 1 + chance as u32 % 7) % VOCABULARY as u32;
            let drafts = goes_on.iter().enumerate();
            tokens.extend(drafts.map(|(place, &token)| if place < right { token } else { wrong(token) }));
            rows.push(row);
            starts.push(tokens.len());
        }
        self.scheduler.propose(Proposal { rows: &rows, starts: &starts, tokens: &tokens }).unwrap();
    }

    /// How many drafts of each row are accepted: all that agree, or in every second step sometimes fewer.
    fn accepted(&self, plan: Plan, sampled: &[TokenId]) -> Option<Vec<usize>> {
        let arrays = &self.arrays[self.side(plan)];
        let chance = mix(self.draft_seed ^ plan.id);
        if chance.is_multiple_of(2) {
            return None;
        }
        let mut accepted = vec![0; plan.num_batch_rows];
        let checking = accepted.iter_mut().enumerate().skip(plan.num_decodes).take(plan.num_draft_rows);
        for (batch_row, accepted) in checking {
            let start = arrays.query_starts[batch_row] as usize;
            let count = arrays.query_starts[batch_row + 1] as usize - start;
            let first =
                arrays.sample_indices[..plan.num_samples].partition_point(|&index| index < start as i64);
            let drafts = &arrays.token_ids[start + 1..start + count];
            let agree =
                drafts.iter().zip(&sampled[first..]).take_while(|(a, b)| **a == i64::from(**b)).count();
            *accepted = agree.saturating_sub(usize::from(chance % 8 == 1));
        }
        Some(accepted)
    }

    pub(crate) fn plan(&mut self) -> Option<Plan> {
        let emptied = self.free_blocks();
        self.empty_free_states();
        if self.max_drafts > 0 {
            self.propose();
        }
        if self.config.max_steps_in_flight == 1 {
            // What was discarded by the test itself.
            self.queue.clear();
        }
        let side = self.num_plans % 2;
        self.num_steps += 1;
        let plan = self.scheduler.plan(&self.arrays[side].borrow(), &mut self.syncs[side], self.now).unwrap();
        self.scheduler.check().unwrap();
        let arrays = &self.arrays[side];
        for index in 0..plan.map_or(0, |plan| plan.num_placed) {
            let sequence = (arrays.placed_requests[index] as u64, arrays.placed_children[index] as u32);
            self.placed.insert(arrays.placed_rows[index], sequence);
        }
        plan.inspect(|plan| self.check_page_lists(arrays, plan))?;
        self.num_plans += 1;
        self.queue.extend(plan.map(|plan| Queued { plan, side, age: self.ages.now, emptied, samples: None }));
        plan
    }

    /// The oldest step in flight.
    pub(crate) fn oldest(&self) -> Option<Plan> {
        self.queue.front().map(|queued| queued.plan)
    }

    /// Whether one more step may be planned.
    pub(crate) fn has_room(&self) -> bool {
        self.queue.len() < self.config.max_steps_in_flight
    }

    fn side(&self, plan: Plan) -> usize {
        self.queue.iter().find(|queued| queued.plan == plan).expect("the step is in flight").side
    }

    /// The page lists say the same as the block tables.
    fn check_page_lists(&self, arrays: &OwnedArrays, plan: &Plan) {
        let lists = arrays.page_lists.as_ref().unwrap();
        assert_eq!(lists.kv_indptr[0], 0);
        for batch_row in 0..plan.num_batch_rows {
            let blocks = lists.kv_indptr[batch_row] as usize..lists.kv_indptr[batch_row + 1] as usize;
            let last = lists.kv_last_page_len[batch_row] as usize;
            assert_eq!((blocks.len() - 1) * self.block_size + last, arrays.seq_lens[batch_row] as usize);
            assert!((1..=self.block_size).contains(&last));
            for group in 0..self.config.groups.len() {
                let table = &arrays.block_tables[group * self.config.max_num_seqs * self.columns..];
                let line = &table[arrays.table_rows[batch_row] as usize * self.columns..][..blocks.len()];
                let list = group * self.config.max_num_seqs * self.columns;
                assert_eq!(lists.kv_indices[list..][blocks.clone()], *line);
            }
        }
    }

    /// Runs the model: copies blocks, writes every token's slot, then reads the history of each sample.
    pub(crate) fn compute(&mut self, plan: Plan) -> Vec<TokenId> {
        self.compute_failing(plan, &[])
    }

    /// The same where some batch rows fail: what they should have written is not there.
    pub(crate) fn compute_failing(&mut self, plan: Plan, failed_rows: &[usize]) -> Vec<TokenId> {
        let place = self.queue.iter().position(|queued| queued.plan == plan).expect("the step is in flight");
        if let Some(samples) = self.queue[place].samples.clone() {
            failed_rows.iter().for_each(|&row| self.spoil(place, row));
            return samples;
        }
        for block in std::mem::take(&mut self.queue[place].emptied) {
            let start = block.index() * self.block_size;
            self.slots[start..start + self.block_size].fill(None);
        }
        self.age(place);
        self.copy(plan);
        self.write(plan);
        failed_rows.iter().for_each(|&row| self.spoil(place, row));
        let states = self.run_states(plan);
        let samples: Vec<_> =
            (0..plan.num_samples).map(|sample| self.sample(sample, plan, &states)).collect();
        self.device_samples.clone_from(&samples);
        self.queue[place].samples = Some(samples.clone());
        samples
    }

    /// Empties the slots of a batch row.
    pub(crate) fn spoil(&mut self, place: usize, batch_row: usize) {
        let arrays = &self.arrays[self.queue[place].side];
        let tokens = arrays.query_starts[batch_row] as usize..arrays.query_starts[batch_row + 1] as usize;
        for group in 0..self.config.groups.len() {
            let slots = &arrays.slot_mapping[group * self.config.max_num_batched_tokens..];
            slots[tokens.clone()].iter().for_each(|&slot| self.slots[slot as usize] = None);
        }
    }

    fn copy(&mut self, plan: Plan) {
        let arrays = &self.arrays[self.side(plan)];
        let range = |block: i64| block as usize * self.block_size..(block as usize + 1) * self.block_size;
        for pair in arrays.swap_out_pairs.chunks_exact(2).take(plan.num_swap_outs) {
            self.host_slots[range(pair[1])].copy_from_slice(&self.slots[range(pair[0])]);
        }
        for pair in arrays.swap_in_pairs.chunks_exact(2).take(plan.num_swap_ins) {
            self.slots[range(pair[1])].copy_from_slice(&self.host_slots[range(pair[0])]);
        }
        for pair in arrays.copy_pairs.chunks_exact(2).take(plan.num_copies) {
            self.slots.copy_within(range(pair[0]), range(pair[1]).start);
        }
    }

    fn write(&mut self, plan: Plan) {
        let arrays = &self.arrays[self.side(plan)];
        for group in 0..self.config.groups.len() {
            for token in 0..plan.num_tokens {
                let slot = arrays.slot_mapping[group * self.config.max_num_batched_tokens + token] as usize;
                assert!(slot >= self.block_size, "the null block is never written");
                let source =
                    arrays.token_sources[..plan.num_decodes].get(token).filter(|&&source| source >= 0);
                let known = arrays.token_ids[token];
                let token_id =
                    source.map_or(known, |&source| i64::from(self.device_samples[source as usize]));
                let is_computed = token_id != i64::from(GARBAGE);
                self.slots[slot] = is_computed.then(|| kv(group, token_id, arrays.positions[token]));
            }
        }
    }

    fn sample(&self, sample: usize, plan: Plan, states: &[u64]) -> TokenId {
        let arrays = &self.arrays[self.side(plan)];
        let token = arrays.sample_indices[sample] as i32;
        let batch_row =
            arrays.query_starts[..=plan.num_batch_rows].partition_point(|&start| start <= token) - 1;
        let row = arrays.table_rows[batch_row] as usize;
        let length = arrays.sample_positions[sample] as usize;
        let computed = arrays.seq_lens[batch_row] + token + 1 - arrays.query_starts[batch_row + 1];
        assert_eq!(length, computed as usize);
        let history = (0..self.config.groups.len()).flat_map(|group| {
            visible(self.config.groups[group], length).map(move |position| {
                let line = group * self.config.max_num_seqs + row;
                let block = arrays.block_tables[line * self.columns + position / self.block_size] as usize;
                self.slots[block * self.block_size + position % self.block_size]
            })
        });
        let Some(history) = history.collect::<Option<Vec<_>>>() else { return GARBAGE };
        let child = self.placed[&arrays.sample_rows[sample]].1;
        next_token(history.into_iter().chain(states.get(batch_row).copied()), u64::from(child))
    }

    /// Hands the results in and keeps what counts.
    pub(crate) fn apply(
        &mut self,
        plan: Plan,
        tokens: &[TokenId],
        outcomes: &[Outcome],
        failed_rows: &[usize],
    ) {
        let rows = self.arrays[self.side(plan)].sample_rows.clone();
        self.spoil_states(plan, failed_rows.iter().copied());
        let accepted = self.accepted(plan, tokens);
        self.queue.retain(|queued| queued.plan != plan);
        let accepted = accepted.as_deref().filter(|_| self.max_drafts > 0);
        let (outputs, placed) = (&mut self.outputs, &self.placed);
        let ended = self
            .scheduler
            .apply(plan.id, Sampled { tokens, outcomes, failed_rows, accepted }, |sample, reason| {
                if matches!(reason, FinishReason::None | FinishReason::Stop | FinishReason::Length) {
                    assert_ne!(tokens[sample], GARBAGE, "what counts was computed");
                    outputs.entry(placed[&rows[sample]]).or_default().push(tokens[sample]);
                }
            })
            .unwrap();
        self.ended.extend(ended);
        self.scheduler.check().unwrap();
    }

    /// Plans a step if one more may be in flight, and finishes the oldest if not. Returns whether there was something to do.
    pub(crate) fn step(&mut self) -> bool {
        if self.config.max_steps_in_flight == 1 {
            // What was discarded by the test itself.
            self.queue.clear();
        }
        if self.has_room() && self.plan().is_some() && self.has_room() {
            return true;
        }
        let Some(plan) = self.oldest() else { return false };
        let tokens = self.compute(plan);
        self.apply(plan, &tokens, &vec![Outcome::Ok; tokens.len()], &[]);
        true
    }

    pub(crate) fn run(&mut self) {
        while self.step() {
            assert!(self.num_steps < 100_000, "nothing makes progress");
        }
    }
}
