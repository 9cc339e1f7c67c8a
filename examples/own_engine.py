"""An engine of your own: a decoder in plain torch with its own weights, KV tensors and sampler, scheduled by pykv.

The model runs twice: with `pykv.paged_attention`, and with an attention that is written here and reads the plan's block
tables itself. Both give the same tokens. Neither transformers nor `pykv.Engine` takes part.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

import pykv

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 400, 64, 3, 4, 2, 16


@dataclass
class Step:
    """One step's arrays as tensors: views, cut to the step's size."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    table_rows: Tensor
    block_tables: Tensor
    copy_pairs: Tensor
    sample_indices: Tensor

    @classmethod
    def of(cls, plan: pykv.Plan, step: pykv.StepBuffers) -> "Step":
        tokens, rows = plan.num_tokens, plan.num_batch_rows
        lengths = [
            tokens,
            tokens,
            tokens,
            rows + 1,
            rows,
            rows,
            len(step.block_tables),
            plan.num_copies,
            plan.num_samples,
        ]
        names = cls.__dataclass_fields__
        return cls(
            *(
                torch.from_numpy(getattr(step, name)[:length])
                for name, length in zip(names, lengths, strict=True)
            )
        )


Attention = Callable[[Tensor, Tensor, Tensor, Step], Tensor]


def with_pykv(query: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
    return pykv.paged_attention(
        query,
        keys,
        values,
        block_tables=step.block_tables,
        seq_lens=step.seq_lens,
        query_starts=step.query_starts,
        table_rows=step.table_rows,
    )


def written_here(query: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
    """Row after row: gathers the sequence's keys and values through its block table, then attends."""
    block_size = keys.shape[2]
    outputs = []
    for row in range(len(step.seq_lens)):
        length = int(step.seq_lens[row])
        new = query[step.query_starts[row] : step.query_starts[row + 1]].transpose(0, 1)
        table = step.block_tables[step.table_rows[row], : -(-length // block_size)].long()
        gathered = [
            cache[table].transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1) for cache in (keys, values)
        ]
        first = length - new.shape[1]  # the position of the row's first new token
        seen = torch.arange(length) <= torch.arange(first, length)[:, None]
        attended = scaled_dot_product_attention(new, *gathered, attn_mask=seen, enable_gqa=True)
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)


class Decoder:
    """Random weights: what it says makes no sense, but each token depends on all that came before it."""

    def __init__(self, attention: Attention, config: pykv.SchedulerConfig) -> None:
        torch.manual_seed(1)
        shapes = {"qkv": (HEADS + 2 * KV_HEADS) * HEAD_DIM, "up": 4 * HIDDEN}
        self.embedding, self.head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
        self.layers = [
            {name: torch.randn(size, HIDDEN) / HIDDEN**0.5 for name, size in shapes.items()}
            | {"out": torch.randn(HIDDEN, HEADS * HEAD_DIM) / 8, "down": torch.randn(HIDDEN, 4 * HIDDEN) / 16}
            for _ in range(LAYERS)
        ]
        shape = (config.num_blocks, KV_HEADS, config.block_size, HEAD_DIM)
        self.keys = [torch.zeros(shape) for _ in range(LAYERS)]
        self.values = [torch.zeros(shape) for _ in range(LAYERS)]
        self.attention = attention

    def forward(self, step: Step) -> Tensor:
        """Runs one step; gives the logits of each token that is sampled after."""
        pykv.copy_blocks(self.keys, self.values, step.copy_pairs)
        hidden = embedding(step.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            hidden = hidden + self.attend(index, rms_norm(hidden, (HIDDEN,)), step)
            hidden = hidden + linear(silu(linear(rms_norm(hidden, (HIDDEN,)), layer["up"])), layer["down"])
        return linear(rms_norm(hidden[step.sample_indices], (HIDDEN,)), self.head)

    def attend(self, index: int, hidden: Tensor, step: Step) -> Tensor:
        heads = linear(hidden, self.layers[index]["qkv"]).view(len(hidden), -1, HEAD_DIM)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        keys, values = self.keys[index], self.values[index]
        # Every layer writes what is new before it reads: sequences of one step may share blocks.
        pykv.write_kv(rotate(key, step.positions), value.contiguous(), keys, values, step.slot_mapping)
        attended = self.attention(rotate(query, step.positions), keys, values, step)
        return linear(attended.flatten(1), self.layers[index]["out"])


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021, section 3.4.2)."""
    half = HEAD_DIM // 2
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
    )


def generate(attention: Attention, prompts: list[list[int]]) -> dict[tuple[int, int], list[int]]:
    """Greedy outputs by request and sample, in a pool so small that requests are preempted."""
    config = pykv.SchedulerConfig(
        num_blocks=24,
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=128,
        admission="watermark",
    )
    scheduler, buffers, decoder = pykv.Scheduler(config), pykv.StepBuffers(config), Decoder(attention, config)
    for prompt in prompts:
        scheduler.submit(prompt, max_tokens=24)
    outputs: dict[tuple[int, int], list[int]] = {}
    by_row: dict[int, tuple[int, int]] = {}
    while (plan := scheduler.plan(buffers)) is not None:
        placed = (buffers.placed_rows, buffers.placed_requests, buffers.placed_children)
        for row, request, child in zip(*(array[: plan.num_placed].tolist() for array in placed), strict=True):
            by_row[row] = (request, child)
        sampled = decoder.forward(Step.of(plan, buffers)).argmax(-1).numpy()
        scheduler.apply(plan, sampled, np.full(plan.num_samples, pykv.OUTCOME_OK, np.uint8))
        for row, token in zip(
            buffers.sample_rows[: plan.num_samples].tolist(), sampled.tolist(), strict=True
        ):
            outputs.setdefault(by_row[row], []).append(token)
    print(f"{scheduler.stats().steps} steps, {scheduler.stats().preemptions} preemptions")
    return outputs


def main() -> None:
    shared = [7 * token % VOCAB for token in range(20)]
    prompts = [[*shared, *range(ending, ending + 3 * ending)] for ending in range(1, 9)]
    first, second = generate(with_pykv, prompts), generate(written_here, prompts)
    assert first == second, "the two attentions disagree"
    print(f"{len(first)} outputs, the same tokens with both attentions; the first: {first[0, 0][:8]}")


if __name__ == "__main__":
    main()
