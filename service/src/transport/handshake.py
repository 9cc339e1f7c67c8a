"""Why TLS did not begin."""

import ssl
from enum import Enum

__all__ = ["HandshakeFailure"]

EXPIRED, NOT_YET_VALID = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID of OpenSSL
OF_VERIFICATION = {EXPIRED: "EXPIRED_CERTIFICATE", NOT_YET_VALID: "CERTIFICATE_NOT_YET_VALID"}
OF_OPENSSL = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "NO_CERTIFICATE",
    "UNSUPPORTED_PROTOCOL": "OLD_VERSION",
    "UNEXPECTED_EOF_WHILE_READING": "LEFT",
    **dict.fromkeys(
        ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL"), "NOT_TLS"
    ),
    **dict.fromkeys(("PACKET_LENGTH_TOO_LONG", "LENGTH_TOO_SHORT", "BAD_RECORD_TYPE"), "NOT_TLS"),
}


class HandshakeFailure(Enum):
    """The kinds of failures that an operator can tell apart; the value says what happened."""

    EXPIRED_CERTIFICATE = "the client's certificate has expired"
    CERTIFICATE_NOT_YET_VALID = "the client's certificate is not valid yet"
    UNTRUSTED_CERTIFICATE = "the client's certificate was not verified"
    NO_CERTIFICATE = "the client showed no certificate"
    REFUSED_BY_CLIENT = "the client refused, as it does where it does not trust the daemon's certificate"
    OLD_VERSION = "the client knows no version of TLS that is served"
    NOT_TLS = "what the client sent is no TLS"
    TIMED_OUT = "the handshake did not end in time"
    LEFT = "the client left"
    OTHER = "something else"

    @property
    def label(self) -> str:
        """Its name in logs and metrics."""
        return self.name.lower()

    @classmethod
    def of(cls, error: OSError) -> "HandshakeFailure":
        """What an error of asyncio's handshake stands for."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return cls[OF_VERIFICATION.get(error.verify_code, "UNTRUSTED_CERTIFICATE")]
        if isinstance(error, ssl.SSLError):
            reason = error.reason or ""
            return cls.REFUSED_BY_CLIENT if "ALERT" in reason else cls[OF_OPENSSL.get(reason, "OTHER")]
        if isinstance(error, (ConnectionAbortedError, TimeoutError)):
            return cls.TIMED_OUT
        return cls.LEFT if isinstance(error, ConnectionError) else cls.OTHER
