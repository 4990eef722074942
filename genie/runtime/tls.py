"""Certificates: the cluster's own CA, what it issues, and the contexts that TLS is made with.

Names are roles, not hosts: a controller's certificate carries `controller.genie.internal`, a
node's `ID.node.genie.internal`, an executor's `JOB.executor.genie.internal`. A client connects
to any address and checks for the role it expects; so addresses may change, and no node can
pass for a controller. The identity in a certificate is set by the issuer; what a signing
request says of itself is ignored.

Issuing needs the `cryptography` package and is imported late: clients only need `ssl`.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from genie.errors import TlsError
from genie.runtime import files
from genie.tenancy.access import encoded

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_DOMAIN = "genie.internal"
CONTROLLER_NAME = f"controller.{_DOMAIN}"
_CA_DAYS = 3650.0
_SKEW = datetime.timedelta(minutes=5)


def node_name(node_id: str) -> str:
    return f"{node_id}.node.{_DOMAIN}"


def executor_name(job_id: str) -> str:
    return f"{job_id}.executor.{_DOMAIN}"


def fingerprint(ca_pem: str) -> str:
    """SHA-256 of a certificate, as tokens carry it."""
    try:
        der = ssl.PEM_cert_to_DER_cert(ca_pem)
    except ValueError as error:
        raise TlsError(f"this is not a certificate: {error}") from error
    return encoded(hashlib.sha256(der).digest())


def client_context(
    ca_pem: str, *, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Trusts this CA and nothing else; shows a certificate of its own where one is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=ca_pem)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"certificate files cannot be used: {error}", hint="join the node again") from error
    return context


def unverified_context() -> ssl.SSLContext:
    """Only for fetching a CA that is then compared with a pin. Nothing secret may be sent over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def server_context(certificate: Path, key: Path, *, ca_pem: str = "") -> ssl.SSLContext:
    """With `ca_pem`, client certificates of that CA are verified where the client shows one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
        if ca_pem:
            context.load_verify_locations(cadata=ca_pem)
            context.verify_mode = ssl.CERT_OPTIONAL
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"certificate files cannot be used: {error}") from error
    return context


def new_key_and_csr() -> tuple[bytes, str]:
    """A fresh private key (PEM) and a signing request for it. The request names nothing."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return _key_pem(key), _pem(csr)


def validity(certificate_pem: str) -> tuple[float, float]:
    """From when and until when, in seconds since the epoch."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def renew_at(certificate_pem: str) -> float:
    """Half of its life, when it is to be replaced."""
    start, end = validity(certificate_pem)
    return start + (end - start) / 2


class CertificateAuthority:
    """The key that says who belongs to the cluster. Kept in two files, the key readable by the owner only."""

    def __init__(self, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key
        self.ca_pem = _pem(certificate)
        self.fingerprint = fingerprint(self.ca_pem)

    @classmethod
    def create(cls, *, now: float) -> CertificateAuthority:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Genie cluster CA")])
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_ca_key_usage(), True),
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
            (x509.NameConstraints([x509.DNSName(_DOMAIN)], None), True),
        ]
        certificate = _signed(
            name, name, key.public_key(), key, now=now, life_s=_CA_DAYS * 86400, extensions=extensions
        )
        return cls(certificate, key)

    @classmethod
    def load_or_create(cls, directory: Path, *, now: float) -> CertificateAuthority:
        """The CA in this directory; a new one when there is none. Half a CA is an error, never replaced."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        certificate_path, key_path = directory / "ca.pem", directory / "ca.key"
        if not certificate_path.exists() and not key_path.exists():
            authority = cls.create(now=now)
            files.write_private(key_path, _key_pem(authority._key))
            files.write_private(certificate_path, authority.ca_pem.encode())
            return authority
        try:
            certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
            key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        except (OSError, ValueError) as error:
            raise TlsError(
                f"the cluster's CA in {directory} cannot be read: {error}",
                hint="restore ca.pem and ca.key from a backup; every node and token depends on them",
            ) from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(certificate, key)

    def issue(self, csr_pem: str, *, name: str, days: float, now: float) -> str:
        """A certificate for the key in the request, with the name that the issuer chose."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        try:
            csr = x509.load_pem_x509_csr(csr_pem.encode())
            good = csr.is_signature_valid and isinstance(csr.public_key(), ec.EllipticCurvePublicKey)
        except (ValueError, TypeError) as error:
            raise TlsError(f"the signing request cannot be read: {error}") from error
        if not good:
            raise TlsError("the signing request is not signed by its own key, or not with an EC key")
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.SubjectAlternativeName([x509.DNSName(name)]), True),
            (
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                False,
            ),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False),
        ]
        certificate = _signed(
            x509.Name([]),
            self._certificate.subject,
            csr.public_key(),
            self._key,
            now=now,
            life_s=days * 86400,
            extensions=extensions,
        )
        return _pem(certificate)


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: object,
    signer: EllipticCurvePrivateKey,
    *,
    now: float,
    life_s: float,
    extensions: list[tuple[x509.ExtensionType, bool]],
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    assert isinstance(public_key, ec.EllipticCurvePublicKey)
    start = datetime.datetime.fromtimestamp(now, datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - min(_SKEW, datetime.timedelta(seconds=life_s / 10)))
        .not_valid_after(start + datetime.timedelta(seconds=life_s))
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA256())


def _ca_key_usage() -> x509.KeyUsage:
    from cryptography import x509

    off = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
        **off,
    )


def _pem(thing: x509.Certificate | x509.CertificateSigningRequest) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return thing.public_bytes(Encoding.PEM).decode()


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
