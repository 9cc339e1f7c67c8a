"""`pykv chat` keeps the conversation and streams its answers."""

import asyncio
import io

import pytest

from pykv.cli.chat import Conversation
from pykv.cli.main import main
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
