"""Tells the cache what share of it each tenant may fill."""

from collections.abc import Callable, Iterable

from pykv.service.access.tenant import Tenant

__all__ = ["CacheShares"]

SetShare = Callable[[bytes, float], None]


class CacheShares:
    """The shares of the tenants as their file says now, once there is a cache.

    Args:
        default: the share of a tenant whose table names none.
    """

    def __init__(self, tenants: Iterable[Tenant], default: float) -> None:
        self._tenants = tuple(tenants)
        self._default = default
        self._set_share: SetShare | None = None

    def serve(self, set_share: SetShare) -> None:
        """There is a cache, which takes a tenant's share from now on."""
        self._set_share = set_share
        self._tell(())

    def change(self, tenants: Iterable[Tenant]) -> None:
        """Takes tenants that were written anew; what those who are gone have left makes room first."""
        before, self._tenants = self._tenants, tuple(tenants)
        self._tell(before)

    def _tell(self, before: Iterable[Tenant]) -> None:
        if self._set_share is None:
            return
        shares = {tenant.cache_name: 0.0 for tenant in before}
        for tenant in self._tenants:
            shares[tenant.cache_name] = self._default if tenant.cache_share is None else tenant.cache_share
        for name, share in shares.items():
            self._set_share(name, share)
