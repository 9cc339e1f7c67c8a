"""What holds the number of requests back."""

from __future__ import annotations

from dataclasses import dataclass

from pykv.planner.evaluation import Evaluation, request_lengths
from pykv.planner.model_facts import ModelFacts
from pykv.planner.options import PlanOptions
from pykv.planner.sizes import show_bytes

__all__ = ["Limit", "find_limit"]


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit.

    Attributes:
        what: "max_num_seqs", "longest_request" (not even one such fits), "weights" (they take more of the
            memory than the cache) or "kv_memory".
        why: in words, with the figures.
    """

    what: str
    why: str


def find_limit(options: PlanOptions, facts: ModelFacts, now: Evaluation) -> Limit | None:
    """The limit of a mix; None: nothing is known about the memory."""
    requests = now.requests
    if requests is None:
        return None
    if "mix" in now.rows_bind:
        return Limit(
            "max_num_seqs",
            f"{options.max_num_seqs:,} rows for sequences, though the blocks would do for more",
        )
    lengths, pool = request_lengths(options, facts), now.usable_bytes or 0
    longest = 0 if lengths is None else int(lengths.tokens[-1])
    if longest and now.rank.request_bytes(longest) > pool:
        one = show_bytes(now.rank.request_bytes(longest))
        return Limit(
            "longest_request",
            f"one of {longest:,} tokens takes {one} on each GPU, and the pool has {show_bytes(pool)}",
        )
    budget = now.budget
    if budget is not None and budget.weights > budget.kv:
        return Limit(
            "weights",
            f"on each GPU weights take {show_bytes(budget.weights)} of {show_bytes(budget.usable)}, which leaves "
            f"{show_bytes(budget.kv)} for the KV cache",
        )
    return Limit("kv_memory", f"the KV cache has {show_bytes(pool)} on each GPU, and requests fill it")
