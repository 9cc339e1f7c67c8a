"""Starts a daemon, asks it four questions at once, and says what paging and sharing saved.

The last line on stdout is one JSON object; docs/adr/0009 says what its numbers mean.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from pykv.cli.demo.chats import QUESTIONS
from pykv.cli.demo.conversation import run_chats
from pykv.cli.demo.daemon import Daemon, DaemonError, running_daemon
from pykv.cli.demo.report import ChatResult, Peak, summarize
from pykv.cli.demo.view import make_view, show_results
from pykv.client import Client
from pykv.errors import PykvError

__all__ = ["main"]

PLAIN_WIDTH = 110


def main(options: Sequence[str] | None = None) -> int:
    """Runs the demo; gives its exit code.

    Args:
        options: handed to `pykv-serve`; None: those of the command line.
    """
    # The daemon is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    options = sys.argv[1:] if options is None else options
    try:
        with running_daemon("--model", "bundled", *options) as daemon:
            results, summary = asyncio.run(_talk(console, daemon))
    except (DaemonError, PykvError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    show_results(console, results, summary)
    print(json.dumps(summary), flush=True)
    return 0


async def _talk(console: Console, daemon: Daemon) -> tuple[list[ChatResult], dict[str, int | float]]:
    async with Client(daemon.address) as client:
        await _wait(console, daemon, client)
        started = time.perf_counter()
        with make_view(console, QUESTIONS) as view:
            results = await run_chats(client, QUESTIONS, view)
        seconds = time.perf_counter() - started
        model, stats = await client.get_model(), await client.get_stats()
    peak = Peak.from_stats(stats)
    return results, summarize(
        results, seconds, peak, block_size=model.block_size, context_cap=model.max_model_len
    )


async def _wait(console: Console, daemon: Daemon, client: Client) -> None:
    started = time.perf_counter()
    what = "The daemon loads the model (the first time ever it is converted too: some 20 s more)"
    if not console.is_terminal:
        console.out(what)
    with console.status(what):
        await daemon.wait_until_serving(client)
    console.out(f"The model is loaded after {time.perf_counter() - started:.1f} s")
