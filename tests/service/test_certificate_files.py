"""Of a file of certificates pykv sees what OpenSSL takes from it, and refuses what only OpenSSL would read."""

import base64
import io
import json
import re
import warnings
from datetime import UTC, datetime, timedelta

import cryptography.x509
import pytest

from pykv.client import tls_context
from pykv.errors import ConfigError
from pykv.service.certificate import certificates_in
from pykv.service.logs import configure_logs
from pykv.service.tls import TlsFiles

HOST = "127.0.0.1"
EXPIRED = {
    "not_before": datetime.now(UTC) - timedelta(days=4),
    "not_after": datetime.now(UTC) - timedelta(days=1),
}
LABELS = ("TRUSTED CERTIFICATE", "X509 CERTIFICATE", "X509 CRL")


def labelled(path, label):
    """Writes the label of the first block of a file anew."""
    first, end, rest = path.read_text().partition("-----END CERTIFICATE-----\n")
    text = first.replace("BEGIN CERTIFICATE", f"BEGIN {label}") + end.replace("CERTIFICATE", label) + rest
    path.write_text(text)
    return path


def indented(path):
    path.write_text("".join(f" {line}\n" for line in path.read_text().splitlines()))
    return path


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("is_last", [True, False])
def test_a_block_that_only_openssl_would_take_is_refused_wherever_it_is(
    authority, make_authority, tmp_path, label, is_last
):
    chain, key = authority.issue("server", HOST)
    other = labelled(make_authority(tmp_path / "other").file, label).read_text()
    for option in ("tls_cert", "tls_client_ca"):
        file = {"tls_cert": chain, "tls_client_ca": authority.file}[option]
        whole = file.read_text()
        file.write_text(whole + other if is_last else other + whole)
        words = (
            f"{option} {file} holds a PEM block of the label {label}: allowed are certificates of the label"
        )
        with pytest.raises(ConfigError, match=f"^{re.escape(words)} CERTIFICATE$"):
            TlsFiles(chain, key, authority.file).read()
        file.write_text(whole)
    TlsFiles(chain, key, authority.file).read()


def test_an_expired_certificate_is_seen_whatever_its_label(authority):
    chain, key = authority.issue("server", HOST, **EXPIRED)
    chain.write_text(chain.read_text() + authority.file.read_text())
    for label in LABELS[:2]:
        with pytest.raises(ConfigError, match=f"label {label}"):
            TlsFiles(labelled(chain, label), key).read()
        chain.write_text(chain.read_text().replace(label, "CERTIFICATE"))


@pytest.mark.parametrize("label", LABELS[:2])
def test_a_client_refuses_such_blocks_too(authority, make_authority, tmp_path, label):
    chain, key = authority.issue("client", HOST)
    other = labelled(make_authority(tmp_path / "other").file, label).read_text()
    for name in ("certificate", "authorities"):
        file = {"certificate": chain, "authorities": authority.file}[name]
        whole = file.read_text()
        file.write_text(whole + other)
        with pytest.raises(
            ConfigError, match=f"^{name} {re.escape(str(file))} holds a PEM block of the label {label}: "
        ):
            tls_context(authority.file, chain, key)
        file.write_text(whole)
    tls_context(authority.file, chain, key)


def test_blocks_that_openssl_passes_over_are_passed_over(authority, make_authority, tmp_path):
    """A certificate that stands indented before the daemon's own, or among the authorities as a comment."""
    chain, key = authority.issue("server", HOST, **EXPIRED)
    valid, _ = authority.issue("valid", HOST)
    chain.write_text(indented(valid).read_text() + chain.read_text())
    with pytest.raises(ConfigError, match="has expired"):
        TlsFiles(chain, key).read()
    shown, comment = (
        authority.file.read_bytes(),
        indented(make_authority(tmp_path / "other").file).read_bytes(),
    )
    assert certificates_in(comment + shown + comment) == certificates_in(shown)
    assert certificates_in(b"\xef\xbb\xbf" + shown) == certificates_in(shown)


def test_a_block_without_an_end_is_none(authority):
    pem = authority.file.read_bytes()
    for content in (pem + pem[: len(pem) // 2], pem[: len(pem) // 2] + pem):
        with pytest.raises(ValueError, match="no end"):
            certificates_in(content)


def with_negative_serial(chain):
    """Only the first certificate of a chain stays; its signature is wrong, which OpenSSL does not look at."""
    der = bytearray(certificates_in(chain.read_bytes())[0])
    serial = der.index(b"\xa0\x03\x02\x01\x02\x02") + 7
    der[serial] |= 0x80
    text = base64.encodebytes(bytes(der)).decode()
    chain.write_text(f"-----BEGIN CERTIFICATE-----\n{text}-----END CERTIFICATE-----\n")


@pytest.mark.usefixtures("logging_as_it_was")
def test_a_warning_of_the_library_is_a_line_of_the_log(authority, capfd):
    chain, key = authority.issue("server", HOST)
    with_negative_serial(chain)
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logs("info", "json", stream)
        TlsFiles(chain, key).read()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["logger"], line["level"]) for line in lines] == [("py.warnings", "warning")]
    assert "serial number" in lines[0]["event"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), TypeError("no")])
def test_what_another_release_of_the_library_refuses_is_refused_in_words(authority, monkeypatch, error):
    def load(_):
        raise error

    chain, key = authority.issue("server", HOST)
    monkeypatch.setattr(cryptography.x509, "load_pem_x509_certificates", load)
    with pytest.raises(
        ConfigError, match=r"^tls_cert .* cannot be used: no certificate, or one that cannot be read"
    ):
        TlsFiles(chain, key).read()
