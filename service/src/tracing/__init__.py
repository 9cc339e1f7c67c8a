"""OpenTelemetry traces, a span a request; nothing of OpenTelemetry is imported unless traces were asked for."""

from pykv.service.tracing.tracing import NoTracing, Tracing, tracing_to

__all__ = ["NoTracing", "Tracing", "tracing_to"]
