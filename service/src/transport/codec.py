"""Reads the messages of calls, strictly."""

from collections.abc import Callable

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError

__all__ = ["MessageCheck", "StrictCodec"]

COUNTED_BYTES = 4096
MOST_COUNTED = 16.0

MessageCheck = Callable[[bytes, Descriptor], None]


class StrictCodec(ProtoCodec):
    """Decodes messages; bytes that are none are the client's fault.

    Args:
        check: is given a message's bytes first, and raises where they hold too much.
        count: told of each message that is none, as GRPCError says, how much that counts: 1, and 1 more for each
            COUNTED_BYTES that had to be looked at, MOST_COUNTED at most.
    """

    def __init__(self, check: MessageCheck, count: Callable[[float], None] = lambda cost: None) -> None:
        self._check = check
        self._count = count

    def counting(self, count: Callable[[float], None]) -> "StrictCodec":
        """The same codec for one connection, which is told of what its client sends."""
        return StrictCodec(self._check, count)

    def decode(self, data: bytes, message_type: type) -> object:  # type: ignore[override]
        """Reads a message of this type.

        Raises:
            GRPCError: INVALID_ARGUMENT; the bytes are no such message, or a text in it is not UTF-8.
            Exception: what the check raised.
        """
        descriptor: Descriptor = message_type.DESCRIPTOR  # type: ignore[attr-defined]
        try:
            self._check(data, descriptor)
            return self.decode_checked(data, message_type)
        except GRPCError:
            self._count(min(1.0 + len(data) // COUNTED_BYTES, MOST_COUNTED))
            raise

    def decode_checked(self, data: bytes, message_type: type) -> object:
        """Reads a message whose bytes were checked; what is unknown of it is not kept.

        Raises:
            GRPCError: as `decode`.
        """
        try:
            message: Message = super().decode(data, message_type)  # type: ignore[assignment]
        except DecodeError:
            problem = f"the bytes are no {message_type.__name__}, or a text in it is not UTF-8"
            raise GRPCError(Status.INVALID_ARGUMENT, problem) from None
        message.DiscardUnknownFields()
        return message
