"""How the commands reach a server: the same options for all of them."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pykv.client import DEFAULT_ADDRESS, Client, ServiceError, tls_context
from pykv.errors import ConfigError
from pykv.service.client.tls_failures import TlsTrouble

__all__ = ["add_connection_options", "answering", "client_of"]

ANSWER_SECONDS = 10.0

OPTIONS_AGAINST = {
    TlsTrouble.ONE_SIDED: "--tls and --tls-ca",
    TlsTrouble.SERVER_NOT_TRUSTED: "--tls-ca",
    TlsTrouble.CLIENT_CERTIFICATE: "--tls-cert and --tls-key",
}


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `client_of` reads."""
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="of pykv-serve (%(default)s)"
    )
    group.add_argument("--token-file", metavar="FILE", help="holds the bearer token of a tenant")
    group.add_argument("--tls", action="store_true", help="the server has a certificate")
    group.add_argument(
        "--tls-ca", metavar="FILE", help="PEM: who signed it, if no authority of the system did"
    )
    group.add_argument("--tls-cert", metavar="FILE", help="PEM: the certificate to show")
    group.add_argument("--tls-key", metavar="FILE", help="PEM: its key")


def client_of(options: argparse.Namespace) -> Client:
    """A client as the options say.

    Raises:
        ConfigError: the address is none, or a file cannot be used.
    """
    wants_tls = options.tls or options.tls_ca or options.tls_cert or options.tls_key
    tls = tls_context(options.tls_ca, options.tls_cert, options.tls_key) if wants_tls else None
    token = None if options.token_file is None else _token_in(Path(options.token_file))
    return Client(options.address, token=token, tls=tls)


@asynccontextmanager
async def answering(address: str) -> AsyncIterator[None]:
    """Bounds how long a call of few words may take.

    Raises:
        ServiceError: the server did not answer in time; or it knows nobody by what was shown, or TLS is amiss, and
            the error names the options that may help.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            yield
    except TimeoutError:
        message = f"no answer from {address} within {ANSWER_SECONDS:g} s"
        raise ServiceError(message, "UNAVAILABLE") from None
    except ServiceError as error:
        options = _options_that_may_help(error)
        if options is None:
            raise
        raise ServiceError(
            f"{error.message}; see {options}",
            error.status,
            error.retry_seconds,
            tls_trouble=error.tls_trouble,
        ) from error


def _options_that_may_help(error: ServiceError) -> str | None:
    if error.status == "UNAUTHENTICATED":
        return "--token-file and --tls-cert"
    return None if error.tls_trouble is None else OPTIONS_AGAINST[error.tls_trouble]


def _token_in(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no ASCII text"
        raise ConfigError(f"token_file {path} cannot be read: {reason}") from error
