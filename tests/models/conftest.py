"""Tiny random models of many families, and the bundled model loaded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pykv.models.quiet import quiet

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 198,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = BASE | {"head_dim": 16}
WINDOW = {"sliding_window": 6}
ALTERNATING = WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen2": BASE,
    "qwen3": WIDE,
    "mistral": BASE | WINDOW,
    "gemma2": WIDE | ALTERNATING | {"query_pre_attn_scalar": 16},
    "gemma3_text": WIDE | ALTERNATING | {"query_pre_attn_scalar": 16},
    "gemma4_text": WIDE | ALTERNATING | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 199},
    "phi3": BASE,
    "gpt2": {
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 199,
        "n_positions": 512,
        "bos_token_id": 1,
        "eos_token_id": 198,
    },
    "gpt_oss": WIDE | ALTERNATING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": BASE,
    "olmo3": BASE | ALTERNATING,
    "smollm3": BASE,
    "mixtral": BASE | {"num_local_experts": 4},
    "granite": BASE,
    "glm4": WIDE,
    "starcoder2": BASE | WINDOW,
    "cohere2": WIDE | ALTERNATING,
    "exaone4": BASE | ALTERNATING,
    "qwen3_moe": WIDE | EXPERTS,
    "hunyuan_v1_dense": WIDE,
    "ministral3": BASE,
    "minimax_m2": WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": BASE
    | LATENT
    | {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "gpt_neox": {name: value for name, value in BASE.items() if name != "num_key_value_heads"},
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 199,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 198,
    },
    "falcon": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 199,
        "alibi": False,
        "bos_token_id": 1,
        "eos_token_id": 198,
    },
    "bloom": {"hidden_size": 64, "n_layer": 4, "n_head": 4, "vocab_size": 199},
    "llama4_text": WIDE
    | {
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 6,
        "no_rope_layers": [1, 1, 1, 0],
        "moe_layers": [1],
    },
    "qwen3_next": WIDE
    | EXPERTS
    | {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    },
}

ADMITTED = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "phi3",
    "gpt2",
    "gpt_oss",
    "olmo2",
    "olmo3",
    "smollm3",
    "mixtral",
    "granite",
    "glm4",
    "starcoder2",
    "cohere2",
    "exaone4",
    "qwen3_moe",
    "hunyuan_v1_dense",
    "ministral3",
    "minimax_m2",
    "deepseek_v3",
    "gpt_neox",
    "opt",
]
"""The families that the gate admits: each is served, and planned as it is served."""

MakeModel = Callable[..., Any]


@pytest.fixture(params=ADMITTED)
def admitted_family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """Builds a tiny random model: make_model("llama", dtype, sliding_window=4, …); always the same weights."""

    def make(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
        with quiet(), torch.random.fork_rng():
            torch.manual_seed(1)
            config = AutoConfig.for_model(family, **FAMILIES[family] | overrides)
            module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
            for name, parameter in module.named_parameters():
                if parameter.dim() > 1 or name.endswith("sinks"):
                    nn.init.normal_(parameter, std=0.15)
        return module

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words "w2" … "w197", and an end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<bos>": 1, **{f"w{index}": index for index in range(2, 198)}, "<eos>": 198}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
