"""Token ids as the compiled core takes them: int32, one dimension, contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pykv.errors import InvalidRequestError
from pykv.field_checks import refuse

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["as_token_array", "holds_bools"]

_INT32_MAX = 2**31 - 1


def as_token_array(tokens: NDArray[np.int32] | Sequence[int], field: str) -> NDArray[np.int32]:
    """Returns token ids as a contiguous int32 array: the same one, if it is one already.

    Args:
        tokens: at least one integer, in one dimension.
        field: the name that an error gives them.

    Raises:
        InvalidRequestError: there are none, they are no integers, or one is out of the range of int32.
    """
    if (
        isinstance(tokens, np.ndarray)
        and tokens.dtype == np.int32
        and tokens.ndim == 1
        and tokens.size > 0
        and tokens.flags.c_contiguous
        and tokens.flags.aligned
    ):
        return tokens
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InvalidRequestError(f"{field} is no array: {error}", field) from error
    if array.ndim == 0:
        refuse(field, tokens, "a sequence of token ids")
    if array.ndim != 1:
        raise InvalidRequestError(f"{field} has {array.ndim} dimensions: allowed is one", field)
    if array.size == 0:
        raise InvalidRequestError(f"{field} is empty: allowed is at least one token", field)
    has_bools = holds_bools(tokens)
    if array.dtype.kind not in "iu" or has_bools:
        held = "bools" if has_bools else array.dtype
        raise InvalidRequestError(f"{field} holds {held}: allowed are integers", field)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > _INT32_MAX:
        wrong = low if low < 0 else high
        raise InvalidRequestError(
            f"{field} holds {wrong}: allowed are token ids from 0 to {_INT32_MAX}", field
        )
    return np.require(array, np.int32, ["C", "ALIGNED"])


def holds_bools(tokens: object) -> bool:
    """Whether a bool stands in a list, which numpy takes for an integer where others are."""
    return isinstance(tokens, (list, tuple)) and bool in set(map(type, tokens))
