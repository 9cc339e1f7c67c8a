"""A small model of transformers, as it is and as the engine takes it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pykv.models import load_model


@pytest.fixture(scope="session")
def tiny_llama():
    """Two layers, random weights, float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_model(tiny_llama):
    """The same, admitted."""
    return load_model((tiny_llama, None))[0]
