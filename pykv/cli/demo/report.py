"""The demo's numbers, from what the clients saw and what the daemon counted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["ChatResult", "Peak", "summarize", "waste_percent"]


@dataclass(frozen=True)
class ChatResult:
    """One chat as its client saw it.

    Attributes:
        prompt_tokens: tokens of the prompt, template included.
        cached_tokens: those of them whose keys and values came from the cache.
        output_tokens: tokens that were generated, the one that ends the answer included.
        first_token_seconds: from sending the request to its first token (TTFT).
        total_seconds: from sending the request to its end.
    """

    question: str
    answer: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_seconds: float
    total_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this chat over its whole time."""
        return self.output_tokens / self.total_seconds


@dataclass(frozen=True)
class Peak:
    """The cache at the moment of the run when most blocks were in use.

    Attributes:
        blocks: different blocks that the running sequences used.
        tokens: different tokens in those blocks; one that several sequences share counts once.
        table_blocks: the lengths of their block tables in sum: the blocks that they would use unshared.
        table_tokens: their lengths in sum: a shared token counts once for each sequence.
        sequences: those sequences.
    """

    blocks: int
    tokens: int
    table_blocks: int
    table_tokens: int
    sequences: int

    @classmethod
    def from_stats(cls, stats: Mapping[str, float]) -> "Peak":
        """Reads the snapshot that the scheduler keeps of its peak."""
        return cls(
            blocks=int(stats["peak_blocks_active"]),
            tokens=int(stats["peak_tokens_held"]),
            table_blocks=int(stats["peak_table_blocks"]),
            table_tokens=int(stats["peak_table_tokens"]),
            sequences=int(stats["peak_num_sequences"]),
        )


def waste_percent(allocated_slots: int, filled_slots: int) -> float:
    """Allocated slots that hold no token, as a share of the allocated slots, in percent."""
    return 100 * (allocated_slots - filled_slots) / allocated_slots if allocated_slots else 0.0


def summarize(
    results: Sequence[ChatResult], seconds: float, peak: Peak, *, block_size: int, context_cap: int
) -> dict[str, int | float]:
    """The demo's last line.

    Args:
        results: the chats, all ended.
        seconds: from the first request to the end of the last.
        peak: the cache at its fullest.
        block_size: slots a block.
        context_cap: slots that a contiguous allocator would reserve for each sequence.
    """
    output_tokens = sum(result.output_tokens for result in results)
    return {
        "requests": len(results),
        "prompt_tokens": sum(result.prompt_tokens for result in results),
        "cached_tokens": sum(result.cached_tokens for result in results),
        "output_tokens": output_tokens,
        "ttft_p50_ms": round(1000 * median(result.first_token_seconds for result in results), 1),
        "tokens_per_second": round(output_tokens / seconds, 1),
        "kv_blocks_peak": peak.blocks,
        "kv_blocks_peak_unshared": peak.table_blocks,
        "kv_waste_pct": round(waste_percent(peak.blocks * block_size, peak.tokens), 2),
        "kv_waste_pct_contiguous": round(waste_percent(peak.sequences * context_cap, peak.table_tokens), 2),
    }
