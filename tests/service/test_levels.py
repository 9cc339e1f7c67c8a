"""Things in the order of magnitude of what they have."""

from pykv.service.transport.levels import Levels


def levels_of(**amounts):
    levels = Levels()
    for thing, amount in amounts.items():
        levels.put(thing, amount)
    return levels


def test_whoever_has_most_is_first_and_of_one_level_whoever_came_to_it_first():
    levels = levels_of(a=5, b=100, c=4, d=7, e=0)
    assert list(levels.above(0)) == ["b", "a", "c", "d"]
    assert list(levels.above(3)) == ["b", "a", "c", "d"]
    assert list(levels.above(4)) == ["b"]  # 5 and 7 are of its level
    assert list(levels.above(64)) == []


def test_a_thing_keeps_its_place_until_its_level_changes():
    levels = levels_of(a=4, b=4, c=4)
    levels.put("a", 7)
    assert list(levels.above(0)) == ["a", "b", "c"]
    levels.put("a", 8)
    levels.put("a", 4)
    assert (list(levels.above(0)), len(levels)) == (["b", "c", "a"], 3)


def test_what_is_discarded_is_gone_and_may_be_discarded_again():
    levels = levels_of(a=4, b=9)
    for _ in range(2):
        levels.discard("b")
    assert (list(levels.above(0)), len(levels)) == (["a"], 1)
