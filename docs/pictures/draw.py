"""The pictures of docs/core.md: what the real pool, prefix cache and scheduler hold in small runs.

    python docs/pictures/draw.py [FOLDER]

draws them all into a folder, which is this one if none is given. Nothing in them is drawn by hand: tables, states,
orders and counts are read from the objects themselves, so a change of the core changes the pictures.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cache import eviction, prefix_hits, tables, windows
from scheduling import admission, fairness, preemption, queue_orders

PICTURES = (tables, prefix_hits, windows, eviction, preemption, admission, queue_orders, fairness)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        (folder / f"{draw.__name__}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
