"""The arguments of `pykv replay`: one table of options, grouped as the help shows them, each of which may be swept."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import Any

from pykv.cli.option import Option, add_options
from pykv.cli.parser import Parser, integer, number, reader
from pykv.errors import ConfigError
from pykv.field_checks import shown
from pykv.simulator.options import ALLOCATORS
from pykv.simulator.policy import POLICIES, PRODUCTION_POLICIES
from pykv.simulator.step_cost import DEFAULT_COST

__all__ = ["OPTIONS", "parser", "read_sweep"]

MEMORY, TIME, SCHEDULER = "memory", "virtual time", "the scheduler, as in pykv.SchedulerConfig"
SERIAL_POLICIES = [name for name in POLICIES if name not in PRODUCTION_POLICIES]


def _blocks(text: str) -> int | str:
    return text if text.endswith("%") else int(text)


def _size(text: str) -> int | str:
    """A number of bytes; with a unit it stays a text."""
    return int(text) if text.isdecimal() else text


OPTIONS = {
    "num_blocks": Option(
        MEMORY,
        "N",
        "blocks that hold tokens, or a share of the trace's, as in 10%",
        reader(_blocks, "an integer, or a share such as 10%"),
    ),
    "block_size": Option(MEMORY, "N", "tokens a block (default: the trace's, or 16)", integer),
    "kv_memory_bytes": Option(MEMORY, "SIZE", "in the place of --num-blocks; 20GiB, 80GB", _size),
    "kv_bytes_per_token": Option(
        MEMORY, "N", "in 16 bit, with --kv-memory-bytes, where no model is named", number
    ),
    "kv_dtype": Option(
        MEMORY,
        "NAME",
        "bf16, f16, f32, int8 or fp8, scales counted: of --kv-memory-bytes, and of what a roofline's step reads "
        "(default: bf16)",
    ),
    "model": Option(
        MEMORY,
        "NAME",
        "what is served, where --cost does not say: a folder, a config.json, or a known name of pykv plan",
    ),
    "allocator": Option(MEMORY, "NAME", f"{', '.join(ALLOCATORS)} (default: paged)"),
    "policy": Option(
        MEMORY,
        "NAME",
        f"who makes room: {' or '.join(PRODUCTION_POLICIES)}; with --serial also {', '.join(SERIAL_POLICIES)}, or "
        "FILE.py:CLASS (default: lru)",
    ),
    "cost": Option(
        TIME,
        "MODEL",
        "seconds of a step: constant:S, linear:FIELD=S,..., roofline:GPU,model=NAME,..., or a file of pykv fit "
        f"(default: {DEFAULT_COST})",
    ),
    "speed": Option(TIME, "X", "requests come so many times as fast (default: 1)", number),
    "concurrency": Option(TIME, "N", "so many requests are always there, whatever the times", integer),
    "retention": Option(
        TIME,
        "RULE",
        "what the scheduler is told of sessions: none, session_end, next_turn, session_idle, or ttl:SECONDS "
        "(default: none)",
    ),
    "max_num_seqs": Option(SCHEDULER, "X", None, integer),
    "max_num_batched_tokens": Option(SCHEDULER, "X", None, integer),
    "max_chunk_tokens": Option(SCHEDULER, "X", None, integer),
    "max_model_len": Option(SCHEDULER, "X", None, integer),
    "watermark": Option(SCHEDULER, "X", None, number),
    "admission": Option(SCHEDULER, "X", None),
    "queue_order": Option(SCHEDULER, "X", None),
    "max_passes": Option(SCHEDULER, "X", None, integer),
    "preemption": Option(SCHEDULER, "X", None),
    "num_host_blocks": Option(SCHEDULER, "X", None, integer),
}


def parser() -> Parser:
    """The command line: what is replayed and shown, and the options of the replay."""
    made = Parser(
        prog="pykv replay",
        description="Replays a trace of requests on the production prefix tree and scheduler, without a model.",
        epilog="Two bounds stand beside each hit rate: a cache that forgets nothing, and Belady's best choice.",
    )
    _add_trace(made)
    _add_output(made)
    made.add_argument(
        "--serial",
        action="store_const",
        const=True,
        help="one request at a time: the cache alone, without time",
    )
    groups = {name: made.add_argument_group(name) for name in (MEMORY, TIME, SCHEDULER)}
    groups[TIME].add_argument(
        "--knows-outputs", action="store_const", const=True, help="the scheduler is told the outputs' lengths"
    )
    add_options(OPTIONS, groups)
    return made


def _add_trace(made: Parser) -> None:
    made.add_argument(
        "trace", metavar="TRACE", help="a file: pykv's own form, Mooncake's, Azure's, vLLM's, a recording"
    )
    made.add_argument(
        "--request-rate", type=number, default=1.0, metavar="X", help="a second, where a file has no times"
    )
    made.add_argument("--seed", type=integer, default=0, metavar="N", help="of these times (default: 0)")


def _add_output(made: Parser) -> None:
    made.add_argument(
        "--json", action="store_true", help="prints JSON: one object, or one a line for a sweep"
    )
    made.add_argument("--series", action="store_true", help="with --json: also what was so over time")
    made.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="OPTION=A,B,...",
        help="replays under each value, and each combination where it is given for several options",
    )
    made.add_argument(
        "--plot",
        action="append",
        default=[],
        metavar="FILE",
        help="draws a .svg or .png (needs the extra 'plot')",
    )


def read_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """What `num_blocks=1%,5%,policy=lru,opt` says: a part with = begins the next option.

    Raises:
        ConfigError: an option is unknown, or a value is not allowed.
    """
    grid: dict[str, list[Any]] = {}
    name = ""
    for part in ",".join(texts).split(","):
        begins, separator, value = part.partition("=")
        if separator and begins in OPTIONS:
            name = begins
        elif not name or separator:
            raise ConfigError(f"sweep: {shown(part)} is no OPTION=A,B,...; options: {', '.join(OPTIONS)}")
        else:
            value = part
        try:
            grid.setdefault(name, []).append(OPTIONS[name].read(value))
        except ArgumentTypeError as error:
            raise ConfigError(f"sweep: {name} {error}") from None
    return grid
