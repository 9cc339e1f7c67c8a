"""Scheduler, model and sampler in step: plan, copy, run, sample, apply."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from pykv.engine.cache_use import CacheUse
from pykv.engine.costs import PrefillMeter, seconds_per_block
from pykv.engine.deltas import RequestDelta, StepDeltas, raised_within
from pykv.engine.device.device_runner import DeviceRunner
from pykv.engine.isolation import StepLogits, forward_isolated, rows_of
from pykv.engine.request import Request, Sequence
from pykv.engine.runner import Runner
from pykv.engine.scored_rows import ScoredRow, add_scores, scored_rows
from pykv.engine.stats import Counters, EngineStats, engine_stats
from pykv.engine.step_tensors import StepViews
from pykv.engine.timing import Timing
from pykv.errors import InvalidRequestError, QueueFullError, StepError
from pykv.field_checks import instance_of
from pykv.retention import Retention
from pykv.sampling.sampler import Sampler, Samples
from pykv.scheduler import (
    OUTCOME_FAILED,
    FinishReason,
    Plan,
    RequestSummary,
    Scheduler,
    SchedulerConfig,
    StepBuffers,
)

FINISH_REASONS = {
    FinishReason.NONE: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.VOID: None,
}
DOES_NOT_COUNT = (FinishReason.ABORT, FinishReason.ERROR, FinishReason.VOID)
NO_FINITE_LOGITS = "the model gave no finite largest logit"


class StepLoop:
    """Runs the requests of one model.

    `submit`, `abort` and `stats` may be called from any thread, `step`, `pause` and `resume` from one at a time.

    Args:
        runner: the model with its KV cache.
        config: of the scheduler; its number of blocks and block size are the runner's.
        clock: the time in seconds that times to live are counted by; it never goes back.
    """

    def __init__(
        self, runner: Runner, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._scheduler = Scheduler(config)
        self._views = itertools.cycle(step_views(runner, config))
        self._sampler = Sampler(runner.vocab_size, config.max_num_seqs, runner.device)
        self._by_row: list[Sequence | None] = [None] * config.max_num_seqs
        self._requests: dict[int, Request] = {}
        self._paused_at: dict[Request, float] = {}
        self._scored: set[Request] = set()
        self._counters = Counters()
        chooses = config.num_host_blocks > 1 and config.preemption == "auto"
        self._prefill_meter = PrefillMeter() if chooses else None
        self._seconds_per_block = seconds_per_block(runner) if chooses else 0.0
        self.timing = Timing()
        self._num_preparing = 0
        self._num_waiting: int | None = (
            None  # None: to be counted anew, which takes longer the more requests run
        )
        self._submitting = threading.Lock()
        self._stepping = threading.Lock()

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    @property
    def scheduler(self) -> Scheduler:
        """Its books, for what may be asked or told between steps, from any thread."""
        return self._scheduler

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended and is not paused."""
        return len(self._requests) > len(self._paused_at)

    @property
    def is_preparing(self) -> bool:
        """Whether a request is being encoded."""
        return self._num_preparing > 0

    @contextmanager
    def preparing(self, num_samples: int) -> Iterator[None]:
        """Holds places of the queue for a request that is being encoded, so that no work is done in vain.

        Raises:
            QueueFullError: so many samples more may not wait; nothing was changed.
        """
        limit = self._scheduler.config.max_queued_requests
        with self._submitting:
            if self._num_waiting is None:
                self._num_waiting = self._scheduler.stats().num_waiting
            waiting = self._num_waiting + self._num_preparing
            if waiting + num_samples > limit:
                raise QueueFullError(
                    f"{waiting} samples wait and n is {num_samples}: allowed is {limit} that wait"
                )
            self._num_preparing += num_samples
        try:
            yield
        finally:
            with self._submitting:
                self._num_preparing -= num_samples

    def submit(self, request: Request, use: CacheUse) -> None:
        """Queues a request.

        Raises:
            CapacityError, InvalidRequestError, QueueFullError: see `Scheduler.submit`; nothing was changed.
        """
        retention = instance_of("retention", use.retention, Retention, InvalidRequestError)
        with self._submitting:  # a plan must not see a request before it is registered
            request.id = self._scheduler.submit(
                request.prompt,
                max_tokens=request.params.max_tokens,
                num_samples=request.params.n,
                scope=use.scope,
                reuse_cached=request.prompt_scores is None,
                tenant=use.tenant,
                session=retention.session_id,
                ttl=retention.ttl_seconds,
                next_turn=retention.next_turn_seconds,
                retention_priority=retention.priority,
                media=use.media,
            )
            self._requests[request.id] = request
            self._counters.num_requests += 1
            if self._num_waiting is not None:
                self._num_waiting += request.params.n

    def abort(self, request: Request) -> bool:
        """Ends a request at the end of the step in flight, or now; its last deltas come with the next step.

        Returns:
            False where it has ended already.
        """
        self._paused_at.pop(request, None)  # it needs a step to end
        self._num_waiting = None
        return self._scheduler.abort(request.id)

    def pause(self, request: Request) -> bool:
        """Leaves a request out of the steps to come; its blocks stay its own as long as nobody else needs them.

        Returns:
            False where it has ended, or is paused.
        """
        if request in self._paused_at or not self._scheduler.pause(request.id):
            return False
        self._num_waiting = None
        self._paused_at[request] = time.monotonic()
        self._counters.num_pauses += 1
        return True

    def resume(self, request: Request) -> bool:
        """Lets a paused request go on. Returns whether it was paused."""
        since = self._paused_at.pop(request, None)
        if since is None:
            return False
        self._num_waiting = None
        self.timing.resume(request, time.monotonic() - since)
        return self._scheduler.resume(request.id)

    def abort_all(self) -> None:
        """Ends every request."""
        self._paused_at.clear()
        self._num_waiting = None
        for request_id in list(self._requests):
            self._scheduler.abort(request_id)

    def step(self) -> list[RequestDelta]:
        """Runs one step and returns what is new, which is nothing where nothing could run.

        Raises:
            StepError: another thread is in this method.
            Exception: the model or the scheduler is broken; the step was discarded.
        """
        if not self._stepping.acquire(blocking=False):
            raise StepError("step is called while another thread runs a step")
        try:
            with torch.inference_mode():
                return self._step()
        finally:
            self._stepping.release()

    def stats(self) -> EngineStats:
        """Returns the counters and gauges as they are now."""
        return engine_stats(self._counters, self._scheduler.stats(), len(self._requests), self._runner)

    def reset_prefix_cache(self) -> None:
        """Makes nothing of what was computed so far findable any more; what runs goes on."""
        self._scheduler.reset_prefix_cache()

    def check(self) -> None:
        """Compares the scheduler's books with each other.

        Raises:
            PoisonedError: they do not agree.
        """
        self._scheduler.check()

    def _step(self) -> list[RequestDelta]:
        deltas = StepDeltas()
        views = next(self._views)
        views.wait()
        with self._submitting:
            plan = self._scheduler.plan(views.buffers, self._clock())
            self._num_waiting = None
        self._end(self._scheduler.take_ended(), deltas)
        if plan is not None:
            self._run(plan, views, deltas)
        return deltas.items

    def _run(self, plan: Plan, views: StepViews, deltas: StepDeltas) -> None:
        buffers = views.buffers
        try:
            self._place(plan, buffers)
            views.upload(plan)
            self._copy_blocks(plan, views)
            scored = self._rows_to_score(plan, buffers)
            start = time.perf_counter()
            result = self._forward(plan, views, scored)
            samples = self._sample(plan, buffers, result.logits)
            self._measure(plan, time.perf_counter() - start)
            add_scores(scored, result.logits[plan.num_samples :])
            outcomes = self._advance(plan, buffers, samples, result)
        except BaseException:
            self._scheduler.discard(plan)
            raise
        failed_rows = np.fromiter(result.failed_rows, np.int32)
        summaries = self._scheduler.apply(plan, samples.token_ids, outcomes, failed_rows)
        self._counters.num_steps += 1
        self._emit(plan, buffers, samples, outcomes, deltas)
        self._end(summaries, deltas)

    def _copy_blocks(self, plan: Plan, views: StepViews) -> None:
        """Makes the step's copies in their order: a block that is swapped out may be filled in the same step."""
        if plan.num_swap_outs:
            self._runner.swap_out(views.swap_outs(plan))
        if plan.num_swap_ins:
            self._runner.swap_in(views.swap_ins(plan))
        if plan.num_copies:
            self._runner.copy_blocks(views.copies(plan))

    def _measure(self, plan: Plan, seconds: float) -> None:
        """Tells the scheduler what a token of a prompt costs; the sampled tokens are here, so the step has been run."""
        meter = self._prefill_meter
        if meter is not None and meter.add(plan.num_tokens, plan.num_decodes, seconds):
            self._scheduler.set_costs(
                seconds_per_token=meter.seconds_per_token, seconds_per_block=self._seconds_per_block
            )

    def _place(self, plan: Plan, buffers: StepBuffers) -> None:
        """Tells the sampler about the sequences that got a row."""
        now = time.monotonic()
        requests = buffers.placed_requests[: plan.num_placed].tolist()
        children = buffers.placed_children[: plan.num_placed].tolist()
        rows = buffers.placed_rows[: plan.num_placed].tolist()
        for request_id, child, row in zip(requests, children, rows, strict=True):
            sequence = self._requests[request_id].sequences[child]
            self._by_row[row] = sequence
            self._sampler.place(row, sequence.placement())
            self.timing.place(sequence, now)
            if sequence.request.prompt_scores is not None:
                self._scored.add(sequence.request)

    def _rows_to_score(self, plan: Plan, buffers: StepBuffers) -> list[ScoredRow]:
        if not self._scored:
            return []
        self._scored = {request for request in self._scored if request.prompt_scores is not None}
        return scored_rows(plan, buffers, self._by_row)

    def _forward(self, plan: Plan, views: StepViews, scored: list[ScoredRow]) -> StepLogits:
        sampled = views.buffers.sample_indices[: plan.num_samples]
        indices = np.concatenate([sampled, *(row.indices for row in scored)]) if scored else sampled
        return forward_isolated(self._runner, views, plan, indices)

    def _sample(self, plan: Plan, buffers: StepBuffers, logits: torch.Tensor) -> Samples:
        count = plan.num_samples
        return self._sampler.sample(
            logits[:count], buffers.sample_rows[:count], buffers.sample_positions[:count]
        )

    def _advance(
        self, plan: Plan, buffers: StepBuffers, samples: Samples, result: StepLogits
    ) -> npt.NDArray[np.uint8]:
        """Gives each sequence its token; returns the outcomes."""
        for batch_row, error in result.failed_rows.items():
            message = f"the model raised {raised_within(error)}"
            for row in rows_of(plan, buffers, batch_row):
                self._sequence_of(row).error = message
        rows = buffers.sample_rows[: plan.num_samples].tolist()
        columns = zip(rows, samples.token_ids.tolist(), samples.failed.tolist(), strict=True)
        advanced = (_advanced(self._sequence_of(row), token, failed) for row, token, failed in columns)
        return np.fromiter(advanced, np.uint8, plan.num_samples)

    def _emit(
        self,
        plan: Plan,
        buffers: StepBuffers,
        samples: Samples,
        outcomes: npt.NDArray[np.uint8],
        deltas: StepDeltas,
    ) -> None:
        """Makes the deltas of the sampled tokens, now that the scheduler has said what became of them."""
        rows = buffers.sample_rows[: plan.num_samples].tolist()
        reasons = buffers.finish_reasons[: plan.num_samples].tolist()
        tokens = samples.token_ids.tolist()
        now = time.monotonic()
        for index, (row, token, reason) in enumerate(zip(rows, tokens, reasons, strict=True)):
            sequence = self._sequence_of(row)
            if reason in DOES_NOT_COUNT:
                if outcomes[index] != OUTCOME_FAILED:
                    self._retract(sequence, row)
                elif (
                    reason == FinishReason.VOID
                ):  # what it was drawn from was not computed: no fault of its own
                    sequence.decode_again()
                    self._sampler.place(row, sequence.placement())
                if reason != FinishReason.VOID:
                    self._finish(sequence, FINISH_REASONS[reason])
                    deltas.add(sequence, ())
            else:
                self._finish(sequence, FINISH_REASONS[reason])
                self.timing.token(sequence, now)
                if sequence.request.num_cached_tokens is None:
                    self._look_up_hit(sequence.request)
                entry = samples.logprobs.get(index)
                deltas.add(sequence, (token,), None if entry is None else (entry,))

    def _look_up_hit(self, request: Request) -> None:
        """Tells a request that goes on what it has found; one that has ended is told by its summary."""
        request.num_cached_tokens = self._scheduler.num_cached_tokens(request.id)

    def _retract(self, sequence: Sequence, row: int) -> None:
        """Takes back a token that does not count."""
        sequence.retract()
        self._sampler.place(row, sequence.placement())

    def _finish(self, sequence: Sequence, reason: str | None) -> None:
        if reason is not None:
            sequence.finish(reason)
            self._counters.num_finished[reason] += 1

    def _end(self, summaries: list[RequestSummary], deltas: StepDeltas) -> None:
        for summary in summaries:
            request = self._requests.pop(summary.request)
            self._paused_at.pop(request, None)
            request.num_cached_tokens = summary.cached_tokens
            self.timing.end(request, summary)
            for sequence in deltas.end(request, summary):
                self._counters.num_finished[sequence.finish_reason or ""] += 1
            self._counters.num_prompt_tokens += summary.prompt_tokens
            self._counters.num_output_tokens += summary.output_tokens

    def _sequence_of(self, row: int) -> Sequence:
        sequence = self._by_row[row]
        if sequence is None:
            raise StepError(f"row {row} is computed but was never given to a sequence")
        return sequence


def _advanced(sequence: Sequence, token_id: int, failed: bool) -> int:
    """Returns the outcome of one sample; what a sequence's own text raises fails it alone."""
    if sequence.error is not None:
        return OUTCOME_FAILED
    if failed:
        sequence.error = NO_FINITE_LOGITS
        return OUTCOME_FAILED
    try:
        return sequence.advance(token_id)
    except Exception as error:
        sequence.error = f"the text could not be decoded: {raised_within(error)}"
        sequence.output_token_ids.pop()
        return OUTCOME_FAILED


def step_views(runner: Runner, config: SchedulerConfig) -> list[StepViews]:
    """Two sets of step buffers, so that one is read while the other is filled."""
    if isinstance(runner, DeviceRunner):
        return [*runner.step_views(config)]
    return [StepViews(StepBuffers(config), runner.device) for _ in range(2)]
