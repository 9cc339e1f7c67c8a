"""Junk in any field of any form gives an error that names the file, the line and what is wrong; nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykv.errors import TraceError
from pykv.simulator.measured_run import read_measured_run
from pykv.simulator.trace import read_trace

OWN = {"ts": 1.5, "in": 64, "out": 3, "s": "a", "h": [[0, 4]]}
MOONCAKE = {"timestamp": 1, "input_length": 700, "output_length": 3, "hash_ids": [7, 9], "session_id": 4}
MEASURED = {"input_toks": 5, "output_toks": 5, "arrival_time": 1.0}
MEASURED |= {"queued_ts": 0.0, "first_token_ts": 1.0, "last_token_ts": 2.0}
CUSTOM = {"prompt": "What is it?", "output_tokens": 5}
HEADER = {"name": "x", "block_size": 16}
FORMS = {"own": OWN, "mooncake": MOONCAKE, "measured": MEASURED, "custom": CUSTOM}

JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.sampled_from([2**30, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, -1, 0]),
        st.floats(),
        st.text(max_size=5),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)
PLACES = [(form, field) for form, row in FORMS.items() for field in row]


def lines_of(form: str, row: dict[str, Any]) -> list[str]:
    before = [HEADER] if form == "own" else []
    # The first line tells the form: it stays whole.
    return [json.dumps(line) for line in [*before, FORMS[form], row]]


@pytest.mark.parametrize(("form", "field"), PLACES)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(junk=JUNK)
def test_junk_in_a_field_is_read_or_refused_with_its_line(
    form: str, field: str, junk: object, tmp_path: Path
) -> None:
    path = tmp_path / "trace.requests.jsonl"
    lines = lines_of(form, {**FORMS[form], field: junk})
    path.write_text("\n".join(lines))
    try:
        assert read_trace(path).num_requests == 2
    except TraceError as error:
        assert f"{path.name}, line {len(lines)}: " in str(error), error  # noqa: PT017
    if form == "measured":
        try:
            read_measured_run(path)
        except TraceError as error:
            assert f"{path.name}, line {len(lines)}: " in str(error), error  # noqa: PT017


@pytest.mark.parametrize(("form", "field"), PLACES)
def test_a_field_of_a_type_that_no_form_knows_is_named(form: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.requests.jsonl"
    lines = lines_of(form, {**FORMS[form], field: {"a": 1}})
    path.write_text("\n".join(lines))
    with pytest.raises(TraceError, match=rf"trace.requests.jsonl, line {len(lines)}: {field} is "):
        read_measured_run(path) if form == "measured" else read_trace(path)


@pytest.mark.parametrize("session", [[1], 1.5, True, {}])
def test_a_session_that_is_no_name_is_refused(session: object, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines_of("own", {**OWN, "s": session})))
    with pytest.raises(TraceError, match=r"line 3: s is .*: allowed are null, a text or a whole number"):
        read_trace(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.integers(0, 2),
    junk=st.text(max_size=8) | st.sampled_from(["1e9", "2023-11-16 18:15:46.1e5", "\x00", '"', "9" * 30]),
)
def test_junk_in_a_table_is_read_or_refused_with_its_line(place: int, junk: str, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    fields = ["2023-11-16 18:15:46.68", "374", "44"]
    fields[place] = junk
    content = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n" + ",".join(fields)
    path.write_bytes(content.encode(errors="surrogatepass"))
    try:
        read_trace(path)
    except TraceError as error:
        assert "azure.csv, line " in str(error)  # noqa: PT017


@pytest.mark.parametrize("conversation", [[], 5, {"conversations": 5}, {"conversations": [{"value": [1]}]}])
def test_junk_in_a_conversation_is_refused_with_its_number(conversation: object, tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    whole = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    path.write_text(json.dumps([whole, conversation]))
    with pytest.raises(TraceError, match=r"sharegpt.json, line 2: conversations is wrong"):
        read_trace(path)


@pytest.mark.parametrize(
    "junk", [{"engine_kwargs": [1]}, {"kv_cache": {"block_size": "16"}}, {"kv_cache": 5}]
)
def test_junk_beside_a_measured_run_is_named(junk: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.requests.jsonl"
    path.write_text(json.dumps(MEASURED))
    (tmp_path / "run.meta.json").write_text(json.dumps(junk))
    with pytest.raises(TraceError, match=r"run.meta.json: (engine_kwargs|block_size|kv_cache) is"):
        read_measured_run(path)
