//! A recording of a scheduler as a trace: the same prompts at the same times.

use hashbrown::HashMap;
use pykv_core::recording::{RecordedRequest, ReplayError, recorded_requests};
use pykv_core::{Error, TokenId};

use crate::trace::{BlockNumber, Request, Run, Trace};

/// Why a recording is no trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordedError {
    /// It cannot be replayed.
    #[error(transparent)]
    Recording(#[from] ReplayError),
    /// A request cannot be one of a trace.
    #[error(transparent)]
    Request(#[from] Error),
}

/// The trace of a recording. Tenants count as sessions, samples of one request as one output.
///
/// # Errors
/// [`RecordedError`] if the bytes are no recording.
pub fn trace_of_recording(bytes: &[u8]) -> Result<Trace, RecordedError> {
    let (block_size, requests) = recorded_requests(bytes)?;
    let mut trace = Trace::new(block_size)?;
    let mut symbols = Symbols::default();
    let mut sessions: HashMap<&[u8], u32> = HashMap::new();
    let start = requests.first().map_or(0.0, |request| request.arrival);
    for request in &requests {
        let next = sessions.len() as u32;
        let tenant = request.tenant.as_slice();
        let session = (!tenant.is_empty()).then(|| *sessions.entry(tenant).or_insert(next));
        let row = Request {
            arrival: request.arrival - start,
            prompt_tokens: request.prompt.len() as u32,
            output_tokens: request.output_tokens as u32,
            session,
        };
        trace.push(row, symbols.runs(request, block_size))?;
    }
    Ok(trace)
}

/// What a block is known by: its scope, the block before it, its tokens.
type Content<'a> = (&'a [u8], Option<BlockNumber>, &'a [TokenId]);

#[derive(Default)]
struct Symbols<'a> {
    by_content: HashMap<Content<'a>, BlockNumber>,
}

impl<'a> Symbols<'a> {
    fn runs(&mut self, request: &'a RecordedRequest, block_size: usize) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut parent = None;
        for tokens in request.prompt.chunks(block_size) {
            let next = self.by_content.len() as BlockNumber;
            let block = *self.by_content.entry((&request.scope, parent, tokens)).or_insert(next);
            match runs.last_mut() {
                Some(run) if run.start + run.length == block => run.length += 1,
                _ => runs.push(Run { start: block, length: 1 }),
            }
            parent = Some(block);
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pykv_core::SchedulerConfig;
    use pykv_core::recording::RecordedScheduler;
    use pykv_core::scheduler::{Outcome, OwnedArrays, Sampled, Submission, TableSync};

    fn recording(prompts: &[(&[TokenId], &[u8])]) -> Vec<u8> {
        let config = SchedulerConfig { num_blocks: 20, block_size: 2, ..SchedulerConfig::default() };
        let mut scheduler = RecordedScheduler::new(config.clone()).unwrap();
        assert!(scheduler.start_recording());
        let (mut arrays, mut sync) = (OwnedArrays::new(&config), TableSync::default());
        let mut now = 5.0;
        for &(prompt, scope) in prompts {
            let submission = Submission { max_tokens: Some(3), scope, ..Submission::new(prompt) };
            scheduler.submit(submission).unwrap();
            while let Some(plan) = scheduler.plan(&arrays.borrow(), &mut sync, now).unwrap() {
                let tokens = vec![1; plan.num_samples];
                let outcomes = vec![Outcome::Ok; plan.num_samples];
                let sampled =
                    Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows: &[], accepted: None };
                scheduler.apply(plan.id, sampled, |_, _| {}).unwrap();
                now += 1.0;
            }
        }
        scheduler.finish_recording()
    }

    #[test]
    fn a_recording_is_its_requests_at_their_times_with_their_shared_blocks() {
        let bytes = recording(&[(&[1, 2, 3, 4, 5], b""), (&[1, 2, 3, 9], b""), (&[1, 2], b"other")]);
        let trace = trace_of_recording(&bytes).unwrap();
        let blocks: Vec<Vec<_>> = (0..3).map(|request| trace.blocks(request).collect()).collect();
        assert_eq!(blocks, [vec![0, 1, 2], vec![0, 3], vec![4]]);
        let arrivals: Vec<_> = trace.requests().iter().map(|request| request.arrival).collect();
        assert_eq!(arrivals, [0.0, 3.0, 6.0]);
        assert!(trace.requests().iter().all(|request| request.output_tokens == 3));
    }

    #[test]
    fn what_is_no_recording_is_refused() {
        assert!(trace_of_recording(b"nothing").is_err());
    }
}
