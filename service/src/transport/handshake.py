"""Why TLS did not begin."""

import ssl
from contextvars import ContextVar
from enum import Enum

__all__ = ["ClientHello", "HandshakeFailure"]

EXPIRED, NOT_YET_VALID = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID of OpenSSL


class ClientHello:
    """What a client begins TLS with, to which the daemon answers with its certificate.

    Attributes:
        has_come: whether it came by the connection that it was expected on.
    """

    def __init__(self) -> None:
        self.has_come = False

    @classmethod
    def expect(cls, tls: ssl.SSLContext) -> "ClientHello":
        """The one of the connection that the running task begins next with this context.

        All connections share the context, and its callback is not told by which of them a hello came. It runs in the
        context variables of the task that began the connection, where the hello that is expected stands.
        """
        tls.sni_callback = _note_hello
        hello = cls()
        _expected.set(hello)
        return hello


_expected: ContextVar[ClientHello] = ContextVar("expected")


def _note_hello(*_: object) -> None:
    _expected.get().has_come = True


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
    def of(cls, error: OSError, hello: ClientHello) -> "HandshakeFailure":
        """What an error of asyncio's handshake stands for.

        A client on asyncio sends no alert where it refuses: it leaves after its hello, the answer to which is the
        certificate.
        """
        failure = cls._named_by(error)
        return cls.REFUSED_BY_CLIENT if failure is cls.LEFT and hello.has_come else failure

    @classmethod
    def _named_by(cls, error: OSError) -> "HandshakeFailure":
        if isinstance(error, ssl.SSLCertVerificationError):
            return OF_VERIFICATION.get(error.verify_code, cls.UNTRUSTED_CERTIFICATE)
        if isinstance(error, ssl.SSLError):
            reason = error.reason or ""
            return cls.REFUSED_BY_CLIENT if "ALERT" in reason else OF_OPENSSL.get(reason, cls.OTHER)
        if isinstance(error, (ConnectionAbortedError, TimeoutError)):
            return cls.TIMED_OUT
        return cls.LEFT if isinstance(error, ConnectionError) else cls.OTHER


OF_VERIFICATION = {
    EXPIRED: HandshakeFailure.EXPIRED_CERTIFICATE,
    NOT_YET_VALID: HandshakeFailure.CERTIFICATE_NOT_YET_VALID,
}
OF_OPENSSL = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": HandshakeFailure.NO_CERTIFICATE,
    "UNSUPPORTED_PROTOCOL": HandshakeFailure.OLD_VERSION,
    "UNEXPECTED_EOF_WHILE_READING": HandshakeFailure.LEFT,
    "HTTP_REQUEST": HandshakeFailure.NOT_TLS,
    "HTTPS_PROXY_REQUEST": HandshakeFailure.NOT_TLS,
    "WRONG_VERSION_NUMBER": HandshakeFailure.NOT_TLS,
    "UNKNOWN_PROTOCOL": HandshakeFailure.NOT_TLS,
    "PACKET_LENGTH_TOO_LONG": HandshakeFailure.NOT_TLS,
    "LENGTH_TOO_SHORT": HandshakeFailure.NOT_TLS,
    "BAD_RECORD_TYPE": HandshakeFailure.NOT_TLS,
}
