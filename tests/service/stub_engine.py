"""An engine without a model: it says the numbers after the prompt's last token, one a step, when let."""

import asyncio
import threading
import time
from dataclasses import fields

import numpy as np

from pykv.engine.delta_stream import Channel, DeltaStream
from pykv.engine.outputs import OutputDelta, TokenLogprobs, Usage
from pykv.engine.stats import EngineStats
from pykv.engine.timing import Timing
from pykv.errors import (
    CapacityError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    ModelError,
    OutOfBlocksError,
    QueueFullError,
)
from pykv.events import KvEvents
from pykv.service.served import ModelDescription, ServedModel

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 200_000
NUM_BLOCKS = 1000

DESCRIPTION = ModelDescription(
    name="stub",
    version="0",
    dtype="float32",
    device="cpu",
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(0,),
    max_model_len=MAX_MODEL_LEN,
    block_size=16,
    num_blocks=NUM_BLOCKS,
    kv_bytes_per_token=64,
    kv_dtype="f32",
)


def stub_stats(num_live):
    counts = dict.fromkeys((entry.name for entry in fields(EngineStats)), 0)
    counts |= {
        "num_live_requests": num_live,
        "num_running": num_live,
        "num_finished": {},
        "blocks_total": NUM_BLOCKS,
        "blocks_active": num_live,
        "blocks_free": NUM_BLOCKS - num_live,
    }
    return EngineStats(**counts)


class StubEngine:
    """Obeys the protocol of the daemon's engine; a test sets how it behaves.

    Attributes:
        live: the channels of the requests that run, by name; each holds one block.
        aborted: the names of those that ended before their end.
        scripts: deltas, or exceptions, by prompt text; instead of numbers.
    """

    def __init__(self, max_pending_tokens=2**14):
        self.live = {}
        self.aborted = []
        self.finished = []
        self.scopes = {}
        self.tenants = {}
        self.retentions = {}
        self.sessions = set()
        self.shares = {}
        self.scripts = {}
        self.num_running_max = 4096
        self.max_pending_tokens = max_pending_tokens
        self.error = None
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._changed = asyncio.Event()
        self._last_progress = time.monotonic()
        self._tasks = {}

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace):
        for task in self._tasks.values():
            task.cancel()

    @property
    def is_alive(self):
        return self.error is None

    @property
    def last_progress(self):
        return self._last_progress if self.live else time.monotonic()

    def hold(self):
        """No token comes until `release`."""
        self._may_step.clear()

    def release(self):
        """Tokens come again."""
        self._may_step.set()

    def progress(self):
        """As if a step had ended."""
        self._last_progress = time.monotonic()

    async def until(self, condition):
        """Waits for a change after which `condition()` holds."""
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def end_session(self, session_id, *, tenant):
        is_known = (tenant, session_id) in self.sessions
        self.sessions.discard((tenant, session_id))
        return is_known

    def listen_to_events(self, listener):
        return 0

    def snapshot_events(self):
        keys = np.zeros((0, 32), np.uint8)
        return KvEvents(0, 0, keys[:, 0], keys, keys, np.zeros(0, np.bool_), np.zeros((0, 16), np.int32))

    def set_cache_share(self, tenant, share):
        self.shares[tenant] = share

    def stats(self):
        return stub_stats(len(self.live))

    async def abort(self, request_id):
        channel = self.live.get(request_id)
        if channel is not None:
            channel.is_aborted = True
        return channel is not None

    def timing(self):
        return Timing().counts()

    def generate(self, prompt, params, *, request_id, scope, tenant, retention):
        async def open_channel():
            params.validated(VOCAB_SIZE)
            token_ids = self._token_ids(prompt)
            self._admit(request_id, params.n)
            self.scopes[request_id] = scope
            self.tenants[request_id] = tenant
            self.retentions[request_id] = retention
            if retention.session_id is not None:
                self.sessions.add((tenant, retention.session_id))
            self.progress()
            loop = asyncio.get_running_loop()
            channel = Channel(request_id, loop, self.max_pending_tokens, lambda _: self._changed.set())
            channel.prompt_token_ids = token_ids
            deltas = (
                self._scripted(prompt)
                if isinstance(prompt, str) and prompt in self.scripts
                else self._numbers(token_ids, params, channel)
            )
            self.live[request_id] = channel
            self._tasks[request_id] = asyncio.create_task(self._run(channel, deltas))
            self._changed.set()
            return channel

        return DeltaStream(open_channel, self._abandon)

    def chat(self, messages, params, **names):
        return self.generate(messages[-1]["content"], params, **names)

    def _token_ids(self, prompt):
        if isinstance(prompt, str) and len(prompt) > 10 * MAX_MODEL_LEN:
            raise CapacityError(f"prompt has {len(prompt)} characters", "prompt")
        token_ids = [len(word) for word in prompt.split()] if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise InvalidRequestError("prompt is empty: allowed is one token or more", "prompt")
        if len(token_ids) >= MAX_MODEL_LEN:
            raise CapacityError(
                f"prompt has {len(token_ids)} tokens: allowed is {MAX_MODEL_LEN - 1}", "prompt"
            )
        for token_id in token_ids:
            if not 0 <= token_id < VOCAB_SIZE:
                raise InvalidRequestError(f"prompt has the token {token_id}: allowed is 0 to 999", "prompt")
        return token_ids

    def _admit(self, request_id, n):
        if not self.is_alive:
            raise EngineDeadError("the engine has ended")
        if request_id in self.live:
            raise DuplicateRequestError(f"request_id {request_id} is in use")
        if len(self.live) + n > self.num_running_max:
            raise QueueFullError(f"{len(self.live)} samples wait: allowed is {self.num_running_max}")

    async def _run(self, channel, deltas):
        """One request's steps."""
        try:
            async for delta in deltas:
                await asyncio.sleep(0)
                await self._may_step.wait()
                self.progress()
                channel.push(delta)
                if channel.is_paused:
                    await self.until(lambda: not channel.is_paused)
        except Exception as error:
            channel.fail(error)
        return self._end(channel, self.finished)

    def _abandon(self, channel):
        if self.live.get(channel.request_id) is channel:
            self._tasks[channel.request_id].cancel()
            self._end(channel, self.aborted)
            channel.fail(EngineDeadError("it was left"))

    def _end(self, channel, how):
        how.append(channel.request_id)
        del self.live[channel.request_id]
        del self._tasks[channel.request_id]
        self._changed.set()

    async def _scripted(self, prompt):
        for delta in self.scripts[prompt]:
            if isinstance(delta, Exception):
                raise delta
            yield delta

    async def _numbers(self, token_ids, params, channel):
        length = min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(token_ids))
        of_prompt = _prompt_logprobs(token_ids, params)
        for place in range(length):
            is_last = channel.is_aborted or place == length - 1
            for index in range(params.n):
                token_id = (token_ids[-1] + 1 + place + index) % VOCAB_SIZE
                is_very_last = is_last and index == params.n - 1
                has_prompt = place == index == 0 and of_prompt is not None
                yield OutputDelta(
                    request_id=channel.request_id,
                    index=index,
                    token_ids=(token_id,),
                    text=f"{token_id} ",
                    logprobs=None if params.logprobs is None else (_logprobs(token_id, params.logprobs),),
                    prompt_logprobs=of_prompt if has_prompt else None,
                    prompt_token_ids=tuple(token_ids) if has_prompt else None,
                    finish_reason=("abort" if channel.is_aborted else "length") if is_last else None,
                    usage=Usage(len(token_ids), 0, (place + 1) * params.n, 0, 0) if is_very_last else None,
                )
            if is_last:
                return


def _logprobs(token_id, num_top):
    top = tuple(range(num_top))
    return TokenLogprobs(token_id, -0.5, 1, top, tuple(-1.0 - place for place in top))


def _prompt_logprobs(token_ids, params):
    if params.prompt_logprobs is None:
        return None
    return (None, *(_logprobs(token_id, params.prompt_logprobs) for token_id in token_ids[1:]))


def load(options, tell):
    """The names of models say what happens."""
    tell("reading")
    if options.model == "nowhere":
        raise ModelError("model 'nowhere' was looked for\nin two places")
    if options.model == "too large":
        raise MemoryError("the pool needs 1 TiB")
    if options.model == "no room":
        raise OutOfBlocksError("the pool needs more blocks")
    if options.model == "a bug":
        raise ZeroDivisionError("division by zero")
    if options.model == "slow":
        threading.Event().wait()
    engine = StubEngine()
    if options.model == "held":
        engine.hold()
    return ServedModel(engine, DESCRIPTION)
