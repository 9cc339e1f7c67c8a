"""Floods of what is refused fill no log: a line at once, then a count a second."""

import asyncio
import logging
import urllib.request

import pytest
import structlog

from pykv.service import bounded_log
from pykv.service.bounded_log import BoundedLog
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
INVALID_ARGUMENT = 3


def lines(caplog, event):
    return [record for record in caplog.records if record.getMessage() == event]


def total(records):
    """How many events the lines stand for."""
    return sum(getattr(record, "repeated", 1) for record in records)


async def test_a_flood_of_refused_calls_is_told_by_kind_and_counted(start_daemon, raw_open, framed, caplog):
    caplog.set_level(logging.INFO)
    daemon = await start_daemon(metrics_port=0)
    raw = await raw_open(daemon.address)
    empty = framed(pb.GenerateRequest())
    for _ in range(10):
        calls = [raw.request(GENERATE, empty) for _ in range(40)]
        calls += [raw.request("/pykv.v1.Engine/GetStats", framed(b"\xff")) for _ in range(10)]
        await raw.flush()
        assert [(await raw.status(call))[0] for call in calls] == [INVALID_ARGUMENT] * 50
    address = daemon.daemon.metrics_address
    with await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/metrics") as reply:
        assert b'pykv:calls_total{status="INVALID_ARGUMENT"} 500.0' in reply.read()
    await raw.close()
    await daemon.stop()
    refused = lines(caplog, "call refused")
    of_kind = {
        kind: [each for each in refused if each.kind == kind] for kind in {each.kind for each in refused}
    }
    assert {kind: total(each) for kind, each in of_kind.items()} == {
        "InvalidRequestError": 400,
        "GRPCError": 100,
    }
    assert len(refused) < 30
    assert "error" in vars(of_kind["InvalidRequestError"][0])


async def test_a_flood_of_refused_connections_is_counted(start_daemon, raw_open, caplog):
    caplog.set_level(logging.INFO)
    daemon = await start_daemon(max_connections=1)
    first = await raw_open(daemon.address)
    for _ in range(50):
        await (await raw_open(daemon.address)).close()
    await first.close()
    await daemon.stop()
    refused = lines(caplog, "connection refused")
    assert total(refused) == daemon.daemon._server.num_refused["max_connections"] == 50
    assert len(refused) < 10


async def test_of_each_kind_there_is_one_line_at_once_and_then_a_count_each_second(
    caplog, monkeypatch, eventually
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(bounded_log, "COUNT_SECONDS", 0.01)
    log = BoundedLog()
    with structlog.contextvars.bound_contextvars(request_id="mine"):
        for number in range(5):
            log.write("info", "refused", {"kind": "a"}, number=number)
        log.write("warning", "refused", {"kind": "b"})

    async def is_over():
        return not log._repeats

    await eventually(is_over)
    told = [(each.levelname, each.kind, getattr(each, "repeated", None)) for each in lines(caplog, "refused")]
    assert told == [("INFO", "a", None), ("WARNING", "b", None), ("INFO", "a", 4)]
    assert [hasattr(each, "request_id") for each in lines(caplog, "refused")] == [True, True, False]
    log.write("info", "refused", {"kind": "a"})
    assert len(lines(caplog, "refused")) == 4  # a new first line
    log.close()
