"""The daemon as a process: its exit codes, what it prints, and how it ends."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pykv.client import Client
from pykv.sampling import SamplingParams
from pykv.service.loading import load_model
from pykv.service.main import main
from pykv.service.status import innermost

PROGRAM = Path(__file__).with_name("stub_daemon.py")


@contextmanager
def started(*arguments, environment=None):
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def ended(process, number=signal.SIGTERM):
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    return process.returncode, error


@pytest.fixture
def refused(load_stub, capfd, logging_as_it_was):
    """What a daemon says that does not start: `refused(*arguments)`."""

    def start(*arguments):
        code = main(arguments, {}, load_stub)
        out, error = capfd.readouterr()
        assert (code, out) == (2, "")
        return error

    return start


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block-size", "0"], ["--block-size", "'0'"]),
        (["--unknown"], ["--unknown"]),
        (["--host", "0.0.0.0"], ["--insecure-bind"]),
        (["--host", "no.such.host.invalid", "--insecure-bind"], ["no.such.host.invalid"]),
    ],
)
def test_bad_options_end_with_code_2_and_one_line(refused, arguments, words):
    error = refused(*arguments)
    assert error.startswith("pykv-serve: ")
    assert error.count("\n") == 1
    assert all(word in error for word in words)


def test_a_bad_config_file_ends_with_code_2_and_one_line(refused, tmp_path):
    path = tmp_path / "pykv.toml"
    for content in ("port = " + "1" * 5000, "port = " + "[" * 100_000, "port = 0x" + "1" * 5000):
        path.write_text(content)
        error = refused("--config", str(path))
        assert error.startswith("pykv-serve: ")
        assert error.count("\n") == 1
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused("--config", str(tmp_path / "pipe"))
    assert len(refused("--port", "9" * 100_000)) < 500


@pytest.mark.parametrize("place", ["nowhere/ready", "."])
def test_a_ready_file_that_cannot_be_written_is_refused_before_the_model_is_read(refused, tmp_path, place):
    error = refused("--port", "0", "--model", "nowhere", "--ready-file", str(tmp_path / place))
    assert error.startswith(f"pykv-serve: ready_file {tmp_path / place} cannot be written")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_ready_file_that_is_no_file_is_left_alone(refused, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        error = refused("--port", "0", "--model", "nowhere", "--ready-file", str(tmp_path / name))
        assert error.startswith(f"pykv-serve: ready_file {tmp_path / name} is no regular file")
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link"}


def test_the_ready_file_of_a_run_before_is_gone_while_the_model_is_read(
    tmp_path, load_stub, logging_as_it_was
):
    path, found = tmp_path / "ready", []
    path.write_text("127.0.0.1:1\n")

    def load(options, tell):
        found.append(path.exists())
        return load_stub(replace(options, model="nowhere"), tell)

    assert main(["--port", "0", "--ready-file", str(path)], {}, load) == 2
    assert found == [False]
    assert not path.exists()


def test_a_ready_file_that_cannot_be_removed_is_refused(refused, tmp_path, monkeypatch):
    path, unlink = tmp_path / "ready", Path.unlink
    path.write_text("127.0.0.1:1\n")

    def only_others(file, missing_ok=False):
        if file == path:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", only_others)
    error = refused("--port", "0", "--model", "nowhere", "--ready-file", str(path))
    assert error.startswith(f"pykv-serve: ready_file {path} cannot be removed: Operation not permitted")
    assert error.count("\n") == 1


def test_a_daemon_whose_port_is_taken_leaves_the_ready_file_to_who_has_it(refused, tmp_path):
    path = tmp_path / "ready"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path.write_text(f"127.0.0.1:{port}\n")
        assert "in use" in refused("--port", str(port), "--ready-file", str(path))
    assert path.read_text() == f"127.0.0.1:{port}\n"


@pytest.mark.parametrize("is_others", [False, True])
def test_the_ready_file_goes_with_its_daemon_and_no_other(tmp_path, is_others):
    path = tmp_path / "ready"
    path.write_text("127.0.0.1:1\n")
    with started("--port", "0", "--ready-file", str(path)) as process:
        line = process.stdout.readline()
        assert path.read_text() == f"{line.split()[-1]}\n"
        if is_others:
            path.write_text("127.0.0.1:1\n")
        assert ended(process)[0] == 0
    assert path.exists() == is_others
    assert not (tmp_path / "ready.part").exists()


@pytest.mark.parametrize(
    ("model", "word"), [("nowhere", "in two places"), ("too large", "1 TiB"), ("no room", "more blocks")]
)
def test_a_model_that_cannot_be_served_ends_with_code_2_and_one_line(refused, model, word):
    *logged, last = refused("--port", "0", "--model", model).splitlines()
    assert last.startswith("pykv-serve: ")
    assert word in last
    assert [json.loads(line)["event"] for line in logged] == ["loading model"]


def test_an_attention_backend_that_the_machine_cannot_run_ends_with_code_2(capfd, logging_as_it_was):
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("Triton's interpreter serves the CPU")
    options = ["--port", "0", "--device", "cpu", "--attention-backend", "triton"]
    assert main(options, {}, load_model) == 2
    out, error = capfd.readouterr()
    assert out == ""
    last = error.splitlines()[-1]
    assert last.startswith("pykv-serve: attention_backend is 'triton', but ")
    assert last.endswith("allowed for 'cpu' is 'torch', 'cpu'")


def test_a_port_in_use_ends_with_code_2_and_one_line_before_the_model_is_read(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = refused("--port", port, "--model", "nowhere")
    assert error.count("\n") == 1
    assert port in error
    assert "in use" in error


def test_a_missing_extra_is_told_before_the_model_is_loaded(refused, monkeypatch):
    monkeypatch.delitem(sys.modules, "pykv.service.kv_events.zmq_publisher", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    error = refused("--port", "0", "--kv-events-zmq", "tcp://127.0.0.1:*", "--model", "a bug")
    assert error.count("\n") == 1
    assert "--kv-events-zmq" in error
    assert "extra 'zmq'" in error


@pytest.mark.parametrize(("said", "expected"), [(None, "false"), ("true", "true")])
def test_tokenizers_make_no_thread_for_each_core_unless_they_are_told_to(
    load_stub, logging_as_it_was, monkeypatch, said, expected
):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    if said is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", said)
    with pytest.raises(ExceptionGroup):
        main(["--port", "0", "--model", "a bug"], {}, load_stub)
    assert os.environ["TOKENIZERS_PARALLELISM"] == expected


def test_a_bug_is_raised(load_stub, logging_as_it_was):
    with pytest.raises(ExceptionGroup) as raised:
        main(["--port", "0", "--model", "a bug"], {}, load_stub)
    assert isinstance(innermost(raised.value), ZeroDivisionError)


def test_collections_of_garbage_pass_over_what_the_model_brought():
    """Else each goes through all of torch's and transformers' objects and stops every stream meanwhile."""
    program = (
        "import gc; import pykv.service.main as program; from stub_engine import load;"
        "loaded = []; ring = lambda *a: loaded.append(loaded) or load(*a);"
        "seen = lambda: print(any(each is loaded for each in gc.get_objects()), gc.get_freeze_count());"
        "unfreeze = gc.unfreeze; gc.unfreeze = lambda: (gc.collect(), seen(), unfreeze(), seen());"
        "program.main(['--port', '0'], {}, ring)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=PROGRAM.parent, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    (served, num_frozen), (ended, num_left) = (line.split() for line in out.splitlines()[-2:])
    assert (served, ended) == ("False", "True")
    assert int(num_frozen) > 10_000
    assert int(num_left) < 1000


@pytest.mark.asyncio
async def test_a_daemon_says_where_it_serves_and_ends_on_a_signal_with_code_0(tmp_path):
    ready_file = tmp_path / "ready"
    with started("--port", "0", environment={"PYKV_READY_FILE": str(ready_file)}) as process:
        line = process.stdout.readline()
        assert line.startswith("pykv-serve ready on 127.0.0.1:")
        address = line.split()[-1]
        assert ready_file.read_text() == f"{address}\n"
        async with Client(address) as client:
            assert await client.health() == "SERVING"
            stream = client.generate([5], SamplingParams(max_tokens=2), request_id="mine")
            assert [delta.token_ids async for delta in stream]
            code, error = ended(process)
    assert code == 0
    logged = [json.loads(entry) for entry in error.splitlines()]
    served = next(entry for entry in logged if entry["event"] == "model served")
    assert (served["model"], served["kv_bytes_per_token"], served["num_blocks"]) == ("stub", 64, 1000)
    request = next(entry for entry in logged if entry["event"] == "request ended")
    assert (request["request_id"], request["output_tokens"]) == ("mine", 2)
    assert all({"timestamp", "level", "event"} <= entry.keys() for entry in logged)


@pytest.mark.asyncio
async def test_sigint_drains_and_a_second_one_hurries():
    with started("--port", "0", "--drain-timeout", "1000", "--model", "held") as process:
        address = process.stdout.readline().split()[-1]
        async with Client(address) as client:
            waiting = client.generate([5], timeout_seconds=60)
            step = asyncio.ensure_future(anext(waiting))
            while (await client.get_stats())["num_live_requests"] == 0:
                pass
            process.send_signal(signal.SIGINT)
            while process.poll() is None and "draining" not in process.stderr.readline():
                pass
            assert process.poll() is None
            code, _ = ended(process, signal.SIGINT)
            with pytest.raises(Exception, match="UNAVAILABLE"):
                await step
    assert code == 0


def test_a_signal_while_the_model_is_read_ends_the_daemon():
    with started("--port", "0", "--model", "slow") as process:
        while "loading model" not in process.stderr.readline():
            pass
        code, _ = ended(process)
    assert code == 0
