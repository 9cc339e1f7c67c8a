"""The arguments of `pykv plan`: one table of options, grouped as the help shows them."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pykv.cli.option import Option, add_options, flag
from pykv.cli.parser import Parser, number, reader
from pykv.planner.formats import KV_SCALES, WEIGHT_BITS
from pykv.planner.options import STORAGES

__all__ = ["OPTIONS", "Asked", "named_as_flags", "read_arguments"]

MODEL, NUMBERS, MEMORY, CACHE, REQUESTS = (
    "model",
    "model by numbers (instead of MODEL)",
    "memory",
    "KV cache",
    "requests",
)


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9_,]{1,18}", text.strip()):
        raise ValueError
    return int(text.replace(",", "").replace("_", ""))


_integer = reader(_whole, "an integer")


OPTIONS = {
    "weights_dtype": Option(MODEL, "DTYPE", f"{', '.join(WEIGHT_BITS)} (as published)"),
    "num_parameters": Option(MODEL, "COUNT", "such as 70.6B, where the model does not say"),
    "weights_bytes": Option(MODEL, "SIZE", "such as 140GB, instead of parameters and dtype"),
    "num_layers": Option(NUMBERS, "N", "attention layers", _integer),
    "num_kv_heads": Option(NUMBERS, "N", "KV heads of a layer", _integer),
    "head_dim": Option(NUMBERS, "N", "elements of a head", _integer),
    "num_heads": Option(NUMBERS, "N", "query heads of a layer", _integer),
    "window": Option(NUMBERS, "N", "tokens that a layer with a window sees", _integer),
    "num_window_layers": Option(NUMBERS, "N", "layers with a window (all, if --window is given)", _integer),
    "latent_dim": Option(NUMBERS, "N", "elements of a token's latent (MLA), instead of heads", _integer),
    "state_bytes": Option(NUMBERS, "SIZE", "of a request's states, whatever its length (0)"),
    "gpu": Option(MEMORY, "NAME", "a known GPU, such as H100-80GB; see --list gpus"),
    "memory": Option(
        MEMORY, "SIZE[,SIZE]", "of each GPU, such as 80GiB, instead of --gpu; one each if they differ"
    ),
    "num_gpus": Option(MEMORY, "N", "how many (--tensor-parallel, else 1)", _integer),
    "tensor_parallel": Option(MEMORY, "N", "GPUs that share one copy of the model (all)", _integer),
    "utilization": Option(MEMORY, "SHARE", "of a GPU's memory that the engine may take (0.9)", number),
    "reserve": Option(MEMORY, "SIZE", "of each GPU within that, for activations and the like (0)"),
    "in_use": Option(MEMORY, "SIZE", "of each GPU that other processes hold (0)"),
    "num_blocks": Option(MEMORY, "N", "of the pool, the null block included, instead of memory", _integer),
    "kv_dtype": Option(CACHE, "DTYPE", "f32, bf16, f16, int8 or fp8 (bf16)"),
    "kv_scales": Option(CACHE, "|".join(KV_SCALES), "where int8 and fp8 have their scales (token_head)"),
    "block_size": Option(CACHE, "N", "tokens a block (16)", _integer),
    "storage": Option(
        CACHE,
        "|".join(STORAGES),
        "what pykv's pool stores, or the least: windows give back, latents and states stored as such (engine)",
    ),
    "context": Option(
        REQUESTS,
        "TOKENS|p50=N,p90=N,...",
        "tokens of a request, prompt and output: one number, or percentiles, with max=N and perhaps mean=N",
    ),
    "histogram": Option(REQUESTS, "FILE", "lines of tokens,count, instead of --context"),
    "trace": Option(REQUESTS, "FILE", "requests in any form that pykv replay reads, instead of --context"),
    "max_model_len": Option(REQUESTS, "N", "the cap of a request's tokens (the model's)", _integer),
    "max_num_seqs": Option(
        REQUESTS, "N", "requests that may run at once in one engine (as many as fit)", _integer
    ),
    "watermark": Option(REQUESTS, "SHARE", "of the blocks that an admission leaves free (0)", number),
    "shared_prefix": Option(REQUESTS, "N", "tokens that all requests begin with (0)", _integer),
    "users": Option(REQUESTS, "N", "a number of requests to look at (those that fit)", _integer),
    "risk": Option(REQUESTS, "SHARE", "chance that the lengths of a mix pass the pool (0.01)", number),
}

EXAMPLES = """examples:
  pykv plan llama-3.1-8b --gpu L4 --context p50=600,p90=2500,p99=7000,max=8192
  pykv plan llama-3.1-8b --compare --users 2000 --context p50=900,p90=3000,p99=9000,max=16384
  pykv plan ./my-model --memory 80GiB --num-gpus 4 --context 32000 --kv-dtype fp8
  pykv plan --num-layers 80 --num-kv-heads 8 --head-dim 128 --weights-bytes 140GB --context 8000 --users 100
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for.

    Attributes:
        options: of `pykv.plan`, those that were given.
        json: whether JSON is printed instead of tables.
        plot: the file of the picture; None: none.
        compare: whether all known GPUs are compared.
        listed: "models" or "gpus": only these names are printed.
    """

    options: dict[str, Any]
    json: bool
    plot: str | None
    compare: bool
    listed: str | None


def read_arguments(arguments: Sequence[str]) -> Asked:
    """Reads the command line.

    Raises:
        ConfigError: an option is unknown, or its value is of another kind.
        SystemExit: the help was asked for.
    """
    given = vars(_parser().parse_args(arguments))
    shown = {name: given.pop(name, None) for name in ("json", "plot", "compare", "list")}
    return Asked(given, bool(shown["json"]), shown["plot"], bool(shown["compare"]), shown["list"])


def named_as_flags(message: str) -> str:
    """An error of the planner with the names of its options written as flags."""
    names = "|".join(OPTIONS)
    message = re.sub(rf"^({names})\b", lambda match: flag(match[1]), message)
    message = re.sub(rf"\b({names}) (?=are both given)", lambda match: f"{flag(match[1])} ", message)
    return re.sub(
        rf"(?<!-)\b({'|'.join(name for name in OPTIONS if '_' in name)})\b", lambda m: flag(m[1]), message
    )


def _parser() -> Parser:
    parser = Parser(
        prog="pykv plan",
        usage="pykv plan [MODEL] [--gpu NAME | --memory SIZE] [--context TOKENS] [option ...]",
        description="How many requests fit a model on some memory, what the limit is, and what would move it. "
        "Sizes have units: GiB is 2**30 bytes, GB is 10**9.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--plot", metavar="FILE", help="draw it into FILE.svg or FILE.png as well")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare all known GPUs: how many requests each holds, how many are needed",
    )
    parser.add_argument("--list", choices=("models", "gpus"), help="print the names that are known, and end")
    groups = {name: parser.add_argument_group(name) for name in (MODEL, NUMBERS, MEMORY, CACHE, REQUESTS)}
    groups[MODEL].add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder, a config.json, or a known name; see --list models",
    )
    add_options(OPTIONS, groups)
    return parser
