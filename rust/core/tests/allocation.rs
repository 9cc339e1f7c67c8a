//! Steady steps allocate nothing: counted by the allocator itself.
#![cfg(not(loom))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use pykv_core::scheduler::{AdmissionPolicy, Outcome, OwnedArrays, Plan, Proposal, Sampled};
use pykv_core::scheduler::{Submission, TableSync};
use pykv_core::{LayerGroup, Scheduler, SchedulerConfig, TokenId};

/// The system's allocator, and how often this thread has asked it for memory.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    ALLOCATIONS.with(|allocations| allocations.set(allocations.get() + 1));
}

// SAFETY: every call goes to the system's allocator as it came; counting touches a thread's own cell and no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps what `alloc` asks of it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the memory came from the system's allocator with this layout.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the memory came from the system's allocator with this layout.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const NUM_SEQS: usize = 256;

fn config(num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks,
        max_num_seqs: NUM_SEQS,
        max_num_batched_tokens: 8192,
        num_lookahead_tokens: 2,
        max_model_len: 4096,
        watermark: 0.0,
        admission: AdmissionPolicy::Watermark,
        ..SchedulerConfig::default()
    }
}

struct Run {
    scheduler: Scheduler,
    sides: [(OwnedArrays, TableSync); 2],
    tokens: Vec<TokenId>,
    outcomes: Vec<Outcome>,
    num_steps: u32,
}

impl Run {
    fn new(config: SchedulerConfig) -> Self {
        let side = || (OwnedArrays::with_page_lists(&config), TableSync::default());
        let num_samples = NUM_SEQS * (1 + config.num_lookahead_tokens);
        Self {
            sides: [side(), side()],
            tokens: vec![0; num_samples],
            outcomes: vec![Outcome::Ok; num_samples],
            num_steps: 0,
            scheduler: Scheduler::new(config).unwrap(),
        }
    }

    fn submit(&mut self, seed: u32, len: u32, max_tokens: usize) {
        let prompt: Vec<TokenId> = (0..len).map(|place| seed * 1000 + place).collect();
        let submission = Submission { max_tokens: Some(max_tokens), ..Submission::new(&prompt) };
        self.scheduler.submit(submission).unwrap();
    }

    /// One step; returns what was planned.
    fn step(&mut self) -> Option<Plan> {
        self.num_steps += 1;
        let (arrays, sync) = &mut self.sides[self.num_steps as usize % 2];
        let plan = self.scheduler.plan(&arrays.borrow(), sync, 0.0).unwrap()?;
        for (sample, token) in self.tokens[..plan.num_samples].iter_mut().enumerate() {
            *token = sample as u32 + self.num_steps;
        }
        let (tokens, outcomes) = (&self.tokens[..plan.num_samples], &self.outcomes[..plan.num_samples]);
        let sampled = Sampled { tokens, outcomes, failed_rows: &[], accepted: None };
        self.scheduler.apply(plan.id, sampled, |_, _| ()).unwrap();
        Some(plan)
    }

    /// Starts as many sequences as there are rows, and lets them decode until everything has its size.
    fn warm_up(&mut self) {
        (0..NUM_SEQS as u32).for_each(|seed| self.submit(seed, 100, 2000));
        while self.step().unwrap().num_decodes < NUM_SEQS {}
        (0..40).for_each(|_| assert_eq!(self.step().unwrap().num_decodes, NUM_SEQS));
    }
}

fn allocations_of(run: &mut Run, mut step: impl FnMut(&mut Run)) -> usize {
    let before = ALLOCATIONS.get();
    (0..100).for_each(|_| step(run));
    ALLOCATIONS.get() - before
}

#[test]
fn the_count_sees_an_allocation() {
    let mut run = Run::new(config(1000));
    assert!(allocations_of(&mut run, |_| drop(std::hint::black_box(vec![1]))) >= 100);
}

#[test]
fn decodes_in_a_pool_with_free_blocks_allocate_nothing() {
    let mut run = Run::new(config(20_000));
    run.warm_up();
    assert_eq!(allocations_of(&mut run, |run| assert!(run.step().is_some())), 0);
    run.scheduler.check().unwrap();
}

#[test]
fn decodes_that_evict_a_block_for_each_that_they_take_allocate_nothing() {
    let mut run = Run::new(config(6000));
    for seed in 0..300 {
        run.submit(1000 + seed, 320, 1);
        run.step();
    }
    run.warm_up();
    let before = run.scheduler.stats();
    assert_eq!(allocations_of(&mut run, |run| assert!(run.step().is_some())), 0);
    let after = run.scheduler.stats();
    assert_eq!((before.blocks.free, after.blocks.free), (0, 0));
    assert!(after.evictions - before.evictions > 1000);
    run.scheduler.check().unwrap();
}

#[test]
fn decodes_of_windows_and_their_drafts_allocate_nothing() {
    let groups = vec![LayerGroup::Full, LayerGroup::Window { tokens: 64 }];
    let mut run = Run::new(SchedulerConfig { groups, ..config(20_000) });
    let rows: Vec<usize> = (0..NUM_SEQS).collect();
    let starts: Vec<usize> = (0..=NUM_SEQS).map(|row| 2 * row).collect();
    let tokens = vec![7; 2 * NUM_SEQS];
    let propose = |run: &mut Run| {
        run.scheduler.propose(Proposal { rows: &rows, starts: &starts, tokens: &tokens }).unwrap();
        assert_eq!(run.step().unwrap().num_draft_rows, NUM_SEQS);
    };
    run.warm_up();
    (0..20).for_each(|_| propose(&mut run));
    assert_eq!(allocations_of(&mut run, propose), 0);
    run.scheduler.check().unwrap();
}

#[test]
fn decodes_with_states_and_their_checkpoints_allocate_nothing() {
    let mut run = Run::new(SchedulerConfig {
        num_lookahead_tokens: 0,
        num_state_slots: NUM_SEQS + 40,
        checkpoint_every: 1,
        ..config(6000)
    });
    for seed in 0..300 {
        run.submit(1000 + seed, 320, 1);
        run.step();
    }
    run.warm_up();
    let before = run.scheduler.stats();
    assert_eq!(allocations_of(&mut run, |run| assert!(run.step().is_some())), 0);
    let after = run.scheduler.stats();
    assert!(after.evictions - before.evictions > 1000, "{after:?}");
    assert!(after.checkpoint_evictions - before.checkpoint_evictions > 100, "{after:?}");
    run.scheduler.check().unwrap();
}
