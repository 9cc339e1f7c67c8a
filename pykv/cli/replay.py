"""The command `pykv replay`: what a cache and a scheduler of some size make of a trace."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

from pykv.cli.pictures import check_picture
from pykv.cli.replay_report import report, table
from pykv.errors import ConfigError
from pykv.simulator.options import ALLOCATORS
from pykv.simulator.policy import POLICIES, PRODUCTION_POLICIES, EvictionPolicy
from pykv.simulator.replay import Replayer
from pykv.simulator.step_cost import DEFAULT_COST
from pykv.simulator.sweep import sweep
from pykv.simulator.trace import read_trace

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Replays one trace once, or as often as a sweep says.

    Returns:
        0; 1 where nothing ran, since every request was refused.

    Raises:
        PykvError: an option, or the trace, is not allowed.
    """
    given = vars(_parser().parse_args(arguments))
    path, as_json, grid, plots = (given.pop(name) for name in ("trace", "json", "sweep", "plot"))
    rate, seed, series = (given.pop(name) for name in ("request_rate", "seed", "series"))
    if series and not as_json:
        raise ConfigError("series: not allowed without json")
    if series and grid:
        raise ConfigError("series: not allowed with sweep")
    for plot in plots:
        check_picture(plot)
    options = {name: value for name, value in given.items() if value is not None}
    if plots and not grid and options.get("serial"):
        raise ConfigError(
            "plot: one serial replay has nothing to draw; sweep num_blocks, or leave serial out"
        )
    if "policy" in options:
        options["policy"] = _policy(options["policy"])
    try:
        trace = read_trace(path, request_rate=rate, seed=seed)
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}") from error
    if grid:
        values = _grid(grid)
        with _progress() as on_done:
            points = sweep(trace, values, options=options, on_done=on_done)
        print("\n".join(json.dumps(point.result.to_json()) for point in points) if as_json else table(points))
        _plot(plots, lambda plot, path: plot.plot_sweep(points, path))
        results = [point.result for point in points]
    else:
        result = Replayer(trace).run(**options)
        print(json.dumps(result.to_json(with_series=series)) if as_json else report(result))
        _plot(plots, lambda plot, path: plot.plot_result(result, path))
        results = [result]
    return int(all(result.nothing_ran for result in results))


def _plot(paths: Sequence[str], draw: Callable[[Any, str], None]) -> None:
    if paths:
        from pykv.simulator import plot  # matplotlib is heavy

        for path in paths:
            try:
                draw(plot, path)
            except OSError as error:
                raise ConfigError(f"plot {path}: {error.strerror or error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pykv replay",
        description="Replays a trace of requests on the production prefix tree and scheduler, without a model.",
        epilog="Two bounds stand beside each hit rate: a cache that forgets nothing, and Belady's best choice.",
    )
    parser.add_argument(
        "trace", metavar="TRACE", help="a file: pykv's own form, Mooncake's, Azure's, vLLM's, a recording"
    )
    parser.add_argument(
        "--json", action="store_true", help="prints JSON: one object, or one a line for a sweep"
    )
    parser.add_argument("--series", action="store_true", help="with --json: also what was so over time")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="OPTION=A,B,...",
        help="replays under each value, and each combination where it is given for several options",
    )
    parser.add_argument(
        "--plot",
        action="append",
        default=[],
        metavar="FILE",
        help="draws a .svg or .png (needs the extra 'plot')",
    )
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--num-blocks",
        type=_blocks,
        metavar="N",
        help="blocks that hold tokens, or a share of the trace's, as in 10%%",
    )
    memory.add_argument(
        "--block-size", type=int, metavar="N", help="tokens a block (default: the trace's, or 16)"
    )
    memory.add_argument(
        "--kv-memory-bytes", type=_bytes, metavar="N", help="in the place of --num-blocks; 20GiB, 80GB"
    )
    memory.add_argument(
        "--kv-bytes-per-token",
        type=float,
        metavar="N",
        help="in 16 bit, with --kv-memory-bytes, where no model is named",
    )
    memory.add_argument(
        "--kv-dtype",
        metavar="NAME",
        help="bf16, f16, f32, int8 or fp8, scales counted: of --kv-memory-bytes, and of what a roofline's step reads "
        "(default: bf16)",
    )
    memory.add_argument(
        "--model",
        metavar="NAME",
        help="what is served, where --cost does not say: a folder, a config.json, or a known name of pykv plan",
    )
    memory.add_argument("--allocator", metavar="NAME", help=f"{', '.join(ALLOCATORS)} (default: paged)")
    memory.add_argument(
        "--policy",
        metavar="NAME",
        help=f"who makes room: {' or '.join(PRODUCTION_POLICIES)}; with --serial also "
        f"{', '.join(name for name in POLICIES if name not in PRODUCTION_POLICIES)}, or FILE.py:CLASS (default: lru)",
    )
    parser.add_argument(
        "--serial",
        action="store_const",
        const=True,
        help="one request at a time: the cache alone, without time",
    )
    timed = parser.add_argument_group("virtual time")
    timed.add_argument(
        "--cost",
        metavar="MODEL",
        help="seconds of a step: constant:S, linear:FIELD=S,..., roofline:GPU,model=NAME,..., or a file of pykv "
        f"fit (default: {DEFAULT_COST})",
    )
    timed.add_argument(
        "--speed", type=float, metavar="X", help="requests come so many times as fast (default: 1)"
    )
    timed.add_argument(
        "--concurrency", type=int, metavar="N", help="so many requests are always there, whatever the times"
    )
    timed.add_argument(
        "--knows-outputs", action="store_const", const=True, help="the scheduler is told the outputs' lengths"
    )
    timed.add_argument(
        "--retention",
        metavar="RULE",
        help="what the scheduler is told of sessions: none, session_end, next_turn, session_idle, or ttl:SECONDS "
        "(default: none)",
    )
    timed.add_argument(
        "--request-rate", type=float, default=1.0, metavar="X", help="a second, where a file has no times"
    )
    timed.add_argument("--seed", type=int, default=0, metavar="N", help="of these times (default: 0)")
    scheduler = parser.add_argument_group("the scheduler, as in pykv.SchedulerConfig")
    for name, kind in _SCHEDULER:
        scheduler.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X")
    return parser


_SCHEDULER: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("max_num_seqs", int),
    ("max_num_batched_tokens", int),
    ("max_chunk_tokens", int),
    ("max_model_len", int),
    ("watermark", float),
    ("admission", str),
    ("queue_order", str),
    ("max_passes", int),
    ("preemption", str),
    ("num_host_blocks", int),
)


def _blocks(text: str) -> int | str:
    return text if text.endswith("%") else int(text)


def _bytes(text: str) -> int:
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    for unit, size in units.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * size)
    return int(text)


_KINDS: dict[str, Callable[[str], Any]] = {
    "num_blocks": _blocks,
    "block_size": int,
    "kv_memory_bytes": _bytes,
    "kv_bytes_per_token": float,
    "kv_dtype": str,
    "model": str,
    "retention": str,
    "allocator": str,
    "policy": lambda text: _policy(text),
    "cost": str,
    "speed": float,
    "concurrency": int,
    **dict(_SCHEDULER),
}


def _grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """What `num_blocks=1%,5%,policy=lru,opt` says: a part with = begins the next option."""
    grid: dict[str, list[Any]] = {}
    name = ""
    for part in ",".join(texts).split(","):
        begins, separator, value = part.partition("=")
        if separator and begins in _KINDS:
            name = begins
        elif not name or separator:
            raise ConfigError(f"sweep: {part!r} is no OPTION=A,B,...; options: {', '.join(_KINDS)}")
        else:
            value = part
        try:
            grid.setdefault(name, []).append(_KINDS[name](value))
        except ValueError:
            raise ConfigError(f"sweep: {name} is {value!r}: allowed are numbers") from None
    return grid


def _policy(text: str) -> str | EvictionPolicy:
    """A policy by name, or an object of a class in a file."""
    path, separator, name = text.rpartition(":")
    if not separator:
        return text
    spec = util.spec_from_file_location("pykv_replayed_policy", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"policy is {text!r}: {path} is no Python file")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ConfigError(f"policy is {text!r}: {path} defines no {name}")
    made = getattr(module, name)
    try:
        inspect.signature(made).bind()
    except TypeError as error:
        raise ConfigError(
            f"policy is {text!r}: allowed is a class made without arguments; {error}"
        ) from error
    policy: EvictionPolicy = made()
    return policy


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty() or util.find_spec("rich") is None:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("replaying", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
