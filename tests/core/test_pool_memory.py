"""A pool for which there is no memory, or in which no request fits, is refused when it is made."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pykv.errors import ConfigError
from pykv.scheduler import Scheduler, SchedulerConfig

WITH_LITTLE_MEMORY = """
import resource
from pykv import BlockPool, Scheduler, SchedulerConfig
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
try:
    {call}
except MemoryError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there is the limit kept")
@pytest.mark.parametrize(
    "call",
    [
        "BlockPool(2**30, 1)",
        "Scheduler(SchedulerConfig(num_blocks=2**27))",
        "Scheduler(SchedulerConfig(num_blocks=64, num_host_blocks=2**30))",
        "Scheduler(SchedulerConfig(num_blocks=64, block_size=65_536, max_kv_events=2**24))",
    ],
)
def test_a_pool_without_memory_is_refused_and_the_process_lives(call: str) -> None:
    program = WITH_LITTLE_MEMORY.format(call=call)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "bytes of memory" in ran.stdout


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"num_blocks": 2, "groups": (None, None, None)}, 4),
        ({"num_blocks": 2, "block_size": 1}, 3),
        ({"num_blocks": 32, "max_pinned_blocks": 30, "groups": (None, 5)}, 33),
    ],
)
def test_a_pool_that_can_hold_no_request_is_refused(options: dict[str, object], needed: int) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks is {options['num_blocks']}: .*at least {needed}, for"):
        SchedulerConfig(**options)  # type: ignore[arg-type]
    config = SchedulerConfig(**(options | {"num_blocks": needed}))  # type: ignore[arg-type]
    Scheduler(config).submit([1], max_tokens=1)
