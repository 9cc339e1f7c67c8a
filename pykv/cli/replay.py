"""The command `pykv replay`: what a cache and a scheduler of some size make of a trace."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

from pykv.cli.pictures import check_picture
from pykv.cli.replay_arguments import parser, read_sweep
from pykv.cli.replay_report import report, table
from pykv.errors import ConfigError
from pykv.field_checks import shown
from pykv.simulator.policy import EvictionPolicy
from pykv.simulator.replay import Replayer
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
    given = vars(parser().parse_args(arguments))
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
        values = read_sweep(grid)
        values |= {"policy": [_policy(text) for text in values["policy"]]} if "policy" in values else {}
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


def _policy(text: str) -> str | EvictionPolicy:
    """A policy by name, or an object of a class in a file."""
    path, separator, name = text.rpartition(":")
    if not separator:
        return text
    spec = util.spec_from_file_location("pykv_replayed_policy", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"policy is {shown(text)}: {path} is no Python file")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ConfigError(f"policy is {shown(text)}: {path} defines no {name}")
    made = getattr(module, name)
    try:
        inspect.signature(made).bind()
    except TypeError as error:
        raise ConfigError(
            f"policy is {shown(text)}: allowed is a class made without arguments; {error}"
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
