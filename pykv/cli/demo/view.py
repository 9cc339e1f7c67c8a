"""Shows the chats while they run: a coloured column each on a terminal, plain lines elsewhere."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pykv.cli.demo.report import ChatResult

__all__ = ["ColumnsView", "LinesView", "View", "make_view", "show_results"]

COLOURS = ("cyan", "green", "magenta", "yellow")
LINE_WIDTH = 88


class View(Protocol):
    """Where the answers appear, piece by piece."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def add(self, chat: int, text: str) -> None:
        """Text that has just come for a chat."""
        ...

    def finish(self, chat: int) -> None:
        """A chat has ended."""
        ...


class ColumnsView:
    """A panel for each chat; the terminal is redrawn as the tokens come."""

    def __init__(self, console: Console, questions: Sequence[str]) -> None:
        self._width = max(24, console.width // len(questions) - 2)
        self._questions = questions
        self._answers = [Text() for _ in questions]
        self._running = [True] * len(questions)
        self._live = Live(console=console, refresh_per_second=20, get_renderable=self._draw)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def add(self, chat: int, text: str) -> None:
        self._answers[chat].append(text)

    def finish(self, chat: int) -> None:
        self._running[chat] = False

    def _draw(self) -> Columns:
        return Columns([self._panel(chat) for chat in range(len(self._questions))])

    def _panel(self, chat: int) -> Panel:
        colour = COLOURS[chat % len(COLOURS)]
        cursor = Text("▌", style=colour) if self._running[chat] else Text()
        return Panel(
            Text.assemble(self._answers[chat], cursor),
            title=Text(self._questions[chat], style=f"bold {colour}"),
            border_style=colour,
            width=self._width,
        )


class LinesView:
    """Whole lines of text, each with the number of its chat; for files and pipes."""

    def __init__(self, console: Console, questions: Sequence[str]) -> None:
        self._console = console
        self._questions = questions
        self._waiting = [""] * len(questions)

    def __enter__(self) -> Self:
        for chat, question in enumerate(self._questions):
            self._print(chat, f"? {question}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for chat in range(len(self._questions)):
            self.finish(chat)

    def add(self, chat: int, text: str) -> None:
        paragraphs = (self._waiting[chat] + text).split("\n")
        *full, self._waiting[chat] = [line for paragraph in paragraphs for line in _broken(paragraph)]
        for line in full:
            self._print(chat, line)

    def finish(self, chat: int) -> None:
        if self._waiting[chat].strip():
            self._print(chat, self._waiting[chat])
        self._waiting[chat] = ""

    def _print(self, chat: int, line: str) -> None:
        self._console.out(f"[{chat + 1}] {line}", highlight=False)


def _broken(text: str) -> list[str]:
    """The text in pieces that fit a line, broken between words where it can be; at least one."""
    pieces = []
    while len(text) > LINE_WIDTH:
        space = text.rfind(" ", 1, LINE_WIDTH + 1)
        end, rest = (space, space + 1) if space > 0 else (LINE_WIDTH, LINE_WIDTH)
        pieces.append(text[:end])
        text = text[rest:]
    return [*pieces, text]


def make_view(console: Console, questions: Sequence[str]) -> View:
    """Columns where they can be drawn, lines elsewhere."""
    return (ColumnsView if console.is_terminal else LinesView)(console, questions)


def show_results(console: Console, results: Sequence[ChatResult], summary: Mapping[str, float]) -> None:
    """The chats in a table, and what paging and sharing saved in another."""
    console.print(_chat_table(results), _memory_table(summary))


def _chat_table(results: Sequence[ChatResult]) -> Table:
    table = Table("chat", title="Four chats over one shared system prompt", title_justify="left")
    for heading in ("TTFT", "tokens/s", "prompt", "from cache", "output", "ended by"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.question,
            f"{1000 * result.first_token_seconds:.0f} ms",
            f"{result.tokens_per_second:.1f}",
            str(result.prompt_tokens),
            str(result.cached_tokens),
            str(result.output_tokens),
            result.finish_reason,
        )
    return table


def _memory_table(summary: Mapping[str, float]) -> Table:
    table = Table("KV cache at its fullest", title_justify="left")
    table.add_column("paged and shared", justify="right")
    table.add_column("without", justify="right")
    table.add_row(
        "blocks in use; without sharing",
        f"{summary['kv_blocks_peak']}",
        f"{summary['kv_blocks_peak_unshared']}",
    )
    table.add_row(
        "slots that hold no token; without paging",
        f"{summary['kv_waste_pct']:.1f} %",
        f"{summary['kv_waste_pct_contiguous']:.1f} %",
    )
    return table
