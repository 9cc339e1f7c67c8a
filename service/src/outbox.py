"""What one stream has yet to send: the engine never waits for it, so it is merged and bounded."""

import anyio

from pykv.engine.outputs import OutputDelta, TokenLogprobs, Usage
from pykv.service.errors import ClientTooSlowError
from pykv.service.messages import delta_message, logprobs_message, usage_message
from pykv.service.protocol.engine_pb2 import Delta, GenerateResponse

__all__ = ["Outbox"]

PROMPT_LOGPROBS_PER_MESSAGE = 1024
BYTES_PER_DELTA = 128
BYTES_PER_TOKEN = 36  # a Python integer and its place in a list
BYTES_PER_LOGPROBS = 256


class Outbox:
    """Deltas that wait for the client, those of one sequence merged into one.

    Args:
        request_id: said in the first message.
        limit_bytes: about how much may wait; the first delta that waits is taken whatever its size.
    """

    def __init__(self, request_id: str, limit_bytes: int) -> None:
        self._request_id = request_id
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._deltas: dict[int, _Merged] = {}
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._usage: Usage | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = anyio.Event()

    @property
    def held_bytes(self) -> int:
        """About how much waits."""
        return self._held_bytes

    def add(self, delta: OutputDelta) -> None:
        """Takes a delta.

        Raises:
            ClientTooSlowError: more waits than may; the delta was not taken.
        """
        size = _size_of(delta)
        if self._held_bytes and self._held_bytes + size > self._limit_bytes:
            raise ClientTooSlowError(
                f"{self._held_bytes} bytes wait for the client to read them; allowed: {self._limit_bytes}"
            )
        self._held_bytes += size
        self._deltas.setdefault(delta.index, _Merged(delta.index)).add(delta)
        self._prompt_logprobs.extend(delta.prompt_logprobs or ())
        self._usage = delta.usage or self._usage
        self._changed.set()

    def close(self, error: BaseException | None = None) -> None:
        """No delta follows; once what waits is taken, `take` raises `error`, if there is one."""
        self._error = error
        self._is_closed = True
        self._changed.set()

    async def take(self) -> GenerateResponse | None:
        """Waits for something to send and returns it all as one message; None = the end."""
        while not self._deltas and not self._is_closed:
            self._changed = anyio.Event()
            await self._changed.wait()
        if self._deltas:
            return self._message()
        if self._error is not None:
            raise self._error
        return None

    def _message(self) -> GenerateResponse:
        if len(self._prompt_logprobs) > PROMPT_LOGPROBS_PER_MESSAGE:
            return self._prompt_message()
        message = GenerateResponse(
            request_id=self._request_id,
            deltas=[merged.message() for merged in self._deltas.values()],
            prompt_logprobs=map(logprobs_message, self._prompt_logprobs),
            usage=None if self._usage is None else usage_message(self._usage),
        )
        self._request_id = ""
        self._deltas.clear()
        self._prompt_logprobs.clear()
        self._usage = None
        self._held_bytes = 0
        return message

    def _prompt_message(self) -> GenerateResponse:
        """A part of the prompt's log probabilities, whose size no client has to expect in one message."""
        part = self._prompt_logprobs[:PROMPT_LOGPROBS_PER_MESSAGE]
        del self._prompt_logprobs[:PROMPT_LOGPROBS_PER_MESSAGE]
        message = GenerateResponse(request_id=self._request_id, prompt_logprobs=map(logprobs_message, part))
        self._request_id = ""
        return message


class _Merged:
    """All that waits of one sequence."""

    __slots__ = ("_last", "_logprobs", "_texts", "_token_ids")

    def __init__(self, index: int) -> None:
        self._last = OutputDelta("", index, (), "")
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, delta: OutputDelta) -> None:
        self._last = delta
        self._token_ids.extend(delta.token_ids)
        self._texts.append(delta.text)
        self._logprobs.extend(delta.logprobs or ())

    def message(self) -> Delta:
        return delta_message(self._last, self._token_ids, "".join(self._texts), self._logprobs)


def _size_of(delta: OutputDelta) -> int:
    num_logprobs = len(delta.logprobs or ()) + len(delta.prompt_logprobs or ())
    num_bytes = BYTES_PER_DELTA + len(delta.text) + len(delta.token_ids) * BYTES_PER_TOKEN
    return num_bytes + num_logprobs * BYTES_PER_LOGPROBS
