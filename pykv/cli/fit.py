"""The command `pykv fit`: a cost model for `pykv replay` out of a measured run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pykv.cli.parser import Parser, integer
from pykv.errors import ConfigError
from pykv.simulator.fit import FitReport, fit
from pykv.simulator.measured_run import read_measured_run
from pykv.simulator.scraped import ScrapeFit, fit_scrapes

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Fits a model to one run.

    Returns:
        0.

    Raises:
        PykvError: an option, or a file, is not allowed.
    """
    options = _parser().parse_args(arguments)
    try:
        report = _fitted(options.run, options.num_blocks)
        if options.output:
            about = {name: value for name, value in report.to_json().items() if name != "cost_model"}
            report.cost_model.save(options.output, **about)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    print(json.dumps(report.to_json()) if options.json else _text(report))
    return 0


def _fitted(paths: Sequence[str], num_blocks: int | None) -> FitReport | ScrapeFit:
    if len(paths) == 1:
        return fit(read_measured_run(paths[0]), num_blocks=num_blocks)
    if num_blocks is not None:
        raise ConfigError("num_blocks: not allowed with scrapes, which tell steps and not requests")
    return fit_scrapes(paths)


def _parser() -> Parser:
    parser = Parser(
        prog="pykv fit",
        description="Fits a cost model to half of a measured run; the errors are those of the other half.",
        epilog="pykv replay TRACE --cost FILE replays under the model.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="+",
        help="one NAME.requests.jsonl or .jsonl.gz, with NAME.meta.json and NAME.timeseries.csv beside it; or several "
        "files, each a scrape of the metrics of pykv-serve",
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="where the model is written, as JSON")
    parser.add_argument(
        "--num-blocks", type=integer, metavar="N", help="usable blocks, where NAME.meta.json does not say"
    )
    parser.add_argument("--json", action="store_true", help="prints the model and its errors as JSON")
    return parser


def _text(report: FitReport | ScrapeFit) -> str:
    model = report.cost_model
    step = [
        f"a step takes {1e3 * model.fixed:.3g} ms, {1e6 * model.per_sequence:.3g} µs a sequence, "
        f"{1e6 * model.per_token:.3g} µs a token, {1e6 * model.per_context_token:.3g} µs a token of context"
    ]
    if isinstance(report, ScrapeFit):
        least, most = report.step_seconds
        return "\n".join(
            [
                *step,
                f"steps     {report.step_error_p50:.1%} off (p50), {report.step_error_p90:.1%} (p90), in the means of "
                f"{report.num_intervals // 2} intervals",
                f"measured  from {1e3 * least:.3g} to {1e3 * most:.3g} ms a step: beyond that nothing is known",
            ]
        )
    lines = [
        *step,
        f"latency   {report.latency_median_error:+.1%} off in the median; of each request "
        f"{report.request_error_p50:.1%} (p50), {report.request_error_p90:.1%} (p90)",
        f"TTFT      {report.ttft_median_error:+.1%} off in the median",
        f"TPOT      {report.tpot_median_error:+.1%} off in the median",
        f"duration  {report.duration_error:+.1%} off",
        "KV use    not measured"
        if report.kv_usage_error is None
        else f"KV use    {report.kv_usage_error:.1%} of the pool off on average",
    ]
    if report.worst_distance is not None:
        what = "running requests" if report.kv_usage_error is None else "the pool"
        lines.append(f"worst     {report.worst_distance:.0%} of {what} off at {report.worst_seconds:.0f} s")
    return "\n".join(lines)
