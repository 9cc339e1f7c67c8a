"""The results as lines of JSON, as a table and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pykv.extras import needs_extra
from pykv.quality.evaluation import CacheQuality

__all__ = ["draw", "json_lines", "table"]

UNITS = {
    "bytes_per_token": "bytes",
    "perplexity": "perplexity",
    "perplexity_change": "ratio",
    "same_best": "ratio",
    "same_greedy": "ratio",
}


def json_lines(quality: CacheQuality) -> Iterator[str]:
    """One object a number, as the benches print them."""
    for metric, unit in UNITS.items():
        value = round(getattr(quality, metric), 6)
        yield json.dumps(
            {
                "bench": "eval-cache",
                "case": quality.kv_dtype,
                "metric": metric,
                "value": value,
                "unit": unit,
                "n": quality.num_tokens,
            }
        )


def table(results: Sequence[CacheQuality]) -> str:
    """A table in Markdown."""
    lines = [
        "| format | bytes a token | perplexity | change | same best token | same greedy text |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.kv_dtype} | {each.bytes_per_token:,} | {each.perplexity:.4f} | {each.perplexity_change:+.3%} "
        f"| {each.same_best:.2%} | {each.same_greedy:.1%} |"
        for each in results
    ]
    return "\n".join(lines)


def draw(results: Sequence[CacheQuality], path: Path) -> None:
    """Draws the change of perplexity against the bytes of a token.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs_extra("the plot", "plot"):
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="0.7", linewidth=1)
    for each in results:
        place = (each.bytes_per_token / 1000, 100 * each.perplexity_change)
        axes.plot(*place, "o", color="tab:blue")
        axes.annotate(each.kv_dtype, place, xytext=(6, 5), textcoords="offset points")
    axes.set_xlabel("kilobytes of keys and values a token")
    axes.set_ylabel(f"perplexity over {results[0].kv_dtype}'s, %")
    axes.set_xlim(left=0)
    axes.margins(y=0.2)
    if path.suffix == ".svg":
        FigureCanvasSVG(figure)
    figure.savefig(path)
