"""Draws a plan: memory against users, bytes against context, and what each lever would bring. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from pykv.planner.plan import KvPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_plan"]

GB = 10**9
SIZE_INCHES = (15, 4.6)
COLORS = {"p50": "#2a7f62", "p90": "#c98a1b", "p99": "#b3402e", "mix": "#333333", "weights": "#8da0b8"}
ROOM_RIGHT = 1.25
SETTINGS: Any = {"svg.hashsalt": "pykv", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9}
"""The same plan gives the same file."""


def draw_plan(plan: KvPlan, path: Path) -> None:
    """Draws the plan into a file; its ending says whether as SVG or PNG.

    Raises:
        OSError: the file cannot be written.
    """
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        users, context, levers = figure.subplots(1, 3)
        _draw_users(users, plan)
        _draw_context(context, plan)
        _draw_levers(levers, plan)
        figure.suptitle(_title(plan))
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, metadata=metadata, dpi=110)


def _title(plan: KvPlan) -> str:
    gpus = ""
    if plan.budget is not None:
        gpus = f" on {plan.num_gpus} × {plan.gpu or f'{plan.budget.total / 2**30:.1f} GiB'}"
    return f"{plan.model}{gpus}, KV cache in {plan.kv_dtype}"


def _draw_users(axes: Axes, plan: KvPlan) -> None:
    """Memory of one GPU against the requests on all of them."""
    axes.set_title("Memory of a GPU against users")
    axes.set_xlabel("requests at once")
    axes.set_ylabel("GB")
    if plan.lengths is None or plan.users is None:
        axes.text(0.5, 0.5, "no lengths given", ha="center", transform=axes.transAxes)
        return
    most = ROOM_RIGHT * max(
        plan.users.users, (plan.requests or {}).get("mix", 0), plan.users.weights_passed_at or 0
    )
    weights = (plan.weights_bytes or 0) / plan.tensor_parallel / GB
    axes.axhspan(0, weights, color=COLORS["weights"], alpha=0.35, lw=0, label=f"weights, {weights:.1f} GB")
    drawn = set()
    for name in ("p50", "p90", "p99"):
        tokens = int(plan.lengths[name])
        if tokens in drawn:
            continue
        drawn.add(tokens)
        slope = plan.rank_kv_bytes_at[tokens] / plan.num_replicas / GB
        axes.plot(
            [0, most],
            [weights, weights + most * slope],
            color=COLORS[name],
            label=f"{name}: {tokens:,} tokens",
        )
    top = weights * 3
    if plan.budget is not None:
        top = plan.budget.usable / GB
        axes.axhline(top, color="black", lw=1, ls="--", label=f"the engine's share, {top:.1f} GB")
    if plan.requests and plan.requests.get("mix"):
        mix = plan.requests["mix"]
        axes.axvline(
            mix, color=COLORS["mix"], lw=1, ls=":", label=f"a mix of {mix:,} fits, risk {plan.risk:.0%}"
        )
    axes.set_xlim(0, most)
    axes.set_ylim(0, ROOM_RIGHT * max(top, 1e-3))
    axes.legend(loc="lower right", fontsize=8)


def _draw_context(axes: Axes, plan: KvPlan) -> None:
    """One request as it grows."""
    axes.set_title("One request as it grows")
    axes.set_xlabel("tokens")
    axes.set_ylabel("GB")
    longest = int(plan.lengths["max"]) if plan.lengths else plan.context_cap or max(plan.kv_bytes_at)
    tokens = [count for count in plan.kv_bytes_at if count <= longest]
    stored = [plan.stored_kv_bytes_at[count] / GB for count in tokens]
    least = [plan.kv_bytes_at[count] / GB for count in tokens]
    where = "in pykv's pool" if plan.storage == "engine" else "in blocks"
    axes.plot(tokens, stored, color=COLORS["p99"], label=where)
    axes.plot(tokens, least, color=COLORS["p50"], ls="--", label="by the formula")
    windows = sorted(
        {group.window for group in plan.groups if group.window is not None and group.window < longest}
    )
    for window in windows:
        axes.axvline(window, color="grey", lw=0.8, ls=":", label=f"window of {window:,} tokens")
    axes.set_xlim(0, longest)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize=8)


def _draw_levers(axes: Axes, plan: KvPlan) -> None:
    """What each change would bring; the striped bars are in use."""
    axes.set_title("What if: requests a GPU, times")
    levers = list(reversed(plan.levers))
    colors = [COLORS["weights"] if lever.kind == "in use" else COLORS["p50"] for lever in levers]
    bars = axes.barh([lever.lever for lever in levers], [lever.factor for lever in levers], color=colors)
    for bar, lever in zip(bars, levers, strict=True):
        if lever.kind == "in use":
            bar.set_hatch("//")
        fits = "" if lever.requests is None or lever.kind == "in use" else f"  → {lever.requests:,}"
        note = "in use" if lever.kind == "in use" else lever.kind
        place = (min(bar.get_width(), 1e6), bar.get_y() + bar.get_height() / 2)
        axes.annotate(
            f"× {lever.factor:.2f}{fits} ({note})", place, (3, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color="black", lw=1)
    axes.set_xlim(0, 1.9 * max([lever.factor for lever in levers], default=1))
