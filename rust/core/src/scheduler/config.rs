//! What a scheduler is told once.

use crate::error::{Error, Result};
use crate::groups::{LayerGroup, longest};
use crate::policy::order::QueueOrder;
use crate::policy::preemption::PreemptionMode;
use crate::prefix::eviction::{EvictionPolicy, Lru};
use crate::prefix::{CacheOptions, HashOptions, PinQuota};
use crate::units::BlockSize;

/// When a waiting sequence may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionPolicy {
    /// When its blocks can be given now and the worst moment to come fits the pool, if outputs are as long as expected.
    Forecast,
    /// When its blocks can be given now.
    Watermark,
}

impl AdmissionPolicy {
    /// All policies, each at its own number.
    pub(crate) const ALL: [Self; 2] = [Self::Forecast, Self::Watermark];

    /// The policy with this name.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an unknown name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "forecast" => Ok(Self::Forecast),
            "watermark" => Ok(Self::Watermark),
            _ => Err(Error::config("admission", format!("'{name}'"), "forecast or watermark")),
        }
    }
}

/// The options of a [`Scheduler`](super::Scheduler).
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Blocks of the pool, the null block included.
    pub num_blocks: usize,
    /// Blocks of the host's pool for preempted sequences, a null block included; 0: there is none.
    pub num_host_blocks: usize,
    /// How preempted sequences are brought back; [`PreemptionMode::Swap`] wants a host's pool.
    pub preemption: PreemptionMode,
    /// Tokens a block.
    pub block_size: usize,
    /// The model's layer groups: each has a block table of its own.
    pub groups: Vec<LayerGroup>,
    /// Sequences that run at once: rows of the block tables.
    pub max_num_seqs: usize,
    /// Tokens that one step computes.
    pub max_num_batched_tokens: usize,
    /// Tokens of one sequence that one step computes: a cap for long prompts, so that others keep their pace.
    pub max_chunk_tokens: usize,
    /// Drafts that one sequence may have checked in a step; 0: no speculation.
    pub num_lookahead_tokens: usize,
    /// Tokens of one sequence, prompt and output together.
    pub max_model_len: usize,
    /// Steps that may be planned and not applied yet: 1, or 2 to plan a step while the one before it runs.
    pub max_steps_in_flight: usize,
    /// Share of the blocks that an admission leaves untouched while others run.
    pub watermark: f64,
    /// When a waiting sequence may start; the watermark holds under each policy.
    pub admission: AdmissionPolicy,
    /// Whether full blocks are published and found again.
    pub enable_prefix_caching: bool,
    /// Which idle blocks make room first, among those that nothing else tells apart.
    pub eviction: &'static dyn EvictionPolicy,
    /// The share of the pool, from 0 to 1, that a tenant's own idle blocks may fill before they go first.
    pub tenant_cache_share: f64,
    /// Blocks that may be pinned: a sequence must fit beside them.
    pub pin_quota: PinQuota,
    /// Events about cached blocks that wait to be taken; 0: none are kept. They change no decision and are not recorded.
    pub max_kv_events: usize,
    /// Whether misses tell that a block is cached in another scope: who sees them learns what others have sent.
    pub report_other_scopes: bool,
    /// Slots for the states of fixed size that a sequence has besides its blocks, slot 0 included; 0: it has none.
    pub num_state_slots: usize,
    /// Blocks from one place for a checkpoint of the states to the next.
    pub checkpoint_every: usize,
    /// The fewest first tokens of a cached block that are reused by copying it, where a prompt's hit ends inside that
    /// block; 0: none are.
    pub partial_block_reuse: usize,
    /// Who starts first.
    pub queue_order: QueueOrder,
    /// How often a waiting sequence may be passed by later ones that fit, before all others wait for it.
    pub max_passes: usize,
    /// Whether a waiting sequence may push out running ones of a later rank.
    pub preempt_lower_ranks: bool,
    /// Tokens of prompts that may wait.
    pub max_queued_tokens: usize,
    /// Sequences that may wait.
    pub max_queued_requests: usize,
    /// Seed of the prefix tree's hash: it changes no decision.
    pub hash_seed: u64,
    /// Bits of a hash that are used; fewer make collisions, for tests.
    pub hash_mask: u64,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            num_blocks: 1024,
            num_host_blocks: 0,
            preemption: PreemptionMode::Auto,
            block_size: 16,
            groups: vec![LayerGroup::Full],
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_chunk_tokens: usize::MAX,
            num_lookahead_tokens: 0,
            max_model_len: 8192,
            max_steps_in_flight: 1,
            watermark: 0.01,
            admission: AdmissionPolicy::Forecast,
            enable_prefix_caching: true,
            eviction: &Lru,
            tenant_cache_share: 1.0,
            pin_quota: PinQuota::default(),
            max_kv_events: 0,
            report_other_scopes: false,
            num_state_slots: 0,
            checkpoint_every: 16,
            partial_block_reuse: 0,
            queue_order: QueueOrder::Fcfs,
            max_passes: 16,
            preempt_lower_ranks: false,
            max_queued_tokens: usize::MAX,
            max_queued_requests: 1024,
            hash_seed: 0,
            hash_mask: u64::MAX,
        }
    }
}

impl SchedulerConfig {
    /// The most tokens of a sequence that has the pool for itself.
    pub fn pool_cap(&self) -> usize {
        self.longest(usize::MAX / 4)
    }

    /// The most tokens that one sequence can ever have.
    pub fn cap(&self) -> usize {
        self.longest(self.max_model_len)
    }

    fn longest(&self, limit: usize) -> usize {
        let usable = self.num_blocks.saturating_sub(1).saturating_sub(self.pin_quota.blocks);
        match (BlockSize::new(self.block_size), self.groups.as_slice()) {
            (_, [LayerGroup::Full]) => limit.min(usable * self.block_size),
            (Ok(size), groups) => {
                longest(groups, usable.saturating_sub(self.kept_blocks()), limit, self.chunk(), size)
            }
            (Err(_), _) => 0,
        }
    }

    /// The most tokens of one sequence that a step computes.
    pub(super) fn chunk(&self) -> usize {
        self.max_chunk_tokens.min(self.max_num_batched_tokens)
    }

    /// Blocks that a sequence may hold although they left its windows: where no group keeps all positions, the last one
    /// that it has published stays, in each group.
    pub(super) fn kept_blocks(&self) -> usize {
        if self.groups.iter().any(|group| group.is_full()) { 0 } else { self.groups.len() }
    }

    /// Columns of the block tables: the blocks of the longest sequence.
    pub fn max_blocks_per_seq(&self) -> usize {
        self.cap().div_ceil(self.block_size.max(1))
    }

    /// What the cache is told of it.
    pub(super) fn cache_options(&self) -> CacheOptions {
        CacheOptions {
            hash: HashOptions { seed: self.hash_seed, mask: self.hash_mask },
            eviction: self.eviction,
            tenant_share: self.tenant_cache_share,
            pin_quota: self.pin_quota,
            max_events: self.max_kv_events,
            tells_other_scopes: self.report_other_scopes,
            partial_reuse: self.partial_block_reuse,
        }
    }

    /// Blocks that an admission leaves untouched.
    pub(super) fn watermark_blocks(&self) -> usize {
        (self.watermark * (self.num_blocks - 1) as f64).ceil() as usize
    }

    /// Bytes of memory that a scheduler and the arrays of its steps in flight take at once, roughly.
    pub(crate) fn num_bytes(&self) -> u128 {
        let size = |value: usize| value as u128;
        let groups = size(self.groups.len());
        let blocks =
            size(self.num_blocks) * (64 + 4 * size(self.block_size)) + 16 * size(self.num_host_blocks);
        let pairs = 32 * size(self.num_host_blocks) + 16 * groups * size(self.max_num_seqs);
        let tables = 4 * groups * size(self.max_num_seqs) * size(self.max_blocks_per_seq());
        let samples = 20 * size(self.max_num_seqs) * (1 + size(self.num_lookahead_tokens));
        let rows = 64 * size(self.max_num_seqs);
        let tokens = (16 + 8 * groups) * size(self.max_num_batched_tokens);
        let states =
            if self.has_states() { 64 * (size(self.num_state_slots) + size(self.max_num_seqs)) } else { 0 };
        blocks + states + size(self.max_steps_in_flight) * (pairs + tables + samples + rows + tokens)
    }

    /// Checks every option.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] with the first that is not allowed.
    pub fn validate(&self) -> Result<()> {
        BlockSize::new(self.block_size)?;
        LayerGroup::validate(&self.groups)?;
        self.check_ranges()?;
        within("num_blocks * block_size", self.num_blocks.saturating_mul(self.block_size), 2, MAX_SLOTS)?;
        if self.max_steps_in_flight > 1 && self.num_lookahead_tokens > 0 {
            // Drafts continue tokens that are not known yet when the next step is planned.
            let allowed = "0 where max_steps_in_flight is 2";
            return Err(Error::config("num_lookahead_tokens", self.num_lookahead_tokens, allowed));
        }
        self.validate_swap()?;
        within("partial_block_reuse", self.partial_block_reuse, 0, self.block_size - 1)?;
        within("max_pinned_blocks", self.pin_quota.blocks, 0, self.num_blocks.saturating_sub(2))?;
        self.validate_states()?;
        if !(0.0..=1.0).contains(&self.tenant_cache_share) {
            return Err(Error::config(
                "tenant_cache_share",
                format!("{:?}", self.tenant_cache_share),
                "0 to 1",
            ));
        }
        if !(0.0..1.0).contains(&self.watermark) {
            return Err(Error::config(
                "watermark",
                format!("{:?}", self.watermark),
                "at least 0 and below 1",
            ));
        }
        self.validate_capacity()
    }

    /// Whether there is a host to copy to, if nothing else is wanted.
    fn validate_swap(&self) -> Result<()> {
        if self.preemption != PreemptionMode::Swap || self.num_host_blocks > 1 {
            return Ok(());
        }
        if self.has_states() {
            let allowed = "auto or recompute with num_state_slots: states are not swapped";
            return Err(Error::config("preemption", "'swap'", allowed));
        }
        let allowed = "at least 2 where preemption is 'swap': block 0 and one to copy to";
        Err(Error::config("num_host_blocks", self.num_host_blocks, allowed))
    }

    /// Whether the smallest request fits: a token of prompt and one of output.
    fn validate_capacity(&self) -> Result<()> {
        if self.cap() >= 2 {
            return Ok(());
        }
        let holds = |num_blocks| Self { num_blocks, ..self.clone() }.cap() >= 2;
        // Each group needs a block or two at the most, so the search is short.
        let needed = (self.num_blocks..=1 << 30).find(|&num_blocks| holds(num_blocks)).unwrap_or(usize::MAX);
        let mut why = format!("one sequence of 2 tokens in {} layer groups", self.groups.len());
        if self.pin_quota.blocks > 0 {
            why += &format!(" beside max_pinned_blocks {}", self.pin_quota.blocks);
        }
        Err(Error::config("num_blocks", self.num_blocks, format!("at least {needed}, for block 0 and {why}")))
    }
}

/// The tree keeps a token a slot.
const MAX_SLOTS: usize = 1 << 31;

/// What each option that is a whole number may be, whatever the others are: `name: field = least, most`.
macro_rules! ranges {
    ($($name:literal: $($field:ident).+ = $least:expr, $most:expr;)*) => {
        impl SchedulerConfig {
            /// The options that are whole numbers, each with the least and the most that it may be. What the others leave of
            /// that [`validate`](Self::validate) says.
            pub const RANGES: &[(&str, usize, usize)] = &[$(($name, $least, $most)),*];

            fn check_ranges(&self) -> Result<()> {
                $(within($name, self.$($field).+, $least, $most)?;)*
                Ok(())
            }
        }
    };
}

ranges! {
    "num_blocks": num_blocks = 2, 1 << 30;
    "num_host_blocks": num_host_blocks = 0, 1 << 30;
    "block_size": block_size = 1, BlockSize::MAX_TOKENS;
    "max_num_seqs": max_num_seqs = 1, 1 << 20;
    "max_num_batched_tokens": max_num_batched_tokens = 1, 1 << 30;
    "max_chunk_tokens": max_chunk_tokens = 1, usize::MAX;
    "num_lookahead_tokens": num_lookahead_tokens = 0, 1 << 10;
    "max_model_len": max_model_len = 2, 1 << 30;
    "max_steps_in_flight": max_steps_in_flight = 1, 2;
    "max_passes": max_passes = 0, usize::MAX;
    "max_pinned_blocks": pin_quota.blocks = 0, 1 << 30;
    "max_pinned_blocks_per_tenant": pin_quota.blocks_per_tenant = 0, usize::MAX;
    "max_kv_events": max_kv_events = 0, 1 << 24;
    "num_state_slots": num_state_slots = 0, 1 << 24;
    "checkpoint_every": checkpoint_every = 1, 1 << 24;
    "partial_block_reuse": partial_block_reuse = 0, BlockSize::MAX_TOKENS;
    "max_queued_requests": max_queued_requests = 1, 1 << 30;
    "max_queued_tokens": max_queued_tokens = 1, usize::MAX;
}

fn within(field: &'static str, value: usize, low: usize, high: usize) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(Error::config(field, value, format!("{low} to {high}")))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_cap_is_the_least_of_context_and_pool() {
        let config = SchedulerConfig { num_blocks: 8, max_model_len: 512, ..SchedulerConfig::default() };
        assert_eq!((config.cap(), config.max_blocks_per_seq()), (112, 7));
        let config = SchedulerConfig { num_blocks: 80, max_model_len: 500, ..config };
        assert_eq!((config.cap(), config.max_blocks_per_seq()), (500, 32));
    }

    #[test]
    fn a_pool_that_can_hold_no_request_is_refused_with_what_is_needed() {
        let window = LayerGroup::Window { tokens: 5 };
        for (groups, num_blocks, pinned) in [
            (vec![LayerGroup::Full; 3], 2, 0),
            (vec![LayerGroup::Full, window], 32, 30),
            (vec![window], 2, 0),
            (vec![LayerGroup::Full; 64], 40, 20),
        ] {
            let pin_quota = PinQuota { blocks: pinned, blocks_per_tenant: pinned };
            let config = SchedulerConfig { num_blocks, groups, pin_quota, ..SchedulerConfig::default() };
            let Err(Error::InvalidConfig { field: "num_blocks", allowed, .. }) = config.validate() else {
                panic!("{num_blocks} blocks are too few")
            };
            let words = allowed.strip_prefix("at least ").unwrap();
            let needed: usize = words.split(',').next().unwrap().parse().unwrap();
            SchedulerConfig { num_blocks: needed, ..config.clone() }.validate().unwrap();
            assert!(SchedulerConfig { num_blocks: needed - 1, ..config }.validate().is_err());
        }
    }

    #[test]
    fn swapping_without_a_host_is_refused_with_what_is_needed() {
        for (num_host_blocks, num_state_slots, refused) in [
            (0, 0, Some("num_host_blocks is 0: allowed is at least 2 where preemption is 'swap'")),
            (1, 0, Some("num_host_blocks is 1: allowed is at least 2 where preemption is 'swap'")),
            (2, 0, None),
            (0, 4, Some("preemption is 'swap': allowed is auto or recompute with num_state_slots")),
        ] {
            let swapping = SchedulerConfig {
                num_host_blocks,
                num_state_slots,
                preemption: PreemptionMode::Swap,
                ..SchedulerConfig::default()
            };
            let error = swapping.validate().err().map(|error| error.to_string());
            assert_eq!(error.is_some(), refused.is_some());
            assert!(error.unwrap_or_default().starts_with(refused.unwrap_or_default()));
            for preemption in [PreemptionMode::Auto, PreemptionMode::Recompute] {
                SchedulerConfig { preemption, ..swapping.clone() }.validate().unwrap();
            }
        }
    }

    #[test]
    fn a_window_that_no_model_has_is_refused() {
        for (tokens, allowed) in [(0, false), (1, true), (1 << 30, true), ((1 << 30) + 1, false)] {
            let groups = vec![LayerGroup::Window { tokens }];
            let result = SchedulerConfig { groups, ..SchedulerConfig::default() }.validate();
            assert_eq!(result.is_ok(), allowed, "{tokens} tokens: {result:?}");
        }
    }

    #[test]
    fn an_option_out_of_range_is_named_with_its_value() {
        let config = SchedulerConfig { watermark: 1.0, ..SchedulerConfig::default() };
        assert_eq!(
            config.validate().unwrap_err().to_string(),
            "watermark is 1.0: allowed is at least 0 and below 1"
        );
        let config = SchedulerConfig { block_size: 0, ..SchedulerConfig::default() };
        assert!(config.validate().unwrap_err().to_string().contains("block_size is 0"));
        let config = SchedulerConfig { watermark: f64::NAN, ..SchedulerConfig::default() };
        assert!(config.validate().is_err());
    }
}
