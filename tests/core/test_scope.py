"""Scopes: no two different ones are the same bytes, whatever their fields hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykv.errors import InvalidRequestError
from pykv.scope import scope_of

ADVERSARIAL: list[bytes | str | None] = [
    None,
    "",
    b"",
    "n",
    b"n",
    "a",
    b"a",
    "ab",
    "b",
    "\0",
    "s" + "\x01" + "\0" * 7 + "a",
    b"s\x01\0\0\0\0\0\0\0a",
    b"n" * 9,
    "é",
    "é".encode(),
    "e\u0301",
    "\ud800",
    "tenant\0salt",
]


def test_no_two_adversarial_scopes_are_the_same_bytes() -> None:
    fields = list(itertools.product(ADVERSARIAL, repeat=2))
    scopes = {scope_of(model=first, adapter=second) for first, second in fields}
    scopes |= {scope_of(tenant=first, salt=second) for first, second in fields[1:]}
    scopes |= {scope_of(adapter="a", adapter_generation=generation) for generation in (1, 2, 256, 2**64 - 1)}
    assert len(scopes) == 2 * len(ADVERSARIAL) ** 2 - 1 + 4


anything = st.one_of(st.none(), st.text(max_size=12), st.binary(max_size=12))
scopes = st.fixed_dictionaries(
    {
        "model": anything,
        "adapter": anything,
        "adapter_generation": st.integers(0, 2**64 - 1),
        "tenant": anything,
        "salt": anything,
    }
)


@given(scopes, scopes)
def test_scopes_are_equal_as_their_fields_are(first: dict[str, object], second: dict[str, object]) -> None:
    same = all(type(first[name]) is type(second[name]) and first[name] == second[name] for name in first)
    assert (scope_of(**first) == scope_of(**second)) == same  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("tenant", 7), ("model", ["m"]), ("adapter_generation", -1), ("adapter_generation", True)],
)
def test_a_field_of_another_type_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} is"):
        scope_of(**{field: value})  # type: ignore[arg-type]
