"""Finds the tenant behind a call, by its bearer token or by its connection's certificate."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpclib.server import Stream

from pykv.service.access.account import Account
from pykv.service.access.tenant import ANYONE, Tenant
from pykv.service.errors import ForbiddenError, UnauthenticatedError
from pykv.service.files import shown
from pykv.service.transport.sharing import share_as

__all__ = ["Gate"]

BEARER = "bearer "


class Gate:
    """The accounts of all tenants; without tenants everybody has one account without limits.

    Args:
        tenants: none = everybody may call.
    """

    def __init__(self, tenants: Sequence[Tenant] = ()) -> None:
        self._anyone = None if tenants else Account(ANYONE)
        self._accounts: dict[str, Account] = {}
        self._revoked: dict[str, Account] = {}
        self._by_token: Mapping[str, Account] = {}
        self._by_certificate: Mapping[str, Account] = {}
        self.change(tenants)

    def change(self, tenants: Sequence[Tenant]) -> None:
        """Takes tenants that were written anew.

        Whom there was before keeps what it has used, even if it was revoked meanwhile. The calls of a tenant that is
        revoked end.
        """
        if self._anyone is not None:
            return
        known = self._revoked | self._accounts
        self._accounts = {tenant.name: known.get(tenant.name) or Account(tenant) for tenant in tenants}
        self._revoked = {name: account for name, account in known.items() if name not in self._accounts}
        for tenant in tenants:
            self._accounts[tenant.name].change(tenant)
        for account in self._revoked.values():
            account.end_calls()
        accounts = self._accounts.values()
        self._by_token = {digest: each for each in accounts for digest in each.tenant.token_sha256}
        self._by_certificate = {name: each for each in accounts for name in each.tenant.certificates}

    def accounts(self) -> list[Account]:
        """All accounts."""
        return [self._anyone] if self._anyone is not None else list(self._accounts.values())

    def account_of(self, stream: Stream[Any, Any]) -> Account:
        """Who calls; from now on the call shares the room for requests with the tenant's, not with its address's.

        Raises:
            UnauthenticatedError: the call has no credential, or one that no tenant has.
        """
        if self._anyone is not None:
            return self._anyone
        account = self._account_shown(stream)
        share_as(stream, f"tenant {account.tenant.name}")
        return account

    def _account_shown(self, stream: Stream[Any, Any]) -> Account:
        """The account whose credential the call has."""
        authorization = None if stream.metadata is None else stream.metadata.get("authorization")
        if authorization is not None:
            return self._bearer(authorization)
        names = list(_certified_names(stream.peer.cert()))
        for name in names:
            if name in self._by_certificate:
                return self._by_certificate[name]
        if names:
            raise UnauthenticatedError(f"no tenant has a name of the client certificate: {shown(names)}")
        raise UnauthenticatedError(
            "the call has no credential: allowed is a bearer token, a client certificate"
        )

    def operator_of(self, stream: Stream[Any, Any]) -> Account:
        """Who calls, where it must be an operator.

        Raises:
            UnauthenticatedError: as `account_of`.
            ForbiddenError: it is none.
        """
        account = self.account_of(stream)
        if not account.tenant.operator:
            raise ForbiddenError(f"tenant {account.tenant.name} is no operator")
        return account

    def _bearer(self, authorization: str | bytes) -> Account:
        text = authorization.decode("latin-1") if isinstance(authorization, bytes) else authorization
        if text[: len(BEARER)].lower() != BEARER:
            raise UnauthenticatedError("authorization is of another kind: allowed is a bearer token")
        digest = hashlib.sha256(text[len(BEARER) :].strip().encode()).hexdigest()
        account = self._by_token.get(digest)
        if account is None:
            raise UnauthenticatedError("the bearer token is no tenant's")
        return account


def _certified_names(certificate: Mapping[str, Any] | None) -> Iterable[str]:
    """The names that the connection's verified certificate has."""
    if not certificate:
        return
    for kind, name in certificate.get("subjectAltName", ()):
        if kind in ("DNS", "URI"):
            yield name
    for part in certificate.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                yield value
