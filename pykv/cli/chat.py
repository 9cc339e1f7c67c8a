"""The command `pykv chat`: a conversation with a served model, streamed into the terminal."""

import asyncio
import re
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from pykv.cli.connection import add_connection_options, answering, client_of
from pykv.cli.parser import Parser, integer, number
from pykv.client import Client, ServiceError
from pykv.engine.outputs import OutputDelta, Usage
from pykv.errors import PykvError
from pykv.retention import Retention
from pykv.sampling import SamplingParams
from pykv.service.served import ModelDescription

__all__ = ["Conversation", "main"]

HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""A model's control characters must not command the terminal."""
SESSION_SECONDS = 3600.0
"""After so long without a question the server may take the conversation for over."""
FAILED = ("abort", "error")
"""How an answer ends that the server, and not its user, has given up."""
COMMAND = re.compile(r"/[a-z]*")
HELP = "/new begins anew, /quit ends; Ctrl-C stops an answer"
DROPPED = "/quit or Ctrl-D ends, and so does Ctrl-C once more"


class Screen(Protocol):
    """Where the conversation is shown."""

    def show(self, text: str) -> None:
        """Shows a part of an answer."""

    def note(self, text: str) -> None:
        """Shows a line about the conversation."""


class PlainScreen:
    """Text alone."""

    def show(self, text: str) -> None:
        print(text, end="", flush=True)

    def note(self, text: str) -> None:
        print(f"[{text}]", flush=True)


class RichScreen:
    """Notes are dim, so that the answers stand out."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, markup=False, emoji=False)

    def show(self, text: str) -> None:
        self._console.out(text, end="", highlight=False)

    def note(self, text: str) -> None:
        self._console.print(text, style="dim")


class Conversation:
    """What was said; a question stays only once something was answered.

    The server knows it as one session, whose blocks it keeps until the end.

    Args:
        client: of the server that answers.
        params: how the answers are made.
        system: said to the model before everything; empty = nothing.
    """

    def __init__(self, client: Client, params: SamplingParams, system: str) -> None:
        self._client = client
        self._params = params
        self._system = system
        self.messages: list[dict[str, str]] = []
        self._begin()

    async def restart(self) -> None:
        """Forgets what was said, and so does the server.

        Raises:
            PykvError: the server refused, or failed; what was said is forgotten here all the same.
        """
        session_id = self.session_id
        self._begin()
        await self._client.end_session(session_id)

    def _begin(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self.session_id = uuid.uuid4().hex

    async def ask(self, question: str, screen: Screen) -> OutputDelta | None:
        """Streams the answer to the screen and returns its last delta; None = nothing came.

        Raises:
            PykvError: the server refused, or failed.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        retention = Retention(session_id=self.session_id, ttl_seconds=SESSION_SECONDS)
        answer, last = "", None
        try:
            async for last in self._client.chat(asked, self._params, retention=retention):
                answer += last.text
                screen.show(last.text.translate(HARMLESS))
        finally:
            if answer:
                self.messages = [*asked, {"role": "assistant", "content": answer}]
        return last


def main(arguments: Sequence[str] | None = None) -> int:
    """Talks until the end of the input.

    Returns:
        0; 1 where an answer failed and nobody types, as in a pipe.

    Raises:
        PykvError: an option is not allowed, or no server answers.
    """
    options = _parser().parse_args(arguments)
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    screen = _screen()
    with asyncio.Runner() as runner:
        client = client_of(options)
        try:
            model = runner.run(_model(client, options.address))
            screen.note(f"{model.name}, up to {model.max_model_len} tokens. {HELP}.")
            conversation = Conversation(client, params, options.system)
            talk = _Talk(runner, conversation, screen, options.address)
            try:
                num_failed = talk.hold()
            finally:
                talk.restart()
        finally:
            runner.run(client.aclose())
    return int(num_failed > 0 and not sys.stdin.isatty())


async def _model(client: Client, address: str) -> ModelDescription:
    async with answering(address):
        return await client.get_model()


class _Talk:
    """Reads what the user types, until the end of the input.

    Args:
        address: of the server, as its user knows it.
    """

    def __init__(
        self, runner: asyncio.Runner, conversation: Conversation, screen: Screen, address: str
    ) -> None:
        self._runner = runner
        self._conversation = conversation
        self._screen = screen
        self._address = address

    def hold(self) -> int:
        """Answers, and returns how many answers failed."""
        num_failed = 0
        while (line := self._line()) is not None:
            if line == "/quit":
                break
            if line == "/new":
                self.restart()
                self._screen.note("forgotten")
            elif COMMAND.fullmatch(line):
                self._screen.note(HELP if line == "/help" else f"{line} is no command: {HELP}")
            elif line and not self._answer(line):
                num_failed += 1
        return num_failed

    def restart(self) -> None:
        """Forgets what was said, and has the server do so if it answers."""
        try:
            self._runner.run(self._restarted())
        except PykvError as error:
            self._screen.note(f"the server keeps the conversation for a while: {error}")

    async def _restarted(self) -> None:
        async with answering(self._address):
            await self._conversation.restart()

    def _line(self) -> str | None:
        """The next line of the user; None at the end of the input, and where Ctrl-C drops two lines on end."""
        try:
            return self._read_or_dropped()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                return None
        self._screen.note(DROPPED)
        try:
            return self._read_or_dropped()
        except KeyboardInterrupt:
            return None

    def _read_or_dropped(self) -> str | None:
        """A line of the user, or None at the end of the input; an empty one where it is no text.

        Raises:
            KeyboardInterrupt: Ctrl-C has dropped it; what comes next stands on a line of its own.
        """
        try:
            return _read_line()
        except UnicodeDecodeError as error:
            self._screen.note(f"the line is no text in {error.encoding}, the encoding of the input")
            return ""
        except KeyboardInterrupt:
            print()
            raise

    def _answer(self, question: str) -> bool:
        """Shows the answer, or why there is none; returns whether it went well. Who stops it knows."""
        screen, start = self._screen, time.monotonic()
        try:
            last = self._runner.run(self._conversation.ask(question, screen))
        except KeyboardInterrupt:
            screen.show("\n")
            screen.note("stopped")
            return True
        except (PykvError, TimeoutError) as error:
            screen.show("\n")
            screen.note(_failure(error))
            return False
        screen.show("\n")
        if last is None or last.usage is None:
            return False
        screen.note(_summary(last.usage, last.finish_reason, time.monotonic() - start))
        return last.finish_reason not in FAILED


def _failure(error: Exception) -> str:
    if isinstance(error, ServiceError) and error.status == "UNAVAILABLE":
        return f"the server is gone: {error}; what was said is kept: go on once it is back, or /quit"
    return f"failed: {error}"


def _summary(usage: Usage, finish_reason: str | None, seconds: float) -> str:
    end = ", cut off at the token limit" if finish_reason == "length" else ""
    return (
        f"{usage.output_tokens} tokens in {seconds:.1f} s; "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from the cache{end}"
    )


def _read_line() -> str | None:
    """The next line of the user; None at the end of the input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ModuleNotFoundError):  # not every build of Python has it
            import readline  # noqa: F401  lets `input` edit the line, and recall those before
    try:
        return input("> " if is_terminal else "").strip()
    except EOFError:
        if is_terminal:
            print()  # what comes next stands on a line of its own
        return None


def _screen() -> Screen:
    if not sys.stdout.isatty():
        return PlainScreen()
    try:
        return RichScreen()
    except ModuleNotFoundError:
        return PlainScreen()


def _parser() -> Parser:
    parser = Parser(prog="pykv chat", description="Talks with a served model.", epilog=HELP)
    parser.add_argument("--system", default="", help="said to the model before everything")
    parser.add_argument(
        "--max-tokens", type=integer, default=512, help="tokens an answer at most (%(default)s)"
    )
    parser.add_argument("--temperature", type=number, default=0.7, help="0 takes the likeliest (%(default)s)")
    parser.add_argument("--top-p", type=number, default=0.95, help="share of likely tokens (%(default)s)")
    parser.add_argument("--seed", type=integer, help="makes answers repeatable")
    add_connection_options(parser)
    return parser
