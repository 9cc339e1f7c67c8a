"""Whoever waits gets as much as the others, however much each wants at once."""

from collections import Counter

from pykv.fair_line import FairLine


def line_of(**wants: int) -> FairLine[str]:
    line: FairLine[str] = FairLine()
    for name, amount in wants.items():
        line.put(name, amount)
    return line


def serve(line: FairLine[str], amount: int) -> str:
    """Whose turn it was; it wants as much again."""
    name = line.first()
    line.serve(name, amount)
    line.put(name, amount)
    return name


def test_those_who_want_much_and_little_get_as_much() -> None:
    wants = {"much": 1000, "little": 100, "some": 250}
    line, got = line_of(**wants), Counter[str]()
    for _ in range(15 * 4):
        name = line.first()
        got[serve(line, wants[name])] += wants[name]
    assert got == dict.fromkeys(wants, 4000)


def test_who_comes_late_has_no_claim_for_the_time_before_and_owes_nothing() -> None:
    line = line_of(a=100, b=100)
    for _ in range(20):
        serve(line, 100)
    line.put("late", 50)
    assert [serve(line, 50), len(line)] == ["late", 3]
    assert {serve(line, 100) for _ in range(2)} == {"a", "b"}


def test_what_one_got_is_remembered_while_it_does_not_wait_and_not_once_it_is_forgotten() -> None:
    for leave, first in ((FairLine.discard, "b"), (FairLine.forget, "a")):
        line = line_of(a=1000, b=1100)
        assert serve(line, 1000) == "a"
        leave(line, "a")
        leave(line, "nobody")
        assert list(line.in_order()) == ["b"]
        line.put("a", 100)
        assert line.first() == first


def test_the_order_is_that_of_their_turns_and_stays_when_it_is_read_in_part() -> None:
    line = line_of(c=30, a=10, b=20)
    line.put("b", 5)  # it wants less than it said
    turns = line.in_order()
    assert next(turns) == "b"
    turns.close()
    assert list(line.in_order()) == list(line.in_order()) == ["b", "a", "c"]


def test_those_that_want_as_much_come_in_the_order_in_which_they_said_so() -> None:
    line = line_of(b=10, a=10)
    line.put("b", 10)  # nothing new
    assert list(line.in_order()) == ["b", "a"]
