//! One call of attention: plan it, let the threads claim its units, merge what was split.

mod reduce;
mod scratch;
mod span;
mod unit;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, TryLockError};

use crate::Error;
use crate::buffer::Buffer;
use crate::kernels::{InstructionSet, Kernels};
use crate::merge::Part;
use crate::plan::{Plan, PlanShape};
use crate::pool::Pool;
use crate::view::{ActivationView, CacheView, Format, LogSumExpView, Scales, StepView};

use scratch::Scratch;
use unit::UnitRun;

/// How the scores are made.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// The factor of the products.
    pub scale: f32,
    /// Tokens that a query sees, itself included; none: all.
    pub window: Option<usize>,
    /// The bound that scores are bent into; none: none.
    pub softcap: Option<f32>,
    /// A score for each query head that takes weight and adds no value.
    pub sinks: Option<&'a [f32]>,
}

/// Everything that one call of [`Attention::paged_attention`] is about.
#[derive(Debug, Clone, Copy)]
pub struct AttentionCall<'a> {
    /// `[num_tokens, num_heads, head_dim_k]`.
    pub query: ActivationView,
    /// `[num_blocks, num_kv_heads, block_size, head_dim_k]`.
    pub key_cache: CacheView,
    /// `[num_blocks, num_kv_heads, block_size, head_dim_v]`.
    pub value_cache: CacheView,
    /// What turns the numbers of 8-bit caches into keys and values.
    pub scales: Scales,
    /// `[num_tokens, num_heads, head_dim_v]`.
    pub out: ActivationView,
    /// `[num_tokens, num_heads]` singles, or none.
    pub log_sum_exp: Option<LogSumExpView>,
    /// Who has which tokens and blocks.
    pub step: StepView<'a>,
    /// How the scores are made.
    pub options: Options<'a>,
    /// How many threads may work, this one included.
    pub num_threads: usize,
    /// Whether decodes whose tables begin alike read that part together. It changes no bit of the result.
    pub share_prefixes: bool,
    /// Which instructions may be used.
    pub instructions: InstructionSet,
}

/// Threads and scratch memory, kept from call to call.
pub struct Attention {
    workspace: Mutex<Workspace>,
}

struct Workspace {
    pool: Pool,
    plan: Plan,
    scratch: Vec<Mutex<Scratch>>,
    partials: Buffer,
}

impl Workspace {
    fn new() -> Workspace {
        Workspace {
            pool: Pool::new(),
            plan: Plan::default(),
            scratch: Vec::new(),
            partials: Buffer::default(),
        }
    }
}

impl Default for Attention {
    fn default() -> Attention {
        Attention::new()
    }
}

impl Attention {
    /// No threads and no memory yet: they come with the calls that need them.
    pub fn new() -> Attention {
        Attention { workspace: Mutex::new(Workspace::new()) }
    }

    /// Fills `out` (all of it) with the attention of each query token to the keys that it sees.
    ///
    /// While another thread is in here, a call works alone and with fresh memory.
    ///
    /// # Errors
    /// An index is out of range or the views do not fit each other; nothing was written.
    ///
    /// # Safety
    /// The views describe memory that is readable (`out` and `log_sum_exp`: writable, and shared with no other view)
    /// for the whole call, at every index within their shapes.
    pub unsafe fn paged_attention(&self, call: &AttentionCall) -> Result<(), Error> {
        check_views(call)?;
        match self.workspace.try_lock() {
            // SAFETY: the same contract.
            Ok(mut workspace) => unsafe { workspace.run(call, call.num_threads.max(1)) },
            // SAFETY: the same contract.
            Err(TryLockError::WouldBlock) => unsafe { Workspace::new().run(call, 1) },
            Err(TryLockError::Poisoned(_)) => Err(Error::Poisoned),
        }
    }
}

impl Attention {
    /// Runs a job on up to `num_threads` threads, or on this one alone while another call has them.
    pub(crate) fn run(&self, num_threads: usize, job: &(dyn Fn(usize) + Sync)) -> Result<(), Error> {
        match self.workspace.try_lock() {
            Ok(mut workspace) => workspace.pool.run(num_threads, job),
            Err(TryLockError::WouldBlock) => job(0),
            Err(TryLockError::Poisoned(_)) => return Err(Error::Poisoned),
        }
        Ok(())
    }
}

impl Workspace {
    /// # Safety
    /// See [`Attention::paged_attention`].
    unsafe fn run(&mut self, call: &AttentionCall, num_threads: usize) -> Result<(), Error> {
        let shape = plan_shape(call, num_threads);
        self.plan.fill(&call.step, &shape)?;
        // SAFETY: the plan's tokens lie in the query, and `out` has as many.
        unsafe { clear_empty(call, &self.plan) };
        let run = UnitRun::new(call, &self.plan, &shape, kernels_of(call), &mut self.partials);
        while self.scratch.len() < self.plan.num_threads {
            self.scratch.push(Mutex::default());
        }
        let claims = Claims::default();
        let scratch = &self.scratch;
        self.pool.run(self.plan.num_threads, &|thread| {
            if let Ok(mut scratch) = scratch[thread].lock() {
                // SAFETY: the views are valid by the contract of this function, and the claims give each unit and
                // each merge to one thread, the merges after all units.
                unsafe { claims.work(&run, &mut scratch) }
            }
        });
        Ok(())
    }
}

/// What the threads have claimed and done.
#[derive(Default)]
struct Claims {
    units: AtomicUsize,
    done: AtomicUsize,
    merges: AtomicUsize,
}

impl Claims {
    /// Computes units until none is left, waits for those of other threads, and merges.
    ///
    /// # Safety
    /// See [`UnitRun`]; all threads of the run share these claims.
    unsafe fn work(&self, run: &UnitRun, scratch: &mut Scratch) {
        let plan = run.plan;
        let claim = || plan.units.get(self.units.fetch_add(1, Ordering::Relaxed));
        let mut next = claim();
        while let Some(unit) = next {
            next = claim();
            let _done = CountOnDrop(&self.done);
            // SAFETY: this thread alone has this unit.
            unsafe { run.compute(unit, next, scratch) };
        }
        if plan.merges.is_empty() {
            return;
        }
        wait_for(&self.done, plan.units.len());
        let num_merges = plan.merges.len() * run.shape.num_kv_heads;
        loop {
            let merge = self.merges.fetch_add(1, Ordering::Relaxed);
            if merge >= num_merges {
                return;
            }
            // SAFETY: all units are done, and this thread alone has this merge.
            unsafe { run.merge(merge, scratch) };
        }
    }
}

/// Counts when it is dropped, also by a panic: others wait for the count.
struct CountOnDrop<'a>(&'a AtomicUsize);

impl Drop for CountOnDrop<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

fn wait_for(count: &AtomicUsize, goal: usize) {
    let mut turns = 0u32;
    while count.load(Ordering::Acquire) < goal {
        turns += 1;
        if turns.is_multiple_of(1024) {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

fn kernels_of(call: &AttentionCall) -> Kernels {
    Kernels::choose(call.query.format, call.key_cache.format, call.query.head_dim, call.instructions)
}

fn plan_shape(call: &AttentionCall, num_threads: usize) -> PlanShape {
    PlanShape {
        num_tokens: call.query.num_tokens(),
        num_heads: call.query.num_heads(),
        num_kv_heads: call.key_cache.num_kv_heads(),
        num_blocks: call.key_cache.num_blocks(),
        block_size: call.key_cache.block_size(),
        token_bytes: call.key_cache.row_bytes() + call.value_cache.row_bytes(),
        window: call.options.window.unwrap_or(usize::MAX),
        num_threads,
        share_prefixes: call.share_prefixes,
    }
}

/// # Safety
/// `out` and `log_sum_exp` are valid.
unsafe fn clear_empty(call: &AttentionCall, plan: &Plan) {
    let row_bytes = call.out.head_dim * call.out.format.bytes();
    for token in plan.empty.iter().cloned().flatten() {
        for head in 0..call.out.num_heads() {
            // SAFETY: the row lies in the output; all formats of outputs have zero bytes for 0.
            unsafe { call.out.row(token, head).write_bytes(0, row_bytes) };
            if let Some(view) = call.log_sum_exp {
                // SAFETY: the entry lies in the view.
                unsafe { view.entry(token, head).write_unaligned(f32::NEG_INFINITY) };
            }
        }
    }
}

fn check_views(call: &AttentionCall) -> Result<(), Error> {
    let (query, key, value, out) = (&call.query, &call.key_cache, &call.value_cache, &call.out);
    let is_narrow = |format| matches!(format, Format::Int8 | Format::Fp8);
    let rules = [
        (
            key.shape == value.shape,
            "key_cache and value_cache must have the same blocks, heads and block size",
        ),
        (key.shape.iter().all(|&size| size > 0), "the caches must not be empty"),
        (key.format == value.format, "key_cache and value_cache must have the same format"),
        (query.head_dim == key.head_dim, "query and key_cache must have the same head size"),
        (query.head_dim > 0 && value.head_dim > 0, "head sizes must not be 0"),
        (query.num_heads() > 0, "query must have heads"),
        (
            query.num_heads().is_multiple_of(key.num_kv_heads()),
            "query heads must be a multiple of the KV heads",
        ),
        (out.shape == query.shape, "out must have the query's tokens and heads"),
        (out.head_dim == value.head_dim, "out must have the head size of value_cache"),
        (
            out.format == query.format && !is_narrow(out.format),
            "out must have the query's format, without scales",
        ),
        (
            is_narrow(key.format) || key.format == query.format,
            "the caches must have the query's format, or 8 bits",
        ),
        (is_narrow(key.format) == (call.scales != Scales::None), "8-bit caches, and only these, have scales"),
        (
            call.options.sinks.is_none_or(|sinks| sinks.len() == query.num_heads()),
            "sinks must be one for each head",
        ),
        (call.options.window != Some(0), "window must be at least 1"),
        (
            call.step.query_starts.len() == call.step.seq_lens.len() + 1,
            "query_starts must be one more than seq_lens",
        ),
        (
            call.step.table_rows.is_none_or(|rows| rows.len() == call.step.seq_lens.len()),
            "table_rows must be as many as seq_lens",
        ),
    ];
    match rules.into_iter().find(|(holds, _)| !holds) {
        Some((_, text)) => Err(Error::Mismatch(text)),
        None => Ok(()),
    }
}

/// The part that is kept at `address`: its sums, the maximum and the total.
///
/// # Safety
/// The singles can be read and written at `address` for as long as the part lives, by no one else.
unsafe fn part_at<'a>(address: *mut f32, num_sums: usize) -> Part<'a> {
    // SAFETY: by this function's contract; the three borrow different places.
    unsafe {
        Part {
            maximum: &mut *address.add(num_sums),
            total: &mut *address.add(num_sums + 1),
            sums: std::slice::from_raw_parts_mut(address, num_sums),
        }
    }
}
