"""Wrong arguments: one clear error that names the argument, whatever the backend."""

from __future__ import annotations

import pytest
import torch

from pykv.attention import copy_blocks, paged_attention, write_kv

BACKENDS = ["torch", "cpu"]


def arguments():
    """Returns arguments of `paged_attention` that fit: two sequences, 3 and 6 tokens long."""
    return {
        "query": torch.randn(3, 4, 8),
        "key_cache": torch.randn(5, 2, 4, 8),
        "value_cache": torch.randn(5, 2, 4, 6),
        "block_tables": torch.tensor([[1, 0], [2, 4]], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 6], dtype=torch.int32),
        "query_starts": torch.tensor([0, 1, 3], dtype=torch.int32),
    }


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_these_arguments_fit(backend):
    assert paged_attention(**arguments(), backend=backend).shape == (3, 4, 6)


WRONG_VALUES = [
    ("query", torch.randn(3, 3, 8), "query has 3 heads; it must be a multiple of key_cache's 2"),
    ("query", torch.randn(3, 4, 7), "query has head size 7; key_cache has 8"),
    ("query", torch.randn(3, 32), "query has shape .* 3 dimensions"),
    ("query", torch.randn(3, 8, 4).transpose(1, 2), "query has strides"),
    ("query", torch.randn(3, 4, 8, requires_grad=True), "query requires a gradient"),
    ("value_cache", torch.randn(5, 2, 3, 6), "must be equal"),
    ("key_cache", torch.randn(5, 2, 0, 8), "must be equal|no dimension may be 0"),
    ("key_cache", torch.randn(5, 2, 8, 4).transpose(2, 3), "key_cache has strides"),
    ("block_tables", int32(1, 2), "block_tables has shape"),
    ("block_tables", int32([1, 0]), "block_tables has 1 rows; without table_rows it needs 2"),
    ("query_starts", int32(0, 3), "query_starts has shape"),
    ("table_rows", int32(0), "table_rows has shape"),
    ("seq_lens", int32(3, 0, 6)[::2], "seq_lens has strides"),
    ("out", torch.zeros(3, 4, 8), r"out has shape .* \(3, 4, 6\)"),
    ("out", torch.zeros(3, 6, 4).transpose(1, 2), "out has strides"),
    ("sinks", torch.zeros(2), "sinks has shape"),
    ("scale", float("nan"), "scale is nan"),
    ("window", 0, "window is 0"),
    ("window", 2.5, "window is 2.5"),
    ("window", 2**31, r"window is 2147483648; .* from 1 to 2147483647, or None"),
    ("scale", 10**400, r"scale is 10{119}\.\.\.; it must be from -1e\+30 to 1e\+30"),
    ("softcap", 0.0, "softcap is 0.0"),
    ("log_sum_exp", torch.zeros(3, 2), "log_sum_exp has shape"),
    ("kv_scales", (1.0, 1.0), r"kv_scales is \(1.0, 1.0\); it must be None for a cache of torch.float32"),
    ("backend", "magic", "backend is 'magic': allowed are 'auto', 'torch', 'cpu', 'triton'"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_VALUES)
def test_a_value_that_does_not_fit_is_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**arguments(), name: value})


WRONG_TYPES = [
    ("query", torch.zeros(3, 4, 8, dtype=torch.int64)),
    ("query", [[1.0]]),
    ("value_cache", torch.zeros(5, 2, 4, 6, dtype=torch.bfloat16)),
    ("block_tables", torch.zeros(2, 2, dtype=torch.int64)),
    ("seq_lens", torch.tensor([3, 6])),
    ("query_starts", torch.tensor([0, 1, 3])),
    ("table_rows", torch.tensor([0, 1])),
    ("out", torch.zeros(3, 4, 6, dtype=torch.float16)),
    ("sinks", torch.zeros(4, dtype=torch.int32)),
    ("log_sum_exp", torch.zeros(3, 4, dtype=torch.float64)),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_a_type_that_does_not_fit_is_refused(name, value):
    with pytest.raises(TypeError, match=name):
        paged_attention(**{**arguments(), name: value})


WRONG_CONTENTS = [
    ("query_starts", int32(1, 2, 3), "query_starts"),
    ("query_starts", int32(0, 2, 1), "query_starts"),
    ("query_starts", int32(0, 1, 4), "query_starts"),
    ("query_starts", int32(0, -1, 3), "query_starts"),
    ("seq_lens", int32(3, 9), r"seq_lens\[1\] is 9; a row of block_tables holds 8 tokens"),
    ("seq_lens", int32(3, 1), r"seq_lens\[1\] is 1; the row has 2 query tokens"),
    ("seq_lens", int32(-1, 6), r"seq_lens\[0\] is -1"),
    ("block_tables", int32([1, 0], [2, 5]), "block_tables.* 5; the cache has 5 blocks"),
    ("block_tables", int32([1, 0], [-3, 4]), "block_tables.* -3; the cache has 5 blocks"),
    ("table_rows", int32(0, 2), r"table_rows\[1\] is 2; block_tables has 2 rows"),
    ("table_rows", int32(-1, 0), r"table_rows\[0\] is -1"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "value", "message"), WRONG_CONTENTS)
def test_an_index_out_of_range_is_refused_and_nothing_is_written(backend, name, value, message):
    out = torch.full((3, 4, 6), 5.0)
    message = message.replace("block 5", "5")
    with pytest.raises(ValueError, match=message.replace(".* ", "(?s:.*)")):
        paged_attention(**{**arguments(), name: value}, out=out, backend=backend)
    assert out.eq(5).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_that_no_length_needs_are_not_looked_at(backend):
    changed = {**arguments(), "block_tables": int32([1, 99], [2, 4])}
    assert paged_attention(**changed, backend=backend).isfinite().all()


def test_float64_is_served_by_the_specification_alone():
    wide = {
        name: value.double() if value.is_floating_point() else value for name, value in arguments().items()
    }
    assert paged_attention(**wide).dtype is torch.float64
    with pytest.raises(TypeError, match="'cpu', which does not serve"):
        paged_attention(**wide, backend="cpu")


def test_gradients_are_refused_only_where_they_are_recorded():
    wanted = {**arguments(), "query": torch.randn(3, 4, 8, requires_grad=True)}
    with torch.no_grad():
        assert paged_attention(**wanted).shape == (3, 4, 6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": torch.ones(2, 1, 8)}, ValueError, "key has shape"),
        ({"value": torch.ones(2, 2, 8)}, ValueError, "value has shape"),
        ({"value": torch.ones(2, 2, 6).half()}, TypeError, "value has dtype"),
        ({"key": torch.ones(2, 2, 8).half(), "value": torch.ones(2, 2, 6).half()}, TypeError, "key_cache"),
        ({"slot_mapping": torch.tensor([1, 2], dtype=torch.int32)}, TypeError, "slot_mapping has dtype"),
        ({"slot_mapping": torch.tensor([1])}, ValueError, "key has shape"),
    ],
)
def test_write_kv_refuses_what_does_not_fit(change, error, message):
    fits = {
        "key": torch.ones(2, 2, 8),
        "value": torch.ones(2, 2, 6),
        "key_cache": torch.zeros(5, 2, 4, 8),
        "value_cache": torch.zeros(5, 2, 4, 6),
        "slot_mapping": torch.tensor([1, 2]),
    }
    write_kv(**fits)
    with pytest.raises(error, match=message):
        write_kv(**{**fits, **change})


def test_copy_blocks_refuses_what_does_not_fit():
    cache = torch.zeros(5, 2, 4, 8)
    with pytest.raises(ValueError, match="key_caches has 2 layers; value_caches has 1"):
        copy_blocks([cache, cache], [cache], torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="pairs has shape"):
        copy_blocks([cache], [cache], torch.tensor([[1, 2, 3]]))
    with pytest.raises(TypeError, match="pairs has dtype"):
        copy_blocks([cache], [cache], torch.tensor([[1, 2]], dtype=torch.int32))
