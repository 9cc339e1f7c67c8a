"""Numbers that are none: they stay with who sees them, and minus infinity weighs nothing."""

import pytest
import torch

from pykv._core import CpuAttention
from pykv.attention import cpu_backend, paged_attention, write_kv

BLOCK_SIZE = 16
INSTRUCTIONS = ("portable", "avx2", "avx512", None)


def attend_with(instructions, batch, **options):
    """Calls the CPU backend with no more than these instructions, or with all that there are."""
    query = batch["query"]
    defaults = {
        "table_rows": None,
        "window": None,
        "softcap": None,
        "sinks": None,
        "scale": query.shape[2] ** -0.5,
    }
    out = query.new_full((*query.shape[:2], batch["value_cache"].shape[3]), 7.0)
    return cpu_backend.paged_attention(
        **{**defaults, **batch, **options}, out=out, attention=CpuAttention(instructions)
    )


def one_row(num_keys, num_tokens=1):
    """The step of one sequence whose blocks lie in order."""
    return {
        "block_tables": torch.arange(-(-num_keys // BLOCK_SIZE), dtype=torch.int32)[None],
        "seq_lens": torch.tensor([num_keys], dtype=torch.int32),
        "query_starts": torch.tensor([0, num_tokens], dtype=torch.int32),
    }


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_what_a_later_token_of_a_chunk_holds_is_not_seen_before(instructions, bad, dtype, window):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 9, 1, 40).bfloat16()
    key_cache = torch.zeros(1, 1, BLOCK_SIZE, 40).to(dtype)
    value_cache, scales = torch.zeros_like(key_cache), torch.ones(1, 2, 1, BLOCK_SIZE)
    write_kv(key, value, key_cache, value_cache, torch.arange(9), kv_scales=scales)
    whole = {"key_cache": key_cache, "value_cache": value_cache, "kv_scales": scales}
    expected = attend_with(instructions, {"query": query, **whole, **one_row(9, 9)}, window=window)
    assert expected.isfinite().all()
    for place in range(9):
        spoilt = scales.clone()
        spoilt[0, 1, 0, place] = bad
        found = attend_with(
            instructions, {"query": query, **whole, "kv_scales": spoilt, **one_row(9, 9)}, window=window
        )
        blind = [token for token in range(9) if place > token or (window and token - place >= window)]
        assert found[blind].equal(expected[blind])
        assert not found[place].isfinite().any()


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_keys", "lost", "window"),
    [
        (65, slice(63, 64), 2),
        (100, slice(0, 64), None),
        (600, slice(0, 512), None),
        (1100, slice(512, 1024), None),
        (200, slice(64, 128), None),
    ],
)
def test_scores_of_minus_infinity_weigh_nothing_wherever_they_lie(
    instructions, dtype, num_keys, lost, window
):
    torch.manual_seed(0)
    num_blocks = -(-num_keys // BLOCK_SIZE)
    keys, values = torch.randn(2, num_blocks, 1, BLOCK_SIZE, 8).to(dtype)
    query = torch.rand(1, 1, 8).to(dtype) + 1
    keys.view(-1, 8)[lost, 3] = -torch.inf
    batch = {"query": query, "key_cache": keys, "value_cache": values, **one_row(num_keys)}
    found = attend_with(instructions, batch, window=window)
    expected = paged_attention(**batch, window=window, backend="torch")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("softcap", [1e-6, 0.5, 30.0, 1e3, 1e6, 1e9, 1e30])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_cap_of_any_size_bends_scores_as_it_should(instructions, softcap):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 1, BLOCK_SIZE, 64)
    batch = {"query": torch.randn(1, 1, 64), "key_cache": keys, "value_cache": values, **one_row(30)}
    found = attend_with(instructions, batch, scale=1.0, softcap=softcap)
    expected = paged_attention(**batch, scale=1.0, softcap=softcap, backend="torch")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
