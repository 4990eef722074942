"""Three servers with real etcd on loopback addresses: setup by commands, and the loss of one of them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from genie.controller.election import CONTROLLER_KEY_PREFIX
from genie.controller.etcd.local_member import LocalMember
from genie.controller.etcd.membership import open_etcd_cluster
from genie.controller.store.etcd import EtcdStore
from genie.runtime.credentials import find_owner_token_id
from genie.supervisor import local_cluster, process_records
from tests.needs import require_program
from tests.ports import free_ports
from tests.waiting import wait_until

_COMMAND_TIMEOUT_S = 120.0


@dataclass
class Server:
    """One machine of the test: a state directory and an address."""

    name: str
    host: str
    state_dir: Path
    ports: list[int] = field(default_factory=lambda: free_ports(3))

    @property
    def where(self) -> str:
        return f"{self.host}:{self.ports[0]}"

    @property
    def name_of_member(self) -> str:
        member = LocalMember.read(self.state_dir)
        assert member is not None
        return member.name

    def environ(self) -> dict[str, str]:
        return {
            **os.environ,
            "GENIE_STATE_DIR": str(self.state_dir),
            "GENIE_CONTROLLER_ETCD_CLIENT_PORT": str(self.ports[1]),
            "GENIE_CONTROLLER_ETCD_PEER_PORT": str(self.ports[2]),
            "GENIE_CONTROLLER_LEADER_TTL_S": "2",
        }

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "genie", *arguments],
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def start_first(self) -> None:
        self.run(*("up", "--store", "etcd", "--bind", self.host, "--port", str(self.ports[0])), "--detach")

    def create_server_token(self, path: Path) -> Path:
        created = self.run("--address", self.leader(), "token", "create", "--server")
        path.write_text(created.stdout.strip())
        path.chmod(0o600)
        return path

    def join(
        self, where: str, token_file: Path, *options: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return self.run(
            *("join", "--server", where, "--bind", self.host, "--port", str(self.ports[0])),
            *("--node-id", self.name, "--token-file", str(token_file), "--detach"),
            *options,
            check=check,
        )

    def start_join(self, where: str, token_file: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "genie", "join", "--server", where, "--bind", self.host),
                *("--port", str(self.ports[0]), "--node-id", self.name, "--token-file", str(token_file)),
            ],
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def leader(self) -> str:
        """Address of the leader as this server knows it; empty without one."""
        return str(json.loads(self.run("status", "--json", check=False).stdout)["leader"])

    def try_submit(self, text: str) -> bool:
        """Submits through this server; a standby names the leader."""
        leader = self.leader()
        if not leader:
            return False
        done = self.run("--address", leader, "submit", "--wait", "--", "echo", text, check=False)
        return done.returncode == 0 and text in done.stdout

    def list_members(self) -> list[dict[str, object]]:
        # Without a majority, the exit code is 1.
        return list(json.loads(self.run("etcd", "status", "--json", check=False).stdout)["members"])

    def running_processes(self) -> set[str]:
        running = local_cluster.find_running_cluster(self.state_dir)
        return set() if running is None else set(running.pids)

    def kill_everything(self) -> None:
        assert self.running_processes() == {"up", "controller", "agent", "etcd"}
        self._kill_processes()

    def _kill_processes(self) -> None:
        running = local_cluster.find_running_cluster(self.state_dir)
        for name in ("up", "etcd", "controller", "agent"):
            if running is not None and name in running.pids:
                with suppress(ProcessLookupError):
                    os.kill(running.pids[name], signal.SIGKILL)

    def end(self) -> None:
        """Ends processes and jobs after a test. Faster than 'genie down', which waits for what has failed."""
        self._kill_processes()
        asyncio.run(local_cluster.stop_running_cluster(self.state_dir))

    def remove_server_files(self) -> None:
        """What a removed server has to remove before it joins again."""
        shutil.rmtree(self.state_dir / "controller")
        shutil.rmtree(self.state_dir / "etcd")
        (self.state_dir / "owner.token").unlink()

    def count_owner_tokens(self) -> int:
        tokens = json.loads(self.run("token", "list", "--json").stdout)["tokens"]
        return sum(each["kind"] == "owner" and each["revoked_at"] is None for each in tokens)


def end_servers(servers: Iterable[Server]) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(Server.end, servers))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    require_program("etcd", package="etcd-server")
    made = [Server(f"s{number}", f"127.0.0.{number + 1}", tmp_path / f"s{number}") for number in (1, 2, 3)]
    yield made
    end_servers(made)


def test_three_servers_survive_the_loss_of_the_first(servers: list[Server], tmp_path: Path) -> None:
    first, second, third = servers
    first.start_first()
    for other in (second, third):
        other.join(first.where, first.create_server_token(tmp_path / f"{other.name}.token"))
        assert (other.state_dir / "controller" / "ca.key").stat().st_mode & 0o777 == 0o600
    for server in servers:
        assert server.try_submit(f"through {server.name}")
    status = json.loads(first.run("status", "--json").stdout)
    assert status["store"] == "etcd"
    wait_until(
        lambda: len(json.loads(first.run("status", "--json").stdout)["store_members"]) == 3,
        timeout_s=60,
        what="the first controller knows all members",
    )

    first.kill_everything()
    wait_until(
        lambda: second.try_submit("after the loss"),
        timeout_s=60,
        what="a job submitted through another server runs",
    )
    assert third.try_submit("after the loss, through the third")

    first.run("up", "--detach")  # store, address and port are those of the member
    assert first.try_submit("after the return")
    check_replacement_of_a_lost_server(third, first, tmp_path)


def check_replacement_of_a_lost_server(lost: Server, other: Server, tmp_path: Path) -> None:
    assert "is responding" in other.run("etcd", "remove", lost.name, check=False).stderr
    other.run("etcd", "defrag")
    lost.kill_everything()
    assert "does not respond" in other.run("etcd", "defrag", check=False).stderr
    expected = f"etcd member {lost.name} ({lost.host}:{lost.ports[1]}) has not responded since "
    wait_until(
        lambda: [text.startswith(expected) for text in alarms(other)] == [True],
        timeout_s=60,
        what="the member that does not respond is an alarm",
    )
    members = {member["name"]: member for member in other.list_members()}
    assert len(members) == 3
    assert not members[lost.name]["healthy"]
    assert sum(member["is_leader"] for member in members.values()) <= 1
    assert lost.where in list_controller_addresses(other.state_dir)
    lost_token_id = find_owner_token_id(lost.state_dir)
    assert members[lost.name]["problem"] in ("refused the connection", "no response")
    removed = other.run("etcd", "remove", lost.name)
    assert f"revoked the owner token of that server, {lost_token_id}" in removed.stdout + removed.stderr
    # Also before the removal, which may be interrupted: it is stored nowhere else.
    before_removal, _, _ = removed.stderr.partition("removed the address of its controller")
    assert f"the owner token of that server is {lost_token_id}" in before_removal
    tokens = json.loads(other.run("token", "list", "--json").stdout)["tokens"]
    assert [each["revoked_at"] is not None for each in tokens if each["token_id"] == lost_token_id] == [True]
    assert f"removed the address of its controller, {lost.where}" in removed.stdout + removed.stderr
    assert lost.where not in list_controller_addresses(other.state_dir)
    assert lost.name not in {member["name"] for member in other.list_members()}
    wait_until(lambda: not alarms(other), timeout_s=60, what="the alarm ends with the member")
    returned = lost.run("up", "--detach", check=False)
    assert returned.returncode != 0
    assert f"{lost.name} was removed from the cluster with 'genie etcd remove'" in returned.stderr
    assert f"remove {lost.state_dir / 'controller'}, " in returned.stderr
    assert '"level"' not in returned.stderr
    wait_until(
        lambda: other.run("forget", lost.name, check=False).returncode == 0,
        timeout_s=60,
        what="the node is lost, so that it can be removed",
    )
    token_file = other.create_server_token(tmp_path / "again.token")
    refused = lost.join(other.where, token_file, check=False)
    assert f"remove {lost.state_dir / 'controller'}, " in refused.stdout + refused.stderr
    lost.remove_server_files()
    lost.join(other.where, token_file)  # the same token: it was refused before it was used
    assert lost.running_processes() == {"up", "controller", "agent", "etcd"}
    assert len(other.list_members()) == 3
    assert all(member["healthy"] for member in other.list_members())


def alarms(server: Server) -> list[str]:
    """The alarms for members of etcd."""
    found = json.loads(server.run("status", "--json", check=False).stdout)["alarms"]
    return [text for text in found if text.startswith("etcd member")]


def list_controller_addresses(state_dir: Path) -> list[str]:
    """The addresses of controllers in the etcd of a server."""

    async def read_addresses() -> list[str]:
        member = LocalMember.read(state_dir)
        assert member is not None
        store = await EtcdStore.open_address(member.address(state_dir))
        try:
            return [item.value.decode() for item in (await store.range(CONTROLLER_KEY_PREFIX)).items]
        finally:
            await store.close()

    return asyncio.run(read_addresses())


async def test_failed_join_leaves_no_member_and_no_files(servers: list[Server], tmp_path: Path) -> None:
    first, second, _ = servers
    first.start_first()
    token_file = first.create_server_token(tmp_path / "server.token")
    # The controller cannot start: its port is that of the etcd client, which starts before it.
    second.ports[0] = second.ports[1]
    failed = second.join(first.where, token_file, check=False)
    assert failed.returncode != 0
    assert "removed etcd member" in failed.stdout + failed.stderr
    assert not [path for path in ("controller", "etcd", "owner.token") if (second.state_dir / path).exists()]
    assert process_records.read_process_record(second.state_dir, "etcd") is None
    member = LocalMember.read(first.state_dir)
    assert member is not None
    async with open_etcd_cluster(member.address(first.state_dir)) as cluster:
        assert [each.name for each in await cluster.list_members()] == [member.name]
    assert first.try_submit("still works")
    assert first.count_owner_tokens() == 1
    # The token was used: another attempt with it is refused before anything is written.
    again = second.join(first.where, token_file, check=False)
    assert "was used already" in again.stdout + again.stderr
    assert not (second.state_dir / "controller").exists()


def test_join_that_fails_early_can_be_repeated(servers: list[Server], tmp_path: Path) -> None:
    first, second, third = servers
    first.start_first()
    used_token = first.create_server_token(tmp_path / "s2.token")
    second.join(first.where, used_token)
    check_port_of_etcd_is_named(third, first, used_token, "is not a Genie controller")  # first contact
    refused = third.join(first.where, used_token, check=False)
    assert "was used already" in refused.stdout + refused.stderr
    token_file = first.create_server_token(tmp_path / "s3.token")
    unused_address = f"{first.host}:{third.ports[0]}"
    refused = third.join(unused_address, token_file, check=False)
    assert f"{unused_address} refused the connection" in refused.stdout + refused.stderr
    for port in third.ports[:2]:  # of the controller and of etcd
        with socket.create_server((third.host, port)):
            refused = third.join(first.where, token_file, check=False)
            assert f"port {port} on {third.host} is in use" in refused.stdout + refused.stderr
    refused = third.join(first.where, token_file, "--bind", "192.0.2.1", check=False)
    assert "192.0.2.1 is not an address of this machine" in refused.stdout + refused.stderr
    check_port_of_etcd_is_named(third, first, token_file, "is not the expected Genie server")
    assert not (third.state_dir / "etcd").exists()
    (third.state_dir / "etcd" / "data").mkdir(parents=True)  # an earlier release has left it
    third.join(first.where, token_file)
    assert len(third.list_members()) == 3


def check_port_of_etcd_is_named(joining: Server, server: Server, token_file: Path, problem: str) -> None:
    where = f"{server.host}:{server.ports[1]}"
    refused = joining.join(where, token_file, check=False)
    output = refused.stdout + refused.stderr
    assert f"{where} {problem}" in output
    assert "the default port of a controller is 5555; 2379 and 2380 are those of etcd" in output


def test_a_server_without_an_agent_stays_one(servers: list[Server], tmp_path: Path) -> None:
    first, second, _ = servers
    first.start_first()
    joined = second.join(first.where, first.create_server_token(tmp_path / "server.token"), "--no-agent")
    assert f"joined {first.where} as a server without an agent; it listens on {second.where}" in joined.stdout
    assert "two servers are less available than one" in joined.stderr
    without_agent = {"up", "controller", "etcd"}
    assert second.running_processes() == without_agent
    second.run("down")
    second.run("up", "--detach")
    assert second.running_processes() == without_agent
    nodes = json.loads(first.run("nodes", "--json").stdout)["nodes"]
    assert len(nodes) == 1
    second.run("down")
    second.run("up", "--detach", "--agent")
    assert second.running_processes() == without_agent | {"agent"}
    refused = second.run("join", first.where, "--no-agent", check=False)
    assert refused.returncode == 2 and "--no-agent requires --server" in refused.stderr
    check_removal_of_one_of_two_running_servers(second, first, tmp_path)


def check_removal_of_one_of_two_running_servers(removed: Server, other: Server, tmp_path: Path) -> None:
    refused = other.run("etcd", "remove", removed.name, check=False)
    assert f"genie etcd remove {removed.name} --running" in refused.stderr
    refused = removed.run("etcd", "remove", removed.name, "--running", check=False)
    assert "run this on another server" in refused.stderr
    done = other.run("etcd", "remove", removed.name, "--running")
    assert "revoked the owner token of that server" in done.stderr
    assert removed.running_processes() == {"up", "agent"}
    assert [member["healthy"] for member in other.list_members()] == [True]
    assert list_controller_addresses(other.state_dir) == [other.where]
    assert other.count_owner_tokens() == 1
    assert "this server was removed from the cluster" in (removed.state_dir / "logs" / "up.log").read_text()
    assert other.try_submit("on one server")
    assert "needed" not in removed.run("down", "--keep-jobs").stderr
    removed.remove_server_files()
    removed.join(other.where, other.create_server_token(tmp_path / "again.token"))
    assert [member["healthy"] for member in other.list_members()] == [True, True]


def test_what_a_killed_join_has_left_is_removed_by_the_next_command(
    servers: list[Server], tmp_path: Path
) -> None:
    first, second, _ = servers
    first.start_first()
    record = second.state_dir / "server-join.json"
    for command in ("up", "join"):
        token_file = first.create_server_token(tmp_path / f"{command}.token")
        with second.start_join(first.where, token_file) as joining:
            wait_until((second.state_dir / "controller" / "ca.key").exists)
            joining.kill()
        second.run("down", check=False)  # its etcd, if it runs
        assert record.exists()
        doctor = second.run("doctor", check=False).stdout
        assert "was interrupted" in doctor and "genie join --server" in doctor
        if command == "up":
            failed = second.run("up", "--detach", check=False)
            assert failed.returncode == 2
            assert "the join of this machine as a server was interrupted" in failed.stderr
            names = ("controller", "etcd", "owner.token")
            assert not [name for name in names if (second.state_dir / name).exists()]
            assert "was interrupted" not in second.run("doctor", check=False).stdout
            assert first.count_owner_tokens() == 1
        else:
            second.join(first.where, first.create_server_token(tmp_path / "again.token"))
        assert not record.exists()
    members = first.list_members()
    assert [member["healthy"] for member in members] == [True, True]


def test_join_as_a_server_refuses_other_tokens_and_a_machine_with_a_cluster(
    servers: list[Server], tmp_path: Path
) -> None:
    first, second, _ = servers
    first.start_first()
    join_token = tmp_path / "join.token"
    join_token.write_text(first.run("token", "create", "--join").stdout.strip())
    refused = second.join(first.where, join_token, check=False)
    assert "a join token cannot be used to join as a server" in refused.stdout + refused.stderr
    token_file = first.create_server_token(tmp_path / "server.token")
    refused = second.run("join", "--server", "192.0.2.1", "--token-file", str(token_file), check=False)
    assert "give an address of this machine with --bind" in refused.stdout + refused.stderr
    refused = second.run("join", first.where, "--token-file", str(token_file), check=False)
    assert "genie join --server" in refused.stdout + refused.stderr
    (second.state_dir / "controller").mkdir()
    (second.state_dir / "controller" / "store.sqlite3").touch()
    refused = second.join(first.where, token_file, check=False)
    assert "already has a cluster of its own" in refused.stdout + refused.stderr
    assert (second.state_dir / "controller" / "store.sqlite3").exists()
