"""What is left of the etcd cluster when a server stops."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from genie.controller.etcd.local_member import LocalMember, etcd_member_directory
from genie.model.names import address_text
from genie.supervisor.etcd_majority import describe_remaining_servers
from tests.ports import free_ports


@pytest.mark.parametrize(
    ("running", "stopped", "expected"),
    [
        (2, 0, "2 of 3 servers remain, a majority: the cluster stays available"),
        (1, 1, "warning: 1 of 3 servers remains, and 2 are needed"),
        (1, 0, "warning: 1 of 2 servers remains, and 2 are needed"),
        (0, 2, "warning: 0 of 3 servers remain, and 2 are needed"),
        (0, 0, ""),
    ],
)
async def test_remaining_servers_are_counted_by_their_connections(
    tmp_path: Path, running: int, stopped: int, expected: str
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(running)]
        ports = [server.getsockname()[1] for server in servers] + list(free_ports(stopped) if stopped else ())
        endpoints = tuple(address_text("127.0.0.1", port) for port in ports)
        LocalMember(
            name="box1",
            host="127.0.0.1",
            client_port=1,
            peer_port=2,
            bind="127.0.0.1",
            controller_port=3,
            endpoints=endpoints,
        ).write(tmp_path)
        found = await describe_remaining_servers(tmp_path)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


async def test_node_and_unreadable_record_have_no_remaining_servers(tmp_path: Path) -> None:
    assert await describe_remaining_servers(tmp_path) == ""
    etcd_member_directory(tmp_path).mkdir()
    (etcd_member_directory(tmp_path) / "member.json").write_text("{")
    assert await describe_remaining_servers(tmp_path) == ""
