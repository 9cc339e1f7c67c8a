//! What can go wrong, with the numbers that explain it.

/// The result of an operation of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Every error of this crate. Except for [`Error::Broken`], nothing was changed when one is returned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An option of the configuration has a value that is not allowed.
    #[error("{field} is {value}: allowed is {allowed}")]
    InvalidConfig {
        /// The option.
        field: &'static str,
        /// What was given.
        value: String,
        /// What would have been right.
        allowed: String,
    },
    /// A field of a request has a value that is not allowed.
    #[error("{field} is {value}: allowed is {allowed}")]
    InvalidRequest {
        /// The field.
        field: &'static str,
        /// What was given.
        value: String,
        /// What would have been right.
        allowed: String,
    },
    /// A request that can never run: prompt and one output token pass what the cap or the pool allows.
    #[error(
        "prompt has {prompt} tokens and needs room for at least one more: allowed is a total of {cap} tokens \
         (the least of max_model_len {max_model_len} and {pool} usable slots)"
    )]
    NeverFits {
        /// Tokens of the prompt.
        prompt: usize,
        /// The effective cap, in tokens.
        cap: usize,
        /// The configured cap, in tokens.
        max_model_len: usize,
        /// Usable slots of the pool.
        pool: usize,
    },
    /// The waiting queue has no room.
    #[error(
        "the queue holds {queued} {unit} and {asked} more were submitted: allowed are {limit} ({option})"
    )]
    QueueFull {
        /// What is counted.
        unit: &'static str,
        /// The option that limits it.
        option: &'static str,
        /// What waits.
        queued: usize,
        /// What the refused request would add.
        asked: usize,
        /// The limit.
        limit: usize,
    },
    /// A pin would pass its quota; nothing was pinned.
    #[error("{whose}pins hold {held} blocks and {asked} more were asked for: allowed are {limit} ({option})")]
    PinQuota {
        /// Whose pins are counted: empty, or the tenant's.
        whose: &'static str,
        /// The option that limits them.
        option: &'static str,
        /// Blocks that are pinned.
        held: usize,
        /// Blocks that the refused pin would add.
        asked: usize,
        /// The quota.
        limit: usize,
    },
    /// The bookkeeping of a pool needs more memory than there is.
    #[error("{what} needs {bytes} bytes of memory, and the system gives no more")]
    OutOfMemory {
        /// What it is for.
        what: &'static str,
        /// The bytes that could not be had.
        bytes: usize,
    },
    /// Fewer blocks can be given than were asked for; none was taken.
    #[error("{needed} blocks are needed, {available} are available")]
    OutOfBlocks {
        /// Blocks asked for.
        needed: usize,
        /// Blocks that are free or can be evicted.
        available: usize,
    },
    /// `plan` was called while as many steps are in flight as may be.
    #[error("plan {plan} is in flight: apply or discard it before the next plan")]
    StepInFlight {
        /// The newest step in flight.
        plan: u64,
    },
    /// `plan` was given arrays that a step in flight still reads.
    #[error("the arrays hold plan {plan}{whose}, which is in flight: give the next plan others")]
    ArraysInFlight {
        /// The step in flight.
        plan: u64,
        /// Whose it is: empty, or another scheduler's.
        whose: &'static str,
    },
    /// `apply` was called before its turn.
    #[error("plan {plan} follows plan {oldest}, which is in flight: apply or discard that one first")]
    OutOfOrder {
        /// The plan that was given.
        plan: u64,
        /// The oldest step in flight.
        oldest: u64,
    },
    /// `apply` or `discard` was called with a plan that is not in flight.
    #[error("plan {plan} is not in flight")]
    NotInFlight {
        /// The plan that was given.
        plan: u64,
    },
    /// An array of a step does not fit.
    #[error("{array} has {length} elements: needed are {needed}")]
    ArrayLength {
        /// The array.
        array: &'static str,
        /// Its length.
        length: usize,
        /// The length that fits.
        needed: usize,
    },
    /// An array of a step holds a value that is not allowed.
    #[error("{array}[{index}] is {value}: allowed is {allowed}")]
    ArrayValue {
        /// The array.
        array: &'static str,
        /// Where in it.
        index: usize,
        /// What stands there.
        value: i64,
        /// What would have been right.
        allowed: &'static str,
    },
    /// An invariant of `docs/invariants.md` does not hold: the object must not be used any further.
    #[error("invariant {invariant} is broken: {detail}")]
    Broken {
        /// Its name.
        invariant: &'static str,
        /// What was found.
        detail: String,
    },
}

impl Error {
    /// An [`Error::InvalidConfig`].
    pub fn config(field: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::InvalidConfig { field, value: value.to_string(), allowed: allowed.into() }
    }

    /// An [`Error::InvalidRequest`].
    pub fn request(field: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::InvalidRequest { field, value: value.to_string(), allowed: allowed.into() }
    }

    /// An [`Error::Broken`].
    pub fn broken(invariant: &'static str, detail: impl Into<String>) -> Self {
        Self::Broken { invariant, detail: detail.into() }
    }
}
