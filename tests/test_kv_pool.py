"""The pool's tensors: shapes, neighbours in memory, sharing, copies, and the refusal of what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pykv import CodecFormat, ConfigError, KvLayout, KvPool, register_kv_format
from pykv.kv_format import kv_format_names, kv_format_of
from pykv.layer_groups import LayerGroups
from pykv.layout import KvLayer

LAYOUT = KvLayout((KvLayer(3, 8, 8), KvLayer(2, 12, 4, window=5), KvLayer(3, 8, 8, reads_layer=0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_size(dtype: torch.dtype) -> None:
    pool = KvPool(LAYOUT, num_blocks=5, block_size=4, format=dtype)
    assert [cache.shape for cache in pool.key_caches] == [(5, 3, 4, 8), (5, 2, 4, 12), (5, 3, 4, 8)]
    assert [cache.shape for cache in pool.value_caches] == [(5, 3, 4, 8), (5, 2, 4, 4), (5, 3, 4, 8)]
    assert {cache.dtype for cache in (*pool.key_caches, *pool.value_caches)} == {dtype}
    assert pool.nbytes == 5 * LAYOUT.block_bytes(4, dtype) == 5 * 4 * (48 + 32) * dtype.itemsize


@pytest.mark.parametrize("layer", [0, 1])
def test_keys_and_values_of_a_block_are_neighbours(layer: int) -> None:
    pool = KvPool(LAYOUT, num_blocks=5, block_size=4)
    keys, values = pool.key_caches[layer], pool.value_caches[layer]
    num_key_elements, num_value_elements = keys[0].numel(), values[0].numel()
    assert keys[0].is_contiguous()
    assert values[0].is_contiguous()
    assert values.data_ptr() - keys.data_ptr() == num_key_elements * 2
    assert keys.stride(0) == values.stride(0) == num_key_elements + num_value_elements


def test_no_two_elements_share_memory() -> None:
    pool = KvPool(LAYOUT, num_blocks=3, block_size=2, format=torch.float32)
    own = [*pool.key_caches[:2], *pool.value_caches[:2]]
    total = sum(cache.numel() for cache in own)
    written = 0
    for cache in own:
        cache.copy_(torch.arange(written, written + cache.numel()).view(cache.shape))
        written += cache.numel()
    found = torch.cat([cache.flatten() for cache in own])
    assert torch.equal(found, torch.arange(total, dtype=torch.float32))
    assert written * 4 == pool.nbytes


def test_layers_that_share_kv_are_the_same_memory() -> None:
    pool = KvPool(LAYOUT, num_blocks=3, block_size=2)
    pool.key_caches[0][1] = 7
    assert torch.all(pool.key_caches[2][1] == 7)


def test_copy_blocks_copies_keys_and_values_of_every_layer() -> None:
    pool = KvPool(LAYOUT, num_blocks=4, block_size=2, format=torch.float32)
    caches = [*pool.key_caches[:2], *pool.value_caches[:2]]
    for cache in caches:
        cache.copy_(torch.rand(cache.shape))
    before = [cache.clone() for cache in caches]
    pool.copy_blocks(torch.tensor([[1, 3], [2, 0]]), backend="torch")
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[2, 1, 2, 1]])


def test_pool_beyond_memory_is_refused_with_both_numbers() -> None:
    needed = 10**12 * LAYOUT.block_bytes(16, torch.bfloat16)
    message = (
        rf"num_blocks is {10**12}: the KV pool needs {needed} bytes, but \d+ bytes .* at most \d+ blocks"
    )
    with pytest.raises(ConfigError, match=message):
        KvPool(LAYOUT, num_blocks=10**12)


@pytest.mark.parametrize("field", ["num_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_below_one_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}"):
        KvPool(LAYOUT, **{"num_blocks": 2, "block_size": 2, field: value})  # type: ignore[arg-type]


def test_a_dtype_that_no_backend_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"int8: allowed are torch\.float32"):
        KvPool(LAYOUT, 2, format=torch.int8)


MIXED = KvLayout((KvLayer(1, 576, 0), KvLayer(2, 12, 4, window=5), KvLayer(8, 64, 64)), "latent")
"""A latent, keys and values of different sizes, and full attention: three widths a token."""


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_layers_of_all_widths_share_a_pool_and_its_blocks_move_as_one(backend: str) -> None:
    groups = LayerGroups.of(MIXED)
    assert groups.windows == (None,), "rows of different sizes are kept by one table"
    pool, host = (KvPool(MIXED, 4, 2, "bf16", groups=groups) for _ in range(2))
    assert pool.nbytes == 4 * MIXED.block_bytes(2, "bf16") == 4 * groups.block_bytes(MIXED, 2, "bf16")
    assert [cache.shape[1:] for cache in pool.key_caches] == [(1, 2, 576), (2, 2, 12), (8, 2, 64)]
    assert [cache.shape[1:] for cache in pool.value_caches] == [(1, 2, 0), (2, 2, 4), (8, 2, 64)]
    caches = [*pool.key_caches, *pool.value_caches]
    assert sum(cache.nbytes for cache in caches) == pool.nbytes
    for cache in caches:
        cache.copy_(torch.rand(cache.shape))
    before = [cache.clone() for cache in caches]
    pool.copy_blocks(torch.tensor([[1, 3], [2, 0]]), backend=backend)
    pool.copy_blocks_to(host, torch.tensor([[1, 0], [2, 3]]), backend=backend)
    for cache, copied, old in zip(caches, [*host.key_caches, *host.value_caches], before, strict=True):
        assert torch.equal(cache, old[[2, 1, 2, 1]])
        assert torch.equal(copied[[0, 3]], old[[1, 2]])


def test_a_scale_for_each_key_and_value_is_refused_where_values_are_a_part_of_keys() -> None:
    with pytest.raises(ConfigError, match="format of the KV pool is int8 with a scale for each"):
        KvPool(MIXED, 2, format="int8")
    given = kv_format_of("int8").with_tensor_scales(0.05, 0.5)
    assert KvPool(MIXED, 2, format=given).key_caches[0].shape[-1] == 576


def test_memory_is_taken_only_when_it_is_written() -> None:
    pool = KvPool(LAYOUT, num_blocks=200_000, block_size=16)
    assert pool.nbytes > 500_000_000
    before = resident_bytes()
    pool.key_caches[1][-1] = 1
    assert pool.key_caches[1][-1].sum() == 2 * 16 * 12
    assert resident_bytes() - before < 50_000_000


@pytest.mark.parametrize("name", ["bf16", "int8", "fp8"])
def test_the_null_block_holds_zeros_where_memory_comes_as_it_was(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def used(num_bytes: int, **_: object) -> torch.Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", used)
    monkeypatch.setattr("pykv.kv_pool.check_pinnable", lambda *_: None)  # as on a machine with a GPU
    pool = KvPool(LAYOUT, num_blocks=3, block_size=2, format=name, is_pinned=True)
    scales = [part for part in pool.kv_scales if isinstance(part, torch.Tensor)]
    assert len(scales) == (0 if name == "bf16" else 3)
    for part in (*pool.key_caches, *pool.value_caches, *scales):
        assert not part[0].view(torch.uint8).any()
        assert part[1:].view(torch.uint8).eq(0xFF).all()


def resident_bytes() -> int:
    psutil = pytest.importorskip("psutil")
    return int(psutil.Process().memory_info().rss)


EIGHT_BITS = [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)]


@pytest.mark.parametrize(("name", "dtype"), EIGHT_BITS)
def test_eight_bits_keep_a_scale_for_each_token_and_head(name: str, dtype: torch.dtype) -> None:
    pool = KvPool(LAYOUT, num_blocks=5, block_size=4, format=name)
    assert {cache.dtype for cache in (*pool.key_caches, *pool.value_caches)} == {dtype}
    assert [scales.shape for scales in pool.kv_scales] == [(5, 2, 3, 4), (5, 2, 2, 4), (5, 2, 3, 4)]
    assert pool.kv_scales[2] is pool.kv_scales[0]
    own = [*pool.key_caches[:2], *pool.value_caches[:2], *pool.kv_scales[:2]]
    assert pool.nbytes == sum(part.nbytes for part in own) == 5 * LAYOUT.block_bytes(4, name)


def test_given_scales_take_no_memory() -> None:
    form = kv_format_of("int8").with_tensor_scales(0.05, 0.5)
    pool = KvPool(LAYOUT, num_blocks=5, block_size=4, format=form)
    assert pool.kv_scales == [(0.05, 0.5)] * 3
    assert 2 * pool.nbytes == KvPool(LAYOUT, num_blocks=5, block_size=4).nbytes


def test_a_foreign_format_keeps_its_rows_as_bytes(four_bits: CodecFormat) -> None:
    pool = KvPool(LAYOUT, num_blocks=5, block_size=4, format="int4")
    assert [cache.shape for cache in pool.key_caches[:2]] == [(5, 3, 4, 8), (5, 2, 4, 10)]
    assert [cache.shape for cache in pool.value_caches[:2]] == [(5, 3, 4, 8), (5, 2, 4, 6)]
    assert pool.kv_scales == [None] * 3
    assert pool.nbytes == 5 * 4 * (3 * (8 + 8) + 2 * (10 + 6))


def test_a_taken_name_is_refused(four_bits: CodecFormat) -> None:
    with pytest.raises(ConfigError, match="name is 'int4': allowed is one that is not taken"):
        register_kv_format(four_bits)


class Own(CodecFormat):
    """Float16 in bytes; a test bends one of its parts."""

    def __init__(self, name: object = "own", **bent: Any) -> None:
        self.name, self._bent = name, bent  # type: ignore[assignment]

    def row_bytes(self, head_dim: int) -> int:
        return self._bent.get("row_bytes", lambda size: 2 * size)(head_dim)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return self._bent.get("encode", lambda rows: rows.half().view(torch.uint8))(rows)

    def decode(self, codes: torch.Tensor, head_dim: int) -> torch.Tensor:
        return self._bent.get("decode", lambda codes: codes.view(torch.float16).float())(codes)


ROWS = {
    "zero": (lambda size: 0, "gives 0 as row_bytes"),
    "negative": (lambda size: -size, "gives -128 as row_bytes"),
    "fraction": (lambda size: 4.5, "gives 4.5 as row_bytes"),
    "nothing": (lambda size: None, "gives None as row_bytes"),
    "failure": (lambda size: 1 // 0, "fails in row_bytes.128.: ZeroDivisionError"),
}


@pytest.mark.parametrize("bent", ROWS)
def test_a_format_whose_rows_have_no_size_is_not_registered(bent: str) -> None:
    row_bytes, message = ROWS[bent]
    with pytest.raises(ConfigError, match=f"'own' {message}"):
        register_kv_format(Own(row_bytes=row_bytes))
    with pytest.raises(ConfigError, match=r"'own' (gives|fails)"):
        KvPool(LAYOUT, num_blocks=3, format=Own(row_bytes=row_bytes))
    assert "own" not in kv_format_names()


@pytest.mark.parametrize("added", [Own, None, "own", Own(""), Own(" "), Own(None), Own("bf16"), Own("auto")])
def test_what_is_no_format_with_a_name_is_not_registered(added: Any) -> None:
    before = kv_format_names()
    with pytest.raises(ConfigError, match=r"the KV format('s name)? is "):
        register_kv_format(added)
    assert kv_format_names() == before


@pytest.mark.parametrize("no_format", [None, 3, Own, object(), float])
def test_a_pool_of_no_format_is_refused(no_format: Any) -> None:
    with pytest.raises(ConfigError, match=r"format is .*: allowed is a KvFormat"):
        KvPool(LAYOUT, num_blocks=3, format=no_format)


@pytest.mark.parametrize(
    ("bent", "message"),
    [
        ({"encode": lambda rows: rows.half()}, r"returns torch.float16 \(2, 3, 4\) from encode"),
        ({"encode": lambda rows: rows.to(torch.uint8)}, r"returns torch.uint8 \(2, 3, 4\) from encode"),
        ({"encode": lambda rows: None}, "returns None from encode"),
        ({"encode": lambda rows: rows.view(torch.bool)[9]}, "fails in encode"),
        ({"decode": lambda codes: codes.view(torch.float16)}, "returns torch.float16 .* from decode"),
        ({"decode": lambda codes: codes.float()}, r"returns torch.float32 \(2, 3, 8\) from decode"),
    ],
)
def test_a_pool_tries_how_a_format_encodes(bent: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"'own' {message}"):
        KvPool(LAYOUT, num_blocks=3, format=Own(**bent))
    assert KvPool(LAYOUT, num_blocks=3, format=Own()).nbytes > 0


def filled(pool: KvPool, seed: int) -> KvPool:
    """Fills all that the pool holds with different bytes."""
    generator = torch.Generator().manual_seed(seed)
    for part in parts(pool):
        part.copy_(torch.randint(256, part.shape, generator=generator, dtype=torch.uint8))
    return pool


def parts(pool: KvPool) -> list[torch.Tensor]:
    """Everything of a block, as bytes, block by block."""
    scales = [part for part in pool.kv_scales[:2] if isinstance(part, torch.Tensor)]
    return [part.view(torch.uint8) for part in (*pool.key_caches[:2], *pool.value_caches[:2], *scales)]


FORMATS = ["f32", "bf16", "int8", "fp8", "int4"]


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_copied_block_takes_its_scales_along(four_bits: CodecFormat, name: str, backend: str) -> None:
    pool = filled(KvPool(LAYOUT, num_blocks=4, block_size=3, format=name), 1)
    before = [part.clone() for part in parts(pool)]
    pool.copy_blocks(torch.tensor([[1, 3], [2, 0]]), backend=backend)
    for part, old in zip(parts(pool), before, strict=True):
        assert torch.equal(part, old[[2, 1, 2, 1]])


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_go_to_another_pool_and_back_whole(four_bits: CodecFormat, name: str, backend: str) -> None:
    pool = filled(KvPool(LAYOUT, num_blocks=6, block_size=3, format=name), 1)
    host = filled(KvPool(LAYOUT, num_blocks=4, block_size=3, format=name), 2)
    before, kept = ([part.clone() for part in parts(each)] for each in (pool, host))
    pool.copy_blocks_to(host, torch.tensor([[5, 1], [2, 3]]), backend)
    filled(pool, 3)
    host.copy_blocks_to(pool, torch.tensor([[1, 4], [3, 5]]), backend)
    for part, old in zip(parts(pool), before, strict=True):
        assert torch.equal(part[[4, 5]], old[[5, 2]])
    for part, old in zip(parts(host), kept, strict=True):
        assert torch.equal(part[[0, 2]], old[[0, 2]])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[6, 1]], "source block 6; that cache has 6 blocks"),
        ([[1, 4]], "target block 4; that cache has 4 blocks"),
        ([[-1, 1]], "source block -1"),
        ([[1, 2], [3, 2]], "distinct targets"),
    ],
)
def test_a_transfer_that_cannot_be_made_changes_nothing(
    pairs: list[list[int]], message: str, backend: str
) -> None:
    pool = filled(KvPool(LAYOUT, num_blocks=6, block_size=3, format="int8"), 1)
    host = filled(KvPool(LAYOUT, num_blocks=4, block_size=3, format="int8"), 2)
    before = [part.clone() for part in parts(host)]
    with pytest.raises(ValueError, match=message):
        pool.copy_blocks_to(host, torch.tensor([[1, 3], *pairs]), backend)
    assert all(torch.equal(part, old) for part, old in zip(parts(host), before, strict=True))


def test_pools_that_differ_are_not_copied_to_each_other() -> None:
    pool = KvPool(LAYOUT, num_blocks=6, block_size=3, format="int8")
    for other in (
        KvPool(LAYOUT, num_blocks=6, block_size=3, format="fp8"),
        KvPool(LAYOUT, num_blocks=6, block_size=4, format="int8"),
    ):
        with pytest.raises(ValueError, match="layout, groups, block size and format"):
            pool.copy_blocks_to(other, torch.tensor([[1, 1]]))
