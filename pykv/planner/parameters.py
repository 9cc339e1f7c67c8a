"""How many parameters a decoder has, by its config: for models whose files are not at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pykv.errors import UnsupportedModelError
from pykv.field_checks import shown
from pykv.models.kv_fields import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, ConfigFields
from pykv.models.unread_fields import NotSaidError, refuse_unread_weights

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
LLAMA_4 = ("llama4", "llama4_text")
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
    fields = _fields(config)
    num = _num_experts(fields)
    if num < 2:
        return None
    refuse_unread_weights(fields)
    sparse = sum(_has_experts(fields, layer) for layer in range(fields.needed(*NUM_LAYERS)))
    if not sparse:
        return None
    size = _expert_size(fields)
    matrices = 2 if fields.text("model_type") in UNGATED else 3
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
        UnsupportedModelError: a field that is needed is malformed.
        NotSaidError: it is missing, or another that decides the count is not read.
    """
    fields = _fields(config)
    refuse_unread_weights(fields)
    embedding = embedding_parameters(config)
    if embedding == 0:
        raise NotSaidError("check 'parameters': the config has no vocab_size")
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
    tied = fields.flag("tie_word_embeddings")
    is_tied = fields.text("model_type") in TIED if tied is None else tied
    return vocabulary * hidden * (1 if is_tied else 2)


def _attention(fields: ConfigFields) -> int:
    hidden, heads = fields.needed(*HIDDEN_SIZE), fields.needed(*NUM_HEADS)
    _check_alike(fields)
    if fields.find("kv_lora_rank"):
        return _latent_attention(fields, hidden, heads)
    head_dim = fields.count(*HEAD_DIM) or hidden // heads
    kv_heads = 1 if fields.flag("multi_query") else fields.count(*NUM_KV_HEADS) or heads
    return 2 * hidden * head_dim * (heads + kv_heads)


def _latent_attention(fields: ConfigFields, hidden: int, heads: int) -> int:
    latent, rotary = fields.needed("kv_lora_rank"), fields.needed("qk_rope_head_dim")
    plain, value = fields.needed("qk_nope_head_dim"), fields.needed("v_head_dim")
    width = heads * (plain + rotary)
    rank = fields.count("q_lora_rank")
    queries = hidden * width if rank is None else rank * (hidden + width)
    return queries + hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden


def _check_alike(fields: ConfigFields) -> None:
    for name in (*NUM_HEADS, *NUM_KV_HEADS):
        if isinstance(fields.find(name), list):
            raise NotSaidError(
                f"check 'parameters': {name} is {shown(fields.find(name))}: allowed is one number for all layers, or "
                "num_parameters or weights_bytes given"
            )


def _feed_forward(fields: ConfigFields, layer: int) -> int:
    hidden = fields.needed(*HIDDEN_SIZE)
    matrices = 2 if fields.text("model_type") in UNGATED else 3
    if not _has_experts(fields, layer):
        size = fields.count("intermediate_size_mlp") or fields.count(*INTERMEDIATE) or 4 * hidden
        return matrices * hidden * size
    experts = _num_experts(fields)
    size = _expert_size(fields)
    shared = fields.count("shared_expert_intermediate_size") or size * _num_shared_experts(fields)
    return matrices * hidden * (experts * size + shared) + hidden * experts


def _num_experts(fields: ConfigFields) -> int:
    """Of a layer that has some; 0 or 1: no layer has."""
    return next((fields.number(name) for name in NUM_EXPERTS if fields.find(name) is not None), 1)


def _expert_size(fields: ConfigFields) -> int:
    return fields.count("moe_intermediate_size") or fields.needed(*INTERMEDIATE)


def _num_shared_experts(fields: ConfigFields) -> int:
    """That every token passes; Llama 4's configs leave the one that it has out."""
    return 1 if fields.text("model_type") in LLAMA_4 else fields.number("n_shared_experts")


def _has_experts(fields: ConfigFields, layer: int) -> bool:
    if _num_experts(fields) < 2 or layer < fields.number("first_k_dense_replace"):
        return False
    if layer in (fields.indices("mlp_only_layers") or ()):
        return False
    listed = fields.indices("moe_layers")
    if listed is not None:
        return layer in listed
    period = fields.count("expert_layer_period", "decoder_sparse_step", "interleave_moe_layer_step") or 1
    offset = None if fields.find("expert_layer_offset") is None else fields.number("expert_layer_offset")
    return layer % period == (period - 1 if offset is None else offset)


def _fields(config: Mapping[str, Any]) -> ConfigFields:
    """The fields of a config, those of DBRX's parts among them, by their usual names."""
    fields = ConfigFields(config)
    if fields.text("model_type") != "dbrx":
        return fields
    attention, experts = (_part(fields, name) for name in ("attn_config", "ffn_config"))
    return ConfigFields(
        {
            "model_type": "dbrx",
            "vocab_size": fields.count("vocab_size"),
            "num_hidden_layers": fields.needed(*NUM_LAYERS),
            "num_attention_heads": fields.needed(*NUM_HEADS),
            "hidden_size": fields.needed(*HIDDEN_SIZE),
            "tie_word_embeddings": fields.flag("tie_word_embeddings"),
            "num_key_value_heads": attention.needed("kv_n_heads"),
            "num_local_experts": experts.needed("moe_num_experts"),
            "num_experts_per_tok": experts.count("moe_top_k"),
            "intermediate_size": experts.needed("ffn_hidden_size"),
        }
    )


def _part(fields: ConfigFields, name: str) -> ConfigFields:
    part = fields.find(name)
    if not isinstance(part, Mapping):
        raise UnsupportedModelError(f"check 'parameters': {name} is {shown(part)}: allowed is an object")
    return ConfigFields(part)
