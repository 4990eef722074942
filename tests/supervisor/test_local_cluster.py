"""The supervisor: start, restart and stop of controller and agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from genie import config
from genie.cluster.client import open_client
from genie.config import Settings
from genie.errors import (
    AddressInUseError,
    AgentRunningError,
    ConfigError,
    DeadlineError,
    LaunchError,
    NameInvalidError,
    PermissionError_,
    TokenMissingError,
    TokenRefusedError,
    UnreachableError,
    UsageError,
)
from genie.model.job import JobSpec, JobState
from genie.model.node import NodeStatus
from genie.model.tenant import TokenKind
from genie.processes.process_identity import ProcessIdentity
from genie.runtime.credentials import LocalCluster
from genie.supervisor import local_cluster, process_records
from genie.supervisor.local_node import local_node_id
from genie.tenancy.access import new_token, parse_token
from tests.cluster.small_controller import TOKEN, SmallController
from tests.waiting import until, wait_until


def load_settings(state_dir: Path, **more: object) -> Settings:
    given = {key.replace("__", "."): value for key, value in more.items()}
    return config.load({"paths.state_dir": state_dir, "controller.port": 0, "cluster.node_id": "n1"} | given)


def is_alive(pid: int) -> bool:
    """False for a zombie."""
    mark = ProcessIdentity.of_pid(pid)
    return mark is not None and mark.is_alive


class ProgressLog:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)


@pytest.fixture
def progress() -> ProgressLog:
    return ProgressLog()


@pytest.fixture
async def cluster(tmp_path: Path, progress: ProgressLog) -> AsyncIterator[local_cluster.Supervisor]:
    async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress) as running:
        yield running


async def test_up_returns_when_the_node_is_registered(
    cluster: local_cluster.Supervisor, progress: ProgressLog, tmp_path: Path
) -> None:
    assert cluster.cluster is not None
    assert progress.has(f"listens on 127.0.0.1:{cluster.cluster.port}")
    assert progress.has("node n1 has joined the cluster with 1 accelerator")
    access = local_cluster.make_owner_access(tmp_path, cluster.cluster)
    async with open_client(load_settings(tmp_path, **_to_settings_arguments(access))) as client:
        (view,) = await client.nodes()
        assert (view.info.node_id, view.info.status) == ("n1", NodeStatus.HEALTHY)
        joins = [record for record in await client.list_tokens() if record.kind is TokenKind.JOIN]
        assert [record.used_at is not None for record in joins] == [True]
    running = local_cluster.find_running_cluster(tmp_path)
    assert running is not None
    assert running.pids == cluster.pids
    assert all(os.getsid(pid) == pid for pid in cluster.pids.values())
    command_lines = " ".join(" ".join(psutil.Process(pid).cmdline()) for pid in cluster.pids.values())
    assert "genie." + "join" not in command_lines, "no token where everyone can read it"
    assert "owner." not in command_lines


def _to_settings_arguments(access: config.ClusterConfig) -> dict[str, object]:
    return {
        "cluster__master_addr": access.master_addr,
        "cluster__master_port": access.master_port,
        "cluster__token": access.token,
    }


async def test_local_cluster_ends_all_processes_and_its_restart_keeps_the_node(
    tmp_path: Path, progress: ProgressLog
) -> None:
    for incarnation in (1, 2):
        async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress) as running:
            pids = running.pids
            assert running.node_id == "n1"
            assert (tmp_path / "agents" / "n1" / "incarnation").read_text().strip() == str(incarnation)
        assert [pid for pid in pids.values() if is_alive(pid)] == []
        assert local_cluster.find_running_cluster(tmp_path) is None
        assert LocalCluster.read(tmp_path) is None, "commands must no longer use it"
    assert sum("joining" in line for line in progress.lines) == 1


async def test_stop_finishes_despite_repeated_cancellation(tmp_path: Path) -> None:
    task: list[asyncio.Task[None]] = []
    pids: list[int] = []

    def cancel_twice(line: str) -> None:
        if "listens on" in line:
            found = local_cluster.find_running_cluster(tmp_path)
            assert found is not None
            pids.extend(found.pids.values())
        if "listens on" in line or line == "stopping the controller":
            task[0].cancel()

    async def host() -> None:
        async with local_cluster.run_local_cluster(
            load_settings(tmp_path), progress=cancel_twice, agent=False
        ):
            raise AssertionError("it was cancelled before")

    async with asyncio.TaskGroup() as group:
        task.append(group.create_task(host()))
        await asyncio.wait(task)
    assert task[0].cancelled()
    assert len(pids) == 1
    assert not is_alive(pids[0])


async def test_error_names_the_process_that_holds_the_lock(tmp_path: Path, progress: ProgressLog) -> None:
    """After 'genie down' a server session still holds the lock."""
    expected = f"process {os.getpid()} .*end that program"
    with local_cluster.hold_supervisor_lock(tmp_path), pytest.raises(AgentRunningError, match=expected):
        async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress):
            pass


async def test_second_cluster_in_the_same_state_directory_is_rejected(
    cluster: local_cluster.Supervisor, tmp_path: Path, progress: ProgressLog
) -> None:
    assert cluster.cluster is not None
    where = f"127.0.0.1:{cluster.cluster.port}"
    with pytest.raises(AgentRunningError, match=rf"already running at {where}.*genie down"):
        async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress):
            pass
    assert all(is_alive(pid) for pid in cluster.pids.values())


async def test_error_names_a_port_in_use(tmp_path: Path, progress: ProgressLog) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"port {port}"):
            async with local_cluster.run_local_cluster(
                load_settings(tmp_path, controller__port=port), progress=progress
            ):
                pass
    assert local_cluster.find_running_cluster(tmp_path) is None


async def test_non_loopback_bind_without_tls_is_rejected(tmp_path: Path, progress: ProgressLog) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        async with local_cluster.run_local_cluster(
            load_settings(tmp_path, controller__bind="0.0.0.0", controller__tls="off"), progress=progress
        ):
            pass


async def test_setting_that_the_controller_rejects_is_a_config_error(
    tmp_path: Path, progress: ProgressLog
) -> None:
    with pytest.raises(ConfigError, match="invalid store URL 'mysql'") as caught:
        async with local_cluster.run_local_cluster(
            load_settings(tmp_path, controller__store="mysql"), progress=progress
        ):
            pass
    assert caught.value.exit_code == 2
    assert local_cluster.find_running_cluster(tmp_path) is None


async def test_failed_controller_start_quotes_its_log(tmp_path: Path, progress: ProgressLog) -> None:
    (tmp_path / "controller").mkdir()
    (tmp_path / "controller" / "store.sqlite3").write_bytes(b"this is not a database" * 100)
    process_records.log_path(tmp_path, local_cluster.CONTROLLER).parent.mkdir()
    process_records.log_path(tmp_path, local_cluster.CONTROLLER).write_text("error: of an earlier start\n")
    with pytest.raises(LaunchError, match=r"^[^\n]*store[^\n]*$") as caught:
        async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress):
            pass
    assert "error:" not in str(caught.value), "the error of the child is raised, not quoted"
    assert "earlier start" not in str(caught.value)
    assert local_cluster.find_running_cluster(tmp_path) is None


async def test_failed_start_keeps_its_error_if_cleanup_exceeds_the_timeout(
    tmp_path: Path,
) -> None:
    (tmp_path / "controller").mkdir()
    (tmp_path / "controller" / "store.sqlite3").write_bytes(b"this is not a database" * 100)

    async def host() -> None:
        async with asyncio.timeout(None) as deadline:

            def end_the_time(line: str) -> None:
                if line == "stopping the controller":
                    deadline.reschedule(0)

            async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=end_the_time):
                pass

    with pytest.raises(LaunchError, match="store"):
        await host()
    assert local_cluster.find_running_cluster(tmp_path) is None


async def test_start_timeout_leaves_no_process(tmp_path: Path, progress: ProgressLog) -> None:
    with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
        async with local_cluster.run_local_cluster(
            load_settings(tmp_path), progress=progress, timeout_s=0.05
        ):
            pass
    assert local_cluster.find_running_cluster(tmp_path) is None


async def test_killed_controller_is_restarted_without_ending_the_agent(
    cluster: local_cluster.Supervisor, progress: ProgressLog, tmp_path: Path
) -> None:
    before = cluster.pids
    assert cluster.cluster is not None
    access = local_cluster.make_owner_access(tmp_path, cluster.cluster)
    async with open_client(load_settings(tmp_path, **_to_settings_arguments(access))) as client:
        os.kill(before["controller"], signal.SIGKILL)
        await until(lambda: progress.has("the controller ended with SIGKILL"))
        assert (await client.status()).leading, "on the same port as before"
    assert cluster.pids["controller"] != before["controller"]
    assert cluster.pids["agent"] == before["agent"]
    assert is_alive(before["agent"])


async def test_state_directory_may_be_a_relative_path(
    tmp_path: Path, progress: ProgressLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with local_cluster.run_local_cluster(load_settings(Path("here")), progress=progress) as running:
        assert set(running.pids) == {"controller", "agent"}
        assert (tmp_path / "here" / "logs" / "agent.log").exists()


async def test_progress_mentions_a_library_that_is_not_compiled(
    tmp_path: Path, progress: ProgressLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "why_scheduler_not_compiled", lambda: "not compiled yet")
    async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress, agent=False):
        assert progress.lines[-1] == "not compiled yet"


async def test_up_can_start_only_a_controller(tmp_path: Path, progress: ProgressLog) -> None:
    async with local_cluster.run_local_cluster(
        load_settings(tmp_path), progress=progress, agent=False
    ) as running:
        assert set(running.pids) == {"controller"}


# --- another process's cluster ----------------------------------------------------------------

SUPERVISOR = """
    import asyncio, pathlib, sys
    from genie import config
    from genie.supervisor import local_cluster

    async def main():
        settings = config.load(
            {"paths.state_dir": sys.argv[1], "controller.port": 0, "cluster.node_id": "n1"}
        )
        async with local_cluster.run_local_cluster(settings, progress=lambda line: None) as running:
            pathlib.Path(sys.argv[1], "ready").touch()
            await running.wait()

    asyncio.run(main())
"""


@pytest.fixture
async def orphaned_processes(tmp_path: Path) -> AsyncIterator[dict[str, int]]:
    """Controller and agent of a process that was killed with SIGKILL."""
    supervisor = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(SUPERVISOR), str(tmp_path)], stdin=subprocess.DEVNULL
    )
    try:
        await until(lambda: (tmp_path / "ready").exists() or supervisor.poll() is not None, timeout_s=60)
        found = local_cluster.find_running_cluster(tmp_path)
        assert found is not None
    finally:
        supervisor.kill()
        supervisor.wait()
    yield found.pids
    await local_cluster.stop_running_cluster(tmp_path)


async def test_children_outlive_a_killed_supervisor_and_can_be_stopped(
    orphaned_processes: dict[str, int], tmp_path: Path, progress: ProgressLog
) -> None:
    assert set(orphaned_processes) == {"controller", "agent"}
    assert all(is_alive(pid) for pid in orphaned_processes.values())
    with pytest.raises(
        AgentRunningError, match=r"already running .*'genie down --keep-jobs', .*'genie down'"
    ):
        async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress):
            pass
    stopped = await local_cluster.stop_running_cluster(tmp_path, progress=progress)
    assert stopped is not None
    assert stopped.pids == orphaned_processes
    assert [line.split(" (")[0] for line in progress.lines] == [
        "stopping the agent",
        "stopping the controller",
    ]
    assert [pid for pid in orphaned_processes.values() if is_alive(pid)] == []
    assert LocalCluster.read(tmp_path) is None
    assert await local_cluster.stop_running_cluster(tmp_path) is None


async def submit_sleeping_job(state_dir: Path) -> int:
    """Waits until the job runs and returns its process ID."""
    found = LocalCluster.read(state_dir)
    assert found is not None
    settings = replace(load_settings(state_dir), cluster=local_cluster.make_owner_access(state_dir, found))
    async with open_client(settings) as client:
        job = await client.submit(JobSpec(name="sleep", command=("/bin/sh", "-c", "echo $$; exec sleep 300")))
        return int(await anext(client.follow_log(job.job_id)))


async def test_stopping_a_hung_agent_ends_its_jobs(
    orphaned_processes: dict[str, int], tmp_path: Path
) -> None:
    """They have no dead-man timer."""
    job_pid = await submit_sleeping_job(tmp_path)
    os.kill(orphaned_processes["agent"], signal.SIGSTOP)
    assert is_alive(job_pid)
    await local_cluster.stop_running_cluster(tmp_path, agent_grace_s=0.1)
    assert not is_alive(job_pid)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGCONT], ids=["hung", "running"])
async def test_stopping_can_keep_the_jobs_of_a_running_or_hung_agent(
    number: int, orphaned_processes: dict[str, int], tmp_path: Path
) -> None:
    job_pid = await submit_sleeping_job(tmp_path)
    os.kill(orphaned_processes["agent"], number)
    await local_cluster.stop_running_cluster(tmp_path, agent_grace_s=0.1, keep_jobs=True)
    assert [pid for pid in orphaned_processes.values() if is_alive(pid)] == []
    assert is_alive(job_pid)
    assert await local_cluster.kill_leftover_jobs(tmp_path) >= 2, "shim and job"
    assert not is_alive(job_pid)


async def test_stopping_ends_the_jobs_of_an_agent_that_was_killed_before(
    orphaned_processes: dict[str, int], tmp_path: Path, progress: ProgressLog
) -> None:
    job_pid = await submit_sleeping_job(tmp_path)
    os.kill(orphaned_processes["agent"], signal.SIGKILL)
    await until(lambda: not is_alive(orphaned_processes["agent"]), what="the agent has ended")
    assert is_alive(job_pid)
    await local_cluster.stop_running_cluster(tmp_path, progress=progress)
    assert not is_alive(job_pid)
    assert any("jobs that an agent had left running" in line for line in progress.lines)


@pytest.fixture
async def kept_job_pid(orphaned_processes: dict[str, int], tmp_path: Path) -> int:
    """Process ID of a job that `genie down --keep-jobs` has left running; no agent runs."""
    job_pid = await submit_sleeping_job(tmp_path)
    await local_cluster.stop_running_cluster(tmp_path, keep_jobs=True)
    assert is_alive(job_pid)
    return job_pid


async def test_failed_start_keeps_jobs_and_the_stop_of_a_complete_one_ends_them(
    kept_job_pid: int, tmp_path: Path, progress: ProgressLog
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = load_settings(tmp_path, controller__port=server.getsockname()[1])
        with pytest.raises(AddressInUseError):
            async with local_cluster.run_local_cluster(settings, progress=progress):
                pass
    assert is_alive(kept_job_pid)
    with pytest.raises(DeadlineError):
        async with local_cluster.run_local_cluster(
            load_settings(tmp_path), progress=progress, timeout_s=0.01
        ):
            pass
    assert is_alive(kept_job_pid)
    with pytest.raises(UsageError, match="after the start"):
        async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress):
            raise UsageError("after the start")
    assert is_alive(kept_job_pid), "no command has requested its end"
    async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress):
        assert is_alive(kept_job_pid)
    assert not is_alive(kept_job_pid)


async def test_interrupted_start_keeps_jobs_that_its_agent_has_adopted(
    kept_job_pid: int, tmp_path: Path
) -> None:
    task: list[asyncio.Task[None]] = []

    def interrupt_while_the_agent_registers(line: str) -> None:
        found = local_cluster.find_running_cluster(tmp_path)
        if line.startswith("starting the agent"):
            assert found is not None
            os.kill(found.pids["controller"], signal.SIGSTOP)
        elif line.startswith("waiting for node n1 to register"):
            task[0].cancel()
        elif line == "stopping the controller":
            assert found is not None
            os.kill(found.pids["controller"], signal.SIGCONT)

    async def start() -> None:
        async with local_cluster.run_local_cluster(
            load_settings(tmp_path), progress=interrupt_while_the_agent_registers
        ):
            raise AssertionError("it was cancelled before")

    async with asyncio.TaskGroup() as group:
        task.append(group.create_task(start()))
        await asyncio.wait(task)
    assert task[0].cancelled()
    assert (tmp_path / "agents" / "n1" / "incarnation").read_text().strip() == "2"
    assert is_alive(kept_job_pid)
    assert local_cluster.find_running_cluster(tmp_path) is None


async def test_jobs_of_a_removed_node_are_ended_although_no_agent_is_started(
    kept_job_pid: int, tmp_path: Path, progress: ProgressLog
) -> None:
    """By 'genie forget', or by 'genie token revoke', which does not wait until the node counts as lost."""
    settings = load_settings(tmp_path)
    async with local_cluster.run_local_cluster(settings, progress=progress, agent=False) as running:
        assert running.cluster is not None
        access = local_cluster.make_owner_access(tmp_path, running.cluster)
        async with open_client(replace(settings, cluster=access)) as client:
            node_token = parse_token((tmp_path / "agents" / "n1" / "node.token").read_text())
            await client.revoke_token(node_token.token_id)
        running.keep_jobs_on_stop()
    assert is_alive(kept_job_pid)
    async with local_cluster.run_local_cluster(settings, progress=progress) as running:
        assert not is_alive(kept_job_pid)
        assert set(running.pids) == {"controller"}
    assert progress.has("ended processes of jobs that node n1 had left running: ")
    assert progress.has("no agent was started")


def test_jobs_are_kept_if_the_token_of_their_node_is_unknown(kept_job_pid: int, tmp_path: Path) -> None:
    """Such as in a restored backup that is older than the node."""
    path = tmp_path / "agents" / "n1" / "node.token"
    path.write_text(str(replace(parse_token(path.read_text()), token_id="unknown")))
    warning = run_genie(tmp_path, "up", "--detach")
    assert "no agent was started" in warning and "its jobs keep running" in warning
    (stop,) = re.findall(r"to add this machine again, run 'genie (.+)' and 'genie up --rejoin'", warning)
    run_genie(tmp_path, *stop.split())
    assert is_alive(kept_job_pid)


def run_genie(state_dir: Path, *arguments: str) -> str:
    """Returns what the command has printed to standard error."""
    ran = subprocess.run(
        [sys.executable, "-m", "genie", *arguments],
        env=os.environ | {"GENIE_STATE_DIR": str(state_dir), "GENIE_CONTROLLER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ran.stderr


async def test_start_fails_if_another_token_than_that_of_the_node_is_refused(tmp_path: Path) -> None:
    """Here the join token, which is revoked before it is used."""
    settings = load_settings(tmp_path)

    async def revoke_join_tokens() -> None:
        found = LocalCluster.read(tmp_path)
        assert found is not None
        access = local_cluster.make_owner_access(tmp_path, found)
        async with open_client(replace(settings, cluster=access)) as client:
            for record in await client.list_tokens():
                if record.kind is TokenKind.JOIN:
                    await client.revoke_token(record.token_id)

    def revoke_before_the_join(line: str) -> None:
        if line.startswith("joining the cluster"):  # in a thread: this one has a running event loop
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: asyncio.run(revoke_join_tokens())).result()

    with pytest.raises(TokenRefusedError, match="was revoked"):
        async with local_cluster.run_local_cluster(settings, progress=revoke_before_the_join):
            pass


async def test_jobs_of_a_hosted_cluster_cannot_be_kept(
    cluster: local_cluster.Supervisor, tmp_path: Path
) -> None:
    """The program with genie.init, for which this process stands in, ends them with itself."""
    pids = cluster.pids
    with pytest.raises(UsageError, match=rf"process {os.getpid()} hosts this cluster .*genie down'"):
        await local_cluster.stop_running_cluster(tmp_path, keep_jobs=True)
    assert all(is_alive(pid) for pid in pids.values())


async def test_wait_returns_when_another_process_stops_the_children(
    cluster: local_cluster.Supervisor, tmp_path: Path
) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(cluster.wait())
        await local_cluster.stop_running_cluster(tmp_path)
        async with asyncio.timeout(30):
            await waiting


def test_find_running_returns_none_without_processes(tmp_path: Path) -> None:
    assert local_cluster.find_running_cluster(tmp_path) is None


def test_find_running_ignores_a_stale_record(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        process_records.record_process(tmp_path, local_cluster.CONTROLLER, ended.pid)
    wait_until(lambda: local_cluster.find_running_cluster(tmp_path) is None)


# --- only an agent ----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def create_join_token(
    cluster: local_cluster.Supervisor, state_dir: Path
) -> AsyncIterator[tuple[Settings, str]]:
    assert cluster.cluster is not None
    access = local_cluster.make_owner_access(state_dir, cluster.cluster)
    async with open_client(load_settings(state_dir, **_to_settings_arguments(access))) as client:
        created = await client.create_token(TokenKind.JOIN)
        yield load_settings(state_dir, **_to_settings_arguments(access)), created.token


async def test_agent_rejoins_without_a_token(
    cluster: local_cluster.Supervisor, tmp_path: Path, progress: ProgressLog
) -> None:
    async with create_join_token(cluster, tmp_path) as (owner, token):
        where = _to_settings_arguments(owner.cluster)
        there = tmp_path / "elsewhere"
        first = load_settings(there, **(where | {"cluster__token": token, "cluster__node_id": "w1"}))
        async with local_cluster.run_local_agent(first, first.cluster, progress=progress) as running:
            assert set(running.pids) == {"agent"}
            assert await _is_listed_as_healthy(owner, "w1"), "up_agent() returns after the registration"
            await _check_other_clusters_are_distinguished(there, running, first)
        with pytest.raises(TokenRefusedError, match="used already"):
            third = load_settings(
                tmp_path / "third", **(where | {"cluster__token": token, "cluster__node_id": "w2"})
            )
            async with local_cluster.run_local_agent(third, third.cluster, progress=progress):
                pass
        again = load_settings(there, **(where | {"cluster__token": None, "cluster__node_id": "w1"}))
        async with local_cluster.run_local_agent(again, again.cluster, progress=progress) as running:
            assert running.node_id == "w1"
            await until(lambda: _is_listed_as_healthy(owner, "w1"), timeout_s=30)


async def test_restarted_agent_needs_neither_node_id_nor_token(
    cluster: local_cluster.Supervisor, tmp_path: Path, progress: ProgressLog
) -> None:
    there = tmp_path / "elsewhere"
    async with create_join_token(cluster, tmp_path) as (owner, _):
        where = _to_settings_arguments(owner.cluster)
    unnamed = load_settings(there, **(where | {"cluster__token": None, "cluster__node_id": None}))

    async def join(name: str) -> None:
        async with create_join_token(cluster, tmp_path) as (_, token):
            given = load_settings(there, **(where | {"cluster__token": token, "cluster__node_id": name}))
            async with local_cluster.run_local_agent(given, given.cluster, progress=progress):
                pass

    await join("trainer")
    async with local_cluster.run_local_agent(unnamed, unnamed.cluster, progress=progress) as running:
        assert running.node_id == "trainer"
    await join("trainer-2")
    with pytest.raises(UsageError, match=r"several nodes .*: trainer, trainer-2") as caught:
        async with local_cluster.run_local_agent(unnamed, unnamed.cluster, progress=progress):
            pass
    assert "--node-id" in caught.value.hint
    third = load_settings(there, **(where | {"cluster__token": None, "cluster__node_id": "trainer-2"}))
    async with local_cluster.run_local_agent(third, third.cluster, progress=progress) as running:
        assert running.node_id == "trainer-2"


async def _check_other_clusters_are_distinguished(
    state_dir: Path, agent: local_cluster.Supervisor, joined: Settings
) -> None:
    running = local_cluster.find_running_cluster(state_dir)
    assert running is not None
    assert running.node_id == agent.node_id
    local_cluster.check_agent_is_of_cluster(running, joined.cluster, state_dir=state_dir)
    other = new_token(TokenKind.OWNER, token_id="owner9", secret=b"\x01" * 32, pin="a" * 43)
    elsewhere = replace(joined.cluster, token=str(other))
    with pytest.raises(AgentRunningError, match=r"cannot join 127\.0\.0\.1"):
        local_cluster.check_agent_is_of_cluster(running, elsewhere, state_dir=state_dir)


async def test_agent_that_cannot_register_is_stopped_and_the_error_has_the_address(
    tmp_path: Path, progress: ProgressLog, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "_WAIT_MESSAGE_DELAY_S", 0.1)
    async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress):
        pass
    pids: list[int] = []

    def remember(line: str) -> None:
        progress(line)
        if "waiting for" in line:
            found = local_cluster.find_running_cluster(tmp_path)
            assert found is not None
            pids.append(found.pids["agent"])

    token = (tmp_path / "owner.token").read_text()
    there = load_settings(tmp_path, cluster__master_addr="127.0.0.1", cluster__master_port=unused_tcp_port)
    with_token = replace(there.cluster, token=token)
    with pytest.raises(
        UnreachableError, match=rf"node n1 could not register with 127\.0\.0\.1:{unused_tcp_port}"
    ):
        async with local_cluster.run_local_agent(there, with_token, progress=remember, timeout_s=2.0):
            pass
    assert not progress.has("has joined the cluster with") or progress.lines[-1] == "stopping the agent"
    assert len(pids) == 1
    assert not is_alive(pids[0])
    with pytest.raises(
        TokenMissingError, match=rf"joining 127\.0\.0\.1:{unused_tcp_port} requires a token .*--token-file"
    ):
        async with local_cluster.run_local_agent(there, there.cluster, progress=progress):
            pass


async def test_standby_reports_the_leader_and_its_agent_joins_through_it(
    controller: SmallController, progress: ProgressLog
) -> None:
    state_dir = Path(os.environ["GENIE_STATE_DIR"])
    here = LocalCluster("127.0.0.1", controller.port, "c1")
    supervisor = local_cluster.Supervisor(load_settings(state_dir), progress=progress, is_program=False)
    controller.leader = "10.0.0.7:5555"
    access = await supervisor.wait_for_leader(here)
    assert access is not None
    assert (access.master_addr, access.master_port, access.token) == (
        "127.0.0.1",
        controller.port,
        str(TOKEN),
    )
    assert progress.lines == ["standby: the leader is 10.0.0.7:5555"]
    (state_dir / "owner.token").unlink()
    assert await supervisor.wait_for_leader(here) is None
    assert progress.has("copy owner.token from the state directory of the first controller to")


async def _is_listed_as_healthy(owner: Settings, node_id: str) -> bool:
    async with open_client(owner) as client:
        views = {view.info.node_id: view.info for view in await client.nodes()}
    return node_id in views and views[node_id].status is NodeStatus.HEALTHY


async def test_restarted_agent_keeps_its_numbered_node_id(
    cluster: local_cluster.Supervisor, tmp_path: Path, progress: ProgressLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two machines with the same host name, the second gets a number."""
    monkeypatch.setattr("genie.supervisor.local_node.socket.gethostname", lambda: "n1")
    async with create_join_token(cluster, tmp_path) as (owner, _token):
        chosen = load_settings(tmp_path / "elsewhere", **_to_settings_arguments(owner.cluster))
        with pytest.raises(UsageError, match="n1' is already in use"):
            async with local_cluster.run_local_agent(chosen, chosen.cluster, progress=progress):
                pass
        there = load_settings(
            tmp_path / "elsewhere", **(_to_settings_arguments(owner.cluster) | {"cluster__node_id": None})
        )
        for _ in range(2):
            async with local_cluster.run_local_agent(there, there.cluster, progress=progress) as running:
                assert running.node_id == "n1-2"
    assert sum("joining" in line for line in progress.lines) == 3, (
        "n1 and n1-2 once each, and one rejected n1"
    )


async def test_joining_requires_a_token(tmp_path: Path, progress: ProgressLog) -> None:
    given = load_settings(tmp_path, cluster__master_addr="127.0.0.1")
    with pytest.raises(TokenMissingError, match=r"genie token create --join"):
        async with local_cluster.run_local_agent(given, given.cluster, progress=progress):
            pass


async def test_user_token_error_explains_how_to_get_a_join_token(
    tmp_path: Path, progress: ProgressLog
) -> None:
    token = new_token(TokenKind.USER, token_id="abcd", secret=b"\x01" * 32, pin="a" * 43)
    given = load_settings(tmp_path, cluster__master_addr="127.0.0.1", cluster__token=str(token))
    with pytest.raises(PermissionError_, match=r"joining 127\.0\.0\.1:5555 requires a join token.*--join"):
        async with local_cluster.run_local_agent(given, given.cluster, progress=progress):
            pass


def test_owner_access_requires_the_owner_token(tmp_path: Path) -> None:
    with pytest.raises(TokenMissingError, match="no owner token"):
        local_cluster.make_owner_access(tmp_path, LocalCluster("127.0.0.1", 1, "c"))
    os.mkfifo(tmp_path / "owner.token")
    with pytest.raises(TokenMissingError, match=r"owner\.token cannot be read: .*not a regular file"):
        local_cluster.make_owner_access(tmp_path, LocalCluster("127.0.0.1", 1, "c"))


def test_invalid_node_id_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NameInvalidError, match="odd id"):
        local_node_id(load_settings(tmp_path, cluster__node_id="odd id"))


async def test_running_jobs_end_with_the_cluster(tmp_path: Path, progress: ProgressLog) -> None:
    from tests.integration.running_cluster import make_python_job

    async with local_cluster.run_local_cluster(load_settings(tmp_path), progress=progress) as running:
        assert running.cluster is not None
        access = local_cluster.make_owner_access(tmp_path, running.cluster)
        async with open_client(load_settings(tmp_path, **_to_settings_arguments(access))) as client:
            job = await client.submit(
                make_python_job("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
            )
            async for data in client.follow_log(job.job_id):
                pid = int(data)
                break
            assert (await client.get_job(job.job_id)).state is JobState.RUNNING
    assert not is_alive(pid)


def test_clusters_without_etcd_need_no_grpc() -> None:
    """gRPC is an optional dependency."""
    modules = "genie.supervisor.local_cluster, genie.supervisor.hosting, genie.controller.__main__"
    program = f"import sys, {modules}, genie.agent.__main__; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
