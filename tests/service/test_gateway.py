"""The gateway `smg` itself in front of the daemon, driven by the `openai` client.

It runs where the program `smg` is found: where `make gateway` put it, where SMG_PROGRAM says, or on the PATH.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import urllib.request
from pathlib import Path

import pytest

from pykv.client import Client
from pykv.sampling import SamplingParams

pytestmark = [pytest.mark.asyncio, pytest.mark.long]

OWN = Path(__file__).resolve().parents[2] / ".venv" / "gateway" / "bin" / "smg"
SMG = os.environ.get("SMG_PROGRAM") or (str(OWN) if OWN.is_file() else shutil.which("smg"))
START_SECONDS = 60.0


@contextlib.asynccontextmanager
async def gateway(log, *daemons, metrics_port=None):
    """Runs the gateway until the end of the block; yields a client of its HTTP API."""
    openai = pytest.importorskip("openai")
    if SMG is None:
        pytest.skip("the program smg is not installed: `make gateway` brings it")
    port, other_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    metrics_port = metrics_port or other_port
    arguments = [
        *("--worker-urls", *(f"grpc://{daemon.address}" for daemon in daemons)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
    ]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            SMG, "launch", *arguments, stdout=output, stderr=asyncio.subprocess.STDOUT
        )
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    try:
        async with asyncio.timeout(START_SECONDS):
            while not await asyncio.to_thread(is_ready, url):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.1)
        yield client
    finally:
        await client.close()
        process.terminate()
        await process.wait()


def is_ready(url):
    """Whether the gateway would answer: it lists a model some time before it has the model's tokenizer."""
    try:
        urllib.request.urlopen(f"{url}/readiness", timeout=10).close()
        with urllib.request.urlopen(f"{url}/v1/tokenizers", timeout=10) as reply:
            return bool(json.load(reply)["tokenizers"])
    except OSError:  # nobody listens yet, or the status is an error
        return False


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def start_tiny(start_daemon, tiny_runner, make_real_engine):
    """A daemon with the random model and its tokenizer's files."""
    from pykv.service.loading import describe
    from pykv.service.tokenizer_archive import tokenizer_archive

    async def start(max_kv_events=0):
        engine = make_real_engine(max_kv_events=max_kv_events)
        runner, tokenizer = tiny_runner
        description = describe(engine.engine, runner)
        return await start_daemon(
            engine,
            description,
            archive=lambda: tokenizer_archive(tokenizer, runner.config),
            max_kv_events=max_kv_events,
        )

    return start


async def test_chat_and_completions_streamed_and_whole_and_an_abort(start_tiny, tmp_path, eventually):
    daemon = await start_tiny()
    async with gateway(tmp_path / "smg.log", daemon) as client:
        model = (await client.models.list()).data[0].id
        question = [{"role": "user", "content": "hi there"}]
        options = {"model": model, "max_tokens": 12, "temperature": 0, "seed": 7}

        whole = await client.chat.completions.create(messages=question, **options)
        assert whole.usage.completion_tokens == 12
        assert whole.choices[0].finish_reason == "length"
        stream = await client.chat.completions.create(messages=question, stream=True, **options)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(parts) == whole.choices[0].message.content

        completion = await client.completions.create(prompt="once upon", **options)
        assert completion.usage.completion_tokens == 12
        stream = await client.completions.create(prompt="once upon", stream=True, **options)
        parts = [chunk.choices[0].text async for chunk in stream if chunk.choices]
        assert "".join(parts) == completion.choices[0].text

        several = await client.chat.completions.create(
            messages=question, n=2, **{**options, "temperature": 1.0}
        )
        assert sorted(choice.index for choice in several.choices) == [0, 1]

        long = await client.chat.completions.create(
            messages=question,
            stream=True,
            extra_body={"ignore_eos": True},
            **{**options, "max_tokens": 4000},
        )
        await anext(aiter(long))
        await long.close()

        async def is_idle():
            stats = daemon.engine.stats()
            return stats.num_live_requests == 0 and stats.num_finished.get("abort", 0) >= 1

        await eventually(is_idle)
        assert daemon.engine.stats().blocks_active == 0


async def test_the_gateway_learns_from_events_which_daemon_has_a_prompt(start_tiny, tmp_path, eventually):
    """The daemons are given the prompts behind its back: nothing but their events can tell it."""
    daemons = [await start_tiny(max_kv_events=10_000) for _ in range(2)]
    (metrics_port,) = free_ports(1)
    prompts = [f"{number} is the number of this prompt, which is rather long. " * 4 for number in range(8)]
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    async with gateway(tmp_path / "smg.log", *daemons, metrics_port=metrics_port) as client:
        model = (await client.models.list()).data[0].id

        async def are_followed():
            return all(len(daemon.daemon._feed._subscriptions) > 0 for daemon in daemons)

        await eventually(are_followed, seconds=60)
        for number, prompt in enumerate(prompts):
            async with Client(daemons[number % 2].address) as direct:
                assert [delta async for delta in direct.generate(prompt, params)]

        async def are_applied():
            return await asyncio.to_thread(scraped, metrics_port) == [4, 4]

        await eventually(are_applied)
        before = [daemon.engine.stats().prefix_hit_tokens for daemon in daemons]
        num_tokens = 0
        for prompt in prompts:
            answer = await client.completions.create(prompt=prompt, model=model, max_tokens=1, temperature=0)
            num_tokens += answer.usage.prompt_tokens
        after = [daemon.engine.stats().prefix_hit_tokens for daemon in daemons]
    assert sum(after) - sum(before) > 0.9 * num_tokens, "requests went where their prompts were not"


def scraped(port):
    """How many batches of events the gateway has applied, of each daemon."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    applied = [
        line for line in lines if line.startswith("smg_kv_event_batches_total") and '"applied"' in line
    ]
    return [int(float(line.rpartition(" ")[2])) for line in applied]
