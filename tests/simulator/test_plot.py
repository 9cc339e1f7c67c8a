"""Pictures show what was varied, and the same replay gives the same picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykv.errors import ConfigError
from pykv.simulator.plot import plot_result, plot_sweep
from pykv.simulator.replay import Replayer
from pykv.simulator.sweep import sweep
from pykv.simulator.trace import read_trace

TRACES = Path(__file__).parents[2] / "examples/traces"


@pytest.mark.parametrize(
    ("trace", "grid", "options", "shown"),
    [
        (
            "agents.jsonl",
            {"num_blocks": [200, 800], "policy": ["lru", "dead"]},
            {"serial": True},
            "hit rate against",
        ),
        ("chats.csv", {"allocator": ["contiguous", "paged"]}, {"num_blocks": 900}, "reserved, empty"),
        ("chats.csv", {"speed": [1.0, 2.0]}, {"num_blocks": 900}, "TTFT p99"),
    ],
)
def test_a_sweep_is_drawn_by_what_it_varies(
    trace: str, grid: dict[str, list[object]], options: dict[str, object], shown: str, tmp_path: Path
) -> None:
    points = sweep(read_trace(TRACES / trace), grid, options=options)
    for name in ("first.svg", "second.svg"):
        plot_sweep(points, tmp_path / name)
    content = (tmp_path / "first.svg").read_text()
    assert shown in content
    assert content == (tmp_path / "second.svg").read_text()


def test_the_pool_over_time_is_drawn(tmp_path: Path) -> None:
    result = Replayer(read_trace(TRACES / "agents.jsonl")).run(num_blocks=400)
    plot_result(result, tmp_path / "use.png")
    assert (tmp_path / "use.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    trace = read_trace(TRACES / "agents.jsonl")
    serial = Replayer(trace).run(num_blocks=400, serial=True)
    with pytest.raises(ConfigError, match="one serial replay has nothing to draw"):
        plot_result(serial, tmp_path / "a.svg")
    with pytest.raises(ConfigError, match=r"the sweep varies \['policy'\]"):
        plot_sweep(
            sweep(trace, {"policy": ["lru", "opt"]}, options={"num_blocks": 9, "serial": True}),
            tmp_path / "a.svg",
        )
    with pytest.raises(ConfigError, match="ends in"):
        plot_result(Replayer(trace).run(num_blocks=400), tmp_path / "a.pdf")
    assert not list(tmp_path.iterdir())
