"""The threads on which prompts are encoded, so that no long one keeps the others waiting."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pykv.fair_line import FairLine

__all__ = ["EncodingThreads"]

MOST_OF_SHORT = 2**15
"""Up to so many characters a text is encoded within some 20 ms."""

Result = TypeVar("Result")


class EncodingThreads:
    """One thread for short texts and one for long ones, of each of which tenants have turns by characters.

    What is encoded leaves other threads their time: the tokenizer lets go of the interpreter meanwhile.
    """

    def __init__(self) -> None:
        self._short = _Lane("pykv-encode-short")
        self._long = _Lane("pykv-encode-long")

    async def run(self, function: Callable[[], Result], *, tenant: bytes, amount: int) -> Result:
        """Returns what a function that encodes returns; one that has not begun when this is cancelled never does.

        Args:
            tenant: who waits in turn with the others.
            amount: characters of the text, or token ids.

        Raises:
            BaseException: what the function raised.
        """
        lane = self._short if amount <= MOST_OF_SHORT else self._long
        return await asyncio.wrap_future(lane.submit(function, tenant, amount))

    def shut_down(self) -> None:
        """Takes nothing more; what was taken is still done."""
        self._short.shut_down()
        self._long.shut_down()


class _Job:
    """What is to be done, for whom, and how much it is."""

    def __init__(self, function: Callable[[], Any], tenant: bytes, amount: int) -> None:
        self.function = function
        self.tenant = tenant
        self.amount = amount
        self.future: Future[Any] = Future()

    def run(self) -> None:
        try:
            self.future.set_result(self.function())
        except BaseException as error:
            self.future.set_exception(error)


class _Lane:
    """One thread; may be given work from any."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._jobs: dict[bytes, deque[_Job]] = {}
        self._line: FairLine[bytes] = FairLine()

    def submit(self, function: Callable[[], Result], tenant: bytes, amount: int) -> Future[Result]:
        job = _Job(function, tenant, amount)
        with self._lock:
            self._thread.submit(self._run_next)  # raises once it is shut down
            self._jobs.setdefault(tenant, deque()).append(job)
            self._stand_in_line(tenant)
        job.future.add_done_callback(lambda future: self._drop(job) if future.cancelled() else None)
        return job.future

    def _run_next(self) -> None:
        with self._lock:
            if not self._line:
                return  # what this was to do is not wanted any more
            tenant = self._line.first()
            job = self._jobs[tenant].popleft()
            self._line.serve(tenant, job.amount)
            self._stand_in_line(tenant)
            is_wanted = job.future.set_running_or_notify_cancel()
        if is_wanted:
            job.run()

    def _drop(self, job: _Job) -> None:
        """Forgets a job that is not wanted any more, if it still waits."""
        with self._lock:
            jobs = self._jobs.get(job.tenant, deque())
            if job in jobs:
                jobs.remove(job)
                self._stand_in_line(job.tenant)

    def _stand_in_line(self, tenant: bytes) -> None:
        jobs = self._jobs[tenant]
        if jobs:
            self._line.put(tenant, jobs[0].amount)
        else:
            del self._jobs[tenant]
            self._line.forget(tenant)

    def shut_down(self) -> None:
        self._thread.shutdown(wait=False)
