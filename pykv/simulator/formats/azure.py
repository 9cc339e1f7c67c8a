"""The form of Azure's public traces: a CSV file of arrivals and lengths; nothing is known of what prompts share.

```text
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
```
Source: P. Patel et al., *Splitwise*, ISCA 2024; https://github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime

from pykv.field_checks import shown
from pykv.simulator.formats.rows import Line, Rows

__all__ = ["add_rows", "recognises"]

HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def recognises(line: str) -> bool:
    """Whether a file's first line is this form's header."""
    return line.strip().lstrip("\ufeff").split(",") == HEADER


def add_rows(rows: Rows, lines: Iterable[str]) -> None:
    """Adds the requests of all lines after the header.

    Raises:
        TraceError: a field is missing or wrong.
    """
    for place, row in _numbered(rows.path, csv.reader(lines)):
        if place == 1 or not row:
            continue
        line = Line(rows.path, place)
        if len(row) != len(HEADER):
            raise line.error(f"{len(row)} fields: allowed are the 3 of {','.join(HEADER)}")
        rows.add(
            line,
            arrival=_seconds(row[0], line),
            prompt_tokens=_tokens(row[1], "ContextTokens", line),
            output_tokens=_tokens(row[2], "GeneratedTokens", line),
        )


def _numbered(path: str, reader: Iterable[list[str]]) -> Iterator[tuple[int, list[str]]]:
    place = 0
    try:
        for place, row in enumerate(reader, start=1):
            yield place, row
    except csv.Error as error:
        raise Line(path, place + 1).error(f"is no CSV: {error}") from error


def _seconds(text: str, line: Line) -> float:
    """A time to the tenth of a microsecond, which is finer than Python's own."""
    whole, _, fraction = text.strip().partition(".")
    fraction, _, _ = fraction.partition("+")
    try:
        if fraction and not fraction.isdecimal():
            raise ValueError
        moment = datetime.fromisoformat(whole.partition("+")[0])
        return (moment - datetime(2000, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")
    except ValueError:
        allowed = "a time such as 2023-11-16 18:15:46.6805900"
        raise line.error(f"TIMESTAMP is {shown(text)}: allowed is {allowed}") from None


def _tokens(text: str, field: str, line: Line) -> int:
    if not text.strip().isdecimal() or len(text.strip()) > 18:
        raise line.error(f"{field} is {shown(text)}: allowed is a whole number of at least 0")
    return int(text)
