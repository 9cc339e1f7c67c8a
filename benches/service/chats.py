"""Sixteen chats with the bundled model, over the daemon and through the engine alone; each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from pathlib import Path

from light_client import LightConnection

from pykv.service.protocol import engine_pb2 as pb

NUM_CHATS = 16
NEW_TOKENS = 64
RUNS, WARM = 5, 2  # what is first touched takes longer
PROMPTS = [
    f"<|im_start|>user\nTell me something about the number {place}.<|im_end|>\n" for place in range(NUM_CHATS)
]
OPTIONS = ("--num-blocks", "512", "--max-num-seqs", "32")


def direct_tokens_per_second() -> float:
    """`Engine.generate` on all sixteen prompts, in a process of its own."""
    output = subprocess.run([sys.executable, __file__], check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1])


async def served_tokens_per_second() -> float:
    """The same requests over the daemon, from a client that leaves the machine to it."""
    async with _daemon() as address:
        connection = await LightConnection.open(address)
        times = [await _ask_all(connection) for _ in range(RUNS)]
        assert connection.tokens_of_last() > 0
        return NUM_CHATS * NEW_TOKENS / statistics.median(times[WARM:])


@contextlib.asynccontextmanager
async def _daemon():
    code = "import sys; from pykv.service.main import main; sys.exit(main(sys.argv[1:]))"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "--port", "0", *OPTIONS, "--enable-prefix-caching"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        yield line.split(" on ")[1].strip()
    finally:
        process.terminate()
        await process.wait()


async def _ask_all(connection: LightConnection) -> float:
    """Returns how many seconds the answers took."""
    start = time.perf_counter()
    sampling = pb.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    end = connection.num_ended + NUM_CHATS
    for prompt in PROMPTS:
        connection.request(pb.GenerateRequest(text=prompt, sampling=sampling))
    while connection.num_ended < end:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return time.perf_counter() - start


def _params():
    from pykv.sampling import SamplingParams

    return SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def _generate() -> float:
    import pykv

    with pykv.Engine("bundled", config=pykv.EngineConfig(num_blocks=512, max_num_seqs=32)) as engine:
        times = []
        for _ in range(RUNS):
            start = time.perf_counter()
            outputs = engine.generate(PROMPTS, _params())
            times.append(time.perf_counter() - start)
            assert all(len(output.outputs[0].token_ids) == NEW_TOKENS for output in outputs)
        return NUM_CHATS * NEW_TOKENS / statistics.median(times[WARM:])


if __name__ == "__main__":
    assert Path(__file__).name == "chats.py"
    print(_generate())
