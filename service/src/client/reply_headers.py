"""What is read of the headers of an answer, before it and at its end."""

from collections.abc import Iterable

from grpclib.const import Status

from pykv.service.files import shown
from pykv.service.status import ERROR_KEY, FIELD_KEY, RETRY_KEY

__all__ = ["STATUS_KEY", "Headers", "read_headers", "status_problem"]

Headers = list[tuple[str, str]]

STATUS_KEY = "grpc-status"
READ_FIRST = frozenset((":status", "content-type"))
READ_LAST = READ_FIRST | {STATUS_KEY, "grpc-message", ERROR_KEY, FIELD_KEY, RETRY_KEY}
"""The others are dropped unread, so that none can be wrong."""

STATUS_NUMBERS = frozenset(str(status.value) for status in Status)


def read_headers(fields: Iterable[tuple[str, str]], *, is_end: bool) -> Headers:
    """Those that are read, which came as Latin-1; what is no ASCII was meant as UTF-8.

    A name that came again has all its values, with commas between, as HTTP has it: of two statuses none is believed.

    Args:
        is_end: whether the answer ends with them: a status that comes before its end is none.
    """
    values: dict[str, list[str]] = {}
    for name, value in fields:
        if name in (READ_LAST if is_end else READ_FIRST):
            text = value if value.isascii() else value.encode("latin-1").decode(errors="replace")
            values.setdefault(name, []).append(text)
    return [(name, ", ".join(texts)) for name, texts in values.items()]


def status_problem(headers: Headers) -> str | None:
    """What is wrong with the status of a call, in words; None where it is one of gRPC's, or missing."""
    status = dict(headers).get(STATUS_KEY)
    if status is None or status in STATUS_NUMBERS:
        return None
    return f"the server sent the grpc-status {shown(status)}: allowed is a number from 0 to 16"
