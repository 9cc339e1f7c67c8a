"""Does the engine give the tokens of transformers on this GPU, and how fast does it decode?

The model is the bundled one where its package is at hand, else a Llama of random weights. Needs the compiled core.
Run: benches/gpu/engine.py [--out FILE] [--dry-run]
"""

from __future__ import annotations

import time

import torch
from machine import Part, open_part
from transformers import LlamaConfig, LlamaForCausalLM

import pykv

PROMPT_LENGTHS = (3, 17, 130, 700)
NEW_TOKENS = 24


def random_llama(part: Part, dtype: torch.dtype, layers: int, width: int) -> LlamaForCausalLM:
    """A Llama whose logits are far apart enough for greedy tokens to be compared."""
    torch.manual_seed(0)
    heads = width // 64
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        vocab_size=512,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(part.machine.device):
        return LlamaForCausalLM(config).to(dtype).eval()


def make_engine(part: Part, model: torch.nn.Module, num_blocks: int) -> pykv.Engine:
    from pykv import EngineConfig

    config = EngineConfig(
        num_blocks=num_blocks,
        device=part.machine.device,
        attention_backend="triton",
        max_num_batched_tokens=512,
    )
    return pykv.Engine(model, None, config)


def equal_tokens(part: Part) -> None:
    """Greedy tokens in float32, one batch of several lengths, chunked prefill."""
    lengths = (3, 9) if part.machine.dry else PROMPT_LENGTHS
    new_tokens = 3 if part.machine.dry else NEW_TOKENS
    model = random_llama(part, torch.float32, 2, 128 if part.machine.dry else 512)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 512, (length,), generator=generator).tolist() for length in lengths]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=part.machine.device)
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    params = pykv.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    with make_engine(part, model, 512) as engine:
        outputs = engine.generate(prompts, params)
    actual = [list(output.outputs[0].token_ids) for output in outputs]
    part.report.add("greedy tokens equal transformers'", "equal", actual == expected, "bool", len(prompts))
    if actual != expected:
        part.report.add(
            "greedy tokens equal transformers'", "difference", str([actual, expected])[:600], "text"
        )


def throughput(part: Part, batch: int) -> None:
    """Decode of a Llama of 16 layers of width 2048 (1.1 billion weights), bf16, 512-token prompts."""
    dry = part.machine.dry
    model = random_llama(part, torch.bfloat16, 1 if dry else 16, 128 if dry else 2048)
    length, new_tokens = (5, 2) if dry else (512, 64)
    prompts = [[(7 * row + position) % 512 for position in range(length)] for row in range(batch)]
    params = pykv.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    with make_engine(part, model, 64 if dry else 8192) as engine:
        engine.generate(prompts[:1], params)
        part.machine.synchronize()
        begin = time.perf_counter()
        engine.generate(prompts, params)
        seconds = time.perf_counter() - begin
    part.report.add(f"Llama 1.1B bf16 batch {batch}", "output tokens/s", batch * new_tokens / seconds, "1/s")


if __name__ == "__main__":
    opened = open_part("engine")
    torch.backends.cuda.matmul.allow_tf32 = False
    opened.attempt("equal tokens", lambda: equal_tokens(opened))
    for size in (2,) if opened.machine.dry else (1, 16, 64):
        opened.attempt(f"throughput {size}", lambda size=size: throughput(opened, size))
