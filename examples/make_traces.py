"""Two small traces for `pykv replay`: sessions of coding agents, and chats of which only the lengths are known.

Run: `python examples/make_traces.py [FOLDER]`. The same files each time; those in examples/traces were made by it.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

BLOCK_SIZE = 64


def agents(num_sessions: int = 40) -> list[dict[str, object]]:
    """Sessions whose prompts grow turn by turn, each behind the system prompt of one of four agents."""
    rng = random.Random(7)
    requests: list[dict[str, object]] = []
    system_blocks = [[kind * 20, 20] for kind in range(4)]
    next_block = 80
    start = 0.0
    for session in range(num_sessions):
        start += rng.expovariate(1 / 30)
        now, runs = start, [list(rng.choice(system_blocks))]
        for _ in range(rng.randint(3, 16)):
            new = rng.randint(2, 24)
            runs.append([next_block, new])
            next_block += new
            num_blocks = sum(length for _, length in runs)
            output = rng.randint(20, 300)
            tokens = num_blocks * BLOCK_SIZE - rng.randrange(BLOCK_SIZE)
            requests.append(
                {"ts": round(now, 3), "in": tokens, "out": output, "s": f"s{session}", "h": merged(runs)}
            )
            now += 2 + output / 40 + rng.expovariate(1 / 20)
    return sorted(requests, key=lambda request: request["ts"])  # type: ignore[arg-type,return-value]


def merged(runs: list[list[int]]) -> list[list[int]]:
    """Runs, those joined that follow each other."""
    joined: list[list[int]] = []
    for start, length in runs:
        if joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1][1] += length
        else:
            joined.append([start, length])
    return joined


def chats(num_requests: int = 400) -> list[str]:
    """Lines in the form of Azure's public traces: arrival, prompt and answer, lengths as in a chat service."""
    rng = random.Random(11)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(5)
        prompt = min(12_000, max(8, int(rng.lognormvariate(6.6, 1.0))))
        answer = min(1_500, max(2, int(rng.lognormvariate(5.0, 0.8))))
        lines.append(f"2026-01-01 00:{int(now // 60):02}:{now % 60:010.7f},{prompt},{answer}")
    return lines


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "traces")
    folder.mkdir(exist_ok=True)
    header = {
        "name": "agents",
        "block_size": BLOCK_SIZE,
        "source": "examples/make_traces.py",
        "license": "Apache-2.0",
    }
    rows = agents()
    lines = [json.dumps(row, separators=(",", ":")) for row in [header, *rows]]
    (folder / "agents.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "chats.csv").write_text("\n".join(chats()) + "\n")
    print(f"agents.jsonl: {len(rows)} requests of 40 sessions; chats.csv: {len(chats()) - 1} requests")


if __name__ == "__main__":
    main()
