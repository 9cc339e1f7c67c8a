"""Metrics: on their own port, derived from what the engine counts, and back to zero at the end."""

import asyncio
import re
import resource
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pykv.client import Client, ServiceError
from pykv.errors import ConfigError
from pykv.sampling import SamplingParams
from pykv.service.daemon import Daemon
from pykv.service.metrics.endpoint import MAX_SCRAPES
from pykv.service.metrics.families import COUNTS, TIMES
from pykv.service.options import ServeOptions

pytestmark = pytest.mark.asyncio

LONG = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)


async def scrape(daemon):
    """All samples, by name and labels other than the model's."""

    def read():
        with urllib.request.urlopen(f"http://{daemon.daemon.metrics_address}/metrics", timeout=20) as reply:
            return reply.read().decode()

    text = await asyncio.to_thread(read)
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for key, value in sorted(sample.labels.items()) if key != "model_name")
            found[sample.name, labels] = sample.value
    return found


def value(samples, name, *labels):
    return samples[f"pykv:{name}", labels]


async def test_metrics_have_vllms_names_and_aliases_on_request(start_daemon):
    daemon = await start_daemon(metrics_port=0, metrics_aliases="vllm")
    samples = await scrape(daemon)
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total"),
        *("generation_tokens_total", "time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum"),
        *("e2e_request_latency_seconds_sum", "request_queue_time_seconds_sum"),
    ):
        assert (f"pykv:{name}", ()) in samples
        assert (f"vllm:{name}", ()) in samples
    assert not any(name.startswith("vllm:preemption_stall") for name, _ in samples)
    assert value(samples, "ready") == 1


OPENMETRICS = "application/openmetrics-text;version=1.0.0"
TEXT = "text/plain;version=0.0.4"


@pytest.mark.parametrize(
    "accept",
    [
        None,
        f"{OPENMETRICS},application/openmetrics-text;version=0.0.1;q=0.75,{TEXT};q=0.5,*/*;q=0.1",
        f"{OPENMETRICS};escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,{TEXT};q=0.3",
        f"{OPENMETRICS};escaping=underscores;q=0.6,text/plain;version=1.0.0;escaping=underscores;q=0.4",
        "text/plain;version=1.0.0;escaping=underscores",
        "application/openmetrics-text",
        TEXT,
        "*/*",
    ],
)
async def test_names_are_as_documented_whatever_format_a_scraper_would_take(start_daemon, accept):
    """Prometheus 2 and 3 send such headers, each in its own way."""
    daemon = await start_daemon(metrics_port=0, metrics_aliases="vllm")
    url = f"http://{daemon.daemon.metrics_address}/metrics"
    request = urllib.request.Request(url, headers={} if accept is None else {"Accept": accept})

    def read():
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.headers["content-type"], reply.read().decode()

    content_type, text = await asyncio.to_thread(read)
    assert content_type.replace(" ", "") == f"{TEXT};charset=utf-8"
    lines = text.splitlines()
    assert "pykv:ready 1.0" in lines
    assert 'vllm:num_requests_running{model_name="stub"} 0.0' in lines
    names = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    assert len(names) > 40
    assert all(name.startswith(("pykv:", "vllm:")) for name in names)
    assert {family.name for family in text_string_to_metric_families(text)}


async def test_the_port_answers_at_its_path_only(start_daemon):
    address = (await start_daemon(metrics_port=0)).daemon.metrics_address

    def status(path):
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    for path, expected in {
        "/metrics": 200,
        "/metrics?x=1": 200,
        "/": 404,
        "/metrics/x": 404,
        "/etc": 404,
    }.items():
        assert await asyncio.to_thread(status, path) == expected, path


async def exchange(daemon, head):
    """The status, the headers and the body with which a request is answered."""
    reader, writer = await asyncio.open_connection(*daemon.daemon.metrics_address.rsplit(":", 1))
    writer.write(head.encode() + b"\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(20):
        first, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = first.decode().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), body


@pytest.mark.parametrize("server", ["", "http://x", "HTTPS://[::1]:9"])
@pytest.mark.parametrize(
    ("path", "status"),
    [("/metrics", 200), ("/metrics?name[]=pykv:ready", 200), ("/", 404), ("/x://y/metrics", 404)],
)
async def test_a_target_may_name_the_server_and_head_is_get_without_the_body(
    start_daemon, server, path, status
):
    daemon = await start_daemon(metrics_port=0)
    found, headers, body = await exchange(daemon, f"GET {server}{path} HTTP/1.1")
    assert found == status
    assert int(headers["Content-Length"]) == len(body) > 0
    found, of_head, no_body = await exchange(daemon, f"HEAD {server}{path} HTTP/1.1")
    assert found == status
    assert no_body == b""
    assert of_head["Content-Type"] == headers["Content-Type"]
    if "name" in path:
        assert of_head["Content-Length"] == headers["Content-Length"]
    assert int(of_head["Content-Length"]) > 0


@pytest.mark.parametrize(("method", "status"), [("POST", 405), ("OPTIONS", 200), ("X", 405)])
async def test_other_methods_are_told_which_there_are(start_daemon, method, status):
    found, headers, _ = await exchange(await start_daemon(metrics_port=0), f"{method} /metrics HTTP/1.1")
    assert (found, headers["Allow"]) == (status, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize(
    ("query", "families"),
    [
        ("name[]=pykv:ready", {"pykv:ready"}),
        ("name%5B%5D=pykv%3Aready", {"pykv:ready"}),
        ("name[]=pykv:ready&name[]=pykv:calls_total", {"pykv:ready", "pykv:calls_total"}),
        ("name[]=pykv:time_to_first_token_seconds", {"pykv:time_to_first_token_seconds"}),
        ("name[]=pykv:time_to_first_token_seconds_bucket", {"pykv:time_to_first_token_seconds"}),
        ("name[]=pykv:num_preemptions_total", {"pykv:num_preemptions_total"}),
        ("name[]=pykv:no_such_metric", set()),
    ],
)
async def test_a_scrape_may_name_the_metrics_that_it_wants(start_daemon, query, families):
    daemon = await start_daemon(metrics_port=0)

    def read(url):
        with urllib.request.urlopen(url, timeout=20) as reply:
            return reply.read().decode().splitlines()

    url = f"http://{daemon.daemon.metrics_address}/metrics"
    named, lines = await asyncio.to_thread(read, f"{url}?{query}"), await asyncio.to_thread(read, url)
    assert {line.split()[2] for line in named if line.startswith("# TYPE ")} == families
    whole = [line.split(" ")[0] for line in lines if line.startswith(tuple(families or {"-"}))]
    assert [line.split(" ")[0] for line in named if not line.startswith("#")] == whole


async def test_without_the_option_there_is_neither_a_port_nor_an_alias(start_daemon):
    assert (await start_daemon()).daemon.metrics_address == ""
    samples = await scrape(await start_daemon(metrics_port=0))
    assert not any(name.startswith("vllm:") for name, _ in samples)


async def test_names_are_unique_and_say_their_unit():
    names = [metric.name for metric in (*COUNTS, *TIMES)]
    assert len(names) == len(set(names)) > 20
    assert all(re.fullmatch("[a-z0-9_]+", name) for name in names)
    assert all(metric.text.endswith(".") for metric in (*COUNTS, *TIMES))


async def test_gauges_follow_the_engine_and_are_zero_at_the_end(
    start_daemon, make_real_engine, collect, eventually
):
    daemon = await start_daemon(make_real_engine(enable_prefix_caching=False), metrics_port=0)
    async with Client(daemon.address) as client:
        streams = [client.generate("hello", LONG, request_id=f"r{place}") for place in range(4)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        samples = await scrape(daemon)
        assert value(samples, "num_requests_running") == value(samples, "calls_in_flight") == 4
        assert 0 < value(samples, "kv_cache_usage_perc") < 1
        blocks = [value(samples, "kv_blocks", state) for state in ("free", "cached", "active")]
        assert (sum(blocks), blocks[2] > 0) == (512, True)
        await client.abort("r0")
        await collect(streams[0])
        for stream in streams[1:]:
            await stream.aclose()
        await collect(client.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True)))

        async def is_idle():
            return daemon.engine.stats().num_live_requests == 0

        await eventually(is_idle)
    samples = await scrape(daemon)
    for gauge in ("num_requests_running", "num_requests_waiting", "num_live_requests", "kv_cache_usage_perc"):
        assert value(samples, gauge) == 0
    assert value(samples, "kv_blocks", "active") == value(samples, "calls_in_flight") == 0
    assert value(samples, "tenant_calls_in_flight", "anyone") == 0
    assert value(samples, "request_success_total", "length") == 1
    assert value(samples, "request_success_total", "abort") == 4
    assert value(samples, "calls_total", "CANCELLED") == 3


async def test_histograms_count_each_token_once(start_daemon, make_real_engine, collect):
    daemon = await start_daemon(make_real_engine(), metrics_port=0)
    params = SamplingParams(max_tokens=7, ignore_eos=True, n=2)
    async with Client(daemon.address) as client:
        await collect(client.generate("a" * 40, params))
        await collect(client.generate("a" * 40, params))
    samples = await scrape(daemon)
    assert value(samples, "generation_tokens_total") == 28
    assert value(samples, "time_to_first_token_seconds_count") == 4
    assert value(samples, "inter_token_latency_seconds_count") == 24
    assert value(samples, "request_queue_time_seconds_count") == 2
    assert value(samples, "request_prompt_tokens_sum") == 80
    assert value(samples, "request_generation_tokens_bucket", "20.0") == 2
    assert value(samples, "prefix_cache_hits_total") == 32


async def test_a_hanging_engine_does_not_hang_the_metrics(start_daemon, engine, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr("pykv.service.metrics.collector.COUNTS_SECONDS", 0.1)
    daemon = await start_daemon(metrics_port=0)
    monkeypatch.setattr(daemon.engine, "stats", lambda: may_end.wait(20))
    for _ in range(3):
        samples = await scrape(daemon)
        assert ("pykv:num_requests_running", ()) not in samples
        assert value(samples, "ready") == 1
    may_end.set()


async def test_calls_are_counted_by_status(start_daemon, collect):
    daemon = await start_daemon(metrics_port=0)
    async with Client(daemon.address) as client:
        await collect(client.generate([5], SamplingParams(max_tokens=1)))
        with pytest.raises(Exception, match="prompt"):
            await collect(client.generate([1000]))
    samples = await scrape(daemon)
    assert value(samples, "calls_total", "OK") == value(samples, "calls_total", "INVALID_ARGUMENT") == 1


async def test_a_scrape_that_no_file_is_left_for_is_taken_a_moment_later(start_daemon, monkeypatch):
    host, port = (await start_daemon(metrics_port=0)).daemon.metrics_address.split(":")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    pauses = []

    def end_scarcity(seconds):
        pauses.append(seconds)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    monkeypatch.setattr("pykv.service.metrics.endpoint.sleep", end_scarcity)
    with socket.socket() as scrape:
        scrape.settimeout(2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            scrape.connect((host, int(port)))
            scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b"200 OK" in await asyncio.to_thread(scrape.recv, 100)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(pauses) >= 1
    assert all(seconds > 0.1 for seconds in pauses)


def count_threads() -> int:
    """The threads that are not asyncio's own, in which this test connects."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


async def test_half_requests_take_neither_threads_nor_the_place_of_scrapes(start_daemon):
    daemon = await start_daemon(metrics_port=0)
    host, port = daemon.daemon.metrics_address.split(":")
    num_threads, silent = count_threads(), []
    try:
        for _ in range(4 * MAX_SCRAPES):
            silent.append(await asyncio.to_thread(socket.create_connection, (host, int(port))))
            silent[-1].sendall(b"GET /met")
        assert value(await scrape(daemon), "ready") == 1
        assert count_threads() <= num_threads + MAX_SCRAPES + 1
    finally:
        for connection in silent:
            connection.close()


async def test_a_request_that_does_not_come_in_time_is_given_up(start_daemon, monkeypatch):
    monkeypatch.setattr("pykv.service.metrics.endpoint.REQUEST_SECONDS", 0.1)
    host, port = (await start_daemon(metrics_port=0)).daemon.metrics_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n")
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()


async def test_a_port_that_is_taken_is_named(free_port_in_use, load_stub):
    daemon = Daemon(ServeOptions(port=0, metrics_port=free_port_in_use), load_stub)
    with pytest.raises(ConfigError, match=f"metrics cannot listen on 127.0.0.1, port {free_port_in_use}"):
        await daemon.run()


@pytest.fixture
def free_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


async def test_while_the_model_loads_the_daemons_own_metrics_are_there(start_daemon):
    daemon = await start_daemon(metrics_port=0)
    daemon.daemon._collector._served = None
    samples = await scrape(daemon)
    assert ("pykv:num_requests_running", ()) not in samples
    assert value(samples, "connections") == 0
    with pytest.raises(ServiceError):
        async with Client(daemon.address) as client:
            await client.health("nothing")
