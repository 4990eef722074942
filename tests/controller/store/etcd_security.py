"""Certificates and users for a real etcd in tests."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from genie.controller.store.etcd_proto import rpc_pb2, rpc_pb2_grpc
from tests.controller.store.etcd_server import EtcdServer


@dataclass
class Authority:
    """A CA. Its files are NAME-ca.pem and a .pem and a .key for each issued certificate."""

    folder: Path
    name: str

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        certificate = (
            self._builder(self._subject, self._key.public_key())
            .add_extension(constraints, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = self._write("ca.pem", certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, who: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, who)])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        certificate = (
            self._builder(subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return self._write(f"{who}.pem", certificate.public_bytes(pem)), self._write(f"{who}.key", plain)

    def server_options(self) -> list[str]:
        """Options of an etcd server with a certificate of this CA."""
        cert, key = self.issue("server")
        return ["--cert-file", str(cert), "--key-file", str(key)]

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    def _write(self, name: str, content: bytes) -> Path:
        path = self.folder / f"{self.name}-{name}"
        path.write_bytes(content)
        return path


async def enable_logins(server: EtcdServer, *, users: tuple[str, ...], password: str) -> None:
    """Create users, `root` among them, and require a login from now on."""
    added = [("UserAdd", _encode_string_field(1, user) + _encode_string_field(2, password)) for user in users]
    await call_auth_service(
        server.endpoint,
        *added,
        ("RoleAdd", _encode_string_field(1, "root")),
        ("UserGrantRole", _encode_string_field(1, "root") + _encode_string_field(2, "root")),
        ("AuthEnable", b""),
    )


async def change_password(server: EtcdServer, *, user: str, old: str, new: str) -> None:
    """Change the password of a user as `root`, whose password is `old`. etcd drops its logins."""
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        request = rpc_pb2.AuthenticateRequest(name="root", password=old)
        reply = await rpc_pb2_grpc.AuthStub(channel).Authenticate(request, timeout=10)
        changed = _encode_string_field(1, user) + _encode_string_field(2, new)
        await channel.unary_unary("/etcdserverpb.Auth/UserChangePassword", None, None)(
            changed, timeout=10, metadata=(("token", reply.token),)
        )


def _encode_string_field(number: int, value: str) -> bytes:
    """One string field of a protobuf message, by hand: Genie itself never administers etcd's users."""
    return bytes([number << 3 | 2, len(value)]) + value.encode()


async def call_auth_service(endpoint: str, *calls: tuple[str, bytes]) -> None:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        for name, request in calls:
            await channel.unary_unary(f"/etcdserverpb.Auth/{name}", None, None)(request, timeout=10)
