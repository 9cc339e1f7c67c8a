"""The form of Mooncake's public traces: a JSON object a request, 512 tokens a block.

```text
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
```
`timestamp` is in milliseconds. A `session_id`, where there is one, names the session.

Source: R. Qin et al., *Mooncake: Trading More Storage for Less Computation*, FAST 2025.
"""

from __future__ import annotations

from typing import Any

from pykv.simulator.formats.rows import Line, Rows, integer, number, runs_of, session

__all__ = ["BLOCK_SIZE", "add_row", "recognises"]

BLOCK_SIZE = 512


def recognises(row: dict[str, Any]) -> bool:
    """Whether a file's first line is of this form."""
    return "input_length" in row and "hash_ids" in row


def add_row(rows: Rows, line: Line, row: dict[str, Any]) -> None:
    """Adds the request of one line.

    Raises:
        TraceError: a field is missing or wrong.
    """
    blocks = row.get("hash_ids")
    if type(blocks) is not list or not all(type(block) is int for block in blocks):
        raise line.error(f"hash_ids is {str(blocks)[:60]}: allowed is a list of whole numbers")
    rows.add(
        line,
        arrival=number(row, "timestamp", line) / 1000,
        prompt_tokens=integer(row, "input_length", line),
        output_tokens=integer(row, "output_length", line),
        session=session(row, "session_id", line),
        runs=runs_of(blocks),
    )
