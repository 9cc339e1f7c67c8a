from collections.abc import Callable
from typing import Any, TypeAlias, final

from numpy.typing import NDArray
from typing_extensions import Buffer

from pykv.scheduler_config import SchedulerConfig

__all__ = [
    "BlockPool",
    "BlockTable",
    "CacheHits",
    "CpuAttention",
    "Plan",
    "PrefixCache",
    "RequestSummary",
    "Scheduler",
    "SchedulerStats",
    "StepBuffers",
    "TimedReplay",
    "Trace",
    "_panic",
    "check_options",
    "content_keys",
    "max_seq_len",
    "most_blocks",
    "option_ranges",
    "replay_recording",
]

_Array: TypeAlias = Buffer | NDArray[Any]
# Addresses, shapes and strides of tensors.
_Activation: TypeAlias = tuple[int, tuple[int, int, int], tuple[int, int, int], int]
_Cache: TypeAlias = tuple[int, tuple[int, int, int, int], tuple[int, int, int, int], int]
_TokenScales: TypeAlias = tuple[int, tuple[int, int, int, int]]
_Flat: TypeAlias = tuple[int, int]
_Step: TypeAlias = tuple[tuple[int, tuple[int, ...], tuple[int, ...]], _Flat, _Flat, _Flat | None]
# (sequence, dropped, kinds, keys, parents, is_first, tokens), the arrays as bytes.
_KvEvents: TypeAlias = tuple[int, int, bytes, bytes, bytes, bytes, bytes]

@final
class StepBuffers:
    def __new__(
        cls,
        *,
        token_ids: _Array,
        token_sources: _Array,
        positions: _Array,
        slot_mapping: _Array,
        query_starts: _Array,
        seq_lens: _Array,
        table_rows: _Array,
        block_tables: _Array,
        swap_out_pairs: _Array,
        swap_in_pairs: _Array,
        copy_pairs: _Array,
        state_slots: _Array,
        state_restore_pairs: _Array,
        state_save_pairs: _Array,
        sample_indices: _Array,
        sample_rows: _Array,
        sample_positions: _Array,
        placed_requests: _Array,
        placed_children: _Array,
        placed_rows: _Array,
        finish_reasons: _Array,
        page_lists: tuple[_Array, _Array, _Array] | None = None,
    ) -> StepBuffers: ...

@final
class Plan:
    """A step that was planned: how many entries of its buffers are filled."""

    @property
    def id(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_batch_rows(self) -> int: ...
    @property
    def num_decodes(self) -> int: ...
    @property
    def num_draft_rows(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_swap_outs(self) -> int: ...
    @property
    def num_swap_ins(self) -> int: ...
    @property
    def num_copies(self) -> int: ...
    @property
    def num_state_restores(self) -> int: ...
    @property
    def num_state_saves(self) -> int: ...
    @property
    def num_placed(self) -> int: ...
    @property
    def scheduler(self) -> int: ...
    @property
    def buffers(self) -> StepBuffers: ...

@final
class RequestSummary:
    """A request that has ended."""

    @property
    def request(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found when it started first."""
    @property
    def partial_hit_tokens(self) -> int: ...
    @property
    def missed_never_seen(self) -> int: ...
    @property
    def missed_evicted(self) -> int:
        """Full blocks that were cached once: evicted, or there without a window's blocks or a checkpoint of states."""
    @property
    def missed_other_scope(self) -> int: ...
    @property
    def missed_in_flight(self) -> int: ...
    @property
    def missed_cap(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed after a preemption though the sequence had held their K and V, its first hits included."""
    @property
    def swapped_blocks(self) -> int: ...
    @property
    def stalled_seconds(self) -> float: ...
    @property
    def expired(self) -> bool: ...
    @property
    def aborted(self) -> bool: ...
    @property
    def failed(self) -> bool: ...

@final
class SchedulerStats:
    """What a scheduler counts."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait; a request counts each of its samples, here and in the next two."""
    @property
    def num_running(self) -> int: ...
    @property
    def num_paused(self) -> int: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def num_scopes(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def blocks_free(self) -> int: ...
    @property
    def blocks_cached(self) -> int: ...
    @property
    def blocks_active(self) -> int: ...
    @property
    def tokens_held(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int:
        """The same over all requests."""
    @property
    def swapped_out_blocks(self) -> int: ...
    @property
    def swapped_in_blocks(self) -> int: ...
    @property
    def host_blocks_total(self) -> int: ...
    @property
    def host_blocks_free(self) -> int: ...
    @property
    def prefix_queried_tokens(self) -> int: ...
    @property
    def prefix_hit_tokens(self) -> int: ...
    @property
    def partial_hit_tokens(self) -> int: ...
    @property
    def draft_tokens(self) -> int: ...
    @property
    def accepted_draft_tokens(self) -> int: ...
    @property
    def missed_never_seen(self) -> int: ...
    @property
    def missed_evicted(self) -> int: ...
    @property
    def missed_other_scope(self) -> int: ...
    @property
    def missed_in_flight(self) -> int: ...
    @property
    def missed_cap(self) -> int: ...
    @property
    def forgotten_keys(self) -> int:
        """Evicted blocks that made room in the cache's memory of them, over the scheduler's life."""
    @property
    def evictions(self) -> int: ...
    @property
    def num_sessions(self) -> int: ...
    @property
    def pinned_blocks(self) -> int: ...
    @property
    def state_slots_total(self) -> int: ...
    @property
    def state_slots_free(self) -> int: ...
    @property
    def state_slots_working(self) -> int: ...
    @property
    def state_checkpoints(self) -> int: ...
    @property
    def state_checkpoint_evictions(self) -> int: ...
    @property
    def peak_blocks_active(self) -> int:
        """The most blocks that were ever active. The next four are of that moment: they are no maxima and can fall."""
    @property
    def peak_tokens_held(self) -> int:
        """Tokens in those blocks, one that several sequences share counted once."""
    @property
    def peak_table_blocks(self) -> int:
        """Blocks that the same sequences would have used unshared."""
    @property
    def peak_table_tokens(self) -> int:
        """Tokens of the same sequences, a shared one counted for each."""
    @property
    def peak_num_sequences(self) -> int:
        """The same sequences: those that ran, or were paused and had not given way; a request counts each sample."""
    @property
    def peak_num_running(self) -> int:
        """The most sequences that ever ran at once, whenever that was; a request counts each of its samples."""

@final
class Scheduler:
    def __new__(cls, config: SchedulerConfig, hash_seed: int) -> Scheduler: ...
    def submit(
        self,
        prompt: _Array,
        *,
        max_tokens: int | None,
        num_samples: int,
        scope: bytes,
        reuse_cached: bool,
        tenant: bytes,
        priority: int,
        deadline: float | None,
        session: bytes | None,
        ttl: float | None,
        next_turn: float | None,
        retention_priority: int,
        media: list[tuple[int, bytes]],
    ) -> int: ...
    def cached_tokens(self, tokens: _Array, scope: bytes) -> int: ...
    def num_cached_tokens(self, request: int) -> int | None: ...
    def take_events(self) -> _KvEvents: ...
    def snapshot_events(self) -> _KvEvents: ...
    def end_session(self, session: bytes, tenant: bytes) -> bool: ...
    def pin(self, tokens: _Array, scope: bytes, tenant: bytes) -> tuple[int, int, int] | None:
        """(number, tokens, blocks) of the pin, if anything is cached."""

    def unpin(self, pin: int) -> bool: ...
    def set_cache_share(self, tenant: bytes, share: float) -> None: ...
    def abort(self, request: int) -> bool: ...
    def pause(self, request: int) -> bool: ...
    def resume(self, request: int) -> bool: ...
    def plan(self, buffers: StepBuffers, now: float) -> Plan | None: ...
    def propose(self, rows: _Array, starts: _Array, tokens: _Array) -> None: ...
    def apply(
        self,
        plan: Plan,
        sampled: _Array,
        outcomes: _Array,
        failed_rows: _Array | None = None,
        accepted: _Array | None = None,
    ) -> list[RequestSummary]: ...
    def discard(self, plan: Plan) -> None: ...
    def set_costs(self, *, seconds_per_token: float, seconds_per_block: float) -> None: ...
    def start_recording(self) -> bool: ...
    def take_recording(self, at_least: int) -> bytes | None: ...
    def finish_recording(self) -> bytes: ...
    def stop_recording(self) -> None: ...
    def take_ended(self) -> list[RequestSummary]: ...
    def reset_prefix_cache(self) -> None: ...
    def stats(self) -> SchedulerStats: ...
    def check(self) -> None: ...
    def _panic(self) -> None: ...

@final
class BlockPool:
    def __new__(cls, num_blocks: int, block_size: int) -> BlockPool: ...
    def table(self) -> BlockTable: ...
    def references(self, block_id: int) -> int: ...
    def count(self) -> tuple[int, int, int, int]:
        """(free, cached, active, total) blocks."""

@final
class BlockTable:
    def __len__(self) -> int: ...
    def block_ids(self) -> list[int]: ...
    def extend(self, count: int) -> None: ...
    def fork(self) -> BlockTable: ...
    def truncate(self, len: int) -> None: ...
    def is_writable(self, index: int) -> bool: ...
    def copy_on_write(self, index: int) -> tuple[int, int]: ...
    def _panic(self) -> None: ...

@final
class PrefixCache:
    def __new__(cls, pool: BlockPool, hash_seed: int, eviction: str) -> PrefixCache: ...
    def probe(self, tokens: _Array, scope: bytes, max_blocks: int) -> int: ...
    def share(self, tokens: _Array, scope: bytes, max_blocks: int) -> tuple[BlockTable, int]: ...
    def extend(self, table: BlockTable, count: int) -> None: ...
    def copy_on_write(self, table: BlockTable, index: int) -> tuple[int, int]: ...
    def publish(self, table: BlockTable, tokens: _Array, scope: bytes, num_tokens: int) -> bool: ...
    def reset(self) -> None: ...
    def count(self) -> tuple[int, int, int, int, int]:
        """(free, cached, active, total) blocks, and how often one was evicted."""
    def check(self) -> None: ...

@final
class CpuAttention:
    """Attention on the CPU: its threads and scratch memory."""

    def __new__(cls, instructions: str | None = None) -> CpuAttention: ...
    @property
    def instructions(self) -> str:
        """The name of the instructions that are used."""

    def paged_attention(
        self,
        query: _Activation,
        key_cache: _Cache,
        value_cache: _Cache,
        out: _Activation,
        step: _Step,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: _Flat | None,
        tensor_scales: tuple[float, float] | None,
        token_scales: _TokenScales | None,
        log_sum_exp: tuple[int, tuple[int, ...]] | None,
        num_threads: int,
        share_prefixes: bool,
    ) -> None:
        """Fills `out`. The caller keeps the tensors alive and lets nobody write them meanwhile."""

    def write_kv(
        self,
        key: _Activation,
        value: _Activation,
        key_cache: _Cache,
        value_cache: _Cache,
        slots: _Flat,
        tensor_scales: tuple[float, float] | None,
        token_scales: _TokenScales | None,
        num_threads: int,
    ) -> None:
        """Writes each token's key and value to its slot."""

    def copy_blocks(self, caches: list[_Cache], pairs: _Flat, num_threads: int) -> None:
        """Copies each pair's first block to its second, in every cache."""

    def transfer_blocks(
        self, sources: list[_Cache], targets: list[_Cache], pairs: _Flat, num_threads: int
    ) -> None:
        """Copies each pair's first block of a source to its second block of the target at the same place."""

    def read(self, address: int, num_words: int, num_threads: int) -> int: ...

def _panic() -> None: ...
def replay_recording(bytes: bytes, allow_cut: bool) -> tuple[int, int, bool]:
    """Makes the calls of a recording again: how many there were, how many planned a step, and whether it is cut."""

def content_keys(tokens: _Array, block_size: int, scope: bytes, media: list[tuple[int, bytes]]) -> bytes:
    """The content keys of a prompt's full blocks, 32 bytes each, behind the scope's root key."""

def most_blocks(num_tokens: int, *, block_size: int, windows: list[int], chunk: int) -> int: ...
def option_ranges() -> list[tuple[str, int, int]]:
    """The options that are whole numbers, each with the least and the most that it may be, whatever the others are."""

def check_options(config: SchedulerConfig) -> None:
    """Refuses options that no scheduler takes."""

def max_seq_len(config: SchedulerConfig) -> int:
    """The most tokens that one sequence can ever have."""

@final
class CacheHits:
    """What a cache has found of what was asked for."""

    @property
    def blocks(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def queried_blocks(self) -> int: ...
    @property
    def queried_tokens(self) -> int: ...
    @property
    def evictions(self) -> int: ...

@final
class TimedReplay:
    """A timed replay that has ended: numbers, and columns by request and by point in time."""

    def totals(self) -> list[tuple[str, float]]:
        """The totals by name."""
    def request_column(self, name: str) -> list[float]:
        """A column of the requests by name, in the order of the trace."""
    def point_column(self, name: str) -> list[float]:
        """A column of the points in time by name."""

@final
class Trace:
    """A trace that was checked."""

    def __new__(
        cls,
        *,
        block_size: int,
        arrivals: _Array,
        prompt_tokens: _Array,
        output_tokens: _Array,
        sessions: _Array,
        num_runs: _Array,
        run_starts: _Array,
        run_lengths: _Array,
    ) -> Trace: ...
    @staticmethod
    def from_recording(bytes: bytes) -> Trace:
        """The trace of a recording."""
    @property
    def num_requests(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def lengths(self) -> tuple[list[int], list[int]]:
        """The tokens of each prompt and of each output, in the order of the trace."""
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def longest_request(self) -> int: ...
    def with_block_size(self, block_size: int) -> Trace:
        """The same trace in blocks of another size."""
    def replay_timed(
        self,
        config: SchedulerConfig,
        cost: object,
        *,
        allocator: str,
        knows_outputs: bool,
        retention: str,
        speed: float,
        concurrency: int | None,
    ) -> TimedReplay:
        """A replay in virtual time."""
    def replay_serial(self, num_blocks: int, policy: str) -> CacheHits:
        """Serial replay under a policy of this package."""
    def replay_ranked(self, num_blocks: int, rank: Callable[[int, bytes, int], NDArray[Any]]) -> CacheHits:
        """Serial replay that asks `rank(request, blocks, found)` for the ranks of each use."""
    def replay_infinite(self) -> CacheHits:
        """Serial replay on a cache that forgets nothing."""
