"""What one tenant uses at the moment, against what it may."""

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


@dataclass(slots=True, eq=False)
class _Call:
    """One call in flight, and what ended it before its time."""

    needs_operator: bool
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    error: PykvError | None = None

    def end(self, error: PykvError) -> None:
        self.error = self.error or error
        self.scope.cancel()


class Account:
    """A tenant's calls in flight and its bucket of tokens, which fills at the tenant's rate.

    A request is admitted while anything is in the bucket, and is charged what it takes even if that is more: what a
    prompt will cost is not known before it was encoded. So the bucket can owe, and then refuses until it has paid.
    """

    def __init__(self, tenant: Tenant, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenant = tenant
        self._level = tenant.burst
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
    def call(self, *, needs_operator: bool = False) -> Iterator[None]:
        """One call in flight.

        Args:
            needs_operator: whether it may go on only as long as the tenant is an operator.

        Raises:
            TenantLimitError: the tenant has as many as it may, or has used up its tokens; nothing was changed.
            UnauthenticatedError: at the end, where `end_calls` ended it.
            ForbiddenError: at the end, where the tenant is no operator any more.
        """
        self._check()
        call = _Call(needs_operator)
        with call.scope:
            self._calls.add(call)
            try:
                yield
            finally:
                self._calls.discard(call)
        if call.scope.cancelled_caught and call.error is not None:
            raise call.error

    def charge(self, num_tokens: float) -> None:
        """Takes tokens out of the bucket, or gives them back where the number is negative."""
        if self._tenant.tokens_per_second is not None:
            self._fill()
            self._level = min(self._level - num_tokens, self._tenant.burst)

    def _end_calls(self, error: PykvError, *, operator_only: bool = False) -> None:
        for call in self._calls:
            if call.needs_operator or not operator_only:
                call.end(error)

    def _check(self) -> None:
        tenant = self._tenant
        if tenant.max_in_flight is not None and self.num_in_flight >= tenant.max_in_flight:
            message = f"tenant {tenant.name} has {self.num_in_flight} calls in flight"
            raise TenantLimitError(f"{message}: allowed is {tenant.max_in_flight}", IN_FLIGHT_RETRY_SECONDS)
        if tenant.tokens_per_second is not None:
            self._fill()
            if self._level <= 0.0:
                seconds = (1.0 - self._level) / tenant.tokens_per_second
                message = f"tenant {tenant.name} has used more than its {tenant.tokens_per_second:g} tokens/s"
                raise TenantLimitError(message, seconds)

    def _fill(self) -> None:
        now = self._clock()
        gained = (now - self._filled_at) * (self._tenant.tokens_per_second or 0.0)
        self._level = min(self._level + gained, self._tenant.burst)
        self._filled_at = now
