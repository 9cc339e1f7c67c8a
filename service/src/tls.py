"""TLS: the files of an operator become a context, or a clear refusal."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pykv.errors import ConfigError
from pykv.service.certificate import Validity, certificates_in, check_labels, validity_of
from pykv.service.files import check_regular, read_bytes

__all__ = ["ServerTls", "TlsFiles"]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What the files said.

    Attributes:
        context: for connections that are accepted.
        expires_at: when the daemon's certificate ends, in seconds since 1970.
        client_authorities: the certificates, in DER, by which those of clients are verified; none = clients show
            none.
    """

    context: ssl.SSLContext
    expires_at: float
    client_authorities: frozenset[bytes] = frozenset()


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

    def read(self) -> ServerTls:
        """Reads the files.

        Raises:
            ConfigError: one cannot be read, they do not fit together, or the certificate is not valid now.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        expires_at = self._show_own(context)
        if self.client_authorities is None:
            return ServerTls(context, expires_at)
        return ServerTls(context, expires_at, self._ask_clients(context, self.client_authorities))

    def _show_own(self, context: ssl.SSLContext) -> float:
        """Has the daemon show its certificate; returns when that ends, in seconds since 1970."""
        content = read_bytes(self.certificate, "tls_cert")
        check_labels(content, f"tls_cert {self.certificate}")
        check_regular(self.key, "tls_key")  # ssl would wait for a pipe, and its errors do not name the file
        try:
            context.load_cert_chain(self.certificate, self.key, _no_passphrase)
            validity = validity_of(content)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            allowed = "a PEM certificate and its key, without a passphrase"
            message = f"tls_cert {self.certificate} and tls_key {self.key} cannot be used: {_reason(error)}"
            raise ConfigError(f"{message}: allowed is {allowed}") from None
        _check_unchanged(self.certificate, "tls_cert", content)
        _check_valid(self.certificate, validity)
        return validity.end.timestamp()

    def _ask_clients(self, context: ssl.SSLContext, authorities: Path) -> frozenset[bytes]:
        """Has clients show certificates; returns those by which theirs are verified."""
        content = read_bytes(authorities, "tls_client_ca")
        check_labels(content, f"tls_client_ca {authorities}")
        try:
            context.load_verify_locations(authorities)
            certificates = frozenset(certificates_in(content))
        except (OSError, ValueError) as error:
            message = f"tls_client_ca {authorities} cannot be used: {_reason(error)}"
            raise ConfigError(f"{message}: allowed are PEM certificates") from None
        _check_unchanged(authorities, "tls_client_ca", content)
        required = self.is_client_certificate_required
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        return certificates


def _check_valid(path: Path, validity: Validity) -> None:
    """Clients refuse a certificate that is not valid now."""
    now = datetime.now(UTC)
    if validity.begin <= now <= validity.end:
        return
    if now > validity.end:
        found = f"has expired: it was valid until {_shown(validity.end)}"
    else:
        found = f"is not valid before {_shown(validity.begin)}"
    clock = f"by the clock of this machine it is {_shown(now)}"
    raise ConfigError(f"tls_cert {path} {found}, and {clock}: allowed is a certificate that is valid now")


def _check_unchanged(path: Path, name: str, content: bytes) -> None:
    """ssl has read the file by itself."""
    if read_bytes(path, name) != content:
        raise ConfigError(f"{name} {path} changed while it was read: allowed is a file at rest")


def _shown(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
