"""A running daemon for the examples that talk to one."""

import asyncio
from collections.abc import Iterator

import pytest

from pykv.cli.demo.daemon import running_daemon
from pykv.client import Client


@pytest.fixture(scope="session")
def daemon_address() -> Iterator[str]:
    with running_daemon("--model", "bundled", "--num-blocks", "256") as daemon:

        async def wait() -> None:
            async with Client(daemon.address) as client:
                await daemon.wait_until_serving(client)

        asyncio.run(wait())
        yield daemon.address
