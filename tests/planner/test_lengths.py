"""Lengths of requests: percentiles kept, means met, files read, malformed ones named by line and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from pykv import ConfigError, plan
from pykv.errors import TraceError
from pykv.planner.length_files import read_histogram, read_trace
from pykv.planner.lengths import read_context

CHAT = "p50=2000,p90=8000,p99=30000,max=131072"
TRACES = Path(__file__).parents[2] / ".." / "shared" / "traces"


@pytest.mark.parametrize("mean", ["", ",mean=2500", ",mean=4000", ",mean=5000"])
def test_percentiles_are_kept_and_a_mean_is_met(mean: str) -> None:
    lengths = read_context(CHAT + mean, None)
    assert [lengths.percentile(percent) for percent in (50, 90, 99, 100)] == [2000, 8000, 30_000, 131_072]
    if mean:
        assert lengths.mean == pytest.approx(int(mean.removeprefix(",mean=")), rel=0.01)


def test_without_a_mean_the_safe_side_is_taken() -> None:
    safe = read_context(CHAT, None)
    lognormal = np.random.default_rng(3).lognormal(np.log(2000), np.log(4) / 1.2816, 200_000)
    assert safe.percentile(1) == 2000
    assert safe.mean > lognormal.mean()


def test_cap_is_the_maximum_where_none_is_given() -> None:
    assert read_context({"p50": 100, "p90": 200}, 500).percentile(100) == 500
    assert read_context("p50=100,p100=200", None).percentile(100) == 200
    assert read_context("700", None).is_fixed


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ("0", ": allowed is an integer from 1"),
        ("-5", ": allowed is an integer from 1"),
        (10**12, ": allowed is an integer from 1"),
        ("9" * 5000, ": allowed is a number of tokens"),
        ("²", ": allowed is a number of tokens"),
        ("nan", ": allowed is a number of tokens"),
        (float("nan"), ": allowed is a number of tokens"),
        (True, ": allowed is a number of tokens"),
        ("p50", ": allowed is a number of tokens"),
        ("p50=x,max=9", ": allowed is a number of tokens"),
        ("p0=5,max=9", ": allowed is a number of tokens"),
        ("p101=5", ": allowed is a number of tokens"),
        ("q50=5", ": allowed is a number of tokens"),
        ("pnan=5,max=9", ": allowed is a number of tokens"),
        ("mean=5", "at least one percentile beside the mean"),
        ("p50=10,p90=5,max=20", "percentiles that rise"),
        ("p50=10,max=5", "percentiles that rise"),
        ("p50=10,p50=20,max=30", "each percentile once"),
        ("p50=10,p50.0=20,max=30", "each percentile once"),
        ("p100=10,max=20", "each percentile once"),
        ("p50=10", "percentiles with max=TOKENS"),
        ("p50=2000,p90=8000,max=9000,mean=9000", ": allowed is a mean from"),
        ("p50=2000,p90=8000,max=9000,mean=1", ": allowed is a mean from"),
    ],
)
def test_context_that_is_refused(context: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_context(context, None)


def test_histogram_with_heading_comments_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("tokens,count\n# from last week\n\n100,3\n200, 1\n100,1\n300,0\n")
    lengths = read_histogram(path)
    assert (lengths.tokens.tolist(), lengths.counts.tolist()) == ([100, 200], [4, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens,count\n100,x\n", "line 2: count is 'x'"),
        ("tokens,count\n100,-1\n", "line 2: count is '-1'"),
        ("100,1\n0,1\n", "line 2: tokens is '0'"),
        ("100,1\nnan,1\n", "line 2: tokens is 'nan'"),
        ("100,1\n5,1,1\n", "line 2: 3 fields"),
        ("tokens,count\n", "no request is counted"),
        ("", "no request is counted"),
        ("100,0\n", "no request is counted"),
    ],
)
def test_malformed_histogram_is_named_by_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_histogram(path)


def write_trace(path: Path, *lines: object, heading: bool = True) -> Path:
    header = [{"name": "made", "block_size": None}] if heading else []
    text = "".join(json.dumps(line) + "\n" for line in [*header, *lines])
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def requests_of(*lengths: tuple[int, int]) -> list[dict[str, float]]:
    return [{"ts": place, "in": prompt, "out": output} for place, (prompt, output) in enumerate(lengths)]


@pytest.mark.parametrize("heading", [True, False])
@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_trace_counts_ends_once_and_steps_by_their_number(tmp_path: Path, name: str, heading: bool) -> None:
    lines = requests_of((3, 2), (4, 1), (9, 0))
    trace = read_trace(write_trace(tmp_path / name, *lines, heading=heading))
    assert (trace.final.tokens.tolist(), trace.final.counts.tolist()) == ([5, 9], [2, 1])
    # the first holds 3 tokens at one step and 4 at the next, the second 4, the third 9
    assert (trace.held.tokens.tolist(), trace.held.counts.tolist()) == ([3, 4, 9], [1, 2, 1])


FORMS = {
    "mooncake.jsonl": json.dumps(
        {"timestamp": 1, "input_length": 600, "output_length": 40, "hash_ids": [1, 2]}
    ),
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,600,40",
    "measured.jsonl": json.dumps({"input_toks": 600, "output_toks": 40, "arrival_time": 1.0}),
    "custom.jsonl": json.dumps({"prompt": "a" * 2400, "output_tokens": 40}),
    "sharegpt.json": json.dumps([{"conversations": [{"value": "a" * 2400}, {"value": "b" * 160}]}]),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_that_a_replay_reads_is_one_of_lengths(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FORMS[name])
    trace = read_trace(tmp_path / name)
    assert (trace.final.tokens.tolist(), trace.held.total) == ([640], 40)
    found = plan("llama-3.1-8b", num_blocks=1000, trace=tmp_path / name)
    assert found.lengths is not None
    assert found.lengths["max"] == 640


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"ts": 0, "in": 3}], "line 2: out is missing"),
        (requests_of((0, 1)), "line 2: prompt_tokens is 0"),
        ([*requests_of((3, 1)), {"ts": 0, "in": 1.5, "out": 1}], "line 3: in is 1.5"),
        ([{"ts": 0, "in": True, "out": 1}], "line 2: in is True"),
        ([[1, 2]], "line 2: is "),
        ([], "holds no request"),
    ],
)
def test_malformed_trace_is_named_by_line_and_field(
    tmp_path: Path, lines: list[object], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write_trace(tmp_path / "trace.jsonl", *lines))


def test_a_request_that_no_pool_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a request has 100,000,001 tokens: allowed is at most 8,388,608"):
        read_trace(write_trace(tmp_path / "trace.jsonl", *requests_of((1, 10**8))))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace is '.*nowhere', which cannot be read"):
        read_trace(tmp_path / "nowhere")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(TraceError, match=r"cut.gz, line 1: cannot be decompressed"):
        read_trace(tmp_path / "cut.gz")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="which is no text"):
        read_histogram(tmp_path / "binary")
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(TraceError, match="line 1: is no JSON"):
        read_trace(tmp_path / "text")


@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared/traces is not there")
def test_public_traces_are_read() -> None:
    paths = sorted(TRACES.glob("*.jsonl.gz"))
    assert len(paths) >= 6
    conversation = read_trace(TRACES / "azure2023_conv.jsonl.gz")
    assert conversation.final.total == 19_366
    for path in paths:
        assert read_trace(path).held.total > 0
