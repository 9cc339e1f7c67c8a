"""What is read of a PEM file of certificates: ssl itself says little of its own side's."""

import base64
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

__all__ = ["Validity", "certificates_in", "validity_of"]

PEM_CERTIFICATE = re.compile(
    rb"^-----BEGIN ([A-Z0-9 ]*CERTIFICATE)-----(.*?)^-----END \1-----", re.DOTALL | re.MULTILINE
)
VERSION, UTC_TIME, MOST_SHORT_LENGTH = 0xA0, 0x17, 127
VALIDITY = 3
"""Its place, from 0, among a certificate's fields after the version: number, algorithm, issuer, validity."""


class Validity(NamedTuple):
    """From when until when a certificate is valid, in UTC."""

    begin: datetime
    end: datetime


def certificates_in(pem: bytes) -> list[bytes]:
    """The certificates of a file, in base64 without spaces."""
    return [b"".join(found[2].split()) for found in PEM_CERTIFICATE.finditer(pem)]


def validity_of(pem: bytes) -> Validity:
    """The dates of the first certificate of a file.

    Raises:
        ValueError: there is none, or it is none as RFC 5280 has it.
    """
    certificates = certificates_in(pem)
    if not certificates:
        raise ValueError("no certificate")
    try:
        ((_, certificate),) = _elements(base64.b64decode(certificates[0], validate=True))
        _, fields = next(_elements(certificate))
        after_version = [content for tag, content in _elements(fields) if tag != VERSION]
        begin, end = (_time_of(tag, content) for tag, content in _elements(after_version[VALIDITY]))
    except (IndexError, StopIteration, ValueError):
        raise ValueError("a certificate without dates that can be read") from None
    return Validity(begin, end)


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The tags and the contents of what lies one after another."""
    while der:
        tag, length, start = der[0], der[1], 2
        if length > MOST_SHORT_LENGTH:
            start += length & MOST_SHORT_LENGTH
            length = int.from_bytes(der[2:start])
        yield tag, der[start : start + length]
        der = der[start + length :]


def _time_of(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == UTC_TIME:  # two digits of the year: from 50 on of the last century
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
