//! What does it cost to take blocks and to give them back, alone and with a second thread that does the same?
//!
//! The lock-free list stands beside a vector under a mutex and crossbeam's two queues, in turn in one run. A round takes
//! `n` blocks and gives them back; the figure is the median over rounds of the time a block. Left out: what is done with
//! the blocks. Run: `cargo run --release -p pykv-benches`; it prints one JSON object a line.

use std::sync::{Barrier, Mutex};
use std::time::Instant;

use crossbeam_queue::{ArrayQueue, SegQueue};
use pykv_core::BlockId;
use pykv_core::freelist::{Chain, FreeList};

const NUM_BLOCKS: usize = 4096;
const ROUNDS: usize = 60;
const CALLS: usize = 5_000;

/// Somewhere to take blocks from and give them back to.
trait Blocks: Sync {
    const NAME: &'static str;
    fn take(&self, count: usize, held: &mut Vec<BlockId>);
    fn give(&self, held: &mut Vec<BlockId>);
}

impl Blocks for FreeList {
    const NAME: &'static str = "pykv";

    fn take(&self, count: usize, held: &mut Vec<BlockId>) {
        self.pop_chain(count, |block| held.push(block));
    }

    fn give(&self, held: &mut Vec<BlockId>) {
        let mut chain = Chain::new();
        held.drain(..).for_each(|block| self.link(&mut chain, block));
        self.push_chain(chain);
    }
}

impl Blocks for Mutex<Vec<BlockId>> {
    const NAME: &'static str = "mutex";

    fn take(&self, count: usize, held: &mut Vec<BlockId>) {
        let mut blocks = self.lock().expect("nobody panics in here");
        let rest = blocks.len().saturating_sub(count);
        held.extend(blocks.drain(rest..));
    }

    fn give(&self, held: &mut Vec<BlockId>) {
        self.lock().expect("nobody panics in here").append(held);
    }
}

impl Blocks for ArrayQueue<BlockId> {
    const NAME: &'static str = "crossbeam_array";

    fn take(&self, count: usize, held: &mut Vec<BlockId>) {
        held.extend((0..count).map_while(|_| self.pop()));
    }

    fn give(&self, held: &mut Vec<BlockId>) {
        held.drain(..).for_each(|block| self.push(block).expect("the queue holds every block"));
    }
}

impl Blocks for SegQueue<BlockId> {
    const NAME: &'static str = "crossbeam_segments";

    fn take(&self, count: usize, held: &mut Vec<BlockId>) {
        held.extend((0..count).map_while(|_| self.pop()));
    }

    fn give(&self, held: &mut Vec<BlockId>) {
        held.drain(..).for_each(|block| self.push(block));
    }
}

/// Nanoseconds a block of one round: `CALLS` times take and give.
fn round(blocks: &impl Blocks, count: usize) -> f64 {
    let mut held = Vec::with_capacity(count);
    let start = Instant::now();
    for _ in 0..CALLS {
        blocks.take(count, &mut held);
        assert_eq!(held.len(), count, "no block was lost");
        blocks.give(&mut held);
    }
    start.elapsed().as_nanos() as f64 / (CALLS * count) as f64
}

/// The rounds of all threads begin together, so that they meet.
fn rounds(blocks: &impl Blocks, count: usize, threads: usize) -> Vec<f64> {
    let barrier = Barrier::new(threads);
    let worker = || {
        let rounds = (0..ROUNDS).map(|_| {
            barrier.wait();
            round(blocks, count)
        });
        rounds.collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a round does not panic")).collect()
    })
}

fn report<B: Blocks>(blocks: &B, count: usize, threads: usize) {
    let mut times = rounds(blocks, count, threads);
    times.sort_by(f64::total_cmp);
    let (case, value) = (format!("pop_push_{count}_threads_{threads}"), times[times.len() / 2]);
    let (metric, n) = (B::NAME, times.len());
    println!(
        r#"{{"bench":"freelist","case":"{case}","metric":"{metric}","value":{value:.2},"unit":"ns/block","n":{n}}}"#
    );
}

fn main() {
    for threads in [1, 2] {
        for count in [1, 16] {
            report(&FreeList::full(NUM_BLOCKS), count, threads);
            report(&Mutex::new((1..NUM_BLOCKS as u32).map(BlockId::new).collect::<Vec<_>>()), count, threads);
            let queue = ArrayQueue::new(NUM_BLOCKS);
            (1..NUM_BLOCKS as u32)
                .for_each(|id| queue.push(BlockId::new(id)).expect("the queue holds every block"));
            report(&queue, count, threads);
            let segments = SegQueue::new();
            (1..NUM_BLOCKS as u32).for_each(|id| segments.push(BlockId::new(id)));
            report(&segments, count, threads);
        }
    }
}
