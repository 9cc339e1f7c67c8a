"""A daemon with a stub engine in the test's own event loop, and ways to talk to it."""

import asyncio
import importlib.util
import json
import logging
import os
import resource
import sys
import threading
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
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
refused_requests = _sibling("refused_requests")
scripted_server = _sibling("scripted_server")
Authority = _sibling("authority").Authority


def pytest_generate_tests(metafunc):
    """A test that takes `refused` runs for every bad request."""
    if "bad_request" in metafunc.fixturenames:
        table = refused_requests.REFUSED
        metafunc.parametrize("bad_request", table.values(), ids=table)


@pytest.fixture(autouse=True)
def _logs_as_pytest_shows_them():
    """Logs go the way of the standard library, not to stdout."""
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.stdlib.render_to_log_kwargs],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    yield
    structlog.reset_defaults()


@pytest.fixture
def logging_as_it_was():
    """Puts the set-up of the standard library's logging back."""
    root, ours = logging.getLogger(), logging.getLogger("pykv")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


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
    """Starts daemons: `await start_daemon(engine=None, description=None, archive=None, **options)`."""

    async with AsyncExitStack() as stack:

        async def start(engine=None, description=None, archive=None, **options):
            return await stack.enter_async_context(_running(engine, description, archive, options))

        yield start


@pytest.fixture
def make_authority():
    """Makes one more authority of certificates: `make_authority(folder)`."""
    return Authority


@pytest.fixture
def authority(tmp_path):
    """Who has signed the daemon's certificate."""
    return Authority(tmp_path)


@pytest.fixture
def start_tls(start_daemon, authority):
    """Starts a daemon with a certificate for 127.0.0.1: `await start_tls(**options)`."""

    async def start(**options):
        chain, key = authority.issue("server", "127.0.0.1")
        return await start_daemon(tls_cert=str(chain), tls_key=str(key), **options)

    return start


@pytest.fixture(scope="session")
def tiny_runner():
    """A random model with its cache of 512 blocks, and its tokenizer; tests take turns with it."""
    import torch

    from pykv.engine import EngineConfig
    from pykv.engine.loading import load_runner

    torch.set_num_threads(1)
    tiny_model = _sibling("tiny_model")
    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(len(tokenizer))
    return load_runner(model, tokenizer, EngineConfig(num_blocks=513, dtype="float32"), None)


@pytest.fixture
def make_real_engine(tiny_runner):
    """Makes an engine of the random model: `make_real_engine(**options of EngineConfig)`."""
    from pykv.engine import AsyncEngine, Engine, EngineConfig

    def make(max_pending_tokens=2**14, **options):
        runner, tokenizer = tiny_runner
        engine = Engine.from_runner(runner, tokenizer, EngineConfig(**options))
        return AsyncEngine(engine, max_pending_tokens=max_pending_tokens)

    return make


@pytest.fixture
def make_small_engine():
    """Makes an engine of the random model with a cache of its own: `make_small_engine(num_blocks=13)`."""
    from pykv.engine import AsyncEngine, Engine, EngineConfig
    from pykv.engine.loading import load_runner

    def make(**options):
        tiny_model = _sibling("tiny_model")
        tokenizer = tiny_model.make_tokenizer()
        config = EngineConfig(dtype="float32", **options)
        runner, tokenizer = load_runner(tiny_model.make_model(len(tokenizer)), tokenizer, config, None)
        return AsyncEngine(Engine.from_runner(runner, tokenizer, config))

    return make


@pytest_asyncio.fixture
async def real(start_daemon, make_real_engine):
    """A daemon with the random model."""
    return await start_daemon(make_real_engine())


@pytest.fixture
def load_stub():
    """A loader whose outcome the name of the model chooses."""
    return stub_engine.load


@pytest.fixture(scope="session")
def save_tiny_model():
    return _sibling("tiny_model").save


@asynccontextmanager
async def _running(engine, description, archive, options):
    engine = engine or stub_engine.StubEngine()
    served = ServedModel(engine, description or stub_engine.DESCRIPTION, archive)
    defaults = ServeOptions(port=0, drain_timeout=0.0, max_ping_strikes=0)  # tests ping to know what was seen
    daemon = Daemon(replace(defaults, **options), lambda *_: served)
    task = asyncio.create_task(daemon.run())
    ready = asyncio.create_task(daemon.wait_ready())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    running = RunningDaemon(daemon, engine, task)
    try:
        yield running
    finally:
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
def open_raw(daemon, raw_open):
    """Opens a connection by hand: `await open_raw(initial_window=None)`."""

    async def open_connection(initial_window=None, address=None):
        return await raw_open(address or daemon.address, initial_window)

    return open_connection


@pytest.fixture
def eventually():
    """Waits until a condition holds that another thread or the far side of a socket brings about."""

    async def wait(condition, seconds=20.0):
        async with asyncio.timeout(seconds):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    return wait


@pytest.fixture
def collect():
    """Reads a stream to its end."""

    async def read(deltas):
        async with asyncio.timeout(20):
            return [delta async for delta in deltas]

    return read


@contextmanager
def _no_more_files():
    """All that this process may open is open."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 1, before[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def no_more_files():
    """A context in which no file can be opened: `with no_more_files():`."""
    return _no_more_files


@pytest.fixture
def run_soak():
    """Runs clients that behave badly: `await run_soak(address, seed, seconds)`, how often each thing was done."""

    async def run(address, seed, seconds):
        program = Path(__file__).with_name("soak.py")
        clients = await asyncio.create_subprocess_exec(
            sys.executable, program, address, str(seed), str(seconds), stdout=asyncio.subprocess.PIPE
        )
        try:
            output, _ = await clients.communicate()
        finally:
            if clients.returncode is None:
                clients.kill()
        assert clients.returncode == 0
        return json.loads(output)

    return run


@pytest.fixture
def in_step():
    """Has an engine make no token before the one before has reached its reader's buffer: `in_step(engine)`.

    On a busy machine it would run ahead of the event loop, to the request's end perhaps.
    """

    def wait_for_loop(engine, seconds=20):
        deliver, loop = engine._thread._deliver, asyncio.get_running_loop()

        def deliver_and_wait(deltas):
            deliver(deltas)
            has_come = threading.Event()
            loop.call_soon_threadsafe(has_come.set)
            has_come.wait(seconds)

        engine._thread._deliver = deliver_and_wait
        return engine

    return wait_for_loop


@pytest.fixture
def raw_open():
    """Opens a connection by hand to an address: `await raw_open(address)`."""
    opened = []

    async def open_connection(address, initial_window=None):
        connection = await raw_connection.RawConnection.open(address, initial_window)
        opened.append(connection.writer.transport)
        return connection

    yield open_connection
    for transport in opened:  # of a test that failed; else the next one finds them
        if not transport.is_closing():
            transport.abort()


@pytest.fixture
def scripted():
    """A server whose answers the test writes: `scripted({path: answer})`."""
    return scripted_server.ScriptedServer


@pytest.fixture
def raw_over():
    """A connection by hand over streams that are open: `raw_over(reader, writer)`."""
    return raw_connection.RawConnection


@pytest.fixture
def start_daemon_in():
    """Starts a daemon in the running event loop: `daemon, stop = await start_daemon_in(engine)`."""

    async def start(engine, **options):
        stack = AsyncExitStack()
        daemon = await stack.enter_async_context(_running(engine, None, None, options))
        return daemon, stack.aclose

    return start
