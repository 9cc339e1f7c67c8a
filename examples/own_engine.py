"""An engine of your own: a decoder in plain torch with its own weights and sampler, scheduled by pykv.

The same prompts, with two samples each, run three times: in a pool with room for all, in one so small that requests are
preempted and swapped to the host, and with an attention that is written here and reads the plan's block tables itself.
All give the same tokens. Neither transformers nor `pykv.Engine` takes part.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

import pykv

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 400, 64, 3, 4, 2, 16
LAYOUT = pykv.KvLayout((pykv.KvLayer(KV_HEADS, HEAD_DIM, HEAD_DIM),) * LAYERS)


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
    swap_out_pairs: Tensor
    swap_in_pairs: Tensor
    copy_pairs: Tensor
    sample_indices: Tensor

    @classmethod
    def of(cls, plan: pykv.Plan, buffers: pykv.StepBuffers) -> "Step":
        tokens, rows = plan.num_tokens, plan.num_batch_rows
        lengths = {
            "token_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,
            "query_starts": rows + 1,
            "seq_lens": rows,
            "table_rows": rows,
            "block_tables": len(buffers.block_tables),
            "swap_out_pairs": plan.num_swap_outs,
            "swap_in_pairs": plan.num_swap_ins,
            "copy_pairs": plan.num_copies,
            "sample_indices": plan.num_samples,
        }
        return cls(
            **{name: torch.from_numpy(getattr(buffers, name)[:length]) for name, length in lengths.items()}
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


class Cache:
    """The keys and values of all sequences, and a pool on the host for those that are swapped out."""

    def __init__(self, config: pykv.SchedulerConfig) -> None:
        self.pool = pykv.KvPool(LAYOUT, config.num_blocks, config.block_size, "f32")
        self.host: pykv.KvPool | None = None
        if config.num_host_blocks:
            self.host = pykv.KvPool(LAYOUT, config.num_host_blocks, config.block_size, "f32")

    def copy(self, step: Step) -> None:
        """Makes the copies that come before the model, in this order: blocks change hands between them."""
        if self.host is not None:
            self.pool.copy_blocks_to(self.host, step.swap_out_pairs)
            self.host.copy_blocks_to(self.pool, step.swap_in_pairs)
        self.pool.copy_blocks(step.copy_pairs)


class Decoder:
    """Random weights: what it says makes no sense, but each token depends on all that came before it."""

    def __init__(self, attention: Attention, cache: Cache) -> None:
        torch.manual_seed(1)
        shapes = {"qkv": (HEADS + 2 * KV_HEADS) * HEAD_DIM, "up": 4 * HIDDEN}
        self.embedding, self.head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
        self.layers = [
            {name: torch.randn(size, HIDDEN) / HIDDEN**0.5 for name, size in shapes.items()}
            | {"out": torch.randn(HIDDEN, HEADS * HEAD_DIM) / 8, "down": torch.randn(HIDDEN, 4 * HIDDEN) / 16}
            for _ in range(LAYERS)
        ]
        self.attention, self.cache = attention, cache

    def forward(self, step: Step) -> Tensor:
        """Runs one step; gives the logits of each token that is sampled after."""
        self.cache.copy(step)
        hidden = embedding(step.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            hidden = hidden + self.attend(index, rms_norm(hidden, (HIDDEN,)), step)
            hidden = hidden + linear(silu(linear(rms_norm(hidden, (HIDDEN,)), layer["up"])), layer["down"])
        return linear(rms_norm(hidden[step.sample_indices], (HIDDEN,)), self.head)

    def attend(self, index: int, hidden: Tensor, step: Step) -> Tensor:
        heads = linear(hidden, self.layers[index]["qkv"]).view(len(hidden), -1, HEAD_DIM)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        keys, values = self.cache.pool.key_caches[index], self.cache.pool.value_caches[index]
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


def generate(
    attention: Attention, config: pykv.SchedulerConfig, prompts: list[list[int]]
) -> dict[tuple[int, int], list[int]]:
    """Outputs by request and sample: sample 0 takes the best token, sample 1 the second best."""
    scheduler, buffers = pykv.Scheduler(config), pykv.StepBuffers(config)
    decoder = Decoder(attention, Cache(config))
    for prompt in prompts:
        scheduler.submit(prompt, max_tokens=24, num_samples=2)
    outputs: dict[tuple[int, int], list[int]] = {}
    by_row: dict[int, tuple[int, int]] = {}
    while (plan := scheduler.plan(buffers)) is not None:
        # Who got which row is told once: note it before anything can fail.
        placed = (buffers.placed_rows, buffers.placed_requests, buffers.placed_children)
        for row, request, sample in zip(
            *(array[: plan.num_placed].tolist() for array in placed), strict=True
        ):
            by_row[row] = (request, sample)
        owners = [by_row[row] for row in buffers.sample_rows[: plan.num_samples].tolist()]
        try:
            best = decoder.forward(Step.of(plan, buffers)).topk(2).indices.tolist()
        except BaseException:
            scheduler.discard(plan)  # nothing of the step counts, and the scheduler can plan it again
            raise
        sampled = [tokens[sample] for tokens, (_, sample) in zip(best, owners, strict=True)]
        outcomes = np.full(plan.num_samples, pykv.OUTCOME_OK, np.uint8)
        scheduler.apply(plan, np.array(sampled, np.int64), outcomes)
        for owner, token in zip(owners, sampled, strict=True):
            outputs.setdefault(owner, []).append(token)
    stats = scheduler.stats()
    print(
        f"{stats.steps} steps, {stats.preemptions} preemptions, {stats.swapped_in_blocks} blocks swapped in"
    )
    return outputs


def main() -> None:
    shared = [7 * token % VOCAB for token in range(20)]
    prompts = [[*shared, *range(ending, ending + 3 * ending)] for ending in range(1, 9)]
    options = {"block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
    roomy = pykv.SchedulerConfig(num_blocks=256, **options)
    tight = pykv.SchedulerConfig(
        num_blocks=24, num_host_blocks=64, preemption="swap", admission="watermark", **options
    )
    expected = generate(with_pykv, roomy, prompts)
    assert generate(with_pykv, tight, prompts) == expected, "swapping changes tokens"
    print(f"{len(expected)} outputs, the same tokens when they are swapped")
    assert generate(written_here, tight, prompts) == expected, "the two attentions disagree"
    print(f"the same tokens with both attentions; the first: {expected[0, 0][:8]}")


if __name__ == "__main__":
    main()
