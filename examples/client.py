"""Several chats at once with a running `pykv-serve`: `python client.py [HOST:PORT [CA [CERTIFICATE KEY]]]`."""

import asyncio
import sys

import pykv
from pykv.client import tls_context

QUESTIONS = ("What is the capital of France?", "Which planet is known as the Red Planet?")


async def ask(client: pykv.Client, question: str) -> str:
    """Streams one answer; leaving the loop early would end the request on the server."""
    answer = ""
    params = pykv.SamplingParams(max_tokens=32, temperature=0.0)
    async for delta in client.chat([{"role": "user", "content": question}], params):
        answer += delta.text
        print(f"{question[:20]}... {delta.text!r}")
    return answer


async def main() -> None:
    address, *files = sys.argv[1:] or ["127.0.0.1:50051"]
    tls = tls_context(*files) if files else None
    async with pykv.Client(address, tls=tls) as client:
        model = await client.get_model()
        print(f"{model.name} at {address}, {model.num_blocks} blocks of {model.block_size} tokens")
        answers = await asyncio.gather(*(ask(client, question) for question in QUESTIONS))
        stats = await client.get_stats()
    print(*answers, f"{stats['blocks_active']} blocks are in use now", sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
