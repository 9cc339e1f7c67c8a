//! What the bookkeeping takes, counted by an allocator of the test's own. One test, so that nobody else allocates
//! meanwhile. With `--nocapture` it prints what it has measured, one JSON object a line.
#![cfg(not(loom))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use pykv_core::scheduler::{AdmissionPolicy, Outcome, Sampled, Submission};
use pykv_core::{Scheduler, SchedulerConfig, TokenId};

/// Tokens that each request may get.
const MAX_TOKENS: usize = 100;

struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came; only numbers are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps `dealloc`'s contract, and the memory is the system's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn bytes() -> usize {
    BYTES.load(Ordering::Relaxed)
}

fn config(num_blocks: usize, block_size: usize) -> SchedulerConfig {
    SchedulerConfig {
        num_blocks,
        block_size,
        max_num_seqs: 64,
        max_num_batched_tokens: 1 << 16,
        max_model_len: 1 << 16,
        max_queued_requests: 64,
        admission: AdmissionPolicy::Watermark,
        ..SchedulerConfig::default()
    }
}

/// Plans and applies a step in which every sample is `token`. Returns whether there was one.
fn step(scheduler: &mut Scheduler, token: TokenId) -> bool {
    let Some(plan) = scheduler.plan_unwritten(0.0).unwrap() else { return false };
    let (tokens, outcomes) = ([token; 64], [Outcome::Ok; 64]);
    let sampled = Sampled {
        tokens: &tokens[..plan.num_samples],
        outcomes: &outcomes[..plan.num_samples],
        failed_rows: &[],
        accepted: None,
    };
    scheduler.apply(plan.id, sampled, |_, _| ()).unwrap();
    true
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|place| place * 31 + seed).collect()
}

/// Bytes a block: how much more a full scheduler of twice the blocks takes.
fn bytes_per_block(block_size: usize) -> f64 {
    let full = |num_blocks: usize| {
        let before = bytes();
        let mut scheduler = Scheduler::new(config(num_blocks + 1, block_size)).unwrap();
        let prompts = num_blocks / 64;
        for seed in 0..prompts as u32 {
            let tokens = prompt(seed * 7919, 64 * block_size - 1);
            scheduler.submit(Submission { max_tokens: Some(2), ..Submission::new(&tokens) }).unwrap();
            while step(&mut scheduler, 7) {}
        }
        assert!(scheduler.stats().blocks.cached * 10 > num_blocks * 9, "the tree is full");
        bytes() - before
    };
    (full(16_384) - full(8_192)) as f64 / 8_192.0
}

/// Bytes that each of 32 running requests of `len` tokens takes beside its blocks.
fn bytes_per_request(len: usize, block_size: usize) -> f64 {
    let num_blocks = 40 * (len / block_size + 2);
    let mut scheduler = Scheduler::new(config(num_blocks, block_size)).unwrap();
    scheduler.submit(Submission { max_tokens: Some(2), ..Submission::new(&[1]) }).unwrap();
    while step(&mut scheduler, 7) {}
    let before = bytes();
    for seed in 0..32 {
        let tokens = prompt(seed * 7919, len);
        scheduler.submit(Submission { max_tokens: Some(MAX_TOKENS), ..Submission::new(&tokens) }).unwrap();
        step(&mut scheduler, 7);
    }
    assert_eq!(scheduler.stats().num_running, 32);
    (bytes() - before) as f64 / 32.0
}

#[test]
fn blocks_and_requests_take_no_more_memory_than_is_promised() {
    for block_size in [1, 16, 64] {
        let taken = bytes_per_block(block_size);
        report("block", block_size, taken, 64.0 + 4.0 * block_size as f64);
    }
    for len in [100, 1_000, 10_000] {
        // Those that it has and those that it may still get.
        let tokens = len + MAX_TOKENS;
        let most = 2048.0 + 8.0 * (tokens / 16 + 1) as f64 + 4.0 * tokens as f64;
        report("request", len, bytes_per_request(len, 16), most);
    }
}

/// Prints a measurement; it is at most `most` bytes.
fn report(what: &str, size: usize, value: f64, most: f64) {
    let line =
        format!(r#""case":"{what}_{size}","metric":"bookkeeping","value":{value:.1},"unit":"B","n":1"#);
    println!(r#"{{"bench":"memory",{line}}}"#);
    assert!(value <= most, "{what} of {size} tokens takes {value:.1} bytes, at most {most} are right");
}
