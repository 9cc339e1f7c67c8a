"""The generator gives the published words, and numbers that depend on seed, child and position alone."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.sampling.philox import philox, uniforms

# Known answers of the Random123 distribution, file kat_vectors, philox4x32 with 10 rounds.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter, key, words):
    result = philox(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert result.tolist() == [words]


def numbers(seeds, children, positions):
    return uniforms(np.array(seeds, np.uint64), np.array(children, np.int64), np.array(positions, np.int64))


def test_a_number_does_not_depend_on_its_neighbours():
    together = numbers([1, 2, 2**64 - 1], [0, 1, 2], [5, 2**40, 7])
    alone = [
        numbers([seed], [child], [position])[0]
        for seed, child, position in [(1, 0, 5), (2, 1, 2**40), (2**64 - 1, 2, 7)]
    ]
    assert together.tolist() == alone


def test_seed_child_and_position_each_change_the_number():
    seeds, children, positions = np.meshgrid([0, 1, 2**32, 2**63], range(4), range(64), indexing="ij")
    values = numbers(seeds.ravel(), children.ravel(), positions.ravel())
    assert len(set(values.tolist())) == values.size


def test_numbers_are_uniform():
    values = numbers([7] * 20_000, [0] * 20_000, range(20_000))
    assert 0.0 <= values.min() < values.max() < 1.0
    counts = np.histogram(values, 20, (0.0, 1.0))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 0.1 % of uniform samples are above, 19 degrees of freedom
