"""The device that a part runs on, and how time is taken there.

On a GPU the calls of one round are captured in a CUDA graph, so that launch gaps do not count; a round visits several
inputs, so that the second-level cache does not serve what memory should. In a dry run everything is on the CPU, in
Triton's interpreter, and times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Report

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "kernels" / "support"

__all__ = ["ROOT", "SUPPORT", "Machine", "Part", "open_part"]


@dataclass(frozen=True)
class Machine:
    """A device.

    Attributes:
        device: its name for torch.
        dry: whether it only stands for a GPU.
    """

    device: str
    dry: bool

    def synchronize(self) -> None:
        """Waits until all that was launched is done."""
        import torch

        if not self.dry:
            torch.cuda.synchronize()

    def seconds(self, calls: Sequence[Callable[[], object]], rounds: int = 15) -> float:
        """The median time of one call, when all calls run one after the other."""
        if self.dry:
            begin = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - begin) / len(calls)
        return self._graph_seconds(calls, rounds) / len(calls)

    def _graph_seconds(self, calls: Sequence[Callable[[], object]], rounds: int) -> float:
        import torch

        graph = self.captured(calls)
        for _ in range(3):
            graph.replay()
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(rounds)
        ]
        for begin, end in marks:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3

    def captured(self, calls: Sequence[Callable[[], object]]) -> Any:
        """The calls as a CUDA graph, each of them made once before."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def eager_seconds(self, call: Callable[[], object], rounds: int = 50) -> float:
        """The median time between two calls that the host launches one by one, waiting for neither."""
        for _ in range(3):
            call()
        self.synchronize()
        times = []
        for _ in range(3 if self.dry else rounds):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        self.synchronize()
        return statistics.median(times)


@dataclass(frozen=True)
class Part:
    """What a part of the session is started with.

    Attributes:
        machine: where it runs.
        report: where its measurements go.
        slice: (index, count): of its cases, run only every count-th from index on, once, to fill the compiler's cache.
    """

    machine: Machine
    report: Report
    slice: tuple[int, int] | None

    def cases(self, names: Sequence[str]) -> list[str]:
        """The cases to run."""
        return list(names) if self.slice is None else list(names)[self.slice[0] :: self.slice[1]]

    def attempt(self, case: str, run: Callable[[], None]) -> None:
        """Runs one case; an error is written down and the part goes on."""
        try:
            run()
        except Exception as error:
            self.report.failed(case, error)


def open_part(bench: str) -> Part:
    """Reads the command line of a part, and mends the interpreter in a dry run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter"
    )
    parser.add_argument("--warm", help="INDEX/COUNT: compile a share of the cases, measure nothing")
    options = parser.parse_args()
    if options.dry_run:
        sys.path.insert(0, str(SUPPORT))
        import faithful_interpreter

        faithful_interpreter.install()
    machine = Machine("cpu" if options.dry_run else "cuda", options.dry_run)
    share = tuple(int(number) for number in options.warm.split("/")) if options.warm else None
    return Part(machine, Report(bench, options.out), (share[0], share[1]) if share else None)
