"""The engine's own pool has as many blocks as planned for the same bytes."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pykv import Engine, EngineConfig
from pykv.planner import plan

KV_MEMORY_BYTES = 2**20 + 12_345
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("kv_dtype", ["f32", "int8", "fp8"])
def test_engine_has_as_many_blocks_as_planned(kv_dtype: str) -> None:
    words = {f"w{index}": index for index in range(64)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)), eos_token="w0")
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, bos_token_id=0, eos_token_id=0, pad_token_id=0)).eval()
    weights = 1  # a byte: what the engine is given is for the cache alone
    found = plan(
        model.config,
        memory=KV_MEMORY_BYTES + weights,
        weights_bytes=weights,
        utilization=1.0,
        kv_dtype=kv_dtype,
        context=64,
    )
    options = EngineConfig(kv_memory_bytes=KV_MEMORY_BYTES, kv_dtype=kv_dtype, dtype="float32", device="cpu")
    with Engine(model, tokenizer, config=options) as engine:
        assert engine.stats().blocks_total + 1 == found.num_blocks
