"""Every parameter of the attention's public functions gets junk: refused by name, in few words, changing nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from junk import Opaque

from pykv import attention
from pykv.attention import LayerCache, copy_blocks, dequantize, paged_attention, transfer_blocks, write_kv

JUNK: dict[str, Any] = {
    "none": None,
    "bool": True,
    "numpy bool": np.bool_(False),
    "zero": 0,
    "negative": -1,
    "one": 1,
    "numpy integer": np.int64(3),
    "huge": 2**64,
    "very huge": 10**30,
    "400 digits": 10**400,
    "endless": 10**5000,
    "float": 1.5,
    "numpy float": np.float32(1.5),
    "nan": float("nan"),
    "infinity": float("inf"),
    "complex": 1j,
    "text": "x",
    "long text": "x" * 10_000,
    "bytes": b"junk",
    "empty list": [],
    "list": [1, 2],
    "two numbers": (0.5, np.float32(0.25)),
    "two bad numbers": (0.5, -1.0),
    "two huge numbers": (10**400, 1),
    "two texts": ("a", "b"),
    "list of none": [None],
    "mapping": {"a": 1},
    "class": int,
    "opaque": Opaque(),
    "array": np.ones(3),
    "scalar tensor": torch.tensor(1.0),
    "empty tensor": torch.zeros(0),
    "matrix": torch.ones(2, 2),
    "bool tensor": torch.ones(1, 1, 1, 1, dtype=torch.bool),
    "complex tensor": torch.zeros(3, 4, 8, dtype=torch.complex64),
    "sparse tensor": torch.zeros(4, 1, 2, 8).to_sparse(),
    "nested tensor": torch.nested.nested_tensor([torch.zeros(1, 2), torch.zeros(2, 2)], layout=torch.jagged),
    "meta tensor": torch.zeros(4, 1, 2, 8, device="meta"),
    "large tensor": torch.zeros(100, 100),
}
POSITIVE = {"none", "one", "numpy integer", "float", "numpy float", "huge", "very huge"}
NUMBERS = {*POSITIVE, "zero", "negative"}


class Call(NamedTuple):
    """A call with arguments that are allowed, and for each argument the junk that is none."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    allowed: Mapping[str, set[str]] = MappingProxyType({})


def layer(dtype: torch.dtype = torch.int8) -> dict[str, torch.Tensor]:
    return {name: torch.ones(4, 1, 2, 8).to(dtype) for name in ("key_cache", "value_cache")}


def moved() -> LayerCache:
    return LayerCache(*layer().values(), torch.ones(4, 2, 1, 2))


def calls() -> list[Call]:
    scales, rows, pairs = torch.ones(4, 2, 1, 2), torch.ones(3, 1, 8), torch.tensor([[1, 2]])
    step = {
        "block_tables": torch.tensor([[1, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([3], dtype=torch.int32),
        "query_starts": torch.tensor([0, 3], dtype=torch.int32),
        "table_rows": torch.tensor([0], dtype=torch.int32),
    }
    options = {"scale": 1.0, "window": 2, "softcap": 30.0, "sinks": torch.zeros(2), "backend": "auto"}
    results = {"out": torch.zeros(3, 2, 8), "log_sum_exp": torch.zeros(3, 2)}
    none = {"none"}
    return [
        Call(
            paged_attention,
            {"query": torch.ones(3, 2, 8), **layer(), **step, **options, "kv_scales": scales, **results},
            {
                "table_rows": none,
                "scale": NUMBERS,
                "window": {"none", "one", "numpy integer"},
                "softcap": POSITIVE,
                "sinks": none,
                "kv_scales": {"two numbers", "list"},
                "out": none,
                "log_sum_exp": none,
            },
        ),
        Call(
            write_kv,
            {
                "key": rows,
                "value": rows.clone(),
                **layer(),
                "slot_mapping": torch.tensor([2, 3, 6]),
                "kv_scales": scales,
                "backend": "auto",
            },
            {"kv_scales": {"two numbers", "list"}},
        ),
        Call(
            copy_blocks,
            {
                "key_caches": [layer()["key_cache"]],
                "value_caches": [layer()["value_cache"]],
                "pairs": pairs,
                "kv_scales": [scales],
                "backend": "auto",
            },
        ),
        Call(
            copy_blocks,  # numbers that need no scales
            {
                "key_caches": [layer(torch.float32)["key_cache"]],
                "value_caches": [layer(torch.float32)["value_cache"]],
                "pairs": pairs,
                "kv_scales": None,
                "backend": "torch",
            },
            {"kv_scales": {"none", "empty list", "list of none"}},
        ),
        Call(
            transfer_blocks,
            {"sources": [moved()], "targets": [moved()], "pairs": pairs, "backend": "auto"},
        ),
        Call(dequantize, {**layer(), "kv_scales": scales}, {"kv_scales": {"two numbers", "list"}}),
    ]


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors that an argument holds."""
    if isinstance(value, LayerCache):
        return list(value.parts())
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("number", range(len(calls())))
def test_junk_is_refused_by_name_and_changes_nothing(number: int) -> None:
    call = calls()[number]
    before = [tensor.clone() for tensor in tensors(call.arguments)]
    wrong = []
    for field in call.arguments:
        for kind in JUNK.keys() - call.allowed.get(field, set()):
            what = f"{call.function.__name__}({field}={kind})"
            try:
                result = call.function(**call.arguments | {field: JUNK[kind]})
            except (TypeError, ValueError) as error:
                message = str(error)
                if not message.startswith(field) and f"; {field} has" not in message:
                    wrong.append(f"{what} does not name it: {message}")
                elif len(message) > 400 or not any(word in message for word in ("must", "allowed")):
                    wrong.append(f"{what} does not say what is allowed, briefly: {message[:500]}")
            except Exception as error:
                wrong.append(f"{what} raises {type(error).__name__}: {error}")
            else:
                wrong.append(f"{what} gives {result!r:.100}")
        if not all(map(torch.equal, tensors(call.arguments), before)):
            wrong.append(f"{call.function.__name__}({field}=...) changed something")
            before = [tensor.clone() for tensor in tensors(call.arguments)]
    assert not wrong, "\n".join(wrong)


def test_what_the_table_allows_is_taken() -> None:
    for call in calls():
        call.function(**call.arguments)
        for field, kinds in call.allowed.items():
            for kind in kinds:
                call.function(**call.arguments | {field: JUNK[kind]})


def test_no_public_parameter_is_left_out() -> None:
    public = {getattr(attention, name) for name in attention.__all__}
    wanted = {
        (thing, parameter)
        for thing in public
        if inspect.isfunction(thing)
        for parameter in inspect.signature(thing).parameters
    }
    assert len(wanted) > 30
    assert wanted == {(call.function, field) for call in calls() for field in call.arguments}
