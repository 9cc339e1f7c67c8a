"""Batches of KV events as messages of `pykv.v1`."""

from collections.abc import Iterator
from dataclasses import replace

from pykv.events import KvEventKind, KvEvents
from pykv.service.kv_events.feed import Batch
from pykv.service.protocol import engine_pb2 as pb

__all__ = ["EVENTS_A_MESSAGE", "messages_of", "parts_of"]

EVENTS_A_MESSAGE = 1024
"""Parts of a snapshot are small enough for any client's limit of a message."""


def parts_of(batch: Batch) -> Iterator[tuple[int, int, Batch]]:
    """The index, the number of parts, and the part: a snapshot in pieces, whose numbers end with its own."""
    count = max(1, -(-len(batch.events) // EVENTS_A_MESSAGE)) if batch.is_snapshot else 1
    if count == 1:
        yield 0, 1, batch
        return
    for index in range(count):
        events = _part(batch.events, index * EVENTS_A_MESSAGE, (index + 1) * EVENTS_A_MESSAGE)
        yield index, count, replace(batch, number=batch.number - count + 1 + index, events=events)


def messages_of(batch: Batch) -> Iterator[pb.KvEventBatch]:
    """The messages that carry a batch: one, or several for a large snapshot."""
    for index, count, part in parts_of(batch):
        message = pb.KvEventBatch(sequence_number=part.number, timestamp=part.timestamp)
        message.events.extend(_events(part.events))
        if part.is_snapshot:
            message.snapshot.CopyFrom(pb.KvSnapshotPart(index=index, count=count))
        yield message


def _part(events: KvEvents, start: int, end: int) -> KvEvents:
    return replace(
        events,
        kinds=events.kinds[start:end],
        keys=events.keys[start:end],
        parent_keys=events.parent_keys[start:end],
        is_first=events.is_first[start:end],
        token_ids=events.token_ids[start:end],
    )


def _events(events: KvEvents) -> Iterator[pb.KvEvent]:
    is_first, token_ids = events.is_first.tolist(), events.token_ids.tolist()
    for place, kind in enumerate(events.kinds.tolist()):
        if kind == KvEventKind.STORED:
            yield pb.KvEvent(
                stored=pb.KvBlockStored(
                    key=events.keys[place].tobytes(),
                    parent_key=events.parent_keys[place].tobytes(),
                    is_first=is_first[place],
                    token_ids=token_ids[place],
                )
            )
        elif kind == KvEventKind.REMOVED:
            yield pb.KvEvent(removed_key=events.keys[place].tobytes())
        else:
            yield pb.KvEvent(cleared=True)
