"""What could be changed, and what it would bring: each lever is the same plan evaluated again with one change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from pykv.errors import ConfigError
from pykv.layout import KvLayer, KvLayout
from pykv.planner.engine_storage import EngineStorage
from pykv.planner.evaluation import Evaluation, evaluate, request_lengths
from pykv.planner.formats import is_eight_bit, kv_format
from pykv.planner.model_facts import ModelFacts
from pykv.planner.options import PlanOptions
from pykv.planner.parameters import Parameters
from pykv.planner.weights import Weights, bytes_of_parameters

__all__ = ["Lever", "find_levers"]

WHAT_IF_GROUPS = 8
"""Query heads that share a KV head in the grouped attention of most models."""
WHAT_IF_WINDOW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change and its figure.

    Attributes:
        lever: "kv_dtype", "weights_dtype", "cap", "prefix_sharing", "tensor_parallel", "gqa", "window" or "storage".
        change: in words.
        kind: "setting": an option; "hardware": more GPUs; "model": another model; "engine": what pykv does not do yet;
            "in use": the plan has it already, and the figure is what it brings.
        requests: how many fit with it (for "in use": without it); None: nothing is known about the memory.
        factor: how many times as many requests of the mean length a GPU holds with it ("in use": than without it).
    """

    lever: str
    change: str
    kind: str
    requests: int | None
    factor: float


@dataclass(frozen=True, slots=True)
class _Case:
    """A change of options and model."""

    lever: str
    change: str
    kind: str
    options: PlanOptions
    facts: ModelFacts


def find_levers(options: PlanOptions, facts: ModelFacts, now: Evaluation) -> tuple[Lever, ...]:
    """All levers, those not in use first, the most helpful first."""
    found = []
    for propose in PROPOSALS:
        evaluated = [
            lever for case in propose(options, facts) if (lever := _evaluated(case, now, options, facts))
        ]
        in_use = [lever for lever in evaluated if lever.kind == "in use"]
        found += in_use or sorted(evaluated, key=lambda lever: -lever.factor)[:1]
    return tuple(sorted(found, key=lambda lever: (lever.kind == "in use", -lever.factor)))


def _evaluated(case: _Case, now: Evaluation, options: PlanOptions, facts: ModelFacts) -> Lever | None:
    """None: the change cannot be made, such as ranks that do not divide the heads."""
    try:
        changed = evaluate(case.options, case.facts)
    except ConfigError:
        return None
    factor = _mean_requests(changed, case.options, case.facts) / _mean_requests(now, options, facts)
    factor = 1 / factor if case.kind == "in use" else factor
    after = None if changed.requests is None else changed.requests.get("mix")
    return Lever(
        lever=case.lever, change=case.change, kind=case.kind, requests=after, factor=round(factor, 3)
    )


def _mean_requests(evaluation: Evaluation, options: PlanOptions, facts: ModelFacts) -> float:
    """How many requests of the mean size a GPU's share of the pools holds, no whole number; without a pool: a byte."""
    lengths = request_lengths(options, facts)
    tokens = np.array([1], np.int64) if lengths is None else lengths.tokens
    counts = np.array([1], np.int64) if lengths is None else lengths.counts
    rank, prefix = evaluation.rank, options.shared_prefix
    own = float(np.dot(rank.own_bytes(tokens, prefix).astype(np.float64), counts) / counts.sum())
    if evaluation.usable_bytes is None:
        return 1 / own
    room = max(0, evaluation.usable_bytes - rank.shared_bytes(prefix))
    return max(room / own, 1e-9) * options.num_replicas / options.num_gpus


def _kv_dtype(options: PlanOptions, facts: ModelFacts) -> Iterator[_Case]:
    if is_eight_bit(options.kv_format):
        whole = replace(options, kv_format=kv_format("bf16"))
        yield _Case(
            "kv_dtype", f"a cache of {options.kv_format.name} instead of bf16", "in use", whole, facts
        )
        return
    for dtype, scales, words in (
        ("fp8", "token_head", "a cache of fp8 or int8, a scale for each (token, head)"),
        ("fp8", "tensor", "a cache of fp8, a scale for each tensor"),
    ):
        yield _Case("kv_dtype", words, "setting", replace(options, kv_format=kv_format(dtype, scales)), facts)


def _weights_dtype(options: PlanOptions, facts: ModelFacts) -> Iterator[_Case]:
    weights = facts.weights
    if (
        options.memory_bytes is None
        or weights is None
        or weights.dtype not in ("bfloat16", "float16", "float32")
    ):
        return
    parameters = Parameters(weights.num_bytes * 8 // {"float32": 32}.get(weights.dtype, 16), weights.num_kept)
    smaller = Weights(bytes_of_parameters(parameters, "fp8"), "fp8", weights.source)
    yield _Case(
        "weights_dtype",
        f"weights of fp8 instead of {weights.dtype}",
        "setting",
        options,
        replace(facts, weights=smaller),
    )


def _cap(options: PlanOptions, facts: ModelFacts) -> Iterator[_Case]:
    lengths = request_lengths(options, facts)
    if lengths is None:
        return
    longest, median = int(lengths.tokens[-1]), lengths.percentile(50)
    candidates = (
        (lengths.percentile(90), "the 90th percentile"),
        (median, "the median"),
        (median // 2, "half the median"),
    )
    at, words = next((candidate for candidate in candidates if candidate[0] < longest), candidates[-1])
    if at >= 2:
        capped = replace(options, max_model_len=at)
        yield _Case("cap", f"contexts capped at {words}, {at:,} tokens", "setting", capped, facts)


def _prefix(options: PlanOptions, facts: ModelFacts) -> Iterator[_Case]:
    if options.shared_prefix:
        without = replace(options, shared_prefix=0)
        words = f"the {options.shared_prefix:,} tokens that all begin with held once"
        yield _Case("prefix_sharing", words, "in use", without, facts)
        return
    lengths = request_lengths(options, facts)
    half = 0 if lengths is None else lengths.percentile(50) // 2
    if half >= options.block_size:
        words = f"half of a median request, {half:,} tokens, alike in all and held once"
        yield _Case("prefix_sharing", words, "setting", replace(options, shared_prefix=half), facts)


def _tensor_parallel(options: PlanOptions, facts: ModelFacts) -> Iterator[_Case]:
    ranks, num_gpus = options.tensor_parallel, options.num_gpus
    memory = options.memory_bytes
    if memory is None:
        return
    if num_gpus % (2 * ranks) == 0:
        doubled = replace(options, tensor_parallel=2 * ranks)
        yield _Case(
            "tensor_parallel",
            f"{2 * ranks} ranks instead of {ranks}, the same GPUs",
            "setting",
            doubled,
            facts,
        )
    else:
        doubled = replace(options, tensor_parallel=2 * ranks, num_gpus=2 * num_gpus, memory_bytes=memory * 2)
        words = f"{2 * ranks} ranks instead of {ranks}, on {2 * num_gpus} GPUs instead of {num_gpus}"
        yield _Case("tensor_parallel", words, "hardware", doubled, facts)
    if ranks % 2 == 0:
        halved = replace(options, tensor_parallel=ranks // 2)
        yield _Case(
            "tensor_parallel",
            f"{ranks // 2} ranks instead of {ranks}, the same GPUs",
            "setting",
            halved,
            facts,
        )


def _gqa(options: PlanOptions, facts: ModelFacts) -> Iterator[_Case]:
    heads = facts.num_heads
    most = max((layer.num_kv_heads for layer in facts.layout.layers), default=0)
    if heads is None or _is_latent(facts):
        return
    if most < heads:
        full = _with_kv_heads(facts, heads)
        yield _Case("gqa", f"{most} KV heads instead of {heads}", "in use", options, full)
    elif heads % WHAT_IF_GROUPS == 0:
        fewer = heads // WHAT_IF_GROUPS
        yield _Case(
            "gqa",
            f"a model with {fewer} KV heads instead of {heads}",
            "model",
            options,
            _with_kv_heads(facts, fewer),
        )


def _window(options: PlanOptions, facts: ModelFacts) -> Iterator[_Case]:
    if any(layer.window is not None for layer in facts.layout.layers):
        without = _with_layers(facts, lambda layer, _: replace(layer, window=None))
        formula = replace(options, storage="formula")
        if options.storage == "formula" or facts.engine is None or facts.engine.gives_back:
            yield _Case("window", "layers with a window keep their window alone", "in use", options, without)
        else:
            words = "an engine whose layers with a window give back what left it (storage=formula)"
            yield _Case("window", words, "engine", formula, facts)
        return
    every_other = _with_layers(
        facts, lambda layer, index: replace(layer, window=None if index % 2 else WHAT_IF_WINDOW)
    )
    words = f"a model with a window of {WHAT_IF_WINDOW:,} tokens in every other layer, given back (storage=formula)"
    yield _Case("window", words, "model", replace(options, storage="formula"), every_other)


def _storage(options: PlanOptions, facts: ModelFacts) -> Iterator[_Case]:
    """Latent attention that pykv's pool stores expanded."""
    if facts.engine is None or not _is_latent(facts):
        return
    words = "an engine that stores one latent a token (storage=formula)"
    if options.storage == "engine":
        yield _Case("storage", words, "engine", replace(options, storage="formula"), facts)
    else:
        yield _Case("storage", words, "in use", replace(options, storage="engine"), facts)


def _is_latent(facts: ModelFacts) -> bool:
    return any(layer.head_dim_v == 0 for layer in facts.layout.layers)


def _with_kv_heads(facts: ModelFacts, num_kv_heads: int) -> ModelFacts:
    return _with_layers(facts, lambda layer, _: replace(layer, num_kv_heads=num_kv_heads))


def _with_layers(facts: ModelFacts, change: Callable[[KvLayer, int], KvLayer]) -> ModelFacts:
    def changed(layout: KvLayout) -> KvLayout:
        return replace(
            layout, layers=tuple(change(layer, index) for index, layer in enumerate(layout.layers))
        )

    engine = None if facts.engine is None else EngineStorage(changed(facts.engine.model_layout))
    return replace(facts, layout=changed(facts.layout), engine=engine)


PROPOSALS: tuple[Callable[[PlanOptions, ModelFacts], Iterator[_Case]], ...] = (
    _kv_dtype,
    _weights_dtype,
    _cap,
    _prefix,
    _tensor_parallel,
    _gqa,
    _window,
    _storage,
)
