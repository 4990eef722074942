"""Authentication with and without TLS: valid, wrong, foreign and missing tokens."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import genie
from genie import config
from genie.cluster.client import ClusterClient, open_client
from genie.errors import (
    AccessError,
    ConfigError,
    PermissionError_,
    ProtocolError,
    TlsError,
    TokenMissingError,
    TokenRefusedError,
    TransportError,
    UnreachableError,
)
from genie.model.release import ProtocolVersions
from genie.model.tenant import TokenKind
from genie.runtime import wire
from genie.runtime.credentials import LocalCluster
from genie.tenancy.access import NO_PIN, parse_token
from tests.integration.running_cluster import RunningCluster, StartedCluster


@pytest.fixture(autouse=True)
def _assert_no_session_remains() -> Iterator[None]:
    yield
    assert not genie.is_initialized()


async def test_token_is_required_on_loopback(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GENIE_TOKEN")
    with pytest.raises(TokenMissingError, match=r"'genie token create' .*'genie login "):
        await genie.init()


async def test_request_before_hello_is_rejected(cluster: RunningCluster) -> None:
    """Sends frames without the client: a request instead of Hello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(cluster.host, cluster.port, ssl=context)
    try:
        writer.write(wire.make_preface())
        payload = b"\x81\xa4type\xa9ListNodes"
        writer.write(wire.pack_frame(wire.FrameKind.REQUEST, 1, payload))
        await reader.readexactly(wire.PREFACE_BYTES)
        header = b""
        try:
            async with asyncio.timeout(30):
                header = await reader.readexactly(wire.HEADER_BYTES)
                _, kind, _ = wire.unpack_header(header, frame_bytes_max=1 << 20, peer="test")
                assert kind is wire.FrameKind.ERROR
        except asyncio.IncompleteReadError:
            assert header == b""
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def test_wrong_secret_is_rejected(cluster: RunningCluster) -> None:
    token = parse_token(cluster.token)
    with pytest.raises(TokenRefusedError, match="wrong"):
        await genie.init(token=cluster.token.replace(token.secret, token.secret[::-1]))


async def test_malformed_token_is_rejected_and_not_in_the_error(cluster: RunningCluster) -> None:
    with pytest.raises(TokenRefusedError, match="not a Genie token") as caught:
        await genie.init(token="hunter2")
    assert "hunter2" not in str(caught.value)


async def test_token_of_another_cluster_is_not_sent(cluster: RunningCluster) -> None:
    token = parse_token(cluster.token)
    with pytest.raises(TlsError, match="another fingerprint"):
        await genie.init(token=cluster.token.replace(token.pin, token.pin[::-1]))


async def test_user_token_works_until_it_is_revoked(client: ClusterClient, cluster: RunningCluster) -> None:
    created = await client.create_token(TokenKind.USER, tenant="team-a", name="laptop")
    state = await genie.init(token=created.token)
    assert state.tenant == "team-a"
    await genie.shutdown()
    async with open_client(cluster.settings(token=created.token)) as user:
        with pytest.raises(PermissionError_, match="list tokens"):
            await user.list_tokens()
    await client.revoke_token(created.record.token_id)
    with pytest.raises(TokenRefusedError, match="revoked"):
        await genie.init(token=created.token)
    assert created.record.token_id in {record.token_id for record in await client.list_tokens()}


async def test_closed_port_is_unreachable(cluster: RunningCluster, unused_tcp_port: int) -> None:
    with pytest.raises(UnreachableError, match=str(unused_tcp_port)):
        await genie.init("127.0.0.1", unused_tcp_port)


async def test_unknown_host_name_is_unreachable(cluster: RunningCluster) -> None:
    with pytest.raises(UnreachableError, match=r"no-such-host\.invalid"):
        await genie.init("no-such-host.invalid", timeout=10)


async def test_other_server_on_the_port_is_rejected(cluster: RunningCluster) -> None:
    async def serve_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve_http, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((TransportError, AccessError)) as caught:
            await genie.init("127.0.0.1", port, timeout=10)
    assert str(port) in str(caught.value)


async def test_error_names_another_protocol_version(cluster: RunningCluster) -> None:
    async def serve_newer_version(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.make_preface(ProtocolVersions(lowest=8, highest=9)))
        await writer.drain()
        writer.close()

    token = parse_token(cluster.token)
    plain = cluster.token.replace(token.pin, NO_PIN)
    async with await asyncio.start_server(serve_newer_version, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ProtocolError, match="version 8 to 9"):
            await genie.init("127.0.0.1", port, token=plain)


async def test_garbage_does_not_disturb_the_controller(
    cluster: RunningCluster, client: ClusterClient
) -> None:
    for garbage in (b"\x00" * 64, os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((cluster.host, cluster.port), timeout=5) as sock:
            sock.sendall(garbage)
    assert (await client.status()).leading


# --- TLS off ----------------------------------------------------------------------------------


@pytest.fixture
def cluster_without_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartedCluster]:
    settings = config.load({"paths.state_dir": tmp_path / "c", "controller.port": 0, "controller.tls": "off"})
    with StartedCluster(settings) as started:
        started.running.configure_for_this_process(monkeypatch)
        yield started


def test_cluster_without_tls_on_loopback_requires_a_token(
    cluster_without_tls: StartedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = cluster_without_tls.running
    assert parse_token(running.token).pin == NO_PIN
    with genie.session():
        assert torch.ones(3, device="remote_accelerator:0").sum().item() == 3.0
    monkeypatch.delenv("GENIE_TOKEN")
    monkeypatch.setenv("GENIE_STATE_DIR", str(tmp_path / "no-token"))
    with pytest.raises(TokenMissingError):
        genie.connect()


async def test_token_of_a_cluster_without_tls_is_not_sent_to_other_machines(cluster: RunningCluster) -> None:
    token = parse_token(cluster.token)
    with pytest.raises(TlsError, match="not this machine"):
        await genie.init("192.0.2.1", token=cluster.token.replace(token.pin, NO_PIN), timeout=5)


def test_controller_without_tls_does_not_start_beyond_loopback(tmp_path: Path) -> None:
    settings = config.load(
        {
            "paths.state_dir": tmp_path / "c",
            "controller.port": 0,
            "controller.bind": "0.0.0.0",
            "controller.tls": "off",
        }
    )
    with pytest.raises(ConfigError, match="TLS"), StartedCluster(settings):
        pass
    assert LocalCluster.read(tmp_path / "c") is None
