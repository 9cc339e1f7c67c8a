"""How one request uses the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykv.retention import Retention

NO_RETENTION = Retention()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """What a request may share, and what it leaves.

    Attributes:
        scope: requests of different scopes share no cached blocks.
        tenant: whose sessions and share of the cache count; who gets a fair share, where the queue's order is
            "fair_share".
        retention: how long its blocks matter.
        media: (offset, hash) by rising offset, as `Scheduler.submit` takes them.
    """

    scope: bytes = b""
    tenant: bytes = b""
    retention: Retention = NO_RETENTION
    media: Sequence[tuple[int, bytes]] = ()
