"""What requests and tenants say about the blocks that they leave in the cache."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from pykv.errors import InvalidRequestError
from pykv.field_checks import refuse, shown

__all__ = ["Pin", "Retention", "checked_media", "session_bytes"]


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
        if self.session_id is not None and (
            not isinstance(self.session_id, (bytes, str)) or not self.session_id
        ):
            self._refuse("session_id", "bytes or text that is not empty")
        for field in ("ttl_seconds", "next_turn_seconds"):
            if not _is_duration(getattr(self, field)):
                self._refuse(field, "a finite number of at least 0")
        if self.next_turn_seconds is not None and self.session_id is None:
            self._refuse("next_turn_seconds", "None, or a number together with session_id")
        if (
            isinstance(self.priority, bool)
            or not isinstance(self.priority, int)
            or not -2 <= self.priority <= 2
        ):
            self._refuse("priority", "an integer from -2 to 2")

    def _refuse(self, field: str, allowed: str) -> None:
        raise InvalidRequestError(f"{field} is {getattr(self, field)!r}; allowed: {allowed}", field)


def _is_duration(value: object) -> bool:
    if value is None:
        return True
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def session_bytes(session: bytes | str) -> bytes:
    """Returns a session's id as bytes.

    Raises:
        InvalidRequestError: it is empty, or neither bytes nor text.
    """
    if not isinstance(session, (bytes, str)) or not session:
        refuse("session", session, "bytes or text that is not empty")
    return session.encode("utf-8", "surrogatepass") if isinstance(session, str) else session


def checked_media(media: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Returns media as the compiled core takes them; it checks their order and sizes.

    Raises:
        InvalidRequestError: it is no sequence, or an entry is no offset with a hash.
    """
    if isinstance(media, (str, bytes)) or not isinstance(media, Sequence):
        refuse("media", media, "a sequence of pairs of an offset and the bytes of a hash")
    checked = []
    for place, entry in enumerate(media):
        match entry:
            case (offset, bytes(medium)) if _is_offset(offset):
                checked.append((int(offset), medium))
            case _:
                raise InvalidRequestError(
                    f"media is {shown(entry)} at place {place}: allowed are pairs of an offset and the bytes of a hash",
                    "media",
                )
    return checked


def _is_offset(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**31
