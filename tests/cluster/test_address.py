"""Which server a session connects to first, with a real controller with TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import genie
from genie.cluster import init
from genie.errors import UnreachableError
from genie.model.names import address_text
from genie.runtime.credentials import LocalCluster
from genie.runtime.known_servers import store_known_servers
from genie.tenancy.access import parse_token
from tests.cluster.locking_controller import LockingController
from tests.ports import free_port

HOST = "127.0.0.1"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server that this machine hosts, and that earlier connections have stored."""
    with LockingController(tmp_path, tls="on") as started:
        assert started.running is not None
        state_dir, address = started.running.state_dir, (HOST, started.running.port)
        monkeypatch.setenv("GENIE_STATE_DIR", str(state_dir))
        LocalCluster(host=HOST, port=address[1], cluster_id="c").write(state_dir)
        pin = parse_token((state_dir / "owner.token").read_text()).pin
        store_known_servers(state_dir, pin, (address, (HOST, free_port())))
        yield address
        init.shutdown_blocking()


def test_a_session_connects_to_the_given_address_or_fails(server: tuple[str, int]) -> None:
    wrong = free_port()
    with pytest.raises(UnreachableError) as caught:
        genie.connect(HOST, wrong)
    assert address_text(HOST, wrong) in caught.value.message
    assert address_text(*server) not in caught.value.message
    where = address_text(*server)
    assert caught.value.hint == f"a cluster of this machine listens on {where}: use master_addr={where!r}"
    assert not genie.is_initialized()


def test_a_session_uses_another_known_server_if_the_configured_one_is_down(
    server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_MASTER_ADDR", address_text(HOST, free_port()))
    connection = genie.connect().control_integration
    assert connection is not None
    assert connection.where == address_text(*server)
