"""What one tenant uses at the moment, against what it may."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from pykv.errors import PykvError
from pykv.service.access.tenant import Tenant
from pykv.service.errors import ForbiddenError, TenantLimitError, UnauthenticatedError

__all__ = ["Account"]

IN_FLIGHT_RETRY_SECONDS = 1.0
"""What waits for one of the tenant's own calls to end cannot know when that will be."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call in flight, and what ended it before its time."""

    needs_operator: bool
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    error: PykvError | None = None

    def end(self, error: PykvError) -> None:
        self.error = self.error or error
        self.scope.cancel()


class Reservation:
    """What one request may still take out of its tenant's bucket, and no other can. Made by `Account.reserve`."""

    __slots__ = ("_account", "_num_left")

    def __init__(self, account: "Account", num_tokens: int) -> None:
        self._account = account
        self._num_left = num_tokens

    def use(self, num_tokens: int) -> None:
        """Takes tokens out of the bucket: those that were reserved, and more than those if need be."""
        self._account._take(num_tokens)
        self._give_back(min(num_tokens, self._num_left))

    def keep(self, num_tokens: int) -> None:
        """So much of what was not used stays reserved; the rest is there for other requests."""
        self._give_back(max(self._num_left - num_tokens, 0))

    def end(self) -> None:
        """What was not used is there for other requests."""
        self.keep(0)

    def _give_back(self, num_tokens: int) -> None:
        self._num_left -= num_tokens
        self._account._num_reserved -= num_tokens


class Account:
    """A tenant's calls in flight and its bucket of tokens, which fills at the tenant's rate.

    A request is admitted while more is in the bucket than others have reserved. It reserves what it may take at most,
    but no more than the bucket holds, and is charged what it takes, even if that is more: the length of a prompt is not
    known before it was encoded. So the bucket can owe, and then refuses until it has paid.
    """

    def __init__(self, tenant: Tenant, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenant = tenant
        self._level = tenant.burst  # as if nothing were reserved
        self._num_reserved = 0
        self._filled_at = clock()
        self._calls: set[_Call] = set()

    @property
    def tenant(self) -> Tenant:
        """Whose account it is."""
        return self._tenant

    @property
    def num_in_flight(self) -> int:
        """Its calls in flight."""
        return len(self._calls)

    def change(self, tenant: Tenant) -> None:
        """The tenant was written anew: what it owes it owes on, and a first limit begins with a full bucket.

        Calls that need an operator end where it is none any more.
        """
        self._fill()
        had_limit = self._tenant.tokens_per_second is not None
        self._tenant = tenant
        self._level = min(self._level, tenant.burst) if had_limit else tenant.burst
        if not tenant.operator:
            self._end_calls(
                ForbiddenError(f"tenant {tenant.name} is no operator any more"), operator_only=True
            )

    def end_calls(self) -> None:
        """The tenant is none any more: its calls end."""
        self._end_calls(UnauthenticatedError(f"tenant {self._tenant.name} was revoked"))

    @contextmanager
    def call(self, *, needs_operator: bool = False, takes_tokens: bool = False) -> Iterator[None]:
        """One call in flight.

        Args:
            needs_operator: whether it may go on only as long as the tenant is an operator.
            takes_tokens: whether it will reserve some, and so is refused at once where none are left for that; any
                call of a tenant that owes tokens is refused.

        Raises:
            TenantLimitError: the tenant has as many as it may, or no tokens left; nothing was changed.
            UnauthenticatedError: at the end, where `end_calls` ended it.
            ForbiddenError: at the end, where the tenant is no operator any more.
        """
        self._check_in_flight()
        self._check_bucket(self._num_reserved if takes_tokens else 0)
        call = _Call(needs_operator)
        with call.scope:
            self._calls.add(call)
            try:
                yield
            finally:
                self._calls.discard(call)
        if call.scope.cancelled_caught and call.error is not None:
            raise call.error

    def reserve(self, num_tokens: int) -> Reservation:
        """Sets tokens of the bucket aside for one request, until its reservation is ended.

        Args:
            num_tokens: what it may take at most; more than the bucket holds is not reserved.

        Raises:
            TenantLimitError: others have used or reserved all there is; nothing was changed.
        """
        self._check_bucket(self._num_reserved)
        num_tokens = math.ceil(min(num_tokens, self._tenant.burst))
        self._num_reserved += num_tokens
        return Reservation(self, num_tokens)

    def _take(self, num_tokens: int) -> None:
        if self._tenant.tokens_per_second is not None:
            self._fill()
            self._level -= num_tokens

    def _end_calls(self, error: PykvError, *, operator_only: bool = False) -> None:
        for call in self._calls:
            if call.needs_operator or not operator_only:
                call.end(error)

    def _check_in_flight(self) -> None:
        tenant = self._tenant
        if tenant.max_in_flight is not None and self.num_in_flight >= tenant.max_in_flight:
            message = f"tenant {tenant.name} has {self.num_in_flight} calls in flight"
            raise TenantLimitError(f"{message}: allowed is {tenant.max_in_flight}", IN_FLIGHT_RETRY_SECONDS)

    def _check_bucket(self, num_reserved: int) -> None:
        rate = self._tenant.tokens_per_second
        if rate is None:
            return
        self._fill()
        if self._level <= 0.0:
            message = f"tenant {self._tenant.name} has used more than its {rate:g} tokens/s"
            raise TenantLimitError(message, self._seconds_until_filled(rate, num_reserved))
        if self._level <= num_reserved:
            message = (
                f"tenant {self._tenant.name} has calls that may use all that is left of its {rate:g} tokens/s"
            )
            raise TenantLimitError(message, self._seconds_until_filled(rate, num_reserved))

    def _seconds_until_filled(self, rate: float, num_reserved: int) -> float:
        """When to come again. What is reserved may be given back at any moment, so only what was used counts."""
        seconds = (1.0 - self._level) / rate
        if not num_reserved:
            return seconds
        missing = 1.0 + num_reserved - self._level
        fills_by_itself = self._level + missing <= self._tenant.burst
        seconds = max(seconds, IN_FLIGHT_RETRY_SECONDS)
        return min(missing / rate, seconds) if fills_by_itself else seconds

    def _fill(self) -> None:
        now = self._clock()
        gained = (now - self._filled_at) * (self._tenant.tokens_per_second or 0.0)
        self._level = min(self._level + gained, self._tenant.burst)
        self._filled_at = now
