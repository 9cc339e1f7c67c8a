"""One request's caller: its names towards the engine, its charges, its lines in the log."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Protocol, Self, TypedDict

import structlog

from pykv.engine.delta_stream import DeltaStream
from pykv.engine.outputs import OutputDelta, Usage
from pykv.errors import CapacityError
from pykv.retention import Retention
from pykv.sampling import SamplingParams
from pykv.service.access import Account
from pykv.service.access.account import Reservation
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.requests import check_salt, request_id_of, retention_of

__all__ = ["Caller", "MostTokens", "estimated_tokens", "log_end"]

CHARACTERS_A_TOKEN = 4
NO_RETENTION = Retention()

log = structlog.get_logger("pykv.service")


class Named(Protocol):
    """A request message."""

    request_id: str
    cache_salt: bytes

    @property
    def retention(self) -> pb.Retention:
        """How long its blocks matter."""


class EngineNames(TypedDict):
    """What the engine is told of the caller."""

    request_id: str
    scope: bytes
    tenant: bytes
    retention: Retention


@dataclass(slots=True)
class Caller:
    """Who asked for one request.

    Attributes:
        request_id: as the caller knows it.
        salt: as the caller gave it.
        retention: how long its blocks matter.
    """

    account: Account
    request_id: str
    salt: bytes = b""
    retention: Retention = NO_RETENTION
    _bill: "_Bill | None" = field(default=None, init=False)

    @classmethod
    def of(cls, account: Account, request: Named) -> Self:
        """The caller of a request.

        Raises:
            InvalidRequestError: the request's name, salt or retention is not allowed.
        """
        return cls(
            account,
            request_id_of(request.request_id),
            check_salt(request.cache_salt),
            retention_of(request.retention),
        )

    def names(self) -> EngineNames:
        """The request's names in the engine, where no two tenants share one."""
        tenant = self.account.tenant
        return EngineNames(
            request_id=tenant.own_id(self.request_id),
            scope=tenant.scope_of(self.salt),
            tenant=tenant.cache_name,
            retention=self.retention,
        )

    def logged(self) -> AbstractContextManager[object]:
        """Puts the request's id, and its tenant, into all lines of the log."""
        tenant = self.account.tenant
        values = {} if tenant.is_anyone else {"tenant": tenant.name}
        return structlog.contextvars.bound_contextvars(request_id=self.request_id, **values)

    @contextmanager
    def charged(self, most: "MostTokens", deltas: DeltaStream) -> Iterator[None]:
        """Reserves what a request may take out of its tenant's bucket, and settles what it took however it ends.

        Before the prompt is encoded its length alone is known. A request that the engine refuses costs nothing, but for
        what was encoded in vain; one that it took costs its prompt, even if nobody waits for the end; one that is left
        before keeps the estimate.

        Raises:
            TenantLimitError: nothing is left for it; nothing was changed.
        """
        with self.account.reserved(most.in_all) as reservation:
            self._bill = bill = _Bill(reservation, deltas)
            cost = most.prompt
            try:
                yield
            except Exception as error:
                in_vain = error.num_encoded_tokens if isinstance(error, CapacityError) else 0
                cost = min(in_vain, most.context)
                raise
            finally:
                bill.settle_prompt(cost)

    def charge(self, delta: OutputDelta) -> None:
        """Charges the tenant for new tokens of the output, and for the prompt with the first of them."""
        if self._bill is not None:
            self._bill.add(delta)


class _Bill:
    """What one request has taken of what was reserved for it."""

    __slots__ = ("_deltas", "_has_prompt", "_reservation")

    def __init__(self, reservation: Reservation, deltas: DeltaStream) -> None:
        self._reservation = reservation
        self._deltas = deltas
        self._has_prompt = False

    def add(self, delta: OutputDelta) -> None:
        """Takes new tokens of the output."""
        self.settle_prompt(0)
        self._reservation.use(len(delta.token_ids))

    def settle_prompt(self, cost: int) -> None:
        """Takes the prompt, once: its tokens where the engine has taken it, and so much where it has not."""
        if not self._has_prompt:
            self._has_prompt = True
            known = self._deltas.num_prompt_tokens
            self._reservation.use(cost if known is None else known)


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


def log_end(finish_reason: str | None, usage: Usage) -> None:
    """Writes what a request took into the log."""
    values = {entry.name: getattr(usage, entry.name) for entry in fields(Usage)}
    log.info("request ended", finish_reason=finish_reason, **values)
