"""What is answered to one scrape."""

import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pykv.engine.stats import EngineStats
from pykv.service.access import Gate
from pykv.service.calls import Calls
from pykv.service.health import HealthState
from pykv.service.metrics.families import counted_families, description_families, timed_families
from pykv.service.served import ServedModel, TokenEngine
from pykv.service.transport import CallServer, HandshakeFailure, Offence

__all__ = ["DaemonCollector"]

PREFIXES = {"none": {"pykv:": False}, "vllm": {"pykv:": False, "vllm:": True}}
COUNTS_SECONDS = 2.0


class DaemonCollector(Collector):
    """The metrics of the daemon and of the engine that it serves; asked from the endpoint's threads.

    Args:
        aliases: "vllm" gives what vLLM has under its names too; "none".
        server: whose connections are counted.
        certificate_end: when the daemon's certificate ends, in seconds since 1970; None = it has none.
    """

    def __init__(
        self,
        gate: Gate,
        calls: Calls,
        health: HealthState,
        aliases: str,
        server: CallServer,
        certificate_end: Callable[[], float | None],
    ) -> None:
        self._gate, self._calls, self._health = gate, calls, health
        self._prefixes = PREFIXES[aliases]
        self._server = server
        self._certificate_end = certificate_end
        self._served: ServedModel | None = None
        self._num_replays_refused: Callable[[], int] | None = None
        self._asking = threading.Lock()

    def serve(self, served: ServedModel) -> None:
        """Counts this engine from now on."""
        self._served = served

    def count_replays_refused(self, count: Callable[[], int]) -> None:
        """KV events are published: requests for a replay that were none are counted from now on."""
        self._num_replays_refused = count

    def describe(self) -> list[Metric]:
        """Nothing: what there is, is known when it is asked for."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric; those of an engine that does not give its counts in time are left out."""
        yield from self._own()
        served = self._served
        if served is None:
            return
        model = served.description.name
        yield from description_families(served.description, self._prefixes)
        yield from timed_families(served.engine.timing(), model, self._prefixes)
        idle = GaugeMetricFamily(
            "pykv:seconds_since_progress", "Since the engine's last step, while it has work."
        )
        idle.add_metric([], max(time.monotonic() - served.engine.last_progress, 0.0))
        yield idle
        stats = self._stats(served.engine)
        if stats is not None:
            yield from counted_families(stats, model, self._prefixes)

    def _own(self) -> Iterator[Metric]:
        """What the daemon counts itself, with an engine and without."""
        yield from self._of_connections()
        yield from self._of_tls()
        yield from self._of_calls()
        ready = GaugeMetricFamily("pykv:ready", "Whether requests are served: 1 or 0.")
        ready.add_metric([], float(self._health.is_ready))
        yield ready
        if self._num_replays_refused is not None:
            replays = CounterMetricFamily(
                "pykv:kv_event_replays_refused", "Messages to --kv-events-zmq-replay that were no requests."
            )
            replays.add_metric([], self._num_replays_refused())
            yield replays

    def _of_connections(self) -> Iterator[Metric]:
        connections = GaugeMetricFamily("pykv:connections", "Connections that are open.")
        connections.add_metric([], self._server.num_connections)
        yield connections
        refused = CounterMetricFamily(
            "pykv:connections_refused", "Connections that were refused, by the limit.", labels=["limit"]
        )
        for limit in ("max_connections", "max_connections_per_peer", "connections_per_second"):
            refused.add_metric([limit], self._server.num_refused.get(limit, 0))
        yield refused
        closed = CounterMetricFamily(
            "pykv:connections_closed", "Connections that the daemon closed, by the reason.", labels=["reason"]
        )
        for offence in Offence:
            closed.add_metric([offence.label], self._server.num_closed.get(offence, 0))
        yield closed

    def _of_tls(self) -> Iterator[Metric]:
        end = self._certificate_end()
        if end is None:
            return
        expiry = GaugeMetricFamily(
            "pykv:tls_certificate_expiry_timestamp_seconds",
            "When the certificate in use ends, in seconds since 1970.",
        )
        expiry.add_metric([], end)
        yield expiry
        failed = CounterMetricFamily(
            "pykv:tls_handshakes_failed",
            "Connections whose TLS did not begin, by the cause.",
            labels=["cause"],
        )
        for failure in HandshakeFailure:
            failed.add_metric([failure.label], self._server.num_failed_handshakes.get(failure, 0))
        yield failed

    def _of_calls(self) -> Iterator[Metric]:
        calls = GaugeMetricFamily("pykv:calls_in_flight", "Calls that have not ended.")
        calls.add_metric([], len(self._calls))
        yield calls
        ended = CounterMetricFamily("pykv:calls", "Calls that have ended, by gRPC status.", labels=["status"])
        for status, count in self._calls.ended_by_status().items():
            ended.add_metric([status], count)
        yield ended
        tenants = GaugeMetricFamily(
            "pykv:tenant_calls_in_flight", "Requests of a tenant that have not ended.", labels=["tenant"]
        )
        for account in self._gate.accounts():
            tenants.add_metric([account.tenant.name], account.num_in_flight)
        yield tenants

    def _stats(self, engine: TokenEngine) -> EngineStats | None:
        """Asks in a thread of its own, since the engine's lock may be held by a step that hangs."""
        if not self._asking.acquire(timeout=COUNTS_SECONDS):
            return None
        found: list[EngineStats] = []

        def ask() -> None:
            try:
                found.append(engine.stats())
            finally:
                self._asking.release()

        asking = threading.Thread(target=ask, name="pykv-counts", daemon=True)
        asking.start()
        asking.join(COUNTS_SECONDS)
        return found[0] if found else None
