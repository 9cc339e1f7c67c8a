"""Spans by the semantic conventions for generative AI; latencies under the names that vLLM's spans have."""

import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Self
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import pykv
from pykv.engine.delta_stream import DeltaStream
from pykv.engine.outputs import OutputDelta, Usage
from pykv.sampling import SamplingParams
from pykv.service.bounded_log import BoundedLog
from pykv.service.tracing.tracing import Deltas

__all__ = ["SpanTracing", "exporter_to"]

TRACES_PATH = "/v1/traces"
SEND_SECONDS = 3
PARENT_KEYS = ("traceparent", "tracestate")
PARENT_LOGGERS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")
"""They have a warning for each caller whose trace context is not as it must be."""
MESSAGE_CHARACTERS = 200
REQUEST_PARAMETERS = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty"),
)


def exporter_to(endpoint: str) -> SpanExporter:
    """Sends to a collector; a URL without a path gets the usual one."""
    url = endpoint.rstrip("/") + TRACES_PATH if urlsplit(endpoint).path in ("", "/") else endpoint
    return OTLPSpanExporter(endpoint=url, timeout=SEND_SECONDS)


class _ToBoundedLog(logging.Filter):
    """Takes what the library would log for a caller into the log of what callers cause."""

    def __init__(self, lines: BoundedLog) -> None:
        super().__init__()
        self._lines = lines

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets nothing through."""
        message = record.getMessage()[:MESSAGE_CHARACTERS]
        self._lines.write("info", "trace context dropped", {}, error=message)
        return False


class SpanTracing:
    """Sends spans in batches, on a thread; beyond its bounded queue they are dropped.

    Args:
        lines: where it is told that a caller's trace context is none.
    """

    def __init__(self, exporter: SpanExporter, lines: BoundedLog) -> None:
        resource = Resource.create({"service.name": "pykv-serve", "service.version": pykv.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pykv.service", pykv.__version__)
        self._parents = TraceContextTextMapPropagator()
        self._filter = _ToBoundedLog(lines)

    async def __aenter__(self) -> Self:
        for name in PARENT_LOGGERS:
            logging.getLogger(name).addFilter(self._filter)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Sends what was not sent yet."""
        for name in PARENT_LOGGERS:
            logging.getLogger(name).removeFilter(self._filter)
        with anyio.CancelScope(shield=True), anyio.move_on_after(2 * SEND_SECONDS):
            await anyio.to_thread.run_sync(self._provider.shutdown, abandon_on_cancel=True)

    async def traced(
        self,
        deltas: DeltaStream,
        operation: str,
        *,
        model: str,
        request_id: str,
        params: SamplingParams,
        metadata: Mapping[str, Any] | None,
    ) -> Deltas:
        """See `Tracing.traced`."""
        carrier = {key: str(metadata[key]) for key in PARENT_KEYS if metadata and key in metadata}
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._parents.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "pykv",
                "gen_ai.request.model": model,
                "gen_ai.request.id": request_id,
                **_parameters(params),
            },
        )
        times = _Times()
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    times.add(delta)
                    _add_end(span, delta)
                    yield delta
        except BaseException as error:  # GeneratorExit and cancellations too: the client has left
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            span.set_attributes(times.attributes(deltas.queue_seconds))
            span.end()


class _Times:
    """When a request's tokens came."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: float | None = None
        self._last = self._start

    def add(self, delta: OutputDelta) -> None:
        """A delta has come."""
        self._last = time.monotonic()
        if self._first is None and delta.token_ids:
            self._first = self._last

    def attributes(self, queue_seconds: float | None) -> dict[str, float]:
        """In seconds. A request that was left in the queue has waited only."""
        values = {"gen_ai.latency.e2e": time.monotonic() - self._start}
        if queue_seconds is not None:
            values["gen_ai.latency.time_in_queue"] = queue_seconds
        if self._first is not None:
            values["gen_ai.latency.time_to_first_token"] = self._first - self._start
            values["gen_ai.latency.time_in_model_decode"] = self._last - self._first
            if queue_seconds is not None:
                prefill = self._first - self._start - queue_seconds
                values["gen_ai.latency.time_in_model_prefill"] = max(prefill, 0.0)
        return values


def _add_end(span: Span, delta: OutputDelta) -> None:
    if delta.finish_reason == "error":
        span.set_status(StatusCode.ERROR, (delta.error or "the sequence failed")[:300])
    if delta.finish_reason is not None:
        span.set_attribute("gen_ai.response.finish_reasons", [delta.finish_reason])
    if delta.usage is not None:
        span.set_attributes(_usage(delta.usage))


def _usage(usage: Usage) -> dict[str, float]:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "pykv.usage.preemptions": usage.preemptions,
        "pykv.usage.recomputed_tokens": usage.recomputed_tokens,
        "pykv.usage.stalled_ms": usage.stalled_ms,
    }


def _parameters(params: SamplingParams) -> dict[str, float]:
    named = {f"gen_ai.request.{name}": getattr(params, name) for name in REQUEST_PARAMETERS}
    named["gen_ai.request.choice.count"] = params.n
    # Numbers of attributes have 64 bits and a sign.
    return {name: value for name, value in named.items() if value is not None and abs(value) < 2**63}
