"""What does the daemon itself cost a token, and does it keep up with many streams?

An engine that costs nothing gives each stream one token a step, each sent as a message of its own; the server is a
process of its own, and a client that decodes nothing reads it. `grpc.aio` serves the same messages from the same
engine in the same run, in turn with ours. CPU time is the server's, from the system. Left out: the model.
`bundled_16_chats` is the opposite: the whole daemon with the bundled model against `Engine.generate` on the same batch.
Run: `python benches/bench_service.py [--json] [CASE ...]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent / "service"))
from light_client import LightConnection

from pykv.service.protocol import engine_pb2 as pb

SERVERS = Path(__file__).parent / "service" / "servers.py"
ROUNDS = 5
ROUNDS_OF_CHATS, WARM_CHATS = 11, 2  # what is first touched takes longer
ENDLESS = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=[1]), sampling=pb.SamplingParams(max_tokens=10_000_000)
)


@dataclass(frozen=True)
class Result:
    """One line of output."""

    case: str
    metric: str
    value: float
    unit: str
    n: int


class Server:
    """A server process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process, self.address = process, address
        self._system = psutil.Process(process.pid)

    def pace(self, seconds: float) -> None:
        """Makes a step every so often; 0 = as soon as all tokens of the last one were sent."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"pace {seconds}\n".encode())

    def cpu_seconds(self) -> float:
        times = self._system.cpu_times()
        return times.user + times.system

    def memory_bytes(self) -> int:
        return int(self._system.memory_info().rss)


@contextlib.asynccontextmanager
async def running(which: str) -> AsyncIterator[Server]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SERVERS),
        which,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        yield Server(process, line.split(" on ")[1].strip())
    finally:
        process.kill()
        await process.wait()


async def busy(
    server: Server, num_streams: int, num_connections: int = 4, **options: bool
) -> list[LightConnection]:
    """Streams that have all begun."""
    connections = [await LightConnection.open(server.address, **options) for _ in range(num_connections)]
    for place in range(num_streams):
        connections[place % num_connections].request(ENDLESS)
    while sum(len(connection.begun) for connection in connections) < num_streams:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return connections


async def tokens_256() -> list[Result]:
    """Tokens a second and CPU time a token at 256 streams, ours and grpc.aio's in turn."""
    found: dict[str, list[tuple[float, float]]] = {"pykv": [], "grpc.aio": []}
    for _ in range(ROUNDS):
        for which, values in found.items():
            async with running(which) as server:
                connections = await busy(server, 256)
                values.append(await measured(server, connections, 2.0))
    results = []
    for which, values in found.items():
        suffix = "" if which == "pykv" else "_grpc_aio"
        rate, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        results.append(Result("tokens_256", f"tokens_per_second_256{suffix}", rate, "tokens/s", ROUNDS))
        results.append(Result("tokens_256", f"cpu_us_per_token_256{suffix}", cpu, "us", ROUNDS))
    return results


async def measured(server: Server, connections: list[LightConnection], seconds: float) -> tuple[float, float]:
    """Tokens a second, and microseconds of the server's CPU a token."""
    await asyncio.sleep(0.3)
    start, cpu = time.monotonic(), server.cpu_seconds()
    before = sum(connection.num_messages for connection in connections)
    await asyncio.sleep(seconds)
    count = sum(connection.num_messages for connection in connections) - before
    assert count > 0
    assert all(connection.tokens_of_last() == 1 for connection in connections)
    return count / (time.monotonic() - start), (server.cpu_seconds() - cpu) / count * 1e6


async def latency_64() -> list[Result]:
    """From a token's making in the engine to its arrival at the client, at 64 streams and a step each 10 ms."""
    async with running("pykv") as server:
        server.pace(0.01)
        connections = await busy(server, 64, wants_delays=True)
        await asyncio.sleep(0.5)
        for connection in connections:
            connection.delays = []
        await asyncio.sleep(4.0)
        delays = sorted(delay for connection in connections for delay in connection.delays or ())
    p99 = delays[int(len(delays) * 0.99)]
    return [
        Result("latency_64", "added_latency_p50", statistics.median(delays) * 1e3, "ms", len(delays)),
        Result("latency_64", "added_latency_p99", p99 * 1e3, "ms", len(delays)),
    ]


async def streams_2000() -> list[Result]:
    """2,000 streams on as many connections, and on four: all served, and what each takes."""
    results = []
    for num_connections in (2000, 4):
        async with running("pykv") as server:
            server.pace(0.25)
            warm = await busy(server, 50, 50)
            before = server.memory_bytes()
            connections = await busy(server, 2000, num_connections)
            await asyncio.sleep(2.0)
            kib = (server.memory_bytes() - before) / 2000 / 1024
            served = sum(len(connection.begun) for connection in connections)
            assert served == 2000
            assert len(warm) == 50
        case = f"streams_2000_on_{num_connections}"
        results += [
            Result(case, "streams_served", served, "streams", 1),
            Result(case, "memory_per_stream", kib, "KiB", 1),
        ]
    return results


async def bundled_16_chats() -> list[Result]:
    """Tokens a second of 16 chats with the bundled model, over the daemon and without it, in turn."""
    import chats

    async with chats.direct() as ask_direct, chats.served() as ask_served:
        times: dict[str, list[float]] = {"direct": [], "served": []}
        for _ in range(WARM_CHATS + ROUNDS_OF_CHATS):
            times["direct"].append(await ask_direct())
            times["served"].append(await ask_served())
    direct, served = (statistics.median(times[which][WARM_CHATS:]) for which in ("direct", "served"))
    num_tokens = chats.NUM_CHATS * chats.NEW_TOKENS
    return [
        Result(
            "bundled_16_chats", "tokens_per_second_served", num_tokens / served, "tokens/s", ROUNDS_OF_CHATS
        ),
        Result(
            "bundled_16_chats", "tokens_per_second_direct", num_tokens / direct, "tokens/s", ROUNDS_OF_CHATS
        ),
        Result("bundled_16_chats", "served_to_direct", direct / served, "ratio", ROUNDS_OF_CHATS),
    ]


CASES: dict[str, Callable[[], Awaitable[list[Result]]]] = {
    "tokens_256": tokens_256,
    "latency_64": latency_64,
    "streams_2000": streams_2000,
    "bundled_16_chats": bundled_16_chats,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all if none is named"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown:
        parser.error(f"{unknown[0]} is no case; known: {', '.join(CASES)}")
    for name in options.cases or CASES:
        for result in asyncio.run(CASES[name]()):
            line = {"bench": "service", **vars(result)}
            print(json.dumps(line) if options.json else line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
