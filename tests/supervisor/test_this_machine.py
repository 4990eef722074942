"""Hints that name the cluster of this machine."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

import genie
from genie.cluster.client import open_client
from genie.config import load
from genie.errors import TokenMissingError, UnreachableError
from genie.model.tenant import TokenKind
from genie.processes import call_thread
from genie.processes.files import write_private
from genie.runtime.credentials import LocalCluster
from genie.supervisor import this_machine
from genie.supervisor.this_machine import (
    add_local_cluster_hint,
    find_local_cluster_hint,
    is_own_address,
    list_own_addresses,
)
from genie.tenancy.access import new_token
from tests.cluster.small_controller import SmallController
from tests.controller.running_controller import running_controller

HERE = LocalCluster(host="10.0.0.7", port=6000, cluster_id="c1")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "LocalHost", "::1", "127.9.9.9", "0.0.0.0", "0", "::ffff:127.0.0.1"]
)
def test_hint_names_the_local_cluster_for_every_form_of_its_address(host: str, tmp_path: Path) -> None:
    HERE.write(tmp_path)
    advice = find_local_cluster_hint(host, 5555, state_dir=tmp_path)
    assert advice == "a cluster of this machine listens on 10.0.0.7:6000: use master_addr='10.0.0.7:6000'"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "255.255.255.255", "224.0.0.1"])
def test_no_hint_for_another_machine(host: str, tmp_path: Path) -> None:
    HERE.write(tmp_path)
    assert not is_own_address(host)
    assert find_local_cluster_hint(host, 5555, state_dir=tmp_path) == ""


def test_hint_does_not_repeat_the_failed_address(tmp_path: Path) -> None:
    assert find_local_cluster_hint("localhost", 5555, state_dir=tmp_path) == ""
    LocalCluster(host="127.0.0.1", port=5555, cluster_id="c1").write(tmp_path)
    assert find_local_cluster_hint("localhost", 5555, state_dir=tmp_path) == ""
    assert "127.0.0.1:5555" in find_local_cluster_hint("localhost", 6000, state_dir=tmp_path)


def test_hint_names_the_cluster_that_this_machine_has_joined(tmp_path: Path) -> None:
    write_private(tmp_path / "agents" / "n1" / "node.token", b"a token")
    write_private(tmp_path / "agents" / "n1" / "controllers.json", b'["10.0.0.5:5555"]')
    advice = find_local_cluster_hint("localhost", 5555, state_dir=tmp_path)
    assert advice == "this machine is a node of the cluster at 10.0.0.5:5555: use master_addr='10.0.0.5:5555'"
    (tmp_path / "local.json").write_text("spoiled")
    assert "10.0.0.5:5555" in find_local_cluster_hint("localhost", 5555, state_dir=tmp_path)


def test_hint_does_not_name_a_stopped_cluster_of_this_machine(tmp_path: Path) -> None:
    """Its agent has joined it, but nothing listens there."""
    owner, node, other = (
        str(new_token(kind, token_id="abcd", secret=b"\x01" * 32, pin=pin * 43)).encode()
        for kind, pin in ((TokenKind.OWNER, "a"), (TokenKind.NODE, "a"), (TokenKind.NODE, "b"))
    )
    write_private(tmp_path / "owner.token", owner)
    write_private(tmp_path / "agents" / "n1" / "node.token", node)
    write_private(tmp_path / "agents" / "n1" / "controllers.json", b'["127.0.0.1:6000"]')
    assert find_local_cluster_hint("localhost", 5555, state_dir=tmp_path) == ""
    write_private(tmp_path / "agents" / "n2" / "node.token", other)
    write_private(tmp_path / "agents" / "n2" / "controllers.json", b'["10.0.0.5:5555"]')
    assert "10.0.0.5:5555" in find_local_cluster_hint("localhost", 5555, state_dir=tmp_path)


async def test_missing_token_error_names_the_joined_cluster(
    unused_tcp_port: int,
) -> None:
    node = load().paths.state_dir / "agents" / "n1"
    write_private(node / "node.token", b"a token")
    write_private(node / "controllers.json", b'["10.0.0.5:5555"]')
    expected = (
        f"no token for 127.0.0.1:{unused_tcp_port} .this machine is a node of the cluster at 10.0.0.5:5555"
    )
    with pytest.raises(TokenMissingError, match=expected):
        await genie.init("127.0.0.1", unused_tcp_port)


def test_own_addresses_exclude_loopback_and_link_local() -> None:
    assert all(is_own_address(address) for address in list_own_addresses())
    assert not any(address.startswith(("127.", "169.254.", "fe80")) for address in list_own_addresses())


async def test_init_error_names_the_local_cluster(controller: SmallController, unused_tcp_port: int) -> None:
    where = f"127.0.0.1:{controller.port}"
    expected = rf"cannot be reached: connection refused \(a cluster of this machine listens on {where}: use"
    with pytest.raises(UnreachableError, match=expected):
        await genie.init("127.0.0.1", unused_tcp_port)


async def test_init_error_for_the_cluster_of_another_user_names_the_local_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running_controller(tmp_path / "own", tls="on") as own,
        running_controller(tmp_path / "other", tls="on") as other,
    ):
        monkeypatch.setenv("GENIE_STATE_DIR", str(own.state_dir))
        where = rf"127\.0\.0\.1:{own.port}"
        expected = rf"no token for 127\.0\.0\.1:{other.port} \(a cluster of this machine listens on {where}"
        with pytest.raises(TokenMissingError, match=expected):
            await genie.init("127.0.0.1", other.port)


async def test_failed_name_server_does_not_delay_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait(60) and [])
    monkeypatch.setattr(this_machine, "LOCAL_CLUSTER_HINT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(call_thread, "CLOSE_TIMEOUT_S", 0.01)
    HERE.write(tmp_path)
    try:
        with pytest.raises(UnreachableError, match="no route to host"):
            async with add_local_cluster_hint("gpu-box", 5555, state_dir=tmp_path):
                raise UnreachableError("no route to host")
        assert not answer.is_set()
    finally:
        answer.set()


async def test_client_error_names_the_local_cluster(
    controller: SmallController, unused_tcp_port: int
) -> None:
    settings = load({"cluster.master_addr": "localhost", "cluster.master_port": unused_tcp_port})
    with pytest.raises(UnreachableError, match=f"listens on 127.0.0.1:{controller.port}"):
        async with open_client(settings):
            pass


async def test_error_keeps_its_hint_without_a_local_cluster(unused_tcp_port: int) -> None:
    with pytest.raises(TokenMissingError):
        await genie.init("127.0.0.1", unused_tcp_port)
    token = f"genie.user.abcd.{'s' * 43}.-"
    with pytest.raises(UnreachableError, match=r"is 'genie up' running there.*--bind") as caught:
        await genie.init("127.0.0.1", unused_tcp_port, token=token)
    assert "of this machine" not in str(caught.value)
