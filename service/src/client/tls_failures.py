"""Why a connection was not made, or ended before the server said a word: often one side speaks TLS otherwise."""

import re
import ssl
from enum import Enum, auto
from typing import NamedTuple

from h2.exceptions import NoSuchStreamError, ProtocolError

__all__ = ["Reason", "TlsTrouble", "why_ended", "why_not_connected", "why_unreadable"]

SPEAKS_TLS = "the server speaks TLS, and was spoken to in plain text"
WANTED = "a certificate of the client, of an authority that it trusts"
BEFORE = "the server closed the connection before HTTP/2 began"

# OpenSSL's names for what it read, and for alerts, which the other side sent.
NO_TLS = frozenset(
    {"PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "WRONG_VERSION_NUMBER"}
)
ALERT = re.compile("SSLV3_ALERT_|TLSV1_|TLSV13_ALERT_")
ALERT_OF_CERTIFICATE = re.compile("CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED|HANDSHAKE_FAILURE")


class TlsTrouble(Enum):
    """What may be amiss with TLS between a client and a server."""

    ONE_SIDED = auto()
    """One side speaks TLS and the other one plain text."""
    SERVER_NOT_TRUSTED = auto()
    """The client takes the server's certificate for none of an authority that it trusts, or of another name."""
    CLIENT_CERTIFICATE = auto()
    """The server wants a certificate that the client did not show."""


class Reason(NamedTuple):
    """Why a call has failed, in words, and what of TLS may be the matter: None = nothing."""

    text: str
    trouble: TlsTrouble | None = None


def why_not_connected(error: OSError, address: str, *, is_tls: bool) -> Reason:
    """Says why no connection to `address` was made."""
    server = f"the server at {address}"
    if isinstance(error, ssl.SSLCertVerificationError):
        words = f"{_words(error)}: {error.verify_message}"
        return Reason(f"the certificate of {server} is not trusted: {words}", TlsTrouble.SERVER_NOT_TRUSTED)
    if isinstance(error, ssl.SSLError):
        return _failed_handshake(error, server)
    is_asyncios_own = isinstance(error, ConnectionAbortedError) and error.errno is None
    if is_tls and is_asyncios_own:  # at the limit of its time for a handshake
        words = "did not answer the TLS handshake in time; it may speak plain text"
        return Reason(f"{server} {words}", TlsTrouble.ONE_SIDED)
    if is_tls and isinstance(error, (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)):
        one_of = f"it may speak plain text, have no room for one more, or want {WANTED}"
        words = f"{server} closed the connection in the TLS handshake: {one_of}"
        return Reason(words, TlsTrouble.CLIENT_CERTIFICATE)
    return Reason(f"no server answers at {address}: {error}")


def why_ended(error: BaseException | None, opening: bytes, *, is_tls: bool) -> Reason:
    """Says why a connection that was made has ended.

    Args:
        error: that the transport had; None = the server closed it.
        opening: how what the server sent began; empty = it sent nothing.
    """
    if isinstance(error, ssl.SSLError):
        if _is_alert(error):
            return Reason(f"the server ended TLS: {_words(error)}", _trouble_of_alert(error))
        return Reason(f"TLS with the server broke: {_words(error)}")
    if _is_alert_record(opening):
        return Reason(SPEAKS_TLS, TlsTrouble.ONE_SIDED)
    if opening:
        return Reason("Connection lost")
    if is_tls:
        return Reason(f"{BEFORE}: it may want {WANTED}", TlsTrouble.CLIENT_CERTIFICATE)
    return Reason(f"{BEFORE}: it may want TLS", TlsTrouble.ONE_SIDED)


def why_unreadable(error: ProtocolError, opening: bytes) -> Reason:
    """Says what was wrong with what the server sent.

    Args:
        opening: how it began.
    """
    if _is_alert_record(opening):
        return Reason(SPEAKS_TLS, TlsTrouble.ONE_SIDED)
    if isinstance(error, NoSuchStreamError):  # its text is the number alone
        return Reason(f"the server broke HTTP/2: a frame on the stream {error.stream_id}, which is not open")
    return Reason(f"the server broke HTTP/2: {error}")


def _failed_handshake(error: ssl.SSLError, server: str) -> Reason:
    if _is_alert(error):
        trouble = _trouble_of_alert(error)
        hint = "" if trouble is None else "; it may want a certificate of the client"
        return Reason(f"{server} ended the TLS handshake: {_words(error)}{hint}", trouble)
    words = f"no TLS with {server}: {_words(error)}"
    if error.reason in NO_TLS:
        return Reason(f"{words}; it may speak plain text", TlsTrouble.ONE_SIDED)
    return Reason(words)


def _is_alert(error: ssl.SSLError) -> bool:
    return ALERT.match(error.reason or "") is not None


def _trouble_of_alert(error: ssl.SSLError) -> TlsTrouble | None:
    """A server that wants a certificate ends a handshake without one as one that wants other ciphers may, too."""
    is_of_certificate = ALERT_OF_CERTIFICATE.search(error.reason or "")
    return TlsTrouble.CLIENT_CERTIFICATE if is_of_certificate else None


def _is_alert_record(opening: bytes) -> bool:
    """Whether it is how a server that speaks TLS may answer what is none: a record of type 21, of version 3."""
    return opening.startswith(b"\x15\x03")


def _words(error: ssl.SSLError) -> str:
    """OpenSSL's, such as "certificate verify failed"."""
    return (error.reason or error.strerror or type(error).__name__).replace("_", " ").lower()
