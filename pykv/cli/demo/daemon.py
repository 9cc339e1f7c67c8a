"""`pykv-serve` as a child process on a free loopback port."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from pykv.client import Client, ServiceError

__all__ = ["Daemon", "DaemonError", "running_daemon"]

HOST = "127.0.0.1"
LOAD_SECONDS = 600.0
POLL_SECONDS = 0.05
STOP_SECONDS = 20.0
LOG_LINES = 20


class DaemonError(Exception):
    """The daemon ended before it was told to, or never served; the message holds the end of its log."""


class Daemon:
    """A started daemon.

    Attributes:
        address: HOST:PORT, where it listens or soon will.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self._process = process
        self._log = log
        self.address = address

    async def wait_until_serving(self, client: Client) -> None:
        """Returns when the model is loaded.

        Raises:
            DaemonError: the process ended, or does not serve after ten minutes.
        """
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                while not await _is_serving(client):
                    self._check_alive()
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            self._fail(f"does not serve after {LOAD_SECONDS:.0f} s")

    def _check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            self._fail(f"ended with exit code {code}")

    def _fail(self, what: str) -> NoReturn:
        last_lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        raise DaemonError("\n".join([f"pykv-serve {what}:", *last_lines]))

    def stop(self) -> int:
        """Lets the daemon drain and end; gives its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@contextlib.contextmanager
def running_daemon(*options: str) -> Iterator[Daemon]:
    """Starts `pykv-serve` with these options on a free port; stops it at the end, whatever happened.

    What it prints goes to a file, so that it does not mix with what the demo shows.
    """
    port = _free_port()
    program = Path(sys.executable).with_name("pykv-serve")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [str(program), "--host", HOST, "--port", str(port), *options]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        daemon = Daemon(process, f"{HOST}:{port}", log)
        try:
            yield daemon
        finally:
            daemon.stop()


async def _is_serving(client: Client) -> bool:
    try:
        return await client.health() == "SERVING"
    except ServiceError:
        return False


def _free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
