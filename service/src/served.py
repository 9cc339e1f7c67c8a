"""What the daemon serves: an engine, as far as the daemon needs it, and a description of its model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from pykv._core import most_blocks
from pykv.engine.delta_stream import DeltaStream
from pykv.engine.stats import EngineStats
from pykv.engine.timing import TimingCounts
from pykv.events import KvEvents
from pykv.retention import Retention
from pykv.sampling import SamplingParams

__all__ = ["ModelDescription", "ServedModel", "TokenEngine"]

USUAL_LENGTHS = (512, 2048, 8192, 32768)


class TokenEngine(Protocol):
    """`pykv.AsyncEngine`, or what stands in for it in a test."""

    async def __aenter__(self) -> Self:
        """Starts the engine's thread."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends every request and the thread."""

    @property
    def is_alive(self) -> bool:
        """False once the engine's thread has ended."""

    @property
    def last_progress(self) -> float:
        """When the last step ended, on the monotonic clock, in seconds; now, while there is no work."""

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        scope: bytes,
        tenant: bytes,
        retention: Retention,
    ) -> DeltaStream:
        """Streams a continuation; closing the generator ends the request."""

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams,
        *,
        request_id: str,
        scope: bytes,
        tenant: bytes,
        retention: Retention,
    ) -> DeltaStream:
        """Streams an answer; closing the generator ends the request."""

    async def abort(self, request_id: str) -> bool:
        """Ends a request by its name."""

    def end_session(self, session_id: bytes | str, *, tenant: bytes) -> bool:
        """Says that a session of a tenant has no further turn; whether it was known and live."""

    def set_cache_share(self, tenant: bytes, share: float) -> None:
        """Sets the share of the blocks that a tenant's own cached ones may fill before they make room first."""

    def listen_to_events(self, listener: Callable[[KvEvents], None] | None) -> int:
        """Sets who is told, on the engine's thread, what happens to cached blocks; the number of the first event."""

    def snapshot_events(self) -> KvEvents:
        """All cached blocks as if each had just been stored."""

    def stats(self) -> EngineStats:
        """Counts at this moment; may wait for a step that plans."""

    def timing(self) -> TimingCounts:
        """What was measured so far of waits, tokens and stalls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What is served, as clients and operators are told.

    Attributes:
        version: of pykv.
        max_model_len: the effective context cap in tokens.
        num_blocks: usable blocks.
        dtype: of the weights.
        kv_bytes_per_token: of keys and values, over all layers, scales included.
        kv_dtype: the name of the cache's format.
        model_type, architectures: as the model's config names them.
        windows: of each layer group, as `SchedulerConfig.groups` takes them.
    """

    name: str
    version: str
    dtype: str
    device: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    kv_dtype: str
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    windows: tuple[int | None, ...] = (None,)

    def num_requests(self, num_tokens: int) -> int:
        """How many requests of so many tokens, prompt and output, fit at once if they share nothing."""
        windows = [window or 0 for window in self.windows]
        return self.num_blocks // most_blocks(
            num_tokens, block_size=self.block_size, windows=windows, chunk=1
        )

    def requests_that_fit(self) -> dict[int, int]:
        """How many fit at once, by their tokens: of some usual lengths, and of the longest."""
        lengths = [length for length in USUAL_LENGTHS if length < self.max_model_len]
        return {length: self.num_requests(length) for length in (*lengths, self.max_model_len)}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model and the engine that runs it.

    Attributes:
        tokenizer_archive: makes a ZIP archive of the tokenizer's files; takes a moment. None = there is none.
    """

    engine: TokenEngine
    description: ModelDescription
    tokenizer_archive: Callable[[], bytes] | None = None
