"""One wording for what a number must be, numpy's numbers taken like Python's, and short values in messages."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from pykv import EngineConfig, KvLayout, KvPool, Retention, SamplingParams, SchedulerConfig
from pykv.errors import ConfigError, InvalidRequestError
from pykv.field_checks import as_integer, as_number_in, optional
from pykv.layer_groups import StateGroup, StateTensor
from pykv.layout import KvLayer
from pykv.simulator.cost import CostModel
from pykv.state_pool import StatePool


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5)])
def test_integers_of_numpy_are_integers(value: int) -> None:
    found = as_integer("n", value, 1, 9)
    assert (found, type(found)) == (5, int)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float16(0.5), Fraction(1, 2)])
def test_real_numbers_become_floats(value: float) -> None:
    found = as_number_in("n", value, 0.0, 1.0)
    assert (found, type(found)) == (0.5, float)


@pytest.mark.parametrize(
    ("bounds", "ends", "allowed", "taken", "refused"),
    [
        ((0, 1), {}, "a number from 0 to 1", [0, 1], [-1e-9, 1.1]),
        ((0, 1), {"above_low": True}, "a number above 0 and at most 1", [1e-9, 1], [0, 2]),
        ((0, 1), {"below_high": True}, "a number of at least 0 and below 1", [0, 0.9], [1]),
        ((0, 1), {"above_low": True, "below_high": True}, "a number above 0 and below 1", [0.5], [0, 1]),
        ((0, math.inf), {"below_high": True}, "a finite number of at least 0", [0, 1e300], [math.inf, -1]),
        ((-2, 2), {}, "a number from -2 to 2", [-2, 2], [3, -3]),
    ],
)
def test_ends_of_a_range(
    bounds: tuple[float, float], ends: dict[str, bool], allowed: str, taken: list[float], refused: list[float]
) -> None:
    assert [as_number_in("share", value, *bounds, **ends) for value in taken] == taken
    for value in [*refused, math.nan, True, "0.5", 10**400, -(10**400)]:
        with pytest.raises(InvalidRequestError, match="share is ") as caught:
            as_number_in("share", value, *bounds, **ends)
        assert str(caught.value).endswith(f": allowed is {allowed}")
        assert len(str(caught.value)) < 250


def test_what_is_not_given_is_not_checked() -> None:
    assert optional(as_integer, "n", None, 1, 2) is None
    with pytest.raises(ConfigError, match="n is 3: allowed is an integer from 1 to 2"):
        optional(as_integer, "n", 3, 1, 2, ConfigError)


@pytest.mark.parametrize("value", [0, 2**64])
def test_a_range_of_all_that_its_type_holds_names_no_number_of_twenty_digits(value: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"allowed is an integer of at least 1, in 64 bits$"):
        as_integer("n", value, 1, 2**64 - 1)


def test_every_face_takes_the_numbers_of_numpy() -> None:
    one, half, layout = np.int64(2), np.float32(0.5), KvLayout((KvLayer(1, 4, 4),))
    config = EngineConfig(
        block_size=one, num_blocks=np.int32(9), watermark=half, swap_space_bytes=np.int64(0)
    )
    assert (config.block_size, config.num_blocks, config.watermark) == (2, 9, 0.5)
    assert [type(value) for value in (config.block_size, config.watermark)] == [int, float]
    assert SchedulerConfig(num_blocks=np.int64(9)).num_blocks == 9
    assert SamplingParams(max_tokens=one, temperature=half).max_tokens == 2
    assert Retention(ttl_seconds=half, priority=one).ttl_seconds == 0.5
    assert KvPool(layout, one, one).nbytes == 2 * 2 * 8 * 2
    assert StatePool(StateGroup(((StateTensor((one,)),),)), one).nbytes == 2 * 2 * 4
    assert CostModel(fixed=half, window=one).window == 2
