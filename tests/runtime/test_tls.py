"""Certificates: who issued them, whose they are, how long they last, and what is refused."""

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


def _names(certificate_pem: str) -> list[str]:
    certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return extension.value.get_values_for_type(x509.DNSName)


def test_a_ca_is_made_once_and_read_afterwards(tmp_path: Path) -> None:
    first = tls.CertificateAuthority.load_or_create(tmp_path, now=time.time())
    second = tls.CertificateAuthority.load_or_create(tmp_path, now=time.time())
    assert first.ca_pem == second.ca_pem
    assert (tmp_path / "ca.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("missing", ["ca.pem", "ca.key"])
def test_half_a_ca_is_an_error_and_is_never_replaced(tmp_path: Path, missing: str) -> None:
    tls.CertificateAuthority.load_or_create(tmp_path, now=time.time())
    (tmp_path / missing).unlink()
    with pytest.raises(TlsError, match="cannot be read"):
        tls.CertificateAuthority.load_or_create(tmp_path, now=time.time())
    assert not (tmp_path / missing).exists()


def test_garbage_in_place_of_a_ca_is_an_error(tmp_path: Path) -> None:
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).write_text("nonsense")
    with pytest.raises(TlsError, match=r"restore ca\.pem and ca\.key"):
        tls.CertificateAuthority.load_or_create(tmp_path, now=time.time())


def test_the_issuer_chooses_the_name_whatever_the_request_says() -> None:
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
    issued = authority.issue(csr_pem, name=tls.node_name("n1"), days=1, now=time.time())
    assert _names(issued) == ["n1.node.genie.internal"]
    certificate = x509.load_pem_x509_certificate(issued.encode())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.subject == x509.Name([])


def test_a_certificate_lasts_as_long_as_it_should_and_is_renewed_at_half() -> None:
    now = time.time()
    authority = tls.CertificateAuthority.create(now=now)
    _, csr_pem = tls.new_key_and_csr()
    issued = authority.issue(csr_pem, name="x.node.genie.internal", days=2, now=now)
    start, end = tls.validity(issued)
    assert start <= now
    assert end == pytest.approx(now + 2 * 86400, abs=2)
    assert start < tls.renew_at(issued) < end
    assert tls.renew_at(issued) == pytest.approx(now + 86400, abs=400)


def _rsa_request() -> str:
    key = rsa.generate_private_key(65537, 2048)
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return csr.public_bytes(serialization.Encoding.PEM).decode()


def _forged_request() -> str:
    """Two honest requests, the key of one under the signature of the other."""
    _, one = tls.new_key_and_csr()
    lines = one.splitlines()
    middle = len(lines) // 2
    swapped = lines[middle].swapcase()
    return "\n".join([*lines[:middle], swapped, *lines[middle + 1 :]]) + "\n"


@pytest.mark.parametrize(
    "request_",
    ["", "nonsense", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"],
)
def test_a_request_that_cannot_be_read_is_refused(request_: str) -> None:
    authority = tls.CertificateAuthority.create(now=time.time())
    with pytest.raises(TlsError, match="signing request"):
        authority.issue(request_, name="x", days=1, now=time.time())


def test_a_request_with_another_kind_of_key_or_a_bad_signature_is_refused() -> None:
    authority = tls.CertificateAuthority.create(now=time.time())
    for request in (_rsa_request(), _forged_request()):
        with pytest.raises(TlsError, match="signing request"):
            authority.issue(request, name="x", days=1, now=time.time())


def test_the_fingerprint_is_what_tokens_carry() -> None:
    authority = tls.CertificateAuthority.create(now=time.time())
    token = new_token(TokenKind.USER, token_id="abcd", secret=bytes(32), pin=authority.fingerprint)
    assert parse_token(str(token)).pin == tls.fingerprint(authority.ca_pem) != NO_PIN
    with pytest.raises(TlsError, match="not a certificate"):
        tls.fingerprint("nonsense")


def test_contexts_take_nothing_below_tls_1_3_and_say_when_files_are_bad(tmp_path: Path) -> None:
    authority = tls.CertificateAuthority.create(now=time.time())
    for context in (tls.client_context(authority.ca_pem), tls.unverified_context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert tls.client_context(authority.ca_pem).verify_mode is ssl.CERT_REQUIRED
    with pytest.raises(TlsError, match="cannot be used"):
        tls.client_context("nonsense")
    with pytest.raises(TlsError, match="cannot be used"):
        tls.server_context(tmp_path / "none.pem", tmp_path / "none.key")
