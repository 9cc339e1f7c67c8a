"""The engine's options: one frozen object, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pykv.errors import ConfigError
from pykv.kv_format import DtypeFormat, kv_format_names, kv_format_of

ADMISSIONS = ("forecast", "watermark")
QUEUE_ORDERS = ("fcfs", "longest_prefix", "fair_share")
EVICTIONS = ("lru", "segmented_lru")
DTYPES = ("auto", "float32", "bfloat16")
PREEMPTIONS = ("auto", "recompute", "swap")
ATTENTION_BACKENDS = ("auto", "cpu", "torch", "triton")
DEFAULT_KV_MEMORY_BYTES = 2**30


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
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_queued_requests"):
            _check_integer(name, getattr(self, name), 1)
        optional = {
            "num_blocks": 2,
            "kv_memory_bytes": 1,
            "max_model_len": 2,
            "max_chunk_tokens": 1,
            "max_queued_tokens": 1,
        }
        for name, least in optional.items():
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), least)
        if self.num_blocks is not None and self.kv_memory_bytes is not None:
            raise ConfigError("num_blocks and kv_memory_bytes are both given; allowed: one of them")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kv_dtype", self.kv_dtype, ("auto", *kv_format_names()))
        _check_scales(self.kv_scales, self.kv_dtype)
        _check_integer("swap_space_bytes", self.swap_space_bytes, 0)
        _check_choice("preemption", self.preemption, PREEMPTIONS)
        if self.preemption == "swap" and not self.swap_space_bytes:
            raise ConfigError(
                "preemption is 'swap', but swap_space_bytes is 0; allowed: a swap space of some blocks"
            )
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if not isinstance(self.device, str) or not self.device:
            _refuse("device", self.device, 'the name of a torch device, or "auto"')
        for name in ("enable_prefix_caching", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "true or false")
        _check_utilization("gpu_memory_utilization", self.gpu_memory_utilization)
        _check_integer("partial_block_reuse", self.partial_block_reuse, 0)
        if self.partial_block_reuse >= self.block_size:
            _refuse(
                "partial_block_reuse",
                self.partial_block_reuse,
                f"0 to {self.block_size - 1}, less than a block",
            )
        _check_share("watermark", self.watermark)
        _check_choice("admission", self.admission, ADMISSIONS)
        _check_choice("queue_order", self.queue_order, QUEUE_ORDERS)
        _check_choice("eviction", self.eviction, EVICTIONS)
        _check_share("tenant_cache_share", self.tenant_cache_share, may_be_all=True)
        _check_integer("max_pinned_blocks", self.max_pinned_blocks, 0)
        _check_integer("max_kv_events", self.max_kv_events, 0, 24)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Makes the config from named options.

        Raises:
            ConfigError: an option is unknown, or its value is not allowed.
        """
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"{unknown[0]} is no engine option; known: {', '.join(sorted(known))}")
        return cls(**options)


def _check_integer(name: str, value: object, least: int, most_bits: int = 48) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**most_bits:
        _refuse(name, value, f"an integer from {least} to 2^{most_bits}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        _refuse(name, value, ", ".join(choices))


def _check_scales(scales: object, kv_dtype: str) -> None:
    if scales is None:
        return
    is_pair = isinstance(scales, (tuple, list)) and len(scales) == 2
    if not is_pair or not all(isinstance(scale, (int, float)) for scale in scales):  # type: ignore[attr-defined]
        _refuse("kv_scales", scales, "two finite numbers above 0, of the keys and of the values")
    form = None if kv_dtype == "auto" else kv_format_of(kv_dtype)
    if not isinstance(form, DtypeFormat):
        raise ConfigError(f"kv_scales is {scales!r}, but kv_dtype is {kv_dtype!r}; allowed with: int8, fp8")
    form.with_tensor_scales(*scales)  # type: ignore[misc]


def _check_share(name: str, value: object, may_be_all: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if may_be_all and is_number and value == 1:
        return
    if not is_number or math.isnan(value) or not 0.0 <= value < 1.0:  # type: ignore[arg-type, operator]
        _refuse(name, value, f"a number from 0 to {'' if may_be_all else 'below '}1")


def _refuse(name: str, value: object, allowed: str) -> None:
    raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")


def _check_utilization(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0.0 < value <= 1.0:  # type: ignore[operator]
        _refuse(name, value, "a number above 0, at most 1")
