"""Reads requests: what can be refused without the engine is refused here, before anything is done for it."""

import uuid
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpclib.server import Stream

from pykv.errors import CapacityError, InvalidRequestError
from pykv.retention import Retention
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport.headers import NO_MESSAGE

__all__ = [
    "check_salt",
    "check_session_id",
    "messages_of",
    "prompt_of",
    "receive",
    "request_id_of",
    "retention_of",
]

REQUEST_ID_CHARACTERS = 128
SALT_BYTES = 256
SESSION_ID_BYTES = 256
MOST_NEXT_TURN_SECONDS = 3600.0
"""A tenant must not keep its blocks over all others' for ever."""

Request = TypeVar("Request", bound=Message)


async def receive(stream: Stream[Request, Any]) -> Request:
    """The call's one request message, once the client has said that it was the last: the transport waits for that.

    Raises:
        InvalidRequestError: the client ended the call without one.
    """
    message = await stream.recv_message()
    if message is None:
        raise InvalidRequestError(NO_MESSAGE)
    return message


def request_id_of(request_id: str) -> str:
    """The request's name, or a new one where it has none.

    Raises:
        InvalidRequestError: the name is too long or not printable ASCII.
    """
    if not request_id:
        return uuid.uuid4().hex
    if len(request_id) > REQUEST_ID_CHARACTERS or not (request_id.isascii() and request_id.isprintable()):
        allowed = f"up to {REQUEST_ID_CHARACTERS} printable ASCII characters"
        raise InvalidRequestError(
            f"request_id has {len(request_id)} characters: allowed is {allowed}", "request_id"
        )
    return request_id


def check_salt(salt: bytes) -> bytes:
    """The salt itself.

    Raises:
        InvalidRequestError: it is too long.
    """
    if len(salt) > SALT_BYTES:
        message = f"cache_salt has {len(salt)} bytes: allowed is up to {SALT_BYTES}"
        raise InvalidRequestError(message, "cache_salt")
    return salt


def check_session_id(session_id: str) -> str:
    """The session's name itself.

    Raises:
        InvalidRequestError: it is too long.
    """
    num_bytes = len(session_id.encode())
    if num_bytes > SESSION_ID_BYTES:
        message = f"session_id has {num_bytes} bytes: allowed is up to {SESSION_ID_BYTES}"
        raise InvalidRequestError(message, "session_id")
    return session_id


def retention_of(message: pb.Retention) -> Retention:
    """How long a request's blocks matter.

    Raises:
        InvalidRequestError: a value is not allowed.
    """
    next_turn = message.next_turn_seconds if message.HasField("next_turn_seconds") else None
    if next_turn is not None and next_turn > MOST_NEXT_TURN_SECONDS:
        allowed = f"at most {MOST_NEXT_TURN_SECONDS:g}"
        raise InvalidRequestError(
            f"next_turn_seconds is {next_turn:g}: allowed is {allowed}", "next_turn_seconds"
        )
    return Retention(
        session_id=check_session_id(message.session_id) or None,
        ttl_seconds=message.ttl_seconds if message.HasField("ttl_seconds") else None,
        next_turn_seconds=next_turn,
        priority=message.priority,
    )


def prompt_of(request: pb.GenerateRequest, max_model_len: int) -> str | Sequence[int]:
    """The prompt's text or token ids, which take 8 bytes each while they wait.

    Raises:
        InvalidRequestError: there is none.
        CapacityError: there are more ids than the context cap.
    """
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind is None:
        raise InvalidRequestError("prompt is missing: allowed is text or token_ids", "prompt")
    num_tokens = len(request.token_ids.ids)
    if num_tokens >= max_model_len:
        message = f"prompt has {num_tokens} tokens: allowed is fewer than the context cap of {max_model_len}"
        raise CapacityError(message, "prompt")
    return array("q", request.token_ids.ids)


def messages_of(request: pb.ChatRequest) -> list[dict[str, str]]:
    """The conversation's messages.

    Raises:
        InvalidRequestError: there is none.
    """
    if not request.messages:
        raise InvalidRequestError("messages is empty: allowed is one message or more", "messages")
    return [{"role": message.role, "content": message.content} for message in request.messages]
