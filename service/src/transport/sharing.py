"""With whom a call shares what is bounded for all."""

from typing import Any, cast

from grpclib.server import Stream

from pykv.service.transport.events import BoundedConnection
from pykv.service.transport.shared_budget import Sharer
from pykv.service.transport.stream import BoundedStream

__all__ = ["group_of", "share_as", "sharer_of"]


def sharer_of(stream: Stream[Any, Any]) -> Sharer:
    """The call's connection."""
    return cast(BoundedConnection, stream._stream.connection).sharer


def group_of(stream: Stream[Any, Any]) -> str | None:
    """The group that `share_as` gave the call; None = its peer's."""
    return cast(BoundedStream, stream._stream).group


def share_as(stream: Stream[Any, Any], group: str) -> None:
    """Has the call share with a group from now on, not with its peer."""
    inner = stream._stream
    if isinstance(inner, BoundedStream):
        inner.group = group
