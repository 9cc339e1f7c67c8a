"""A plan: what a model's KV cache takes, how many requests fit, what the limit is and what would move it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pykv.planner.evaluation import (
    PERCENTILES,
    Evaluation,
    context_cap,
    evaluate,
    request_lengths,
    whole_footprint,
)
from pykv.planner.footprint import Footprint, LayerGroup, kv_bytes, layer_groups
from pykv.planner.formats import is_eight_bit, kv_format, scale_bytes
from pykv.planner.levers import Lever, find_levers
from pykv.planner.limits import Limit, find_limit
from pykv.planner.memory import KvBudget
from pykv.planner.model_facts import ModelFacts, read_model
from pykv.planner.options import PlanOptions, read_options

__all__ = ["KvPlan", "UserLoad", "plan"]

CURVE_TOKENS = (1, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
WHAT_IF_DTYPES = ("int8", "fp8")
ASSUMED_OF_LENGTHS = (
    "requests stay in the pool for equally long, whatever their length, as where long ones are long by their prompts; "
    "where they are long by their outputs they stay for longer, the pool holds more of them than came, and it is "
    "passed more often than the risk says: a trace, which tells prompts from outputs, is planned for that"
)
ASSUMED_OF_TRACE = "requests stay in the pool for as long as their outputs are, as the trace has them"
"""Of which loads the chance holds that a mix of so many passes the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLoad:
    """What a number of requests holds.

    Attributes:
        users: the number: as asked for, else those of a mix that fit.
        kv_bytes: that they hold at the mean of their lengths, in blocks, a shared prefix once.
        weights_passed_at: the first user with whom this is more than the weights; None: the weights are not known.
        gpus_needed: for so many of the mix, in whole copies of the model; None: nothing is known about the memory, or
            not even one fits.
    """

    users: int
    kv_bytes: int
    weights_passed_at: int | None
    gpus_needed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """What `plan` found. Bytes are of the whole model unless a rank is named.

    Attributes:
        model: its name.
        storage: "engine": promises are of what pykv's pool stores; "formula": of the least that the model can take,
            with windows that give back, latents stored as such and states in a place of their own.
        engine_refusal: why pykv does not serve the model; empty: it does.
        kv_dtype, block_size: of the pool.
        kv_bytes_per_token: keys and values of one token, by the formula, without scales.
        kv_scale_bytes_per_token: the scales of an 8-bit cache beside them.
        engine_kv_bytes_per_token: what pykv's pool stores for one token, scales included; None: it does not serve it.
        state_bytes_per_request: of layers that keep a state.
        kv_bytes_at: by tokens, keys and values of one request by the formula: flatter where windows cap it.
        stored_kv_bytes_at: by tokens, the blocks that one request takes in the storage planned for.
        rank_kv_bytes_at: the same on one rank of a tensor-parallel group.
        groups: the layers, kind by kind.
        weights_bytes, weights_dtype, weights_source: None: not known.
        gpu: its name; None: none was named.
        num_gpus, tensor_parallel, num_replicas: each replica is an engine with a pool of its own.
        budget: how the memory of a rank is parted; None: no memory was given.
        num_blocks: of an engine's pool, the null block included; None: neither memory nor blocks were given.
        rank_block_bytes: of one block on one rank.
        lengths: "mean", "p50", "p90", "p99", "max" of the requests, in tokens; None: not known.
        lengths_source: where they are from.
        watermark: the share of the blocks that an admission leaves free.
        context_cap: the most tokens of a request; None: not known.
        share_beyond_cap: of the requests, which end there.
        requests: how many fit on all GPUs together, if all are as long as "p50", "p90", "p99" or the "cap"; "mix": of
            lengths drawn at random; None: nothing is known about the memory.
        requests_with: the same with and without a shared prefix, and with int8 and fp8.
        risk, mix_method: the chance that a mix of so many passes the pool, and how the number was found (`Mix`).
        mix_assumes: of which loads the chance holds; None: there is no mix, or all are of one length.
        users: what a number of them holds; None: no lengths.
        kv_to_weights: the bytes of these users' KV over those of the weights.
        limit: what holds the number back; None: nothing is known about the memory.
        levers: what would move it, the best first.
        read_seconds: a decode step at a full pool takes at least so long: weights and cache over the memory's
            bandwidth; None: the GPU is not known.
    """

    model: str
    storage: str
    engine_refusal: str
    kv_dtype: str
    block_size: int
    kv_bytes_per_token: int
    kv_scale_bytes_per_token: int
    engine_kv_bytes_per_token: int | None
    state_bytes_per_request: int
    kv_bytes_at: dict[int, int]
    stored_kv_bytes_at: dict[int, int]
    rank_kv_bytes_at: dict[int, int]
    groups: tuple[LayerGroup, ...]
    weights_bytes: int | None
    weights_dtype: str | None
    weights_source: str | None
    gpu: str | None
    num_gpus: int
    tensor_parallel: int
    num_replicas: int
    budget: KvBudget | None
    num_blocks: int | None
    rank_block_bytes: int
    lengths: dict[str, float] | None
    lengths_source: str | None
    watermark: float
    context_cap: int | None
    share_beyond_cap: float
    requests: dict[str, int] | None
    requests_with: dict[str, dict[str, int]] | None
    risk: float
    mix_method: str | None
    mix_assumes: str | None
    users: UserLoad | None
    kv_to_weights: float | None
    limit: Limit | None
    levers: tuple[Lever, ...]
    read_seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values that `json.dumps` takes; it writes token counts, as keys, as texts."""
        return dataclasses.asdict(self)


def plan(model: str | os.PathLike[str] | Mapping[str, Any] | None = None, **options: Any) -> KvPlan:
    """Plans the KV cache of a model: bytes, blocks, and how many requests fit.

    Args:
        model: a local folder, a config.json, a known name (`pykv plan --list models`), a config's mapping or object;
            None: the numbers below.
        options: by hand: `num_layers`, `num_kv_heads`, `head_dim`, `num_heads`, `window` and `num_window_layers`,
            `latent_dim`, `state_bytes`. Memory: `gpu` (a known name) or `memory` (bytes, or a text such as "80GiB";
            one for each GPU if they differ), `num_gpus`, `tensor_parallel` (all GPUs), `utilization` (0.9), `reserve`,
            `in_use`, or `num_blocks` alone. Weights: `weights_dtype`, `num_parameters` or `weights_bytes`. Cache:
            `kv_dtype` ("bf16"), `kv_scales` ("token_head"), `block_size` (16), `storage` ("engine" or "formula").
            Requests: `context` (tokens, or percentiles: "p50=2000,p90=8000,max=32000"), `histogram` or `trace` (files),
            `max_model_len`, `max_num_seqs`, `watermark` (0), `shared_prefix`, `users`, `risk` (0.01).

    Raises:
        ConfigError: an option is unknown, not allowed, or contradicts another; or nothing is left for the cache.
        TraceError: a line of the trace is malformed.
        ModelError, UnsupportedModelError: the model's files cannot be read, or its layers are of no known kind.
    """
    return plan_options(read_options({"model": model, **options}))


def plan_options(options: PlanOptions) -> KvPlan:
    """The plan of options that were checked."""
    facts = read_model(options)
    now = evaluate(options, facts)
    whole = whole_footprint(options, facts)
    lengths = request_lengths(options, facts)
    cap = context_cap(options, facts)
    groups = layer_groups(facts.layout, options.kv_format)
    weights = facts.weights
    users = _user_load(options, facts, whole, now)
    curve = _curve(options, facts)
    return KvPlan(
        model=facts.name,
        storage=options.storage if facts.engine is not None else "formula",
        engine_refusal=facts.engine_refusal,
        kv_dtype=options.kv_format.name,
        block_size=options.block_size,
        kv_bytes_per_token=sum(group.kv_bytes_per_token for group in groups),
        kv_scale_bytes_per_token=sum(group.kv_scale_bytes_per_token for group in groups),
        engine_kv_bytes_per_token=_engine_bytes_per_token(options, facts),
        state_bytes_per_request=facts.state.bytes_per_sequence,
        kv_bytes_at={
            num_tokens: kv_bytes(groups, num_tokens, facts.state.bytes_per_sequence) for num_tokens in curve
        },
        stored_kv_bytes_at={num_tokens: whole.request_bytes(num_tokens) for num_tokens in curve},
        rank_kv_bytes_at={num_tokens: now.rank.request_bytes(num_tokens) for num_tokens in curve},
        groups=groups,
        weights_bytes=None if weights is None else weights.num_bytes,
        weights_dtype=None if weights is None else weights.dtype,
        weights_source=None if weights is None else weights.source,
        gpu=None if options.gpu is None else options.gpu.name,
        num_gpus=options.num_gpus,
        tensor_parallel=options.tensor_parallel,
        num_replicas=options.num_replicas,
        budget=now.budget,
        num_blocks=now.num_blocks,
        rank_block_bytes=now.rank.block_bytes,
        lengths=_summary(options, facts),
        lengths_source=None if lengths is None else lengths.source,
        watermark=options.watermark,
        context_cap=cap,
        share_beyond_cap=options.lengths.share_beyond(cap) if options.lengths and cap else 0.0,
        requests=now.requests,
        requests_with=_requests_with(options, facts, now),
        risk=options.risk,
        mix_method=None if now.mix is None else now.mix.method,
        mix_assumes=_mix_assumes(options, now),
        users=users,
        kv_to_weights=None if weights is None or users is None else users.kv_bytes / weights.num_bytes,
        limit=find_limit(options, facts, now),
        levers=find_levers(options, facts, now),
        read_seconds=_read_seconds(options, facts, now),
    )


def _engine_bytes_per_token(options: PlanOptions, facts: ModelFacts) -> int | None:
    if facts.engine is None:
        return None
    return sum(group.stored_bytes_per_token for group in layer_groups(facts.engine.layout, options.kv_format))


def _curve(options: PlanOptions, facts: ModelFacts) -> list[int]:
    """The token counts at which bytes are reported: powers of two, the windows, the percentiles and the cap."""
    lengths, cap = request_lengths(options, facts), context_cap(options, facts)
    own = [] if lengths is None else [lengths.percentile(percent) for percent in PERCENTILES.values()]
    longest = [] if lengths is None else [int(lengths.tokens[-1])]
    windows = [layer.window for layer in facts.layout.layers if layer.window is not None]
    return sorted({*CURVE_TOKENS, *own, *longest, *windows, *([] if cap is None else [cap])})


def _summary(options: PlanOptions, facts: ModelFacts) -> dict[str, float] | None:
    lengths = request_lengths(options, facts)
    if lengths is None:
        return None
    percentiles = {name: lengths.percentile(percent) for name, percent in PERCENTILES.items()}
    return {"mean": round(lengths.mean, 1), **percentiles, "max": int(lengths.tokens[-1])}


def _requests_with(
    options: PlanOptions, facts: ModelFacts, now: Evaluation
) -> dict[str, dict[str, int]] | None:
    """The requests without the shared prefix, and with 8-bit caches with and without it."""
    if now.requests is None:
        return None
    cases = {"shared_prefix": options, "no_shared_prefix": replace(options, shared_prefix=0)}
    if not options.shared_prefix:
        cases.pop("shared_prefix")
    per_tensor = is_eight_bit(options.kv_format) and not scale_bytes(options.kv_format)
    scales = "tensor" if per_tensor else "token_head"
    for dtype in WHAT_IF_DTYPES:
        eight_bit = replace(options, kv_format=kv_format(dtype, scales))
        cases[dtype] = replace(eight_bit, shared_prefix=0)
        if options.shared_prefix:
            cases[f"{dtype}_shared_prefix"] = eight_bit
    found = {}
    for name, case in cases.items():
        requests = now.requests if case is options else evaluate(case, facts).requests
        found[name] = requests or {}
    return found


def _mix_assumes(options: PlanOptions, now: Evaluation) -> str | None:
    if now.mix is None or options.lengths is None or len(options.lengths.tokens) == 1:
        return None
    return ASSUMED_OF_LENGTHS if options.held is None else ASSUMED_OF_TRACE


def _user_load(options: PlanOptions, facts: ModelFacts, whole: Footprint, now: Evaluation) -> UserLoad | None:
    lengths = request_lengths(options, facts)
    fitting = None if now.requests is None else now.requests.get("mix")
    users = options.users or fitting
    if lengths is None or not users:
        return None
    shared = whole.shared_bytes(options.shared_prefix)
    own = whole.own_bytes(lengths.tokens, options.shared_prefix)
    mean = float(np.dot(own.astype(np.float64), lengths.counts) / lengths.total)
    passed = None
    if facts.weights is not None:
        passed = max(1, math.floor((facts.weights.num_bytes - shared) / mean) + 1)
    needed = None
    if fitting:
        each = fitting // options.num_replicas
        needed = -(-users // each) * options.tensor_parallel
    return UserLoad(
        users=users, kv_bytes=round(shared + users * mean), weights_passed_at=passed, gpus_needed=needed
    )


def _read_seconds(options: PlanOptions, facts: ModelFacts, now: Evaluation) -> float | None:
    if options.gpu is None or now.usable_bytes is None or facts.weights is None:
        return None
    weights = facts.weights.num_bytes / options.tensor_parallel
    return (weights + now.usable_bytes) / options.gpu.bandwidth_bytes_per_second
