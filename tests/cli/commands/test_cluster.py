"""up, join, down and forget: errors, and behaviour with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from genie.cli.commands.cluster import (
    _join_and_login_commands,
    _print_jobs_to_terminate,
    _print_started_cluster,
)
from genie.config import load
from genie.controller.etcd.local_member import LocalMember
from genie.errors import NodeError, NodeNotFoundError
from genie.model.job import JobState, Placement
from genie.model.messages import (
    Done,
    GetStatus,
    JobsReply,
    ListJobs,
    ListNodes,
    NodesReply,
    RemoveNode,
)
from genie.supervisor.local_cluster import find_running_cluster
from tests.cli.conftest import CommandOutcome
from tests.cli.sample_messages import make_job as sample_job
from tests.cli.sample_messages import make_status_reply
from tests.ports import free_port
from tests.waiting import TIMEOUT_S, wait_until

JUNK_TOKEN = f"genie.join.abcd.{'s' * 43}.{'p' * 43}"


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_up_rejects_a_public_address_without_tls(genie, state_dir, detach) -> None:
    ran = genie("up", "--bind", "0.0.0.0", "--tls", "off", *detach)
    assert (ran.code, ran.out) == (2, "")
    assert "tls is off" in ran.err and "hint: " in ran.err
    assert find_running_cluster(state_dir) is None


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_up_error_names_the_port_in_use(genie, state_dir, detach) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = genie("up", "--port", str(port), *detach)
    assert ran.code == 1
    assert f"port {port} on 127.0.0.1 is in use" in ran.err and "hint: " in ran.err
    assert find_running_cluster(state_dir) is None


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--port", "70000"], "--port '70000'"),
        (["--port", "-1"], "--port '-1'"),
        (["--tls", "maybe"], "--tls 'maybe'"),
        (["--store", "mysql://x"], "mysql"),
        (["--store", "etcd://"], "etcd"),
    ],
)
def test_up_error_names_the_invalid_option(genie, argv, named) -> None:
    ran = genie("up", "--port", "0", *argv)
    assert ran.code in (1, 2)
    assert named in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (["10.0.0.5:http", "--token", JUNK_TOKEN], 2, "ADDR"),
        (["10.0.0.5", "--token", "hunter2"], 1, "not a Genie token"),
        (["10.0.0.5", "--token", JUNK_TOKEN, "--node-id", "Box_1"], 2, "--node-id"),
        (["10.0.0.5", "--token", JUNK_TOKEN, "--token-file", "x"], 2, "are mutually exclusive"),
        (["10.0.0.5", "--server", "--token", JUNK_TOKEN], 2, "--token-file FILE"),
        (["10.0.0.5", "--token-file", "/nowhere/token"], 2, "/nowhere/token"),
        (["127.0.0.1:1"], 1, "token"),
    ],
)
def test_join_with_invalid_arguments_is_an_error(genie, argv, code, named) -> None:
    ran = genie("join", *argv)
    assert (ran.code, ran.out) == (code, "")
    assert named in ran.err
    assert "hunter2" not in ran.err


@pytest.mark.parametrize("argv", [["up", "--port", "0"], ["join", "127.0.0.1:1", "--token", JUNK_TOKEN]])
@pytest.mark.parametrize("detach", [[], ["--detach"]])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--label", "ssd"], "--label 'ssd' is not KEY=VALUE"),
        (
            ["--label", "disk=ssd", "--label", "disk=hdd"],
            "--label disk=ssd and --label disk=hdd contradict each other",
        ),
        (["--label", "disk=a b"], "the value of --label disk 'a b' is not allowed"),
        (["--label", "=ssd"], "--label '=ssd' is not KEY=VALUE"),
        ([f"--label=k{number}=v" for number in range(65)], "--label: 65 labels are too many"),
        (["--rack", "r 7"], "--rack 'r 7' is not allowed"),
        (["--rack", ""], "--rack '' is not allowed"),
    ],
    ids=["no sign", "twice", "value", "name", "many", "rack", "no rack"],
)
def test_invalid_label_or_rack_fails_immediately(genie, state_dir, argv, detach, options, named) -> None:
    ran = genie(*argv, *detach, *options)
    assert (ran.code, ran.out) == (2, "")
    assert named in ran.err and "hint: " in ran.err
    assert find_running_cluster(state_dir) is None


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_server_is_not_started_with_join_and_first_server_needs_an_address(genie, state_dir, detach) -> None:
    ran = genie("up", "--store", "etcd", *detach)
    assert (ran.code, ran.out) == (2, "")
    assert "where no other server can reach them" in ran.err and "--bind 127.0.0.1" in ran.err
    LocalMember(
        name="box1", host="127.0.0.9", client_port=1, peer_port=2, bind="127.0.0.9", controller_port=3
    ).write(state_dir)
    ran = genie("join", "127.0.0.9", *detach)
    assert (ran.code, ran.out) == (2, "")
    assert "this machine is the server box1: start it with 'genie up'" in ran.err
    ran = genie("up", "--bind", "127.0.0.8", *detach)
    assert (ran.code, ran.out) == (2, "")
    assert "--bind 127.0.0.8: the etcd member of this machine is registered with address 127.0.0.9" in ran.err


def test_join_to_an_unreachable_address_is_a_transport_error(genie, state_dir) -> None:
    ran = genie("join", f"127.0.0.1:{free_port()}", "--token", JUNK_TOKEN)
    assert ran.code == 255
    assert "nothing listens there" in ran.err
    assert find_running_cluster(state_dir) is None


def test_down_reports_that_nothing_is_running(genie) -> None:
    ran = genie("down")
    assert ran.code == 0
    assert "nothing to stop" in ran.out


def test_down_ends_jobs_that_an_agent_had_left_running(genie, state_dir) -> None:
    """Agent and supervisor were killed, so that no process of the cluster is left."""
    job_dir = state_dir / "agents" / "n1" / "jobs" / "j1"
    job_dir.mkdir(parents=True)
    with subprocess.Popen(["/bin/sleep", "300"], env={"GENIE_JOB_DIR": str(job_dir)}) as job:
        try:
            ran = genie("down")
            assert job.wait(TIMEOUT_S) == -signal.SIGKILL
        finally:
            job.kill()
    assert ran.code == 0
    assert ran.err == "ended processes of jobs that an agent had left running: 1\n"


def test_forget_removes_a_node(genie, controller) -> None:
    controller.replies[RemoveNode] = Done()
    assert genie("forget", "gpu-box-3")[:2] == (0, "gpu-box-3: removed\n")
    assert controller.requests == [RemoveNode(node_id="gpu-box-3")]


@pytest.mark.parametrize(
    "error",
    [NodeError("node box is connected", hint="stop it"), NodeNotFoundError("there is no node 'box'")],
    ids=["connected", "unknown"],
)
def test_forget_shows_the_reason_of_a_rejection(genie, controller, error) -> None:
    controller.replies[RemoveNode] = error
    ran = genie("forget", "box")
    assert (ran.code, ran.out) == (1, "")
    assert error.message in ran.err


def test_forget_accepts_only_node_ids(genie, controller) -> None:
    assert genie("forget", "../box").code == 2
    assert controller.requests == []


@pytest.mark.parametrize(
    ("loopback", "message"),
    [
        (True, "not possible: the cluster listens on loopback only; restart with: genie up --bind ADDRESS"),
        (False, "genie join 10.0.0.5:6000 --token-file join.token"),
    ],
)
def test_up_shows_join_commands_only_if_others_can_connect(loopback, message) -> None:
    facts = dict(_join_and_login_commands("10.0.0.5:6000", loopback=loopback))
    assert message in facts["join"]
    assert ("genie login 10.0.0.5:6000" in facts.get("login", "")) is not loopback


@pytest.mark.parametrize(("bind", "open_to_others"), [("0.0.0.0", True), ("::", True), ("127.0.0.1", False)])
def test_up_on_all_interfaces_shows_join_commands(
    controller, state_dir, monkeypatch, capfd, bind, open_to_others
) -> None:
    controller.replies[GetStatus] = make_status_reply()
    controller.replies[ListNodes] = NodesReply(nodes=())
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box")
    asyncio.run(_print_started_cluster(load({"controller.bind": bind})))
    message = capfd.readouterr().out
    assert (f"genie join gpu-box:{controller.port}" in message) is open_to_others
    assert ("listens on loopback only" in message) is not open_to_others


@pytest.mark.parametrize("leader", ["10.0.0.5:5555", ""])
def test_up_reports_that_its_controller_is_a_standby(controller, leader, capfd) -> None:
    reply = msgspec.structs.replace(make_status_reply(), leading=False, leader=leader)
    controller.replies[GetStatus] = reply
    asyncio.run(_print_started_cluster(load()))
    message = capfd.readouterr().out
    assert "standby" in message and (leader or "none elected") in message
    assert "genie submit" not in message, "nothing can be done here"


def test_up_without_owner_token_reports_a_standby(controller, state_dir, capfd) -> None:
    (state_dir / "owner.token").unlink()
    asyncio.run(_print_started_cluster(load()))
    assert "standby" in capfd.readouterr().out


# --- real processes ---------------------------------------------------------------------------


class GenieProcessRunner:
    """Runs commands as processes, with one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.settings = {"GENIE_STATE_DIR": str(state_dir), "GENIE_AGENT_STOP_GRACE_S": "1"}

    def __call__(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "genie", *argv],
            env=os.environ | self.settings,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )


@pytest.fixture
def run_in_process(genie: Callable[..., CommandOutcome]) -> Callable[..., CommandOutcome]:
    """Runs a command in this process, on the state directory of `commands`: for those that start nothing,
    and take a fraction of the time that a process takes to start."""

    def run(commands: GenieProcessRunner, *argv: str, **environ: str) -> CommandOutcome:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (commands.settings | environ).items():
                patch.setenv(name, value)
            return genie(*argv)

    return run


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenieProcessRunner]:
    commands = GenieProcessRunner(tmp_path_factory.mktemp("cli") / "state")
    started = commands("up", "--detach", "--port", "0", "--label", "disk=ssd", "--label=zone=a", "--rack=r7")
    assert started.returncode == 0, started.stderr
    yield commands
    assert commands("down").returncode == 0


def test_up_creates_a_private_state_directory(cluster) -> None:
    assert stat.S_IMODE(cluster.state_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((cluster.state_dir / "owner.token").stat().st_mode) == 0o600


def test_second_up_reports_the_running_cluster(cluster, run_in_process) -> None:
    for detach in ([], ["--detach"]):
        ran = run_in_process(cluster, "up", "--port", "0", *detach)
        assert ran.code == 1
        assert "already running" in ran.err and "genie down" in ran.err


def test_up_starts_a_healthy_node_with_an_accelerator(cluster, run_in_process) -> None:
    (view,) = json.loads(run_in_process(cluster, "nodes", "--json").out)["nodes"]
    assert view["info"]["status"] == "healthy"
    assert view["info"]["gpus"]


def test_up_labels_its_node(cluster, run_in_process) -> None:
    (view,) = json.loads(run_in_process(cluster, "nodes", "--json").out)["nodes"]
    assert (view["info"]["labels"], view["info"]["rack"]) == ({"disk": "ssd", "zone": "a"}, "r7")


def test_job_runs_in_its_directory_and_returns_its_exit_code(cluster, tmp_path) -> None:
    (tmp_path / "hello.py").write_text("import os; print('hello', os.environ['WHO']); raise SystemExit(7)")
    argv = ["submit", "--wait", "--gpus", "1", "--env", "WHO=you", "--workdir", str(tmp_path)]
    ran = cluster(*argv, "--", sys.executable, "hello.py")
    assert (ran.returncode, ran.stdout) == (7, "hello you\n")
    assert "exit code 7" in ran.stderr


def test_impossible_request_is_rejected_and_possible_one_is_queued(cluster, run_in_process) -> None:
    refused = run_in_process(cluster, "submit", "--gpus", "16", "--", "true")
    assert (refused.code, refused.out) == (1, "")
    assert "can never run here" in refused.err
    holder = run_in_process(cluster, "submit", "--gpus", "1", "--", "sleep", "600").out.strip()
    waiting = run_in_process(cluster, "submit", "--gpus", "1", "--", "true")
    assert waiting.code == 0
    assert "queued: " in waiting.err
    assert run_in_process(cluster, "cancel", holder, waiting.out.strip()).code == 0


def test_up_prints_the_next_commands(cluster) -> None:
    log = (cluster.state_dir / "logs" / "up.log").read_text("utf-8")
    assert "listens on loopback only" in log and "--token TOKEN" not in log


def test_connected_node_cannot_be_forgotten(cluster, run_in_process) -> None:
    (view,) = json.loads(run_in_process(cluster, "nodes", "--json").out)["nodes"]
    ran = run_in_process(cluster, "forget", view["info"]["node_id"])
    assert (ran.code, ran.out) == (1, "")
    assert "is connected" in ran.err
    unknown = run_in_process(cluster, "token", "revoke", "4f7a2c9d01be")
    assert (unknown.code, unknown.out) == (1, "")


def test_revoked_token_is_rejected(cluster, run_in_process) -> None:
    token = run_in_process(cluster, "token", "create", "--name", "guest").out.strip()
    assert run_in_process(cluster, "status", GENIE_TOKEN=token).code == 0
    listed = run_in_process(cluster, "token", "list", GENIE_TOKEN=token)
    assert listed.code == 1
    assert "user tokens cannot list tokens" in listed.err
    assert run_in_process(cluster, "token", "revoke", token.split(".")[2]).code == 0
    ran = run_in_process(cluster, "status", GENIE_TOKEN=token)
    assert ran.code == 1
    assert "was revoked" in ran.err


def test_join_token_admits_one_machine_only(cluster, run_in_process, tmp_path) -> None:
    other = GenieProcessRunner(tmp_path / "other")
    address = json.loads(run_in_process(cluster, "status", "--json").out)["address"]
    token = run_in_process(cluster, "token", "create", "--join").out.strip()
    (tmp_path / "token").write_text(token)
    argv = ["join", address, "--node-id", "second", "--label", "disk=hdd", "--rack", "r8", "--detach"]
    try:
        joined = other(*argv, "--token-file", str(tmp_path / "token"))
        assert (joined.returncode, joined.stdout) == (0, f"joined {address} as second\n"), joined.stderr
        views = json.loads(run_in_process(cluster, "nodes", "--json").out)["nodes"]
        (second,) = [view["info"] for view in views if view["info"]["node_id"] == "second"]
        assert (second["labels"], second["rack"]) == ({"disk": "hdd"}, "r8")
        down = run_in_process(other, "down")
        assert (down.code, down.out) == (0, "stopped\n")
        assert "stopping the agent of node second" in down.err and "cluster" not in down.err
        start_again = f"'genie join {address} --node-id second'"
        assert f"start it again with {start_again}" in down.err
        for argv_of_up in (["up"], ["up", "--detach"]):
            up = run_in_process(other, *argv_of_up)
            assert (up.code, up.out) == (2, "")
            assert f"node second of the cluster at {address}: start it with {start_again}" in up.err
        (check,) = (
            check
            for check in json.loads(run_in_process(other, "doctor", "--json").out)["checks"]
            if check["name"] == "cluster"
        )
        assert check["found"] == f"node second of {address}; its agent is not running"
        assert f"'{check['fix']}'" == start_again
        again = other(*argv)
        assert again.returncode == 0, "it has an identity of its own now: " + again.stderr
    finally:
        run_in_process(other, "down")
    third = run_in_process(
        GenieProcessRunner(tmp_path / "third"), "join", address, "--node-id", "third", "--token", token
    )
    assert third.code == 1
    assert "was used already" in third.err


def test_duplicate_node_id_is_rejected(cluster, run_in_process, tmp_path) -> None:
    other = GenieProcessRunner(tmp_path / "other")
    address = json.loads(run_in_process(cluster, "status", "--json").out)["address"]
    token = run_in_process(cluster, "token", "create", "--join").out.strip()
    taken = json.loads(run_in_process(cluster, "nodes", "--json").out)["nodes"][0]["info"]["node_id"]
    try:
        ran = other("join", address, "--node-id", taken, "--token", token, "--detach")
    finally:
        run_in_process(other, "down")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"node ID {taken!r} is already in use" in ran.stderr


def test_ctrl_c_stops_a_foreground_cluster(run_in_process, tmp_path) -> None:
    commands = GenieProcessRunner(tmp_path / "state")
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "genie", "up", "--port", "0"],
            env=os.environ | commands.settings,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        wait_until(lambda: "press Ctrl-C" in log.read_text() or process.poll(), timeout_s=60)
        job = run_in_process(commands, "submit", "--", "sleep", "600").out.strip()
        wait_until(lambda: "running" in run_in_process(commands, "jobs").out)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert job
    assert find_running_cluster(commands.state_dir) is None
    assert "Traceback" not in log.read_text()


def _list_a_job_elsewhere(_request: ListJobs) -> JobsReply:
    place = Placement(node_id="there", incarnation=1, gpu_ids=(0,), epoch=1)
    return JobsReply(jobs=(sample_job(JobState.RUNNING, placements=(place,)),), more=False)


def test_down_of_one_of_several_servers_does_not_stop_the_cluster(controller, capfd) -> None:
    controller.replies[ListJobs] = _list_a_job_elsewhere
    _print_jobs_to_terminate(load(), "here")
    assert "1 job on other machines will continue without this controller" in capfd.readouterr().err
    _print_jobs_to_terminate(load(), "here", has_other_servers=True)
    assert "1 job on other machines will not be terminated\n" in capfd.readouterr().err


def test_down_distinguishes_jobs_of_this_machine_from_others(controller, capfd) -> None:
    def list_jobs(request: ListJobs) -> JobsReply:
        newest = 5 if request.before_sequence is None else request.before_sequence - 1
        node_id = "here" if newest in (5, 1) else "there"
        place = Placement(node_id=node_id, incarnation=1, gpu_ids=(0,), epoch=1)
        job = sample_job(JobState.RUNNING, job_id=f"j{newest}", placements=(place,))
        return JobsReply(jobs=(msgspec.structs.replace(job, sequence=newest),), more=newest > 1)

    controller.replies[ListJobs] = list_jobs
    _print_jobs_to_terminate(load(), "here")
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if "will be terminated" in line] == [
        f"job {job_id} (train) is running and will be terminated" for job_id in ("j5", "j1")
    ]
    assert lines[-1].startswith("3 jobs on other machines will continue without this controller")


def test_down_lists_the_jobs_that_it_terminates(run_in_process, tmp_path) -> None:
    commands = GenieProcessRunner(tmp_path / "state")
    assert commands("up", "--detach", "--port", "0").returncode == 0
    try:
        job = run_in_process(commands, "submit", "--name", "train", "--", "sleep", "600").out.strip()
        wait_until(lambda: "running" in run_in_process(commands, "jobs").out)
    finally:
        ran = run_in_process(commands, "down")
    assert (ran.code, ran.out) == (0, "stopped\n")
    assert f"job {job} (train) is running and will be terminated" in ran.err
    assert find_running_cluster(commands.state_dir) is None


@pytest.mark.timeout(180)
def test_down_keeps_jobs_on_request_and_the_next_up_takes_them_over(run_in_process, tmp_path) -> None:
    commands = GenieProcessRunner(tmp_path / "state")
    script = f"echo before; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo after; exit 7"
    assert commands("up", "--detach", "--port", "0").returncode == 0
    try:
        job = run_in_process(commands, "submit", "--", "sh", "-c", script).out.strip()
        wait_until(lambda: "running" in run_in_process(commands, "jobs").out)
        ran = run_in_process(commands, "down", "--keep-jobs")
        start_again = "start it again with 'genie up' and the options that were given before"
        assert (ran.code, ran.out) == (0, f"stopped; its jobs continue: {start_again}\n")
        assert "will be terminated" not in ran.err
        assert find_running_cluster(commands.state_dir) is None
        ran = run_in_process(commands, "down", "--keep-jobs")
        assert "nothing to stop" in ran.out and "ended processes" not in ran.err
        assert commands("up", "--detach", "--port", "0").returncode == 0
        (shown,) = json.loads(run_in_process(commands, "jobs", "--json").out)["jobs"]
        assert (shown["job_id"], shown["state"]) == (job, "running")
        (tmp_path / "go").touch()
        wait_until(lambda: "exit code 7" in run_in_process(commands, "jobs", "--all").out)
        assert run_in_process(commands, "logs", job).out == "before\nafter\n"
    finally:
        run_in_process(commands, "down")


def test_controller_without_agent_has_no_nodes(run_in_process, tmp_path) -> None:
    commands = GenieProcessRunner(tmp_path / "state")
    assert commands("up", "--detach", "--port", "0", "--no-agent").returncode == 0
    try:
        assert json.loads(run_in_process(commands, "nodes", "--json").out) == {"nodes": [], "age_s": 0.0}
        ran = run_in_process(commands, "submit", "--gpus", "1", "--", "true")
        assert ran.code == 0 or "can never run here" in ran.err
    finally:
        assert run_in_process(commands, "down").code == 0
    looked = run_in_process(commands, "doctor", "--json", GENIE_CONTROLLER_PORT="0")
    found = {check["name"]: check["verdict"] for check in json.loads(looked.out)["checks"]}
    assert (looked.code, found["cluster"]) == (0, "absent"), "nothing is left of it"
