"""What requests and tenants say about the blocks that they leave in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykv.errors import InvalidRequestError

__all__ = ["Pin", "checked_media", "session_bytes"]


@dataclass(frozen=True, slots=True)
class Pin:
    """A cached prefix that is kept, as `Scheduler.pin` returns it.

    Attributes:
        id: its number, never used again.
        num_tokens: the first tokens whose blocks it holds.
        num_blocks: those blocks, over all layer groups.
    """

    id: int
    num_tokens: int
    num_blocks: int


def session_bytes(session: bytes | str) -> bytes:
    """Returns a session's id as bytes.

    Raises:
        InvalidRequestError: it is neither bytes nor text.
    """
    if isinstance(session, str):
        return session.encode("utf-8", "surrogatepass")
    if not isinstance(session, bytes):
        raise InvalidRequestError(f"session is {session!r}: allowed are bytes and text", "session")
    return session


def checked_media(media: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Returns media as the compiled core takes them; it checks their order and sizes.

    Raises:
        InvalidRequestError: an entry is no offset with a hash.
    """
    for place, entry in enumerate(media):
        match entry:
            case (int(offset), bytes()) if 0 <= offset < 2**31:
                continue
            case _:
                raise InvalidRequestError(
                    f"media is {entry!r} at place {place}: allowed are pairs of an offset and the bytes of a hash",
                    "media",
                )
    return list(media)
