"""A causal language model of transformers behind the paged cache: `python hf_model.py [FOLDER, GGUF FILE OR HUB NAME]`.

Without an argument it is the small model that pykv's set-up brings along.
"""

import sys

import pykv

SYSTEM_PROMPT = "You are a helpful assistant. Answer in one short sentence."
QUESTIONS = ("What is the capital of France?", "What is the capital of Japan?", "What is the largest ocean?")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "bundled"
    config = pykv.EngineConfig(num_blocks=512, max_num_seqs=16)
    params = pykv.SamplingParams(max_tokens=32, temperature=0.0)

    with pykv.Engine(model, config=config, progress=print) as engine:
        prompts = [engine.encode_chat(messages(question)) for question in QUESTIONS]
        for question, output in zip(QUESTIONS, engine.generate(prompts, params), strict=True):
            (answer,) = output.outputs
            cached = output.usage.cached_tokens if output.usage else 0
            print(
                f"{question} {answer.text.strip()}  [{answer.finish_reason}, {cached} prompt tokens from the cache]"
            )


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


if __name__ == "__main__":
    main()
