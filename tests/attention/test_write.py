"""Writing keys and values, and copying blocks, on every backend that runs on a CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pykv.attention import LayerCache, copy_blocks, transfer_blocks, write_kv

BACKENDS = ["torch", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def caches(num_blocks=6, num_kv_heads=3, block_size=4, dims=(5, 8), dtype=torch.float32):
    """Returns a key and a value cache whose numbers all differ."""
    shapes = [(num_blocks, num_kv_heads, block_size, dim) for dim in dims]
    return [torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_go_to_their_slots_and_nothing_else_changes(backend, dtype, num_threads):
    key_cache, value_cache = caches(dtype=dtype)
    expected = [key_cache.clone(), value_cache.clone()]
    slots = torch.tensor([5, -1, 23, 0, -1, 8])
    key, value = torch.randn(6, 3, 5).to(dtype), torch.randn(6, 3, 8).to(dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0][slot // 4, :, slot % 4] = key[token]
            expected[1][slot // 4, :, slot % 4] = value[token]
    write_kv(key, value, key_cache, value_cache, slots, backend=backend)
    assert key_cache.equal(expected[0])
    assert value_cache.equal(expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_leaves_block_0_and_the_last_block_alone(backend):
    key_cache, value_cache = caches()
    before = [key_cache.clone(), value_cache.clone()]
    write_kv(torch.ones(3, 3, 5), torch.ones(3, 3, 8), key_cache, value_cache, torch.tensor([5, -1, -1]))
    for cache, old in zip((key_cache, value_cache), before, strict=True):
        changed = (cache != old).any(dim=-1).nonzero()
        assert changed.tolist() == [[1, head, 1] for head in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_and_only_padding_write_nothing(backend):
    key_cache, value_cache = caches()
    before = key_cache.clone()
    for count in (0, 4):
        key, value = torch.ones(count, 3, 5), torch.ones(count, 3, 8)
        slots = torch.full((count,), -1)
        write_kv(key, value, key_cache, value_cache, slots, backend=backend)
    assert key_cache.equal(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_caches_may_be_strided(backend):
    whole = torch.zeros(6, 2, 4, 3, 8)
    key_cache, value_cache = whole[:, 0].transpose(1, 2), whole[:, 1].transpose(1, 2)
    packed = torch.randn(2, 60)
    key, value = packed[:, :24].view(2, 3, 8), packed[:, 30:54].view(2, 3, 8)
    write_kv(key, value, key_cache, value_cache, torch.tensor([9, 2]), backend=backend)
    assert key_cache[2, :, 1].equal(key[0])
    assert value_cache[0, :, 2].equal(value[1])
    assert whole.count_nonzero() == 2 * 2 * 3 * 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slot", [-2, 24, 2**40])
def test_a_slot_outside_the_cache_is_refused_before_anything_is_written(backend, slot):
    key_cache, value_cache = caches()
    before = key_cache.clone()
    slots = torch.tensor([1, slot])
    with pytest.raises(ValueError, match=rf"slot_mapping.* {slot}: allowed are -1 to 23"):
        write_kv(torch.ones(2, 3, 5), torch.ones(2, 3, 8), key_cache, value_cache, slots, backend=backend)
    assert key_cache.equal(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_prefill_is_written_by_several_threads(backend, num_threads):
    key_cache, value_cache = caches(300, 4, 16, (64, 64))
    key, value = torch.randn(4000, 4, 64), torch.randn(4000, 4, 64)
    slots = torch.randperm(300 * 16)[:4000]
    write_kv(key, value, key_cache, value_cache, slots, backend=backend)
    assert key_cache[slots // 16, :, slots % 16].equal(key)
    assert value_cache[slots // 16, :, slots % 16].equal(value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.float8_e4m3fn])
def test_copies_change_the_targets_alone(backend, dtype, num_threads):
    layers = [caches(dtype=torch.int8) for _ in range(3)]
    layers = [[cache.repeat(1, 1, 1, dtype.itemsize).view(dtype) for cache in layer] for layer in layers]
    bits = [[cache.view(torch.uint8) for cache in layer] for layer in layers]
    before = [[cache.clone() for cache in layer] for layer in bits]
    keys, values = zip(*layers, strict=True)
    scales = None if dtype.is_floating_point and dtype.itemsize > 1 else [(1.0, 1.0)] * 3
    pairs = torch.tensor([[1, 4], [1, 2], [5, 3]])
    copy_blocks(keys, values, pairs, kv_scales=scales, backend=backend)
    for layer, old in zip(bits, before, strict=True):
        for cache, expected in zip(layer, old, strict=True):
            assert cache[[0, 1, 5]].equal(expected[[0, 1, 5]])
            assert cache[[4, 2, 3]].equal(expected[[1, 1, 5]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_of_strided_caches(backend):
    whole = torch.randn(6, 2, 4, 3, 8)
    before = whole.clone()
    copy_blocks(
        [whole[:, 0].transpose(1, 2)],
        [whole[:, 1].transpose(1, 2)],
        torch.tensor([[5, 0]]),
        backend=backend,
    )
    assert whole[0].equal(before[5])
    assert whole[1:].equal(before[1:])


WRONG_SCALES = {
    "none": (None, r"kv_scales\[0\] is None; it must be given for a cache of torch.int8"),
    "of one layer": (
        [torch.rand(6, 2, 3, 4)],
        r"kv_scales has 1 entries; it must have none or one .* 2 layers",
    ),
    "of three layers": ([torch.rand(6, 2, 3, 4)] * 3, "kv_scales has 3 entries"),
    "none of the second": ([(1.0, 1.0), None], r"kv_scales\[1\] is None"),
    "of fewer blocks": (
        [torch.rand(3, 2, 3, 4)] * 2,
        r"kv_scales\[0\] has shape \(3, 2, 3, 4\); it must be \(6, ",
    ),
    "of fewer heads": (
        [torch.rand(6, 2, 1, 4)] * 2,
        r"kv_scales\[0\] has shape \(6, 2, 1, 4\); it must be \(6, ",
    ),
}


@pytest.mark.parametrize("kind", WRONG_SCALES)
def test_eight_bits_are_not_copied_without_the_scales_of_every_layer(kind):
    keys, values = zip(*(caches(dtype=torch.int8) for _ in range(2)), strict=True)
    before = [cache.clone() for cache in (*keys, *values)]
    scales, message = WRONG_SCALES[kind]
    with pytest.raises(ValueError, match=message):
        copy_blocks(keys, values, torch.tensor([[1, 2]]), kv_scales=scales)
    assert all(map(torch.equal, (*keys, *values), before))


def test_eight_bits_are_not_transferred_without_scales_that_fit():
    source, target = (LayerCache(*caches(dtype=torch.int8), (1.0, 0.5)) for _ in range(2))
    pairs = torch.tensor([[1, 2]])
    transfer_blocks([source], [target], pairs)
    wrong = {
        r"targets\[0\].scales is None; it must be given": None,
        r"targets\[0\].scales has shape \(3, 2, 3, 4\)": torch.rand(3, 2, 3, 4),
        r"sources\[0\].scales and targets\[0\].scales must be alike": (1.0, 1.0),
    }
    for message, scales in wrong.items():
        with pytest.raises(ValueError, match=message):
            transfer_blocks([source], [replace(target, scales=scales)], pairs)


def test_numbers_are_copied_without_scales_alone():
    key_cache, value_cache = caches()
    with pytest.raises(ValueError, match=r"kv_scales\[0\] is a tensor of .*; it must be None for a cache of"):
        copy_blocks([key_cache], [value_cache], torch.tensor([[1, 2]]), kv_scales=[torch.rand(6, 2, 3, 4)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_several_types_are_copied_together(backend):
    wide, narrow, coded = caches(), caches(dtype=torch.int8), caches(dtype=torch.uint8)
    scales = torch.rand(6, 2, 3, 4)
    keys, values = zip(wide, narrow, coded, strict=True)
    copy_blocks(keys, values, torch.tensor([[2, 4]]), kv_scales=[None, scales, None], backend=backend)
    assert all(part[4].equal(part[2]) for part in (*keys, *values, scales))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_are_copied_with_their_blocks(backend):
    key_cache, value_cache = caches(dtype=torch.int8)
    scales = torch.rand(6, 2, 3, 4)
    before = scales.clone()
    copy_blocks([key_cache], [value_cache], torch.tensor([[2, 4]]), kv_scales=[scales], backend=backend)
    assert scales[4].equal(before[2])
    assert scales[:4].equal(before[:4])
    assert key_cache[4].equal(key_cache[2])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[1, 6]], "block 6"),
        ([[-1, 2]], "block -1"),
        ([[1, 2], [3, 2]], "distinct targets"),
        ([[1, 2], [2, 3]], "no target may be a source"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_pairs_are_refused_before_anything_is_copied(backend, pairs, message):
    key_cache, value_cache = caches()
    before = key_cache.clone()
    with pytest.raises(ValueError, match=message):
        copy_blocks([key_cache], [value_cache], torch.tensor(pairs), backend=backend)
    assert key_cache.equal(before)


def no_numbers(*shape, dtype=np.float32):
    """Returns an empty tensor whose strides are all 0, as those of a new array of numpy."""
    tensor = torch.from_numpy(np.zeros(shape, dtype))
    assert tensor.numel() == 0
    assert not any(tensor.stride())
    return tensor


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_write_or_to_copy_is_no_error_whatever_its_strides(backend):
    key_cache, value_cache = caches()
    before = key_cache.clone(), value_cache.clone()
    pairs = no_numbers(0, 2, dtype=np.int64)
    copy_blocks([key_cache], [value_cache], pairs, backend=backend)
    others = LayerCache(*before), LayerCache(key_cache, value_cache)
    transfer_blocks(others[:1], others[1:], pairs, backend=backend)
    write_kv(
        no_numbers(0, 3, 5),
        no_numbers(0, 3, 8),
        key_cache,
        value_cache,
        torch.tensor([]).long(),
        backend=backend,
    )
    assert key_cache.equal(before[0])
    assert value_cache.equal(before[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_32_bits_are_written_and_copied(backend):
    """Zeros that the system has not given yet: only the touched pages take memory."""
    num_blocks, block_size = 131_080, 128
    shape = (num_blocks, 1, block_size, 128)
    pair = [torch.from_numpy(np.zeros(shape, np.int8)) for _ in range(2)]
    assert pair[0].stride(0) * 2**17 == 2**31
    rows = torch.arange(1, 129).float()[None, None]
    for block in (3, num_blocks - 1):
        slots = torch.tensor([block * block_size])
        write_kv(rows, -rows, *pair, slots, kv_scales=(1.0, 1.0), backend=backend)
    pairs = torch.tensor([[3, 131_074], [num_blocks - 1, 5]])
    copy_blocks(pair[:1], pair[1:], pairs, kv_scales=[(1.0, 1.0)], backend=backend)
    for cache, sign in zip(pair, (1, -1), strict=True):
        for block in (3, 5, 131_074, num_blocks - 1):
            expected = (sign * rows[0, 0]).clamp(-127, 127).to(torch.int8)
            assert cache[block, 0, 0].equal(expected)
            assert cache[block, 0, 1:].eq(0).all()
        for untouched in (num_blocks - 1 - 2**17, 131_074 - 2**17, 4, 6):
            assert cache[untouched].eq(0).all()
