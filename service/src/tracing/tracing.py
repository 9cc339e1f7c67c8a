"""What handlers know of traces: they pass a request's deltas through."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol, Self

from pykv.engine.delta_stream import DeltaStream
from pykv.engine.outputs import OutputDelta
from pykv.extras import needs_extra
from pykv.sampling import SamplingParams
from pykv.service.bounded_log import BoundedLog

__all__ = ["NoTracing", "Tracing", "tracing_to"]

Deltas = AsyncGenerator[OutputDelta, None]


class Tracing(Protocol):
    """Makes a span of each request."""

    async def __aenter__(self) -> Self:
        """Spans are taken from now on."""

    async def __aexit__(self, *_: object) -> None:
        """Sends what was not sent yet, for a few seconds at most."""

    def traced(
        self,
        deltas: DeltaStream,
        operation: str,
        *,
        model: str,
        request_id: str,
        params: SamplingParams,
        metadata: Mapping[str, Any] | None,
    ) -> Deltas:
        """The same deltas; their request is a span from now until they end or are left.

        Args:
            operation: as the conventions for generative AI name it: "chat", "text_completion".
            metadata: of the call; `traceparent` and `tracestate` name the span's parent.
        """


class NoTracing:
    """Nobody asked for traces."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """There is nothing to send."""

    def traced(self, deltas: DeltaStream, operation: str, **_: object) -> Deltas:
        """The deltas themselves."""
        return deltas


def tracing_to(endpoint: str | None, lines: BoundedLog) -> Tracing:
    """Traces that are sent to a collector.

    Args:
        endpoint: URL of its OTLP over HTTP; None = no traces.
        lines: where it is told that a caller's trace context is none.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NoTracing()
    with needs_extra("--otlp-endpoint", "otel"):
        from pykv.service.tracing.spans import SpanTracing, exporter_to
    return SpanTracing(exporter_to(endpoint), lines)
