"""Real Ray on test nodes: one cluster for all tests, and another that is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from genie.errors import RayError
from genie.grid.grid_file import GridFile
from genie.grid.ray.cluster import RayCluster
from genie.grid.ray.jobs import RayJobs
from genie.grid.ssh.pool import SshPool
from tests.grid.quick_venv import QuickVenv
from tests.grid.ray_testbed import start_ray_testbed, write_ray_grid_file
from tests.grid.small_wheel import make_wheel
from tests.grid.testbed import SshTestbed
from tests.waiting import until, wait_until

pytestmark = pytest.mark.long("real Ray on three nodes")

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "grid_workspace/.grid/ray"
ON_EACH_NODE = """
import ray, socket
ray.init(address="auto", log_to_driver=False)
host = ray.remote(lambda: socket.gethostname())
places = [{f"node:127.0.77.{n}": 0.01} for n in (1, 2)]
print("HOSTS", *ray.get([host.options(resources=place).remote() for place in places], timeout=60))
"""


@dataclass
class StartedRayCluster:
    """The cluster that the example started, and the example's output."""

    testbed: SshTestbed
    file: GridFile
    state_dir: Path
    output: str


@pytest.fixture(scope="module")
def ray_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTestbed]:
    """Three nodes; gpu2 has two GPUs according to nvidia-smi."""
    with start_ray_testbed(tmp_path_factory.mktemp("ray") / "nodes", count=3) as testbed:
        testbed["gpu2"].gpus(2)
        yield testbed


@pytest.fixture(scope="module")
def started_cluster(
    ray_nodes: SshTestbed, quick_venv: QuickVenv, tmp_path_factory: pytest.TempPathFactory
) -> StartedRayCluster:
    folder = tmp_path_factory.mktemp("grid")
    more = ", namespace: team, head_bind_all: true"
    file = write_ray_grid_file(ray_nodes, folder / "grid.yaml", nodes=["gpu1", "gpu2"], more=more)
    make_wheel(folder / "wheels")
    for node in ray_nodes.nodes:
        quick_venv.install(node)
    example = ROOT / "examples" / "grid" / "setup_cluster.py"
    done = subprocess.run(
        [sys.executable, str(example), "--package", "small-thing", "--wheels", str(folder / "wheels")],
        env=os.environ
        | {
            "GENIE_GRID_FILE": str(folder / "grid.yaml"),
            "GENIE_GRID_SSH_CONFIG": str(ray_nodes.ssh_config),
            "GENIE_STATE_DIR": str(folder / "state"),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return StartedRayCluster(ray_nodes, file, folder / "state", done.stdout)


@pytest_asyncio.fixture
async def cluster(started_cluster: StartedRayCluster) -> AsyncIterator[RayCluster]:
    async with SshPool(started_cluster.file, ssh_config=started_cluster.testbed.ssh_config) as pool:
        yield RayCluster(pool, started_cluster.file, state_dir=started_cluster.state_dir)


async def run_ray_job(cluster: RayCluster, command: str) -> tuple[int, str]:
    jobs, parts = RayJobs(cluster), list[bytes]()
    end = await jobs.follow(await jobs.submit(command), parts.append)
    return end.exit_code, b"".join(parts).decode()


def format_script_command(path: Path, *arguments: str) -> str:
    return " ".join([sys.executable, str(path), *arguments])


async def test_status_shows_the_cluster_started_by_the_example(
    started_cluster: StartedRayCluster, cluster: RayCluster
) -> None:
    assert re.search(r"Ray [\d.]+ is running on 2 nodes with 2 GPUs", started_cluster.output), (
        started_cluster.output
    )
    view = await cluster.status()
    assert (view.state, view.head) == ("running", "gpu1")
    rows = [(row.node, row.state, row.role, row.address, row.gpus) for row in view.nodes]
    assert rows == [
        ("gpu1", "alive", "head", "127.0.77.1", 0),
        ("gpu2", "alive", "worker", "127.0.77.2", 2),
    ]
    assert all(row.alive == row.recorded > 0 for row in view.nodes)


async def test_second_start_is_rejected(cluster: RayCluster) -> None:
    before = await cluster.status()
    with pytest.raises(RayError, match="already running on gpu1, gpu2"):
        await cluster.start()
    assert await cluster.status() == before


async def test_tasks_run_on_each_node(cluster: RayCluster, tmp_path: Path) -> None:
    script = tmp_path / "on_each_node.py"
    script.write_text(ON_EACH_NODE)
    code, output = await run_ray_job(cluster, format_script_command(script))
    assert (code, "HOSTS gpu1 gpu2" in output) == (0, True), output


@pytest.mark.parametrize(("command", "code"), [("echo three; exit 3", 3), ("kill -9 $$", 137), ("true", 0)])
async def test_job_exit_code_is_that_of_its_command(cluster: RayCluster, command: str, code: int) -> None:
    found, output = await run_ray_job(cluster, command)
    assert found == code
    assert ("three" in output) == ("three" in command)


async def test_stopped_job_ends(cluster: RayCluster, started_cluster: StartedRayCluster) -> None:
    jobs = RayJobs(cluster)
    job = await jobs.submit("sleep 5901")
    await until(lambda: started_cluster.testbed["gpu1"].processes("sleep 5901"), what="the job", timeout_s=60)
    await jobs.stop(job)
    end = await jobs.follow(job, lambda _data: None)
    assert (end.status, end.exit_code) == ("STOPPED", 143)


async def test_job_continues_after_disconnect_with_complete_output(
    cluster: RayCluster, started_cluster: StartedRayCluster
) -> None:
    jobs, parts = RayJobs(cluster), list[bytes]()
    flag = started_cluster.testbed.folder / "go"
    wait = f"until [ -e {flag} ]; do sleep 0.1; done"
    job = await jobs.submit(f"echo before; {wait}; echo after; exit 4")
    following = asyncio.ensure_future(jobs.follow(job, parts.append))
    await until(lambda: b"before" in b"".join(parts), what="the first output", timeout_s=60)
    started_cluster.testbed["gpu1"].kill_connections()
    flag.touch()
    end = await following
    output = b"".join(parts).decode()
    assert (end.exit_code, output.count("before\n"), output.count("after\n")) == (4, 1, 1), output


def fetch_http_status(url: str, token: str | None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def query_node_count(token: str, address: str) -> str:
    """Return the number of nodes that the head lists for this token, or the error."""
    query = f"GcsClient(address={address!r}).get_all_node_info(timeout=20)"
    program = f"from ray._raylet import GcsClient; print(len({query}))"
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return done.stdout.strip() if done.returncode == 0 else done.stderr


async def test_requests_without_the_token_are_rejected(
    cluster: RayCluster, started_cluster: StartedRayCluster
) -> None:
    async with cluster.open_dashboard_tunnel(local_port=0) as tunnel:
        tokens = [None, "0" * 64, cluster.token_file.read_text()]
        codes = [
            await asyncio.to_thread(fetch_http_status, f"{tunnel.url}/api/v0/nodes", each) for each in tokens
        ]
    assert codes == [401, 403, 200]
    address = f"127.0.77.1:{started_cluster.file.ray.redis_port}"
    assert await asyncio.to_thread(query_node_count, cluster.token_file.read_text(), address) == "2"
    assert "token" in await asyncio.to_thread(query_node_count, "0" * 64, address)


async def test_token_is_private_and_not_on_command_lines(
    cluster: RayCluster, started_cluster: StartedRayCluster
) -> None:
    paths = [
        cluster.token_file,
        *(started_cluster.testbed[name].home / FOLDER / "token" for name in ("gpu1", "gpu2")),
    ]
    token = cluster.token_file.read_text()
    assert [path.read_text() for path in paths] == [token] * 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert [node.processes(token) for node in started_cluster.testbed.nodes] == [[], [], []]


async def test_ray_status_works_in_activated_environment(started_cluster: StartedRayCluster) -> None:
    node = started_cluster.testbed["gpu1"]
    login = f"export HOME=/root PATH={node.bin}:$PATH"
    output = node.run(f"{login}; . ~/grid_workspace/grid_env/bin/activate && ray status")
    assert "Active:" in output
    assert "/2.0 GPU" in output


async def test_batches_return_results_in_order_and_failures_per_task(
    cluster: RayCluster, tmp_path: Path
) -> None:
    (tmp_path / "marks").mkdir()
    code, output = await run_ray_job(
        cluster,
        f"PYTHONPATH={ROOT} "
        + format_script_command(ROOT / "tests/grid/batch_driver.py", str(tmp_path / "marks")),
    )
    assert code == 0, output
    results = json.loads(output.partition("RESULTS ")[2].splitlines()[0])
    assert results["unconnected"] == "this program is not connected to Ray"
    halves = [number / 2 for number in range(10)]
    assert results["halved"] == [*halves[:3], [3, "ValueError: three is not halved"], *halves[4:]]
    assert results["counted"] == ["failed"] + ["succeeded"] * 9 + [0]
    # The worker of tasks 4 to 7 died: their results are lost, and they were not retried.
    assert [results["died"][n] for n in (0, 1, 2, 3, 8, 9)] == [0, 1, 2, 3, 8, 9]
    assert [results["died"][n][0] for n in (4, 5, 6, 7)] == [4, 5, 6, 7]
    assert "the batch was lost" in results["died"][5][1]
    assert (results["unpicklable"][0], results["unpicklable"][2]) == (0, 2)
    assert "TypeError" in results["unpicklable"][1][1]
    assert results["empty"] == []
    assert results["raised"].startswith("2 of 3 tasks failed; the first is task 1: ValueError")
    assert "would be pending forever" in results["too_much"]
    cancelled, started, active, active_after = results["cancelled"]
    assert cancelled == [[number, "cancelled"] for number in range(20)]
    assert (started, active, active_after) == (2, 2, 0)
    # In the default metrics: three tasks with raise_on_error, and two of twenty cancelled ones.
    assert results["completed"] == {"succeeded": 1, "failed": 2, "cancelled": 2}
    assert results["interrupted"] == ["interrupted", 2, 2, 0]


async def test_batch_example_runs_as_a_job(cluster: RayCluster) -> None:
    example = ROOT / "examples" / "grid" / "batch_gpu_tasks.py"
    code, output = await run_ray_job(cluster, format_script_command(example, "--tasks", "12", "--size", "50"))
    assert code == 0, output
    assert "Results: 12 tasks completed on cpu" in output


async def test_dashboard_listens_on_all_addresses_if_configured(
    cluster: RayCluster, started_cluster: StartedRayCluster
) -> None:
    url = f"http://127.0.77.1:{started_cluster.file.ray.dashboard_port}/api/v0/nodes"
    tokens = [None, cluster.token_file.read_text()]
    assert [await asyncio.to_thread(fetch_http_status, url, each) for each in tokens] == [401, 200]


NAMESPACE = """
import ray, sys
ray.init(address="auto", log_to_driver=False, **({"namespace": sys.argv[1]} if sys.argv[1:] else {}))
print("NAMESPACE", ray.get_runtime_context().namespace)
"""


async def test_configured_namespace_is_the_default(
    cluster: RayCluster, started_cluster: StartedRayCluster, tmp_path: Path
) -> None:
    script = tmp_path / "namespace.py"
    script.write_text(NAMESPACE)

    async def namespace(*arguments: str, env: dict[str, str] | None = None) -> str:
        jobs, parts = RayJobs(cluster), list[bytes]()
        job = await jobs.submit(format_script_command(script, *arguments), env=env)
        await jobs.follow(job, parts.append)
        return b"".join(parts).decode().partition("NAMESPACE ")[2].strip()

    assert await namespace() == "team"
    assert await namespace("own") == "own"
    assert await namespace(env={"PYTHONPATH": "/nowhere"}) == "team"
    node = started_cluster.testbed["gpu2"]
    output = node.run(f". /root/{FOLDER}/env.sh && {format_script_command(script)}")
    assert "NAMESPACE team" in output


@pytest.fixture
def make_grid_cli_argv(
    started_cluster: StartedRayCluster, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Return the argument list of a grid-cli command for the running cluster."""
    monkeypatch.setenv("GENIE_GRID_FILE", str(started_cluster.file.path))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(started_cluster.testbed.ssh_config))
    monkeypatch.setenv("GENIE_STATE_DIR", str(started_cluster.state_dir))
    run = "import sys; from genie.cli import grid_main; sys.exit(grid_main())"
    return lambda *words: [sys.executable, "-c", run, *words]


def test_submit_returns_output_and_exit_code(make_grid_cli_argv: Callable[..., list[str]]) -> None:
    command = make_grid_cli_argv(
        "cluster", "submit", "--env", "WORD=two words", "--", "sh", "-c", 'echo "$WORD"; exit 3'
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "two words\n" in done.stdout) == (3, True), done.stdout + done.stderr
    shown = subprocess.run(
        make_grid_cli_argv("cluster", "status", "--json"), capture_output=True, timeout=120
    )
    assert json.loads(shown.stdout)["state"] == "running"


def test_ctrl_c_stops_the_job(
    make_grid_cli_argv: Callable[..., list[str]], started_cluster: StartedRayCluster
) -> None:
    node = started_cluster.testbed["gpu1"]
    command = make_grid_cli_argv("cluster", "submit", "--", "sleep", "5902")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: node.processes("sleep 5902"), what="the job", timeout_s=60)
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=60)
    assert (process.returncode, "stopping job" in output) == (130, True), output
    assert node.processes("sleep 5902") == []


def test_dashboard_tunnel_is_open_until_ctrl_c(
    make_grid_cli_argv: Callable[..., list[str]], started_cluster: StartedRayCluster
) -> None:
    command = make_grid_cli_argv("cluster", "dashboard", "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        token = next(started_cluster.state_dir.rglob("token")).read_text()
        assert fetch_http_status(f"{url}/api/version", token) == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


async def test_stop_ends_only_started_processes(ray_nodes: SshTestbed, tmp_path: Path) -> None:
    """On loopback, without the unreachable node, next to a process that looks like Ray's."""
    node = ray_nodes["gpu3"]
    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/sleep")
    node.run(f"{raylet} 5999 >/dev/null 2>&1 & sleep 0")
    (stranger,) = node.processes("raylet 5999")
    file = write_ray_grid_file(
        ray_nodes, tmp_path / "grid.yaml", nodes=["gpu3", "nowhere"], more=", head_bind_all: false"
    )
    async with SshPool(file, ssh_config=ray_nodes.ssh_config) as pool:
        cluster = RayCluster(pool, file, state_dir=tmp_path / "state")
        view = await cluster.start(allow_missing=True)
        assert [(row.node, row.state) for row in view.nodes] == [
            ("gpu3", "alive"),
            ("nowhere", "unreachable"),
        ]
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.77.3", file.ray.redis_port)
        (raylet_of_ray,) = node.processes("/raylet/raylet")
        os.kill(raylet_of_ray, signal.SIGKILL)
        await until(lambda: not node.processes("/raylet/raylet"), what="the end of the raylet")
        view = await cluster.status()
        assert (view.state, view.nodes[0].state) == ("broken", "failing")
        reports = await cluster.stop()
        assert (reports[0].role, reports[0].error) == ("head", "")
        assert reports[0].ended >= 5
        assert "nowhere" in reports[1].error
        assert not node.processes("gcs_server") and not node.processes("ray::")
        assert node.processes("raylet 5999") == [stranger]
        assert not (node.home / FOLDER / "token").exists()
        assert (await cluster.stop())[0].role == ""
    os.kill(stranger, signal.SIGKILL)
