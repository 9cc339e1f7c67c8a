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
from pykv.engine import loading
from pykv.engine.device.host import HostDevice

# What the engine does besides: everything recorded, nothing recorded, a pool so small that sequences are swapped.
VARIANTS: dict[str, dict[str, object]] = {
    "recorded": {},
    "launched": {"cuda_graphs": False},
    "swapped": {
        "preemption": "swap",
        "swap_space_bytes": 2**27,
        "admission": "watermark",
        "watermark": 0.0,
        "max_model_len": 760,
    },
}
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


def make_engine(part: Part, model: torch.nn.Module, num_blocks: int | None, **options: object) -> pykv.Engine:
    """An engine that goes through streams, pinned arrays and recorded decodes, in a dry run too."""
    if part.machine.dry:
        loading.device_of = lambda _: HostDevice()
    config = pykv.EngineConfig(
        num_blocks=num_blocks,
        device=part.machine.device,
        attention_backend="triton",
        max_num_batched_tokens=512,
        max_num_seqs=2 if part.machine.dry else 256,
        **options,
    )
    runner, _ = loading.load_runner(model, None, config, None)
    engine = pykv.Engine.from_runner(runner, None, config)
    part.report.add("decodes", "recorded batches", str(runner.recorded_batches), "rows")
    return engine


def equal_tokens(part: Part, variant: str) -> None:
    """Greedy tokens in float32, one batch of several lengths, chunked prefill."""
    case = f"greedy tokens equal transformers', {variant}"
    lengths = (13, 14) if part.machine.dry else PROMPT_LENGTHS
    new_tokens = 5 if part.machine.dry else NEW_TOKENS
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
    num_blocks = 512
    if variant == "swapped":
        num_blocks = 3 if part.machine.dry else 56  # the longest alone fits, with one of the others
        prompts, expected = prompts * 2, expected * 2
    with make_engine(part, model, num_blocks, **VARIANTS[variant]) as engine:
        outputs = engine.generate(prompts, params)
        swapped = engine.stats().swapped_in_blocks
    actual = [list(output.outputs[0].token_ids) for output in outputs]
    part.report.add(case, "equal", actual == expected, "bool", len(prompts))
    part.report.add(case, "swapped in", swapped, "blocks")
    if actual != expected:
        part.report.add(case, "difference", str([actual, expected])[:600], "text")


def pool_of_what_is_left(part: Part) -> None:
    """Without a size the pool takes its share of the device, and a step still fits beside it."""
    model = random_llama(
        part, torch.bfloat16, 1 if part.machine.dry else 4, 128 if part.machine.dry else 2048
    )
    share = 1e-2 if part.machine.dry else 0.9
    with make_engine(part, model, None, gpu_memory_utilization=share) as engine:
        case = f"pool of {share} of the device"
        part.report.add(case, "blocks", engine.num_blocks, "blocks")
        prompts = [[row + 1] * (4 if part.machine.dry else 400) for row in range(3)]
        params = pykv.SamplingParams(temperature=0.8, seed=1, max_tokens=3, ignore_eos=True)
        finished = [output.outputs[0].finish_reason for output in engine.generate(prompts, params)]
        part.report.add(case, "equal", finished == ["length"] * 3, "bool", 3)


def throughput(part: Part, batch: int, graphs: bool) -> None:
    """Decode of a Llama of 16 layers of width 2048 (1.1 billion weights), bf16, 512-token prompts."""
    dry = part.machine.dry
    model = random_llama(part, torch.bfloat16, 1 if dry else 16, 128 if dry else 2048)
    length, new_tokens = (5, 2) if dry else (512, 64)
    prompts = [[(7 * row + position) % 512 for position in range(length)] for row in range(batch)]
    params = pykv.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    with make_engine(part, model, 64 if dry else 8192, cuda_graphs=graphs) as engine:
        engine.generate(prompts[:1], params)
        part.machine.synchronize()
        begin = time.perf_counter()
        engine.generate(prompts, params)
        seconds = time.perf_counter() - begin
    form = "recorded" if graphs else "launched"
    part.report.add(
        f"Llama 1.1B bf16 batch {batch} {form}", "output tokens/s", batch * new_tokens / seconds, "1/s"
    )


if __name__ == "__main__":
    opened = open_part("engine")
    torch.backends.cuda.matmul.allow_tf32 = False
    for kind in VARIANTS:
        opened.attempt(f"equal tokens, {kind}", lambda kind=kind: equal_tokens(opened, kind))
    opened.attempt("pool size", lambda: pool_of_what_is_left(opened))
    for size in (2,) if opened.machine.dry else (1, 16, 64):
        for recorded in (True, False):
            opened.attempt(
                f"throughput {size} {recorded}",
                lambda size=size, recorded=recorded: throughput(opened, size, recorded),
            )
