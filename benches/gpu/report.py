"""Where a part of the session writes what it measured: one JSON object a line, as it comes."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["Report"]


class Report:
    """Lines of one part.

    Args:
        bench: the part's name.
        path: appended to; None prints only.
    """

    def __init__(self, bench: str, path: Path | None) -> None:
        self._bench = bench
        self._path = path

    def add(self, case: str, metric: str, value: object, unit: str, n: int = 1) -> None:
        """Writes one measurement; `n` is how many it is the median of."""
        line = json.dumps(
            {"bench": self._bench, "case": case, "metric": metric, "value": value, "unit": unit, "n": n}
        )
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(line + "\n")

    def failed(self, case: str, error: BaseException) -> None:
        """Writes that a case ended with an error; the part goes on."""
        self.add(case, "error", f"{type(error).__name__}: {error}"[:600], "text")
