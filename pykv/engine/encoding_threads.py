"""The threads on which prompts are encoded, so that no long one keeps the others waiting."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pykv.errors import QueueFullError
from pykv.fair_line import FairLine

__all__ = ["MOST_WAITING", "EncodingThreads"]

MOST_WAITING = 2**24
"""Characters of texts, and token ids, that may wait at once: a character is up to 4 bytes of memory."""

MOST_OF_SHORT = 2**15
"""Up to so many characters a text is encoded within some 20 ms."""

Result = TypeVar("Result")


class EncodingThreads:
    """One thread for short texts and one for long ones, of each of which tenants have turns by characters.

    What is encoded leaves other threads their time: the tokenizer lets go of the interpreter meanwhile.

    Args:
        most_waiting: characters and token ids that may wait at once. A tenant may have as much of that as is left to
            all; a prompt of more than half of it counts as half, so each is let in where nothing waits.
    """

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        waiting = _Waiting(most_waiting)
        self._short = _Lane("pykv-encode-short", waiting)
        self._long = _Lane("pykv-encode-long", waiting)

    async def run(self, function: Callable[[], Result], *, tenant: bytes, amount: int) -> Result:
        """Returns what a function that encodes returns; one that has not begun when this is cancelled never does.

        Args:
            tenant: who waits in turn with the others.
            amount: characters of the text, or token ids.

        Raises:
            QueueFullError: too much waits; nothing was changed.
            BaseException: what the function raised; RuntimeError instead of StopIteration, which no future takes.
        """
        lane = self._short if amount <= MOST_OF_SHORT else self._long
        job = _Job(function, tenant, amount)
        lane.submit(job)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            lane.drop(job)
            raise
        finally:
            # An error has this frame in its traceback, and would keep the text until the next collection of garbage.
            del job

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


def _run(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = function()
    except StopIteration as error:
        stopped = RuntimeError("what encodes the prompt raised StopIteration")
        stopped.__cause__ = error
        future.set_exception(stopped)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        # The error that it holds has this frame in its traceback: they would keep each other, and the text.
        del future


class _Waiting:
    """How much waits, of each tenant and in all; may be told from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._of_tenant: Counter[bytes] = Counter()
        self._in_all = 0

    def add(self, tenant: bytes, amount: int) -> None:
        """One more waits.

        Raises:
            QueueFullError: see `EncodingThreads`; nothing was changed.
        """
        counted = self._counted(amount)
        with self._lock:
            its_own, left = self._of_tenant.get(tenant, 0), self._most - self._in_all
            if its_own + counted > left:
                raise QueueFullError(
                    f"this prompt counts as {counted} characters or token ids, and {its_own} of its tenant wait to be "
                    f"encoded: allowed is together at most what is left to all, {left} of {self._most}"
                )
            self._in_all += counted
            self._of_tenant[tenant] += counted

    def remove(self, tenant: bytes, amount: int) -> None:
        """One waits no more."""
        counted = self._counted(amount)
        with self._lock:
            self._in_all -= counted
            self._of_tenant[tenant] -= counted
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

    def _counted(self, amount: int) -> int:
        return min(amount, self._most // 2)


class _Lane:
    """One thread; may be given work from any.

    Args:
        waiting: is told what waits here.
    """

    def __init__(self, name: str, waiting: _Waiting) -> None:
        self._waiting = waiting
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._jobs: dict[bytes, OrderedDict[_Job, None]] = {}  # of each tenant those that wait, as they came
        self._line: FairLine[bytes] = FairLine()
        self._is_at_work = self._is_shut_down = False

    def submit(self, job: _Job) -> None:
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("no prompt is encoded after the shutdown")
            self._waiting.add(job.tenant, job.amount)
            if not self._is_at_work:
                try:
                    self._thread.submit(self._work)
                except BaseException:  # there is no thread for it
                    self._waiting.remove(job.tenant, job.amount)
                    raise
                self._is_at_work = True
            self._jobs.setdefault(job.tenant, OrderedDict())[job] = None
            self._stand_in_line(job.tenant)

    def drop(self, job: _Job) -> None:
        """Forgets a job that is not wanted any more, if it still waits."""
        with self._lock:
            jobs = self._jobs.get(job.tenant)
            if jobs is not None and job in jobs:
                del jobs[job]
                self._waiting.remove(job.tenant, job.amount)
                self._stand_in_line(job.tenant)

    def shut_down(self) -> None:
        with self._lock:
            self._is_shut_down = True
        self._thread.shutdown(wait=False)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if job.future.set_running_or_notify_cancel():
                _run(job.function, job.future)

    def _next(self) -> _Job | None:
        with self._lock:
            if not self._line:
                self._is_at_work = False
                return None
            tenant = self._line.first()
            job, _ = self._jobs[tenant].popitem(last=False)
            self._waiting.remove(tenant, job.amount)
            self._line.serve(tenant, job.amount)
            self._stand_in_line(tenant)
            return job

    def _stand_in_line(self, tenant: bytes) -> None:
        jobs = self._jobs[tenant]
        if jobs:
            self._line.put(tenant, next(iter(jobs)).amount)
        else:
            del self._jobs[tenant]
            self._line.forget(tenant)
