"""The demo's numbers follow from what was counted."""

import pytest

from pykv.cli.demo.report import ChatResult, Peak, summarize, waste_percent

PEAK = Peak(blocks=10, tokens=140, table_blocks=25, table_tokens=380, sequences=2)


def result(first_token_seconds: float) -> ChatResult:
    return ChatResult("q", "a", "stop", 100, 64, 20, first_token_seconds, 2.0)


def test_waste_is_the_share_of_allocated_slots_that_hold_no_token() -> None:
    assert waste_percent(200, 150) == 25.0
    assert waste_percent(200, 200) == 0.0
    assert waste_percent(0, 0) == 0.0


def test_summary_has_the_promised_keys_in_order() -> None:
    summary = summarize([result(0.1)], 2.0, PEAK, block_size=16, context_cap=1000)
    assert list(summary) == [
        "requests",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "ttft_p50_ms",
        "tokens_per_second",
        "kv_blocks_peak",
        "kv_blocks_peak_unshared",
        "kv_waste_pct",
        "kv_waste_pct_contiguous",
    ]


def test_summary_adds_up_the_chats() -> None:
    summary = summarize([result(0.1), result(0.3), result(0.2)], 4.0, PEAK, block_size=16, context_cap=1000)
    assert (summary["requests"], summary["prompt_tokens"], summary["cached_tokens"]) == (3, 300, 192)
    assert summary["ttft_p50_ms"] == 200.0
    assert summary["tokens_per_second"] == 15.0


def test_waste_counts_shared_tokens_once_when_paged_and_for_each_when_contiguous() -> None:
    summary = summarize([result(0.1)], 2.0, PEAK, block_size=16, context_cap=1000)
    assert (summary["kv_blocks_peak"], summary["kv_blocks_peak_unshared"]) == (10, 25)
    assert summary["kv_waste_pct"] == 12.5  # 160 slots, 140 tokens
    assert summary["kv_waste_pct_contiguous"] == 81.0  # 2,000 slots, 380 tokens


def test_peak_is_read_by_the_schedulers_names() -> None:
    stats = {
        "peak_blocks_active": 10,
        "peak_tokens_held": 140,
        "peak_table_blocks": 25,
        "peak_table_tokens": 380,
        "peak_num_sequences": 2,
        "peak_num_running": 3,
        "blocks_total": 99,
    }
    assert Peak.from_stats(stats) == PEAK


def test_peak_that_the_daemon_does_not_report_is_an_error() -> None:
    with pytest.raises(KeyError, match="peak_blocks_active"):
        Peak.from_stats({"blocks_total": 99})
