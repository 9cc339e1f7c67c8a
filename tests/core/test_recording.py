"""A run that is recorded decides the same when it is replayed, and what is no recording is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pykv.errors import RecordingError
from pykv.recording import replay_recording
from pykv.scheduler import OUTCOME_OK, Scheduler, SchedulerConfig, StepBuffers


def record_run(path: Path) -> int:
    config = SchedulerConfig(
        num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=40
    )
    scheduler = Scheduler(config)
    buffers = StepBuffers(config)
    steps = 0
    with scheduler.record(path):
        for num_samples in (1, 2, 1):
            scheduler.submit(np.arange(11, dtype=np.int32), max_tokens=20, num_samples=num_samples)
        while (plan := scheduler.plan(buffers, float(steps))) is not None:
            scheduler.apply(
                plan, np.arange(plan.num_samples), np.full(plan.num_samples, OUTCOME_OK, np.uint8)
            )
            steps += 1
    return steps


def test_a_run_decides_the_same_again(tmp_path: Path) -> None:
    steps = record_run(tmp_path / "run.pykv")
    replayed = replay_recording(tmp_path / "run.pykv")
    assert replayed.num_plans == steps + 1
    assert replayed.num_calls == 3 + 2 * steps + 1


def test_a_changed_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pykv"
    record_run(path)
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"call \d+ \(Plan\) decided otherwise"):
        replay_recording(path)


@pytest.mark.parametrize("content", [b"", b"not a recording at all", b"pykv-recording-6\xff\xff"])
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.pykv"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="byte"):
        replay_recording(path)


def as_number(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80]) + as_number(value >> 7) if value > 0x7F else bytes([value])


def test_a_recording_that_asks_for_absurd_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pykv"
    record_run(path)
    content = path.read_bytes()
    magic = b"pykv-recording-6"
    assert content.startswith(magic + as_number(20))
    path.write_bytes(magic + as_number(2**28) + content[len(magic) + 1 :])
    with pytest.raises(RecordingError, match=r"ask for \d+ bytes of memory: allowed are 4294967296"):
        replay_recording(path)


def test_a_recording_must_see_every_call(tmp_path: Path) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=20))
    scheduler.submit([1])
    with pytest.raises(RecordingError, match="before the first call"):
        scheduler.record(tmp_path / "run.pykv")
    assert not (tmp_path / "run.pykv").exists()


def test_a_second_recording_is_refused_while_the_first_is_open(tmp_path: Path) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=20))
    with scheduler.record(tmp_path / "run.pykv"):
        with pytest.raises(RecordingError, match="is being recorded"):
            scheduler.record(tmp_path / "run.pykv")
        scheduler.submit([1])
    assert replay_recording(tmp_path / "run.pykv").num_calls == 1


def test_a_file_that_cannot_be_written_leaves_the_scheduler_unrecorded(tmp_path: Path) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=20))
    with pytest.raises(FileNotFoundError):
        scheduler.record(tmp_path / "missing" / "run.pykv")
    with pytest.raises(RecordingError, match=r"path is .*ud800.: allowed is a path"):
        scheduler.record("\ud800")
    with scheduler.record(tmp_path / "run.pykv"):
        scheduler.submit([1])
    assert replay_recording(tmp_path / "run.pykv").num_calls == 1


def test_a_refused_recording_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.pykv"
    scheduler = Scheduler(SchedulerConfig(num_blocks=64))
    with scheduler.record(path):
        scheduler.submit([7, 8, 9], max_tokens=2)
    before = path.read_bytes()
    with pytest.raises(RecordingError, match="used already"):
        scheduler.record(path)
    assert path.read_bytes() == before
    with Scheduler(SchedulerConfig(num_blocks=64)).record(path):
        pass
    assert replay_recording(path).num_calls == 0
