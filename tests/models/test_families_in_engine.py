"""Tiny random models of many families say through the engine what their own `generate` says."""

from __future__ import annotations

from typing import Any

import torch

from pykv import Engine, EngineConfig, KvLayout, SamplingParams, SchedulerConfig
from pykv.layer_groups import LayerGroups

NUM_NEW_TOKENS = 12
LENGTHS = (3, 29)  # the second is past every window before it begins to decode
WINDOW = 6
GAP = 2e-3  # of the logits' spread
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
WINDOWED = {
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "gemma4_text",
    "olmo3",
    "starcoder2",
    "cohere2",
    "exaone4",
}

SCHEDULES = {
    "packed": {"num_blocks": 200},
    "chunks of 5": {"num_blocks": 200, "max_chunk_tokens": 5},
    "preempted": {"admission": "watermark", "watermark": 0.0, "max_chunk_tokens": 5},
}


def prompts() -> list[list[int]]:
    return [
        [(7919 * place + 130 * row) % 190 + 2 for place in range(length)]
        for row, length in enumerate(LENGTHS, start=1)
    ]


@torch.inference_mode()
def generated(module: Any, prompt: list[int]) -> list[int]:
    """The tokens of `generate`, after asserting that each was clearly the best."""
    ids = torch.tensor([prompt])
    result = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(result.logits)
    best = logits.topk(2).values
    assert ((best[:, 0] - best[:, 1]) / logits.std(dim=1)).min() > GAP
    return result.sequences[0, len(prompt) :].tolist()


def test_a_family_says_what_its_own_generate_says(make_model: Any, admitted_family: str) -> None:
    expected = [generated(make_model(admitted_family), prompt) for prompt in prompts()]
    module = make_model(admitted_family)
    windows = {layer.window for layer in KvLayout.from_config(module.config).layers}
    assert (WINDOW in windows) == (admitted_family in WINDOWED)
    tight = smallest_pool(module, LENGTHS[1] + NUM_NEW_TOKENS)
    for name, options in SCHEDULES.items():
        config = EngineConfig(**({"block_size": 4, "num_blocks": tight} | options))
        engine = Engine(module, config=config)
        found = [output.outputs[0].token_ids for output in engine.generate(prompts(), GREEDY)]
        assert found == expected, name
        # Where a layer keeps every position, the two sequences are never whole at once; windows may let both go on.
        assert (engine.stats().preemptions > 0) == (name == "preempted") or windows == {WINDOW}
        engine.steps.check()


def smallest_pool(module: Any, num_tokens: int) -> int:
    """The fewest blocks that hold one sequence of so many tokens, computed in chunks of 5."""
    groups = LayerGroups.of(KvLayout.from_config(module.config)).windows
    least = max(3, 1 + len(groups))  # fewer are refused: not even a sequence of two tokens fits
    holds = (
        num_blocks
        for num_blocks in range(least, 1000)
        if SchedulerConfig(num_blocks=num_blocks, block_size=4, groups=groups, max_chunk_tokens=5).max_seq_len
        >= num_tokens
    )
    return next(holds)
