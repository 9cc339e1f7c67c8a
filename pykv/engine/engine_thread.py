"""The thread that runs the steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from pykv.engine.deltas import RequestDelta
from pykv.engine.request import Request
from pykv.engine.step_loop import StepLoop
from pykv.events import KvEvents

GATHER_SECONDS = 0.005
"""How long the first step after idleness waits for requests that are being encoded: alone it would cost as much."""


class _Wake:
    """Looks for new requests."""


class _Stop:
    """Ends all requests, then the thread."""


@dataclass(frozen=True, slots=True)
class _Pause:
    request: Request


@dataclass(frozen=True, slots=True)
class _Resume:
    request: Request


Command = _Wake | _Stop | _Pause | _Resume | Request  # a request: it is aborted


class EngineThread:
    """Steps while there are requests that are not paused, sleeps while there are none.

    Its commands go through a queue whose `put` may interrupt itself: they may be given in a finalizer.

    Args:
        steps: no other thread may step it.
        deliver: called on the thread with what each step gave.
        ended: called on the thread when it ends, with what it raised, or None.

    Attributes:
        event_listener: called on the thread with what each step, and what came before it, did to cached blocks.
    """

    def __init__(
        self,
        steps: StepLoop,
        deliver: Callable[[list[RequestDelta]], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self.event_listener: Callable[[KvEvents], None] | None = None
        self._steps = steps
        self._deliver = deliver
        self._ended = ended
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pykv-engine", daemon=True)
        self._last_progress = time.monotonic()
        self._is_idle = True
        self._is_stopping = False

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def last_progress(self) -> float:
        """When the last step ended, on the monotonic clock, in seconds; now, while there is nothing to do."""
        return time.monotonic() if self._is_idle else self._last_progress

    def start(self) -> None:
        """Starts the thread; to be called once."""
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread see a request that was submitted."""
        self._commands.put(_Wake())

    def abort(self, request: Request) -> None:
        """Ends a request before the next step is planned."""
        self._commands.put(request)

    def pause(self, request: Request) -> None:
        """Leaves a request out of the steps to come."""
        self._commands.put(_Pause(request))

    def resume(self, request: Request) -> None:
        """Lets a paused request go on."""
        self._commands.put(_Resume(request))

    def stop(self) -> None:
        """Ends all requests and then the thread."""
        self._commands.put(_Stop())

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the thread's end; returns whether it came."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._is_stopping or self._steps.has_requests:
                self._take_commands()
                if self._steps.has_work:
                    self._step()
        except BaseException as raised:
            error = raised
        self._ended(error)

    def _step(self) -> None:
        deltas = self._steps.step()
        self._last_progress = time.monotonic()
        if deltas:
            self._deliver(deltas)
        listener = self.event_listener
        if listener is not None:
            events = self._steps.scheduler.take_events()
            if len(events):
                listener(events)

    def _take_commands(self) -> None:
        """Follows all commands that came; waits for one while there is nothing to do."""
        if not self._steps.has_work:
            self._is_idle = True
            self._follow(self._commands.get())
            self._gather()
            self._last_progress = time.monotonic()
            self._is_idle = False
        while True:
            try:
                self._follow(self._commands.get_nowait())
            except Empty:
                return

    def _gather(self) -> None:
        """Lets requests that came together begin together."""
        deadline = time.monotonic() + GATHER_SECONDS
        while self._steps.is_preparing and (seconds_left := deadline - time.monotonic()) > 0.0:
            try:
                self._follow(self._commands.get(timeout=seconds_left))
            except Empty:
                return

    def _follow(self, command: Command) -> None:
        if isinstance(command, Request):
            self._steps.abort(command)
        elif isinstance(command, _Pause):
            self._steps.pause(command.request)
        elif isinstance(command, _Resume):
            self._steps.resume(command.request)
        elif isinstance(command, _Stop):
            self._is_stopping = True
            self._steps.abort_all()
