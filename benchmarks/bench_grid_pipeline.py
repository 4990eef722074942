"""Full pipeline of a grid run compared with ssh and rsync: select node, sync, set up, run, collect output.

    python benchmarks/bench_grid_pipeline.py [--json] [--rounds N] [--nodes N] [--files N]

The nodes are real SSH servers on loopback, so client and nodes share the cores of this machine, for the grid
and the baseline alike. A round starts without connections, with ten changed files and with the environment
already installed. The baseline is a typical script: parallel ssh to all nodes for load and GPUs, rsync to the
best node, pip (everything is installed already), and ssh for the command. The environment contains one small
wheel. Requires root, openssh-server and rsync. Does not measure real networks or the first setup, which is
dominated by pip on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import report
from alternation import alternate, ratio_figure, run_all
from grid_sync_cases import make_tree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from genie.grid.grid_file import read_grid_file  # noqa: E402 - the path comes first
from genie.grid.runs.launch import RunLauncher, RunSpec  # noqa: E402
from genie.grid.runs.run import OutputCollector  # noqa: E402
from genie.grid.runs.runner import Runner  # noqa: E402
from genie.grid.setup import EnvironmentSetup, EnvironmentSpec, read_environment_spec  # noqa: E402
from genie.grid.ssh.pool import SshPool  # noqa: E402
from tests.grid.bed import Bed  # noqa: E402
from tests.grid.small_wheel import make_wheel  # noqa: E402

CHANGED_FILES = 10
GPUS = 8
COMMAND = "python -c 'import small_thing; print(sum(small_thing.VALUE for _ in range(1000)))'"
OUTPUT = "1000\n"
READINGS = (
    "cat /proc/loadavg; nproc; head -3 /proc/meminfo; df -Pk .; nvidia-smi "
    "--query-gpu=index,memory.total,memory.used --format=csv,noheader,nounits"
)
CIPHER = "  Ciphers aes128-gcm@openssh.com\n"
"""The cipher that the grid selects by default; the baseline uses it too."""
LIMITS = (
    "ssh: {connect_timeout: 60, timeout: 60, max_retries: 0}\n"
    "health_check: {timeout: 60, refresh_interval: 0, cpu_weight: 0}\n"
)
BEST = "gpu1"
_WORKSPACE = "grid_workspace"
_RSYNC_WORKSPACE = "rsync_workspace"


@dataclass
class Testbed:
    bed: Bed
    tree: Path
    grid_file: Path
    wanted: EnvironmentSpec
    state_dir: Path
    number: int = 0

    def change_files(self) -> None:
        """Changes the files that the next sync has to send."""
        self.number += 1
        for path in sorted(self.tree.rglob("*.py"))[:CHANGED_FILES]:
            path.write_text(f"changed = {self.number}\n")

    def ssh(self, node: str, command: str) -> list[str]:
        return ["ssh", "-F", str(self.bed.ssh_config), node, command]


def main() -> int:
    parser = report.options("Compare the pipeline of a grid run with ssh and rsync.", rounds=7)
    parser.add_argument("--nodes", type=int, default=10, help="number of nodes (default: 10)")
    parser.add_argument("--files", type=int, default=1000, help="files in the tree (default: 1000)")
    given = parser.parse_args()
    with (
        report.temporary_state() as state_dir,
        _testbed(state_dir, nodes=given.nodes, files=given.files) as testbed,
    ):
        ours, theirs = alternate(
            given.rounds, lambda: asyncio.run(_run_grid(testbed)), lambda: _run_baseline(testbed)
        )
    name = f"pipeline_{given.nodes}_nodes"
    return report.conclude(
        [ratio_figure(name, ours, theirs, goal=report.ratio_at_most(0.6))], as_json=given.json
    )


@contextlib.contextmanager
def _testbed(state_dir: Path, *, nodes: int, files: int) -> Iterator[Testbed]:
    with (
        tempfile.TemporaryDirectory(prefix="gp-") as name,
        Bed(Path(name) / "bed", count=nodes) as bed,
    ):
        folder = Path(name)
        bed.write_ssh_config(more=CIPHER)
        for node in bed.nodes:
            node.gpus(1 if node.name == BEST else GPUS)  # the GPU of the best node is idle
        make_tree(folder / "tree", files=files)
        (folder / "tree" / "requirements.txt").write_text("small-thing\n")
        make_wheel(folder / "wheels")
        (folder / "grid.yaml").write_text(bed.grid_yaml(more=LIMITS))
        wanted = read_environment_spec(
            requirements=folder / "tree/requirements.txt", wheels=folder / "wheels"
        )
        testbed = Testbed(bed, folder / "tree", folder / "grid.yaml", wanted, state_dir)
        asyncio.run(_prepare(testbed))
        yield testbed


async def _run_grid(testbed: Testbed) -> None:
    testbed.change_files()
    file = read_grid_file(testbed.grid_file)
    async with SshPool(file, ssh_config=testbed.bed.ssh_config) as pool:
        runner = Runner(pool, file)
        launcher = RunLauncher(pool, file, runner, state_dir=testbed.state_dir)
        node = await launcher.best_node(without={})
        (sent,) = await launcher.sync(testbed.tree, [node])
        assert (node, sent.sent_files) == (BEST, CHANGED_FILES), sent
        (ready,) = await EnvironmentSetup(pool, file).run(testbed.wanted, [node])
        assert ready.state == "unchanged", ready
        output = OutputCollector(bytes_max=1 << 20)
        code = await runner.wait(await launcher.start_on(node, RunSpec(command=COMMAND)), output)
    assert (code, output.text("out")) == (0, OUTPUT)


async def _prepare(testbed: Testbed) -> None:
    """Installs the environment and syncs the tree to the best node."""
    file = read_grid_file(testbed.grid_file)
    async with SshPool(file, ssh_config=testbed.bed.ssh_config) as pool:
        reports = await EnvironmentSetup(pool, file).run(testbed.wanted, [BEST])
        assert not any(each.error for each in reports), reports
        launcher = RunLauncher(pool, file, Runner(pool, file), state_dir=testbed.state_dir)
        await launcher.sync(testbed.tree, [BEST])
    run_all([_rsync(testbed)])


def _run_baseline(testbed: Testbed) -> None:
    testbed.change_files()
    names = [node.name for node in testbed.bed.nodes]
    run_all([testbed.ssh(name, READINGS) for name in names])
    run_all([_rsync(testbed)])
    activate = f". {_WORKSPACE}/grid_env/bin/activate"
    install = "pip install --no-index --disable-pip-version-check -q -r"
    run_all([testbed.ssh(BEST, f"{activate} && {install} {_RSYNC_WORKSPACE}/requirements.txt")])
    done = subprocess.run(
        testbed.ssh(BEST, f"{activate} && {COMMAND}"), check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == OUTPUT, done


def _rsync(testbed: Testbed) -> list[str]:
    ssh = f"ssh -F {testbed.bed.ssh_config}"
    return ["rsync", "-a", "--delete", "-e", ssh, f"{testbed.tree}/", f"{BEST}:{_RSYNC_WORKSPACE}/"]


if __name__ == "__main__":
    sys.exit(main())
