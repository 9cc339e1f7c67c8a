"""`pykv top`: one frame says what the server does, and the map is in proportion."""

import asyncio
import io
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pykv.cli.main import main as pykv
from pykv.cli.top.program import main
from pykv.cli.top.sample import History, Sample, Span
from pykv.cli.top.view import block_map, frame
from pykv.client import Client, ServiceError
from pykv.engine.histogram import Histogram, HistogramCounts
from pykv.errors import ConfigError
from pykv.sampling import SamplingParams


def shown(renderable):
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


async def run(*arguments):
    console = Console(file=io.StringIO(), width=110, color_system=None)
    code = await asyncio.to_thread(main, arguments, console)
    return code, console.file.getvalue()


@pytest.mark.asyncio
async def test_one_frame_tells_blocks_requests_hits_and_latencies(
    start_daemon, make_real_engine, description, collect
):
    daemon = await start_daemon(make_real_engine(), replace(description, name="tiny"))
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    async with Client(daemon.address) as client:
        for _ in range(2):
            await collect(client.generate("a" * 64, params))
    code, text = await run("--once", "--address", daemon.address)
    assert code == 0
    for part in ("tiny at", "serving", "512 blocks:", "4 cached", "508 free", "hit rate", "38%"):
        assert part in text, part
    for row, count in (("time to first token", 2), ("between tokens", 16), ("in the queue", 2)):
        line = next(line for line in text.splitlines() if row in line)
        assert line.split()[-1] == str(count)
    assert text.count("·") > 200
    assert text.count("▒") == 1 + 1  # in the legend and in the map


@pytest.mark.asyncio
async def test_frames_follow_each_other_until_the_end(start_daemon, monkeypatch):
    daemon = await start_daemon()
    console = Console(file=io.StringIO(), width=110, force_terminal=True)
    frames = []

    async def fewer_times(seconds):
        frames.append(seconds)
        if len(frames) == 3:
            raise KeyboardInterrupt

    def watch():
        with monkeypatch.context() as patch:
            patch.setattr("pykv.cli.top.program.sleep", fewer_times)
            return main(["--address", daemon.address, "--interval", "0.2"], console)

    with pytest.raises(ConfigError, match=r"--interval is '0': allowed is a number from 0.1 to 3600"):
        main(["--interval", "0"])
    assert await asyncio.to_thread(watch) == 0
    assert frames == [0.2] * 3


@pytest.mark.asyncio
async def test_a_server_that_goes_away_is_said_to_be_gone_until_it_is_back(
    start_daemon, description, monkeypatch
):
    first = await start_daemon(description=replace(description, name="first"))
    port = int(first.address.rsplit(":", 1)[1])
    console = Console(file=io.StringIO(), width=110, force_terminal=True, color_system=None)
    loop, seen = asyncio.get_running_loop(), []

    async def restart():
        await start_daemon(description=replace(description, name="second"), port=port)

    async def happen(_):
        """What happens between two frames."""
        seen.append(console.file.getvalue())
        console.file.truncate(0)
        events = {1: first.stop, 3: restart}
        if len(seen) == 5:
            raise KeyboardInterrupt
        if len(seen) in events:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(events[len(seen)](), loop))

    def watch():
        with monkeypatch.context() as patch:
            patch.setattr("pykv.cli.top.program.sleep", happen)
            return main(["--address", first.address], console)

    assert await asyncio.to_thread(watch) == 0
    news = f"{first.address} is gone: UNAVAILABLE:"
    del seen[3]  # the new daemon's own line had the old frame drawn anew
    assert [news in text for text in seen] == [False, True, True, False]
    assert ["first at" in text for text in seen] == [True, True, True, False]
    assert "second at" in seen[-1]


@pytest.mark.asyncio
async def test_into_a_pipe_each_frame_goes_out_at_once_and_a_server_that_goes_away_is_told_on_stderr(
    start_daemon, description, monkeypatch, capsys
):
    first = await start_daemon(description=replace(description, name="first"))
    port = int(first.address.rsplit(":", 1)[1])
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    loop, seen = asyncio.get_running_loop(), []

    async def restart():
        await start_daemon(description=replace(description, name="second"), port=port)

    def read():
        try:
            return os.read(reading, 2**16).decode()
        except BlockingIOError:
            return ""

    async def happen(_):
        """What happens between two frames."""
        seen.append((read(), capsys.readouterr().err))
        events = {2: first.stop, 4: restart}
        if len(seen) == 6:
            raise KeyboardInterrupt
        if len(seen) in events:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(events[len(seen)](), loop))

    def watch():
        with monkeypatch.context() as patch, open(writing, "w") as pipe:
            patch.setattr("pykv.cli.top.program.sleep", happen)
            return main(["--address", first.address], Console(file=pipe, width=110))

    assert await asyncio.to_thread(watch) == 0
    os.close(reading)
    frames, errors = zip(*seen, strict=True)
    assert ["first at" in text for text in frames] == [True, True, False, False, False, False]
    assert ["second at" in text for text in frames] == [False] * 4 + [True, True]
    assert frames[2:4] == ("", "")
    assert errors[2].startswith(f"pykv: {first.address} is gone: UNAVAILABLE:")
    assert errors[2].count("\n") == 1
    assert errors[:2] + errors[3:] == ("",) * 5


@pytest.mark.asyncio
async def test_a_server_that_hangs_is_said_to_be_gone(monkeypatch):
    async def swallow(reader, writer):
        while await reader.read(2**16):
            continue
        writer.close()

    monkeypatch.setattr("pykv.cli.connection.ANSWER_SECONDS", 0.2)
    hanging = await asyncio.start_server(swallow, "127.0.0.1", 0)
    host, port = hanging.sockets[0].getsockname()
    with pytest.raises(ServiceError, match=f"no answer from {host}:{port} within 0.2 s"):
        await run("--once", "--address", f"{host}:{port}")
    hanging.close()


@pytest.mark.asyncio
async def test_a_server_that_does_not_answer_is_named(capsys):
    assert await asyncio.to_thread(pykv, ["top", "--once", "--address", "127.0.0.1:1"]) == 2
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5), st.integers(10, 300))
def test_the_map_has_every_cell_and_shows_what_is_not_zero(counts, cells):
    shares = block_map(counts, cells)
    assert sum(shares) == (cells if any(counts) else 0)
    assert [share > 0 for share in shares] == [count > 0 for count in counts]


def times(*values):
    histogram = Histogram((0.01, 0.1, 1.0))
    for value in values:
        histogram.observe(value)
    return histogram.counts()


def sample(at, steps, **counts):
    from pykv.service.messages import HISTOGRAMS
    from pykv.service.protocol import engine_pb2 as pb

    names = [name for name in pb.GetStatsResponse.DESCRIPTOR.fields_by_name if name not in HISTOGRAMS]
    return Sample(
        at,
        "SERVING",
        dict.fromkeys(names, 0) | {"num_steps": steps} | counts,
        dict.fromkeys(HISTOGRAMS, times()),
    )


def test_rates_are_between_two_moments():
    history = History()
    assert history.add(sample(1.0, 10)).rate("num_steps") is None
    assert history.add(sample(3.0, 30)).rate("num_steps") == 10.0
    assert history.add(sample(4.0, 5)).rate("num_steps") is None  # the server was started anew


def test_a_host_tier_and_an_unready_server_are_shown(description):
    counts = {"blocks_free": 3, "blocks_active": 1, "host_blocks_total": 8, "host_blocks_free": 2}
    moment = replace(sample(1.0, 1, **counts), health="NOT_SERVING")
    text = shown(frame(description, "somewhere:1", Span(None, moment)))
    assert "not serving" in text
    assert "8 blocks: █ 6 used" in text


def test_quantiles_are_interpolated_in_their_bucket():
    counts = times(*[0.005] * 50, *[0.05] * 50)
    assert counts.quantile(0.5) == pytest.approx(0.01)
    assert counts.quantile(0.75) == pytest.approx(0.055)
    assert times(5.0).quantile(0.5) == 1.0  # beyond the last bound
    assert times().quantile(0.5) == 0.0
    assert times(0.5, 0.5).since(times(0.5)) == HistogramCounts((0.01, 0.1, 1.0), (0, 0, 1, 0), 0.5)
