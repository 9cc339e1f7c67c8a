"""KV events for those outside: which blocks can be found, told in batches that are numbered without a gap."""

from pykv.service.kv_events.feed import Batch, EventFeed, Subscription

__all__ = ["Batch", "EventFeed", "Subscription"]
