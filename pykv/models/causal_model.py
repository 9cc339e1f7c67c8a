"""A model of transformers as the engine sees it: one packed forward over the paged pool."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pykv.layout import KvLayout
from pykv.models.attention_function import STEP_KEYWORD
from pykv.models.step_context import StepContext

__all__ = ["CausalModel"]


@dataclass(frozen=True, slots=True)
class CausalModel:
    """A causal language model that passed the gate.

    Attributes:
        module: the model itself, a `PreTrainedModel`; its attention implementation is "pykv".
        config: the config of its text part.
        layout: what its KV cache holds.
        dtype, device: of its weights and of its KV pool.
        vocab_size: the number of token ids that it takes, and of its logits.
        max_model_len: the most tokens that a sequence may have, prompt and output together.
        eos_token_ids: the tokens that end a generation.
        name: what to call it.
    """

    module: Any
    config: Any
    layout: KvLayout
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    name: str
    keeps_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.module.forward).parameters
        object.__setattr__(self, "keeps_logits", "logits_to_keep" in parameters)

    def forward(
        self, token_ids: Tensor, positions: Tensor, logits_indices: Tensor, context: StepContext
    ) -> Tensor:
        """Runs one packed step; the KV of its tokens is in the pool afterwards.

        Args:
            token_ids, positions: int64 [num_tokens], all sequences' new tokens one after the other.
            logits_indices: int64 [num_samples], the tokens whose logits are wanted.
            context: the step; used for one forward only.

        Returns:
            float32 [num_samples, vocab_size], which the caller may change.
        """
        arguments: dict[str, Any] = {STEP_KEYWORD: context}
        if self.keeps_logits:
            arguments["logits_to_keep"] = logits_indices
        with torch.inference_mode():
            output = self.module(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                **arguments,
            )
            logits: Tensor = output.logits[0] if self.keeps_logits else output.logits[0, logits_indices]
        return logits.to(torch.float32, copy=True)
