"""The daemon from its socket to its end: it answers at once, and serves once the model is loaded."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import anyio
import structlog
from anyio.abc import TaskGroup
from grpclib._typing import IServable
from grpclib.reflection.service import ServerReflection

from pykv.errors import ConfigError
from pykv.extras import needs_extra
from pykv.service.access import Gate
from pykv.service.bounded_log import BoundedLog
from pykv.service.calls import AnyStream, Calls, guarded
from pykv.service.engine_service import EngineService
from pykv.service.health import HealthService, HealthState, watch_engine
from pykv.service.kv_events import EventFeed
from pykv.service.listening import address_of, bind
from pykv.service.metrics import DaemonCollector, MetricsEndpoint
from pykv.service.options import ServeOptions
from pykv.service.protocol.engine_pb2 import DESCRIPTOR
from pykv.service.ready_file import ReadyFile
from pykv.service.reload import Credentials
from pykv.service.request_limits import method_limits
from pykv.service.servable import DescribedService
from pykv.service.served import ModelDescription, ServedModel
from pykv.service.shutdown import Shutdown, end_calls
from pykv.service.threads import run_in_daemon_thread
from pykv.service.tracing import tracing_to
from pykv.service.transport import CallServer, TransportLimits
from pykv.service.wire_check import RequestCheck

if TYPE_CHECKING:
    from pykv.service.kv_events.zmq_publisher import ZmqPublisher

__all__ = ["LOAD_THREAD", "Daemon", "Loader"]

Loader = Callable[[ServeOptions, Callable[[str], None]], ServedModel]
"""Loads the model that the options name, telling its progress; runs in a thread."""

LOAD_THREAD = "pykv-load"
SERVICE = DESCRIPTOR.services_by_name["Engine"]

log = structlog.get_logger("pykv.service")


def _zmq_publisher() -> "type[ZmqPublisher]":
    with needs_extra("--kv-events-zmq", "zmq"):
        from pykv.service.kv_events.zmq_publisher import ZmqPublisher
    return ZmqPublisher


class Daemon:
    """One start of `pykv-serve`.

    Args:
        options: what to serve, and how.
        load: loads the model.

    Raises:
        ConfigError: a file that the options name cannot be used.
    """

    def __init__(self, options: ServeOptions, load: Loader) -> None:
        if options.kv_events_zmq is not None:
            _zmq_publisher()  # a missing extra is told before the model is loaded
        self._ready_file = ReadyFile(options.ready_path)
        self._options = options
        self._load = load
        self._lines = BoundedLog()
        self._calls = Calls(self._lines)
        self._health = HealthState()
        self._shutdown = Shutdown()
        self._ready = anyio.Event()
        self._address = ""
        self._credentials = Credentials(options)
        self._gate = self._credentials.gate
        self._feed = EventFeed(options.keeps_kv_events)
        self._tracing = tracing_to(options.otlp_endpoint, self._lines)
        self._engine_service = EngineService(self._gate, self._feed, self._tracing)
        self._check = RequestCheck()
        self._server = CallServer(
            self._services(),
            _limits(options),
            self._lines,
            self._check,
            partial(method_limits, most=options.max_message_size),
        )
        self._collector = DaemonCollector(
            self._gate,
            self._calls,
            self._health,
            options.metrics_aliases,
            self._server,
            self._credentials.certificate_end,
        )
        self._metrics: MetricsEndpoint | None = None
        self._zmq_addresses = ("", "")

    async def run(self) -> None:
        """Serves until a signal asks for the end.

        Raises:
            ConfigError: the address cannot be listened on, or the ready file of a run before not removed.
            PykvError: the model cannot be loaded.
        """
        listener = bind(self._options.host, self._options.port)
        self._address = address_of(listener)
        try:
            self._ready_file.clear()  # now that the port is known to be no other daemon's, whose file it may be
        except ConfigError:
            listener.close()
            raise
        tls = self._credentials.tls
        await self._server.listen(listener, None if tls is None else tls.context)
        try:
            async with self._metrics_endpoint(), self._tracing:
                await self._run()
        finally:
            with anyio.CancelScope(shield=True):
                await self._server.end()
            self._lines.close()

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._shutdown.watch_signals)  # before the model is read: that takes long
            await tasks.start(self._credentials.watch, self._server)
            await self._serve()
            tasks.cancel_scope.cancel()

    @property
    def address(self) -> str:
        """HOST:PORT that is listened on; empty before."""
        return self._address

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of the metrics; empty where there are none."""
        return "" if self._metrics is None else self._metrics.address

    @property
    def zmq_addresses(self) -> tuple[str, str]:
        """Where KV events are published, and replayed; empty where they are not."""
        return self._zmq_addresses

    async def reload(self) -> None:
        """Reads the files of credentials again, as SIGHUP does."""
        await self._credentials.reload(self._server)

    async def wait_ready(self) -> None:
        """Returns once requests are served."""
        await self._ready.wait()

    def request_shutdown(self) -> None:
        """As a signal does: the first time it begins the end, the second it hurries it on."""
        self._shutdown.request()

    async def _serve(self) -> None:
        served = await self._load_unless_ended()
        if served is None:
            return
        async with served.engine, self._calls_ended_first(), anyio.create_task_group() as tasks:
            self._credentials.shares.serve(served.engine.set_cache_share)
            self._feed.serve(served.engine)
            self._check.max_model_len = served.description.max_model_len
            self._engine_service.serve(served)
            self._collector.serve(served)
            await self._start_publishing(tasks, served.description.block_size)
            tasks.start_soon(
                watch_engine, served.engine, self._health, self._calls, self._options.progress_timeout
            )
            self._announce(served.description)
            with self._ready_file.telling(self._address):
                print(f"pykv-serve ready on {self._address}", flush=True)
                self._ready.set()
                await self._shutdown.wait_requested()
            self._feed.close()  # who subscribes would not end by itself
            await self._shutdown.drain(self._server, self._calls, self._health, self._options.drain_timeout)
            tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def _calls_ended_first(self) -> AsyncIterator[None]:
        """Ends the calls before the engine is closed, whatever brings the daemon down."""
        try:
            yield
        finally:
            self._health.set_ending()
            await end_calls(self._calls)

    async def _start_publishing(self, tasks: TaskGroup, block_size: int) -> None:
        """Publishes KV events over ZeroMQ, where that was asked for."""
        options = self._options
        if options.kv_events_zmq is None:
            return
        publisher = _zmq_publisher()(
            self._feed, options.kv_events_zmq, options.kv_events_zmq_replay, block_size
        )
        await tasks.start(publisher.run)
        self._collector.count_replays_refused(lambda: publisher.num_replays_refused)
        self._zmq_addresses = publisher.address, publisher.replay_address
        log.info("KV events published", address=publisher.address, replay_address=publisher.replay_address)

    async def _load_unless_ended(self) -> ServedModel | None:
        """None: the end was asked for while the model was being loaded."""
        served = None
        async with anyio.create_task_group() as tasks:

            async def end_early() -> None:
                await self._shutdown.wait_requested()
                tasks.cancel_scope.cancel()

            tasks.start_soon(end_early)
            served = await run_in_daemon_thread(lambda: self._load(self._options, _log_progress), LOAD_THREAD)
            tasks.cancel_scope.cancel()
        return served

    def _announce(self, description: ModelDescription) -> None:
        self._health.set_ready()
        log.info(
            "model served",
            model=description.name,
            dtype=description.dtype,
            device=description.device,
            kv_dtype=description.kv_dtype,
            kv_bytes_per_token=description.kv_bytes_per_token,
            num_blocks=description.num_blocks,
            block_size=description.block_size,
            max_model_len=description.max_model_len,
            cache_mib=round(
                description.num_blocks * description.block_size * description.kv_bytes_per_token / 2**20
            ),
            requests_that_fit=", ".join(
                f"{count} of {length} tokens" for length, count in description.requests_that_fit().items()
            ),
        )

    def _services(self) -> list[IServable]:
        engines: list[IServable] = [
            DescribedService(SERVICE, self._engine_service),
            *_gateway_services(self._gate, self._engine_service, self._health, self._feed),
        ]
        others = ServerReflection.extend([*engines, self._health.service(SERVICE.full_name)])[len(engines) :]
        other_calls = Calls(self._lines)
        health = [service for service in others if isinstance(service, HealthService)]  # probes have no token
        reflection = [service for service in others if not isinstance(service, HealthService)]
        return [
            *(guarded(service, self._calls) for service in engines),
            *(guarded(service, other_calls) for service in health),
            *(guarded(service, other_calls, self._account_call) for service in reflection),
        ]

    def _account_call(self, stream: AnyStream) -> AbstractContextManager[None]:
        """Counts a call among those of its caller's tenant, as long as it lasts."""
        return self._gate.account_of(stream).call()

    @asynccontextmanager
    async def _metrics_endpoint(self) -> AsyncIterator[None]:
        port = self._options.metrics_port
        if port is None:
            yield
            return
        async with MetricsEndpoint(self._collector, self._options.metrics_host, port) as self._metrics:
            log.info("metrics served", address=self._metrics.address)
            yield


def _gateway_services(
    gate: Gate, engine_service: EngineService, health: HealthState, feed: EventFeed
) -> list[IServable]:
    """The gateway's protocol, where its messages are installed."""
    if find_spec("smg_grpc_proto") is None:
        return []
    from pykv.service.gateway import GatewayService, gateway_descriptor

    return [DescribedService(gateway_descriptor(), GatewayService(gate, engine_service, health, feed))]


def _limits(options: ServeOptions) -> TransportLimits:
    return TransportLimits(
        max_streams=options.max_streams,
        max_message_bytes=options.max_message_size,
        request_memory_bytes=options.request_memory,
        stall_seconds=options.stall_timeout,
        max_connections=options.max_connections,
        max_connections_per_peer=options.max_connections_per_peer,
        connections_per_second=options.connections_per_second,
        request_seconds=options.request_timeout,
        keepalive_seconds=options.keepalive_time,
        keepalive_timeout_seconds=options.keepalive_timeout,
        keepalive_permit_without_calls=options.keepalive_permit_without_calls,
        min_ping_interval_seconds=options.min_recv_ping_interval_without_data,
        max_ping_strikes=options.max_ping_strikes,
        control_frames_burst=options.control_frames_burst,
        control_frames_per_second=options.control_frames_per_second,
    )


def _log_progress(step: str) -> None:
    log.info("loading model", step=step)
