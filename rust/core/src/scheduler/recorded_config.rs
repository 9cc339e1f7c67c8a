//! A scheduler's options as a recording keeps them: whole numbers, layer groups and reals.

use super::config::{AdmissionPolicy, SchedulerConfig};
use crate::error::{Error, Result};
use crate::groups::LayerGroup;
use crate::policy::order::QueueOrder;
use crate::policy::preemption::PreemptionMode;
use crate::prefix::eviction::{EvictionPolicy, POLICIES};

/// An option that is kept as a number.
trait Recorded: Copy {
    fn to_number(self) -> u64;

    /// The option of this number; none if there is none.
    fn from_number(number: u64) -> Option<Self>;
}

impl Recorded for u64 {
    fn to_number(self) -> u64 {
        self
    }

    fn from_number(number: u64) -> Option<Self> {
        Some(number)
    }
}

impl Recorded for usize {
    fn to_number(self) -> u64 {
        self as u64
    }

    fn from_number(number: u64) -> Option<Self> {
        usize::try_from(number).ok()
    }
}

impl Recorded for bool {
    fn to_number(self) -> u64 {
        self.into()
    }

    fn from_number(number: u64) -> Option<Self> {
        Some(number != 0)
    }
}

/// Those of a list of all choices, each at its own place.
macro_rules! recorded_choice {
    ($($choice:ty),*) => {
        $(impl Recorded for $choice {
            fn to_number(self) -> u64 {
                self as u64
            }

            fn from_number(number: u64) -> Option<Self> {
                Self::ALL.get(usize::try_from(number).ok()?).copied()
            }
        })*
    };
}

recorded_choice!(PreemptionMode, AdmissionPolicy, QueueOrder);

impl Recorded for &'static dyn EvictionPolicy {
    fn to_number(self) -> u64 {
        POLICIES.iter().position(|policy| policy.name() == self.name()).unwrap_or(POLICIES.len()) as u64
    }

    fn from_number(number: u64) -> Option<Self> {
        POLICIES.get(usize::try_from(number).ok()?).copied()
    }
}

/// The one list of the options that are numbers, in the order of the format: writing and reading both follow it.
macro_rules! recorded {
    ($($($field:ident).+,)*) => {
        impl SchedulerConfig {
            /// How many numbers [`numbers`](Self::numbers) gives.
            pub(crate) const NUM_NUMBERS: usize = [$(stringify!($($field).+)),*].len();

            /// All options but the reals, the groups and the number of events, which changes no decision.
            pub(crate) fn numbers(&self) -> [u64; Self::NUM_NUMBERS] {
                [$(self.$($field).+.to_number()),*]
            }

            fn set_numbers(&mut self, numbers: [u64; Self::NUM_NUMBERS]) -> Result<()> {
                let mut numbers = numbers.into_iter();
                $(
                    let number = numbers.next().expect("there is a number for each");
                    self.$($field).+ = Recorded::from_number(number).ok_or_else(|| {
                        Error::config(stringify!($($field).+), number, "one of the known choices")
                    })?;
                )*
                Ok(())
            }
        }
    };
}

recorded! {
    num_blocks,
    num_host_blocks,
    preemption,
    block_size,
    max_num_seqs,
    max_num_batched_tokens,
    max_chunk_tokens,
    max_model_len,
    admission,
    enable_prefix_caching,
    queue_order,
    max_passes,
    preempt_lower_ranks,
    max_queued_tokens,
    max_queued_requests,
    hash_seed,
    hash_mask,
    num_lookahead_tokens,
    eviction,
    pin_quota.blocks,
    pin_quota.blocks_per_tenant,
    report_other_scopes,
    max_steps_in_flight,
    num_state_slots,
    checkpoint_every,
    partial_block_reuse,
}

impl SchedulerConfig {
    /// How many reals [`reals`](Self::reals) gives.
    pub(crate) const NUM_REALS: usize = 2;

    /// The options that are no whole numbers.
    pub(crate) fn reals(&self) -> [f64; Self::NUM_REALS] {
        [self.watermark, self.tenant_cache_share]
    }

    /// The options that gave these numbers.
    pub(crate) fn from_numbers(
        numbers: [u64; Self::NUM_NUMBERS],
        groups: Vec<LayerGroup>,
        [watermark, tenant_cache_share]: [f64; Self::NUM_REALS],
    ) -> Result<Self> {
        let mut config = Self { groups, watermark, tenant_cache_share, max_kv_events: 0, ..Self::default() };
        config.set_numbers(numbers)?;
        Ok(config)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::prefix::PinQuota;

    /// All options, each with a value that no other one has and that is not the default. A new one must be added here.
    fn config() -> SchedulerConfig {
        SchedulerConfig {
            num_blocks: 101,
            num_host_blocks: 102,
            preemption: PreemptionMode::Recompute,
            block_size: 103,
            groups: vec![LayerGroup::Window { tokens: 104 }, LayerGroup::Full],
            max_num_seqs: 105,
            max_num_batched_tokens: 106,
            max_chunk_tokens: 107,
            num_lookahead_tokens: 108,
            max_model_len: 109,
            max_steps_in_flight: 110,
            watermark: 0.5,
            admission: AdmissionPolicy::Watermark,
            enable_prefix_caching: false,
            eviction: POLICIES[1],
            tenant_cache_share: 0.25,
            pin_quota: PinQuota { blocks: 111, blocks_per_tenant: 112 },
            max_kv_events: 0,
            report_other_scopes: true,
            num_state_slots: 113,
            checkpoint_every: 114,
            partial_block_reuse: 115,
            queue_order: QueueOrder::FairShare,
            max_passes: 116,
            preempt_lower_ranks: true,
            max_queued_tokens: 117,
            max_queued_requests: 118,
            hash_seed: 119,
            hash_mask: 120,
        }
    }

    #[test]
    fn every_option_comes_back_from_its_numbers() {
        let config = config();
        let again =
            SchedulerConfig::from_numbers(config.numbers(), config.groups.clone(), config.reals()).unwrap();
        assert_eq!(format!("{again:?}"), format!("{config:?}"));
    }

    #[test]
    fn each_number_keeps_its_place_in_the_format() {
        let numbers = [
            101, 102, 1, 103, 105, 106, 107, 109, 1, 0, 3, 116, 1, 117, 118, 119, 120, 108, 1, 111, 112, 1,
            110, 113, 114, 115,
        ];
        assert_eq!((config().numbers(), config().reals()), (numbers, [0.5, 0.25]));
    }

    #[test]
    fn a_choice_that_is_none_is_refused_by_name() {
        let config = config();
        let mut numbers = config.numbers();
        numbers[10] = 4;
        let error =
            SchedulerConfig::from_numbers(numbers, config.groups.clone(), config.reals()).unwrap_err();
        assert_eq!(error.to_string(), "queue_order is 4: allowed is one of the known choices");
    }
}
