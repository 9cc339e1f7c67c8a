"""What the options name is what is served, and what clients are told of it."""

import re

import pytest

from pykv.errors import ConfigError, ModelError
from pykv.service.loading import load_model
from pykv.service.options import ServeOptions

ROWS = 2 * 2 * 2  # keys and values of two heads in two layers, 16 numbers each


@pytest.fixture(scope="module")
def folder(tmp_path_factory, save_tiny_model):
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path)
    return str(path)


@pytest.mark.parametrize(
    ("options", "kv_dtype", "bytes_per_token"),
    [
        ({}, "f32", ROWS * 64),
        ({"kv_dtype": "bf16"}, "bf16", ROWS * 32),
        ({"kv_dtype": "int8"}, "int8", ROWS * 20),
        ({"kv_dtype": "fp8", "kv_scales": (0.1, 0.1)}, "fp8", ROWS * 16),
    ],
    ids=str,
)
def test_the_format_of_the_cache_and_its_bytes_are_told(folder, options, kv_dtype, bytes_per_token):
    served = load_model(ServeOptions(model=folder, kv_memory=2**20, swap_space=2**18, **options), print)
    assert (served.description.dtype, served.description.kv_dtype) == ("float32", kv_dtype)
    assert served.description.kv_bytes_per_token == bytes_per_token
    stats = served.engine.stats()
    assert stats.kv_bytes_per_token == bytes_per_token
    assert stats.blocks_total + 1 == 2**20 // (16 * bytes_per_token)
    assert stats.host_blocks_total + 1 == stats.host_blocks_free + 1 == 2**18 // (16 * bytes_per_token)


def test_a_swap_space_of_no_block_is_refused(folder):
    with pytest.raises(ConfigError, match="swap_space_bytes is 100"):
        load_model(ServeOptions(model=folder, swap_space=100), print)


@pytest.mark.parametrize(
    "model", ["./nowhere", "nowhere", "a/b/c", "meta-llama/Llama-3.", "~nosuchuser/x", ""]
)
def test_a_path_that_leads_nowhere_is_refused_before_anything_is_imported(model):
    told = []
    with pytest.raises(ModelError, match=f"no model at {re.escape(model)}: there is no such folder or file"):
        load_model(ServeOptions(model=model), told.append)
    assert told == []
