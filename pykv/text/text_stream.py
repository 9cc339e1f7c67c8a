"""One sample's text as its tokens come: decoded, and searched for stop strings."""

from __future__ import annotations

from pykv.text.detokenizer import Detokenizer
from pykv.text.stop_strings import StopMatcher, StopStrings


class TextStream:
    """Turns tokens into the text that can be shown.

    Args:
        detokenizer: of this sample alone.
        stops: of the request; None = there is none.
        num_unwatched: in the text of so many tokens at the start no stop string is looked for.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings | None, num_unwatched: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = None if stops is None else StopMatcher(stops)
        self._num_unwatched = num_unwatched

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Takes the next token; returns the text to show and the stop string that ends it, if any."""
        text = self._detokenizer.push(token_id)
        if self._matcher is None:
            return text, None
        if self._num_unwatched > 0:
            self._num_unwatched -= 1
            return text, None
        return self._matcher.push(text)

    def flush(self) -> str:
        """Returns what was held back; to be called when the sample ends other than by a stop string."""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        released, stop = self._matcher.push(text)
        return released if stop is not None else released + self._matcher.flush()
