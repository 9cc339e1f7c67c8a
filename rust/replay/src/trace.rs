//! A trace: requests in the order of their arrival.

use pykv_core::{Error, Result};

/// A block of a prompt and all that comes before it, by number. Numbers are dense: from 0 on, without large gaps.
pub type BlockNumber = u32;

/// `length` blocks whose numbers follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first block's number.
    pub start: BlockNumber,
    /// Blocks.
    pub length: u32,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Seconds from the trace's start.
    pub arrival: f64,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens that are generated.
    pub output_tokens: u32,
    /// Which session it belongs to, if any.
    pub session: Option<u32>,
}

/// A trace's columns, as a reader of files fills them. All but the last three have one entry a request.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// Seconds from the trace's start.
    pub arrivals: &'a [f64],
    /// Tokens of each prompt.
    pub prompt_tokens: &'a [i64],
    /// Tokens that are generated.
    pub output_tokens: &'a [i64],
    /// Session numbers; below 0: none.
    pub sessions: &'a [i64],
    /// How many runs each prompt has.
    pub num_runs: &'a [i64],
    /// The first block of each run.
    pub run_starts: &'a [i64],
    /// Blocks of each run.
    pub run_lengths: &'a [i64],
}

/// A request that no trace can hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct RefusedRequest {
    /// Its place in the columns.
    pub request: usize,
    /// What is wrong with it.
    pub error: Error,
}

/// Requests, and the blocks of their prompts as runs.
#[derive(Clone, Debug)]
pub struct Trace {
    block_size: usize,
    requests: Vec<Request>,
    /// Where each request's runs start, and where the last one's end.
    first_run: Vec<u32>,
    runs: Vec<Run>,
    num_blocks: usize,
}

impl Trace {
    /// A trace without requests, whose blocks hold `block_size` tokens each.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if `block_size` is zero or above 65,536.
    pub fn new(block_size: usize) -> Result<Self> {
        pykv_core::BlockSize::new(block_size)?;
        Ok(Self { block_size, requests: Vec::new(), first_run: vec![0], runs: Vec::new(), num_blocks: 0 })
    }

    /// The trace of some columns.
    ///
    /// # Errors
    /// [`RefusedRequest`] for the first request that [`push`](Self::push) refuses, or whose columns end before it.
    pub fn from_columns(
        block_size: usize,
        columns: Columns<'_>,
    ) -> std::result::Result<Self, RefusedRequest> {
        let mut trace = Self::new(block_size).map_err(|error| RefusedRequest { request: 0, error })?;
        trace.requests.reserve_exact(columns.arrivals.len());
        trace.first_run.reserve_exact(columns.arrivals.len());
        trace.runs.reserve_exact(columns.run_starts.len());
        let mut first = 0;
        for place in 0..columns.arrivals.len() {
            let added = columns.request(place).and_then(|(request, num_runs)| {
                let runs = columns.runs(first, num_runs)?;
                first += num_runs;
                trace.push(request, runs)
            });
            added.map_err(|error| RefusedRequest { request: place, error })?;
        }
        Ok(trace)
    }

    /// Adds a request whose prompt has these blocks, the last of which may be filled in part; none: nothing is known of
    /// what it shares.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] for a prompt without a token, an arrival before the last one, numbers beyond 2³¹, or
    /// more blocks than the prompt fills.
    pub fn push(&mut self, request: Request, runs: impl IntoIterator<Item = Run>) -> Result<()> {
        let last = self.requests.last().map_or(0.0, |last| last.arrival);
        if !(last..f64::INFINITY).contains(&request.arrival) {
            let allowed = format!("finite seconds, not before the last arrival at {last}");
            return Err(Error::request("arrival", request.arrival, allowed));
        }
        if request.prompt_tokens == 0 || request.prompt_tokens > MAX_TOKENS {
            return Err(Error::request("prompt_tokens", request.prompt_tokens, "1 to 1073741824"));
        }
        if request.output_tokens > MAX_TOKENS {
            return Err(Error::request("output_tokens", request.output_tokens, "0 to 1073741824"));
        }
        let before = self.runs.len();
        let result = self.push_runs(runs, (request.prompt_tokens as usize).div_ceil(self.block_size));
        if result.is_err() {
            self.runs.truncate(before);
            return result;
        }
        self.first_run.push(self.runs.len() as u32);
        self.requests.push(request);
        Ok(())
    }

    fn push_runs(&mut self, runs: impl IntoIterator<Item = Run>, max_blocks: usize) -> Result<()> {
        let mut blocks = 0;
        let mut end = self.num_blocks;
        for run in runs {
            if run.length == 0 || run.start > MAX_BLOCK || run.length > MAX_BLOCK {
                let value = format!("[{}, {}]", run.start, run.length);
                return Err(Error::request("blocks", value, "runs [start, length] of at least one block"));
            }
            blocks += run.length as usize;
            if blocks > max_blocks {
                let allowed = format!("at most the {max_blocks} that the prompt's tokens reach into");
                return Err(Error::request("blocks", format!("{blocks} blocks"), allowed));
            }
            end = end.max(run.start as usize + run.length as usize);
            self.runs.push(run);
        }
        self.num_blocks = end;
        Ok(())
    }

    /// The same trace in blocks of another size: each block as several smaller ones.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a size that does not divide this one's, unless the trace says nothing of blocks; for
    /// sizes that make too many blocks.
    pub fn with_block_size(&self, block_size: usize) -> Result<Self> {
        let mut trace = Self::new(block_size)?;
        let pieces = (self.block_size / block_size) as u32;
        if !self.runs.is_empty() && !self.block_size.is_multiple_of(block_size) {
            let allowed = format!("a divisor of the trace's block size {}", self.block_size);
            return Err(Error::config("block_size", block_size, allowed));
        }
        for (place, request) in self.requests.iter().enumerate() {
            let mut left = request.prompt_tokens.div_ceil(block_size as u32);
            let runs = self.runs(place).iter().map(|run| {
                let length = run.length.saturating_mul(pieces).min(left);
                left -= length;
                Run { start: run.start.saturating_mul(pieces), length }
            });
            trace.push(*request, runs.filter(|run| run.length > 0))?;
        }
        Ok(trace)
    }

    /// Tokens a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Tokens of all prompts.
    pub fn num_prompt_tokens(&self) -> usize {
        self.requests.iter().map(|request| request.prompt_tokens as usize).sum()
    }

    /// Tokens of the longest request, prompt and output together.
    pub fn longest_request(&self) -> usize {
        let lengths =
            self.requests.iter().map(|request| request.prompt_tokens + request.output_tokens.max(1));
        lengths.max().unwrap_or(0) as usize
    }

    /// The requests, by arrival.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The blocks' numbers lie below this.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Blocks of a request's prompt.
    pub fn num_prompt_blocks(&self, request: usize) -> usize {
        self.runs(request).iter().map(|run| run.length as usize).sum()
    }

    /// The blocks of a request's prompt, as runs.
    pub fn runs(&self, request: usize) -> &[Run] {
        &self.runs[self.first_run[request] as usize..self.first_run[request + 1] as usize]
    }

    /// The blocks of a request's prompt, the first first.
    pub fn blocks(&self, request: usize) -> impl Iterator<Item = BlockNumber> {
        self.runs(request).iter().flat_map(|run| run.start..run.start + run.length)
    }
}

impl Columns<'_> {
    fn request(&self, place: usize) -> Result<(Request, usize)> {
        let session = number("session", self.sessions, place).ok();
        let request = Request {
            arrival: self.arrivals[place],
            prompt_tokens: number("prompt_tokens", self.prompt_tokens, place)?,
            output_tokens: number("output_tokens", self.output_tokens, place)?,
            session,
        };
        Ok((request, number("num_runs", self.num_runs, place)? as usize))
    }

    fn runs(&self, first: usize, count: usize) -> Result<Vec<Run>> {
        let run = |place| {
            let start = number("blocks", self.run_starts, place)?;
            Ok(Run { start, length: number("blocks", self.run_lengths, place)? })
        };
        (first..first + count).map(run).collect()
    }
}

fn number(field: &'static str, column: &[i64], place: usize) -> Result<u32> {
    let value = column.get(place).ok_or_else(|| Error::request(field, "missing", "one entry a request"))?;
    u32::try_from(*value).map_err(|_| Error::request(field, value, "0 to 4294967295"))
}

const MAX_TOKENS: u32 = 1 << 30;
const MAX_BLOCK: u32 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request = Request { arrival: 1.0, prompt_tokens: 40, output_tokens: 2, session: None };

    #[test]
    fn runs_are_the_blocks_in_order() {
        let mut trace = Trace::new(16).unwrap();
        trace.push(REQUEST, [Run { start: 0, length: 1 }, Run { start: 7, length: 2 }]).unwrap();
        trace.push(REQUEST, []).unwrap();
        assert_eq!(trace.blocks(0).collect::<Vec<_>>(), [0, 7, 8]);
        assert_eq!((trace.num_prompt_blocks(1), trace.num_blocks()), (0, 9));
    }

    #[test]
    fn smaller_blocks_are_pieces_of_the_larger_ones_as_far_as_the_prompt_goes() {
        let mut trace = Trace::new(16).unwrap();
        trace.push(REQUEST, [Run { start: 0, length: 1 }, Run { start: 7, length: 2 }]).unwrap();
        let smaller = trace.with_block_size(8).unwrap();
        assert_eq!(smaller.blocks(0).collect::<Vec<_>>(), [0, 1, 14, 15, 16]);
        assert!(trace.with_block_size(5).is_err());
        assert!(trace.with_block_size(32).is_err());
    }

    #[test]
    fn a_refused_request_leaves_nothing_behind() {
        let mut trace = Trace::new(16).unwrap();
        let too_many = trace.push(REQUEST, [Run { start: 0, length: 4 }]).unwrap_err();
        assert!(too_many.to_string().contains("at most the 3"), "{too_many}");
        assert!(trace.push(Request { prompt_tokens: 0, ..REQUEST }, []).is_err());
        assert!(trace.push(Request { arrival: f64::NAN, ..REQUEST }, []).is_err());
        trace.push(REQUEST, [Run { start: 5, length: 1 }]).unwrap();
        assert!(trace.push(Request { arrival: 0.5, ..REQUEST }, []).is_err());
        assert_eq!(trace.blocks(0).collect::<Vec<_>>(), [5]);
    }
}
