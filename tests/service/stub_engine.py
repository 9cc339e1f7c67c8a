"""An engine without a model: it says the numbers after the prompt's last token, one a step, when let."""

import asyncio
import time
from dataclasses import fields

from pykv.engine.outputs import OutputDelta, TokenLogprobs, Usage
from pykv.engine.stats import EngineStats
from pykv.errors import (
    CapacityError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)
from pykv.service.served import ModelDescription

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
        live: the requests that run, by name; each holds one block.
        aborted: the names of those that ended before their end.
        scripts: deltas, or exceptions, by prompt text; instead of numbers.
        pace: awaited before each token; tests replace it to hold tokens back.
    """

    def __init__(self):
        self.live = {}
        self.aborted = []
        self.finished = []
        self.scopes = {}
        self.scripts = {}
        self.num_running_max = 4096
        self.steps = asyncio.Event()
        self.steps.set()
        self.last_progress = time.monotonic()
        self.error = None
        self.changed = asyncio.Event()

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace):
        self.steps.set()

    @property
    def is_alive(self):
        return self.error is None

    def hold(self):
        """No token comes until `release`."""
        self.steps.clear()

    def release(self):
        self.steps.set()

    def die(self):
        self.error = EngineDeadError("the step failed")
        for state in self.live.values():
            state["error"] = self.error
        self.steps.set()

    async def until(self, condition):
        """Waits for a change after which `condition()` holds."""
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def stats(self):
        return stub_stats(len(self.live))

    async def abort(self, request_id):
        if request_id not in self.live:
            return False
        self.live[request_id]["abort"] = True
        return True

    def generate(self, prompt, params, *, request_id, scope):
        return self._run(prompt, params, request_id, scope)

    def chat(self, messages, params, *, request_id, scope):
        return self._run(messages[-1]["content"], params, request_id, scope)

    async def _run(self, prompt, params, request_id, scope):
        params.validated(VOCAB_SIZE)
        token_ids = self._token_ids(prompt)
        self._admit(request_id, params.n)
        self.scopes[request_id] = scope
        try:
            if prompt in self.scripts:
                async for delta in self._scripted(prompt, request_id):
                    yield delta
            else:
                async for delta in self._numbers(token_ids, params, request_id):
                    yield delta
        except GeneratorExit:
            self.aborted.append(request_id)
            raise
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        else:
            self.finished.append(request_id)
        finally:
            del self.live[request_id]
            self.changed.set()

    def _token_ids(self, prompt):
        if isinstance(prompt, str) and len(prompt) > 10 * MAX_MODEL_LEN:
            raise CapacityError(f"prompt has {len(prompt)} characters", "prompt")
        token_ids = [len(word) for word in prompt.split()] if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise InvalidRequestError("prompt is empty; allowed: one token or more", "prompt")
        if len(token_ids) >= MAX_MODEL_LEN:
            raise CapacityError(f"prompt has {len(token_ids)} tokens; allowed: {MAX_MODEL_LEN - 1}", "prompt")
        for token_id in token_ids:
            if not 0 <= token_id < VOCAB_SIZE:
                raise InvalidRequestError(f"prompt has the token {token_id}; allowed: 0 to 999", "prompt")
        return token_ids

    def _admit(self, request_id, n):
        if not self.is_alive:
            raise EngineDeadError("the engine has ended")
        if request_id in self.live:
            raise DuplicateRequestError(f"request_id {request_id} is in use")
        if len(self.live) + n > self.num_running_max:
            raise QueueFullError(f"{len(self.live)} samples wait; allowed: {self.num_running_max}")
        self.live[request_id] = {"abort": False, "error": None}
        self.changed.set()

    async def _scripted(self, prompt, request_id):
        for delta in self.scripts[prompt]:
            await self._step(request_id)
            if isinstance(delta, Exception):
                raise delta
            yield delta

    async def _numbers(self, token_ids, params, request_id):
        length = min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(token_ids))
        for place in range(length):
            await self._step(request_id)
            is_abort = self.live[request_id]["abort"]
            is_last = is_abort or place == length - 1
            for index in range(params.n):
                token_id = (token_ids[-1] + 1 + place + index) % VOCAB_SIZE
                yield OutputDelta(
                    request_id=request_id,
                    index=index,
                    token_ids=(token_id,),
                    text=f"{token_id} ",
                    logprobs=(_logprobs(token_id, params.logprobs),) if params.logprobs is not None else None,
                    prompt_logprobs=_prompt_logprobs(token_ids, params) if place == index == 0 else None,
                    finish_reason=("abort" if is_abort else "length") if is_last else None,
                    usage=Usage(len(token_ids), 0, (place + 1) * params.n, 0, 0)
                    if is_last and index == params.n - 1
                    else None,
                )
            if is_last:
                return

    async def _step(self, request_id):
        await asyncio.sleep(0)
        await self.steps.wait()
        self.last_progress = time.monotonic()
        if self.live[request_id]["error"] is not None:
            raise self.live[request_id]["error"]


def _logprobs(token_id, num_top):
    top = tuple(range(num_top))
    return TokenLogprobs(token_id, -0.5, 1, top, tuple(-1.0 - place for place in top))


def _prompt_logprobs(token_ids, params):
    if params.prompt_logprobs is None:
        return None
    return (None, *(_logprobs(token_id, params.prompt_logprobs) for token_id in token_ids[1:]))
