"""Finds stop strings in streamed text and holds back only what may still become one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request as one automaton over characters; immutable, shared by its samples.

    A state is the longest end of the text so far that begins some stop string; state 0 is the empty one.

    Source: Aho and Corasick, Efficient string matching, CACM 18(6), 1975.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depths = [0]  # by state: how many characters are held back
        self.found: list[str | None] = [None]  # by state: the longest stop string that ends here
        self.first_characters = frozenset(stop[0] for stop in stops)
        for stop in stops:
            self._add(stop)
        self._link()

    def advance(self, state: int, character: str) -> int:
        """Returns the state after one more character."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.depths.append(self.depths[state] + 1)
                self.found.append(None)
            state = self._next[state][character]
        self.found[state] = stop

    def _link(self) -> None:
        """Sets the fallbacks, breadth first, so that a state's fallback is complete before the state."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self.advance(self._fallback[state], character)
                self.found[child] = self.found[child] or self.found[self._fallback[child]]
                queue.append(child)


class StopMatcher:
    """Follows one sample's text.

    The stop string whose last character comes first wins, whatever the borders of the
    tokens; of several that end there, the longest.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes more text; returns what can be released and the stop string that was found, if any.

        After a stop string was found, what is released ends before it and nothing is held.
        """
        if self._state == 0 and self._stops.first_characters.isdisjoint(text):
            return text, None
        text = self._held + text
        for end in range(len(self._held), len(text)):
            self._state = self._stops.advance(self._state, text[end])
            stop = self._stops.found[self._state]
            if stop is not None:
                self._held, self._state = "", 0
                return text[: end + 1 - len(stop)], stop
        released = len(text) - self._stops.depths[self._state]
        self._held = text[released:]
        return text[:released], None

    def flush(self) -> str:
        """Returns what is held back; nothing is held afterwards."""
        held, self._held, self._state = self._held, "", 0
        return held
