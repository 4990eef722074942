"""etcd with client certificates, and etcd with users: a real server for each."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from genie.controller.store import Put, etcd_channels
from genie.controller.store.etcd import EtcdStore
from genie.controller.store.etcd_proto import rpc_pb2_grpc
from genie.controller.store.protocol import WatchEvent
from genie.errors import ConfigError, StoreAccessError, StoreError, StoreUnavailableError
from tests.controller.store.etcd_security import Authority, change_password, enable_logins
from tests.controller.store.etcd_server import EtcdServer
from tests.waiting import TIMEOUT_S, until


@dataclass
class SecureServer:
    server: EtcdServer
    authority: Authority


@contextlib.contextmanager
def running_etcd(folder: Path, *, scheme: str = "http", options: Sequence[str] = ()) -> Iterator[EtcdServer]:
    server = EtcdServer(folder, scheme=scheme, options=list(options))
    server.start()
    try:
        yield server
    finally:
        server.resume()
        server.stop()


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
        server.options = tuple(new.server_options())
        server.start()
        with pytest.raises(StoreAccessError, match="TLS handshake"):
            await store.get("a")
        trusted.write_bytes(new.ca.read_bytes())

        async def is_readable() -> bool:
            try:
                found = await store.get("a")
            except StoreAccessError:
                return False
            return found is not None and found.value == b"1"

        await until(is_readable)
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


# --- replaced files while other tasks use the store ---------------------------------------------


async def _reload(store: EtcdStore) -> None:
    """As in a task whose login or TLS handshake has failed."""
    store._channels._secrets_read_at_s = -math.inf
    await store._channels._reload_secrets(asyncio.get_running_loop().time() + 5)


def _has_call_in_flight(store: EtcdStore) -> bool:
    channels = [vars(member.channel) for member in store._channels._members]
    # A finished call is in the set until it is garbage.
    return any(not call.done() for channel in channels for call in list(channel["_active_calls"]))


def _detect_calls(store: EtcdStore, *names: str) -> list[asyncio.Event]:
    """An event for each method of the key-value service, set when it is next called."""
    stub = store._channels._members[0].kv_stub
    return [_detect_call(stub, name) for name in names]


def _detect_call(stub: rpc_pb2_grpc.KVStub, name: str) -> asyncio.Event:
    called, method = asyncio.Event(), getattr(stub, name)

    def call(*arguments: object, **options: object) -> object:
        called.set()
        return method(*arguments, **options)

    setattr(stub, name, call)
    return called


async def test_commit_in_flight_survives_a_change_of_the_password(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("first")
    with running_etcd(tmp_path / "etcd") as server:
        await enable_logins(server, users=("root",), password="first")
        store = await EtcdStore.open(f"{server.url}?user=root&password_file={password}")
        await store.commit([], [Put("a", b"1")])
        (sent,) = _detect_calls(store, "Txn")
        server.suspend()
        commit = asyncio.create_task(store.commit([], [Put("a", b"2")], timeout_s=20))
        await until(sent.is_set, what="commit in flight")
        password.write_text("second")
        await _reload(store)
        assert not commit.done()
        server.resume()
        assert (await commit).succeeded
        await store.close()


async def test_commit_in_flight_fails_as_unavailable_when_certificates_change(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    with running_etcd(tmp_path / "etcd", scheme="https", options=authority.server_options()) as server:
        store = await EtcdStore.open(f"{server.url}?ca={authority.ca}")
        await store.commit([], [Put("a", b"1")])
        async with store.watch("a", after_revision=1) as events:
            assert (await anext(events)).value == b"1"
            sent = _detect_calls(store, "Txn", "Range")
            server.suspend()
            commit = asyncio.create_task(store.commit([], [Put("a", b"2")], timeout_s=20))
            read = asyncio.create_task(store.get("a", timeout_s=20))
            event = asyncio.create_task(_next_value(events))
            await until(lambda: all(call.is_set() for call in sent), what="commit and read in flight")
            authority.ca.write_bytes(authority.ca.read_bytes() + b"\n")
            await _reload(store)
            with pytest.raises(StoreUnavailableError, match="was replaced because"):
                await commit
            server.resume()
            assert (await read) is not None
            await store.commit([], [Put("a", b"3")])
            assert await event in (b"2", b"3")
        await store.close()


async def _next_value(events: AsyncIterator[WatchEvent]) -> bytes | None:
    return (await anext(events)).value


async def test_two_endpoints_are_read_while_certificates_change(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    options = authority.server_options()
    with (
        running_etcd(tmp_path / "1", scheme="https", options=options) as first,
        running_etcd(tmp_path / "2", scheme="https", options=options) as second,
    ):
        store = await EtcdStore.open(f"{first.url},{second.endpoint}?ca={authority.ca}")
        first.suspend()  # so that readers are in the middle of a round
        readers = [asyncio.create_task(_read_often(store)) for _ in range(4)]
        for _ in range(10):
            await until(lambda: _has_call_in_flight(store), what="a call of a reader")
            authority.ca.write_bytes(authority.ca.read_bytes() + b"\n")
            await _reload(store)
        first.resume()
        await asyncio.gather(*readers)
        await store.close()


async def _read_often(store: EtcdStore) -> None:
    for _ in range(30):
        with contextlib.suppress(StoreUnavailableError):
            await store.get("a", timeout_s=2)


async def test_files_that_do_not_respond_do_not_delay_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password, is_released = tmp_path / "password", threading.Event()
    password.write_text("first")
    with running_etcd(tmp_path / "etcd") as server:
        await enable_logins(server, users=("root",), password="first")
        store = await EtcdStore.open(f"{server.url}?user=root&password_file={password}")
        await store.commit([], [Put("a", b"1")])
        await change_password(server, user="root", old="first", new="second")

        def read_slowly(address: object) -> object:
            is_released.wait()
            raise ConfigError("released")

        monkeypatch.setattr(etcd_channels, "_read_secrets", read_slowly)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                with pytest.raises(StoreAccessError, match="rejected user 'root'"):
                    await store.get("a")
        finally:
            is_released.set()
        await store.close()
