"""`pykv-serve` as a child process on a free loopback port."""

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["HOST", "Daemon", "DaemonError", "running_daemon"]

HOST = "127.0.0.1"
STOP_SECONDS = 20.0
LOG_LINES = 20


class DaemonError(Exception):
    """The daemon ended before it was told to; the message holds the end of its log."""


class Daemon:
    """A started daemon.

    Attributes:
        port: where it listens, or will once its model is loaded.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process = process
        self._log = log
        self.port = port

    def check_alive(self) -> None:
        """Raises DaemonError when the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise DaemonError(f"pykv-serve ended with exit code {code}:\n{self.last_log_lines(LOG_LINES)}")

    def last_log_lines(self, count: int) -> str:
        """The end of what the daemon has written."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-count:])

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
    port = free_port()
    program = Path(sys.executable).with_name("pykv-serve")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [str(program), "--host", HOST, "--port", str(port), *options]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        daemon = Daemon(process, port, log)
        try:
            yield daemon
        finally:
            daemon.stop()


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
