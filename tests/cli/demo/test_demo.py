"""The demo from its start to its last line, as in `make demo`, with nobody at the keyboard."""

import json
import os
import subprocess
import sys

import pytest

from pykv.cli.demo.chats import QUESTIONS

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def lines() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pykv.cli.demo"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def summary(lines: list[str]) -> dict[str, float]:
    return json.loads(lines[-1])


def answer(lines: list[str], chat: int) -> str:
    mark = f"[{chat}] "
    return " ".join(line.removeprefix(mark) for line in lines if line.startswith(mark) and "] ?" not in line)


def test_answers_make_sense(lines: list[str]) -> None:
    assert (
        answer(lines, QUESTIONS.index("What is the capital of France?") + 1)
        == "The capital of France is Paris."
    )
    assert "Mars" in answer(lines, QUESTIONS.index("Which planet is known as the Red Planet?") + 1)


def test_all_but_one_chat_take_the_shared_prompt_from_the_cache(summary: dict[str, float]) -> None:
    prompt_tokens = summary["prompt_tokens"] / summary["requests"]
    assert summary["requests"] == 4
    assert prompt_tokens > 400
    # The questions take less than two blocks of each prompt.
    assert summary["cached_tokens"] >= 3 * BLOCK_SIZE * (prompt_tokens // BLOCK_SIZE - 2)


def test_paging_and_sharing_save_memory(summary: dict[str, float]) -> None:
    assert summary["kv_blocks_peak"] < summary["kv_blocks_peak_unshared"] / 2
    assert 0 <= summary["kv_waste_pct"] < 15
    assert summary["kv_waste_pct_contiguous"] > 80
    assert summary["tokens_per_second"] > 0
    assert summary["ttft_p50_ms"] > 0
