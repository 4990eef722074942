"""Small tasks on Ray: batches of ten (genie.grid.BatchExecutor) compared with one Ray task per call.

    python benchmarks/bench_grid_ray.py [--json] [--rounds N] [--tasks N] [--nodes N] [--only local nodes]

`local` starts Ray on this machine with two workers. `nodes` starts a Ray cluster with the code of grid-cli on
real SSH servers on loopback, each a Ray node with its own daemons that compete for the cores of this machine.
The tasks are almost empty: the benchmark measures scheduling, as in "Task scheduling (100 tasks)" of the Grid
document. Metrics are enabled (the default). Requires Ray; `nodes` also requires root and openssh-server.
Does not measure real networks or GPUs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import report
from alternation import ratio_figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from genie.grid.ray.cluster import RayCluster  # noqa: E402 - the path comes first
from genie.grid.ray.jobs import RayJobs  # noqa: E402
from genie.grid.ssh.pool import SshPool  # noqa: E402
from tests.grid.ray_testbed import start_ray_testbed, write_ray_grid_file  # noqa: E402

BENCHMARK_PARTS = ("local", "nodes")
DRIVER_SCRIPT = ROOT / "benchmarks" / "grid_ray_driver.py"
RATIO_GOAL = report.ratio_at_most(0.6)
CLUSTER_STARTS = 3
_DRIVER_TIMEOUT_S = 600


def main() -> int:
    parser = report.make_parser("Compare batches with one Ray task per call.", rounds=20)
    parser.add_argument("--tasks", type=int, default=100, help="tasks per round (default: 100)")
    parser.add_argument("--nodes", type=int, default=10, help="Ray nodes of the part `nodes` (default: 10)")
    parser.add_argument("--only", nargs="+", choices=BENCHMARK_PARTS, default=BENCHMARK_PARTS)
    given = parser.parse_args()
    figures = []
    with report.use_temporary_state() as state_dir:
        if "local" in given.only:
            done = subprocess.run(
                [sys.executable, str(DRIVER_SCRIPT), str(given.rounds), str(given.tasks), "1"],
                check=False,
                capture_output=True,
                text=True,
                timeout=_DRIVER_TIMEOUT_S,
            )
            assert done.returncode == 0, done.stderr
            figures.append(_parse_figure(f"batches_{given.tasks}_tasks_local", done.stdout, goal=RATIO_GOAL))
        if "nodes" in given.only:
            printed = asyncio.run(_run_driver_on_nodes(state_dir, given.nodes, given.rounds, given.tasks))
            figures.append(
                _parse_figure(f"batches_{given.tasks}_tasks_{given.nodes}_nodes", printed, goal=RATIO_GOAL)
            )
    return report.print_figures(figures, as_json=given.json)


def _parse_figure(name: str, printed: str, *, goal: report.Goal) -> report.Figure:
    seconds = json.loads(printed.partition("SECONDS ")[2].splitlines()[0])
    return ratio_figure(name, seconds["ours"], seconds["theirs"], goal=goal)


async def _run_driver_on_nodes(state_dir: Path, nodes: int, rounds: int, tasks: int) -> str:
    """Runs the driver as a job on a Ray cluster with this number of nodes and returns its output."""
    with (
        tempfile.TemporaryDirectory(prefix="gr-") as folder,
        start_ray_testbed(Path(folder) / "testbed", count=nodes) as testbed,
    ):
        file = write_ray_grid_file(testbed, Path(folder) / "grid.yaml")
        # Ray's start timeout is 30 s; ten nodes that start at once on two cores exceed it.
        file = dataclasses.replace(file, ssh=dataclasses.replace(file.ssh, pool_size=CLUSTER_STARTS))
        async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
            cluster = RayCluster(pool, file, state_dir=state_dir)
            await cluster.start()
            try:
                jobs, parts = RayJobs(cluster), list[bytes]()
                command = f"{sys.executable} {DRIVER_SCRIPT} auto {rounds} {tasks} {nodes}"
                end = await jobs.follow(await jobs.submit(command), parts.append)
                assert end.exit_code == 0, b"".join(parts).decode()
                return b"".join(parts).decode()
            finally:
                await cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
