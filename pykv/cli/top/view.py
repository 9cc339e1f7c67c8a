"""How one moment looks in the terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pykv.cli.top.sample import Span
from pykv.service.served import ModelDescription

__all__ = ["block_map", "frame", "gone"]

MAP_WIDTH = 60
MAP_LINES = 4
HOST_LINES = 1
STATES = (("active", "█", "green"), ("cached", "▒", "yellow"), ("free", "·", "dim"))
HOST_STATES = (("used", "█", "magenta"), ("free", "·", "dim"))
PERCENTILES = (0.5, 0.9, 0.99)
ROWS = (
    ("time to first token", "time_to_first_token"),
    ("between tokens", "inter_token"),
    ("in the queue", "queue_time"),
    ("stalled, recomputed", "stalls_recompute"),
    ("stalled, swapped", "stalls_swap"),
)


def frame(description: ModelDescription, address: str, span: Span) -> RenderableType:
    """All of one moment; the blocks come last, since a low terminal shows what comes first."""
    return Group(
        Panel(_headline(description, address, span), title="pykv top"),
        _requests(span),
        _times(span),
        Panel(_blocks(description, span), title="blocks"),
    )


def gone(news: str, last: RenderableType) -> RenderableType:
    """The last frame that was seen of a server that does not answer any more, under the news of that."""
    return Group(Text(f"{news}\ntrying again; Ctrl-C ends. What it said last:", "bold red"), last)


def block_map(counts: Iterable[int], cells: int) -> list[int]:
    """Parts cells by counts: each count that is not zero gets one at least, and all together get all.

    Returns:
        The cells of each count, in their order; all zero where all counts are.
    """
    listed = list(counts)
    total = sum(listed)
    if not total:
        return [0 for _ in listed]
    shares = [max(count * cells // total, 1) if count else 0 for count in listed]
    shares[shares.index(max(shares))] += cells - sum(shares)
    return shares


def _headline(description: ModelDescription, address: str, span: Span) -> Text:
    is_serving = span.last.health == "SERVING"
    return Text.assemble(
        (description.name, "bold"),
        f" at {address}  ",
        (span.last.health.lower().replace("_", " "), "green" if is_serving else "bold red"),
        f"  {description.kv_dtype} cache, {description.kv_bytes_per_token} bytes a token, ",
        f"up to {description.max_model_len} tokens",
    )


def _blocks(description: ModelDescription, span: Span) -> RenderableType:
    counts = span.last.counts
    numbers = [counts[f"blocks_{state}"] for state, _, _ in STATES]
    lines: list[RenderableType] = [
        Text(f"device  {_legend(STATES, numbers)}, of {description.block_size} tokens each"),
        _Map(STATES, numbers, MAP_LINES),
    ]
    if counts["host_blocks_total"]:
        free = counts["host_blocks_free"]
        host = [counts["host_blocks_total"] - free, free]
        lines += [
            Text(f"host    {_legend(HOST_STATES, host)}"),
            _Map(HOST_STATES, host, HOST_LINES),
        ]
    return Group(*lines)


def _legend(states: tuple[tuple[str, str, str], ...], numbers: list[int]) -> str:
    parts = [f"{mark} {number} {state}" for (state, mark, _), number in zip(states, numbers, strict=True)]
    return f"{sum(numbers)} blocks: " + "  ".join(parts)


@dataclass(frozen=True, slots=True)
class _Map:
    """Cells in proportion to numbers, in lines that are as long as there is room, MAP_WIDTH at most."""

    states: tuple[tuple[str, str, str], ...]
    numbers: Sequence[int]
    num_lines: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(MAP_WIDTH, options.max_width)
        text = Text()
        for (_, mark, style), count in zip(
            self.states, block_map(self.numbers, width * self.num_lines), strict=True
        ):
            text.append(mark * count, style)
        yield Text("\n").join(text[start : start + width] for start in range(0, len(text), width))


@dataclass(frozen=True, slots=True)
class _Fitting:
    """A table where there is room for all its columns, else something narrower."""

    table: Table
    narrow: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wanted = Measurement.get(console, options.update(max_width=10_000), self.table).maximum
        yield self.table if wanted <= options.max_width else self.narrow


def _requests(span: Span) -> RenderableType:
    values = _request_values(span)
    row = Table(box=None, padding=(0, 1, 0, 0))
    column = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    column.add_column()
    column.add_column(justify="right")
    for name, value in values.items():
        row.add_column(name, justify="right", no_wrap=True)
        column.add_row(name, value)
    row.add_row(*values.values())
    return _Fitting(row, column)


def _request_values(span: Span) -> dict[str, str]:
    counts = span.last.counts
    ended = sum(counts[f"num_finished_{reason}"] for reason in ("stop", "length", "abort", "error"))
    return {
        "running": str(counts["num_running"]),
        "waiting": str(counts["num_waiting"]),
        "tokens/s": _rate(span.rate("num_new_tokens")),
        "steps/s": _rate(span.rate("num_steps")),
        "hit rate": _share(span),
        "preemptions": str(counts["preemptions"]),
        "evictions": str(counts["evictions"]),
        "ended": str(ended),
        "failed": str(counts["num_finished_error"]),
    }


def _times(span: Span) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("milliseconds", no_wrap=True)
    names = [f"p{share * 100:g}" for share in PERCENTILES]
    for name in (*names, "values"):
        table.add_column(name, justify="right", no_wrap=True)
    lines = []
    for label, name in ROWS:
        times = span.times(name)
        if times.num_values:
            values = [f"{times.quantile(share) * 1000:.1f}" for share in PERCENTILES]
            table.add_row(label, *values, str(times.num_values))
            told = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
            lines.append(f"{label}: {told} ms of {times.num_values}")
    return _Fitting(table, Text("\n".join(lines)))


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0f}"


def _share(span: Span) -> str:
    queried = span.grown("prefix_queried_tokens")
    return f"{span.grown('prefix_hit_tokens') / queried:.0%}" if queried else "-"
