"""How one moment looks in the terminal."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pykv.cli.top.sample import Span
from pykv.service.served import ModelDescription

__all__ = ["block_map", "frame", "gone"]

MAP_CELLS = 240
MAP_WIDTH = 60
HOST_CELLS = 60
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
    """All of one moment."""
    return Group(
        Panel(
            Group(_headline(description, address, span), Text(), _blocks(description, span)), title="pykv top"
        ),
        _requests(span),
        _times(span),
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
    lines = [
        Text(f"device  {_legend(STATES, numbers)}, of {description.block_size} tokens each"),
        _map(STATES, block_map(numbers, MAP_CELLS)),
    ]
    if counts["host_blocks_total"]:
        free = counts["host_blocks_free"]
        host = [counts["host_blocks_total"] - free, free]
        lines += [
            Text(f"host    {_legend(HOST_STATES, host)}"),
            _map(HOST_STATES, block_map(host, HOST_CELLS)),
        ]
    return Group(*lines)


def _legend(states: tuple[tuple[str, str, str], ...], numbers: list[int]) -> str:
    parts = [f"{mark} {number} {state}" for (state, mark, _), number in zip(states, numbers, strict=True)]
    return f"{sum(numbers)} blocks: " + "  ".join(parts)


def _map(states: tuple[tuple[str, str, str], ...], cells: list[int]) -> Text:
    text = Text()
    for (_, mark, style), count in zip(states, cells, strict=True):
        text.append(mark * count, style)
    return Text("\n").join(text[start : start + MAP_WIDTH] for start in range(0, len(text), MAP_WIDTH))


def _requests(span: Span) -> Table:
    counts = span.last.counts
    table = Table(expand=False, box=None, pad_edge=True)
    values = (
        ("running", str(counts["num_running"])),
        ("waiting", str(counts["num_waiting"])),
        ("tokens/s", _rate(span.rate("num_new_tokens"))),
        ("steps/s", _rate(span.rate("num_steps"))),
        ("hit rate", _share(span)),
        ("preemptions", str(counts["preemptions"])),
        ("evictions", str(counts["evictions"])),
        (
            "ended",
            str(sum(counts[f"num_finished_{reason}"] for reason in ("stop", "length", "abort", "error"))),
        ),
        ("failed", str(counts["num_finished_error"])),
    )
    for name, _ in values:
        table.add_column(name, justify="right")
    table.add_row(*(value for _, value in values))
    return table


def _times(span: Span) -> Table:
    table = Table(box=None, pad_edge=True)
    table.add_column("milliseconds")
    for share in PERCENTILES:
        table.add_column(f"p{share * 100:g}", justify="right")
    table.add_column("values", justify="right")
    for label, name in ROWS:
        times = span.times(name)
        if times.num_values:
            values = [f"{times.quantile(share) * 1000:.1f}" for share in PERCENTILES]
            table.add_row(label, *values, str(times.num_values))
    return table


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0f}"


def _share(span: Span) -> str:
    queried = span.grown("prefix_queried_tokens")
    return f"{span.grown('prefix_hit_tokens') / queried:.0%}" if queried else "-"
