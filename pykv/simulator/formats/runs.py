"""pykv's own form: a header, then a JSON object a request whose blocks are runs of numbers.

```text
{"name": "chat", "block_size": 512, "source": "…", "license": "…"}
{"ts": 0.0, "in": 6758, "out": 500, "s": null, "h": [[0, 14]]}
```
`ts` is in seconds, `s` names the session, `h` are the prompt's blocks as `[first, length]`; `s` and `h` may be null.
"""

from __future__ import annotations

from typing import Any

from pykv.simulator.formats.rows import Line, Rows, integer, number, session

__all__ = ["add_row", "recognises", "recognises_row"]


def recognises(row: dict[str, Any]) -> bool:
    """Whether a file's first line is this form's header."""
    return "block_size" in row and "in" not in row


def recognises_row(row: dict[str, Any]) -> bool:
    """Whether a file's first line is a request of this form, whose header is missing: blocks mean nothing then."""
    return "in" in row and "out" in row and row.get("h") is None


def add_row(rows: Rows, line: Line, row: dict[str, Any]) -> None:
    """Adds the request of one line.

    Raises:
        TraceError: a field is missing or wrong.
    """
    runs = row.get("h")
    if runs is not None and not (
        type(runs) is list
        and all(type(run) is list and len(run) == 2 and type(run[0]) is type(run[1]) is int for run in runs)
    ):
        raise line.error(f"h is {str(runs)[:60]}: allowed are null or pairs [first block, length]")
    rows.add(
        line,
        arrival=number(row, "ts", line),
        prompt_tokens=integer(row, "in", line),
        output_tokens=integer(row, "out", line),
        session=session(row, "s", line),
        runs=runs or (),
    )
