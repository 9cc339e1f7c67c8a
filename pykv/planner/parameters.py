"""How many parameters a decoder has, by its config: for models whose files are not at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pykv.errors import UnsupportedModelError
from pykv.models.kv_fields import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, ConfigFields

__all__ = [
    "Experts",
    "Parameters",
    "embedding_parameters",
    "estimate_parameters",
    "experts_of",
    "input_embedding",
]

INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
USED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
UNGATED = (
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "falcon",
    "mpt",
    "bloom",
    "opt",
    "phi",
    "starcoder2",
)
"""Families whose feed-forward has two matrices, not three."""
TIED = (
    "gpt2",
    "gpt_bigcode",
    "falcon",
    "mpt",
    "bloom",
    "opt",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "cohere2",
)
"""Families whose output matrix is the embedding unless the config says otherwise."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts of parameters.

    Attributes:
        total: of the whole model.
        embedding: of the token embedding and, where it is another matrix, the output; 8- and 4-bit weights leave them.
    """

    total: int
    embedding: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model of which each token is sent to a few.

    Attributes:
        parameters: of all experts in all layers, without those that every token passes.
        num: experts of a layer.
        used: those of them that one token is sent to; None: the config does not say.
    """

    parameters: int
    num: int
    used: int | None


def experts_of(config: Mapping[str, Any]) -> Experts | None:
    """The experts that tokens are sent to; None: every token passes all of the model.

    Raises:
        UnsupportedModelError: a field that is needed is missing.
    """
    fields = ConfigFields(config)
    num = fields.count(*NUM_EXPERTS) or 1
    if num < 2:
        return None
    sparse = sum(_has_experts(fields, layer) for layer in range(fields.needed(*NUM_LAYERS)))
    if not sparse:
        return None
    size = fields.count("moe_intermediate_size") or fields.needed(*INTERMEDIATE)
    matrices = 2 if fields.find("model_type") in UNGATED else 3
    each = matrices * fields.needed(*HIDDEN_SIZE) * size
    used = fields.count(*USED_EXPERTS)
    return Experts(sparse * num * each, num, None if used is None else min(num, used))


def input_embedding(config: Mapping[str, Any]) -> int:
    """The parameters of the embedding that a step only looks a few rows up in; 0: it is the output matrix too."""
    fields = ConfigFields(config)
    vocabulary, hidden = fields.count("vocab_size"), fields.count(*HIDDEN_SIZE)
    if vocabulary is None or hidden is None:
        return 0
    return embedding_parameters(config) - vocabulary * hidden


def estimate_parameters(config: Mapping[str, Any]) -> Parameters:
    """Counts the large matrices: attention, feed-forward and experts, embedding.

    Norms and biases are left out, and state layers count as attention: within 4 % for the shipped models.

    Raises:
        UnsupportedModelError: a field that is needed is missing.
    """
    fields = ConfigFields(config)
    embedding = embedding_parameters(config)
    if embedding == 0:
        raise UnsupportedModelError("check 'parameters': the config has no vocab_size")
    layers = range(fields.needed(*NUM_LAYERS))
    attention = _attention(fields)
    return Parameters(
        embedding + sum(attention + _feed_forward(fields, layer) for layer in layers), embedding
    )


def embedding_parameters(config: Mapping[str, Any]) -> int:
    """The parameters of the embedding and the output; 0 where the config does not say."""
    fields = ConfigFields(config)
    vocabulary, hidden = fields.count("vocab_size"), fields.count(*HIDDEN_SIZE)
    if vocabulary is None or hidden is None:
        return 0
    tied = fields.find("tie_word_embeddings")
    is_tied = fields.find("model_type") in TIED if tied is None else bool(tied)
    return vocabulary * hidden * (1 if is_tied else 2)


def _attention(fields: ConfigFields) -> int:
    hidden, heads = fields.needed(*HIDDEN_SIZE), fields.needed(*NUM_HEADS)
    if fields.find("kv_lora_rank"):
        return _latent_attention(fields, hidden, heads)
    head_dim = fields.count(*HEAD_DIM) or hidden // heads
    kv_heads = 1 if fields.find("multi_query") else fields.count(*NUM_KV_HEADS) or heads
    return 2 * hidden * head_dim * (heads + kv_heads)


def _latent_attention(fields: ConfigFields, hidden: int, heads: int) -> int:
    latent, rotary = fields.needed("kv_lora_rank"), fields.needed("qk_rope_head_dim")
    plain, value = fields.needed("qk_nope_head_dim"), fields.needed("v_head_dim")
    width = heads * (plain + rotary)
    rank = fields.count("q_lora_rank")
    queries = hidden * width if rank is None else rank * (hidden + width)
    return queries + hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden


def _feed_forward(fields: ConfigFields, layer: int) -> int:
    hidden = fields.needed(*HIDDEN_SIZE)
    matrices = 2 if fields.find("model_type") in UNGATED else 3
    if not _has_experts(fields, layer):
        return matrices * hidden * (fields.count(*INTERMEDIATE) or 4 * hidden)
    experts = fields.needed(*NUM_EXPERTS)
    size = fields.count("moe_intermediate_size") or fields.needed(*INTERMEDIATE)
    shared = fields.count("shared_expert_intermediate_size") or size * (fields.find("n_shared_experts") or 0)
    return matrices * hidden * (experts * size + shared) + hidden * experts


def _has_experts(fields: ConfigFields, layer: int) -> bool:
    if (fields.find(*NUM_EXPERTS) or 1) < 2 or layer < (fields.find("first_k_dense_replace") or 0):
        return False
    if layer in (fields.find("mlp_only_layers") or ()):
        return False
    period = fields.count("expert_layer_period", "decoder_sparse_step") or 1
    offset = fields.find("expert_layer_offset")
    return layer % period == (period - 1 if offset is None else offset)
