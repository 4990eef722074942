"""Certificates: the CA of the cluster, the certificates that it issues, and TLS contexts.

Names are roles, not hosts: `controller.genie.internal` for controllers, `ID.node.genie.internal` for nodes,
`JOB.executor.genie.internal` for executors, `etcd.genie.internal` for the members of the store. A client
connects to any address and verifies the role, so addresses may change and no node can impersonate a
controller. The issuer sets the name in a certificate; the name in a signing request is ignored.

Issuing needs the `cryptography` package, which is imported late: clients only need `ssl`.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from genie.errors import TlsError
from genie.processes import files
from genie.tenancy.access import encode_base64url

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_DOMAIN = "genie.internal"
CONTROLLER_NAME = f"controller.{_DOMAIN}"
ETCD_NAME = f"etcd.{_DOMAIN}"
_CA_LIFETIME_DAYS = 3650.0
_CLOCK_SKEW = datetime.timedelta(minutes=5)


def node_certificate_name(node_id: str) -> str:
    return f"{node_id}.node.{_DOMAIN}"


def executor_certificate_name(job_id: str) -> str:
    return f"{job_id}.executor.{_DOMAIN}"


def fingerprint(ca_pem: str) -> str:
    """SHA-256 of a certificate, as in the pin of a token. TlsError if the text is not exactly one."""
    return encode_base64url(hashlib.sha256(_decode_certificate(ca_pem)).digest())


def _decode_certificate(pem: str) -> bytes:
    """Returns the DER bytes of a text with one certificate and nothing else.

    The decoder of `ssl` ignores everything after the first certificate in most cases, so a second one would
    be trusted without being part of the fingerprint.
    """
    try:
        der = ssl.PEM_cert_to_DER_cert(pem)
    except ValueError as error:
        raise TlsError(f"invalid certificate: {error}") from error
    if ssl.DER_cert_to_PEM_cert(der).split() != pem.split():
        raise TlsError(
            "invalid certificate: the text is not exactly one certificate",
            hint="the peer, or a file in the state directory, is not trustworthy; log in or join again",
        )
    return der


def client_context(
    ca_pem: str, *, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Trusts only this CA; presents the client certificate if one is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=_decode_certificate(ca_pem))
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"could not load the certificate: {error}", hint="join the node again") from error
    return context


def unverified_context() -> ssl.SSLContext:
    """Only for fetching a CA that is then compared with a pin. Do not send secrets over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def server_context(certificate: Path, key: Path, *, ca_pem: str = "") -> ssl.SSLContext:
    """With `ca_pem`, client certificates are optional and verified with that CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no client resumes sessions
    try:
        context.load_cert_chain(certificate, key)
        if ca_pem:
            context.load_verify_locations(cadata=_decode_certificate(ca_pem))
            context.verify_mode = ssl.CERT_OPTIONAL
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"could not load the certificate: {error}") from error
    return context


def new_key_and_csr() -> tuple[bytes, str]:
    """A new private key (PEM) and a signing request for it, without a name."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return _key_to_pem(key), _to_pem(csr)


def new_csr(key_pem: bytes) -> str:
    """A signing request for an existing private key, without a name."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise TlsError(f"invalid private key: {error}", hint="join the node again") from error
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return _to_pem(csr)


def is_key_of_certificate(key_pem: str, certificate_pem: str) -> bool:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_private_key(key_pem.encode(), password=None)
        certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    except (ValueError, TypeError) as error:
        raise TlsError(f"invalid key or certificate: {error}") from error
    return key.public_key() == certificate.public_key()


def validity_period(certificate_pem: str) -> tuple[float, float]:
    """Start and end of the validity period, in seconds since the epoch."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def certificate_addresses(certificate_pem: str) -> list[str]:
    """The IP addresses in a certificate."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(address) for address in names.get_values_for_type(x509.IPAddress)]


def renewal_due_in_s(certificate_pem: str, *, now: float) -> float:
    """Seconds until the certificate is to be renewed: after half of its lifetime, and at once if it is not
    valid yet because the clock was set back."""
    start, end = validity_period(certificate_pem)
    return 0.0 if now < start else max(start + (end - start) / 2 - now, 0.0)


class CertificateAuthority:
    """The CA of the cluster: a certificate and a private key, in two files of mode 0600."""

    def __init__(self, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key
        self.ca_pem = _to_pem(certificate)
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
        certificate = _sign(
            name,
            name,
            key.public_key(),
            key,
            now=now,
            lifetime_s=_CA_LIFETIME_DAYS * 86400,
            extensions=extensions,
        )
        return cls(certificate, key)

    def derive_secret(self, purpose: str) -> bytes:
        """32 bytes that only holders of the CA's private key can compute, different for each purpose."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        private = self._key.private_numbers().private_value.to_bytes(self._key.key_size // 8, "big")
        return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=purpose.encode()).derive(private)

    @classmethod
    def load_or_create(cls, directory: Path, *, now: float) -> CertificateAuthority:
        """The CA in this directory; a new one when there is none. Half a CA is an error, never replaced."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        certificate_path, key_path = directory / "ca.pem", directory / "ca.key"
        if not certificate_path.exists() and not key_path.exists():
            authority = cls.create(now=now)
            files.write_private(key_path, _key_to_pem(authority._key))
            files.write_private(certificate_path, authority.ca_pem.encode())
            return authority
        try:
            certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
            key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        except (OSError, ValueError) as error:
            raise TlsError(
                f"the CA of the cluster in {directory} cannot be read: {error}",
                hint="restore ca.pem and ca.key from a backup; all nodes and tokens depend on them",
            ) from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(certificate, key)

    def private_key_pem(self) -> str:
        """For a new server only, and encrypted on the way."""
        return _key_to_pem(self._key).decode()

    def issue(
        self, csr_pem: str, *, name: str, days: float, now: float, addresses: Sequence[str] = ()
    ) -> str:
        """Issues a certificate for the key of the request, with the given name and IP addresses."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        try:
            csr = x509.load_pem_x509_csr(csr_pem.encode())
            is_valid = csr.is_signature_valid and isinstance(csr.public_key(), ec.EllipticCurvePublicKey)
        except (ValueError, TypeError) as error:
            raise TlsError(f"invalid signing request: {error}") from error
        if not is_valid:
            raise TlsError("the signing request is not signed by its own key, or not with an EC key")
        ip_names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.SubjectAlternativeName([x509.DNSName(name), *ip_names]), True),
            (
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                False,
            ),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False),
        ]
        certificate = _sign(
            x509.Name([]),
            self._certificate.subject,
            csr.public_key(),
            self._key,
            now=now,
            lifetime_s=days * 86400,
            extensions=extensions,
        )
        return _to_pem(certificate)

    def check_issued_by_this_ca(self, certificate_pem: str, *, name: str, csr_pem: str) -> None:
        """Raises TlsError unless this CA issued the certificate, with this name, for the key of the request.
        The certificate may have expired. `issue` checks that the request is signed with that key."""
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature

        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
            key = x509.load_pem_x509_csr(csr_pem.encode()).public_key()
            certificate.verify_directly_issued_by(self._certificate)
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            is_own = list(names) == [x509.DNSName(name)] and certificate.public_key() == key
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
            raise TlsError(f"the certificate was not issued by this cluster: {error}") from error
        if not is_own:
            raise TlsError(f"the certificate does not belong to {name}, or not to the key of the request")


def _sign(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: object,
    signer: EllipticCurvePrivateKey,
    *,
    now: float,
    lifetime_s: float,
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
        .not_valid_before(start - min(_CLOCK_SKEW, datetime.timedelta(seconds=lifetime_s / 10)))
        .not_valid_after(start + datetime.timedelta(seconds=lifetime_s))
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


def _to_pem(value: x509.Certificate | x509.CertificateSigningRequest) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return value.public_bytes(Encoding.PEM).decode()


def _key_to_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
