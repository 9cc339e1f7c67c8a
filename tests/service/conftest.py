"""A daemon with a stub engine in the test's own event loop, and ways to talk to it."""

import asyncio
import importlib.util
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from pykv.client import Client
from pykv.service.daemon import Daemon
from pykv.service.options import ServeOptions
from pykv.service.served import ServedModel


def _sibling(name):
    """Imports a module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(
        f"service_tests_{name}", Path(__file__).with_name(f"{name}.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


stub_engine = _sibling("stub_engine")
raw_connection = _sibling("raw_connection")


@pytest.fixture(autouse=True)
def _logs_as_pytest_shows_them():
    """Logs go the way of the standard library, not to stdout."""
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.stdlib.render_to_log_kwargs],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    yield
    structlog.reset_defaults()


class RunningDaemon:
    """A daemon and its engine."""

    def __init__(self, daemon, engine, task):
        self.daemon, self.engine, self.task = daemon, engine, task

    @property
    def address(self):
        return self.daemon.address

    async def stop(self):
        self.daemon.request_shutdown()
        async with asyncio.timeout(20):
            await self.task


@pytest.fixture
def framed():
    return raw_connection.framed


@pytest.fixture
def description():
    return stub_engine.DESCRIPTION


@pytest.fixture
def make_engine():
    return stub_engine.StubEngine


@pytest_asyncio.fixture
async def start_daemon():
    """Starts daemons: `await start_daemon(engine=None, description=None, **options)`."""

    async with AsyncExitStack() as stack:

        async def start(engine=None, description=None, **options):
            return await stack.enter_async_context(_running(engine, description, options))

        yield start


@asynccontextmanager
async def _running(engine, description, options):
    engine = engine or stub_engine.StubEngine()
    served = ServedModel(engine, description or stub_engine.DESCRIPTION)
    daemon = Daemon(replace(ServeOptions(port=0, drain_timeout=0.0), **options), lambda *_: served)
    task = asyncio.create_task(daemon.run())
    ready = asyncio.create_task(daemon.wait_ready())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    running = RunningDaemon(daemon, engine, task)
    try:
        yield running
    finally:
        engine.release()
        await running.stop()


@pytest_asyncio.fixture
async def daemon(start_daemon):
    return await start_daemon()


@pytest.fixture
def engine(daemon):
    return daemon.engine


@pytest_asyncio.fixture
async def client(daemon):
    async with Client(daemon.address) as client:
        yield client


@pytest_asyncio.fixture
async def raw(daemon):
    connection = await raw_connection.RawConnection.open(daemon.address)
    yield connection
    await connection.close()


@pytest.fixture
def open_raw(daemon):
    """Opens a connection by hand: `await open_raw(initial_window=None)`."""

    async def open_connection(initial_window=None, address=None):
        return await raw_connection.RawConnection.open(address or daemon.address, initial_window)

    return open_connection


@pytest.fixture
def collect():
    """Reads a stream to its end."""

    async def read(deltas):
        async with asyncio.timeout(20):
            return [delta async for delta in deltas]

    return read
