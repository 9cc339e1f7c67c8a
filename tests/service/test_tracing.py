"""Traces: a span a request, sent to a collector over a real socket, and nothing of it unless it is asked for."""

import asyncio
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pykv.client import Client
from pykv.errors import ConfigError, InvalidRequestError
from pykv.sampling import SamplingParams
from pykv.service.options import read_options
from pykv.service.tracing.spans import PARENT_LOGGERS

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """What a collector of OTLP over HTTP has received."""

    def __init__(self):
        self.spans, self.paths = [], set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector.paths.add(self.path)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


def attributes_of(span):
    values = {}
    for entry in span.attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        values[entry.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return values


@pytest.mark.asyncio
async def test_each_request_is_a_span_below_its_caller(start_daemon, make_real_engine, collector, collect):
    daemon = await start_daemon(make_real_engine(), otlp_endpoint=collector.url)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    async with Client(daemon.address) as client:
        client._metadata["traceparent"] = f"00-{TRACE_ID}-{PARENT_ID}-01"
        deltas = await collect(client.generate("a" * 40, params, request_id="first"))
        await collect(client.chat([{"role": "user", "content": "hello"}], params))
        left = client.generate("b" * 10, SamplingParams(max_tokens=4000, ignore_eos=True), request_id="left")
        await anext(left)
        await left.aclose()
        with pytest.raises(InvalidRequestError):
            await collect(client.generate([10**6], params, request_id="refused"))
    await daemon.stop()
    assert collector.paths == {"/v1/traces"}
    spans = {attributes_of(span)["gen_ai.request.id"]: span for span in collector.spans}
    assert len(collector.spans) == 4
    for span in collector.spans:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    first = attributes_of(spans["first"])
    assert spans["first"].name == "text_completion stub"
    assert first["gen_ai.operation.name"] == "text_completion"
    assert (first["gen_ai.request.model"], first["gen_ai.request.max_tokens"]) == ("stub", 5)
    assert first["gen_ai.usage.input_tokens"] == deltas[-1].usage.prompt_tokens
    assert first["gen_ai.usage.output_tokens"] == 5
    assert first["gen_ai.response.finish_reasons"] == ["length"]
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    whole = first["gen_ai.latency.e2e"]
    assert 0 < first["gen_ai.latency.time_to_first_token"] <= whole
    assert 0 < sum(first[f"gen_ai.latency.{part}"] for part in parts) <= whole
    assert {span.name for span in collector.spans} == {"text_completion stub", "chat stub"}
    assert "error.type" in attributes_of(spans["left"])
    assert attributes_of(spans["refused"])["error.type"] == "InvalidRequestError"
    assert "error.type" not in first


@pytest.mark.asyncio
async def test_a_collector_that_is_not_there_holds_nobody_up(start_daemon, make_real_engine, collect, caplog):
    daemon = await start_daemon(make_real_engine(), otlp_endpoint="http://127.0.0.1:1")
    async with Client(daemon.address) as client, asyncio.timeout(20):
        assert (await collect(client.generate("a", SamplingParams(max_tokens=2))))[-1].usage is not None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "context",
    [
        {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "garbage"},
        {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "a=" + "1" * 600},
        {
            "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01",
            "tracestate": ",".join(f"k{i}=1" for i in range(40)),
        },
        {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01" + "-" * 600},
    ],
    ids=["no members", "too long", "too many members", "long parent"],
)
async def test_a_flood_of_bad_trace_contexts_fills_no_log(start_daemon, collector, collect, caplog, context):
    caplog.set_level(logging.INFO)
    daemon = await start_daemon(otlp_endpoint=collector.url)
    async with Client(daemon.address) as client:
        client._metadata.update(context)
        for _ in range(100):
            await collect(client.generate([5], SamplingParams(max_tokens=1)))
    await daemon.stop()
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
    dropped = [record for record in caplog.records if record.getMessage() == "trace context dropped"]
    assert sum(getattr(record, "repeated", 1) for record in dropped) == 100
    assert len(dropped) < 20
    assert len(collector.spans) == 100
    for name in PARENT_LOGGERS:
        assert not logging.getLogger(name).filters


def test_nothing_of_opentelemetry_is_imported_unless_it_is_asked_for():
    check = (
        "import sys, asyncio; from pykv.service.daemon import Daemon; from pykv.service.options import ServeOptions\n"
        "async def make(): Daemon(ServeOptions(), None)\n"
        "asyncio.run(make()); print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("value", ["127.0.0.1:4318", "grpc://a:1", "http://", ""])
def test_an_endpoint_that_is_no_url_is_refused(value):
    with pytest.raises(ConfigError, match="--otlp-endpoint is"):
        read_options(["--otlp-endpoint", value], {}, "0")
