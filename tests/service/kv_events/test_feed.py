"""What comes between the engine and those who follow its KV events, alone."""

import numpy as np
import pytest

from pykv.events import KvEventKind, KvEvents
from pykv.service.kv_events.feed import EventFeed


class Source:
    def __init__(self):
        self.listener, self.sequence = None, 0

    def listen_to_events(self, listener):
        self.listener = listener
        return self.sequence

    def snapshot_events(self):
        return events(self.sequence, 0)

    def tell(self, count, lost=0):
        self.sequence += lost
        told = events(self.sequence, count)
        self.sequence += count
        self.listener(told)


def events(sequence, count):
    keys = np.zeros((count, 32), np.uint8)
    return KvEvents(
        sequence, 0, np.full(count, KvEventKind.STORED, np.uint8), keys, keys, np.ones(count, np.bool_),
        np.zeros((count, 16), np.int32),
    )  # fmt: skip


@pytest.mark.asyncio
async def test_batches_are_numbered_and_what_the_engine_lost_is_a_gap():
    feed, source = EventFeed(True), Source()
    feed.serve(source)
    with feed.subscribe() as subscription:
        batches = subscription.batches()
        start = (await anext(batches)).number
        source.tell(2)
        source.tell(3)
        taken = [await anext(batches), await anext(batches)]
        assert [(each.number - start, len(each.events), each.is_snapshot) for each in taken] == [
            (1, 2, False),
            (2, 3, False),
        ]
        source.tell(1, lost=5)
        mended = await anext(batches)
        assert (mended.number - start, mended.is_snapshot) == (4, True)
        await batches.aclose()
    assert source.listener is None
