"""Tenants as an operator writes them down: one TOML file, checked as a whole before any of it counts."""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pykv.errors import ConfigError
from pykv.field_checks import as_boolean, as_integer, as_number_in, optional, refuse
from pykv.service.files import read_toml, shortened, shown

__all__ = ["ANYONE", "Tenant", "read_tenants"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")
MOST = 10**15
SCOPE_LENGTH = struct.Struct(">H")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose requests are counted together.

    Args:
        name: in logs and metrics.
        token_sha256: SHA-256 digests, in lower-case hex, of the bearer tokens that stand for the tenant.
        certificates: common names, DNS names or URIs of client certificates that stand for it.
        scope: tenants of one scope share cached blocks; "" = one that is the tenant's alone, whatever others write.
        tokens_per_second: prompt and output tokens that it may use in the long run; None = no limit.
        burst_tokens: how many it may use at once before that limit counts; None = ten seconds' worth.
        max_in_flight: calls at once; None = no limit.
        cache_share: share of the cache's blocks, from 0 to 1, that its own idle ones may fill before they make room
            first; None = the daemon's `tenant_cache_share`.
        operator: whether it may see the counts of the whole daemon, which tell of other tenants' caches.

    Raises:
        ConfigError: a value is not allowed.
    """

    name: str
    token_sha256: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    scope: str = ""
    tokens_per_second: float | None = None
    burst_tokens: float | None = None
    max_in_flight: int | None = None
    cache_share: float | None = None
    operator: bool = False

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"tenant {shown(self.name)}: allowed are names of 1 to 64 letters, digits and '._-'"
            )
        self._check_credentials()
        if not isinstance(self.scope, str) or len(self.scope.encode()) > 256:
            refuse(self._own("scope"), self.scope, "a text of up to 256 bytes", ConfigError)
        for field in ("tokens_per_second", "burst_tokens"):
            optional(_as_rate, self._own(field), getattr(self, field))
        optional(as_integer, self._own("max_in_flight"), self.max_in_flight, 1, MOST, ConfigError)
        optional(as_number_in, self._own("cache_share"), self.cache_share, 0.0, 1.0, ConfigError)
        as_boolean(self._own("operator"), self.operator, ConfigError)

    @property
    def is_anyone(self) -> bool:
        """Whether this stands for everybody, because there are no tenants."""
        return self is ANYONE

    @property
    def cache_name(self) -> bytes:
        """The name by which the cache knows it: whose sessions, share and fair share they are."""
        return b"" if self.is_anyone else self.name.encode()

    @property
    def burst(self) -> float:
        """Tokens that it may use at once."""
        return self.burst_tokens or 10.0 * (self.tokens_per_second or 0.0)

    def scope_of(self, salt: bytes) -> bytes:
        """What its requests with this salt share; no other scope's requests can be made to share it."""
        if self.is_anyone:
            return salt
        kind, own = (b"s", self.scope) if self.scope else (b"n", self.name)  # a scope is no tenant's name
        return kind + SCOPE_LENGTH.pack(len(own.encode())) + own.encode() + salt

    def own_id(self, request_id: str) -> str:
        """The request's name among those of all tenants."""
        return request_id if self.is_anyone else f"{self.name}/{request_id}"

    def _check_credentials(self) -> None:
        for field in ("token_sha256", "certificates"):
            values = getattr(self, field)
            if not isinstance(values, tuple) or not all(isinstance(value, str) and value for value in values):
                raise ConfigError(f"{field} of tenant {self.name} is not allowed: allowed is a list of texts")
        for place, digest in enumerate(self.token_sha256):
            if not DIGEST.fullmatch(digest):  # not shown: it may be the token itself
                where = f"token_sha256[{place}] of tenant {self.name}"
                raise ConfigError(f"{where} is no digest: allowed are 64 digits of lower-case hex")

    def _own(self, field: str) -> str:
        """A field's name in messages."""
        return f"{field} of tenant {self.name}"


def _as_rate(field: str, value: object) -> float:
    return as_number_in(field, value, 0.0, MOST, ConfigError, above_low=True)


ANYONE = Tenant(name="anyone", operator=True)
"""Everybody, where there are no tenants."""


def read_tenants(path: Path) -> tuple[Tenant, ...]:
    """The tenants of a file, at least one.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a value is not allowed, two tenants have the same
            credential, or one has none.
    """
    tables = _tables(path)
    tenants = tuple(_tenant(name, table) for name, table in tables.items())
    _check_credentials(tenants)
    return tenants


def _tables(path: Path) -> Mapping[str, Any]:
    content = read_toml(path, "tenants")
    unknown = sorted(set(content) - {"tenants"})
    if unknown:
        raise ConfigError(
            f"{shortened(unknown[0])} in {path} is not known: allowed are tables [tenants.NAME]"
        )
    tables = content.get("tenants")
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"tenants {path} has no table [tenants.NAME]: allowed is one or more")
    return tables


def _tenant(name: str, table: Any) -> Tenant:
    known = {entry.name for entry in fields(Tenant)} - {"name"}
    if not isinstance(table, dict):
        raise ConfigError(f"tenant {shortened(name)} is no table: allowed is [tenants.NAME]")
    unknown = sorted(set(table) - known)
    if unknown:
        where = f"{shortened(unknown[0])} of tenant {shortened(name)}"
        raise ConfigError(f"{where} is not known; known: {', '.join(sorted(known))}")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    return Tenant(name=name, **values)


def _check_credentials(tenants: tuple[Tenant, ...]) -> None:
    owners: dict[tuple[str, str], str] = {}
    for tenant in tenants:
        credentials = [("token_sha256", value) for value in tenant.token_sha256]
        credentials += [("certificates", value) for value in tenant.certificates]
        if not credentials:
            allowed = "token_sha256, certificates, or both"
            raise ConfigError(f"tenant {tenant.name} has no credential: allowed is {allowed}")
        for credential in credentials:
            owner = owners.setdefault(credential, tenant.name)
            if owner != tenant.name:
                raise ConfigError(f"{credential[0]} of tenants {owner} and {tenant.name} name the same one")
