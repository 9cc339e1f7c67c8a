"""A measured run: lengths and arrivals of requests that an engine has served, a JSON object each.

```text
{"request_id": "bench-0", "input_toks": 2358, "output_toks": 531, "arrival_time": 1787267980.08}
```
What was measured beside them is read by `pykv fit`.
"""

from __future__ import annotations

from typing import Any

from pykv.simulator.formats.rows import Line, Rows, integer, number

__all__ = ["add_row", "recognises"]


def recognises(row: dict[str, Any]) -> bool:
    """Whether a file's first line is of this form."""
    return "input_toks" in row and "arrival_time" in row


def add_row(rows: Rows, line: Line, row: dict[str, Any]) -> None:
    """Adds the request of one line.

    Raises:
        TraceError: a field is missing or wrong.
    """
    rows.add(
        line,
        arrival=number(row, "arrival_time", line),
        prompt_tokens=integer(row, "input_toks", line),
        output_tokens=integer(row, "output_toks", line),
    )
