"""What requests and tenants say about the blocks that they leave in the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pykv.field_checks import as_integer, as_number_in, optional, refuse

__all__ = ["Pin", "Retention", "checked_media", "session_bytes"]

_LARGEST_OFFSET = 2**31 - 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What a request says about the blocks that it leaves in the cache: for whom, how long, how much they matter.

    Args:
        session_id: the session that it belongs to, among its tenant's; text is the same as its UTF-8 bytes. What only
            ended sessions have used makes room first. Empty is no session id; None = no session.
        ttl_seconds: after the end of the session's last request, when it counts as ended; without a session, for the
            blocks of this request alone. On the engine's monotonic clock, as the next. None = until `end_session`.
        next_turn_seconds: counted alike, within which the session's next request is expected: its blocks are kept over
            all others until then. None = nothing is known.
        priority: -2 to 2; blocks of a higher one are kept longer, among those that sessions do not tell apart.

    Raises:
        InvalidRequestError: a value is not allowed.
    """

    session_id: bytes | str | None = None
    ttl_seconds: float | None = None
    next_turn_seconds: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if self.session_id is not None:
            _check_session("session_id", self.session_id)
        for field in ("ttl_seconds", "next_turn_seconds"):
            object.__setattr__(self, field, optional(_as_duration, field, getattr(self, field)))
        if self.next_turn_seconds is not None and self.session_id is None:
            refuse("next_turn_seconds", self.next_turn_seconds, "None, or a number together with session_id")
        object.__setattr__(self, "priority", as_integer("priority", self.priority, -2, 2))


def _as_duration(field: str, value: object) -> float:
    return as_number_in(field, value, 0.0, math.inf, below_high=True)


def _check_session(field: str, session: object) -> None:
    if not isinstance(session, (bytes, str)) or not session:
        refuse(field, session, "bytes or text that is not empty")


def session_bytes(session: bytes | str, field: str = "session") -> bytes:
    """Returns a session's id as bytes.

    Args:
        field: the name that an error gives it.

    Raises:
        InvalidRequestError: it is empty, or neither bytes nor text.
    """
    _check_session(field, session)
    return session.encode("utf-8", "surrogatepass") if isinstance(session, str) else session


def checked_media(media: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Returns media as the compiled core takes them; it checks their order and sizes.

    Raises:
        InvalidRequestError: it is no sequence, or an entry is no offset with a hash.
    """
    if isinstance(media, (str, bytes)) or not isinstance(media, Sequence):
        refuse("media", media, "a sequence of pairs of an offset and the bytes of a hash")
    checked = []
    for entry in media:
        match entry:
            case (offset, bytes(medium)):
                checked.append((as_integer("media", offset, 0, _LARGEST_OFFSET), medium))
            case _:
                refuse("media", entry, "pairs of an offset and the bytes of a hash")
    return checked
