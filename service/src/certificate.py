"""What is read of a PEM file of certificates: ssl itself says little of its own side's."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

__all__ = ["Validity", "certificates_in", "validity_of"]


class Validity(NamedTuple):
    """From when until when a certificate is valid, in UTC."""

    begin: datetime
    end: datetime


def certificates_in(pem: bytes) -> list[bytes]:
    """The certificates of a file, in DER.

    Raises:
        ValueError: there is none, or one cannot be read.
    """
    from cryptography.hazmat.primitives.serialization import Encoding

    return [certificate.public_bytes(Encoding.DER) for certificate in _load(pem)]


def validity_of(pem: bytes) -> Validity:
    """The dates of the first certificate of a file.

    Raises:
        ValueError: there is none, or one cannot be read.
    """
    first, *_ = _load(pem)
    return Validity(first.not_valid_before_utc, first.not_valid_after_utc)


def _load(pem: bytes) -> list[Certificate]:
    from cryptography import x509  # a daemon without TLS does not load it

    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion):  # their words are of parsers
        raise ValueError("no certificate, or one that cannot be read") from None
