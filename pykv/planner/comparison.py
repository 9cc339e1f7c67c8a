"""Which GPUs, and how many: the same requests on every known GPU, each with the ranks that need the fewest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from pykv.errors import ConfigError
from pykv.planner.evaluation import evaluate
from pykv.planner.model_facts import ModelFacts, read_model
from pykv.planner.options import PlanOptions, read_options
from pykv.planner.tables import Gpu, gpu_names, gpu_table

__all__ = ["GpuChoice", "compare_gpus"]

RANKS = (1, 2, 4, 8, 16)
CHOSEN_HERE = ("gpu", "memory", "num_blocks", "num_gpus", "tensor_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    """One kind of GPU for the requests.

    Attributes:
        gpu: its name.
        memory_bytes: of one.
        tensor_parallel: the GPUs of one engine.
        requests: of a mix, in one engine.
        gpus_needed: for the users, in whole engines; None: no number of users was given.
        read_seconds: a decode step at a full pool takes at least so long.
    """

    gpu: str
    memory_bytes: int
    tensor_parallel: int
    requests: int
    gpus_needed: int | None
    read_seconds: float

    @property
    def requests_per_gpu(self) -> float:
        """The requests of an engine over its GPUs."""
        return self.requests / self.tensor_parallel


def compare_gpus(
    model: str | PathLike[str] | Mapping[str, Any] | None = None, **options: Any
) -> tuple[GpuChoice, ...]:
    """Plans the model on every known GPU; of the ranks up to 16 those count that need the fewest GPUs.

    Args:
        model, options: as for `plan`, without those that say which GPUs and how many.

    Returns:
        The GPUs on which at least one request fits, those of which the fewest are needed first.

    Raises:
        ConfigError: as for `plan`, or an option names the GPUs, or none holds the model and a request.
    """
    given = [name for name in CHOSEN_HERE if options.get(name) is not None]
    if given:
        raise ConfigError(f"{given[0]} is given, but a comparison tries all: allowed is none")
    asked = read_options({"model": model, **options})
    facts = read_model(asked)
    choices = [choice for name in gpu_names() if (choice := _best(asked, facts, gpu_table(name)))]
    if not choices:
        _explain(asked, facts)
    return tuple(sorted(choices, key=_rank))


def _rank(choice: GpuChoice) -> tuple[float, int, float]:
    return (choice.gpus_needed or 0, choice.memory_bytes * choice.tensor_parallel, -choice.requests_per_gpu)


def _best(options: PlanOptions, facts: ModelFacts, gpu: Gpu) -> GpuChoice | None:
    return min(
        _choices(options, facts, gpu),
        key=_preference,
        default=None,
    )


def _preference(choice: GpuChoice) -> tuple[float, float]:
    """Fewest GPUs, then fewest ranks, since ranks have to talk; without users the most requests a GPU."""
    if choice.gpus_needed is None:
        return (-choice.requests_per_gpu, choice.tensor_parallel)
    return (choice.gpus_needed, choice.tensor_parallel)


def _choices(options: PlanOptions, facts: ModelFacts, gpu: Gpu) -> Iterator[GpuChoice]:
    for ranks in RANKS:
        try:
            found = evaluate(_on(options, gpu, ranks), facts)
        except ConfigError:  # the ranks do not divide the heads, or nothing is left for the cache
            continue
        requests = (found.requests or {}).get("mix", 0)
        if requests and found.usable_bytes is not None and found.budget is not None:
            needed = None if options.users is None else -(-options.users // requests) * ranks
            yield GpuChoice(
                gpu=gpu.name,
                memory_bytes=gpu.memory_bytes,
                tensor_parallel=ranks,
                requests=requests,
                gpus_needed=needed,
                read_seconds=(found.budget.weights + found.usable_bytes) / gpu.bandwidth_bytes_per_second,
            )


def _on(options: PlanOptions, gpu: Gpu, ranks: int) -> PlanOptions:
    return replace(
        options, gpu=gpu, memory_bytes=(gpu.memory_bytes,) * ranks, num_gpus=ranks, tensor_parallel=ranks
    )


def _explain(options: PlanOptions, facts: ModelFacts) -> None:
    """Raises why nothing fits: the error of the largest GPU, if it is one, else that no request fits."""
    largest = max(map(gpu_table, gpu_names()), key=lambda gpu: gpu.memory_bytes)
    evaluate(_on(options, largest, RANKS[-1]), facts)
    raise ConfigError(
        f"not one request fits {RANKS[-1]} of {largest.name}: allowed are shorter ones, or their lengths given"
    )
