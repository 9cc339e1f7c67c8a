"""Why the daemon closes a connection of its own accord."""

from enum import Enum

__all__ = ["Offence"]


class Offence(Enum):
    """What a client did, or did not do; the value is what the log and, if it listens, the client are told."""

    CONTROL_FRAMES = "too many resets, control frames or header fields"
    REFUSED_CALLS = "too many calls that are not served here"
    PINGS = "too_many_pings"  # the word by which gRPC's clients know that they must ping less often
    OVERDUE = "the rest of a frame did not come in time"
    SLOW_REQUESTS = "too many requests that did not come while others waited for their room"
    STALLED = "what was sent was not read in time"
    PROTOCOL = "an error in what was sent as HTTP/2"
    VANISHED = "a keepalive ping was not answered in time"

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name.lower()
