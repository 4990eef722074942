"""Certificates: issuer, name, lifetime and validation."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from genie.errors import TlsError
from genie.model.tenant import TokenKind
from genie.runtime import tls
from genie.tenancy.access import NO_PIN, new_token, parse_token


def _certificate_names(certificate_pem: str) -> list[str]:
    certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return extension.value.get_values_for_type(x509.DNSName)


def test_ca_is_created_once_and_then_read(tmp_path: Path) -> None:
    first = tls.CertificateAuthority.load_or_create(tmp_path, now=time.time())
    second = tls.CertificateAuthority.load_or_create(tmp_path, now=time.time())
    assert first.ca_pem == second.ca_pem
    assert (tmp_path / "ca.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("missing", ["ca.pem", "ca.key"])
def test_incomplete_ca_is_an_error_and_never_replaced(tmp_path: Path, missing: str) -> None:
    tls.CertificateAuthority.load_or_create(tmp_path, now=time.time())
    (tmp_path / missing).unlink()
    with pytest.raises(TlsError, match="cannot be read"):
        tls.CertificateAuthority.load_or_create(tmp_path, now=time.time())
    assert not (tmp_path / missing).exists()


def test_invalid_ca_files_are_an_error(tmp_path: Path) -> None:
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).write_text("nonsense")
    with pytest.raises(TlsError, match=r"restore ca\.pem and ca\.key"):
        tls.CertificateAuthority.load_or_create(tmp_path, now=time.time())


def test_names_in_a_signing_request_are_ignored() -> None:
    authority = tls.CertificateAuthority.create(now=time.time())
    key = ec.generate_private_key(ec.SECP256R1())
    greedy = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, tls.CONTROLLER_NAME)]))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(tls.CONTROLLER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    csr_pem = greedy.public_bytes(serialization.Encoding.PEM).decode()
    issued = authority.issue(csr_pem, name=tls.node_certificate_name("n1"), days=1, now=time.time())
    assert _certificate_names(issued) == ["n1.node.genie.internal"]
    certificate = x509.load_pem_x509_certificate(issued.encode())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.subject == x509.Name([])


def test_certificate_is_renewed_after_half_of_its_lifetime() -> None:
    now = time.time()
    authority = tls.CertificateAuthority.create(now=now)
    _, csr_pem = tls.new_key_and_csr()
    issued = authority.issue(csr_pem, name="x.node.genie.internal", days=2, now=now)
    start, end = tls.validity_period(issued)
    assert start <= now
    assert end == pytest.approx(now + 2 * 86400, abs=2)
    assert tls.renewal_due_in_s(issued, now=now) == pytest.approx(86400, abs=400)
    assert tls.renewal_due_in_s(issued, now=end + 1) == 0
    assert tls.renewal_due_in_s(issued, now=start - 1) == 0, "the clock was set back"


def _rsa_csr() -> str:
    key = rsa.generate_private_key(65537, 2048)
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return csr.public_bytes(serialization.Encoding.PEM).decode()


def _csr_with_invalid_signature() -> str:
    """Two valid requests, the key of one with the signature of the other."""
    _, one = tls.new_key_and_csr()
    lines = one.splitlines()
    middle = len(lines) // 2
    swapped = lines[middle].swapcase()
    return "\n".join([*lines[:middle], swapped, *lines[middle + 1 :]]) + "\n"


@pytest.mark.parametrize(
    "request_",
    ["", "nonsense", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"],
)
def test_invalid_signing_request_is_rejected(request_: str) -> None:
    authority = tls.CertificateAuthority.create(now=time.time())
    with pytest.raises(TlsError, match="signing request"):
        authority.issue(request_, name="x", days=1, now=time.time())


def test_signing_request_with_another_key_type_or_a_bad_signature_is_rejected() -> None:
    authority = tls.CertificateAuthority.create(now=time.time())
    for request in (_rsa_csr(), _csr_with_invalid_signature()):
        with pytest.raises(TlsError, match="signing request"):
            authority.issue(request, name="x", days=1, now=time.time())


def test_fingerprint_is_the_pin_of_tokens() -> None:
    authority = tls.CertificateAuthority.create(now=time.time())
    token = new_token(TokenKind.USER, token_id="abcd", secret=bytes(32), pin=authority.fingerprint)
    assert parse_token(str(token)).pin == tls.fingerprint(authority.ca_pem) != NO_PIN
    with pytest.raises(TlsError, match="invalid certificate"):
        tls.fingerprint("nonsense")


@pytest.mark.parametrize("separator", ["", "\n", "text\n"])
def test_appended_certificate_is_neither_fingerprinted_nor_trusted(separator: str) -> None:
    """Several authorities, because base64 padding depends on the length of the certificate."""
    other = tls.CertificateAuthority.create(now=time.time())
    for _ in range(8):
        both = tls.CertificateAuthority.create(now=time.time()).ca_pem + separator + other.ca_pem
        with pytest.raises(TlsError, match="invalid certificate"):
            tls.fingerprint(both)
        with pytest.raises(TlsError, match="invalid certificate"):
            tls.client_context(both)


def test_contexts_require_tls_1_3_and_valid_files(tmp_path: Path) -> None:
    authority = tls.CertificateAuthority.create(now=time.time())
    for context in (tls.client_context(authority.ca_pem), tls.unverified_context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert tls.client_context(authority.ca_pem).verify_mode is ssl.CERT_REQUIRED
    with pytest.raises(TlsError, match="invalid certificate"):
        tls.client_context("nonsense")
    with pytest.raises(TlsError, match="could not load the certificate"):
        tls.server_context(tmp_path / "none.pem", tmp_path / "none.key")


def test_server_sends_no_session_tickets(tmp_path: Path) -> None:
    authority, now = tls.CertificateAuthority.create(now=time.time()), time.time()
    key_pem, csr_pem = tls.new_key_and_csr()
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    certificate.write_text(authority.issue(csr_pem, name=tls.CONTROLLER_NAME, days=1, now=now))
    key.write_bytes(key_pem)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = tls.server_context(certificate, key, ca_pem=authority.ca_pem)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = tls.client_context(authority.ca_pem).wrap_bio(
        to_client, to_server, server_hostname=tls.CONTROLLER_NAME
    )
    for side in (client, server):
        with pytest.raises(ssl.SSLWantReadError):
            side.do_handshake()
    client.do_handshake()
    server.do_handshake()
    assert to_client.pending == 0
