"""Counts what a message holds, from its bytes, before anything is built of them.

Two bytes make an empty entry of a list, which costs two hundred as an object: what is decoded first and counted then
holds up the event loop for seconds. The count ends at the first list that is too long, and after FIELDS_LIMIT fields,
so its time is bounded too.
"""

from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from pykv.errors import CapacityError, InvalidRequestError
from pykv.service.request_limits import LIST_LIMITS, OTHER_LIST_LIMIT, PROMPT_IDS
from pykv.text.chat import MESSAGES_LIMIT

__all__ = ["RequestCheck"]

UNCHECKED_BYTES = 4096
FIELDS_LIMIT = 5 * MESSAGES_LIMIT
"""Of one request, those of its parts included: a conversation has three or four for each of its messages."""
SINGLE_FIELDS_LIMIT = 128
"""Of one part of a request, beside the entries of its lists: unknown ones, and such as should come once."""
DEPTH_LIMIT = 64
VARINT_BYTES = 10
CONTINUED = 128  # the first byte of a number with more of them
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
PACKED_WIDTHS = {
    FieldDescriptor.CPPTYPE_DOUBLE: 8,
    FieldDescriptor.CPPTYPE_FLOAT: 4,
}
FIXED_WIDTHS = {
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}


class _Field(NamedTuple):
    """What the walk needs of a field.

    Attributes:
        most: entries of a list, in the whole message; None = it is no list.
        is_prompt: whether the context cap bounds it too.
        width: bytes of one packed number; 0 = as many as it needs, None = not a number.
        message: of which kind its values are; None = of none.
    """

    name: str
    full_name: str
    most: int | None
    is_prompt: bool
    width: int | None
    message: Descriptor | None


class RequestCheck:
    """Refuses messages with too long a list or too many fields.

    Attributes:
        max_model_len: the context cap, which bounds the prompt; None = not known yet.
    """

    max_model_len: int | None = None

    def __call__(self, data: bytes, descriptor: Descriptor) -> None:
        """Checks the bytes of a message before they are decoded; a small one cannot hold much.

        Raises:
            InvalidRequestError: a list is longer than it may be.
            CapacityError: the prompt has more ids than the context cap.
            GRPCError: INVALID_ARGUMENT; the bytes are no message, or one of more fields than any needs.
        """
        if len(data) > UNCHECKED_BYTES:
            _Walk(data, self.max_model_len).message(descriptor, 0, len(data), DEPTH_LIMIT)


class _Walk:
    """One message's count."""

    def __init__(self, data: bytes, max_model_len: int | None) -> None:
        self._data = data
        self._max_model_len = max_model_len
        self._lengths: Counter[str] = Counter()
        self._num_fields = 0

    def message(self, descriptor: Descriptor, place: int, end: int, depth: int) -> None:
        """Walks over the fields of one message, which lies in the bytes from `place` to `end`.

        It holds up the event loop: most numbers are one byte, and are read without a call.
        """
        if not depth:
            raise _malformed("it is nested too deeply")
        fields, data, num_single = _fields_of(descriptor), self._data, 0
        while place < end:
            self._num_fields += 1
            if self._num_fields > FIELDS_LIMIT:
                raise _malformed(f"it has more than {FIELDS_LIMIT} fields, a packed list being one")
            tag, place = data[place], place + 1
            if tag > 127:
                tag, place = self._varint(place - 1, end)
            kind, field = tag & 7, fields.get(tag >> 3)
            if kind == LENGTH:
                size, start = data[place] if place < end else CONTINUED, place + 1
                if size > 127:
                    size, start = self._varint(place, end)
                place = start + size
            else:
                start, place = place, self._end_of(kind, place, end)
            if place > end:
                raise _malformed("it ends too early")
            if field is None or field.most is None:
                num_single += 1
                if num_single > SINGLE_FIELDS_LIMIT:
                    raise _malformed(f"one part has more than {SINGLE_FIELDS_LIMIT} fields beside its lists")
            else:
                self._count(field, self._num_entries(field, kind, start, place))
            if field is not None and field.message is not None and kind == LENGTH and place > start:
                self.message(field.message, start, place, depth - 1)

    def _end_of(self, kind: int, place: int, end: int) -> int:
        """Where the value of a field that has no length ends."""
        if kind == VARINT:
            return self._varint(place, end)[1]
        if kind in (FIXED32, FIXED64):
            return place + (4 if kind == FIXED32 else 8)
        raise _malformed("groups are not served")

    def _num_entries(self, field: _Field, kind: int, start: int, end: int) -> int:
        if kind != LENGTH or field.width is None:
            return 1
        if field.width:
            return (end - start) // field.width
        packed = np.frombuffer(self._data, np.int8, end - start, start)
        return int(np.count_nonzero(packed >= 0))  # the last byte of each number has no high bit

    def _count(self, field: _Field, num_entries: int) -> None:
        self._lengths[field.full_name] = length = self._lengths[field.full_name] + num_entries
        if field.is_prompt:
            most = self._max_model_len
            if most is not None and length >= most:
                message = f"prompt has {length} tokens: allowed is fewer than the context cap of {most}"
                raise CapacityError(message, "prompt")
        elif field.most is not None and length > field.most:
            message = f"{field.name} holds more than {field.most} entries: allowed is up to {field.most}"
            raise InvalidRequestError(message, field.name)

    def _varint(self, place: int, end: int) -> tuple[int, int]:
        data, number, shift = self._data, 0, 0
        for after in range(place + 1, min(place + VARINT_BYTES, end) + 1):
            byte = data[after - 1]
            number |= (byte & 127) << shift
            if byte < 128:
                return number, after
            shift += 7
        raise _malformed("a number in it does not end")


@cache
def _fields_of(descriptor: Descriptor) -> dict[int, _Field]:
    return {field.number: _field_of(field) for field in descriptor.fields}


def _field_of(field: FieldDescriptor) -> _Field:
    of_numbers = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)
    width = None
    if field.cpp_type not in of_numbers:
        width = PACKED_WIDTHS.get(field.cpp_type) or FIXED_WIDTHS.get(field.type, 0)
    is_list: Any = field.is_repeated
    most = LIST_LIMITS.get(field.full_name, OTHER_LIST_LIMIT) if is_list else None
    is_prompt = field.full_name in PROMPT_IDS
    return _Field(field.name, field.full_name, most, is_prompt, width, field.message_type)


def _malformed(why: str) -> GRPCError:
    return GRPCError(Status.INVALID_ARGUMENT, f"the bytes are no message that is served: {why}")
