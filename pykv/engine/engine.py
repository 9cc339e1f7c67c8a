"""The synchronous engine."""

from __future__ import annotations

import secrets
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from pykv.engine.cache_use import NO_RETENTION, CacheUse
from pykv.engine.config import EngineConfig, scheduler_config
from pykv.engine.loading import load_runner
from pykv.engine.outputs import Completion, OutputDelta, RequestOutput
from pykv.engine.prompts import Prompt, check_length, checked_encoding, encoded_prompt, paired
from pykv.engine.request import Request, TokenIds
from pykv.engine.runner import Runner, check_runner
from pykv.engine.stats import EngineStats
from pykv.engine.step_loop import StepLoop
from pykv.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    StepError,
)
from pykv.events import KvEvents
from pykv.field_checks import (
    as_callable,
    as_integer,
    as_text,
    duplicate_request,
    instance_of,
    optional,
    refuse,
)
from pykv.retention import Pin, Retention, session_bytes
from pykv.sampling.params import SamplingParams
from pykv.text.chat import num_characters
from pykv.text.stop_strings import StopStrings
from pykv.text.text_stream import TextStream
from pykv.text.tokenizer import TextTokenizer


class Engine:
    """Generates text with one model.

        with Engine("bundled") as engine:
            output = engine.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=5))[0]
            print(output.outputs[0].text)

    Args:
        model: "bundled", a folder, a GGUF file, a hub name, or a module of transformers.
        tokenizer: of a module; the others bring theirs.
        config: the options; None = their defaults.
        progress: told in words what the loading does.

    Raises:
        ConfigError: an argument is not of its type, or the options do not fit the machine.
        ModelError, UnsupportedModelError: the model cannot be read or served.
    """

    def __init__(
        self,
        model: str | Path | nn.Module = "bundled",
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        config = _checked_config(config)
        given = _text_tokenizer(tokenizer)
        runner, own = load_runner(model, tokenizer, config, progress)
        self._set_up(runner, given or _text_tokenizer(own), config)

    @classmethod
    def from_runner(
        cls,
        runner: Runner,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Makes an engine of any model that writes and reads its KV through block tables.

        Args:
            runner: the model; its number of blocks and block size count, not the config's.
            tokenizer: None = prompts are token ids and outputs have no text.
            clock: the time in seconds that times to live are counted by; it never goes back.

        Raises:
            ConfigError, ModelError: an argument is not of its type, or the options do not fit the runner.
        """
        config = _checked_config(config)
        check_runner(runner)
        as_callable("clock", clock, ConfigError)
        engine = cls.__new__(cls)
        engine._set_up(runner, _text_tokenizer(tokenizer), config, clock)
        return engine

    def _set_up(
        self,
        runner: Runner,
        tokenizer: TextTokenizer | None,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.model_name = runner.name
        self.vocab_size = runner.vocab_size
        of_scheduler = scheduler_config(
            config,
            num_blocks=runner.num_blocks,
            num_host_blocks=runner.num_host_blocks,
            block_size=runner.block_size,
            groups=runner.windows,
            max_model_len=min(config.max_model_len or runner.max_model_len, runner.max_model_len),
        )
        self.max_model_len = of_scheduler.max_seq_len  # what the model, the options and the pool allow
        self.tokenizer = tokenizer
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.steps = StepLoop(runner, of_scheduler, clock)
        self._eos_token_ids = runner.eos_token_ids
        self._live: dict[str, Request] = {}
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        retention: Retention = NO_RETENTION,
    ) -> list[RequestOutput]:
        """Runs all prompts to their ends.

        Args:
            prompts: a text, or a sequence of texts and of sequences of token ids.
            params: one for all, or one for each.
            retention: how long the blocks of all of them matter, such as `Retention(session_id="chat 7")`.

        Returns:
            One output a prompt, in order. A request that failed while it ran says so in its finish reason.

        Raises:
            InvalidRequestError: a prompt or its parameters are not allowed; nothing was run.
            StepError: requests of `add_request` still run.
        """
        if self._live:
            raise StepError(f"generate: {len(self._live)} requests of add_request still run")
        requests = [self.new_request(*each) for each in paired(prompts, params)]
        outputs = {request.request_id: _empty_output(request) for request in requests}
        try:
            self._run_all(deque(requests), CacheUse(retention=retention), outputs)
        finally:
            self._abort_live()
        return list(outputs.values())

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        retention: Retention = NO_RETENTION,
    ) -> RequestOutput:
        """Answers a chat: messages with `role` and `content`, put through the model's chat template.

        Args:
            retention: as in `generate`.

        Raises:
            InvalidRequestError: the messages or the parameters are not allowed.
        """
        return self.generate([self.encode_chat(messages)], params, retention=retention)[0]

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        scope: bytes = b"",
        tenant: bytes = b"",
        retention: Retention = NO_RETENTION,
        media: Sequence[tuple[int, bytes]] = (),
    ) -> str:
        """Queues a request for `step`; returns its id.

        Args:
            scope: requests of different scopes share no cached blocks.
            tenant: whose sessions and share of the cache count, and who pays under "fair_share".
            retention: how long its blocks matter.
            media: what its placeholder tokens stand for, as `Scheduler.submit` takes it.

        Raises:
            DuplicateRequestError: a live request has this id.
            EngineDeadError: the engine was closed.
            CapacityError, InvalidRequestError, QueueFullError: it can never fit, is not allowed, or must wait.
        """
        request = self.new_request(prompt, params, request_id)
        if request.request_id in self._live:
            raise duplicate_request(request.request_id)
        self._submit(request, CacheUse(scope=scope, tenant=tenant, retention=retention, media=media))
        return request.request_id

    def abort(self, request_id: str) -> bool:
        """Ends a request; its last deltas come with the next step. Returns False if none of this id is live.

        Raises:
            InvalidRequestError: here and in the next two: the id is no text.
        """
        request = self._live.get(as_text("request_id", request_id))
        return request is not None and self.steps.abort(request)

    def pause(self, request_id: str) -> bool:
        """Leaves a request out of the steps to come, until `resume`; its blocks go to others first.

        While every request is paused, `step` does nothing.

        Returns:
            False if none of this id is live, or it is paused.
        """
        request = self._live.get(as_text("request_id", request_id))
        return request is not None and self.steps.pause(request)

    def resume(self, request_id: str) -> bool:
        """Lets a paused request go on. Returns False if none of this id is paused."""
        request = self._live.get(as_text("request_id", request_id))
        return request is not None and self.steps.resume(request)

    def step(self) -> list[OutputDelta]:
        """Runs one step and returns what is new.

        Raises:
            EngineDeadError: the engine was closed.
        """
        if self._closed:
            raise EngineDeadError("the engine was closed")
        deltas = self.steps.step()
        for request, delta in deltas:
            if delta.usage is not None:
                self._live.pop(request.request_id, None)
        return [delta for _, delta in deltas]

    def end_session(self, session_id: bytes | str, *, tenant: bytes = b"") -> bool:
        """Says that a session has no further turn: what only ended sessions have used makes room first.

        A request of the session that comes all the same makes it live again. From any thread.

        Returns:
            Whether the session was known and live.

        Raises:
            InvalidRequestError: the id is neither bytes nor text.
        """
        return self.steps.scheduler.end_session(session_bytes(session_id, "session_id"), tenant=tenant)

    def pin(self, prompt: Prompt, *, scope: bytes = b"", tenant: bytes = b"") -> Pin | None:
        """Keeps the cached blocks that a prompt begins with until `unpin`; from any thread.

        Returns:
            The pin, and how many of the first tokens it holds; None if nothing of them is cached.

        Raises:
            PinQuotaError: more than the config's `max_pinned_blocks` would be pinned; nothing was.
            CapacityError, InvalidRequestError: as `encode`.
        """
        return self.steps.scheduler.pin(self.encode(prompt), scope=scope, tenant=tenant)

    def unpin(self, pin: Pin) -> bool:
        """Gives a pin up; from any thread. Returns whether it still was one."""
        return self.steps.scheduler.unpin(pin)

    def set_cache_share(self, tenant: bytes, share: float) -> None:
        """Sets the share of the blocks, 0 to 1, that a tenant's own cached ones may fill before they make room first.

        Raises:
            InvalidRequestError: the share is out of its range.
        """
        self.steps.scheduler.set_cache_share(tenant, share)

    def take_events(self) -> KvEvents:
        """Takes what has happened to cached blocks since the last call; empty where `max_kv_events` is 0."""
        return self.steps.scheduler.take_events()

    def snapshot_events(self) -> KvEvents:
        """Returns all cached blocks as if each had just been stored; see `Scheduler.snapshot_events`."""
        return self.steps.scheduler.snapshot_events()

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return self.steps.has_requests

    def stats(self) -> EngineStats:
        """Returns the counters and gauges as they are now; from any thread."""
        return self.steps.stats()

    def close(self) -> None:
        """Ends all requests; no more can be added."""
        self._abort_live()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def encode(self, prompt: Prompt) -> TokenIds:
        """Returns a prompt's ids, int32 [num_tokens], all in the vocabulary; from any thread.

        Raises:
            CapacityError, InvalidRequestError: it is too long, empty, or holds what is no token.
        """
        return encoded_prompt(prompt, self.tokenizer, self.vocab_size, self.max_model_len)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], template_options: Mapping[str, Any] | None = None
    ) -> TokenIds:
        """Returns the ids of the chat template over the messages, int32 [num_tokens]; from any thread.

        Raises:
            CapacityError, InvalidRequestError: they are too long, malformed, or refused by the template.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("messages: the engine has no tokenizer; send token ids", "messages")
        check_length(num_characters(messages), self.tokenizer, self.max_model_len)
        token_ids = self.tokenizer.encode_chat(messages, template_options, self.max_model_len)
        return checked_encoding(token_ids, self.vocab_size, self.max_model_len)

    def check_characters(self, num_characters: int) -> None:
        """Says early, without looking at it, that a text is too long to be encoded; from any thread.

        Raises:
            CapacityError: it must have more tokens than a sequence may have.
        """
        as_integer("num_characters", num_characters, 0, 2**63 - 1)
        if self.tokenizer is not None:
            check_length(num_characters, self.tokenizer, self.max_model_len)

    def new_request(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Request:
        """Checks a request without queueing it; from any thread.

        Raises:
            CapacityError, InvalidRequestError: it is too long or not allowed.
        """
        instance_of("params", params, SamplingParams, InvalidRequestError).validated(self.vocab_size)
        if params.n > self.config.max_num_seqs:
            refuse("n", params.n, f"at most max_num_seqs, which is {self.config.max_num_seqs}")
        if params.stop and self.tokenizer is None:
            refuse("stop", params.stop, "() where the engine has no tokenizer: stop_token_ids needs none")
        optional(as_text, "request_id", request_id)
        token_ids = self.encode(prompt)
        return Request(
            request_id or uuid.uuid4().hex,
            token_ids,
            params,
            secrets.randbits(64) if params.seed is None else params.seed,
            self._eos_token_ids,
            self._text_streams(token_ids, params),
        )

    def _text_streams(self, token_ids: TokenIds, params: SamplingParams) -> Callable[[], TextStream | None]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return lambda: None
        stops = StopStrings(params.stop) if params.stop else None
        context = token_ids[-8:].tolist()
        return lambda: TextStream(tokenizer.detokenizer(context), stops, params.min_tokens)

    def _submit(self, request: Request, use: CacheUse) -> None:
        if self._closed:
            raise EngineDeadError("the engine was closed")
        self.steps.submit(request, use)
        self._live[request.request_id] = request

    def _run_all(self, waiting: deque[Request], use: CacheUse, outputs: dict[str, RequestOutput]) -> None:
        while waiting or self._live:
            self._feed(waiting, use)
            for delta in self.step():
                outputs[delta.request_id].add(delta)

    def _feed(self, waiting: deque[Request], use: CacheUse) -> None:
        """Submits what the queue takes."""
        while waiting:
            try:
                self._submit(waiting[0], use)
            except QueueFullError:
                if not self._live:
                    raise
                return
            waiting.popleft()

    def _abort_live(self) -> None:
        for request in self._live.values():
            self.steps.abort(request)
        while self._live and self.has_requests:
            self.step()


def _checked_config(config: EngineConfig | None) -> EngineConfig:
    return EngineConfig() if config is None else instance_of("config", config, EngineConfig, ConfigError)


def _text_tokenizer(tokenizer: Any) -> TextTokenizer | None:
    return None if tokenizer is None else TextTokenizer(tokenizer)


def _empty_output(request: Request) -> RequestOutput:
    completions = [Completion(index) for index in range(request.params.n)]
    return RequestOutput(request.request_id, request.prompt.tolist(), completions)
