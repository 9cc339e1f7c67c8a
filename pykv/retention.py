"""What requests and tenants say about the blocks that they leave in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykv.errors import InvalidRequestError
from pykv.field_checks import refuse, shown

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
        refuse("session", session, "bytes or text")
    return session


def checked_media(media: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Returns media as the compiled core takes them; it checks their order and sizes.

    Raises:
        InvalidRequestError: it is no sequence, or an entry is no offset with a hash.
    """
    if isinstance(media, (str, bytes)) or not isinstance(media, Sequence):
        refuse("media", media, "a sequence of pairs of an offset and the bytes of a hash")
    for place, entry in enumerate(media):
        match entry:
            case (int(offset), bytes()) if not isinstance(offset, bool) and 0 <= offset < 2**31:
                continue
            case _:
                raise InvalidRequestError(
                    f"media is {shown(entry)} at place {place}: allowed are pairs of an offset and the bytes of a hash",
                    "media",
                )
    return [(offset, medium) for offset, medium in media]
