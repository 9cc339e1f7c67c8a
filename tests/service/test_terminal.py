"""`pykv chat` and `pykv top` as somebody at a terminal has them."""

import asyncio
import fcntl
import hashlib
import importlib.util
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.cells import cell_len

pytestmark = pytest.mark.asyncio

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from pykv.cli.launch import run_client
sys.exit(run_client())
"""
PROMPT = "> "
CTRL_C, CTRL_D = "\x03", "\x04"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A command in a terminal of its own.

    Attributes:
        shown: what it wrote since the last `until`.
    """

    def __init__(self, arguments, columns, lines, variables):
        self.master, slave = pty.openpty()
        self.resize(columns, lines)
        environment = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True, cwd=ROOT,
            env=environment | {"TERM": "xterm", **variables},
        )  # fmt: skip
        os.close(slave)
        self.shown = ""
        self._came = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.master, self._read)

    def resize(self, columns, lines):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text):
        os.write(self.master, text.encode() if isinstance(text, str) else text)

    async def until(self, text):
        """Waits for a text, and returns what came up to it."""
        async with asyncio.timeout(20):
            while text not in self.shown:
                self._came.clear()
                await self._came.wait()
        before, found, self.shown = self.shown.partition(text)
        return before + found

    async def end(self):
        """Waits for the end; returns the exit code."""
        async with asyncio.timeout(20):
            return await asyncio.to_thread(self.process.wait)

    def close(self):
        self._loop.remove_reader(self.master)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)

    def _read(self):
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the command has ended
            self._loop.remove_reader(self.master)
            return
        self.shown += data.decode(errors="replace")
        self._came.set()


@pytest.fixture
def terminal():
    """Runs `pykv` in a terminal: `terminal("chat", ..., columns=80, lines=24, VARIABLE=...)`."""
    opened = []

    def open_terminal(*arguments, columns=80, lines=24, **variables):
        opened.append(Terminal(arguments, columns, lines, variables))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


@pytest.fixture
def chat(terminal, daemon):
    """`pykv chat` with the daemon, and answers of two tokens."""

    def start(**options):
        return terminal("chat", "--address", daemon.address, "--max-tokens", "2", **options)

    return start


async def test_ctrl_c_stops_an_answer_and_the_talk_goes_on_over_the_same_connection(terminal, daemon):
    screen = terminal("chat", "--address", daemon.address, "--max-tokens", "100000")
    await screen.until(PROMPT)
    for _ in range(2):
        screen.type("four\n")
        await screen.until("5 6 7")
        screen.type(CTRL_C)
        await screen.until("stopped")
        await screen.until(PROMPT)
    assert daemon.daemon._server.num_connections == 1
    screen.type("/quit\n")
    assert await screen.end() == 0


async def test_ctrl_d_ends_the_talk(chat):
    screen = chat()
    await screen.until(PROMPT)
    screen.type(CTRL_D)
    assert await screen.end() == 0
    assert "Traceback" not in screen.shown


@pytest.mark.skipif(importlib.util.find_spec("readline") is None, reason="this Python has no readline")
async def test_a_line_may_be_longer_than_the_terminals_own_and_can_be_edited(chat):
    screen = chat(columns=20)
    await screen.until(PROMPT)
    screen.type("a" * 6000 + "\n")  # the stub's tokens are the lengths of words
    assert "the token 6000" in " ".join(ESCAPE.sub("", await screen.until("to 999")).split())
    await screen.until(PROMPT)
    screen.type("fxur\x1b[D\x1b[D\x7fo\n")  # two to the left, and the x by an o
    await screen.until("5 6")


async def test_wide_characters_come_and_go(chat, daemon):
    screen = chat(columns=20, LC_ALL="C.UTF-8")
    await screen.until(PROMPT)
    screen.type("漢字 " * 30 + "\n")
    await screen.until("3 4")
    assert daemon.engine.finished


@pytest.mark.parametrize("line", ["ä\n".encode(), b"a\xff\n"])
async def test_what_is_no_text_in_the_terminals_encoding_is_said_and_the_talk_goes_on(chat, line):
    screen = chat(PYTHONIOENCODING="ascii", TERM="dumb")
    await screen.until(PROMPT)
    screen.type(line)
    await screen.until("the line is no text in ascii")
    await screen.until(PROMPT)
    screen.type("four\n")
    await screen.until("5 6")


async def test_a_dumb_terminal_gets_no_commands(chat, terminal, daemon):
    talk = chat(TERM="dumb")
    watch = terminal("top", "--address", daemon.address, "--interval", "0.1", TERM="dumb")
    assert "\x1b" not in await talk.until(PROMPT)
    for _ in range(3):  # frames, one below the other
        assert "\x1b" not in await watch.until("pykv top")
    watch.type(CTRL_C)
    assert await watch.end() == 0


async def test_without_colours_there_are_none(terminal, daemon):
    screen = terminal("top", "--address", daemon.address, "--interval", "0.1", NO_COLOR="1")
    shown = await screen.until("blocks:")
    assert "serving" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown)


async def test_a_narrow_terminal_has_all_of_a_frame_and_a_wider_one_more(terminal, daemon):
    screen = terminal("top", "--address", daemon.address, "--interval", "0.1", columns=20, lines=40)
    await screen.until("················")  # the map, of which the first frame may have nothing yet
    await screen.until("\x1b[H")  # where the next begins
    frame = ESCAPE.sub("", await screen.until("\x1b[H"))
    assert all(cell_len(line) <= 20 for line in frame.splitlines())
    for name in ("tokens/s", "hit rate", "preemptions", "blocks", "cached"):
        assert name in frame
    assert frame.count("│ ················ │") == 4
    screen.resize(100, 40)
    await screen.until("running waiting tokens/s".replace(" ", "\x1b[0m\x1b[1m \x1b[0m\x1b[1m"))
    screen.type(CTRL_C)
    assert await screen.end() == 0
    assert "Traceback" not in screen.shown


@pytest.mark.parametrize("command", ["chat", "top"])
async def test_ctrl_c_leaves_a_server_that_says_nothing(terminal, command):
    was_asked = asyncio.Event()

    async def serve(reader, writer):
        await reader.read(1)
        was_asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    screen = terminal(command, "--address", "{}:{}".format(*server.sockets[0].getsockname()))
    async with asyncio.timeout(20):
        await was_asked.wait()
    screen.type(CTRL_C)
    assert await screen.end() == {"chat": 130, "top": 0}[command]
    assert "Traceback" not in screen.shown
    server.close()


async def test_where_nobody_reads_the_command_ends_without_a_word(daemon):
    program = [
        sys.executable,
        "-c",
        "import sys; from pykv.cli.launch import run_client; sys.exit(run_client())",
    ]
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *program, "chat", "--address", daemon.address,
        cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=writing, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    os.close(reading)
    os.close(writing)
    async with asyncio.timeout(20):
        _, said = await process.communicate(b"four\n")
    assert (process.returncode, said) == (141, b"")


@pytest.mark.parametrize("command", ["chat", "top"])
async def test_who_shows_no_token_is_told_how_to(start_daemon, terminal, tmp_path, command):
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[tenants.a]\ntoken_sha256 = ["{hashlib.sha256(b"s").hexdigest()}"]')
    daemon = await start_daemon(tenants=str(tenants))
    screen = terminal(command, "--address", daemon.address, columns=200)
    await screen.until("pykv: UNAUTHENTICATED: the call has no credential")
    assert await screen.end() == 2
    assert "see --token-file" in screen.shown
