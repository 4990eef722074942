"""etcd with client certificates, and etcd with users: a real server for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from genie.controller.store import Put
from genie.controller.store.etcd import EtcdStore
from genie.errors import StoreAccessError, StoreError, StoreUnavailableError
from tests.controller.store.etcd_security import Authority, enable_logins
from tests.controller.store.etcd_server import EtcdServer


@dataclass
class SecureServer:
    server: EtcdServer
    authority: Authority


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    folder = tmp_path_factory.mktemp("etcd-tls")
    authority = Authority(folder, "ours")
    server = EtcdServer(
        folder,
        scheme="https",
        options=[
            *authority.server_options(),
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
    with pytest.raises(StoreAccessError, match=r"\?ca="):
        await EtcdStore.open(f"{tls_server.server.url}?ca={stranger.ca}&cert={cert}&key={key}")


async def test_client_without_a_valid_certificate_is_rejected(
    tls_server: SecureServer, tmp_path: Path
) -> None:
    # A race decides whether the server sends an alert before it closes the connection.
    with pytest.raises((StoreAccessError, StoreUnavailableError)):
        await EtcdStore.open(f"{tls_server.server.url}?ca={tls_server.authority.ca}", timeout_s=1.0)
    cert, key = Authority(tmp_path, "stranger").issue("controller")
    url = f"{tls_server.server.url}?ca={tls_server.authority.ca}&cert={cert}&key={key}"
    with pytest.raises((StoreAccessError, StoreUnavailableError)):
        await EtcdStore.open(url, timeout_s=1.0)


async def test_files_without_a_certificate_raise_tls_error(tls_server: SecureServer) -> None:
    _, key = tls_server.authority.issue("controller")
    with pytest.raises(StoreAccessError, match=r"\?ca=, \?cert= and \?key="):
        await EtcdStore.open(f"{tls_server.server.url}?ca={key}")


async def test_plaintext_url_cannot_reach_a_tls_server(tls_server: SecureServer) -> None:
    with pytest.raises(StoreUnavailableError):
        await EtcdStore.open(f"etcd://{tls_server.server.endpoint}", timeout_s=0.5)


async def test_replaced_certificate_files_take_effect(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.ca.read_bytes())
    server = EtcdServer(tmp_path / "etcd", scheme="https", options=old.server_options())
    server.start()
    try:
        store = await EtcdStore.open(f"{server.url}?ca={trusted}")
        assert (await store.commit([], [Put("a", b"1")])).succeeded
        server.stop()
        server.options = new.server_options()
        server.start()
        with pytest.raises(StoreAccessError, match="TLS handshake"):
            await store.get("a")
        trusted.write_bytes(new.ca.read_bytes())
        with pytest.raises(StoreAccessError, match="TLS handshake"):
            await store.get("a")
        found = await store.get("a")
        assert found is not None and found.value == b"1"
        await store.close()
    finally:
        server.stop()


# --- users ------------------------------------------------------------------------------------


async def test_login_requires_the_right_password(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    server.start()
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("pass word\n")
    wrong.write_text("guess")
    try:
        await enable_logins(server, users=("root", "nobody"), password="pass word")
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
    with pytest.raises(StoreAccessError, match="rejected user 'root'"):
        await EtcdStore.open(f"{server.url}?user=root&password_file={wrong}")
    store = await EtcdStore.open(f"{server.url}?user=nobody&password_file={right}")
    with pytest.raises(StoreError, match="permission denied"):
        await store.get("a")
    async with store.watch("a", after_revision=1) as events:
        with pytest.raises(StoreError, match="permission denied"):
            await anext(events)
    await store.close()
    store = await EtcdStore.open(server.url)
    with pytest.raises(StoreAccessError, match="requires a user"):
        await store.get("a")
    async with store.watch("a", after_revision=1) as events:
        with pytest.raises(StoreAccessError, match="requires a user"):
            await anext(events)
    await store.close()
