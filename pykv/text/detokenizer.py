"""Streamed decoding: a token's text as soon as its last character is complete, never a part of one."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from pykv.text.token_pieces import Piece

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text."""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that it completes."""
        ...

    def flush(self) -> str:
        """Returns what is still held back, an unfinished character as U+FFFD; nothing is held afterwards."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers: an incremental UTF-8 decoder over the tokens' bytes.

    Args:
        pieces: by token id; ids beyond its end stand for nothing.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_bytes = False

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id] if token_id < len(self._pieces) else ""
        if isinstance(piece, str) and not self._holds_bytes:
            return piece
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        self._holds_bytes = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._holds_bytes = False
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window of tokens with and without the new ones.

    Args:
        backend: decodes; only read.
        context: tokens before the first one, which decide whether a leading space stays.
    """

    _CONTEXT_TOKENS = 6
    _CHARACTER_TOKENS = 3  # an unfinished character has at most three bytes, each at most one token
    _MOST_PENDING_TOKENS = 12

    def __init__(self, backend: Tokenizer, context: Sequence[int] = ()) -> None:
        self._backend = backend
        self._context = [int(token_id) for token_id in context[-self._CONTEXT_TOKENS :]]
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        if not self._decode(self._context + self._pending).endswith(REPLACEMENT):
            return self._release(len(self._pending))
        if len(self._pending) > self._MOST_PENDING_TOKENS:
            return self._release(len(self._pending) - self._CHARACTER_TOKENS)
        return ""

    def flush(self) -> str:
        return self._release(len(self._pending))

    def _release(self, num_tokens: int) -> str:
        released, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        text = self._decode(self._context + released)[len(self._context_text) :]
        if text:  # a context of whole releases never begins inside a character
            self._context = released
            self._context_text = self._decode(self._context)
        else:
            self._context = self._context + released
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=True)
