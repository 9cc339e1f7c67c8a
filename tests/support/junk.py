"""Values of wrong kinds, and what comes of sending each of them to each parameter of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from pykv.errors import InvalidRequestError, PykvError


class Opaque:
    """An object that nothing takes, not even `repr`."""

    def __repr__(self) -> str:
        raise RuntimeError("nobody sees me")


JUNK: dict[str, Any] = {
    "none": None,
    "bool": True,
    "numpy bool": np.bool_(False),
    "negative": -1,
    "huge": 2**64,
    "negative and huge": -(2**70),
    "endless": 10**5000,
    "float": 1.5,
    "whole float": 2.0,
    "nan": float("nan"),
    "infinity": float("inf"),
    "complex": 1j,
    "text": "junk",
    "empty text": "",
    "text with a null": "a\0b",
    "bytes": b"junk",
    "list": [1, 2],
    "list of bools": [True, 3],
    "ragged list": [[1], [2, 3]],
    "list of text": ["a"],
    "mapping": {"a": 1},
    "mapping of numbers": {1: 1, "a": 2},
    "set": {1},
    "class": int,
    "opaque": Opaque(),
    "generator": (token for token in (1, 2)),
    "int array": np.arange(3),
    "int32 array": np.arange(3, dtype=np.int32),
    "float array": np.ones(3),
    "bool array": np.ones(3, bool),
    "object array": np.array([None]),
    "text array": np.array(["auto", "lru"]),
    "huge array": np.array([2**63], np.uint64),
    "negative array": np.array([-5]),
    "matrix": np.ones((1, 1), np.int64),
    "empty array": np.ones(0, np.float32),
    "scalar array": np.array(3.5),
}


class Call(NamedTuple):
    """A call with arguments that are allowed, and for each argument the junk that is none."""

    function: Callable[..., object]
    arguments: dict[str, Any]
    allowed: Mapping[str, set[str]] = MappingProxyType({})
    """Of some parameters: the junk that is allowed there."""
    part_of: Mapping[str, str] = MappingProxyType({})
    """Of some parameters: how an error names a part of them."""


def each(fields: Iterable[str], allowed: set[str]) -> dict[str, set[str]]:
    """The same junk allowed for several fields."""
    return dict.fromkeys(fields, allowed)


def is_documented(error: PykvError, function: Callable[..., object]) -> bool:
    """Whether a docstring names an error's class, or one that it derives from."""
    raises = (inspect.getdoc(function) or "").partition("\nRaises:\n")[2]
    return any(f"{kind.__name__}:" in raises for kind in type(error).__mro__)


def faults(
    calls: Iterable[Call], state: Callable[[], object], *, documented: bool = False
) -> tuple[list[str], int]:
    """Sends all junk that is not allowed.

    Args:
        documented: whether each error must be one that the call's docstring names.

    Returns:
        What was not refused as it should be, by a `PykvError` that names the field and is short, before anything was
        changed; and how often something was refused.
    """
    wrong, num_refused, before = [], 0, state()
    for call in calls:
        for field in call.arguments:
            names = {field, call.part_of.get(field, field)}
            for kind in JUNK.keys() - call.allowed.get(field, set()):
                what = f"{call.function.__qualname__}({field}={kind})"
                try:
                    result = call.function(**call.arguments | {field: JUNK[kind]})
                except PykvError as error:
                    num_refused += 1
                    if documented and not is_documented(error, call.function):
                        wrong.append(
                            f"{what} raises {type(error).__name__}, which its docstring does not name"
                        )
                    if not any(name in str(error) for name in names) or len(str(error)) > 1000:
                        wrong.append(f"{what} does not name it, or is long: {error}")
                    elif isinstance(error, InvalidRequestError) and error.field not in names:
                        wrong.append(f"{what} has field {error.field}: {error}")
                except Exception as error:
                    wrong.append(f"{what} raises {type(error).__name__}: {error}")
                else:
                    wrong.append(f"{what} gives {result!r}")
        if state() != before:
            wrong.append(f"{call.function.__qualname__} changed something")
            before = state()
    return wrong, num_refused
