"""The packed forward gives the logits of the whole sequence, however it is cut into steps and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pykv import KvPool, StepError
from pykv.models import CausalModel, StepContext
from pykv.models.gate import admit

LENGTHS = (1, 6, 7, 8, 9, 15, 16, 17)
WINDOW = 8


@dataclass
class Sequences:
    """Token lists over one pool, their blocks dealt out in disorder."""

    model: CausalModel
    pool: KvPool
    tokens: list[list[int]]
    tables: torch.Tensor
    done: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.done = [0] * len(self.tokens)

    def step(self, counts: Sequence[int], **options: Any) -> list[torch.Tensor]:
        """Runs the next `counts` tokens of each sequence; the logits of each that has any."""
        rows = [row for row, count in enumerate(counts) if count]
        taken = [(row, p) for row in rows for p in range(self.done[row], self.done[row] + counts[row])]
        size = self.pool.block_size
        slots = [int(self.tables[row, p // size]) * size + p % size for row, p in taken]
        starts = torch.tensor([0, *(counts[row] for row in rows)]).cumsum(0)
        for row in rows:
            self.done[row] += counts[row]
        context = StepContext(
            self.pool,
            slot_mapping=torch.tensor(slots),
            block_tables=self.tables,
            seq_lens=torch.tensor([self.done[row] for row in rows], dtype=torch.int32),
            query_starts=starts.to(torch.int32),
            table_rows=torch.tensor(rows, dtype=torch.int32),
            **options,
        )
        token_ids = torch.tensor([self.tokens[row][p] for row, p in taken])
        positions = torch.tensor([p for _, p in taken])
        logits = self.model.forward(token_ids, positions, torch.arange(len(taken)), context)
        assert context.num_attention_calls == self.model.layout.num_layers
        return list(logits.split([counts[row] for row in rows]))


def start(model: CausalModel, lengths: Sequence[int], room: int, block_size: int) -> Sequences:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(2, 190, (length,), generator=generator).tolist() for length in lengths]
    blocks_each = -(-room // block_size)
    num_blocks = 1 + blocks_each * len(lengths)
    tables = 1 + torch.randperm(num_blocks - 1, generator=generator).view(len(lengths), blocks_each)
    pool = KvPool(model.layout, num_blocks, block_size, model.dtype)
    for cache in (*pool.key_caches, *pool.value_caches):
        cache.fill_(torch.nan)
    return Sequences(model, pool, tokens, tables.to(torch.int32))


def whole_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("chunk", [1, 5, 17])
def test_windowed_prefill_in_chunks_then_decode(make_model: Any, block_size: int, chunk: int) -> None:
    model = admit(make_model("gemma3_text", sliding_window=WINDOW), name="tiny")
    sequences = start(model, LENGTHS, room=48, block_size=block_size)
    logits: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for _ in range(25):
        counts = [
            max(1, min(chunk, len(tokens) - done))
            for tokens, done in zip(sequences.tokens, sequences.done, strict=True)
        ]
        for row, found in enumerate(sequences.step(counts)):
            logits[row].append(found)
            if sequences.done[row] == len(sequences.tokens[row]):
                sequences.tokens[row].append(int(found[-1].argmax()))
    reference = make_model("gemma3_text", sliding_window=WINDOW)
    reference.set_attn_implementation("eager")
    for tokens, done, parts in zip(sequences.tokens, sequences.done, logits, strict=True):
        assert done > WINDOW
        torch.testing.assert_close(
            torch.cat(parts), whole_logits(reference, tokens[:done]), atol=2e-4, rtol=1e-4
        )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma4_text", "deepseek_v3"])
def test_greedy_tokens_are_those_of_generate(make_model: Any, family: str) -> None:
    reference = make_model(family)
    model = admit(make_model(family), name=family)
    sequences = start(model, (3, 11), room=24, block_size=4)
    prompts = [list(tokens) for tokens in sequences.tokens]
    counts = [len(tokens) for tokens in prompts]
    for _ in range(8):
        for row, found in enumerate(sequences.step(counts)):
            sequences.tokens[row].append(int(found[-1].argmax()))
        counts = [1, 1]
    for prompt, tokens in zip(prompts, sequences.tokens, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert tokens == expected[0].tolist()


def test_tokens_of_a_bfloat16_model_keep_close_to_its_own(make_model: Any) -> None:
    reference = make_model("llama", torch.bfloat16)
    model = admit(make_model("llama", torch.bfloat16), name="llama")
    sequences = start(model, (20,), room=24, block_size=4)
    found = torch.cat([sequences.step([10])[0], sequences.step([10])[0]])
    assert found.dtype == torch.float32
    expected = whole_logits(reference, sequences.tokens[0]).float()
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error < 0.03


def test_a_prefix_that_is_already_in_the_pool_is_read_not_written(make_model: Any) -> None:
    model = admit(make_model("llama"), name="llama")
    sequences = start(model, (12, 12), room=16, block_size=4)
    sequences.tokens[1][:8] = sequences.tokens[0][:8]
    sequences.step([12, 0])
    sequences.tables[1, :2] = sequences.tables[0, :2]
    sequences.done[1] = 8
    shared = [cache[sequences.tables[0, :2].long()].clone() for cache in sequences.pool.key_caches]
    (found,) = sequences.step([0, 4])
    expected = whole_logits(make_model("llama"), sequences.tokens[1])[8:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for cache, before in zip(sequences.pool.key_caches, shared, strict=True):
        assert torch.equal(cache[sequences.tables[0, :2].long()], before)


def test_only_the_wanted_logits_come_back_and_may_be_changed(make_model: Any) -> None:
    model = admit(make_model("llama"), name="llama")
    sequences = start(model, (6,), room=8, block_size=4)
    context = StepContext(
        sequences.pool,
        slot_mapping=sequences.tables[0, 0] * 4 + torch.arange(3),
        block_tables=sequences.tables,
        seq_lens=torch.tensor([3], dtype=torch.int32),
        query_starts=torch.tensor([0, 3], dtype=torch.int32),
        backend="torch",
    )
    tokens = torch.tensor(sequences.tokens[0][:3])
    logits = model.forward(tokens, torch.arange(3), torch.tensor([2, 2, 0]), context)
    expected = whole_logits(make_model("llama"), sequences.tokens[0][:3])
    torch.testing.assert_close(logits, expected[[2, 2, 0]], atol=1e-4, rtol=1e-4)
    logits[:] = 0
    nothing = model.forward(tokens, torch.arange(3), torch.tensor([], dtype=torch.int64), context)
    assert nothing.shape == (0, 199)


def test_model_called_without_a_step_says_so(make_model: Any) -> None:
    module = admit(make_model("llama"), name="llama").module
    with pytest.raises(StepError, match=r"needs a step.*set_attn_implementation\('sdpa'\)"):
        module(input_ids=torch.tensor([[1, 2]]))


def test_thread_count_is_left_alone(make_model: Any) -> None:
    before = torch.get_num_threads()
    admit(make_model("llama"), name="llama")
    assert torch.get_num_threads() == before
