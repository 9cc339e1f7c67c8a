"""Why a connection was not made, or ended before the server said a word: often one side speaks TLS otherwise."""

import ssl

__all__ = ["ended", "unconnected", "unread"]

SPEAKS_TLS = "the server speaks TLS, and was spoken to in plain text"
WANTED = "a certificate of the client, of an authority that it trusts"
BEFORE = "the server closed the connection before HTTP/2 began"


def unconnected(error: OSError, address: str, *, is_tls: bool) -> str:
    """Says why no connection to `address` was made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = f"{_reason(error)}: {error.verify_message}"
        return f"the certificate of the server at {address} is not trusted: {reason}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with the server at {address}: {_reason(error)}; it may speak plain text"
    if is_tls and isinstance(error, (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)):
        one_of = f"it may speak plain text, have no room for one more, or want {WANTED}"
        return f"the server at {address} closed the connection in the TLS handshake: {one_of}"
    return f"no server answers at {address}: {error}"


def ended(error: BaseException | None, first: bytes, *, is_tls: bool) -> str:
    """Says why a connection that was made has ended.

    Args:
        error: that the transport had; None = the server closed it.
        first: how what the server sent began; empty = it sent nothing.
    """
    if isinstance(error, ssl.SSLError):
        return f"the server ended TLS: {_reason(error)}"
    if _is_alert(first):
        return SPEAKS_TLS
    if first:
        return "Connection lost"
    return f"{BEFORE}: it may want {WANTED if is_tls else 'TLS'}"


def unread(error: Exception, first: bytes) -> str:
    """Says what was wrong with what the server sent.

    Args:
        first: how it began.
    """
    if _is_alert(first):
        return SPEAKS_TLS
    what = f"a frame on the stream {error}, which is not open" if str(error).isdigit() else error
    return f"the server broke HTTP/2: {what}"


def _is_alert(first: bytes) -> bool:
    """Whether it is how a server that speaks TLS may answer what is none: a record of type 21, of version 3."""
    return first.startswith(b"\x15\x03")


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's, such as "certificate verify failed"."""
    return (error.reason or error.strerror or type(error).__name__).replace("_", " ").lower()
