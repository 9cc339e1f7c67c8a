//! The shared-memory primitives: the standard library's, or loom's when interleavings are explored.

#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

/// Called where a thread must wait for another one's progress.
pub(crate) fn spin() {
    #[cfg(not(loom))]
    std::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// How long a thread that lost a race for a word leaves it to the others: twice as long each time, up to a bound. Two
/// threads that contend all the time then take turns of several operations each, and the word's cache line stays with
/// one of them meanwhile.
///
/// Source: M. Herlihy and N. Shavit, *The Art of Multiprocessor Programming*, 2008, 7.4.
#[derive(Debug)]
pub(crate) struct Backoff {
    spins: u32,
}

impl Backoff {
    const FIRST: u32 = 4;
    /// About 2 µs where a hint costs 30 ns.
    const MOST: u32 = 64;

    pub(crate) const fn new() -> Self {
        Self { spins: Self::FIRST }
    }

    #[cold]
    pub(crate) fn wait(&mut self) {
        // To loom, one turn of the others is as good as many.
        let spins = if cfg!(loom) { 1 } else { self.spins };
        (0..spins).for_each(|_| spin());
        self.spins = (2 * self.spins).min(Self::MOST);
    }
}
