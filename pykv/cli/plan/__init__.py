"""The command `pykv plan`: how many requests fit a model on some memory, and what would move it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pykv.cli.pictures import check_picture
from pykv.cli.plan.arguments import Asked, named_as_flags, read_arguments
from pykv.errors import ConfigError, ModelError
from pykv.extras import needs_extra
from pykv.planner import KvPlan, plan
from pykv.planner.comparison import compare_gpus
from pykv.planner.tables import gpu_names, model_names

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans and shows it.

    Args:
        arguments: of the command; None = of this process.

    Returns:
        0.

    Raises:
        PykvError: an option is not allowed, or nothing is left for the cache; the message names flags.
    """
    asked = read_arguments(sys.argv[1:] if arguments is None else arguments)
    if asked.listed is not None:
        print("\n".join(model_names() if asked.listed == "models" else gpu_names()))
        return 0
    if asked.plot is not None:
        check_picture(asked.plot)
    try:
        if asked.compare:
            return _compare(asked)
        found = plan(**asked.options)
    except (ConfigError, ModelError) as error:
        raise type(error)(named_as_flags(str(error))) from error
    if asked.json:
        print(json.dumps(found.to_dict()))
    else:
        _show(found)
    if asked.plot is not None:
        _draw(found, Path(asked.plot))
    return 0


def _compare(asked: Asked) -> int:
    if asked.plot is not None:
        raise ConfigError(f"--plot is {asked.plot!r}: allowed without --compare, which draws nothing")
    choices = compare_gpus(**asked.options)
    if asked.json:
        print(json.dumps({"gpus": [asdict(choice) for choice in choices]}))
        return 0
    with needs_extra("pykv plan without --json", "client"):
        from pykv.cli.plan.text import show_comparison
    show_comparison(plan(**asked.options), choices)
    return 0


def _show(found: KvPlan) -> None:
    with needs_extra("pykv plan without --json", "client"):
        from pykv.cli.plan.text import show_plan
    show_plan(found)


def _draw(found: KvPlan, path: Path) -> None:
    with needs_extra("pykv plan --plot", "plot"):
        from pykv.planner.pictures import draw_plan
    try:
        draw_plan(found, path)
    except OSError as error:
        raise ConfigError(
            f"--plot is {str(path)!r}, which cannot be written: {error.strerror or error}"
        ) from error
    print(f"drawn: {path}", file=sys.stderr)
