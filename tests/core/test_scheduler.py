"""The scheduler through its Python face: what crosses the border, which errors come back, and who may call when."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from pykv.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    PoisonedError,
    QueueFullError,
    StepError,
)
from pykv.scheduler import (
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_STOP,
    FinishReason,
    Plan,
    RequestSummary,
    Scheduler,
    SchedulerConfig,
    StepBuffers,
)


def small_config(**changes: object) -> SchedulerConfig:
    options: dict[str, object] = {
        "num_blocks": 32,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
    }
    return SchedulerConfig(**(options | changes))  # type: ignore[arg-type]


def apply_all(scheduler: Scheduler, plan: Plan, outcome: int = OUTCOME_OK) -> list[RequestSummary]:
    sampled = np.full(plan.num_samples, 7, np.int64)
    return scheduler.apply(plan, sampled, np.full(plan.num_samples, outcome, np.uint8))


def run(scheduler: Scheduler) -> list[RequestSummary]:
    buffers = [StepBuffers(scheduler.config), StepBuffers(scheduler.config)]
    ended: list[RequestSummary] = []
    for step in range(10_000):
        plan = scheduler.plan(buffers[step % 2])
        if plan is None:
            return ended
        ended += apply_all(scheduler, plan)
        scheduler.check()
    raise AssertionError("nothing makes progress")


def test_plan_fills_the_callers_arrays() -> None:
    scheduler = Scheduler(small_config())
    buffers = StepBuffers(scheduler.config)
    request = scheduler.submit(np.array([5, 6, 7, 8, 9], np.int32), max_tokens=3)
    plan = scheduler.plan(buffers)
    assert plan is not None
    assert (plan.num_tokens, plan.num_batch_rows, plan.num_samples, plan.num_placed) == (5, 1, 1, 1)
    assert buffers.token_ids[:5].tolist() == [5, 6, 7, 8, 9]
    assert buffers.positions[:5].tolist() == [0, 1, 2, 3, 4]
    table = buffers.block_tables[buffers.table_rows[0]]
    assert buffers.slot_mapping[:5].tolist() == [*(table[0] * 4 + np.arange(4)), table[1] * 4]
    assert buffers.query_starts[:2].tolist() == [0, 5]
    assert (buffers.seq_lens[0], buffers.sample_indices[0], buffers.sample_positions[0]) == (5, 4, 5)
    assert (buffers.placed_requests[0], buffers.placed_children[0]) == (request, 0)
    assert buffers.placed_rows[0] == buffers.sample_rows[0] == buffers.table_rows[0]


def test_apply_says_what_became_of_each_sample() -> None:
    scheduler = Scheduler(small_config())
    buffers = StepBuffers(scheduler.config)
    requests = [
        scheduler.submit([token, 1, 2], max_tokens=limit) for token, limit in [(1, 9), (2, 1), (3, 9), (4, 9)]
    ]
    plan = scheduler.plan(buffers)
    assert plan is not None
    scheduler.abort(requests[3])
    outcomes = np.array([OUTCOME_STOP, OUTCOME_OK, OUTCOME_FAILED, OUTCOME_OK], np.uint8)
    ended = scheduler.apply(plan, np.arange(4), outcomes)
    reasons = [FinishReason(reason) for reason in buffers.finish_reasons[:4]]
    assert reasons == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ABORT]
    by_request = {summary.request: summary for summary in ended}
    assert sorted(by_request) == requests
    assert [by_request[request].output_tokens for request in requests] == [1, 1, 0, 0]
    assert by_request[requests[2]].failed
    assert by_request[requests[3]].aborted


def test_any_integers_make_a_prompt() -> None:
    scheduler = Scheduler(small_config())
    for prompt in ([1, 2], (1, 2), np.array([1, 2]), np.array([1, 9, 2, 9], np.int32)[::2], range(2)):
        scheduler.submit(prompt, max_tokens=1)  # type: ignore[arg-type]
    assert len(run(scheduler)) == 5


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        (np.array([], np.int32), "prompt is empty"),
        ([-1], "prompt holds -1"),
        (np.array([3, -7], np.int32), "prompt is -7 at position 1"),
        ([2**40], f"prompt holds {2**40}"),
        ([1.5], "prompt holds float64"),
        ([[1, 2]], "prompt has 2 dimensions"),
        ("text", "prompt is 'text': allowed is a sequence of token ids"),
        (None, "prompt is None: allowed is a sequence of token ids"),
        ((token for token in (1, 2)), "prompt is <generator .*: allowed is a sequence of token ids"),
    ],
)
def test_a_bad_prompt_is_refused_by_value(prompt: object, message: str) -> None:
    scheduler = Scheduler(small_config())
    with pytest.raises(InvalidRequestError, match=message) as caught:
        scheduler.submit(prompt)  # type: ignore[arg-type]
    assert caught.value.field == "prompt"
    assert scheduler.stats().num_requests == 0


@pytest.mark.parametrize("max_tokens", [0, -1, -(2**70)])
def test_a_bad_limit_is_refused_by_value(max_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens is") as caught:
        Scheduler(small_config()).submit([1], max_tokens=max_tokens)
    assert caught.value.field == "max_tokens"


def test_more_samples_than_the_queue_can_hold_are_refused_by_value() -> None:
    scheduler = Scheduler(small_config(max_queued_requests=3))
    with pytest.raises(InvalidRequestError, match=r"num_samples is 4: allowed is 1 to 3") as caught:
        scheduler.submit([1], num_samples=4)
    assert caught.value.field == "num_samples"


@pytest.mark.parametrize("num_samples", [0, -1, 9, 2**40])
def test_a_bad_number_of_samples_is_refused_by_value(num_samples: int) -> None:
    with pytest.raises(InvalidRequestError, match="num_samples is"):
        Scheduler(small_config()).submit([1], num_samples=num_samples)


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(small_config(num_blocks=8))
    with pytest.raises(CapacityError, match=r"prompt has 28 tokens .* total of 28 tokens"):
        scheduler.submit(list(range(28)))
    scheduler.submit(list(range(27)))
    assert len(run(scheduler)) == 1


def test_a_full_queue_refuses_and_takes_again() -> None:
    scheduler = Scheduler(small_config(max_queued_requests=2))
    scheduler.submit([1], max_tokens=1)
    scheduler.submit([1], max_tokens=1)
    with pytest.raises(QueueFullError, match="2 sequences and 1 more"):
        scheduler.submit([1], max_tokens=1)
    run(scheduler)
    scheduler.submit([1], max_tokens=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_blocks", 1),
        ("block_size", 0),
        ("block_size", -4),
        ("block_size", 1.5),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_chunk_tokens", 0),
        ("max_model_len", 1),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("admission", "guess"),
        ("queue_order", "lifo"),
        ("max_passes", -1),
        ("preemption", "drop"),
        ("num_host_blocks", -1),
        ("max_queued_requests", True),
    ],
)
def test_a_bad_option_is_refused_by_name_and_value(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match="(?i)" + re.escape(f"{option} is {value!r}")):
        small_config(**{option: value})


def test_swapping_without_a_host_is_refused() -> None:
    for num_host_blocks in (0, 1):
        with pytest.raises(
            ConfigError, match=f"num_host_blocks is {num_host_blocks}: .* preemption is 'swap'"
        ):
            small_config(preemption="swap", num_host_blocks=num_host_blocks)
    with pytest.raises(ConfigError, match=r"preemption is 'swap': .* num_state_slots"):
        small_config(preemption="swap", num_state_slots=8)
    for preemption in ("auto", "recompute"):
        small_config(preemption=preemption)


def test_orders_priorities_and_deadlines_cross_the_border() -> None:
    scheduler = Scheduler(small_config(queue_order="priority", max_num_seqs=1))
    buffers = StepBuffers(scheduler.config)
    requests = [
        scheduler.submit([1, 2], max_tokens=1, priority=priority, deadline=8.0) for priority in (3, 1, 2)
    ]
    ended = []
    for now in (1.0, 2.0, 9.0):
        plan = scheduler.plan(buffers, now)
        ended += apply_all(scheduler, plan) if plan is not None else scheduler.take_ended()
    assert [(summary.request, summary.expired) for summary in ended] == [
        (requests[1], False),
        (requests[2], False),
        (requests[0], True),
    ]


def test_a_victim_is_swapped_out_and_in_again() -> None:
    config = small_config(
        num_blocks=10,
        num_host_blocks=10,
        preemption="swap",
        admission="watermark",
        watermark=0.0,
        enable_prefix_caching=False,
    )
    scheduler = Scheduler(config)
    buffers = StepBuffers(config)
    for token in (1, 2):
        scheduler.submit([token] * 14, max_tokens=12)
    swapped: list[list[list[int]]] = [[], []]
    ended = []
    while (plan := scheduler.plan(buffers)) is not None:
        swapped[0] += buffers.swap_out_pairs[: plan.num_swap_outs].tolist()
        swapped[1] += buffers.swap_in_pairs[: plan.num_swap_ins].tolist()
        ended += apply_all(scheduler, plan)
        scheduler.check()
    assert len(swapped[0]) > 0
    assert [host for _, host in swapped[0]] == [host for host, _ in swapped[1]]
    assert scheduler.stats().recomputed_tokens == 0
    assert sum(summary.swapped_blocks for summary in ended) == len(swapped[0])
    assert scheduler.stats().host_blocks_free == 9


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="seconds_per_token is"):
        Scheduler(small_config()).set_costs(seconds_per_token=seconds, seconds_per_block=1.0)


@pytest.mark.parametrize("now", [-1.0, float("nan"), float("inf")])
def test_a_present_that_is_no_time_is_refused(now: float) -> None:
    scheduler = Scheduler(small_config())
    scheduler.submit([1], deadline=1.0)
    with pytest.raises(InvalidRequestError, match="now is"):
        scheduler.plan(StepBuffers(scheduler.config), now)
    assert scheduler.stats().num_waiting == 1


def test_a_deadline_that_is_no_time_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="deadline is NaN"):
        Scheduler(small_config()).submit([1], deadline=float("nan"))


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="block_sise"):
        small_config(block_sise=16)


def test_verbs_in_the_wrong_order_are_refused() -> None:
    scheduler = Scheduler(small_config())
    buffers = StepBuffers(scheduler.config)
    scheduler.submit([1, 2, 3])
    plan = scheduler.plan(buffers)
    assert plan is not None
    with pytest.raises(StepError, match="in flight"):
        scheduler.plan(buffers)
    with pytest.raises(StepError, match="sampled has 2 elements: needed are 1"):
        scheduler.apply(plan, np.zeros(2, np.int64), np.zeros(2, np.uint8))
    with pytest.raises(StepError, match=r"outcomes\[0\] is 9"):
        scheduler.apply(plan, np.zeros(1, np.int64), np.array([9], np.uint8))
    with pytest.raises(StepError, match=r"sampled\[0\] is -1"):
        scheduler.apply(plan, np.array([-1]), np.zeros(1, np.uint8))
    with pytest.raises(StepError, match=r"failed_rows\[0\] is 4"):
        scheduler.apply(plan, np.zeros(1, np.int64), np.zeros(1, np.uint8), np.array([4], np.int32))
    apply_all(scheduler, plan)
    with pytest.raises(StepError, match="not in flight"):
        apply_all(scheduler, plan)
    with pytest.raises(StepError, match="not in flight"):
        scheduler.discard(plan)


def test_buffers_of_another_configuration_are_refused() -> None:
    scheduler = Scheduler(small_config())
    scheduler.submit([1])
    with pytest.raises(StepError, match="token_ids has 8 elements: needed are 32"):
        scheduler.plan(StepBuffers(small_config(max_num_batched_tokens=8)))
    assert scheduler.stats().num_waiting == 1


def test_a_discarded_step_is_planned_again() -> None:
    scheduler = Scheduler(small_config())
    buffers = StepBuffers(scheduler.config)
    scheduler.submit([1, 2, 3], max_tokens=2)
    first = scheduler.plan(buffers)
    assert first is not None
    scheduler.discard(first)
    second = scheduler.plan(buffers)
    assert second is not None
    assert (second.num_tokens, second.num_placed) == (3, 0)


def test_a_panic_becomes_an_exception_and_poisons_the_scheduler() -> None:
    scheduler = Scheduler(small_config())
    with pytest.raises(PoisonedError, match="asked to panic"):
        scheduler._native._panic()
    for call in (scheduler.stats, scheduler.check, lambda: scheduler.submit([1]), lambda: scheduler.abort(0)):
        with pytest.raises(PoisonedError, match="refused after an earlier failure"):
            call()


def test_unknown_requests_cannot_be_aborted_paused_or_resumed() -> None:
    scheduler = Scheduler(small_config())
    for call in (scheduler.abort, scheduler.pause, scheduler.resume):
        assert not any(call(request) for request in (0, 5, 2**64 - 1))


def test_a_paused_request_is_left_out_of_plans_until_it_is_resumed() -> None:
    scheduler = Scheduler(small_config())
    request = scheduler.submit([1, 2, 3], max_tokens=5)
    plan = scheduler.plan(buffers := StepBuffers(small_config()))
    assert plan is not None
    assert scheduler.pause(request)
    apply_all(scheduler, plan)  # the step in flight counts
    assert scheduler.plan(buffers) is None
    stats = scheduler.stats()
    assert (stats.num_paused, stats.num_running, stats.num_requests) == (1, 0, 1)
    assert stats.blocks_active > 0
    assert scheduler.resume(request)
    assert not scheduler.resume(request)
    assert [summary.output_tokens for summary in run(scheduler)] == [5]
    scheduler.check()


def test_a_reset_makes_earlier_prompts_unknown() -> None:
    scheduler = Scheduler(small_config())
    cached = []
    for reset in (False, False, True, False):
        if reset:
            scheduler.reset_prefix_cache()
        scheduler.submit(list(range(10)), max_tokens=1)
        cached += [summary.cached_tokens for summary in run(scheduler)]
    assert cached == [0, 8, 0, 8]


def test_threads_may_submit_abort_and_look_while_another_one_steps() -> None:
    scheduler = Scheduler(small_config(max_queued_requests=10_000))
    errors: list[BaseException] = []
    done = threading.Event()

    def submit_and_abort(seed: int) -> None:
        try:
            for round_ in range(200):
                request = scheduler.submit([seed, round_ % 5, 3], max_tokens=4)
                if round_ % 3 == 0:
                    scheduler.abort(request)
                scheduler.stats()
                if round_ % 20 == 0:
                    scheduler.check()
        except BaseException as error:
            errors.append(error)

    def step() -> None:
        buffers = StepBuffers(scheduler.config)
        try:
            while not done.is_set() or scheduler.stats().num_requests:
                plan = scheduler.plan(buffers)
                if plan is not None:
                    apply_all(scheduler, plan)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=submit_and_abort, args=(seed,)) for seed in range(6)]
    stepper = threading.Thread(target=step)
    for thread in [*threads, stepper]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    stepper.join()
    assert errors == []
    stats = scheduler.stats()
    assert (stats.num_requests, stats.blocks_active) == (0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    scheduler.check()


def test_a_scheduler_gives_its_memory_back() -> None:
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()

    def create_and_drop(count: int) -> int:
        for _ in range(count):
            scheduler = Scheduler(small_config(num_blocks=4096))
            scheduler.submit([1, 2, 3])
            scheduler.plan(StepBuffers(scheduler.config))
        return int(process.memory_info().rss)

    before = create_and_drop(100)
    assert create_and_drop(900) - before < 16 * 2**20


def test_drafts_are_checked_in_one_step_and_what_agrees_counts() -> None:
    scheduler = Scheduler(small_config(num_lookahead_tokens=3))
    buffers = StepBuffers(scheduler.config)
    for token in (1, 2):
        scheduler.submit([token, 8, 9], max_tokens=9)
    plan = scheduler.plan(buffers)
    assert plan is not None
    apply_all(scheduler, plan)
    row = buffers.sample_rows[1]
    scheduler.propose(np.array([row], np.int32), np.array([0, 3], np.int32), np.array([10, 11, 12]))
    plan = scheduler.plan(buffers)
    assert plan is not None
    assert (plan.num_decodes, plan.num_draft_rows, plan.num_samples) == (1, 1, 5)
    assert buffers.token_ids[1:5].tolist() == [7, 10, 11, 12]
    first = np.searchsorted(buffers.sample_indices[: plan.num_samples], buffers.query_starts[1])
    assert first == 1
    sampled = np.array([7, 10, 11, 13, 14])
    accepted = np.array([0, 2], np.int32)
    with pytest.raises(StepError, match=r"accepted\[1\] is 3: allowed is at most"):
        scheduler.apply(plan, sampled, np.zeros(5, np.uint8), accepted=accepted + np.int32([0, 1]))
    with pytest.raises(StepError, match=r"accepted\[0\] is -1"):
        scheduler.apply(plan, sampled, np.zeros(5, np.uint8), accepted=accepted - np.int32(1))
    scheduler.apply(plan, sampled, np.zeros(5, np.uint8), accepted=accepted)
    reasons = [FinishReason(reason) for reason in buffers.finish_reasons[:5]]
    assert reasons == [FinishReason.NONE] * 4 + [FinishReason.REJECTED]
    stats = scheduler.stats()
    assert (stats.draft_tokens, stats.accepted_draft_tokens) == (3, 2)
    plan = scheduler.plan(buffers)
    assert buffers.token_ids[:2].tolist() == [7, 13]
    assert buffers.positions[:2].tolist() == [4, 6]


def test_a_proposal_that_does_not_fit_is_refused_by_name() -> None:
    scheduler = Scheduler(small_config(num_lookahead_tokens=3))
    no_tokens = np.array([], np.int64)
    with pytest.raises(StepError, match=r"rows\[0\] is -1: allowed is a row of the block tables"):
        scheduler.propose(np.array([-1], np.int32), np.array([0, 0], np.int32), no_tokens)
    with pytest.raises(StepError, match=r"starts\[1\] is 4: allowed is .* num_lookahead_tokens"):
        scheduler.propose(np.array([0], np.int32), np.array([0, 4], np.int32), np.zeros(4, np.int64))
    with pytest.raises(StepError, match=r"tokens\[0\] is -5"):
        scheduler.propose(np.array([0], np.int32), np.array([0, 1], np.int32), np.array([-5]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampled": np.zeros(1, np.int32)}, "sampled is int32: needed is an array of int64"),
        ({"sampled": [7]}, "sampled is .*list.*: needed is an array of int64"),
        ({"outcomes": np.zeros(1, np.int8)}, "outcomes is int8: needed is an array of uint8"),
        ({"failed_rows": np.zeros(1, np.int64)}, "failed_rows is int64: needed is an array of int32"),
        ({"accepted": np.zeros(1)}, "accepted is float64: needed is an array of int32"),
    ],
)
def test_an_array_of_the_wrong_dtype_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    scheduler = Scheduler(small_config())
    scheduler.submit([1, 2, 3])
    plan = scheduler.plan(StepBuffers(scheduler.config))
    assert plan is not None
    arrays: dict[str, object] = {"sampled": np.zeros(1, np.int64), "outcomes": np.zeros(1, np.uint8)}
    with pytest.raises(StepError, match=message):
        scheduler.apply(plan, **(arrays | changes))  # type: ignore[arg-type]
    apply_all(scheduler, plan)


def test_a_plan_of_another_scheduler_is_refused() -> None:
    plans = []
    schedulers = [Scheduler(small_config()), Scheduler(small_config())]
    for scheduler in schedulers:
        scheduler.submit([1, 2, 3], max_tokens=2)
        plan = scheduler.plan(StepBuffers(scheduler.config))
        assert plan is not None
        plans.append(plan)
    with pytest.raises(StepError, match="not in flight"):
        apply_all(schedulers[1], plans[0])
    with pytest.raises(StepError, match="not in flight"):
        schedulers[1].discard(plans[0])
    for scheduler, plan in zip(schedulers, plans, strict=True):
        assert apply_all(scheduler, plan) == []
