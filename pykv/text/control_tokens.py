"""Keeps text that a user wrote from being read as control tokens such as `<|im_end|>`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer


class ControlTokens:
    """Splits the control tokens in a user's text by a mark that becomes one token, which is then dropped.

    All other tokens come out as they would without it. The mark is random, so that no text can hold it.

    Args:
        backend: gets the mark as one more token; its ids below are unchanged.
    """

    def __init__(self, backend: Tokenizer) -> None:
        specials = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        self._pattern = _any_of(content for content in specials if len(content) > 1)
        self._mark = f"pykv{secrets.token_hex(16)}"
        backend.add_special_tokens([AddedToken(self._mark, special=True, normalized=False)])
        mark_id = backend.token_to_id(self._mark)
        assert mark_id is not None, "a token that was just added has an id"
        self._mark_id = mark_id

    def defuse(self, text: str) -> str:
        """Returns the text with a mark inside each control token."""
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: f"{match[0][0]}{self._mark}{match[0][1:]}", text)
        return text

    def drop_marks(self, token_ids: list[int]) -> list[int]:
        """Returns the ids without those of the mark."""
        return [token_id for token_id in token_ids if token_id != self._mark_id]


def _any_of(contents: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
