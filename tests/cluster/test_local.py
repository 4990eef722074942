"""A cluster's processes on this machine: started in order, kept up, found again, and stopped by record."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from genie import config
from genie.agent.processes import ProcessMark
from genie.cluster import local, processes
from genie.cluster.client import open_client
from genie.config import Settings
from genie.errors import (
    AddressInUseError,
    AgentRunningError,
    DeadlineError,
    LaunchError,
    NameInvalidError,
    TlsError,
    TokenMissingError,
    TokenRefusedError,
    UnreachableError,
    UsageError,
)
from genie.model.job import JobState
from genie.model.node import NodeStatus
from genie.model.tenant import TokenKind
from genie.runtime.credentials import LocalCluster
from genie.tenancy.access import new_token
from tests.cluster.small_controller import TOKEN, SmallController
from tests.waiting import until, wait_until


def settings(state_dir: Path, **more: object) -> Settings:
    given = {key.replace("__", "."): value for key, value in more.items()}
    return config.load({"paths.state_dir": state_dir, "controller.port": 0, "cluster.node_id": "n1"} | given)


def is_alive(pid: int) -> bool:
    """One that has ended counts as gone, whether its parent has noticed or not."""
    mark = ProcessMark.of(pid)
    return mark is not None and mark.is_alive


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
async def cluster(tmp_path: Path, said: Said) -> AsyncIterator[local.Supervisor]:
    async with local.up(settings(tmp_path), progress=said) as running:
        yield running


async def test_a_cluster_is_up_when_its_node_is_registered(
    cluster: local.Supervisor, said: Said, tmp_path: Path
) -> None:
    assert cluster.cluster is not None
    assert said.has(f"listens on 127.0.0.1:{cluster.cluster.port}")
    assert said.has("node n1 is in the cluster with 1 accelerator")
    access = local.owner_access(tmp_path, cluster.cluster)
    async with open_client(settings(tmp_path, **_as_arguments(access))) as client:
        (view,) = await client.nodes()
        assert (view.info.node_id, view.info.status) == ("n1", NodeStatus.HEALTHY)
        joins = [record for record in await client.list_tokens() if record.kind is TokenKind.JOIN]
        assert [record.used_at is not None for record in joins] == [True]
    running = local.find_running(tmp_path)
    assert running is not None
    assert running.pids == cluster.pids
    assert all(os.getsid(pid) == pid for pid in cluster.pids.values())
    command_lines = " ".join(" ".join(psutil.Process(pid).cmdline()) for pid in cluster.pids.values())
    assert "genie." + "join" not in command_lines, "no token where everyone can read it"
    assert "owner." not in command_lines


def _as_arguments(access: config.ClusterConfig) -> dict[str, object]:
    return {
        "cluster__master_addr": access.master_addr,
        "cluster__master_port": access.master_port,
        "cluster__token": access.token,
    }


async def test_leaving_the_block_ends_everything_and_a_second_start_is_the_same_node(
    tmp_path: Path, said: Said
) -> None:
    for incarnation in (1, 2):
        async with local.up(settings(tmp_path), progress=said) as running:
            pids = running.pids
            assert running.node_id == "n1"
            assert (tmp_path / "agents" / "n1" / "incarnation").read_text().strip() == str(incarnation)
        assert [pid for pid in pids.values() if is_alive(pid)] == []
        assert local.find_running(tmp_path) is None
        assert LocalCluster.read(tmp_path) is None, "commands must not look for it any more"
    assert sum("joining" in line for line in said.lines) == 1


async def test_stopping_goes_on_to_its_end_when_it_is_cancelled_again(tmp_path: Path) -> None:
    task: list[asyncio.Task[None]] = []
    pids: list[int] = []

    def cancel_twice(line: str) -> None:
        if "listens on" in line:
            found = local.find_running(tmp_path)
            assert found is not None
            pids.extend(found.pids.values())
        if "listens on" in line or line == "stopping the controller":
            task[0].cancel()

    async def host() -> None:
        async with local.up(settings(tmp_path), progress=cancel_twice, agent=False):
            raise AssertionError("it was cancelled before")

    async with asyncio.TaskGroup() as group:
        task.append(group.create_task(host()))
        await asyncio.wait(task)
    assert task[0].cancelled()
    assert len(pids) == 1
    assert not is_alive(pids[0])


async def test_a_second_cluster_in_the_same_place_is_refused_and_says_where_the_first_is(
    cluster: local.Supervisor, tmp_path: Path, said: Said
) -> None:
    assert cluster.cluster is not None
    where = f"127.0.0.1:{cluster.cluster.port}"
    with pytest.raises(AgentRunningError, match=rf"already running at {where}.*genie down"):
        async with local.up(settings(tmp_path), progress=said):
            pass
    assert all(is_alive(pid) for pid in cluster.pids.values())


async def test_a_port_that_is_taken_is_named(tmp_path: Path, said: Said) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"port {port}"):
            async with local.up(settings(tmp_path, controller__port=port), progress=said):
                pass
    assert local.find_running(tmp_path) is None


async def test_an_open_address_without_tls_is_refused(tmp_path: Path, said: Said) -> None:
    with pytest.raises(TlsError, match=r"0\.0\.0\.0"):
        async with local.up(
            settings(tmp_path, controller__bind="0.0.0.0", controller__tls="off"), progress=said
        ):
            pass


async def test_a_controller_that_does_not_come_up_is_an_error_with_its_last_words(
    tmp_path: Path, said: Said
) -> None:
    (tmp_path / "controller").mkdir()
    (tmp_path / "controller" / "store.sqlite3").write_bytes(b"this is not a database" * 100)
    processes.log_path(tmp_path, local.CONTROLLER).parent.mkdir()
    processes.log_path(tmp_path, local.CONTROLLER).write_text("error: of an earlier life\n")
    with pytest.raises(LaunchError, match=r"^[^\n]*store[^\n]*$") as caught:
        async with local.up(settings(tmp_path), progress=said):
            pass
    assert "error:" not in str(caught.value), "the child's error is ours now, and not a quotation"
    assert "earlier life" not in str(caught.value)
    assert local.find_running(tmp_path) is None


async def test_a_failed_start_keeps_its_error_when_the_time_ends_while_it_is_cleaned_up(
    tmp_path: Path,
) -> None:
    (tmp_path / "controller").mkdir()
    (tmp_path / "controller" / "store.sqlite3").write_bytes(b"this is not a database" * 100)

    async def host() -> None:
        async with asyncio.timeout(None) as deadline:

            def end_the_time(line: str) -> None:
                if line == "stopping the controller":
                    deadline.reschedule(0)

            async with local.up(settings(tmp_path), progress=end_the_time):
                pass

    with pytest.raises(LaunchError, match="store"):
        await host()
    assert local.find_running(tmp_path) is None


async def test_a_start_that_takes_too_long_leaves_nothing(tmp_path: Path, said: Said) -> None:
    with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
        async with local.up(settings(tmp_path), progress=said, timeout_s=0.05):
            pass
    assert local.find_running(tmp_path) is None


async def test_a_killed_controller_is_started_again_and_the_agent_does_not_notice(
    cluster: local.Supervisor, said: Said, tmp_path: Path
) -> None:
    before = cluster.pids
    assert cluster.cluster is not None
    access = local.owner_access(tmp_path, cluster.cluster)
    async with open_client(settings(tmp_path, **_as_arguments(access))) as client:
        os.kill(before["controller"], signal.SIGKILL)
        await until(lambda: said.has("the controller ended with SIGKILL"))
        assert (await client.status()).leading, "on the same port as before"
    assert cluster.pids["controller"] != before["controller"]
    assert cluster.pids["agent"] == before["agent"]
    assert is_alive(before["agent"])


async def test_the_state_directory_may_be_a_relative_path(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with local.up(settings(Path("here")), progress=said) as running:
        assert set(running.pids) == {"controller", "agent"}
        assert (tmp_path / "here" / "logs" / "agent.log").exists()


async def test_who_starts_a_cluster_hears_that_its_library_is_still_to_be_compiled(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "why_plain", lambda: "not compiled yet")
    async with local.up(settings(tmp_path), progress=said, agent=False):
        assert said.lines[-1] == "not compiled yet"


async def test_only_a_controller_may_be_started(tmp_path: Path, said: Said) -> None:
    async with local.up(settings(tmp_path), progress=said, agent=False) as running:
        assert set(running.pids) == {"controller"}


# --- another process's cluster ----------------------------------------------------------------

KEEPER = """
    import asyncio, pathlib, sys
    from genie import config
    from genie.cluster import local

    async def main():
        settings = config.load({"paths.state_dir": sys.argv[1], "controller.port": 0})
        async with local.up(settings, progress=lambda line: None) as running:
            pathlib.Path(sys.argv[1], "ready").touch()
            await running.wait()

    asyncio.run(main())
"""


@pytest.fixture
async def orphans(tmp_path: Path) -> AsyncIterator[dict[str, int]]:
    """Controller and agent of a process that was killed with SIGKILL."""
    keeper = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(KEEPER), str(tmp_path)], stdin=subprocess.DEVNULL
    )
    try:
        await until(lambda: (tmp_path / "ready").exists() or keeper.poll() is not None, timeout_s=60)
        found = local.find_running(tmp_path)
        assert found is not None
    finally:
        keeper.kill()
        keeper.wait()
    yield found.pids
    await local.stop_running(tmp_path)


async def test_children_outlive_the_one_who_started_them_and_can_be_stopped_by_another(
    orphans: dict[str, int], tmp_path: Path, said: Said
) -> None:
    assert set(orphans) == {"controller", "agent"}
    assert all(is_alive(pid) for pid in orphans.values())
    with pytest.raises(AgentRunningError, match="already running"):
        async with local.up(settings(tmp_path), progress=said):
            pass
    stopped = await local.stop_running(tmp_path, progress=said)
    assert stopped is not None
    assert stopped.pids == orphans
    assert [line.split(" (")[0] for line in said.lines] == ["stopping the agent", "stopping the controller"]
    assert [pid for pid in orphans.values() if is_alive(pid)] == []
    assert LocalCluster.read(tmp_path) is None
    assert await local.stop_running(tmp_path) is None


async def test_a_child_that_is_stopped_from_outside_ends_the_wait(
    cluster: local.Supervisor, tmp_path: Path
) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(cluster.wait())
        await local.stop_running(tmp_path)
        async with asyncio.timeout(10):
            await waiting


def test_nothing_runs_where_nothing_was_started(tmp_path: Path) -> None:
    assert local.find_running(tmp_path) is None


def test_a_stale_record_is_not_a_running_cluster(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        processes.record_process(tmp_path, local.CONTROLLER, ended.pid)
    wait_until(lambda: local.find_running(tmp_path) is None)


# --- an agent alone ---------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def join_token(cluster: local.Supervisor, state_dir: Path) -> AsyncIterator[tuple[Settings, str]]:
    assert cluster.cluster is not None
    access = local.owner_access(state_dir, cluster.cluster)
    async with open_client(settings(state_dir, **_as_arguments(access))) as client:
        created = await client.create_token(TokenKind.JOIN)
        yield settings(state_dir, **_as_arguments(access)), created.token


async def test_an_agent_alone_joins_with_a_join_token_and_later_without(
    cluster: local.Supervisor, tmp_path: Path, said: Said
) -> None:
    async with join_token(cluster, tmp_path) as (owner, token):
        where = _as_arguments(owner.cluster)
        there = tmp_path / "elsewhere"
        first = settings(there, **(where | {"cluster__token": token, "cluster__node_id": "w1"}))
        async with local.up_agent(first, first.cluster, progress=said) as running:
            assert set(running.pids) == {"agent"}
            assert await _is_listed(owner, "w1"), "it is up when the cluster has taken it in"
            await _check_other_clusters_are_told_apart(there, running, first)
        with pytest.raises(TokenRefusedError, match="used already"):
            third = settings(
                tmp_path / "third", **(where | {"cluster__token": token, "cluster__node_id": "w2"})
            )
            async with local.up_agent(third, third.cluster, progress=said):
                pass
        again = settings(there, **(where | {"cluster__token": None, "cluster__node_id": "w1"}))
        async with local.up_agent(again, again.cluster, progress=said) as running:
            assert running.node_id == "w1"
            await until(lambda: _is_listed(owner, "w1"), timeout_s=30)


async def test_a_node_that_was_named_is_found_again_without_its_name_or_a_token(
    cluster: local.Supervisor, tmp_path: Path, said: Said
) -> None:
    there = tmp_path / "elsewhere"
    async with join_token(cluster, tmp_path) as (owner, _):
        where = _as_arguments(owner.cluster)
    unnamed = settings(there, **(where | {"cluster__token": None, "cluster__node_id": None}))

    async def join(name: str) -> None:
        async with join_token(cluster, tmp_path) as (_, token):
            given = settings(there, **(where | {"cluster__token": token, "cluster__node_id": name}))
            async with local.up_agent(given, given.cluster, progress=said):
                pass

    await join("trainer")
    async with local.up_agent(unnamed, unnamed.cluster, progress=said) as running:
        assert running.node_id == "trainer"
    await join("trainer-2")
    with pytest.raises(UsageError, match=r"several nodes .*: trainer, trainer-2") as caught:
        async with local.up_agent(unnamed, unnamed.cluster, progress=said):
            pass
    assert "--node-id" in caught.value.hint
    third = settings(there, **(where | {"cluster__token": None, "cluster__node_id": "trainer-2"}))
    async with local.up_agent(third, third.cluster, progress=said) as running:
        assert running.node_id == "trainer-2"


async def _check_other_clusters_are_told_apart(
    state_dir: Path, agent: local.Supervisor, joined: Settings
) -> None:
    running = local.find_running(state_dir)
    assert running is not None
    assert running.node_id == agent.node_id
    local.check_agent_is_of(running, joined.cluster, state_dir=state_dir)
    other = new_token(TokenKind.OWNER, token_id="owner9", secret=b"\x01" * 32, pin="a" * 43)
    elsewhere = replace(joined.cluster, token=str(other))
    with pytest.raises(AgentRunningError, match=r"another cluster than 127\.0\.0\.1"):
        local.check_agent_is_of(running, elsewhere, state_dir=state_dir)


async def test_an_agent_that_is_not_taken_in_is_an_error_with_the_address_and_is_stopped(
    tmp_path: Path, said: Said, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_QUIET_S", 0.1)  # so that a short wait is told of
    async with local.up(settings(tmp_path), progress=said):
        pass
    pids: list[int] = []

    def remember(line: str) -> None:
        said(line)
        if "waiting for" in line:
            found = local.find_running(tmp_path)
            assert found is not None
            pids.append(found.pids["agent"])

    token = (tmp_path / "owner.token").read_text()
    there = settings(tmp_path, cluster__master_addr="127.0.0.1", cluster__master_port=unused_tcp_port)
    with_token = replace(there.cluster, token=token)
    with pytest.raises(UnreachableError, match=rf"127\.0\.0\.1:{unused_tcp_port} did not take node n1 in"):
        async with local.up_agent(there, with_token, progress=remember, timeout_s=1.0):
            pass
    assert not said.has("is in the cluster with") or said.lines[-1] == "stopping the agent"
    assert len(pids) == 1
    assert not is_alive(pids[0])
    with pytest.raises(TokenMissingError, match=f"joining 127.0.0.1:{unused_tcp_port} needs a token"):
        async with local.up_agent(there, there.cluster, progress=said):
            pass


async def test_a_controller_that_stands_by_names_the_leader_and_its_agent_goes_there(
    controller: SmallController, said: Said
) -> None:
    state_dir = Path(os.environ["GENIE_STATE_DIR"])
    here = LocalCluster("127.0.0.1", controller.port, "c1")
    supervisor = local.Supervisor(settings(state_dir), progress=said)
    controller.leader = "10.0.0.7:5555"
    access = await supervisor.leader_of(here)
    assert access is not None
    assert (access.master_addr, access.master_port, access.token) == ("10.0.0.7", 5555, str(TOKEN))
    assert said.lines == ["standby: the leader is 10.0.0.7:5555"]
    (state_dir / "owner.token").unlink()
    assert await supervisor.leader_of(here) is None
    assert said.has("copy owner.token of the first controller's state directory to")


async def _is_listed(owner: Settings, node_id: str) -> bool:
    async with open_client(owner) as client:
        views = {view.info.node_id: view.info for view in await client.nodes()}
    return node_id in views and views[node_id].status is NodeStatus.HEALTHY


async def test_a_node_whose_name_was_taken_is_the_same_node_again_later(
    cluster: local.Supervisor, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines with one host name: the second gets a number, and keeps it."""
    monkeypatch.setattr("genie.cluster.local.socket.gethostname", lambda: "n1")
    async with join_token(cluster, tmp_path) as (owner, _token):
        chosen = settings(tmp_path / "elsewhere", **_as_arguments(owner.cluster))
        with pytest.raises(UsageError, match="n1' is taken"):
            async with local.up_agent(chosen, chosen.cluster, progress=said):
                pass
        there = settings(
            tmp_path / "elsewhere", **(_as_arguments(owner.cluster) | {"cluster__node_id": None})
        )
        for _ in range(2):
            async with local.up_agent(there, there.cluster, progress=said) as running:
                assert running.node_id == "n1-2"
    assert sum("joining" in line for line in said.lines) == 3, "n1 and n1-2 once each, and n1 in vain"


async def test_an_agent_that_never_joined_needs_a_token(tmp_path: Path, said: Said) -> None:
    given = settings(tmp_path, cluster__master_addr="127.0.0.1")
    with pytest.raises(TokenMissingError, match=r"genie token create --join"):
        async with local.up_agent(given, given.cluster, progress=said):
            pass


def test_the_owners_token_must_be_there_to_be_used(tmp_path: Path) -> None:
    with pytest.raises(TokenMissingError, match="owner's token"):
        local.owner_access(tmp_path, LocalCluster("127.0.0.1", 1, "c"))


def test_a_node_id_with_odd_characters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NameInvalidError, match="odd id"):
        local.local_node_id(settings(tmp_path, cluster__node_id="odd id"))


async def test_running_jobs_end_with_the_cluster(tmp_path: Path, said: Said) -> None:
    from tests.integration.running import python_job

    async with local.up(settings(tmp_path), progress=said) as running:
        assert running.cluster is not None
        access = local.owner_access(tmp_path, running.cluster)
        async with open_client(settings(tmp_path, **_as_arguments(access))) as client:
            job = await client.submit(
                python_job("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
            )
            async for data in client.follow_log(job.job_id):
                pid = int(data)
                break
            assert (await client.get_job(job.job_id)).state is JobState.RUNNING
    assert not is_alive(pid)
