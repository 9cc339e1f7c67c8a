"""A row's result is the same bit for bit whatever is computed beside it, and however its sequence is laid out."""

from __future__ import annotations

import pytest
import torch

from pykv.attention import cpu_backend, paged_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [{}, {"window": 300, "softcap": 5.0}]


def sequence(length, dtype, num_heads=6, num_kv_heads=2, head_dim=24, seed=0):
    """Returns a sequence's queries, keys and values, one for each position."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(length, heads, head_dim, generator=generator).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )


def lay_out(sequences, block_size, order_seed):
    """Writes sequences into a shuffled pool; returns the caches and the tables."""
    needed = [-(-len(keys) // block_size) for _, keys, _ in sequences]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(order_seed)) + 1
    tables = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
    shape = (sum(needed) + 1, sequences[0][1].shape[1], block_size, sequences[0][1].shape[2])
    caches = [torch.full(shape, torch.nan, dtype=sequences[0][1].dtype) for _ in range(2)]
    for row, blocks in enumerate(order.split(needed)):
        tables[row, : len(blocks)] = blocks
        positions = torch.arange(len(sequences[row][1]))
        for cache, tokens in zip(caches, sequences[row][1:], strict=True):
            cache[blocks[positions // block_size], :, positions % block_size] = tokens
    return caches, tables


def attend(sequences, spans, block_size=16, order_seed=0, **options):
    """Attends with the queries [first, end) of each sequence; returns one output for each."""
    caches, tables = lay_out(sequences, block_size, order_seed)
    lengths = [end - first for first, end in spans]
    pieces = [queries[first:end] for (queries, _, _), (first, end) in zip(sequences, spans, strict=True)]
    output = paged_attention(
        torch.cat(pieces),
        *caches,
        block_tables=tables,
        seq_lens=torch.tensor([end for _, end in spans], dtype=torch.int32),
        query_starts=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        backend="cpu",
        **options,
    )
    return output.split(lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_chunks_blocks_order_threads_and_mates_change_no_bit(dtype, options):
    one = sequence(1400, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    (expected,) = attend([one], [(0, 1400)], **options)
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for block_size, chunk in ((1, 1400), (3, 171), (16, 64), (48, 333)):
                for first in range(0, 1400, chunk):
                    end = min(first + chunk, 1400)
                    (output,) = attend([one], [(first, end)], block_size, order_seed=chunk, **options)
                    assert output.equal(expected[first:end])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_decodes_equal_the_prefill(dtype, options, num_threads):
    one = sequence(1200, dtype)
    (expected,) = attend([one], [(0, 1200)], **options)
    for position in (0, 1, 62, 63, 64, 65, 510, 511, 512, 513, 1023, 1024, 1199):
        (output,) = attend([one], [(position, position + 1)], **options)
        assert output.equal(expected[position : position + 1]), position


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_mates_and_their_order_change_no_bit(dtype, num_threads):
    sequences = [sequence(length, dtype, seed=length) for length in (1100, 33, 700, 2000, 1)]
    spans = [(1099, 1100), (0, 33), (650, 700), (1999, 2000), (0, 1)]
    alone = [attend([one], [span])[0] for one, span in zip(sequences, spans, strict=True)]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 1], [2, 4, 0]):
        outputs = attend([sequences[i] for i in order], [spans[i] for i in order], block_size=3)
        for output, index in zip(outputs, order, strict=True):
            assert output.equal(alone[index])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (7, 1), (40, 4)])
def test_one_row_and_many_rows_give_the_same_bits(dtype, num_heads, num_kv_heads):
    one = sequence(600, dtype, num_heads, num_kv_heads, head_dim=80)
    (expected,) = attend([one], [(0, 600)])
    for position in (5, 599):
        (output,) = attend([one], [(position, position + 1)])
        assert output.equal(expected[position : position + 1])


def shared_step(dtype, lengths, num_shared, block_size=16):
    """Decodes of sequences whose first blocks are the same ones: [num_shared tokens], then their own."""
    sequences = [sequence(length, dtype, seed=length) for length in lengths]
    caches, tables = lay_out(sequences, block_size, 0)
    tables[1:, : num_shared // block_size] = tables[0, : num_shared // block_size]
    query = torch.cat([queries[-1:] for queries, _, _ in sequences])
    return (
        query,
        caches,
        {
            "block_tables": tables,
            "seq_lens": torch.tensor(lengths, dtype=torch.int32),
            "query_starts": torch.arange(len(lengths) + 1, dtype=torch.int32),
        },
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_a_shared_prefix_once_changes_no_bit(dtype, num_threads):
    lengths = (1700, 1800, 1536, 1024, 1099, 2600, 1600)
    for num_shared in (1024, 1008, 512, 496, 32):
        query, caches, step = shared_step(dtype, lengths, num_shared)
        options = {"table_rows": None, "scale": 0.2, "window": None, "softcap": None, "sinks": None}
        outputs = [
            cpu_backend.paged_attention(
                query, *caches, **step, **options, out=torch.zeros_like(query), share_prefixes=share_prefixes
            )
            for share_prefixes in (True, False)
        ]
        assert outputs[0].equal(outputs[1])
        spec = paged_attention(query, *caches, **step, scale=0.2, backend="torch")
        torch.testing.assert_close(outputs[0].float(), spec.float(), rtol=2e-2, atol=1e-2)


def test_prefixes_are_shared_to_different_depths(num_threads):
    """One leads, others leave its blocks after one, two and three segments."""
    lengths = [2100, 2101, 2102, 2103, 2104]
    query, caches, step = shared_step(torch.float32, lengths, 512)
    tables = step["block_tables"]
    tables[1, : 1024 // 16] = tables[0, : 1024 // 16]
    tables[2, : 1600 // 16] = tables[0, : 1600 // 16]
    tables[3, : 2096 // 16] = tables[0, : 2096 // 16]
    expected = torch.cat(
        [
            paged_attention(
                query[row : row + 1],
                *caches,
                block_tables=tables[row : row + 1],
                seq_lens=step["seq_lens"][row : row + 1],
                query_starts=torch.tensor([0, 1], dtype=torch.int32),
            )
            for row in range(5)
        ]
    )
    assert paged_attention(query, *caches, **step).equal(expected)
