"""Starts of servers: waiting for the others, a node that was removed, and joins through a standby."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from genie.controller.etcd.local_member import LocalMember
from genie.processes.process_identity import ProcessIdentity
from genie.supervisor import local_cluster
from tests.integration.test_servers import Server, end_servers
from tests.needs import require_program
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

_WAITING = "waiting for a majority of the etcd members: 1 of 2 running, 2 needed; no connection to "


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """The servers of one cluster, for all tests of this file."""
    require_program("etcd", package="etcd-server")
    folder = tmp_path_factory.mktemp("servers")
    first, second = (
        Server(f"s{number}", f"127.0.0.{number + 1}", folder / f"s{number}") for number in (1, 2)
    )
    try:
        first.start_first()
        second.join(first.where, first.create_server_token(folder / "server.token"))
        wait_until(lambda: knows(first, second), timeout_s=60, what="the first one has stored the address")
        yield first, second
    finally:
        end_servers((first, second))


@pytest.fixture
def servers(two_servers: tuple[Server, Server]) -> tuple[Server, Server]:
    """Two running servers."""
    run_on_each([server for server in two_servers if is_stopped(server)], "up", "--detach")
    return two_servers


@pytest.fixture
def stopped_servers(two_servers: tuple[Server, Server]) -> tuple[Server, Server]:
    """Two servers that were stopped."""
    run_on_each([server for server in two_servers if not is_stopped(server)], "down")
    return two_servers


def run_on_each(servers: Iterable[Server], *arguments: str) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda server: server.run(*arguments), servers))


def knows(server: Server, other: Server) -> bool:
    member = LocalMember.read(server.state_dir)
    return member is not None and f"{other.host}:{other.ports[1]}" in member.endpoints


@contextmanager
def start_waiting(server: Server, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command that waits for the other server; its output is in STATE/output."""
    output = server.state_dir / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "genie", *arguments],
            env=server.environ(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        wait_until(lambda: _WAITING in output.read_text(), timeout_s=60, what="it reports what it waits for")
        yield process
    finally:
        process.kill()
        process.wait()


def is_stopped(server: Server) -> bool:
    return local_cluster.find_running_cluster(server.state_dir) is None


def test_removed_nodes_join_again_under_their_names(servers: tuple[Server, Server], tmp_path: Path) -> None:
    first, second = servers
    node = Server("n1", "127.0.0.5", tmp_path / "n1")
    join = ("join", first.where, "--node-id", "n1", "--detach", "--token-file")
    try:
        node.run(*join, str(write_join_token(first, tmp_path / "first.token")))
        run_on_each((node, second), "down")
        second.run("up", "--no-agent", "--detach")
        for name in ("n1", "s2"):
            first.run("forget", name)
        refused = node.run("join", first.where, "--detach", check=False)
        assert "the cluster does not accept node n1" in refused.stdout + refused.stderr
        again = node.run(*join, str(write_join_token(first, tmp_path / "second.token")))
        assert "joined" in again.stdout
        assert list_nodes(first)["n1"] == "healthy"

        second.run("down")
        started = second.run("up", "--agent", "--detach")
        assert "no agent was started: the cluster does not accept node s2" in started.stderr
        assert "'genie up --rejoin'" in started.stderr
        running = local_cluster.find_running_cluster(second.state_dir)
        assert running is not None and set(running.pids) == {"up", "etcd", "controller"}
        second.run("down")
        second.run("up", "--rejoin", "--detach")
        assert list_nodes(first)["s2"] == "healthy"
        second.run("down")
        second.run("up", "--detach")
        assert list_nodes(first)["s2"] == "healthy"
    finally:
        end_servers([node])


def test_member_that_is_left_is_healthy_and_names_the_missing_majority(
    servers: tuple[Server, Server],
) -> None:
    first, second = servers
    second.kill_everything()
    members = wait_until(
        lambda: list_members_without_leader(first),
        timeout_s=60,
        what="the member that is left has noticed that there is no leader",
    )
    healthy = {member["name"]: member["healthy"] for member in members}
    assert healthy == {first.name_of_member: True, second.name: False}
    refused = first.run("etcd", "remove", second.name, check=False)
    assert f"cannot remove etcd member {second.name}: 1 of 2 members respond, 2 needed" in refused.stderr
    assert f"run 'genie etcd remove {second.name} --running' here" in refused.stderr
    second.run("up", "--detach")
    assert [member["healthy"] for member in first.list_members()] == [True, True]


def list_members_without_leader(server: Server) -> list[dict[str, object]]:
    """Empty if a member knows a leader."""
    members = server.list_members()
    return members if any("no leader" in str(member["alarms"]) for member in members) else []


def test_waiting_server_is_stopped_without_ending_the_jobs_of_its_machine(
    servers: tuple[Server, Server], tmp_path: Path
) -> None:
    """Until it has started, 'genie down --keep-jobs' and Ctrl-C keep them."""
    first, second = servers
    pid_file = tmp_path / "pid"
    first.run("submit", "--", "sh", "-c", f"echo $$ > {pid_file}; exec sleep 600")
    wait_until(lambda: pid_file.exists() and pid_file.read_text().strip(), timeout_s=60)
    process_of_job = ProcessIdentity.of_pid(int(pid_file.read_text()))
    assert process_of_job is not None
    (job,) = json.loads(first.run("jobs", "--json").stdout)["jobs"]
    host = second if job["placements"][0]["node_id"] == second.name else first
    run_on_each(servers, "down", "--keep-jobs")
    with start_waiting(host, "up") as process:
        host.run("down", "--keep-jobs")
        process.wait(timeout=60)
        assert is_stopped(host)
    assert process_of_job.is_alive
    with start_waiting(host, "up") as process:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        assert is_stopped(host)
    assert process_of_job.is_alive
    host.run("down")
    assert not process_of_job.is_alive


def test_server_waits_for_a_majority_until_the_other_one_starts(
    stopped_servers: tuple[Server, Server],
) -> None:
    first, second = stopped_servers
    with start_waiting(first, "up") as process:
        output = (first.state_dir / "output").read_text()
        assert f"no connection to {second.host}:{second.ports[1]} (connection refused)" in output
        # Each change is printed once: this is no terminal.
        assert output.count(_WAITING) == 1
        listed = first.run("etcd", "status", check=False)
        assert listed.returncode == 1
        assert listed.stderr.startswith(f"0 of 2 members respond, 2 needed\nthis server is {_WAITING}")
        assert "no response" in listed.stdout and "ipv4:" not in listed.stdout
        assert first.run("down").stdout.strip().endswith("stopped")
        process.wait(timeout=60)
        assert is_stopped(first)
    with start_waiting(first, "up") as process:
        second.run("up", "--detach")
        assert second.try_submit("both run")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    assert is_stopped(first)


def test_detached_start_reports_the_missing_server_and_goes_on_waiting(
    stopped_servers: tuple[Server, Server],
) -> None:
    first, second = stopped_servers
    up = "background.OTHER_SERVERS_WAIT_S = 0.0; sys.exit(main(['up', '--detach']))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; from genie.cli import background, main; {up}"],
        env=first.environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert f"this server is {_WAITING}" in done.stderr
    assert "it goes on waiting in the background" in done.stderr
    assert not is_stopped(first)
    second.run("up", "--detach")
    wait_until(lambda: first.try_submit("both run"), timeout_s=60, what="the waiting server takes part")


def test_interrupted_detached_start_leaves_no_process(stopped_servers: tuple[Server, Server]) -> None:
    first, _ = stopped_servers
    with start_waiting(first, "up", "--detach") as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert is_stopped(first)


def test_server_whose_data_is_missing_does_not_start_another_cluster(
    stopped_servers: tuple[Server, Server],
) -> None:
    first, _ = stopped_servers
    (first.state_dir / "etcd" / "data").rename(first.state_dir / "elsewhere")
    failed = first.run("up", "--detach", check=False)
    assert failed.returncode != 0
    assert "genie store restore FILE" in failed.stdout + failed.stderr
    (first.state_dir / "elsewhere").rename(first.state_dir / "etcd" / "data")


# The last test: the third server remains a member of the cluster.
def test_node_and_server_join_through_a_standby(servers: tuple[Server, Server], tmp_path: Path) -> None:
    first, second = servers
    leader = first.leader()
    standby = second if leader == first.where else first
    third = Server("s3", "127.0.0.4", tmp_path / "s3")
    node = Server("n2", "127.0.0.5", tmp_path / "n2")
    try:
        third.join(standby.where, first.create_server_token(tmp_path / "s3.token"))
        assert len(first.list_members()) == 3
        token = write_join_token(first, tmp_path / "join.token")
        node.run("join", standby.where, "--node-id", "n2", "--token-file", str(token), "--detach")
        assert {"s2", "s3", "n2"} <= set(list_nodes(first))
    finally:
        end_servers((third, node))


def write_join_token(server: Server, path: Path) -> Path:
    path.write_text(server.run("token", "create", "--join").stdout.strip())
    path.chmod(0o600)
    return path


def list_nodes(server: Server) -> dict[str, str]:
    """Statuses by node ID."""
    views = json.loads(server.run("nodes", "--json").stdout)["nodes"]
    return {view["info"]["node_id"]: view["info"]["status"] for view in views}
