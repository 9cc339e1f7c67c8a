"""States of fixed size through the Python face: a model with a running state in tensors, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pykv.errors import ConfigError, InvalidRequestError
from pykv.layer_groups import StateGroup, StateTensor
from pykv.scheduler import OUTCOME_OK, FinishReason, Plan, Scheduler, SchedulerConfig, StepBuffers
from pykv.state_pool import StatePool

VOCABULARY = 50
GROUP = StateGroup(
    ((StateTensor((3,), "float32"), StateTensor((2, 2), "float32")), (StateTensor((1,), "float32"),))
)
CONFIG = SchedulerConfig(
    num_blocks=60,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    num_state_slots=9,
    checkpoint_every=2,
)


def after(states: list[torch.Tensor], token: int) -> None:
    """A linear recurrence in whole numbers, so that nothing is rounded."""
    for factor, state in enumerate(states, 3):
        state.copy_(torch.remainder(factor * state + token + 1, 997))


def drawn(states: list[torch.Tensor]) -> int:
    return int(sum(state.sum() for state in states)) % VOCABULARY


class Recurrent:
    """A model of states alone; what attention would add is tested elsewhere."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = StatePool(GROUP, config.num_state_slots)

    def of_slot(self, slot: int) -> list[torch.Tensor]:
        return [state[slot] for layer in self.pool.states for state in layer]

    def run(self, plan: Plan, step: StepBuffers) -> list[int]:
        self.pool.copy(torch.from_numpy(step.state_restore_pairs[: plan.num_state_restores]))
        for row, slot in enumerate(step.state_slots[: plan.num_batch_rows].tolist()):
            for token in step.token_ids[step.query_starts[row] : step.query_starts[row + 1]].tolist():
                after(self.of_slot(slot), token)
        self.pool.copy(torch.from_numpy(step.state_save_pairs[: plan.num_state_saves]))
        starts = step.query_starts[: plan.num_batch_rows + 1]
        rows = np.searchsorted(starts, step.sample_indices[: plan.num_samples], side="right") - 1
        return [drawn(self.of_slot(slot)) for slot in step.state_slots[rows].tolist()]


def continuation(prompt: list[int], count: int) -> list[int]:
    """What the model gives without a scheduler."""
    states = [torch.zeros(tensor.shape, dtype=torch.float32) for layer in GROUP.layers for tensor in layer]
    tokens: list[int] = []
    for token in prompt:
        after(states, token)
    for _ in range(count):
        tokens.append(drawn(states))
        after(states, tokens[-1])
    return tokens


def run(
    scheduler: Scheduler, model: Recurrent, prompts: list[list[int]]
) -> tuple[list[list[int]], list[int]]:
    """Returns the outputs, 10 tokens each, and how many tokens of each prompt were found."""
    step = StepBuffers(scheduler.config)
    requests = [scheduler.submit(prompt, max_tokens=10) for prompt in prompts]
    outputs: dict[int, list[int]] = {request: [] for request in requests}
    owners: dict[int, int] = {}
    cached: dict[int, int] = {}
    while (plan := scheduler.plan(step)) is not None:
        owners |= dict(
            zip(step.placed_rows.tolist(), step.placed_requests[: plan.num_placed].tolist(), strict=False)
        )
        sampled = np.array(model.run(plan, step), np.int64)
        for summary in scheduler.apply(plan, sampled, np.full(plan.num_samples, OUTCOME_OK, np.uint8)):
            cached[summary.request] = summary.cached_tokens
        rows, reasons = step.sample_rows.tolist(), step.finish_reasons.tolist()
        for row, token, reason in zip(rows, sampled.tolist(), reasons, strict=False):
            if reason in (FinishReason.NONE, FinishReason.LENGTH):
                outputs[owners[row]].append(token)
        scheduler.check()
    return [outputs[request] for request in requests], [cached[request] for request in requests]


def test_tokens_are_those_of_the_model_alone_also_on_hits() -> None:
    scheduler, model = Scheduler(CONFIG), Recurrent(CONFIG)
    prompts = [[place * 7 % VOCABULARY for place in range(length)] for length in (5, 37, 40, 21)]
    outputs, first_cached = run(scheduler, model, prompts)
    assert outputs == [continuation(prompt, 10) for prompt in prompts]
    turns = [prompt + output + [3] for prompt, output in zip(prompts, outputs, strict=True)]
    again, cached = run(scheduler, model, turns)
    assert again == [continuation(turn, 10) for turn in turns]
    assert max(cached) >= 32
    stats = scheduler.stats()
    assert stats.prefix_hit_tokens == sum(first_cached) + sum(cached)
    assert stats.state_slots_total == 8
    assert stats.state_slots_free + stats.state_checkpoints == 8


def test_a_slot_is_copied_in_all_layers_and_no_other_is_touched() -> None:
    pool = StatePool(GROUP, 4)
    assert pool.nbytes == 4 * GROUP.slot_bytes == 4 * 4 * (3 + 4 + 1)
    for layer in pool.states:
        for state in layer:
            state[1], state[2], state[3] = 1, 2, 3
    pool.copy(torch.tensor([[1, 3], [0, 2]]))
    assert [[state[:, ..., 0].flatten().tolist()[-1] for state in layer] for layer in pool.states] == [
        [1, 1],
        [1],
    ]
    assert [float(state[slot].max()) for state in pool.states[0] for slot in range(4)] == [0, 1, 0, 1] * 2
    pool.copy(torch.empty(0, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (torch.zeros(1, 2, dtype=torch.int32), r"pairs is int32 \[1, 2\]: allowed is a tensor of int64 \["),
        (torch.zeros(2, dtype=torch.int64), r"pairs is int64 \[2\]: allowed is a tensor of int64 \["),
        (np.array([[1, 2]]), r"pairs is array\(\[\[1, 2\]\]\): allowed is a Tensor"),
        (torch.tensor([[1, 4]]), "pairs is 4: allowed is an integer from 0 to 3"),
        (torch.tensor([[1, 2], [-1, 3]]), "pairs is -1: allowed is an integer from 0 to 3"),
        (
            torch.zeros(1, 2, dtype=torch.int64, device="meta"),
            "pairs is on meta: allowed is a tensor .* on cpu",
        ),
    ],
)
def test_pairs_that_are_none_are_refused_and_nothing_is_copied(pairs: torch.Tensor, message: str) -> None:
    pool = StatePool(GROUP, 4)
    pool.states[0][0][1] = 7
    with pytest.raises(InvalidRequestError, match=message):
        pool.copy(pairs)
    assert [float(state.sum()) for layer in pool.states for state in layer] == [21, 0, 0]


def test_without_states_their_arrays_are_empty() -> None:
    step = StepBuffers(SchedulerConfig(num_blocks=8))
    assert (step.state_slots.shape, step.state_save_pairs.shape) == ((0,), (0, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_state_slots": 2}, "num_state_slots is 2: allowed is 0, or at least 3"),
        ({"num_state_slots": -1}, "num_state_slots is -1"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        (
            {"num_state_slots": 4, "num_host_blocks": 8},
            "num_host_blocks is 8: allowed is 0 with num_state_slots",
        ),
        ({"num_state_slots": 4, "num_lookahead_tokens": 1}, "num_lookahead_tokens is 1: allowed is 0"),
        ({"num_state_slots": 4, "max_pinned_blocks": 1}, "max_pinned_blocks is 1: allowed is 0"),
        ({"num_state_slots": 4, "partial_block_reuse": 2}, "partial_block_reuse is 2: allowed is 0"),
        ({"num_state_slots": 4, "max_steps_in_flight": 2}, "max_steps_in_flight is 2: allowed is 1"),
    ],
)
def test_what_states_cannot_do_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(num_blocks=20, **options)  # type: ignore[arg-type]


def test_more_samples_than_slots_are_refused() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=20, num_state_slots=4))
    with pytest.raises(
        InvalidRequestError, match=r"num_samples is 3: allowed is 1 to 2 \(of num_state_slots 4\)"
    ):
        scheduler.submit([1], num_samples=3)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((), "float32", "shape"),
        ((4, 0), "float32", "shape"),
        ((4,), "int8", "dtype"),
        ((4,), "float", "dtype"),
    ],
)
def test_a_state_that_is_no_tensor_is_refused(shape: tuple[int, ...], dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StateTensor(shape, dtype)


def test_a_pool_needs_a_slot_beside_the_initial_one() -> None:
    with pytest.raises(ConfigError, match="num_slots is 1"):
        StatePool(GROUP, 1)
