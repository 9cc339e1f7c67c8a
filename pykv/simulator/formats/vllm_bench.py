"""The forms that vLLM's benchmarks read: a custom file of prompts, or conversations as in ShareGPT.

```text
{"prompt": "What is …?", "output_tokens": 128}
[{"id": "QWJhYvA_0", "conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}]
```
They hold texts and no times: a token counts as four characters, blocks are cut from the text, and the requests come at
random moments (Poisson), the same ones for the same seed. Of a conversation each question with all that came before it
is a request. A custom line without `output_tokens` gets 256, as vLLM's own default is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pykv.simulator.formats.rows import Line, Rows, integer, runs_of

__all__ = ["BLOCK_SIZE", "Texts", "recognises_conversations", "recognises_custom"]

BLOCK_SIZE = 16
CHARACTERS_PER_TOKEN = 4
DEFAULT_OUTPUT_TOKENS = 256


def recognises_custom(row: dict[str, Any]) -> bool:
    """Whether a file's first line is of the custom form."""
    return "prompt" in row


def recognises_conversations(row: object) -> bool:
    """Whether a file's only value is of the conversations' form."""
    return isinstance(row, list) and bool(row) and isinstance(row[0], dict) and "conversations" in row[0]


class Texts:
    """Adds requests whose prompts are texts.

    Args:
        rows: where they are added.
        request_rate: requests a second.
        seed: of the random arrivals.
    """

    def __init__(self, rows: Rows, request_rate: float, seed: int) -> None:
        self._rows = rows
        self._mean_gap_seconds = 1 / request_rate
        self._random = np.random.Generator(np.random.Philox(seed))
        self._now = 0.0
        self._numbers: dict[tuple[int, str], int] = {}

    def add_custom(self, line: Line, row: dict[str, Any]) -> None:
        """Adds the request of one line.

        Raises:
            TraceError: a field is missing or wrong.
        """
        if not isinstance(row["prompt"], str):
            raise line.error(f"prompt is {str(row['prompt'])[:60]!r}: allowed is a text")
        output = integer(row, "output_tokens", line) if "output_tokens" in row else DEFAULT_OUTPUT_TOKENS
        self._add(line, row["prompt"], output, session=None)

    def add_conversations(self, conversations: Iterable[object]) -> None:
        """Adds the requests of conversations.

        Raises:
            TraceError: one is wrong; its number stands for the line.
        """
        for place, conversation in enumerate(conversations, start=1):
            line = Line(self._rows.path, place)
            turns = conversation.get("conversations") if isinstance(conversation, dict) else None
            if not isinstance(turns, list) or not all(_is_turn(turn) for turn in turns):
                raise line.error("conversations is wrong: allowed is a list of objects with a text as value")
            said = ""
            for question, answer in zip(turns[::2], turns[1::2], strict=False):
                said += question["value"]
                self._add(line, said, _tokens(answer["value"]), session=place)
                said += answer["value"]

    def _add(self, line: Line, text: str, output_tokens: int, session: int | None) -> None:
        self._rows.add(
            line,
            arrival=round(self._now, 6),  # so that no machine's logarithm differs in it
            prompt_tokens=_tokens(text),
            output_tokens=output_tokens,
            session=session,
            runs=runs_of(self._blocks(text)),
        )
        self._now += self._random.exponential(self._mean_gap_seconds)

    def _blocks(self, text: str) -> list[int]:
        """A number for each piece as long as a block, the same for the same piece after the same beginning."""
        blocks, parent = [], -1
        for start in range(0, max(len(text), 1), BLOCK_SIZE * CHARACTERS_PER_TOKEN):
            key = (parent, text[start : start + BLOCK_SIZE * CHARACTERS_PER_TOKEN])
            parent = self._numbers.setdefault(key, len(self._numbers))
            blocks.append(parent)
        return blocks


def _is_turn(turn: object) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("value"), str)


def _tokens(text: str) -> int:
    return max(1, -(-len(text) // CHARACTERS_PER_TOKEN))
