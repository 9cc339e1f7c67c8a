"""Whether all samples of a request have come to their ends."""

from collections.abc import Iterable

from grpclib.const import Status

from pykv.service.client.failures import ServiceError
from pykv.service.client.messages import FINISH_WORDS
from pykv.service.protocol import engine_pb2 as pb

__all__ = ["OpenSamples"]

MOST_NAMED = 8


class OpenSamples:
    """The samples that have no finish reason yet.

    Args:
        num_samples: that were asked for.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._open = set(range(num_samples))

    def take(self, deltas: Iterable[pb.Delta]) -> None:
        """Notes which samples end.

        Raises:
            ServiceError: a delta is of a sample that was not asked for, or ends one for a reason that is unknown.
        """
        for delta in deltas:
            if delta.index >= self._num_samples:
                allowed = f"allowed is below n, {self._num_samples}"
                raise _broken(f"the server sent a delta of the index {delta.index}: {allowed}")
            if delta.finish_reason in FINISH_WORDS:
                self._open.discard(delta.index)
            elif delta.finish_reason:
                allowed = f"this client knows {', '.join(FINISH_WORDS.values())}"
                raise _broken(f"the server sent the finish reason {delta.finish_reason}: {allowed}")

    def check_ended(self) -> None:
        """The server has said that the answer is complete.

        Raises:
            ServiceError: a sample has no finish reason.
        """
        if self._open:
            first = sorted(self._open)[:MOST_NAMED]
            named = ", ".join(map(str, first)) + (", ..." if len(self._open) > MOST_NAMED else "")
            raise _broken(f"the server ended the answer without a finish reason of the samples {named}")


def _broken(problem: str) -> ServiceError:
    return ServiceError(problem, Status.INTERNAL.name)
