"""Why the daemon closes a connection of its own accord."""

from enum import Enum

__all__ = ["Offence"]


class Offence(Enum):
    """What a client did, or did not do; the value is what the log and, if it listens, the client are told."""

    CONTROL_FRAMES = "too many resets, control frames or header fields"
    PINGS = "too_many_pings"  # the word by which gRPC's clients know that they must ping less often
    OVERDUE = "the rest of a frame did not come in time"
    VANISHED = "a keepalive ping was not answered in time"

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name.lower()
