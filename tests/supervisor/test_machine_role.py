"""What this machine is: nodes and servers are started again with their own commands, and nothing else."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from genie import config
from genie.agent.identity import AGENTS_DIR, write_identity
from genie.config import ClusterConfig, Settings
from genie.controller.etcd.local_member import LocalMember
from genie.controller.store.open import CONTROLLER_DIRECTORY
from genie.errors import ConfigError
from genie.runtime.credentials import OWNER_TOKEN_FILE
from genie.supervisor import hosting, machine_role
from genie.supervisor.incomplete_join import IncompleteJoin
from tests.ports import free_port


def write_node(state_dir: Path, node_id: str, *, host: str = "127.0.0.32", port: int = 5555) -> None:
    write_identity(
        state_dir / AGENTS_DIR / node_id,
        token="a token",
        certificate_pem="",
        key_pem=b"",
        ca_pem="",
        controller=(host, port),
    )


def write_member(state_dir: Path, *, bind: str, host: str) -> None:
    LocalMember(
        name="box1", host=host, client_port=2379, peer_port=2380, bind=bind, controller_port=5555
    ).write(state_dir)


@pytest.mark.parametrize(
    ("host", "port", "command"),
    [
        ("127.0.0.32", 5555, "genie join 127.0.0.32 --node-id box4"),
        ("127.0.0.32", 6001, "genie join 127.0.0.32:6001 --node-id box4"),
        ("::1", 5555, "genie join [::1]:5555 --node-id box4"),
    ],
)
def test_node_is_started_with_join(tmp_path: Path, host: str, port: int, command: str) -> None:
    write_node(tmp_path, "box4", host=host, port=port)
    with pytest.raises(ConfigError) as caught:
        machine_role.check_may_start_cluster(tmp_path)
    assert "this machine is node box4 of the cluster at" in caught.value.message
    assert caught.value.message.endswith(f"start it with '{command}'")
    assert "GENIE_STATE_DIR" in caught.value.hint
    assert machine_role.describe_how_to_start(tmp_path, "box4") == f"start it again with '{command}'"


@pytest.mark.parametrize("own", [CONTROLLER_DIRECTORY, "etcd", OWNER_TOKEN_FILE])
def test_machine_with_a_cluster_of_its_own_is_started_with_up(tmp_path: Path, own: str) -> None:
    write_node(tmp_path, "box4")
    (tmp_path / own).mkdir()
    machine_role.check_may_start_cluster(tmp_path)
    text = "start it again with 'genie up' and the options that were given before"
    assert machine_role.describe_how_to_start(tmp_path, "box4") == text


def test_server_with_an_etcd_member_is_started_without_options(tmp_path: Path) -> None:
    write_member(tmp_path, bind="10.0.0.1", host="10.0.0.1")
    assert machine_role.describe_how_to_start(tmp_path, "box1") == "start it again with 'genie up'"


def test_new_machine_may_become_anything(tmp_path: Path) -> None:
    machine_role.check_may_start_cluster(tmp_path)
    machine_role.check_may_start_as_node(tmp_path)


def test_server_is_not_started_as_a_node(tmp_path: Path) -> None:
    write_member(tmp_path, bind="10.0.0.1", host="10.0.0.1")
    with pytest.raises(ConfigError, match="this machine is the server box1: start it with 'genie up'"):
        machine_role.check_may_start_as_node(tmp_path)


@pytest.mark.parametrize("is_member_removed", [False, True])
def test_server_whose_join_was_interrupted_is_started_as_a_node_only_if_its_member_cannot_vote(
    is_member_removed: bool, tmp_path: Path
) -> None:
    write_member(tmp_path, bind="10.0.0.1", host="10.0.0.1")
    IncompleteJoin(etcd_endpoints=(), had_agents_before=False, is_member_removed=is_member_removed).write(
        tmp_path
    )
    if is_member_removed:
        machine_role.check_may_start_as_node(tmp_path)
        return
    with pytest.raises(ConfigError, match="start it with 'genie up'"):
        machine_role.check_may_start_as_node(tmp_path)


async def test_session_starts_no_cluster_on_a_node_and_no_node_on_a_server(tmp_path: Path) -> None:
    node, server = (config.load({"paths.state_dir": tmp_path / name}) for name in ("node", "server"))
    write_node(node.paths.state_dir, "box4")
    write_member(server.paths.state_dir, bind="10.0.0.1", host="10.0.0.1")
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match="this machine is node box4 of the cluster at"):
            await hosting.start_or_find_cluster(with_free_port(node), stack, timeout_s=10)
        access = ClusterConfig(discovery_method="address", master_addr="127.0.0.1", master_port=free_port())
        with pytest.raises(ConfigError, match="this machine is the server box1"):
            await hosting.start_worker_agent(server, access, stack, timeout_s=10)


def with_free_port(settings: Settings) -> Settings:
    return replace(settings, cluster=replace(settings.cluster, master_port=free_port()))


def test_first_member_needs_an_address(tmp_path: Path) -> None:
    given = {"paths.state_dir": tmp_path, "controller.store": "etcd"}
    with pytest.raises(ConfigError, match=r"listen on 127\.0\.0\.1, where no other server"):
        machine_role.check_etcd_address(config.load(given))
    machine_role.check_etcd_address(config.load({**given, "controller.bind": "127.0.0.1"}))
    machine_role.check_etcd_address(config.load({**given, "controller.store": "sqlite"}))


@pytest.mark.parametrize(
    ("bind", "host", "given", "is_allowed"),
    [
        ("127.0.0.1", "127.0.0.1", "10.0.0.1", False),
        ("10.0.0.1", "10.0.0.1", "0.0.0.0", False),
        ("10.0.0.1", "10.0.0.1", "10.0.0.1", True),
        ("box1.example", "10.0.0.1", "10.0.0.1", True),
        ("0.0.0.0", "10.0.0.1", "10.0.0.1", True),
    ],
)
def test_member_stays_on_its_address(
    tmp_path: Path, bind: str, host: str, given: str, is_allowed: bool
) -> None:
    write_member(tmp_path, bind=bind, host=host)
    settings = config.load(
        {"paths.state_dir": tmp_path, "controller.store": "etcd", "controller.bind": given}
    )
    if is_allowed:
        machine_role.check_etcd_address(settings)
        return
    with pytest.raises(ConfigError, match=f"is registered with address {bind}") as caught:
        machine_role.check_etcd_address(settings)
    assert f"genie store restore FILE --bind {given}" in caught.value.hint
    assert "'genie etcd remove box1 --running' on another server" in caught.value.hint
    assert str(tmp_path / "owner.token") in caught.value.hint
