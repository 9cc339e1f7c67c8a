"""What a step of a replay costs, and where that is from."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pykv.kv_format import BF16, KvFormat
from pykv.simulator.cost import CostModel
from pykv.simulator.cost_text import is_roofline, read_roofline
from pykv.simulator.served_model import ServedModel, served_model

__all__ = ["DEFAULT_COST", "StepCost", "read_cost"]

DEFAULT_COST = "roofline:H100,model=llama-3.1-8b"


@dataclass(frozen=True, slots=True)
class StepCost:
    """A cost model and where it is from.

    Attributes:
        model: seconds of a step.
        served: the model whose steps these are; None: the text names none.
        kv_bytes: of a token in 16 bit, given by hand; None: the served model says it, or nothing does.
        is_roofline: whether it follows the dtype of the cache.
        assumed: what was not given and is taken for granted, in words.
    """

    model: CostModel
    served: ServedModel | None = None
    kv_bytes: float | None = None
    is_roofline: bool = False
    assumed: tuple[str, ...] = ()


def read_cost(
    cost: str | CostModel | None,
    *,
    model: str | os.PathLike[str] | None = None,
    kv_format: KvFormat = BF16,
    block_size: int = 16,
) -> StepCost:
    """What a text or a model says; None: `DEFAULT_COST`, on the `model` if one is given.

    Args:
        cost: a model, or a text for `CostModel.parse`.
        model: what is served, where the cost names no model.
        kv_format: how the cache is stored: a roofline reads so much of it.
        block_size: tokens a block, for what a swap copies.

    Raises:
        ConfigError: the text is no cost, half of a model is given, or both name a model.
        ModelError: the model's files cannot be read.
    """
    assumed: tuple[str, ...] = ()
    if cost is None:
        cost = DEFAULT_COST if model is None else DEFAULT_COST.partition(",")[0]
        assumed = (f"a step costs what {cost} says",)
    if isinstance(cost, str) and is_roofline(cost):
        found = read_roofline(cost, model=model, kv_format=kv_format, block_size=block_size)
        return StepCost(
            CostModel(**found.parts),
            found.served,
            found.kv_bytes,
            is_roofline=True,
            assumed=(*assumed, *found.assumed),
        )
    served = None if model is None else served_model(model)
    return StepCost(cost if isinstance(cost, CostModel) else CostModel.parse(cost), served)
