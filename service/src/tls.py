"""TLS: the files of an operator become a context, or a clear refusal."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from pykv.errors import ConfigError
from pykv.service.files import check_regular

__all__ = ["TlsFiles"]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the daemon's certificate is.

    Attributes:
        certificate: PEM: the daemon's, then those between it and its authority.
        key: PEM, without a passphrase.
        client_authorities: PEM: whose certificates clients must show; None = clients show none.
        is_client_certificate_required: whether a client without one is turned away.
    """

    certificate: Path
    key: Path
    client_authorities: Path | None = None
    is_client_certificate_required: bool = True

    def context(self) -> ssl.SSLContext:
        """Reads the files.

        Raises:
            ConfigError: one cannot be read, or they do not fit together.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        certificate, key = _readable(self.certificate, "tls_cert"), _readable(self.key, "tls_key")
        try:
            context.load_cert_chain(certificate, key, _no_passphrase)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            allowed = "a PEM certificate and its key, without a passphrase"
            message = f"tls_cert {self.certificate} and tls_key {self.key} cannot be used: {reason}"
            raise ConfigError(f"{message}: allowed is {allowed}") from None
        if self.client_authorities is not None:
            self._ask_clients(context, self.client_authorities)
        return context

    def _ask_clients(self, context: ssl.SSLContext, authorities: Path) -> None:
        readable = _readable(authorities, "tls_client_ca")
        try:
            context.load_verify_locations(readable)
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror
            message = f"tls_client_ca {authorities} cannot be used: {reason}"
            raise ConfigError(f"{message}: allowed are PEM certificates") from None
        required = self.is_client_certificate_required
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL


def _readable(path: Path, name: str) -> Path:
    """The path, if it can be read: ssl would wait for a pipe, and its own errors do not name the file."""
    check_regular(path, name)
    return path


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
