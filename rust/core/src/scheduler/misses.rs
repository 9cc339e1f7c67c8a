//! Why a starting prompt's blocks were not found.

use std::cmp::Ordering;

use super::Scheduler;
use super::prefilling::Prefill;
use super::sequence::{SeqIndex, Sequence};
use super::step::Step;
use crate::prefix::MissCounts;
use crate::units::{BlockSize, TokenId};

impl Scheduler {
    /// Why a request's blocks behind its hits were not found when it starts first, right after the lookup.
    pub(super) fn misses(&mut self, step: &Step, index: SeqIndex, mut hits: usize) -> MissCounts {
        let sequence = &self.sequences[index];
        if sequence.has_computed || !sequence.reuse_cached {
            return MissCounts::default();
        }
        let starts_cold = sequence.starts_cold;
        if starts_cold {
            // What it would have found is looked up for the count only.
            let most = self.block_size.full_blocks(sequence.tokens.len() - 1);
            hits = self.cache.probe(sequence.scope, &sequence.tokens, most).hits;
        }
        let in_flight = self.blocks_in_flight(step, index).saturating_sub(hits);
        let sequence = &self.sequences[index];
        let mut misses = self.cache.misses(sequence.scope, &sequence.tokens, hits, in_flight);
        misses.cap += if starts_cold { hits } else { 0 };
        misses
    }

    /// The most blocks that a prompt has in common with one of which the steps in flight and the one at hand compute a part.
    /// What a step computes can be shared already: the rest of that prompt is computed later.
    fn blocks_in_flight(&mut self, step: &Step, index: SeqIndex) -> usize {
        self.list_prefilling(step);
        let sequence = &self.sequences[index];
        self.prefilling
            .longest(|other, common| self.compare_prompts(sequence, &self.sequences[other], common))
    }

    /// Brings the prompts that are being computed up to date with the step at hand.
    fn list_prefilling(&mut self, step: &Step) {
        let mut prefilling = std::mem::take(&mut self.prefilling);
        let num_rows = prefilling.num_rows.replace(step.rows.len());
        let mut earlier = None;
        if num_rows.is_none() {
            let sequences = &mut self.sequences;
            prefilling.retain(|prefill| {
                if !sequences.contains(prefill.index) {
                    return false;
                }
                let sequence = &mut sequences[prefill.index];
                sequence.is_listed = sequence.prefill(prefill.index).is_some_and(|now| now == *prefill);
                sequence.is_listed
            });
            earlier = Some(self.in_flight.iter().flat_map(|step| &step.rows));
        }
        let rows = earlier.into_iter().flatten().chain(&step.rows[num_rows.unwrap_or(0)..]);
        for index in rows.map(|row| row.sequence) {
            let sequence = &mut self.sequences[index];
            let Some(prefill) = sequence.prefill(index).filter(|_| !sequence.is_listed) else { continue };
            sequence.is_listed = true;
            let sequence = &self.sequences[index];
            prefilling.insert(prefill, |other, common| {
                self.compare_prompts(sequence, &self.sequences[other], common)
            });
        }
        self.prefilling = prefilling;
    }

    /// How many blocks two prompts have in common, scopes and media included, and which one stands before the other in an
    /// order that goes by their blocks. The first `common` are known to be.
    fn compare_prompts(&self, first: &Sequence, second: &Sequence, common: usize) -> (usize, Ordering) {
        let size = self.block_size;
        let lens = [first, second].map(|sequence| size.full_blocks(sequence.tokens.len()));
        let most = lens[0].min(lens[1]);
        let (bound, by_binding) = self.cache.compare_bindings(first.scope, second.scope);
        let span = common * size.tokens()..bound.min(most) * size.tokens();
        let common = common + common_blocks(&first.tokens[span.clone()], &second.tokens[span], size);
        let block = common * size.tokens()..(common + 1) * size.tokens();
        let order = match common {
            _ if common == most => lens[0].cmp(&lens[1]),
            _ if common == bound => by_binding,
            _ => first.tokens[block.clone()].cmp(&second.tokens[block]),
        };
        (common, order)
    }
}

impl Sequence {
    /// What of it is being computed, if a step in flight or at hand computes a part and more is to come.
    fn prefill(&self, index: SeqIndex) -> Option<Prefill> {
        let is_partial = self.is_in_flight() && self.num_planned < self.tokens.len();
        is_partial.then_some(Prefill { index, key: self.key, num_tokens: self.tokens.len() })
    }
}

/// Blocks that are compared at once.
const STRIDE: usize = 64;

/// How many full blocks two runs of as many tokens begin with alike.
fn common_blocks(first: &[TokenId], second: &[TokenId], size: BlockSize) -> usize {
    let alike = |first: &[TokenId], second: &[TokenId], len| {
        let chunks = first.chunks_exact(len).zip(second.chunks_exact(len));
        chunks.take_while(|(first, second)| first == second).count()
    };
    let strides = alike(first, second, STRIDE * size.tokens()) * STRIDE;
    let start = strides * size.tokens();
    strides + alike(&first[start..], &second[start..], size.tokens())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::prefix::Media;
    use crate::scheduler::{Outcome, Sampled, SchedulerConfig, Submission};
    use crate::units::RequestId;

    #[test]
    fn common_blocks_are_counted_across_strides() {
        let size = BlockSize::new(2).unwrap();
        let tokens: Vec<TokenId> = (0..2 * 3 * STRIDE as TokenId + 6).collect();
        for differs in [0, 1, 2, 2 * STRIDE - 1, 2 * STRIDE, 6 * STRIDE + 3, 6 * STRIDE + 5] {
            let mut other = tokens.clone();
            other[differs] = TokenId::MAX;
            assert_eq!(common_blocks(&tokens, &other, size), differs / 2, "token {differs} differs");
        }
        assert_eq!(common_blocks(&tokens, &tokens, size), 3 * STRIDE + 3);
    }

    #[derive(Clone, Debug)]
    enum Action {
        Submit { prompt: Vec<TokenId>, scope: u8, medium: Option<(usize, u8)> },
        Plan,
        Apply { fails: bool },
        Discard,
        Abort(u64),
        Pause(u64),
        Resume(u64),
    }

    fn actions() -> impl Strategy<Value = Vec<Action>> {
        let prompt = (vec(0u32..2, 1..4), 1usize..40)
            .prop_map(|(changes, len)| (0..len).map(|place| changes[place * changes.len() / len]).collect());
        let submit = (prompt, 0u8..2, proptest::option::of((0usize..20, 0u8..2)));
        let action = prop_oneof![
            5 => submit.prop_map(|(prompt, scope, medium)| Action::Submit { prompt, scope, medium }),
            5 => Just(Action::Plan),
            3 => any::<bool>().prop_map(|fails| Action::Apply { fails }),
            1 => Just(Action::Discard),
            1 => (0u64..12).prop_map(Action::Abort),
            1 => (0u64..12).prop_map(Action::Pause),
            1 => (0u64..12).prop_map(Action::Resume),
        ];
        vec(action, 1..60)
    }

    fn act(scheduler: &mut Scheduler, action: Action) {
        match action {
            Action::Submit { prompt, scope, medium } => {
                let medium = medium.map(|(offset, hash)| (offset % prompt.len(), [hash]));
                let media = medium.as_ref().map(|&(offset, ref hash)| Media { offset, hash });
                let (media, scope) = (media.as_slice(), [scope]);
                let submission =
                    Submission { scope: &scope, media, max_tokens: Some(3), ..Submission::new(&prompt) };
                scheduler.submit(submission).unwrap();
            }
            Action::Plan if scheduler.in_flight.len() < 2 => drop(scheduler.plan_unwritten(0.0).unwrap()),
            Action::Apply { fails } => {
                let Some(step) = scheduler.in_flight.oldest() else { return };
                let (plan, num_samples) = (step.plan(), step.num_samples);
                let failed_rows = if fails { &[0][..] } else { &[] };
                let (tokens, outcomes) = (vec![1; num_samples], vec![Outcome::Ok; num_samples]);
                let sampled = Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows, accepted: None };
                scheduler.apply(plan.id, sampled, |_, _| ()).unwrap();
            }
            Action::Discard => {
                let Some(plan) = scheduler.in_flight.newest().map(|step| step.id) else { return };
                scheduler.discard(plan).unwrap();
            }
            Action::Abort(request) => drop(scheduler.abort(RequestId::new(request))),
            Action::Pause(request) => drop(scheduler.pause(RequestId::new(request))),
            Action::Resume(request) => drop(scheduler.resume(RequestId::new(request))),
            Action::Plan => {}
        }
    }

    /// The same by comparing with every prompt, block by block.
    fn blocks_in_flight_by_all(scheduler: &Scheduler, index: SeqIndex) -> usize {
        let size = scheduler.block_size;
        let blocks = |sequence: &Sequence| -> Vec<_> {
            let runs = sequence.tokens.chunks_exact(size.tokens()).enumerate();
            runs.map(|(place, run)| (scheduler.cache.binding(sequence.scope, place), run.to_vec())).collect()
        };
        let wanted = blocks(&scheduler.sequences[index]);
        let rows = scheduler.in_flight.iter().flat_map(|step| &step.rows);
        let begun = rows.map(|row| &scheduler.sequences[row.sequence]);
        let partial = begun.filter(|other| other.num_planned < other.tokens.len());
        let common =
            partial.map(|other| wanted.iter().zip(blocks(other)).take_while(|(a, b)| *a == b).count());
        common.max().unwrap_or(0)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_in_flight_is_what_a_comparison_with_all_prompts_finds(actions in actions()) {
            let config = SchedulerConfig {
                num_blocks: 40,
                block_size: 2,
                max_num_seqs: 6,
                max_num_batched_tokens: 24,
                max_chunk_tokens: 5,
                max_model_len: 48,
                max_steps_in_flight: 2,
                ..SchedulerConfig::default()
            };
            let mut scheduler = Scheduler::new(config).unwrap();
            let nothing = Step::default();
            for action in actions {
                act(&mut scheduler, action);
                let waiting: Vec<SeqIndex> = scheduler.waiting.values().copied().collect();
                scheduler.prefilling.num_rows = None;
                for index in waiting {
                    let expected = blocks_in_flight_by_all(&scheduler, index);
                    prop_assert_eq!(scheduler.blocks_in_flight(&nothing, index), expected);
                }
            }
        }
    }
}
