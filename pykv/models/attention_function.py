"""The attention function that transformers' models call by the name "pykv"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pykv.errors import StepError, UnsupportedModelError
from pykv.models.step_context import StepContext

__all__ = ["ATTENTION_NAME", "STEP_KEYWORD", "register_attention"]

ATTENTION_NAME = "pykv"

# The keyword of the model's forward that carries the step through its layers to the function below.
STEP_KEYWORD = "pykv_step"

# Keywords by which some models add to their scores, or attend to chosen tokens: no backend computes that.
UNSERVED_KEYWORDS = (
    "alibi",
    "attention_bias",
    "block_indices",
    "indices",
    "position_bias",
    "relative_position_bias",
    "sinks",
    "topk_indices",
)


def register_attention() -> None:
    """Makes `attn_implementation="pykv"` known to transformers; twice does no harm.

    No mask function is registered under the name, and so transformers builds no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention_function)


def paged_attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    pykv_step: StepContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Hands one layer's packed queries, keys and values to the step; see `StepContext.attend`.

    Args:
        module: the attention layer; `layer_idx` says which.
        query: [1, num_heads, num_tokens, head_dim_k], the packed tokens of all sequences of the step.
        key, value: [1, num_kv_heads, num_tokens, head_dim_k or _v].
        attention_mask, dropout: not used: attention is causal, and this is no training.
        scaling, sliding_window, softcap, s_aux: see `scale`, `window`, `softcap`, `sinks` of
            `pykv.paged_attention`.
        pykv_step: the step.
        others: what else the model hands to every attention function.

    Returns:
        [1, num_tokens, num_heads, head_dim_v], and no attention weights.

    Raises:
        StepError: the model was called without a step.
        UnsupportedModelError: the layer asks for another attention than this one.
    """
    step = _checked_step(pykv_step, others)
    output = step.attend(
        module.layer_idx,  # type: ignore[arg-type]
        _by_token(query),
        _by_token(key),
        _by_token(value),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.detach().to(torch.float32).contiguous(),
    )
    return output.unsqueeze(0), None


def _by_token(heads: Tensor) -> Tensor:
    """[1, heads, num_tokens, head_dim] as [num_tokens, heads, head_dim], its last dimension contiguous."""
    tokens = heads[0].transpose(0, 1)
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def _checked_step(step: StepContext | None, others: dict[str, Any]) -> StepContext:
    if step is None:
        raise StepError(
            "the model runs with pykv's attention, which needs a step: call CausalModel.forward, or "
            "set_attn_implementation('sdpa') to use the model by itself"
        )
    for name in UNSERVED_KEYWORDS:
        if others.get(name) is not None:
            raise UnsupportedModelError(f"check 'attention arguments': the attention layers pass {name}")
    if others.get("is_causal") is False:
        raise UnsupportedModelError("check 'attention arguments': the attention layers pass is_causal=False")
    return step
