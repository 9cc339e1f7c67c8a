"""What each token of a byte-level tokenizer stands for."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Tokenizer

Piece = str | bytes
"""A token's text where it holds whole characters, else its bytes."""


def byte_level_pieces(backend: Tokenizer) -> list[Piece] | None:
    """Returns the piece of each token id, or None where the tokenizer does not decode byte by byte.

    Special tokens and ids without a token stand for nothing.
    """
    description = json.loads(backend.to_str())
    if not _decodes_bytes(description["decoder"]):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces: list[Piece] = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        pieces[token_id] = _piece(token)
    for added in description["added_tokens"]:
        pieces[added["id"]] = "" if added["special"] else added["content"]
    return pieces


def _decodes_bytes(decoder: dict[str, object] | None) -> bool:
    return decoder is not None and decoder["type"] == "ByteLevel"


def _piece(token: str) -> Piece:
    byte_of = _byte_of_character()
    try:
        raw = bytes(byte_of[character] for character in token)
    except KeyError:
        return token
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


@cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable bytes stand for themselves, the others from U+0100 on.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
