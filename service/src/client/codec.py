"""Reads the messages of servers."""

from google.protobuf.message import DecodeError
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec

from pykv.service.client.failures import ServiceError

__all__ = ["ReplyCodec"]


class ReplyCodec(ProtoCodec):
    """Decodes messages; bytes that are none are the server's fault."""

    def decode(self, data: bytes, message_type: type) -> object:  # type: ignore[override]
        """Reads a message of this type.

        Raises:
            ServiceError: the bytes are no such message, or a text in it is not UTF-8.
        """
        try:
            return super().decode(data, message_type)
        except DecodeError:
            problem = f"the server sent bytes that are no {message_type.__name__}"
            raise ServiceError(problem, Status.INTERNAL.name) from None
