"""Follows one server from frame to frame, also over a time in which it is not there."""

import time

from rich.console import RenderableType

from pykv.cli.connection import answering
from pykv.cli.top.sample import History, Sample
from pykv.cli.top.view import frame, gone
from pykv.client import Client, ServiceError
from pykv.service.served import ModelDescription

__all__ = ["Watch"]


class Watch:
    """What a server does, as frames.

    Args:
        address: of the server, as its user knows it.

    Attributes:
        news: why there is nothing new, as long as the server is gone; None = there is.
    """

    def __init__(self, client: Client, address: str) -> None:
        self._client = client
        self._address = address
        self._description: ModelDescription | None = None
        self._history = History()
        self._last: RenderableType = ""
        self.news: str | None = None

    async def next(self) -> RenderableType:
        """The next frame.

        Raises:
            PykvError: the server does not answer, in time or at all, or may not be watched by this tenant.
        """
        async with answering(self._address):
            return await self._next()

    async def next_or_gone(self) -> RenderableType:
        """The next frame, or the last one under the news that the server is gone; another model may come back.

        Raises:
            PykvError: the server may not be watched by this tenant any more.
        """
        try:
            return await self.next()
        except ServiceError as error:
            if error.status != "UNAVAILABLE":
                raise
            self._description = None
            self.news = f"{self._address} is gone: {error}"
            return gone(self.news, self._last)

    async def _next(self) -> RenderableType:
        if self._description is None:
            self._description = await self._client.get_model()
            self._history = History()
        span = self._history.add(await self._sample())
        self._last = frame(self._description, self._address, span)
        self.news = None
        return self._last

    async def _sample(self) -> Sample:
        health = await self._client.health()
        counts, times = await self._client.get_counts_and_times()
        return Sample(time.monotonic(), health, counts, times)
