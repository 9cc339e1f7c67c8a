"""How fast is a replay, and how much memory does it take for a block?

Measured through the Python face, reading the file included, medians. `example_agents` is of
this project; the other traces are public and not part of it: the folder that holds them is an option, and without it
the example alone is measured. `toolagent` is the first 1,000
requests of Mooncake's tool-and-agent trace, with Dynamo's mocker beside it where `ai-dynamo-runtime` is installed;
`weka_mix150` has 2.2 million block references. Memory is what a process grows by from before the file is read to the
end of a serial replay whose cache holds every block, divided by the different blocks. Left out: starting Python.
Run: `python benches/bench_replay.py --traces FOLDER [--json] [CASE ...]`; memory needs Linux.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykv.simulator.replay import replay

AGENTS = Path(__file__).parents[1] / "examples" / "traces" / "agents.jsonl"
TOOLAGENT = "mooncake_toolagent_first1000.jsonl.gz"
WEKA = "weka_mix150_b512.jsonl.gz"


@dataclass(frozen=True)
class Result:
    """One line of output: a median of `n` measurements."""

    case: str
    metric: str
    value: float
    unit: str
    n: int


def median_seconds(rounds: int, work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def toolagent_1000(folder: Path) -> list[Result]:
    def run() -> None:
        assert replay(folder / TOOLAGENT, num_blocks=4000, serial=True).num_requests == 1000

    return [Result("toolagent_1000", "toolagent_1000_ms", 1e3 * median_seconds(21, run), "ms", 21)]


def toolagent_1000_timed(folder: Path) -> list[Result]:
    def run() -> None:
        timed = replay(folder / TOOLAGENT, num_blocks=4000).timed
        assert timed is not None
        assert timed.refused == 0

    return [
        Result("toolagent_1000_timed", "toolagent_1000_timed_ms", 1e3 * median_seconds(21, run), "ms", 21)
    ]


def toolagent_1000_dynamo(folder: Path) -> list[Result]:
    """Both simulate every step of the same requests, in turn, out of one file of Mooncake's form; each its defaults."""
    try:
        from dynamo._core import run_mocker_trace_replay  # type: ignore[import-not-found]
    except ImportError:
        print(
            "bench_replay: ai-dynamo-runtime is not installed, toolagent_1000_dynamo is skipped",
            file=sys.stderr,
        )
        return []

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "toolagent.jsonl"
        path.write_text(in_mooncakes_form(folder / TOOLAGENT))

        def rival() -> None:
            done = run_mocker_trace_replay([path], trace_block_size=512)
            assert done.summary["completed_requests"] == 1000

        def own() -> None:
            timed = replay(path, num_blocks=4000).timed
            assert timed is not None
            assert timed.refused == 0

        times = [(median_seconds(1, rival), median_seconds(1, own)) for _ in range(11)]
    rival_ms, own_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    case = "toolagent_1000_dynamo"
    return [
        Result(case, "dynamo_mocker_ms", rival_ms, "ms", 11),
        Result(case, "pykv_timed_ms", own_ms, "ms", 11),
        Result(case, "dynamo_over_pykv", rival_ms / own_ms, "ratio", 11),
    ]


def in_mooncakes_form(path: Path) -> str:
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file][1:]
    return "".join(
        json.dumps(
            {
                "timestamp": int(1000 * row["ts"]),
                "input_length": row["in"],
                "output_length": row["out"],
                "hash_ids": [block for start, length in row["h"] for block in range(start, start + length)],
            }
        )
        + "\n"
        for row in rows
    )


def weka_mix150(folder: Path) -> list[Result]:
    def run() -> None:
        assert f"{replay(folder / WEKA, num_blocks=3933, serial=True).hit_rate_blocks:.3f}" == "0.832"

    return [Result("weka_mix150", "weka_mix150_s", median_seconds(5, run), "s", 5)]


def weka_memory(folder: Path) -> list[Result]:
    command = [sys.executable, __file__, "--measure-memory", "--traces", str(folder)]
    measured = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [Result("weka_memory", "bytes_per_block", measured, "B", 1)]


def measure_memory(folder: Path) -> float:
    """The growth of this process, in bytes a different block of the trace."""
    before = peak_bytes()
    result = replay(folder / WEKA, num_blocks="100%", serial=True)
    return (peak_bytes() - before) / result.num_blocks


def peak_bytes() -> int:
    """The most memory that this process has held so far. `getrusage` would count its parent's too."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


def example_agents(_: Path | None) -> list[Result]:
    def serial() -> None:
        assert replay(AGENTS, num_blocks=4000, serial=True).num_requests > 0

    def timed() -> None:
        assert replay(AGENTS, num_blocks=4000).timed is not None

    return [
        Result("example_agents", f"example_agents_{name}_ms", 1e3 * median_seconds(5, run), "ms", 5)
        for name, run in (("serial", serial), ("timed", timed))
    ]


OWN_CASES = ("example_agents",)
"""Of traces that are a part of this project."""
CASES: dict[str, Callable[[Any], list[Result]]] = {
    "example_agents": example_agents,
    "toolagent_1000": toolagent_1000,
    "toolagent_1000_timed": toolagent_1000_timed,
    "toolagent_1000_dynamo": toolagent_1000_dynamo,
    "weka_mix150": weka_mix150,
    "weka_memory": weka_memory,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="holds the traces")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--measure-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_memory:
        print(measure_memory(options.traces))
        return 0
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}: allowed are {', '.join(CASES)}")
    cases = options.cases or list(CASES)
    if options.traces is None:
        if public := [case for case in options.cases if case not in OWN_CASES]:
            parser.error(f"{public[0]} needs --traces FOLDER, which holds {TOOLAGENT} and {WEKA}")
        cases = [case for case in cases if case in OWN_CASES]
        left_out = ", ".join(case for case in CASES if case not in cases)
        print(f"bench_replay: without --traces FOLDER left out are {left_out}", file=sys.stderr)
    elif missing := [name for name in (TOOLAGENT, WEKA) if not (options.traces / name).is_file()]:
        parser.error(f"{options.traces} holds no {missing[0]}")
    for case in cases:
        for result in CASES[case](options.traces):
            line = {"bench": "replay", **vars(result)}
            shown = f"{result.metric:34} {result.value:12.3f} {result.unit}"
            print(json.dumps(line) if options.json else shown, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
