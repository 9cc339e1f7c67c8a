"""Every public form is read, and what is wrong in a file is named with its line and field."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pykv
from pykv.errors import ConfigError, TraceError
from pykv.simulator.replay import Replayer
from pykv.simulator.trace import read_trace

WriteTrace = Callable[..., Path]

AGENTS = Path(__file__).parents[2] / "examples/traces/agents.jsonl"
OWN = '{"name": "x", "block_size": 16}\n'
MOONCAKE = '{"timestamp": 1000, "input_length": 1500, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def hits_in_full(path: Path) -> tuple[int, int]:
    """What a cache that forgets nothing finds, of how many blocks."""
    hits = read_trace(path).native.replay_infinite()
    return hits.blocks, hits.queried_blocks


def write(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content)
    return folder / name


def test_own_form_is_read_compressed_or_not(write_trace: WriteTrace) -> None:
    requests = [(0.0, 64, 8, "a", [[0, 4]]), (1.5, 80, 8, None, [[0, 4], [9, 1]])]
    plain, compressed = write_trace(requests), write_trace(requests, name="trace.jsonl.gz")
    assert hits_in_full(plain) == hits_in_full(compressed) == (4, 9)
    trace = read_trace(plain)
    assert (trace.name, trace.block_size, trace.has_blocks, trace.num_requests) == ("small", 16, True, 2)


def test_mooncake_is_read_whatever_its_hashes_and_order(tmp_path: Path) -> None:
    later = {"timestamp": 9000, "input_length": 1025, "output_length": 1, "hash_ids": [2**62, 2**62 + 1, 5]}
    earlier = {"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [2**62, 2**62 + 1]}
    path = write(tmp_path, "m.jsonl", "".join(json.dumps(row) + "\n" for row in (later, earlier, later)))
    assert hits_in_full(path) == (2 + 3, 8)
    timed = pykv.replay(path, num_blocks=8, cost="constant:1").timed
    assert timed is not None
    assert timed.seconds == 6 + 1  # the second of the twins shares what the first computes in the same step


def test_hashes_give_the_same_hits_as_dense_numbers(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in AGENTS.read_text().splitlines()[1:]]
    rng = np.random.default_rng(3)
    hashes = rng.permutation(2**40 + np.arange(10_000) * 12_345).tolist()
    lines = []
    for row in rows:
        blocks = [block for start, length in row["h"] for block in range(start, start + length)]
        tokens = (len(blocks) - 1) * 512 + 1
        line = {"timestamp": 1000 * row["ts"], "input_length": tokens, "output_length": 1}
        lines.append([json.dumps({**line, "hash_ids": ids}) for ids in (blocks, [hashes[b] for b in blocks])])
    dense, sparse = (
        Replayer(read_trace(write(tmp_path, f"{name}.jsonl", "\n".join(column)))).run(
            serial=True, num_blocks=200
        )
        for name, column in zip(("m", "n"), zip(*lines, strict=True), strict=True)
    )
    assert dense.hit_rate_blocks == sparse.hit_rate_blocks > 0.1
    assert dense.hit_rate_opt == sparse.hit_rate_opt


def test_azure_is_read_to_the_tenth_of_a_microsecond(tmp_path: Path) -> None:
    lines = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
    path = write(tmp_path, "a.csv", AZURE + "\n".join(lines))
    trace = read_trace(path)
    assert (trace.num_requests, trace.has_blocks) == (2, False)
    timed = pykv.replay(path, num_blocks=99, cost="constant:0.001").timed
    assert timed is not None
    assert timed.seconds == pytest.approx(4.314579 + 0.109, abs=1e-6)
    assert hits_in_full(path) == (0, 0)


def test_prompts_of_vllms_benchmarks_are_cut_into_blocks(tmp_path: Path) -> None:
    system = "You are a helpful assistant. " * 8  # 232 characters: 3 whole blocks of 64
    rows = [
        {"prompt": system + question, "output_tokens": 7} for question in ("Why?", "How so, and since when?")
    ]
    path = write(tmp_path, "custom.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert hits_in_full(path) == (3, 8)
    assert read_trace(path, request_rate=2.0).block_size == 16


def test_a_conversation_grows_turn_by_turn_and_its_times_depend_on_the_seed_alone(tmp_path: Path) -> None:
    turns = [{"from": who, "value": who * 100} for who in ("human", "gpt", "human", "gpt")]
    path = write(tmp_path, "sharegpt.json", json.dumps([{"id": "a", "conversations": turns}] * 3))
    found, asked = hits_in_full(path)
    assert (found, asked) == (2 * (8 + 21) + 7, 3 * (8 + 21))
    seconds = [
        Replayer(read_trace(path, seed=seed)).run(num_blocks=99, cost="constant:0.001").timed.seconds  # type: ignore[union-attr]
        for seed in (1, 1, 2)
    ]
    assert seconds[0] == seconds[1] != seconds[2]


def test_a_measured_run_is_a_trace(tmp_path: Path) -> None:
    row = {"input_toks": 100, "output_toks": 5, "arrival_time": 1e9}
    path = write(tmp_path, "run.requests.jsonl", json.dumps(row) + "\n" + json.dumps(row))
    assert read_trace(path).num_requests == 2


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    config = pykv.SchedulerConfig(num_blocks=40, block_size=4, max_model_len=40)
    scheduler, buffers = pykv.Scheduler(config), pykv.StepBuffers(config)
    with scheduler.record(tmp_path / "run.pykv"):
        for second in range(3):
            scheduler.submit(np.arange(9, dtype=np.int32), max_tokens=4, tenant=b"a")
            plan = scheduler.plan(buffers, float(second))
            assert plan is not None
            scheduler.apply(plan, np.zeros(plan.num_samples, np.int64), np.zeros(plan.num_samples, np.uint8))
    result = pykv.replay(tmp_path / "run.pykv", num_blocks=39, cost="constant:0.1")
    assert (result.num_requests, result.block_size, result.hit_rate_infinite) == (3, 4, 6 / 9)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "is empty"),
        ("header.jsonl", OWN, "holds no request"),
        ("size.jsonl", '{"name": "x", "block_size": 0}\n', "line 1: block_size is 0"),
        ("unknown.jsonl", '{"a": 1}\n', r"line 1: the fields \['a'\] are of no known form"),
        ("text.jsonl", "hello\n", "line 1: is no JSON"),
        ("list.jsonl", "[1, 2]\n", "of no known form"),
        ("number.jsonl", "5\n", "line 1: is 5: allowed is a JSON object"),
        ("binary.jsonl", "\udcff\udcfe\n", "line 1: byte 0 is no UTF-8"),
        ("in.jsonl", OWN + '{"ts": 0, "out": 1}\n', "line 2: in is missing"),
        ("in2.jsonl", OWN + '{"ts": 0, "in": true, "out": 1}\n', "line 2: in is True"),
        ("in3.jsonl", OWN + '{"ts": 0, "in": 0, "out": 1}\n', "line 2: prompt_tokens is 0"),
        ("out.jsonl", OWN + '{"ts": 0, "in": 5, "out": -1}\n', "line 2: out is -1"),
        (
            "huge.jsonl",
            OWN + '{"ts": 0, "in": 99999999999, "out": 1}\n',
            "line 2: prompt_tokens is 99999999999",
        ),
        ("ts.jsonl", OWN + '{"ts": NaN, "in": 5, "out": 1}\n', "line 2: ts is nan"),
        ("h.jsonl", OWN + '{"ts": 0, "in": 5, "out": 1, "h": [3]}\n', "line 2: h is"),
        (
            "h2.jsonl",
            OWN + '{"ts": 0, "in": 5, "out": 1, "h": [[0, 2]]}\n',
            "line 2: blocks is 2 blocks: allowed is at",
        ),
        ("h3.jsonl", OWN + '{"ts": 0, "in": 5, "out": 1, "h": [[-4, 1]]}\n', "line 2: 1 blocks from -4 on"),
        ("h4.jsonl", OWN + '{"ts": 0, "in": 5, "out": 1, "h": [[1e3, 1]]}\n', "line 2: h is"),
        (
            "h5.jsonl",
            OWN + f'{{"ts": 0, "in": 5, "out": 1, "h": [[{2**70}, 1]]}}\n',
            f"line 2: 1 blocks from {2**70} on: allowed is",
        ),
        (
            "h7.jsonl",
            OWN + f'{{"ts": 0, "in": 5, "out": 1, "h": [[{2**63 - 1}, 2]]}}\n',
            f"line 2: 2 blocks from {2**63 - 1} on",
        ),
        ("in4.jsonl", OWN + f'{{"ts": 0, "in": {2**70}, "out": 1}}\n', f"line 2: in is {2**70}"),
        ("in5.jsonl", OWN + f'{{"ts": 0, "in": {"9" * 5000}, "out": 1}}\n', "line 2: is no JSON"),
        ("columns.csv", "time,in,out\n1,2,3\n", "line 1: the columns 'time,in,out' are of no known form"),
        ("e.csv", AZURE + f"2023-11-16 18:15:46,{'9' * 5000},5\n", "line 2: ContextTokens is"),
        ("ids3.jsonl", MOONCAKE.replace("[7,", "[-7,"), "line 1: 1 blocks from -7 on"),
        ("h6.jsonl", OWN + '{"ts": 0, "in": 5, "out": 1, "h": [[0, 0]]}\n', "line 2: 0 blocks from 0 on"),
        ("second.jsonl", MOONCAKE + "{\n", "line 2: is no JSON"),
        ("ids.jsonl", MOONCAKE.replace("[7, 8, 9]", '"7"'), "line 1: hash_ids is 7"),
        (
            "ids2.jsonl",
            MOONCAKE.replace("[7, 8, 9]", "[7, 8, 9, 10]"),
            "line 1: blocks is 4 blocks: allowed is at most",
        ),
        ("a.csv", AZURE + "yesterday,5,5\n", "line 2: TIMESTAMP is 'yesterday'"),
        ("b.csv", AZURE + "2023-11-16 18:15:46,x,5\n", "line 2: ContextTokens is 'x'"),
        ("c.csv", AZURE + "2023-11-16 18:15:46,5\n", "line 2: 2 fields"),
        ("d.jsonl", '{"prompt": 5}\n', "line 1: prompt is '5'"),
        ("e.json", '[{"conversations": [{"from": "human"}]}]', "line 1: conversations is wrong"),
        ("f.json", "[{", "line 1: is no JSON"),
        ("g.pykv", "pykv-recording-1", "g.pykv: the recording has format 1"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(TraceError, match=message) as raised:
        read_trace(tmp_path / name)
    assert name in str(raised.value)


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(AGENTS.read_bytes())[:-200])
    with pytest.raises(TraceError, match=r"t.jsonl.gz, line \d+: cannot be decompressed"):
        read_trace(path)


@pytest.mark.parametrize("seed", [-1, 1.5, True])
def test_a_seed_that_is_none_is_refused(seed: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"seed is {seed}: allowed is an integer from 0 to"):
        read_trace(write(tmp_path, "m.jsonl", MOONCAKE), seed=seed)


def test_a_rate_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="request_rate is 0"):
        read_trace(write(tmp_path, "m.jsonl", MOONCAKE), request_rate=0)


def test_the_examples_traces_are_what_their_script_makes(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, root / "examples/make_traces.py", tmp_path], check=True, capture_output=True
    )
    names = {path.name for path in (root / "examples/traces").iterdir()}
    assert names == {"agents.jsonl", "chats.csv"}
    for name in names:
        assert (tmp_path / name).read_bytes() == (root / "examples/traces" / name).read_bytes()
