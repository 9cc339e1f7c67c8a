"""How a KV cache stores its numbers: the formats that pykv brings, and a registry for those of others.

A *row* is one token's key, or value, of one head. A format says how many bytes a row takes, and either names the dtype
of its numbers, which the attention backends read in place, or encodes and decodes rows itself:

    >>> from pykv.kv_format import CodecFormat, kv_format_of, register_kv_format
    >>> class Signs(CodecFormat):
    ...     '''One bit a number: whether it is negative.'''
    ...     name = "signs"
    ...     def row_bytes(self, head_dim): return -(-head_dim // 8)
    ...     def encode(self, rows): ...
    ...     def decode(self, codes, head_dim): ...
    >>> register_kv_format(Signs())
    >>> kv_format_of("signs").row_bytes(64), kv_format_of("int8").row_bytes(64), kv_format_of("bf16").row_bytes(64)
    (8, 68, 128)

The module itself needs no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pykv.errors import ConfigError
from pykv.field_checks import as_number_in, refuse, shown

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BF16",
    "USUAL_HEAD_DIM",
    "CodecFormat",
    "DtypeFormat",
    "ElementType",
    "KvFormat",
    "checked_row_bytes",
    "kv_format_names",
    "kv_format_of",
    "register_kv_format",
]

SCALE_BYTES = 4
"""A scale is a float32."""

USUAL_HEAD_DIM = 128
"""The head size by which a format is tried before a model's is known."""

Scales = tuple[float, float] | None


class ElementType(Protocol):
    """A dtype object, of torch or numpy: anything that says how many bytes an element takes."""

    @property
    def itemsize(self) -> int: ...


class KvFormat(ABC):
    """How the rows of a cache are stored.

    Attributes:
        name: what `kv_dtype` calls it.
    """

    name: str

    @abstractmethod
    def row_bytes(self, head_dim: int) -> int:
        """The bytes of one row of `head_dim` numbers, with what belongs to it alone, such as its scale."""


@dataclass(frozen=True, slots=True)
class DtypeFormat(KvFormat):
    """Rows of numbers of one dtype, which every attention backend reads in place.

    Attributes:
        dtype_name: of torch.
        itemsize: the bytes of a number.
        is_scaled: whether a number counts times a scale: those of 8 bits do.
        tensor_scales: the scale of all keys and that of all values; None: each row has a float32 of its own, which is
            its largest magnitude over the format's largest number.
    """

    name: str
    dtype_name: str
    itemsize: int
    is_scaled: bool = False
    tensor_scales: Scales = None

    @property
    def has_row_scales(self) -> bool:
        """Whether each row keeps a scale."""
        return self.is_scaled and self.tensor_scales is None

    def row_bytes(self, head_dim: int) -> int:
        return head_dim * self.itemsize + (SCALE_BYTES if self.has_row_scales else 0)

    def with_tensor_scales(self, key: float, value: float) -> DtypeFormat:
        """The same numbers with one given scale for all keys and one for all values.

        Raises:
            ConfigError: the format has no scales, or one of these is not a finite number above 0.
        """
        if not self.is_scaled:
            allowed = ", ".join(
                name for name, known in _formats.items() if getattr(known, "is_scaled", False)
            )
            raise ConfigError(
                f"kv_scales is {shown((key, value))}, but the format {self.name!r} has none: allowed with {allowed}"
            )
        of_keys, of_values = (
            as_number_in("kv_scales", scale, 0.0, math.inf, ConfigError, above_low=True, below_high=True)
            for scale in (key, value)
        )
        return replace(self, tensor_scales=(of_keys, of_values))


class CodecFormat(KvFormat):
    """Rows of bytes that only the format can read; attention over them is computed by plain torch.

    A row's bytes hold all that belongs to it, its scale too, so that they may be copied with their block.
    """

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Turns rows into bytes.

        Args:
            rows: floats [..., head_dim].

        Returns:
            uint8 [..., row_bytes(head_dim)].
        """

    @abstractmethod
    def decode(self, codes: Tensor, head_dim: int) -> Tensor:
        """Turns bytes into rows.

        Args:
            codes: uint8 [..., row_bytes(head_dim)]. Those of slots that were never written may hold anything.

        Returns:
            float32 [..., head_dim].
        """


BF16 = DtypeFormat("bf16", "bfloat16", 2)

_formats: dict[str, KvFormat] = {
    "f32": DtypeFormat("f32", "float32", 4),
    "bf16": BF16,
    "f16": DtypeFormat("f16", "float16", 2),
    "int8": DtypeFormat("int8", "int8", 1, is_scaled=True),
    "fp8": DtypeFormat("fp8", "float8_e4m3fn", 1, is_scaled=True),
}
_DTYPE_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def kv_format_names() -> tuple[str, ...]:
    """The names of the formats that pykv brings and of those that were registered."""
    return tuple(_formats)


def kv_format_of(of: str | ElementType | KvFormat, field: str = "kv_dtype") -> KvFormat:
    """The format of this name.

    Args:
        of: the name of a format or of a dtype; a format itself; or a dtype object, which stands for its numbers without
            scales.
        field: the name that an error gives it.

    Raises:
        ConfigError: no format has this name.
    """
    if isinstance(of, KvFormat):
        return of
    if not isinstance(of, str):
        if isinstance(of, type) or type(getattr(of, "itemsize", None)) is not int:
            refuse(field, of, "a KvFormat, the name of one, or a dtype", ConfigError)
        dtype_name = str(of).removeprefix("torch.")
        return DtypeFormat(_DTYPE_NAMES.get(dtype_name, dtype_name), dtype_name, of.itemsize)
    found = _formats.get(_DTYPE_NAMES.get(of, of))
    if found is None:
        refuse(field, of, f"one of {', '.join((*_formats, *_DTYPE_NAMES))}", ConfigError)
    return found


def checked_row_bytes(of: KvFormat, head_dim: int) -> int:
    """The bytes of one row, for a format from anywhere.

    Raises:
        ConfigError: it gives no number of bytes that a row can take, or fails.
    """
    try:
        found = of.row_bytes(head_dim)
    except ConfigError:
        raise
    except Exception as error:  # the format is somebody's own code
        raise ConfigError(f"the KV format {of.name!r} fails in row_bytes({head_dim}): {error!r}") from error
    if type(found) is not int or found < 1:
        raise ConfigError(
            f"the KV format {of.name!r} gives {shown(found)} as row_bytes({head_dim}): allowed is an integer above 0"
        )
    return found


def register_kv_format(added: KvFormat) -> None:
    """Lets `kv_dtype` name a format. What `encode` and `decode` of a `CodecFormat` return a pool checks.

    Raises:
        ConfigError: it is no `KvFormat` object, its name is empty, taken or reserved, or its rows have no bytes.
    """
    if not isinstance(added, KvFormat):
        is_class = isinstance(added, type) and issubclass(added, KvFormat)
        hint = f", as in {added.__name__}()" if is_class else ""
        raise ConfigError(
            f"the KV format is {shown(added)}: allowed is an object of a class derived from KvFormat{hint}"
        )
    name = getattr(added, "name", None)
    if not isinstance(name, str) or not name.strip() or name in (*_formats, *_DTYPE_NAMES, "auto"):
        refuse("the KV format's name", name, "one that is not taken", ConfigError)
    checked_row_bytes(added, USUAL_HEAD_DIM)
    _formats[name] = added
