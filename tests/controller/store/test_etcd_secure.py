"""etcd with client certificates, and etcd with users: a real server for each."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from genie.controller.store import Put
from genie.controller.store.etcd import EtcdStore
from genie.errors import ConfigError, StoreError, StoreUnavailableError, TlsError
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


@dataclass
class SecureServer:
    server: EtcdServer
    authority: Authority


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    folder = tmp_path_factory.mktemp("etcd-tls")
    authority = Authority(folder, "ours")
    cert, key = authority.issue("server")
    server = EtcdServer(
        folder,
        scheme="https",
        options=[
            *("--cert-file", str(cert), "--key-file", str(key)),
            *("--client-cert-auth", "--trusted-ca-file", str(authority.ca)),
        ],
    )
    server.start()
    yield SecureServer(server, authority)
    server.stop()


async def test_mutual_tls_works(tls_server: SecureServer) -> None:
    cert, key = tls_server.authority.issue("controller")
    store = await EtcdStore.open(
        f"{tls_server.server.url}?ca={tls_server.authority.ca}&cert={cert}&key={key}"
    )
    revision = (await store.commit([], [Put("a", b"secret")])).revision
    async with store.watch("a", after_revision=revision - 1) as events:
        assert (await anext(events)).value == b"secret"
    await store.keep_alive(await store.grant_lease(60))
    await store.close()


async def test_server_of_an_unknown_ca_is_rejected(tls_server: SecureServer, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    cert, key = tls_server.authority.issue("controller")
    with pytest.raises(TlsError, match=r"\?ca="):
        await EtcdStore.open(f"{tls_server.server.url}?ca={stranger.ca}&cert={cert}&key={key}")


async def test_client_without_a_valid_certificate_is_rejected(
    tls_server: SecureServer, tmp_path: Path
) -> None:
    # A race decides whether the server sends an alert before it closes the connection.
    with pytest.raises((TlsError, StoreUnavailableError)):
        await EtcdStore.open(f"{tls_server.server.url}?ca={tls_server.authority.ca}", timeout_s=1.0)
    cert, key = Authority(tmp_path, "stranger").issue("controller")
    url = f"{tls_server.server.url}?ca={tls_server.authority.ca}&cert={cert}&key={key}"
    with pytest.raises((TlsError, StoreUnavailableError)):
        await EtcdStore.open(url, timeout_s=1.0)


async def test_files_without_a_certificate_raise_tls_error(tls_server: SecureServer) -> None:
    _, key = tls_server.authority.issue("controller")
    with pytest.raises(TlsError, match=r"\?ca=, \?cert= and \?key="):
        await EtcdStore.open(f"{tls_server.server.url}?ca={key}")


async def test_plaintext_url_cannot_reach_a_tls_server(tls_server: SecureServer) -> None:
    with pytest.raises(StoreUnavailableError):
        await EtcdStore.open(f"etcd://{tls_server.server.endpoint}", timeout_s=0.5)


# --- users ------------------------------------------------------------------------------------


def _encode_string_field(number: int, value: str) -> bytes:
    """One string field of a protobuf message, by hand: Genie itself never administers etcd's users."""
    return bytes([number << 3 | 2, len(value)]) + value.encode()


async def _call_auth_service(endpoint: str, *calls: tuple[str, bytes]) -> None:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        for name, request in calls:
            await channel.unary_unary(f"/etcdserverpb.Auth/{name}", None, None)(request, timeout=10)


async def test_login_requires_the_right_password(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    server.start()
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("pass word\n")
    wrong.write_text("guess")
    try:
        await _call_auth_service(
            server.endpoint,
            ("UserAdd", _encode_string_field(1, "root") + _encode_string_field(2, "pass word")),
            ("UserAdd", _encode_string_field(1, "nobody") + _encode_string_field(2, "pass word")),
            ("RoleAdd", _encode_string_field(1, "root")),
            ("UserGrantRole", _encode_string_field(1, "root") + _encode_string_field(2, "root")),
            ("AuthEnable", b""),
        )
        await _check_passwords(server, right=right, wrong=wrong)
    finally:
        server.stop()


async def _check_passwords(server: EtcdServer, *, right: Path, wrong: Path) -> None:
    store = await EtcdStore.open(f"{server.url}?user=root&password_file={right}")
    assert (await store.commit([], [Put("a", b"1")])).succeeded
    # As after a restart of etcd, which drops its tokens: the next call logs in again.
    store._channels._login_token = "forgotten.1"
    assert (await store.commit([], [Put("a", b"2")])).succeeded
    store._channels._login_token = "forgotten.2"
    async with store.watch("a", after_revision=1) as events:
        assert (await anext(events)).value == b"1"
    await store.close()
    with pytest.raises(ConfigError, match="rejected user 'root'"):
        await EtcdStore.open(f"{server.url}?user=root&password_file={wrong}")
    store = await EtcdStore.open(f"{server.url}?user=nobody&password_file={right}")
    with pytest.raises(StoreError, match="permission denied"):
        await store.get("a")
    async with store.watch("a", after_revision=1) as events:
        with pytest.raises(StoreError, match="permission denied"):
            await anext(events)
    await store.close()
    store = await EtcdStore.open(server.url)
    with pytest.raises(ConfigError, match="requires a user"):
        await store.get("a")
    async with store.watch("a", after_revision=1) as events:
        with pytest.raises(ConfigError, match="requires a user"):
            await anext(events)
    await store.close()
