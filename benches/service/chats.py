"""Sixteen chats with the bundled model, over the daemon and through the engine alone, each in a process of its own.

Both processes live side by side and answer in turn, so that whatever slows the machine for a while slows both.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from light_client import LightConnection

from pykv.service.protocol import engine_pb2 as pb

NUM_CHATS = 16
NEW_TOKENS = 64
PROMPTS = [
    f"<|im_start|>user\nTell me something about the number {place}.<|im_end|>\n" for place in range(NUM_CHATS)
]
NUM_BLOCKS, MAX_NUM_SEQS = 512, 32
SERVE = "import sys; from pykv.service.main import main; sys.exit(main(sys.argv[1:]))"
Ask = Callable[[], Awaitable[float]]
"""Asks all sixteen; returns how many seconds the answers took."""


@contextlib.asynccontextmanager
async def direct() -> AsyncIterator[Ask]:
    """`Engine.generate` on all sixteen prompts."""
    async with _process(__file__, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        writer, reader = process.stdin, process.stdout
        await reader.readline()  # loaded: two that load at once would wait for each other's threads

        async def ask() -> float:
            writer.write(b"\n")
            return float(await reader.readline())

        yield ask


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Ask]:
    """The same requests over the daemon, from a client that leaves the machine to it."""
    options = ("--num-blocks", str(NUM_BLOCKS), "--max-num-seqs", str(MAX_NUM_SEQS))
    async with _process("-c", SERVE, "--port", "0", *options) as process:
        assert process.stdout is not None
        connection = await LightConnection.open((await process.stdout.readline()).decode().split()[-1])
        yield lambda: _ask_all(connection)
        assert connection.tokens_of_last() > 0


@contextlib.asynccontextmanager
async def _process(*arguments: str, stdin: int | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        await process.wait()


async def _ask_all(connection: LightConnection) -> float:
    start = time.perf_counter()
    sampling = pb.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    end = connection.num_ended + NUM_CHATS
    for prompt in PROMPTS:
        connection.request(pb.GenerateRequest(text=prompt, sampling=sampling))
    while connection.num_ended < end:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return time.perf_counter() - start


def main() -> None:
    """Answers each line with the seconds that the sixteen took."""
    import pykv

    config = pykv.EngineConfig(num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS)
    params = pykv.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with pykv.Engine("bundled", config=config) as engine:
        print("ready", flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            outputs = engine.generate(PROMPTS, params)
            print(time.perf_counter() - start, flush=True)
            assert all(len(output.outputs[0].token_ids) == NEW_TOKENS for output in outputs)


if __name__ == "__main__":
    assert Path(__file__).name == "chats.py"
    main()
