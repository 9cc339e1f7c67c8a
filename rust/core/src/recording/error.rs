//! What a recording must have, and why it could not be replayed.

use crate::error::Error;

/// Whether a recording must have its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It must: what has none is refused.
    Complete,
    /// It may be cut, as a process leaves it that died: what comes before the first chunk that is not whole counts.
    MayBeCut,
}

/// Why a recording could not be replayed to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The recording has another format.
    #[error("the recording has format {found}: this version reads format {read}")]
    Format {
        /// Its format.
        found: char,
        /// The one that is read.
        read: char,
    },
    /// The recording ends without its end mark.
    #[error(
        "the recording is cut at byte {offset}, without its end mark: what comes before can be replayed if it may be cut"
    )]
    Cut {
        /// Where the last whole chunk ends.
        offset: usize,
    },
    /// The bytes are no recording, or were damaged.
    #[error("byte {offset} of the recording: {problem}")]
    Malformed {
        /// Where.
        offset: usize,
        /// What is wrong there.
        problem: &'static str,
    },
    /// The recorded options are not allowed.
    #[error("the recorded options are refused: {0}")]
    Options(Error),
    /// The recorded options ask for more memory than a replay may take.
    #[error("the recorded options ask for {bytes} bytes of memory: allowed are {limit}")]
    TooLarge {
        /// What the scheduler and its arrays would take.
        bytes: u128,
        /// The most that a replay takes.
        limit: u128,
    },
    /// A call decided otherwise than it did when it was recorded.
    #[error("call {call} ({verb}) decided otherwise than it did when it was recorded")]
    Diverged {
        /// Which call, counted from 0.
        call: u64,
        /// Its verb.
        verb: String,
    },
}
