"""The text that is shipped: long enough, in the public domain, the same for everyone.

Lewis Carroll, "Alice's Adventures in Wonderland", 1865. The wording is that of the Canterbury corpus (alice29.txt), its
lines joined to paragraphs.
"""

from __future__ import annotations

import lzma
from importlib.resources import files

__all__ = ["shipped_text"]


def shipped_text() -> str:
    """The whole book: 143,219 characters, about 37,000 tokens."""
    packed = files("pykv.quality").joinpath("alice.txt.xz").read_bytes()
    return lzma.decompress(packed).decode("ascii")
