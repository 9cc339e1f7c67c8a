"""Random numbers without state: each is a function of a seed, a sample's index and a position alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint32)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counters: npt.NDArray[np.uint32], keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Philox 4x32-10 of each row.

    Args:
        counters: [n, 4].
        keys: [n, 2].

    Returns:
        [n, 4] random words.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011, section 3.3.
    """
    for _ in range(_ROUNDS):
        products = counters[:, 0::2] * _MULTIPLIERS
        high = (products >> _HALF).astype(np.uint32)[:, ::-1]
        low = (products & _LOW).astype(np.uint32)[:, ::-1]
        counters = np.stack([high ^ counters[:, 1::2] ^ keys, low], axis=-1).reshape(-1, 4)
        keys = keys + _KEY_STEPS
    return counters


def uniforms(
    seeds: npt.NDArray[np.uint64], children: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, child, position); arrays of one length."""
    places = positions.astype(np.uint64)
    counters = np.stack([_low(places), _high(places), _low(children.astype(np.uint64)), _low(places * 0)], 1)
    words = philox(counters, np.stack([_low(seeds), _high(seeds)], 1)).astype(np.uint64)
    bits = (words[:, 0] << np.uint64(21)) ^ (words[:, 1] >> np.uint64(11))  # 53 bits
    return np.asarray(bits * 2.0**-53, np.float64)


def _low(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    return (values & _LOW).astype(np.uint32)


def _high(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    return (values >> _HALF).astype(np.uint32)
