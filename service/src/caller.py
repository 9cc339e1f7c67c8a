"""One request's caller: its names towards the engine, its charges, its lines in the log."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Protocol, Self, TypedDict

import structlog

from pykv.engine.delta_stream import DeltaStream
from pykv.engine.outputs import Usage
from pykv.errors import CapacityError, DuplicateRequestError
from pykv.field_checks import duplicate_request
from pykv.retention import Retention
from pykv.service.access import Account
from pykv.service.bill import Bill, MostTokens
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.requests import check_salt, request_id_of, retention_of

__all__ = ["Caller", "log_end"]

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
    def charged(self, most: MostTokens, deltas: DeltaStream) -> Iterator[None]:
        """Reserves what a request may take out of its tenant's bucket, and settles what it took however it ends.

        What the engine makes for it is charged as it is made, whoever reads it, to the last token after the call's end.

        Before the prompt is encoded its length alone is known. A request that the engine refuses costs nothing, but for
        what was encoded in vain; one that it took costs its prompt, even if nobody waits for the end; one that is left
        before keeps the estimate.

        Raises:
            TenantLimitError: nothing is left for it; nothing was changed.
        """
        deltas.meter = bill = Bill(self.account.reserve(most.in_all), most.samples)
        cost = most.prompt
        try:
            yield
        except Exception as error:
            in_vain = error.num_encoded_tokens if isinstance(error, CapacityError) else 0
            cost = min(in_vain, most.context)
            raise
        finally:
            bill.leave(cost)

    @contextmanager
    def own_id_in_errors(self) -> Iterator[None]:
        """Names the request as the caller does where the engine would name it with its tenant.

        Raises:
            DuplicateRequestError: as the engine.
        """
        try:
            yield
        except DuplicateRequestError:
            raise duplicate_request(self.request_id) from None


def log_end(finish_reason: str | None, usage: Usage) -> None:
    """Writes what a request took into the log."""
    values = {entry.name: getattr(usage, entry.name) for entry in fields(Usage)}
    log.info("request ended", finish_reason=finish_reason, **values)
