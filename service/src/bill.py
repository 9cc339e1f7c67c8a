"""What one request may take out of its tenant's bucket, and what it takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pykv.sampling import SamplingParams
from pykv.service.access.account import Reservation

__all__ = ["Bill", "MostTokens", "estimated_tokens"]

BYTES_A_TOKEN = 4


class Bill:
    """What one request has taken of what was reserved for it: a `Meter`, so what is not read is on it too.

    Args:
        num_samples: of the request.
    """

    __slots__ = ("_has_begun", "_num_samples", "_reservation")

    def __init__(self, reservation: Reservation, num_samples: int) -> None:
        self._reservation = reservation
        self._num_samples = num_samples
        self._has_begun = False

    def begin(self, num_prompt_tokens: int) -> None:
        """The engine has taken the request: its prompt is on the bill."""
        self._has_begun = True
        self._reservation.use(num_prompt_tokens)

    def count(self, num_tokens: int) -> None:
        """So many tokens of output were made."""
        self._reservation.use(num_tokens)

    def end(self) -> None:
        """The request has ended in the engine: what it has not taken is given back."""
        self._reservation.end()

    def leave(self, cost: int) -> None:
        """The call has ended.

        If the request has not ended in the engine, the step that runs may make a token of each sample: that stays
        reserved until it has.

        Args:
            cost: what it takes where the engine has not taken the request.
        """
        if self._has_begun:
            self._reservation.keep(self._num_samples)
        else:
            self._reservation.use(cost)
            self._reservation.end()


@dataclass(frozen=True, slots=True)
class MostTokens:
    """How many tokens a request may take at most, as far as that is known before its prompt is encoded.

    Attributes:
        prompt: about how long it is, or the context cap if that is less.
        in_all: with all of its output.
        context: the context cap, of one sample.
        samples: how many there are of it, each of which gets at most one token a step.
    """

    prompt: int
    in_all: int
    context: int
    samples: int

    @classmethod
    def of(cls, estimate: int, params: SamplingParams, context: int) -> Self:
        """Of a request.

        Args:
            estimate: of the prompt's tokens, as `estimated_tokens` gives it.
            context: the context cap.
        """
        prompt = min(estimate, context)
        room = context - prompt
        longest = room if params.max_tokens is None else min(params.max_tokens, room)
        return cls(prompt, prompt + params.n * longest, context, params.n)


def estimated_tokens(*parts: str | Sequence[int]) -> int:
    """About how many tokens the texts, or token ids, of a prompt are; hardly ever more than four times as many."""
    num_bytes = sum(len(part.encode(errors="surrogatepass")) for part in parts if isinstance(part, str))
    num_ids = sum(len(part) for part in parts if not isinstance(part, str))
    return num_bytes // BYTES_A_TOKEN + num_ids
