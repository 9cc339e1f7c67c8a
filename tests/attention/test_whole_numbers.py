"""int8 caches of bf16 models, whose products are of whole numbers where the machine can: precision, extremes, bits."""

from __future__ import annotations

import math

import pytest
import torch

from pykv._core import CpuAttention
from pykv.attention import cpu_backend, dequantize, write_kv

BLOCK_SIZE = 16
INSTRUCTIONS = ("portable", "avx2", "avx512", "avx512_bf16", "avx512_vnni")
needs_vnni = pytest.mark.skipif(
    CpuAttention("avx512_vnni").instructions != "avx512_vnni", reason="needs AVX-512 with BF16 and VNNI"
)


class Sequence:
    """One sequence in an int8 cache, its blocks in order."""

    def __init__(self, keys, values):
        num_blocks = -(-len(keys) // BLOCK_SIZE)
        shape = (num_blocks, keys.shape[1], BLOCK_SIZE)
        self.key_cache = torch.zeros(*shape, keys.shape[2], dtype=torch.int8)
        self.value_cache = torch.zeros(*shape, values.shape[2], dtype=torch.int8)
        self.scales = torch.full((num_blocks, 2, keys.shape[1], BLOCK_SIZE), math.nan)
        slots = torch.arange(len(keys))
        write_kv(keys, values, self.key_cache, self.value_cache, slots, kv_scales=self.scales)

    def attend(self, instructions, query, end, log_sum_exp=None, **options):
        """Attends with the queries of the last tokens before `end`."""
        num_blocks = self.key_cache.shape[0]
        defaults = {"scale": query.shape[2] ** -0.5, "window": None, "softcap": None, "sinks": None}
        return cpu_backend.paged_attention(
            query,
            self.key_cache,
            self.value_cache,
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            seq_lens=torch.tensor([end], dtype=torch.int32),
            query_starts=torch.tensor([0, len(query)], dtype=torch.int32),
            table_rows=None,
            **{**defaults, "kv_scales": self.scales, **options},
            out=query.new_full((*query.shape[:2], self.value_cache.shape[3]), 7.0),
            log_sum_exp=log_sum_exp,
            attention=CpuAttention(instructions),
        )

    def expected(self, query, end, scale=None):
        """The same for one query, in float64 over the numbers that are stored, and its log-sum-exps."""
        keys, values = (
            part.double()
            .transpose(1, 2)
            .flatten(0, 1)[:end]
            .repeat_interleave(query.shape[1] // part.shape[1], dim=1)
            for part in dequantize(self.key_cache, self.value_cache, self.scales)
        )
        scores = torch.einsum("hd,khd->hk", query[0].double(), keys) * (scale or query.shape[2] ** -0.5)
        return torch.einsum("hk,khd->hd", scores.softmax(1), values)[None], scores.logsumexp(1)[None]


def sequence(length, num_kv_heads=2, head_dim=64, spread=0.0):
    """A sequence of random tokens whose values differ in size by powers of ten up to `spread`."""
    keys, values = torch.randn(2, length, num_kv_heads, head_dim)
    values *= 10 ** (spread * torch.randn(length, num_kv_heads, 1))
    return Sequence(keys.bfloat16(), values.bfloat16())


@needs_vnni
@pytest.mark.parametrize("scale", [0.01, 0.125, 1.0, 3.0])
@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_whole_numbers_are_no_less_precise_than_bf16(scale, spread, outlier):
    """But where a query's largest number is far above the others and its scores are in the hundreds."""
    torch.manual_seed(0)
    one = sequence(1500, spread=spread)
    squares = dict.fromkeys(("avx512_bf16", "avx512_vnni"), 0.0)
    for _ in range(8):
        query = torch.randn(1, 8, 64)
        query[..., 5] *= outlier
        query = query.bfloat16()
        wanted, _ = one.expected(query, 1500, scale)
        for instructions in squares:
            found = one.attend(instructions, query, 1500, scale=scale)
            errors = (found.double() - wanted) / wanted.norm(dim=2, keepdim=True)
            squares[instructions] += errors.square().sum().item()
    allowed = 2.0 if outlier * scale > 50 else 1.0
    assert squares["avx512_vnni"] <= squares["avx512_bf16"] * allowed


@needs_vnni
@pytest.mark.parametrize("scale", [0.01, 0.125, 1.0])
def test_log_sum_exps_keep_the_precision_of_the_scores(scale):
    torch.manual_seed(0)
    one = sequence(700)
    query = torch.randn(1, 8, 64).bfloat16()
    found = torch.zeros(1, 8)
    one.attend("avx512_vnni", query, 700, found, scale=scale)
    torch.testing.assert_close(
        found.double(), one.expected(query, 700, scale)[1], rtol=0, atol=2e-4 * scale * 8
    )


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("options", [{}, {"window": 300, "softcap": 5.0}, {"kv_scales": (0.02, 0.5)}])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 64), (6, 80), (8, 128), (14, 24)])
def test_a_row_has_the_same_bits_alone_in_a_chunk_and_in_the_prefill(
    instructions, options, num_heads, head_dim
):
    torch.manual_seed(0)
    one = sequence(1100, head_dim=head_dim)
    queries = torch.randn(1100, num_heads, head_dim).bfloat16()
    expected = one.attend(instructions, queries, 1100, **options)
    for position in (0, 1, 2, 3, 62, 63, 64, 65, 299, 300, 511, 512, 513, 1099):
        found = one.attend(instructions, queries[position : position + 1], position + 1, **options)
        assert found.equal(expected[position : position + 1]), position
    for first, end in ((60, 67), (500, 700), (1001, 1100)):
        found = one.attend(instructions, queries[first:end], end, **options)
        assert found.equal(expected[first:end])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("factor", [1e-30, 1e-15, 1e15, 1e30])
@pytest.mark.parametrize("side", [0, 1])
def test_scales_of_any_size(instructions, factor, side):
    """Queries and scores make up for the keys' size; the output has the values'."""
    torch.manual_seed(0)
    one = sequence(200)
    query = torch.randn(1, 4, 64).bfloat16()
    wanted, _ = one.expected(query, 200)
    one.scales[:, side] *= factor
    scale = 0.125 / factor if side == 0 else 0.125
    found = one.attend(instructions, query, 200, scale=scale)
    wanted = wanted if side == 0 else wanted * factor
    assert (found.double() - wanted).abs().max() <= 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_queries_of_any_size(instructions, factor):
    torch.manual_seed(0)
    one = sequence(200)
    query = torch.randn(1, 4, 64).bfloat16()
    large = (query.double() * factor).bfloat16()
    wanted, _ = one.expected(large, 200, 0.125 / factor)
    found = one.attend(instructions, large, 200, scale=0.125 / factor)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_scales_of_zero_and_below_count_as_they_are(instructions):
    torch.manual_seed(0)
    one = sequence(130)
    one.scales[3, 1] = 0
    one.scales[5, 1] *= -1
    query = torch.randn(1, 4, 64).bfloat16()
    wanted, _ = one.expected(query, 130)
    torch.testing.assert_close(one.attend(instructions, query, 130).double(), wanted, rtol=2e-2, atol=1e-2)
    one.scales[:, 1] = 0
    assert one.attend(instructions, query, 130).eq(0).all()


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_one_large_value_among_small_weights_counts(instructions):
    """The heaviest position by its score has a tiny value, and the other way round."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 100, 1, 64)
    query = torch.ones(1, 1, 64)
    keys[40], values[40] = 1.0, 1e-4
    keys[41], values[41] = 0.0, 1e4
    one = Sequence(keys.bfloat16(), values.bfloat16())
    wanted, _ = one.expected(query.bfloat16(), 100)
    found = one.attend(instructions, query.bfloat16(), 100)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_query_that_is_no_number_spoils_its_own_row_alone(instructions, bad):
    torch.manual_seed(0)
    one = sequence(90)
    query = torch.randn(5, 4, 64).bfloat16()
    expected = one.attend(instructions, query, 90)
    query[2, 1, 7] = bad
    found = one.attend(instructions, query, 90)
    assert found[2, 1].isnan().all()
    found[2, 1] = expected[2, 1]
    assert found.equal(expected)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_head_sizes_too_long_for_sums_of_32_bits(instructions):
    torch.manual_seed(0)
    for head_dim in (512, 513, 640):
        one = sequence(70, num_kv_heads=1, head_dim=head_dim)
        query = torch.randn(1, 2, head_dim).bfloat16()
        wanted, _ = one.expected(query, 70)
        found = one.attend(instructions, query, 70)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=1e-2)
