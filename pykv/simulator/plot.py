"""Pictures of replays. They need matplotlib, which the extra `plot` brings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykv.errors import ConfigError
from pykv.extras import needs_extra
from pykv.simulator.result import ReplayResult
from pykv.simulator.sweep import SweepPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_result", "plot_sweep"]

SUFFIXES = (".svg", ".png")
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.figsize": (6.4, 3.6),
    "svg.hashsalt": "pykv",
    "svg.fonttype": "none",
    "font.size": 9,
}


def plot_result(result: ReplayResult, path: str | os.PathLike[str]) -> None:
    """Draws the use of the pool over time.

    Raises:
        ConfigError: the result has no times, or the path does not end in .svg or .png.
        MissingExtraError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if result.timed is None:
        raise ConfigError(
            "plot: one serial replay has nothing to draw; sweep num_blocks, or leave serial out"
        )
    series = result.timed.series

    def draw(axes: Axes) -> None:
        axes.stackplot(
            series.start_seconds,
            [100 * share for share in series.kv_usage],
            [100 * share for share in series.cached],
            labels=["in use", "cached, idle"],
            colors=["tab:blue", "tab:gray"],
            alpha=0.6,
        )
        axes.set(
            xlabel="seconds", ylabel="% of the pool", ylim=(0, 100), title=f"{result.trace}: KV use over time"
        )
        axes.legend(loc="upper right")

    _draw(path, draw)


def plot_sweep(points: Sequence[SweepPoint], path: str | os.PathLike[str]) -> None:
    """Draws what a sweep shows: hit rate against `num_blocks`, latency against `speed` or `concurrency`, or memory
    against `allocator`, whichever of these was varied.

    Raises:
        ConfigError: none of them was varied, or the path does not end in .svg or .png.
        MissingExtraError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    varied = {name for name in points[0].options if len({str(point.options[name]) for point in points}) > 1}
    for names, draw in _KINDS:
        if name := next((name for name in names if name in varied), None):
            _draw(path, lambda axes, name=name, draw=draw: draw(axes, points, name))  # type: ignore[misc]
            return
    known = ", ".join(name for names, _ in _KINDS for name in names)
    raise ConfigError(f"plot: the sweep varies {sorted(varied)}: at least one is needed of {known}")


def _draw(path: str | os.PathLike[str], draw: Callable[[Axes], None]) -> None:
    if Path(path).suffix not in SUFFIXES:
        raise ConfigError(f"plot is {str(path)!r}: allowed is a path that ends in {' or '.join(SUFFIXES)}")
    with needs_extra("a plot", "plot"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(layout="constrained")
        draw(figure.subplots())
        # Without a date, so that the same replay gives the same bytes.
        figure.savefig(path, dpi=120, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def _draw_hit_rates(axes: Axes, points: Sequence[SweepPoint], name: str) -> None:
    """A line a policy, or whatever else was varied, between the two bounds."""
    for label, line in _lines(points, name).items():
        axes.plot(
            *_columns(line, lambda result: 100 * result.hit_rate_blocks), marker="o", label=label or "lru"
        )
    first = next(iter(_lines(points, name).values()))
    axes.plot(
        *_columns(first, lambda result: 100 * result.hit_rate_opt),
        color="black",
        linestyle="--",
        label="the best that could be (Belady)",
    )
    infinite = 100 * first[0].result.hit_rate_infinite
    axes.axhline(infinite, color="tab:gray", linestyle=":", label="a cache that forgets nothing")
    axes.set(xscale="log", xlabel="blocks of the cache", ylabel="hit rate, % of blocks", ylim=(0, None))
    axes.set_title(f"{first[0].result.trace}: hit rate against capacity")
    axes.legend()


def _draw_latencies(axes: Axes, points: Sequence[SweepPoint], name: str) -> None:
    _need_times(points)
    for label, line in _lines(points, name).items():
        for percentile, style in (("p50", "-"), ("p99", "--")):
            loads = [float(point.options[name]) for point in line]
            seconds = [getattr(point.result.timed.ttft, percentile) for point in line]  # type: ignore[union-attr]
            axes.plot(loads, seconds, linestyle=style, marker="o", label=f"TTFT {percentile} {label}".strip())
    axes.set(xlabel=_LOADS[name], ylabel="seconds", yscale="log")
    axes.set_title(f"{points[0].result.trace}: latency against load")
    axes.legend()


def _draw_memory(axes: Axes, points: Sequence[SweepPoint], name: str) -> None:
    _need_times(points)
    wasted = [100 * point.result.timed.waste for point in points]  # type: ignore[union-attr]
    labels = [
        f"{point.options[name]}\n{share:.1f} % empty" for point, share in zip(points, wasted, strict=True)
    ]
    held = [100 - share for share in wasted]
    axes.barh(labels, held, color="tab:blue", label="holds keys and values")
    axes.barh(labels, wasted, left=held, color="tab:red", label="reserved, empty")
    axes.invert_yaxis()
    axes.set(xlabel="% of the memory that running requests keep", xlim=(0, 100))
    axes.set_title(f"{points[0].result.trace}: what the reserved memory holds", pad=24)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    axes.grid(visible=False, axis="y")


_LOADS = {"speed": "arrivals, times the trace's", "concurrency": "requests at once"}
_KINDS: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("num_blocks", "kv_memory_bytes"), _draw_hit_rates),
    (("speed", "concurrency"), _draw_latencies),
    (("allocator",), _draw_memory),
)


def _lines(points: Sequence[SweepPoint], name: str) -> dict[str, list[SweepPoint]]:
    """The points of each combination of all other options, by its label."""
    lines: dict[str, list[SweepPoint]] = {}
    for point in points:
        others = [str(value) for key, value in point.options.items() if key != name]
        lines.setdefault(" ".join(others), []).append(point)
    return lines


def _columns(
    line: Sequence[SweepPoint], value: Callable[[ReplayResult], float]
) -> tuple[list[int], list[float]]:
    return [point.result.num_blocks for point in line], [value(point.result) for point in line]


def _need_times(points: Sequence[SweepPoint]) -> None:
    if any(point.result.timed is None for point in points):
        raise ConfigError("plot: this needs times: leave serial out")
