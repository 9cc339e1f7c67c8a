//! The same scheduler where no model runs: blocks are symbols, a plan is written nowhere, and the step in flight can be
//! looked at.

use super::step::Plan;
use super::{Scheduler, SchedulerConfig};
use crate::error::Result;
use crate::prefix::PrefixCache;
use crate::units::RequestId;

/// One batch row of the step in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRow {
    /// Whose tokens are computed.
    pub request: RequestId,
    /// Tokens of its sequence that were computed before.
    pub num_computed: usize,
    /// Tokens that the step computes.
    pub num_tokens: usize,
    /// Samples that are drawn after them.
    pub num_samples: usize,
}

impl Scheduler {
    /// A scheduler over symbolic blocks: see [`PrefixCache::symbolic`].
    ///
    /// # Errors
    /// Those of [`Scheduler::new`].
    pub fn symbolic(config: SchedulerConfig) -> Result<Self> {
        let mut scheduler = Self::new(config)?;
        let pool = scheduler.cache.pool().clone();
        let options = scheduler.config.cache_options();
        scheduler.cache = PrefixCache::symbolic(pool, &scheduler.config.groups, options)?;
        if scheduler.config.has_states() {
            scheduler.cache.keep_states(scheduler.config.num_state_slots);
        }
        Ok(scheduler)
    }

    /// Decides the next step as [`plan`](Self::plan) does, and writes it nowhere.
    ///
    /// # Errors
    /// Those of `plan`, except for arrays.
    pub fn plan_unwritten(&mut self, now: f64) -> Result<Option<Plan>> {
        self.plan_into(now, |_, _| {})
    }

    /// The batch rows of the step in flight, or of the older one, in order.
    pub fn step_rows(&self) -> impl Iterator<Item = StepRow> {
        self.in_flight.oldest().into_iter().flat_map(|step| &step.rows).map(|row| StepRow {
            request: self.sequences[row.sequence].key.request,
            num_computed: row.start,
            num_tokens: row.num_tokens,
            num_samples: row.num_samples,
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::scheduler::{OwnedArrays, Submission, TableSync};

    fn config() -> SchedulerConfig {
        SchedulerConfig {
            num_blocks: 9,
            block_size: 4,
            max_num_batched_tokens: 8,
            ..SchedulerConfig::default()
        }
    }

    #[test]
    fn an_unwritten_plan_decides_what_a_written_one_does() {
        let (mut written, mut unwritten) =
            (Scheduler::new(config()).unwrap(), Scheduler::new(config()).unwrap());
        for scheduler in [&mut written, &mut unwritten] {
            scheduler.submit(Submission::new(&[1; 11])).unwrap();
        }
        let mut arrays = OwnedArrays::new(&config());
        let mut sync = TableSync::default();
        let plan = written.plan(&arrays.borrow(), &mut sync, 1.0).unwrap();
        assert_eq!(unwritten.plan_unwritten(1.0).unwrap(), plan);
        let rows: Vec<_> = unwritten.step_rows().collect();
        let first = StepRow { request: RequestId::new(0), num_computed: 0, num_tokens: 8, num_samples: 0 };
        assert_eq!(rows, [first]);
        assert!(unwritten.plan_unwritten(1.0).is_err(), "a step is in flight");
        unwritten.discard(0).unwrap();
        assert_eq!(unwritten.step_rows().count(), 0);
    }

    #[test]
    fn a_symbolic_block_is_known_by_its_first_token() {
        let mut scheduler = Scheduler::symbolic(config()).unwrap();
        let twin = [[7, 0, 0, 0], [8, 0, 0, 0]].concat();
        let other = [[7, 1, 1, 1], [9, 1, 1, 1]].concat();
        scheduler.submit(Submission { max_tokens: Some(1), ..Submission::new(&twin) }).unwrap();
        scheduler.submit(Submission { max_tokens: Some(1), ..Submission::new(&other) }).unwrap();
        scheduler.plan_unwritten(0.0).unwrap();
        let outcomes = [crate::scheduler::Outcome::Ok];
        let sampled =
            crate::scheduler::Sampled { tokens: &[3], outcomes: &outcomes, failed_rows: &[], accepted: None };
        scheduler.apply(0, sampled, |_, _| {}).unwrap();
        scheduler.plan_unwritten(0.0).unwrap();
        scheduler.apply(1, sampled, |_, _| {}).unwrap();
        assert_eq!(scheduler.stats().hit_tokens, 4);
        scheduler.check().unwrap();
    }
}
