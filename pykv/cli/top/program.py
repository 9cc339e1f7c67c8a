"""Watches a server: `pykv top`."""

import argparse
import asyncio
import sys
from asyncio import sleep
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console, RenderableType
from rich.live import Live

from pykv.cli.connection import add_connection_options, client_of
from pykv.cli.parser import Parser, reader
from pykv.cli.top.watch import Watch

__all__ = ["main"]

LEAST_INTERVAL_SECONDS = 0.1
MOST_INTERVAL_SECONDS = 3600.0


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Shows frames until it is interrupted, or one. A server that goes away is waited for.

    Returns:
        0.

    Raises:
        PykvError: the server does not answer at the start, or may not be watched by this tenant.
    """
    options = _parser().parse_args(arguments)
    console = console or Console()
    try:
        asyncio.run(_watch(options, console))
    except KeyboardInterrupt:
        console.print()
    return 0


async def _watch(options: argparse.Namespace, console: Console) -> None:
    async with client_of(options) as client:
        watch = Watch(client, options.address)
        shown = await watch.next()
        if options.once:
            console.print(shown)
            return
        if not console.is_terminal or console.is_dumb_terminal:
            await _print(watch, shown, options.interval, console)
        with Live(shown, console=console, auto_refresh=False, screen=True) as live:
            while True:
                await sleep(options.interval)
                live.update(await watch.next_or_gone(), refresh=True)


async def _print(watch: Watch, shown: RenderableType, interval: float, console: Console) -> NoReturn:
    """Prints one frame below the other; that the server is gone is said once each time, on stderr."""
    was_gone = False
    while True:
        if watch.news is None:
            console.print(shown)
        if watch.news is not None and not was_gone:
            print(f"pykv: {' '.join(watch.news.split())}; trying again", file=sys.stderr, flush=True)
        was_gone = watch.news is not None
        await sleep(interval)
        shown = await watch.next_or_gone()


def _parser() -> Parser:
    parser = Parser(
        prog="pykv top",
        description="Watches a server: its blocks, its requests, how long they take. One that goes away is waited "
        "for. Into a file, a pipe or a dumb terminal the frames are written one below the other.",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--interval", type=_seconds, default=1.0, help="seconds between frames (%(default)s)")
    add_connection_options(parser)
    return parser


def _interval(text: str) -> float:
    value = float(text)
    if not LEAST_INTERVAL_SECONDS <= value <= MOST_INTERVAL_SECONDS:
        raise ValueError
    return value


_seconds = reader(_interval, f"a number from {LEAST_INTERVAL_SECONDS} to {MOST_INTERVAL_SECONDS:g}")
