"""What one request may take out of its tenant's bucket, and what it takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pykv.engine.delta_stream import DeltaStream
from pykv.engine.outputs import OutputDelta
from pykv.sampling import SamplingParams
from pykv.service.access.account import Reservation

__all__ = ["Bill", "MostTokens", "estimated_tokens"]

CHARACTERS_A_TOKEN = 4


class Bill:
    """What one request has taken of what was reserved for it."""

    __slots__ = ("_deltas", "_has_prompt", "_reservation")

    def __init__(self, reservation: Reservation, deltas: DeltaStream) -> None:
        self._reservation = reservation
        self._deltas = deltas
        self._has_prompt = False

    def add(self, delta: OutputDelta) -> None:
        """Takes new tokens of the output, and the prompt with the first of them."""
        self._take_prompt()
        self._reservation.use(len(delta.token_ids))

    def settle_prompt(self, cost: int) -> None:
        """Takes at the end the prompt, if `add` has not; `cost` where the engine has not taken the request."""
        if not self._take_prompt():
            self._reservation.use(cost)

    def _take_prompt(self) -> bool:
        """Takes the prompt's tokens, once, as soon as the engine has taken the request; whether it has."""
        num_tokens = self._deltas.num_prompt_tokens
        if num_tokens is None:
            return False
        if not self._has_prompt:
            self._has_prompt = True
            self._reservation.use(num_tokens)
        return True


@dataclass(frozen=True, slots=True)
class MostTokens:
    """How many tokens a request may take at most, as far as that is known before its prompt is encoded.

    Attributes:
        prompt: about how long it is, or the context cap if that is less.
        in_all: with all of its output.
        context: the context cap, of one sample.
    """

    prompt: int
    in_all: int
    context: int

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
        return cls(prompt, prompt + params.n * longest, context)


def estimated_tokens(*parts: str | Sequence[int]) -> int:
    """About how many tokens the texts, or token ids, of a prompt are."""
    num_characters = sum(len(part) for part in parts if isinstance(part, str))
    num_ids = sum(len(part) for part in parts if not isinstance(part, str))
    return num_characters // CHARACTERS_A_TOKEN + num_ids
