"""The two servers that are measured: our daemon, and one of `grpc.aio`, each with an engine that costs nothing.

Run by the bench as a process of its own: `python servers.py pykv|grpc.aio`. Its first line is its address. Each line
that it reads is a command: `pace SECONDS` makes a step every so often, `pace 0` as soon as all tokens were sent.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import fields

import uvloop

from pykv.engine.delta_stream import Channel, DeltaStream
from pykv.engine.outputs import OutputDelta, Usage
from pykv.engine.stats import EngineStats
from pykv.engine.timing import Timing, TimingCounts
from pykv.service.daemon import Daemon
from pykv.service.logs import configure_logs
from pykv.service.messages import responses_of
from pykv.service.options import ServeOptions
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.served import ModelDescription, ServedModel

MANY = 2**31


class StepEngine:
    """Gives each live request one token a step. The text of a token is the time at which it was made."""

    is_alive = True

    def __init__(self) -> None:
        self.live: dict[Channel, int] = {}
        self.pace_seconds = 0.0
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StepEngine:
        self._pump = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._pump is not None
        self._pump.cancel()

    @property
    def last_progress(self) -> float:
        return time.monotonic()

    def stats(self) -> EngineStats:
        counts = dict.fromkeys((entry.name for entry in fields(EngineStats)), 0)
        return EngineStats(**counts | {"num_finished": {}})  # type: ignore[arg-type]

    def timing(self) -> TimingCounts:
        return Timing().counts()

    async def abort(self, request_id: str) -> bool:
        return False

    def end_session(self, session_id: bytes | str, *, tenant: bytes) -> bool:
        return False

    def set_cache_share(self, tenant: bytes, share: float) -> None:
        """There is no cache."""

    def generate(self, prompt: object, params: object, *, request_id: str, **_: object) -> DeltaStream:
        async def open_channel() -> Channel:
            channel = Channel(request_id, asyncio.get_running_loop(), MANY)
            self.live[channel] = params.max_tokens  # type: ignore[attr-defined]
            return channel

        return DeltaStream(open_channel, lambda channel: self.live.pop(channel, None))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.pace_seconds)
            now = repr(time.monotonic())
            for channel in list(self.live):
                if not channel._pending:  # a step is one message: nothing is merged
                    self._push(channel, now)

    def _push(self, channel: Channel, text: str) -> None:
        left = self.live[channel] = self.live[channel] - 1
        reason = None if left else "length"
        usage = None if left else Usage(1, 0, 1, 0, 0)
        channel.push(OutputDelta(channel.request_id, 0, (7,), text, None, None, reason, None, usage))
        if not left:
            del self.live[channel]


DESCRIPTION = ModelDescription(
    name="nothing",
    version="0",
    dtype="float32",
    device="cpu",
    vocab_size=1000,
    eos_token_ids=(0,),
    max_model_len=2**24,
    block_size=16,
    num_blocks=1000,
    kv_bytes_per_token=1,
    kv_dtype="f32",
)


async def serve_pykv(engine: StepEngine) -> None:
    options = ServeOptions(  # all clients are one peer here
        port=0,
        drain_timeout=0.0,
        max_streams=2**16,
        max_connections_per_peer=4096,
        connections_per_second=1e6,
    )
    daemon = Daemon(options, lambda *_: ServedModel(engine, DESCRIPTION))
    await daemon.run()  # prints its address


async def serve_grpc_aio(engine: StepEngine) -> None:
    """The same messages, made by the same code, from the same engine."""
    import grpc

    async def generate(request: pb.GenerateRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:
        async for delta in engine.generate(None, request.sampling, request_id=request.request_id):
            for response in responses_of(delta, ""):
                yield response

    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", 2**16)])
    handler = grpc.unary_stream_rpc_method_handler(
        generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("pykv.v1.Engine", {"Generate": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with engine:
        print(f"ready on 127.0.0.1:{port}", flush=True)
        await server.wait_for_termination()


async def obey(engine: StepEngine) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        _, seconds = line.split()
        engine.pace_seconds = float(seconds)


async def main(which: str) -> None:
    engine = StepEngine()
    obeying = asyncio.create_task(obey(engine))
    await (serve_pykv if which == "pykv" else serve_grpc_aio)(engine)
    obeying.cancel()


if __name__ == "__main__":
    configure_logs("error", "json")
    uvloop.run(main(sys.argv[1]))
