"""Batches of KV events in the gateway's words."""

from collections.abc import Iterator

from smg_grpc_proto.generated import common_pb2 as pb

from pykv.service.kv_events.feed import Batch
from pykv.service.kv_events.messages import parts_of
from pykv.service.kv_events.runs import Cleared, Removed, Run, runs_of

__all__ = ["batches_of"]


def batches_of(batch: Batch, block_size: int) -> Iterator[pb.KvEventBatch]:
    """The messages that carry a batch: one, or several for a large snapshot, which begins with a clearance."""
    num_blocks = len(batch.events)
    for index, count, part in parts_of(batch):
        runs: list[Run] = list(runs_of(part.events))
        if part.is_snapshot and index == 0:
            runs.insert(0, Cleared())
        message = pb.KvEventBatch(sequence_number=part.number, timestamp=part.timestamp, dp_rank=0)
        message.events.extend(_event(run, block_size) for run in runs)
        if part.is_snapshot:
            message.snapshot.CopyFrom(pb.KvSnapshotChunk(index=index, count=count, blocks=num_blocks))
        yield message


def _event(run: Run, block_size: int) -> pb.KvCacheEvent:
    if isinstance(run, Cleared):
        return pb.KvCacheEvent(cleared=pb.KvCacheCleared())
    hashes = [_signed(block_hash) for block_hash in run.hashes]
    if isinstance(run, Removed):
        return pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=hashes))
    blocks = [
        pb.KvBlock(block_hash=block_hash, token_ids=token_ids, block_size=block_size)
        for block_hash, token_ids in zip(hashes, run.token_ids, strict=True)
    ]
    parent = None if run.parent is None else _signed(run.parent)
    return pb.KvCacheEvent(stored=pb.KvBlocksStored(blocks=blocks, parent_block_hash=parent))


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    return number - 2**64 if number >= 2**63 else number
