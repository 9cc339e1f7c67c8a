"""Stop strings across tokens: minimal hold-back, nothing lost, nothing of the stop string shown."""

from __future__ import annotations

import random

import pytest

from pykv.text.stop_strings import StopMatcher, StopStrings


def run(stops, tokens):
    """Returns what each token released, what the end flushed, and the stop string."""
    matcher, released = StopMatcher(StopStrings(stops)), []
    for token in tokens:
        text, stop = matcher.push(token)
        released.append(text)
        if stop is not None:
            return released, matcher.flush(), stop
    return released, matcher.flush(), None


def naive(stops, text):
    """The text before the stop string that is complete first, the longest of those that end there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_a_stop_string_over_four_tokens_shows_nothing_of_itself():
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "JK"]) == (["ABC", "", "", "", ""], "", "DEFGHIJ")


def test_only_a_real_prefix_is_held_back():
    assert run(["DEFGHIJ"], ["DEF", "X"]) == (["", "DEFX"], "", None)
    assert run(["DEFGHIJ"], ["DEFX"]) == (["DEFX"], "", None)
    assert run(["aab"], ["aaa", "a"]) == (["a", "a"], "aa", None)


def test_of_two_stops_where_one_begins_the_other_the_shorter_is_found():
    assert run(["ABC", "AB"], ["xA", "B", "C"]) == (["x", ""], "", "AB")


def test_a_stop_inside_one_token_drops_the_text_after_it():
    assert run(["END"], ["some END more"]) == (["some "], "", "END")


def test_a_stop_that_is_the_first_output_leaves_nothing():
    assert run(["END"], ["END"]) == ([""], "", "END")


def test_what_was_held_back_comes_out_at_the_end():
    assert run(["</s>x"], ["hello", "</s"]) == (["hello", ""], "</s", None)


@pytest.mark.parametrize("seed", range(8))
def test_the_result_does_not_depend_on_the_cuts(seed):
    source = random.Random(seed)
    for _ in range(300):
        stops = ["".join(source.choices("ab", k=source.randint(1, 4))) for _ in range(source.randint(1, 3))]
        text = "".join(source.choices("abc", k=source.randint(0, 12)))
        cuts = sorted(source.choices(range(len(text) + 1), k=3))
        tokens = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        released, flushed, stop = run(stops, tokens)
        assert ("".join(released) + flushed, stop) == naive(stops, text)


def test_many_long_stop_strings_cost_little_a_character():
    stops = StopStrings(["a" * 255 + chr(0x100 + index) for index in range(16)])
    matcher = StopMatcher(stops)
    assert sum(len(matcher.push("a" * 50)[0]) for _ in range(100)) == 5000 - 255
