"""The chats are shown piece by piece, on a terminal and elsewhere, and nothing of them is lost."""

import io

from rich.console import Console

from pykv.cli.demo.report import ChatResult
from pykv.cli.demo.view import ColumnsView, LinesView, make_view, show_results

QUESTIONS = ("Who?", "Why?")


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def printed(shown: Console) -> list[str]:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue().splitlines()


def test_lines_name_their_chat_and_come_whole() -> None:
    shown = console(terminal=False)
    with LinesView(shown, QUESTIONS) as view:
        view.add(0, "I")
        view.add(1, "Because of ")
        view.add(0, " am.\nYes.")
        view.finish(0)
        view.add(1, "that")
    assert printed(shown) == ["[1] ? Who?", "[2] ? Why?", "[1] I am.", "[1] Yes.", "[2] Because of that"]


def test_a_long_answer_is_broken_between_words_and_loses_none() -> None:
    words = [f"word{number}" for number in range(100)]
    shown = console(terminal=False)
    with LinesView(shown, QUESTIONS) as view:
        for word in words:
            view.add(0, f"{word} ")
    lines = printed(shown)[2:]
    assert len(lines) > 5
    assert " ".join(line.removeprefix("[1] ") for line in lines).split() == words


def test_a_word_longer_than_a_line_is_shown_too() -> None:
    shown = console(terminal=False)
    with LinesView(shown, QUESTIONS) as view:
        view.add(0, "x" * 300)
    assert "".join(line.removeprefix("[1] ") for line in printed(shown)[2:]) == "x" * 300


def test_columns_show_every_chat_side_by_side() -> None:
    shown = console(terminal=True)
    with ColumnsView(shown, QUESTIONS) as view:
        view.add(0, "I am.")
        view.add(1, "Because.")
        view.finish(0)
    last_draw = "\n".join(printed(shown))
    assert "I am." in last_draw
    assert any("Who?" in line and "Why?" in line for line in printed(shown))


def test_view_fits_where_it_is_shown() -> None:
    assert isinstance(make_view(console(terminal=True), QUESTIONS), ColumnsView)
    assert isinstance(make_view(console(terminal=False), QUESTIONS), LinesView)


def test_tables_show_the_chats_and_the_savings() -> None:
    shown = console(terminal=False)
    summary = {
        "kv_blocks_peak": 40,
        "kv_blocks_peak_unshared": 130,
        "kv_waste_pct": 4.25,
        "kv_waste_pct_contiguous": 94.5,
    }
    show_results(shown, [ChatResult("Who?", "I.", "stop", 100, 64, 20, 0.25, 2.0)], summary)
    text = "\n".join(printed(shown))
    for piece in ("Who?", "250 ms", "10.0", "40", "130", "4.2 %", "94.5 %"):
        assert piece in text
