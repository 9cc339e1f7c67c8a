"""KV events over ZeroMQ, in the form that vLLM publishes.

PUB: topic, number of the batch (8 bytes, big-endian), the batch as MessagePack: [timestamp, events, 0], an event one of

    ["BlockStored", hashes, parent's hash or nil, token ids, block size, nil, "GPU"]
    ["BlockRemoved", hashes, "GPU"]
    ["AllBlocksCleared"]

ROUTER: who missed batches asks with a number and gets, numbered as the last batch, one batch that clears all and stores
what can be found, and an end mark (number -1, no batch).
"""

from __future__ import annotations

import time
from typing import Any, Self

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
import structlog
import zmq
import zmq.asyncio

from pykv.errors import ConfigError, PykvError
from pykv.service.kv_events.feed import Batch, EventFeed, Subscription
from pykv.service.kv_events.runs import Cleared, Removed, Run, runs_of

__all__ = ["ZmqPublisher"]

TOPIC = b""
MEDIUM = "GPU"
"""What vLLM calls the memory that the model computes in."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MOST_PENDING_BATCHES = 100_000
REPLAY_SECONDS = 5.0
SECONDS_A_LINE = 10.0
"""Of the log about requests that are none."""

log = structlog.get_logger("pykv.service")


class ZmqPublisher:
    """The sockets of one daemon. A subscriber that does not read loses batches; nobody waits for it.

    Args:
        feed: whose batches are published.
        address: to listen on, such as tcp://127.0.0.1:5557.
        replay_address: to answer on who missed some; None = nobody does.
        block_size: tokens a block.

    Raises:
        ConfigError: an address cannot be listened on.
    """

    def __init__(self, feed: EventFeed, address: str, replay_address: str | None, block_size: int) -> None:
        self._feed = feed
        self._block_size = block_size
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._num_refused = 0
        self._next_line = 0.0
        self._sockets: list[zmq.Socket[Any]] = []
        try:
            self._publishing = self._bound(zmq.PUB, "kv_events_zmq", address)
            self._replaying = (
                None
                if replay_address is None
                else self._bound(zmq.ROUTER, "kv_events_zmq_replay", replay_address)
            )
        except ConfigError:
            self._close()
            raise

    @property
    def address(self) -> str:
        """Where it publishes."""
        return _endpoint(self._publishing)

    @property
    def replay_address(self) -> str:
        """Where it answers who missed batches; empty if nowhere."""
        return "" if self._replaying is None else _endpoint(self._replaying)

    @property
    def num_replays_refused(self) -> int:
        """Messages to the replay address that were no requests."""
        return self._num_refused

    async def run(self, *, task_status: anyio.abc.TaskStatus[Self] = anyio.TASK_STATUS_IGNORED) -> None:
        """Publishes until it is cancelled, the feed is closed, or the engine is broken."""
        try:
            with self._feed.subscribe() as subscription:
                task_status.started(self)
                async with anyio.create_task_group() as tasks:
                    if self._replaying is not None:
                        tasks.start_soon(self._answer, self._replaying)
                    await self._publish(subscription)
                    tasks.cancel_scope.cancel()
        finally:
            self._close()

    async def _publish(self, subscription: Subscription) -> None:
        try:
            async for batch in subscription.batches():
                frames = (TOPIC, batch.number.to_bytes(8, "big"), self._encoded(batch))
                await self._publishing.send_multipart(frames, zmq.NOBLOCK)
        except PykvError as error:
            log.error("KV events are published no more", error=str(error))

    async def _answer(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                self._refuse(len(frames))
                await anyio.lowlevel.checkpoint()  # whoever floods the socket must not hold the others up
                continue
            try:
                snapshot = await self._feed.snapshot()
            except PykvError as error:
                log.error("KV event replay refused", error=str(error))
                continue
            replies = ((snapshot.number.to_bytes(8, "big"), self._encoded(snapshot)), (END_OF_REPLAY, b""))
            try:
                with anyio.fail_after(REPLAY_SECONDS):
                    for reply in replies:
                        await socket.send_multipart((frames[0], b"", *reply))
            except (TimeoutError, zmq.ZMQError) as error:
                log.warning("KV event replay left", error=str(error))

    def _refuse(self, num_frames: int) -> None:
        """Counts what is no request; the log tells of it now and then."""
        self._num_refused += 1
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_A_LINE
            log.warning(
                "KV event replay request refused", num_frames=num_frames, num_refused=self._num_refused
            )

    def _encoded(self, batch: Batch) -> bytes:
        runs: list[Run] = list(runs_of(batch.events))
        if batch.is_snapshot:
            runs.insert(0, Cleared())
        return self._encoder.encode((batch.timestamp, [self._event(run) for run in runs], 0))

    def _event(self, run: Run) -> tuple[Any, ...]:
        if isinstance(run, Cleared):
            return ("AllBlocksCleared",)
        if isinstance(run, Removed):
            return "BlockRemoved", run.hashes, MEDIUM
        token_ids = [token for block in run.token_ids for token in block]
        return "BlockStored", run.hashes, run.parent, token_ids, self._block_size, None, MEDIUM

    def _bound(self, kind: int, option: str, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, MOST_PENDING_BATCHES)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{option} cannot listen on {address}: {error.strerror}") from error
        return socket

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()


def _endpoint(socket: zmq.asyncio.Socket) -> str:
    return bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
