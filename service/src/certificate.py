"""What is read of a PEM file of certificates: ssl itself says little of its own side's."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from pykv.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

__all__ = ["Validity", "certificates_in", "check_labels", "validity_of"]

BEGIN = b"-----BEGIN "
LABEL = re.compile(rb"^(?:\xef\xbb\xbf)?-----BEGIN ([^\n]*?)-----[ \t\r]*$", re.MULTILINE)
CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----[ \t\r]*\n[^-]*-----END CERTIFICATE-----")
UNSERVED = frozenset((b"TRUSTED CERTIFICATE", b"X509 CERTIFICATE", b"X509 CRL"))
"""What OpenSSL would read of a file of certificates, and nobody else: its dates and names would go unseen, and lists of
revoked certificates are not looked into."""


class Validity(NamedTuple):
    """From when until when a certificate is valid, in UTC."""

    begin: datetime
    end: datetime


def check_labels(pem: bytes, name: str) -> None:
    """Sees whether a file of certificates has blocks of other kinds that OpenSSL would take for some.

    Args:
        name: of the option and of the file, for the message.

    Raises:
        ConfigError: it has one.
    """
    label = next((label for label in LABEL.findall(pem) if label in UNSERVED), None)
    if label is not None:
        found = f"{name} holds a PEM block of the label {label.decode()}"
        raise ConfigError(f"{found}: allowed are certificates of the label CERTIFICATE")


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
    """Those that OpenSSL reads: only at the start of a line does a block begin."""
    from cryptography import x509  # a daemon without TLS does not load it

    labels = (found for found in LABEL.finditer(pem) if found[1] == b"CERTIFICATE")
    blocks = [CERTIFICATE.match(pem, found.start(1) - len(BEGIN)) for found in labels]
    if not all(blocks):
        raise ValueError("a certificate that has no end")
    try:
        return x509.load_pem_x509_certificates(b"\n".join(block[0] for block in blocks if block))
    except Exception as error:
        # Its next release may refuse more, by whatever exception. The words would be those of parsers.
        raise ValueError("no certificate, or one that cannot be read") from error
