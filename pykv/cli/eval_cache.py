"""The command `pykv eval-cache`: what each format of the KV cache costs a model in quality."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pykv.cli.parser import Parser, reader
from pykv.errors import ConfigError
from pykv.kv_format import kv_format_of
from pykv.models import load_model
from pykv.quality.evaluation import CacheQuality, Evaluation, evaluate
from pykv.quality.report import draw, json_lines, table
from pykv.quality.text import shipped_text

__all__ = ["main"]

LEAST_TOKENS = 2


def main(arguments: Sequence[str]) -> int:
    """Runs the command; see its help."""
    options = _parser().parse_args(arguments)
    kv_dtypes = [name.strip() for name in options.formats.split(",")]
    for name in kv_dtypes:
        kv_format_of(name)
    text = _text(options.text)
    model, tokenizer = load_model(
        options.model,
        dtype=options.dtype,
        device=options.device,
        attention_backend=options.attention_backend,
        progress=_tell,
    )
    context = min(options.context, model.max_model_len - 1)
    token_ids = tokenizer(text)["input_ids"][: options.tokens]
    evaluation = Evaluation(token_ids, context)
    if not evaluation.pieces():
        raise ConfigError(f"the text has {len(token_ids)} tokens: allowed is at least one piece of {context}")
    results = []
    for quality in evaluate(
        model, evaluation, kv_dtypes, attention_backend=options.attention_backend, tell=_tell
    ):
        results.append(quality)
        _show(quality, options.json)
    if not options.json:
        print(table(results))
    if options.plot is not None:
        draw(results, options.plot)
    return 0


def _show(quality: CacheQuality, as_json: bool) -> None:
    if as_json:
        print("\n".join(json_lines(quality)), flush=True)
    else:
        _tell(f"{quality.kv_dtype}: perplexity {quality.perplexity:.4f}")


def _text(path: Path | None) -> str:
    if path is None:
        return shipped_text()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text is {str(path)!r}, which cannot be read: {error}") from error


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser(
        prog="pykv eval-cache",
        description="Perplexity and greedy agreement of a model over a text, for each format of its KV cache.",
    )
    parser.add_argument(
        "--model", default="bundled", help="bundled, a folder, a GGUF file or OWNER/NAME of the hub"
    )
    parser.add_argument(
        "--formats",
        default="bf16,f32,f16,int8,fp8",
        help="names, separated by commas; the others are compared with the first (default: %(default)s)",
    )
    parser.add_argument("--text", type=Path, help="a file in UTF-8 instead of the shipped text")
    parser.add_argument(
        "--tokens", type=_tokens, default=24_576, help="the most of the text (default: %(default)s)"
    )
    parser.add_argument(
        "--context", type=_tokens, default=2_048, help="tokens a piece (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto", help="of the weights: auto, float32, bfloat16, float16")
    parser.add_argument("--device", default="auto", help="a torch device, or auto")
    parser.add_argument("--attention-backend", default="auto", help="auto, cpu, torch or triton")
    parser.add_argument("--json", action="store_true", help="print one JSON object a number")
    parser.add_argument("--plot", type=Path, help="draw a picture into this file, SVG or PNG")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < LEAST_TOKENS:
        raise ValueError
    return number


_tokens = reader(_count, f"an integer of at least {LEAST_TOKENS}")
