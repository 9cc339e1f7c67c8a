"""The program `pykv`: it hands its arguments to one of its commands."""

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from pykv.errors import PykvError
from pykv.extras import needs_extra

__all__ = ["COMMANDS", "main"]

REFUSED = 2
INTERRUPTED = 128 + 2
UNREAD = 128 + 13
"""As a shell tells of SIGINT and SIGPIPE."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its module has a function `main(arguments) -> exit code`, imported when it is called for.

    Attributes:
        module: the module's name.
        extra: brings what the module imports.
        help: says in one line what it does.
    """

    module: str
    extra: str
    help: str


COMMANDS = {
    "chat": Command("pykv.cli.chat", "client", "talks with a served model in the terminal"),
    "demo": Command(
        "pykv.cli.demo.program", "demo", "shows four chats at once and what the cache saved them"
    ),
    "eval-cache": Command(
        "pykv.cli.eval_cache", "models", "measures what each format of the cache costs in quality"
    ),
    "fit": Command("pykv.cli.fit", "", "fits the cost model of a replay to a measured run"),
    "plan": Command("pykv.cli.plan", "", "how many requests fit a model on some memory"),
    "replay": Command("pykv.cli.replay", "", "replays a trace of requests on the cache and the scheduler"),
    "top": Command("pykv.cli.top.program", "client", "watches a server: blocks, requests, latencies"),
    "serve": Command("pykv.service.main", "serve", "serves a model; the same as pykv-serve"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command and its arguments; None = of this process.

    Returns:
        The exit code: 2, with one line on stderr, where the command is unknown or refuses; 130 where Ctrl-C has ended
        it, 141 where nobody reads what it writes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not have all characters of an answer
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in COMMANDS:
        return _refuse(f"{name!r} is no command; known: {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    try:
        with needs_extra(f"pykv {name}", command.extra):
            run = import_module(command.module).main
        return int(run(rest) or 0)
    except PykvError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print(file=sys.stderr)  # what comes next stands on a line of its own
        return INTERRUPTED
    except BrokenPipeError:
        # or Python would write what is left at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def _usage() -> str:
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: pykv COMMAND ...", "", *lines, "", "pykv COMMAND --help says more."])


def _refuse(message: str) -> int:
    print(f"pykv: {' '.join(message.split())}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    sys.exit(main())
