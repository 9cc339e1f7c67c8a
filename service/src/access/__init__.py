"""Who calls, and what they may: tenants, their credentials and their limits."""

from pykv.service.access.account import Account
from pykv.service.access.gate import Gate
from pykv.service.access.shares import CacheShares
from pykv.service.access.tenant import ANYONE, Tenant, read_tenants

__all__ = ["ANYONE", "Account", "CacheShares", "Gate", "Tenant", "read_tenants"]
