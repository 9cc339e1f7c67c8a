"""What one message has of the memory for requests, and whether it makes use of it."""

from collections.abc import Callable

from pykv.service.transport.shared_budget import Sharer

__all__ = ["SLOW_SECONDS", "Room"]

SLOW_SECONDS = 1.0
"""So long a message with room may come slowly, or not at all, while others wait."""
SLOW_PART, MOST_SLOW_BYTES = 32, 16 * 1024
"""Of a message one part in so many must come within SLOW_SECONDS, or so many bytes if that is less."""
SWIFT_SECONDS, SWIFT_BYTES = 4.0, 2**20
"""A message is swift if all of it comes within so many seconds, or so many bytes of it each second."""
MOST_PUT_OFF = 5
"""So often a message gets more time because the daemon is behind with its connection."""


class Room:
    """The message's part, until it is left or lost.

    Args:
        sharer: the connection by which it comes.
        num_bytes: of the whole message.
        when_lost: is told, once, that others need its room.
        is_behind: whether the daemon has not looked yet at all that its connection sent.
        group: with whom its connection shares: a tenant; None = its peer.

    Attributes:
        is_given: whether there is, or was, room.
        is_lost: whether it went to others.
        was_slow: whether it was lost because too little came of it, and not because others have less.
        num_come: bytes of the message that came since there is room.
        num_new: the same since its time was last renewed.
        since: the loop's time at which it was given.
        due: the loop's time until which more must come while others wait.
        num_put_off: how often it got more time because the daemon was behind.
    """

    def __init__(
        self,
        sharer: Sharer,
        num_bytes: int,
        when_lost: Callable[[], None],
        is_behind: Callable[[], bool] = lambda: False,
        group: str | None = None,
    ) -> None:
        self.sharer = sharer
        self.group = sharer.peer if group is None else group
        self.num_bytes = num_bytes
        self.when_lost = when_lost
        self.is_behind = is_behind
        self.is_given = False
        self.is_lost = self.was_slow = False
        self.num_come = self.num_new = 0
        self.since = self.due = 0.0
        self.num_put_off = 0

    @property
    def least_bytes(self) -> int:
        """So many must come within SLOW_SECONDS while others wait: a byte now and then holds no room."""
        return min(self.num_bytes // SLOW_PART, MOST_SLOW_BYTES)

    @property
    def may_be_put_off(self) -> bool:
        """Whether what was sent of it may be there, and its connection has not made the daemon late too often."""
        return self.num_put_off < MOST_PUT_OFF and self.is_behind()

    def is_swift(self, now: float) -> bool:
        """Whether it goes on so that all of it comes within SWIFT_SECONDS, or SWIFT_BYTES of it a second.

        It has a second to begin, and one for each time that it was put off.
        """
        seconds = now - self.since - SLOW_SECONDS * (1 + self.num_put_off)
        return self.num_come >= min(self.num_bytes / SWIFT_SECONDS, SWIFT_BYTES) * seconds
