//! A few persistent threads that join the caller in its work, if they come in time.
//!
//! The caller always works itself and never waits for a thread that has not begun: a late thread finds the job closed.
//! So a sleeping or busy machine costs speed and nothing else.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a thread looks for the next job before it sleeps.
const PATIENCE: Duration = Duration::from_micros(50);

/// A job that threads may enter: called with a number that no other thread has, from 1 on.
type Job = *const (dyn Fn(usize) + Sync);

#[derive(Default)]
struct Desk {
    job: Option<JobPointer>,
    /// Threads that may still enter.
    seats: usize,
    /// Threads inside the job.
    active: usize,
    /// A thread panicked inside the job.
    panicked: bool,
    /// The pool is going away.
    closed: bool,
}

struct JobPointer(Job);

// SAFETY: what it points to is `Sync`, and `Pool::run` keeps it alive for as long as a thread may hold it.
unsafe impl Send for JobPointer {}

#[derive(Default)]
struct Shared {
    desk: Mutex<Desk>,
    /// Rises with every job, so that waiting threads need no lock to look.
    jobs: AtomicU64,
    /// A job came.
    came: Condvar,
    /// A thread left.
    left: Condvar,
}

/// Threads that wait for jobs; they end when the pool is dropped.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Pool {
    /// A pool without threads; they are started when a job first wants them.
    pub(crate) fn new() -> Pool {
        Pool { shared: Arc::default(), threads: Vec::new() }
    }

    /// Calls `job(0)` here, and `job(1)`, `job(2)`, … on up to `num_threads - 1` threads that come in time.
    ///
    /// # Panics
    /// When the job panicked on any thread.
    pub(crate) fn run(&mut self, num_threads: usize, job: &(dyn Fn(usize) + Sync)) {
        self.start(num_threads.saturating_sub(1));
        let seats = num_threads.saturating_sub(1).min(self.threads.len());
        if seats == 0 {
            return job(0);
        }
        let closing = Closing { shared: &self.shared };
        self.shared.open(job, seats);
        job(0);
        drop(closing);
    }

    /// Starts threads until there are `wanted`, or the system gives no more.
    fn start(&mut self, wanted: usize) {
        while self.threads.len() < wanted {
            let shared = Arc::clone(&self.shared);
            let number = self.threads.len() + 1;
            let builder = thread::Builder::new().name(format!("pykv-attention-{number}"));
            match builder.spawn(move || shared.serve()) {
                Ok(thread) => self.threads.push(thread),
                Err(_) => return,
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut desk = self.shared.lock();
        desk.closed = true;
        self.shared.jobs.fetch_add(1, Ordering::Release);
        drop(desk);
        self.shared.came.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Closes the job when the caller is done with it, also by a panic, and waits for the threads inside.
struct Closing<'a> {
    shared: &'a Shared,
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let panicked = self.shared.close();
        if panicked && !thread::panicking() {
            panic!("a thread of the attention pool panicked");
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, job: &(dyn Fn(usize) + Sync), seats: usize) {
        // SAFETY: only the lifetime changes. `Pool::run` holds the job until `close` returned, and after that no
        // thread has or can get this pointer.
        let job = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(job) };
        let mut desk = self.lock();
        desk.job = Some(JobPointer(job));
        desk.seats = seats;
        self.jobs.fetch_add(1, Ordering::Release);
        drop(desk);
        self.came.notify_all();
    }

    /// Takes the job away, waits until no thread is inside it, and returns whether one panicked.
    fn close(&self) -> bool {
        let mut desk = self.lock();
        desk.job = None;
        while desk.active > 0 {
            desk = self.left.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::take(&mut desk.panicked)
    }

    /// A thread's life.
    fn serve(&self) {
        let mut seen = 0;
        while let Some(jobs) = self.wait_for_job(seen) {
            seen = jobs;
            if let Some((job, number)) = self.enter() {
                // SAFETY: `close` waits for this thread, so the job is alive until `leave`.
                let job = unsafe { &*job.0 };
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(number)));
                self.leave(outcome.is_err());
            }
        }
    }

    /// Returns the count of jobs once it differs from `seen`; nothing when the pool is closed.
    fn wait_for_job(&self, seen: u64) -> Option<u64> {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            for _ in 0..64 {
                let jobs = self.jobs.load(Ordering::Acquire);
                if jobs != seen {
                    return (!self.lock().closed).then_some(jobs);
                }
                std::hint::spin_loop();
            }
        }
        let mut desk = self.lock();
        loop {
            let jobs = self.jobs.load(Ordering::Acquire);
            if desk.closed {
                return None;
            }
            if jobs != seen {
                return Some(jobs);
            }
            desk = self.came.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes a seat in the open job, if there is one.
    fn enter(&self) -> Option<(JobPointer, usize)> {
        let mut desk = self.lock();
        let job = desk.job.as_ref()?.0;
        let number = desk.seats;
        desk.seats = number.checked_sub(1)?;
        desk.active += 1;
        Some((JobPointer(job), number))
    }

    fn leave(&self, panicked: bool) {
        let mut desk = self.lock();
        desk.active -= 1;
        desk.panicked |= panicked;
        let is_empty = desk.active == 0;
        drop(desk);
        if is_empty {
            self.left.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_unit_is_done_once_whoever_comes() {
        let mut pool = Pool::new();
        for round in 0..2_000 {
            let next = AtomicUsize::new(0);
            let done: Vec<AtomicUsize> = (0..round % 17).map(|_| AtomicUsize::new(0)).collect();
            pool.run(1 + round % 4, &|_| {
                while let Some(unit) = done.get(next.fetch_add(1, Ordering::Relaxed)) {
                    unit.fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn threads_inside_have_different_numbers() {
        let mut pool = Pool::new();
        for _ in 0..200 {
            let inside: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
            pool.run(4, &|number| {
                assert_eq!(inside[number].fetch_add(1, Ordering::Relaxed), 0);
                std::hint::black_box((0..5_000).sum::<usize>());
            });
        }
    }

    #[test]
    fn a_panic_on_a_thread_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new();
        let both = std::sync::Barrier::new(2);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(2, &|number| {
                both.wait();
                assert_eq!(number, 0, "a thread that fails");
            });
        }));
        assert!(outcome.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(2, &|_| {
            sum.fetch_add(1, Ordering::Relaxed);
        });
        assert!(sum.load(Ordering::Relaxed) >= 1);
    }
}
