"""Work that takes long and cannot be interrupted."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["run_in_daemon_thread"]

Result = TypeVar("Result")


async def run_in_daemon_thread(function: Callable[[], Result], name: str) -> Result:
    """Waits for `function` in a thread that does not keep the process alive; cancelling leaves it behind.

    Raises:
        BaseException: what `function` raised.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
