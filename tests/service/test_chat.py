"""`pykv chat` keeps the conversation and streams its answers."""

import asyncio
import io
import queue
import sys

import pytest

from pykv.cli.chat import Conversation
from pykv.cli.main import main
from pykv.client import Client
from pykv.engine.outputs import OutputDelta, Usage
from pykv.errors import InvalidRequestError
from pykv.sampling import SamplingParams


class Shown:
    def __init__(self):
        self.text, self.notes = "", []

    def show(self, text):
        self.text += text

    def note(self, text):
        self.notes.append(text)


@pytest.mark.asyncio
async def test_a_conversation_keeps_what_was_said(client):
    conversation, screen = Conversation(client, SamplingParams(max_tokens=2), "be brief"), Shown()
    await conversation.ask("four", screen)
    await conversation.ask("to be", screen)
    assert screen.text == "5 6 3 4 "
    assert [(message["role"], message["content"]) for message in conversation.messages] == [
        ("system", "be brief"),
        ("user", "four"),
        ("assistant", "5 6 "),
        ("user", "to be"),
        ("assistant", "3 4 "),
    ]
    await conversation.restart()
    assert [message["role"] for message in conversation.messages] == ["system"]


@pytest.mark.asyncio
async def test_an_answer_does_not_command_the_terminal(client, engine):
    usage = Usage(1, 0, 1, 0, 0)
    text = "red \x1b[31m\x9b31m\r\tend\n"
    engine.scripts["colour"] = [OutputDelta("x", 0, (1,), text, finish_reason="stop", usage=usage)]
    screen = Shown()
    await Conversation(client, SamplingParams(), "").ask("colour", screen)
    assert screen.text == "red [31m31m\tend\n"


@pytest.mark.asyncio
async def test_a_question_that_is_refused_is_not_kept(client):
    conversation = Conversation(client, SamplingParams(), "")
    with pytest.raises(InvalidRequestError):
        await conversation.ask(" ", Shown())
    assert conversation.messages == []


@pytest.mark.asyncio
async def test_the_command_talks_until_its_input_ends(daemon, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("four\n\n/new\n/help\n/stop\nto be\n/quit\nnever\n"))
    arguments = ["chat", "--address", daemon.address, "--max-tokens", "2"]
    assert await in_thread(lambda: main(arguments)) == 0
    out = capsys.readouterr().out
    assert "5 6 \n[2 tokens in" in out
    assert "3 4 \n[2 tokens in" in out
    assert "[forgotten]\n[/new begins anew" in out
    assert "[/stop is no command: /new begins anew" in out
    assert len(daemon.engine.finished) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(("is_typed", "code"), [(False, 1), (True, 0)])
async def test_an_answer_that_failed_is_told_by_the_exit_code_where_nobody_types(
    daemon, monkeypatch, capsys, is_typed, code
):
    usage = Usage(1, 0, 1, 0, 0)
    daemon.engine.scripts["bad"] = [OutputDelta("x", 0, (1,), "", finish_reason="error", usage=usage)]
    monkeypatch.setattr("sys.stdin", io.StringIO("bad\nfour\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: is_typed, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: sys.stdin.readline().rstrip("\n") or _end())
    arguments = ["chat", "--address", daemon.address, "--max-tokens", "2"]
    assert await in_thread(lambda: main(arguments)) == code
    assert "5 6 \n[2 tokens in" in capsys.readouterr().out


def _end():
    raise EOFError


@pytest.mark.asyncio
@pytest.mark.parametrize(("is_typed", "num_answers"), [(True, 2), (False, 1)])
async def test_ctrl_c_drops_the_line_that_is_typed_and_ends_the_talk_only_twice_on_end(
    daemon, monkeypatch, capsys, is_typed, num_answers
):
    typed = iter(["four", KeyboardInterrupt, "to be", KeyboardInterrupt, KeyboardInterrupt, "never"])

    def read(prompt):
        line = next(typed)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: is_typed, raising=False)
    monkeypatch.setattr("builtins.input", read)
    arguments = ["chat", "--address", daemon.address, "--max-tokens", "2"]
    assert await in_thread(lambda: main(arguments)) == 0
    assert len(daemon.engine.finished) == num_answers
    assert capsys.readouterr().out.count("[/quit or Ctrl-D ends") == (2 if is_typed else 0)


class Typed:
    """Lines that a test types while the command runs."""

    def __init__(self):
        self._lines = queue.Queue()
        self.readline = self._lines.get

    def isatty(self):
        return False

    def type(self, line):
        self._lines.put(f"{line}\n")


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["at its end", "cut off"])
async def test_a_server_that_goes_away_in_mid_answer_is_said_to_be_gone_and_what_was_said_is_kept(
    start_daemon, monkeypatch, capsys, eventually, way
):
    first, typed, asked, shown = await start_daemon(), Typed(), [], ""
    port = int(first.address.rsplit(":", 1)[1])
    answer = Client.chat

    def remember(self, messages, *rest, **named):
        asked.append([message["content"] for message in messages])
        return answer(self, messages, *rest, **named)

    monkeypatch.setattr(Client, "chat", remember)
    monkeypatch.setattr("sys.stdin", typed)
    arguments = ["chat", "--address", first.address, "--max-tokens", "100000"]
    talking = asyncio.create_task(in_thread(lambda: main(arguments)))
    usage = Usage(1, 0, 1, 0, 0)
    first.engine.scripts["hello"] = [OutputDelta("x", 0, (1,), "hi", finish_reason="stop", usage=usage)]
    typed.type("hello")
    typed.type("count on")
    await first.engine.until(lambda: first.engine.finished and first.engine.live)

    async def is_answering():
        nonlocal shown
        shown += capsys.readouterr().out
        return "3 4 5" in shown

    await eventually(is_answering)
    if way == "cut off":
        for connection in list(first.daemon._server._connections):
            connection.abort()
    await first.stop()
    second = await start_daemon(port=port)
    second.engine.scripts["again"] = [OutputDelta("x", 0, (1,), "here", finish_reason="stop", usage=usage)]
    typed.type("again")
    typed.type("/quit")
    assert await talking == 1  # nobody types, and an answer failed
    shown += capsys.readouterr().out
    assert "[the server is gone: UNAVAILABLE: " in shown
    assert "what was said is kept" in shown
    assert "here\n[1 tokens in" in shown
    assert [said[:3] for said in asked] == [
        ["hello"],
        ["hello", "hi", "count on"],
        ["hello", "hi", "count on"],
    ]
    assert asked[-1][3].startswith("3 4 5")
    assert asked[-1][4:] == ["again"]


async def in_thread(function):
    return await asyncio.get_running_loop().run_in_executor(None, function)


def test_without_a_server_the_command_says_so_in_one_line(capsys):
    assert main(["chat", "--address", "127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pykv: UNAVAILABLE: no server answers at 127.0.0.1:1")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["chat", "--address", "nowhere"], ["chat", "--temperature", "-1"], ["chatt"]]
)
def test_bad_arguments_are_refused_in_one_line(capsys, arguments):
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_help_names_the_commands(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("chat", "demo", "serve"))
