"""Checks the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pykv.errors import InvalidRequestError
from pykv.field_checks import refuse

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGES_LIMIT = 4096


def checked_messages(messages: object) -> list[dict[str, str]]:
    """Returns the messages as plain dicts of `role` and `content`.

    Raises:
        InvalidRequestError: there is none, or one has another field, an unknown role or no text.
    """
    allowed = f"1 to {MESSAGES_LIMIT} messages, each with role and content"
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        refuse("messages", messages, allowed)
    if not 1 <= len(messages) <= MESSAGES_LIMIT:
        raise InvalidRequestError(f"messages holds {len(messages)}: allowed is {allowed}", "messages")
    return [_checked(index, message) for index, message in enumerate(messages)]


def num_characters(messages: object) -> int:
    """How long the contents are together; malformed messages count nothing and are refused later."""
    if not isinstance(messages, Sequence):
        return 0
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return sum(len(content) for content in contents if isinstance(content, str))


def _checked(index: int, message: object) -> dict[str, str]:
    place = f"messages[{index}]"
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise InvalidRequestError(f"{place}: allowed are exactly the fields role and content", "messages")
    if not isinstance(message["role"], str) or message["role"] not in ROLES:
        raise InvalidRequestError(f"{place}.role: allowed are {', '.join(ROLES)}", "messages")
    if not isinstance(message["content"], str):
        kind = type(message["content"]).__name__
        raise InvalidRequestError(f"{place}.content is of type {kind}: allowed is text", "messages")
    return {"role": message["role"], "content": message["content"]}
