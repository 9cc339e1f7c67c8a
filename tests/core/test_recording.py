"""A run that is recorded decides the same when it is replayed, and what is no recording is refused."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from pykv.errors import PoisonedError, RecordingError
from pykv.recording import Recording, replay_recording
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
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"byte \d+ .* was damaged"):
        replay_recording(path)


def test_a_cut_recording_is_replayed_on_demand_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.pykv"
    record_run(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordingError, match=r"cut at byte \d+, without its end mark"):
        replay_recording(path)
    replayed = replay_recording(path, allow_cut=True)
    assert replayed.is_cut
    assert replayed.num_plans > 0
    with pytest.raises(RecordingError, match="allow_cut is 1"):
        replay_recording(path, allow_cut=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "byte 0"),
        (b"not a recording at all", "byte 0"),
        (b"pykv-recording-7\xff\xff", "cut"),
        (b"pykv-recording-6\xff\xff", "has format 6: this version reads format 7"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "run.pykv"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=problem):
        replay_recording(path)


def step(scheduler: Scheduler, buffers: StepBuffers) -> None:
    plan = scheduler.plan(buffers)
    if plan is not None:
        scheduler.apply(plan, np.zeros(plan.num_samples, np.int64), np.zeros(plan.num_samples, np.uint8))


BIG = SchedulerConfig(num_blocks=20_000, max_model_len=300_000, max_num_batched_tokens=300_000)
BIG_PROMPT = np.arange(200_000, dtype=np.int32)


class FullFile:
    """A file on a disk with room for so many bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self.file = path.open("ab", buffering=0)
        self.room = room

    def write(self, content: memoryview) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.file.write(content[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self.file.close()

    @property
    def closed(self) -> bool:
        return self.file.closed


def test_a_full_disk_stops_the_recording_and_hurts_no_step(tmp_path: Path) -> None:
    path = tmp_path / "run.pykv"
    scheduler, buffers = Scheduler(BIG), StepBuffers(BIG)
    recording = scheduler.record(path)
    recording._file.close()
    recording._file = FullFile(path, 2_000_000)  # type: ignore[assignment]
    for _ in range(12):
        scheduler.submit(BIG_PROMPT, max_tokens=1)
        step(scheduler, buffers)
    assert recording.closed
    with pytest.raises(RecordingError, match=r"stopped early and has no end, .*No space left"):
        recording.close()
    recording.close()
    with pytest.raises(RecordingError, match="cut at byte"):
        replay_recording(path)
    replayed = replay_recording(path, allow_cut=True)
    assert replayed.is_cut
    assert 0 < replayed.num_calls < 36


def test_a_stopped_recording_does_not_hide_the_error_of_its_block(tmp_path: Path) -> None:
    recording = Scheduler(SchedulerConfig(num_blocks=20)).record(tmp_path / "run.pykv")
    recording._file.close()
    recording._file = FullFile(tmp_path / "run.pykv", 0)  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError) as raised, recording:
        1 / 0  # noqa: B018
    assert "stopped early" in raised.value.__notes__[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_disk_that_is_full_from_the_start_is_told_at_once() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=20))
    with pytest.raises(OSError, match="No space left"):
        scheduler.record("/dev/full")
    scheduler.submit([1])


class ClosedMeanwhile(FullFile):
    """A file whose recording another thread closes while a chunk is written."""

    def __init__(self, path: Path, recording: Recording) -> None:
        super().__init__(path, 1 << 30)
        self.closer = threading.Thread(target=recording.close)

    def write(self, content: memoryview) -> int:
        if self.closer.ident is None:
            self.closer.start()
            self.closer.join(0.05)
        return super().write(content)


def test_closing_in_one_thread_does_not_fail_the_steps_of_another(tmp_path: Path) -> None:
    path = tmp_path / "run.pykv"
    scheduler, buffers = Scheduler(BIG), StepBuffers(BIG)
    recording = scheduler.record(path)
    recording._file.close()
    recording._file = file = ClosedMeanwhile(path, recording)  # type: ignore[assignment]
    for _ in range(3):
        scheduler.submit(BIG_PROMPT, max_tokens=1)
    step(scheduler, buffers)
    file.closer.join()
    assert 3 <= replay_recording(path).num_calls <= 5


def test_what_was_recorded_before_a_panic_can_be_replayed(tmp_path: Path) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=20))
    with scheduler.record(tmp_path / "run.pykv"):
        scheduler.submit([1])
        with pytest.raises(PoisonedError):
            scheduler._native._panic()
    assert replay_recording(tmp_path / "run.pykv").num_calls == 1


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
