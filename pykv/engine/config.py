"""The engine's options: one frozen object, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pykv.errors import ConfigError
from pykv.field_checks import as_boolean, as_integer, as_number_in, is_integer, one_of, refuse, shown
from pykv.kv_format import DtypeFormat, kv_format_names, kv_format_of
from pykv.near_names import near_or_all
from pykv.scheduler_config import SchedulerConfig

ADMISSIONS = ("forecast", "watermark")
QUEUE_ORDERS = ("fcfs", "longest_prefix", "fair_share")
EVICTIONS = ("lru", "segmented_lru")
DTYPES = ("auto", "float32", "bfloat16")
PREEMPTIONS = ("auto", "recompute", "swap")
ATTENTION_BACKENDS = ("auto", "cpu", "torch", "triton")
DEFAULT_KV_MEMORY_BYTES = 2**30
MOST_BYTES = 2**48
MOST_PENDING_TOKENS = 2**30
"""Tokens that a stream's reader may be behind."""
MOST_SLOTS = 2**31
"""Tokens that a scheduler's pool may hold."""

SCHEDULER_OPTIONS = (
    "admission",
    "block_size",
    "enable_prefix_caching",
    "eviction",
    "max_chunk_tokens",
    "max_kv_events",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_pinned_blocks",
    "max_queued_requests",
    "max_queued_tokens",
    "partial_block_reuse",
    "preemption",
    "queue_order",
    "tenant_cache_share",
    "watermark",
)
"""Options that the scheduler takes as they are; it knows their bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of an engine.

    Args:
        block_size: tokens a block.
        num_blocks: blocks of the KV pool, with the null block; None = as many as fit in `kv_memory_bytes`.
        kv_memory_bytes: size of the KV pool; None = 1 GiB, or on a GPU what `gpu_memory_utilization` leaves. Only one
            of the two may be given.
        gpu_memory_utilization: share of a GPU's memory that the engine may take, weights included; what other processes
            hold is not counted as this one's.
        max_model_len: most tokens of a sequence, prompt and output; None = the model's.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens that one step computes.
        max_chunk_tokens: most tokens of one sequence that one step computes; None = no cap but the step's.
        dtype: of the weights; "auto" = the model's own, or float32 where that is not served.
        kv_dtype: the format of the KV pool, one of `pykv.kv_format_names()`; "auto" = the weights' dtype. "int8" and
            "fp8" keep a float32 scale for each token and head, unless `kv_scales` are given.
        kv_scales: for an 8-bit `kv_dtype`: the scale of all keys and that of all values; None = one a token and head.
        device: a torch device such as "cpu" or "cuda:0"; "auto" = the first accelerator, else the CPU.
        attention_backend: "auto" takes the compiled one of the device.
        cuda_graphs: on a GPU, record the decodes of each batch size when the engine starts, and replay them.
        swap_space_bytes: host memory for the blocks of preempted sequences; 0 = none.
        preemption: how a preempted sequence comes back: "recompute", "swap" where the swap space has room, or "auto":
            what costs less, by what was measured.
        enable_prefix_caching: keep the blocks of ended requests for later ones that begin alike.
        partial_block_reuse: where a prompt's hit ends inside a cached block, the fewest tokens of that block that are
            reused by copying it, up to `block_size - 1`; 0 = a hit is whole blocks.
        watermark: share of the blocks that an admission leaves free for the sequences that run.
        admission: "forecast" admits a request when the worst moment to come fits the pool too, if outputs turn
            out as long as expected; "watermark" when its blocks can be given now.
        max_queued_requests: most samples that wait; more are refused.
        max_queued_tokens: most tokens of prompts that wait; more are refused; None = no limit.
        queue_order: who of those that wait is next: "fcfs" = who came first, "longest_prefix" = who finds most of the
            prompt in the cache, "fair_share" = equal shares of tokens for all tenants.
        eviction: which cached blocks make room first, where sessions, shares and priorities do not say: "lru" = those
            used least recently, "segmented_lru" = before them, those that no hit has found yet.
        tenant_cache_share: share of the blocks, from 0 to 1, that a tenant's own cached ones may fill before they make
            room first; `Engine.set_cache_share` sets one tenant's.
        max_pinned_blocks: most blocks that may be pinned (`Engine.pin`); sequences must fit beside them.
        max_kv_events: most events about cached blocks that wait to be taken; 0 = none are kept, which costs nothing.

    Raises:
        ConfigError: a value is not allowed.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kv_scales: tuple[float, float] | None = None
    device: str = "auto"
    attention_backend: str = "auto"
    cuda_graphs: bool = True
    swap_space_bytes: int = 0
    preemption: str = "auto"
    enable_prefix_caching: bool = True
    partial_block_reuse: int = 0
    watermark: float = 0.01
    admission: str = "forecast"
    max_queued_requests: int = 1024
    max_queued_tokens: int | None = None
    queue_order: str = "fcfs"
    eviction: str = "lru"
    tenant_cache_share: float = 1.0
    max_pinned_blocks: int = 0
    max_kv_events: int = 0

    def __post_init__(self) -> None:
        self._check_choices()
        self._check("gpu_memory_utilization", as_number_in, 0.0, 1.0, ConfigError, above_low=True)
        self._check("swap_space_bytes", as_integer, 0, MOST_BYTES, ConfigError)
        if self.kv_memory_bytes is not None:
            self._check("kv_memory_bytes", as_integer, 1, MOST_BYTES, ConfigError)
        if self.num_blocks is not None and self.kv_memory_bytes is not None:
            raise ConfigError("num_blocks and kv_memory_bytes are both given: allowed is one of them")
        if self.preemption == "swap" and not self.swap_space_bytes:
            refuse("swap_space_bytes", 0, "some blocks' bytes where preemption is 'swap'", ConfigError)
        self._check_scales()
        self._take_from_scheduler()

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Makes the config from named options.

        Raises:
            ConfigError: an option is unknown, or its value is not allowed.
        """
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"{unknown[0]} is no engine option; {near_or_all(unknown[0], known)}")
        return cls(**options)

    def _check_choices(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("kv_dtype", self.kv_dtype, ("auto", *kv_format_names()))
        one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        one_of("preemption", self.preemption, PREEMPTIONS)
        one_of("queue_order", self.queue_order, QUEUE_ORDERS)
        as_boolean("cuda_graphs", self.cuda_graphs, ConfigError)
        if not isinstance(self.device, str) or not self.device:
            refuse("device", self.device, 'the name of a torch device, or "auto"', ConfigError)

    def _check_scales(self) -> None:
        scales = self.kv_scales
        if scales is None:
            return
        if not isinstance(scales, (tuple, list)) or len(scales) != 2:
            refuse(
                "kv_scales", scales, "two finite numbers above 0, of the keys and of the values", ConfigError
            )
        form = None if self.kv_dtype == "auto" else kv_format_of(self.kv_dtype)
        if not isinstance(form, DtypeFormat):
            raise ConfigError(
                f"kv_scales is {shown(scales)}, but kv_dtype is {self.kv_dtype!r}: allowed with int8, fp8"
            )
        self._set("kv_scales", form.with_tensor_scales(*scales).tensor_scales)

    def _take_from_scheduler(self) -> None:
        """Has the scheduler's own checks look at what is for it, with the pool as large as may be, and a host."""
        known = {"num_blocks": self.num_blocks, "max_model_len": self.max_model_len}
        given = {name: value for name, value in known.items() if value is not None}
        most_blocks = MOST_SLOTS // self.block_size if _divides_slots(self.block_size) else 2
        assumed = {"num_blocks": most_blocks, "num_host_blocks": 2 if self.swap_space_bytes else 0}
        checked = scheduler_config(self, **assumed | given)
        for name in (*SCHEDULER_OPTIONS, *given):
            self._set(name, getattr(checked, name))
        for name in ("watermark", "tenant_cache_share"):
            self._set(name, float(getattr(self, name)))

    def _check(self, name: str, check: Callable[..., object], *bounds: Any, **ends: bool) -> None:
        self._set(name, check(name, getattr(self, name), *bounds, **ends))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _divides_slots(block_size: object) -> bool:
    """Whether a pool may have two blocks of this size or more; else its refusal is the scheduler's."""
    return is_integer(block_size) and 0 < block_size <= MOST_SLOTS // 2


def scheduler_config(config: EngineConfig, **of_the_model: Any) -> SchedulerConfig:
    """What the scheduler is told: the engine's options, and what only the model and its pool say.

    Raises:
        ConfigError: see `SchedulerConfig`.
    """
    own = {name: getattr(config, name) for name in SCHEDULER_OPTIONS}
    return SchedulerConfig(**own | of_the_model)
