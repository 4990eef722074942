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
from alternation import ratio_figure, run_in_parallel, time_alternately
from grid_sync_cases import make_tree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from genie.grid.grid_file import read_grid_file  # noqa: E402 - the path comes first
from genie.grid.runs.launch import RunLauncher, RunSpec  # noqa: E402
from genie.grid.runs.run import OutputCollector  # noqa: E402
from genie.grid.runs.run_client import Runner  # noqa: E402
from genie.grid.setup import EnvironmentSetup, EnvironmentSpec, read_environment_spec  # noqa: E402
from genie.grid.ssh.pool import SshPool  # noqa: E402
from tests.grid.small_wheel import make_wheel  # noqa: E402
from tests.grid.testbed import SshTestbed  # noqa: E402

CHANGED_FILES = 10
GPUS_PER_NODE = 8
COMMAND = "python -c 'import small_thing; print(sum(small_thing.VALUE for _ in range(1000)))'"
EXPECTED_OUTPUT = "1000\n"
READINGS_COMMAND = (
    "cat /proc/loadavg; nproc; head -3 /proc/meminfo; df -Pk .; nvidia-smi "
    "--query-gpu=index,memory.total,memory.used --format=csv,noheader,nounits"
)
CIPHER_OPTION = "  Ciphers aes128-gcm@openssh.com\n"
"""The cipher that the grid selects by default; the baseline uses it too."""
GRID_FILE_LIMITS = (
    "ssh: {connect_timeout: 60, timeout: 60, max_retries: 0}\n"
    "health_check: {timeout: 60, refresh_interval: 0, cpu_weight: 0}\n"
)
BEST_NODE = "gpu1"
_WORKSPACE = "grid_workspace"
_RSYNC_WORKSPACE = "rsync_workspace"


@dataclass
class PipelineBenchmark:
    testbed: SshTestbed
    tree: Path
    grid_file: Path
    environment_spec: EnvironmentSpec
    state_dir: Path
    change_count: int = 0

    def change_files(self) -> None:
        """Changes the files that the next sync has to send."""
        self.change_count += 1
        for path in sorted(self.tree.rglob("*.py"))[:CHANGED_FILES]:
            path.write_text(f"changed = {self.change_count}\n")

    def make_ssh_command(self, node: str, command: str) -> list[str]:
        return ["ssh", "-F", str(self.testbed.ssh_config), node, command]


def main() -> int:
    parser = report.make_parser("Compare the pipeline of a grid run with ssh and rsync.", rounds=7)
    parser.add_argument("--nodes", type=int, default=10, help="number of nodes (default: 10)")
    parser.add_argument("--files", type=int, default=1000, help="files in the tree (default: 1000)")
    given = parser.parse_args()
    with (
        report.use_temporary_state() as state_dir,
        _open_benchmark(state_dir, nodes=given.nodes, files=given.files) as bench,
    ):
        ours, theirs = time_alternately(
            given.rounds, lambda: asyncio.run(_run_grid(bench)), lambda: _run_baseline(bench)
        )
    name = f"pipeline_{given.nodes}_nodes"
    return report.print_figures(
        [ratio_figure(name, ours, theirs, goal=report.ratio_at_most(0.6))], as_json=given.json
    )


@contextlib.contextmanager
def _open_benchmark(state_dir: Path, *, nodes: int, files: int) -> Iterator[PipelineBenchmark]:
    with (
        tempfile.TemporaryDirectory(prefix="gp-") as name,
        SshTestbed(Path(name) / "testbed", count=nodes) as testbed,
    ):
        folder = Path(name)
        testbed.write_ssh_config(more=CIPHER_OPTION)
        for node in testbed.nodes:
            node.gpus(1 if node.name == BEST_NODE else GPUS_PER_NODE)  # the GPU of the best node is idle
        make_tree(folder / "tree", files=files)
        (folder / "tree" / "requirements.txt").write_text("small-thing\n")
        make_wheel(folder / "wheels")
        (folder / "grid.yaml").write_text(testbed.grid_yaml(more=GRID_FILE_LIMITS))
        wanted = read_environment_spec(
            requirements=folder / "tree/requirements.txt", wheels=folder / "wheels"
        )
        bench = PipelineBenchmark(testbed, folder / "tree", folder / "grid.yaml", wanted, state_dir)
        asyncio.run(_install_and_sync(bench))
        yield bench


async def _run_grid(bench: PipelineBenchmark) -> None:
    bench.change_files()
    file = read_grid_file(bench.grid_file)
    async with SshPool(file, ssh_config=bench.testbed.ssh_config) as pool:
        runner = Runner(pool, file)
        launcher = RunLauncher(pool, file, runner, state_dir=bench.state_dir)
        node = await launcher.choose_best_node(without={})
        (sent,) = await launcher.sync(bench.tree, [node])
        assert (node, sent.sent_files) == (BEST_NODE, CHANGED_FILES), sent
        (ready,) = await EnvironmentSetup(pool, file).run(bench.environment_spec, [node])
        assert ready.state == "unchanged", ready
        output = OutputCollector(bytes_max=1 << 20)
        run = await launcher.start_on_node(node, RunSpec(command=COMMAND))
        code = await runner.follow_until_end(run, output)
    assert (code, output.text("out")) == (0, EXPECTED_OUTPUT)


async def _install_and_sync(bench: PipelineBenchmark) -> None:
    """Installs the environment and syncs the tree to the best node."""
    file = read_grid_file(bench.grid_file)
    async with SshPool(file, ssh_config=bench.testbed.ssh_config) as pool:
        reports = await EnvironmentSetup(pool, file).run(bench.environment_spec, [BEST_NODE])
        assert not any(each.error for each in reports), reports
        launcher = RunLauncher(pool, file, Runner(pool, file), state_dir=bench.state_dir)
        await launcher.sync(bench.tree, [BEST_NODE])
    run_in_parallel([_make_rsync_command(bench)])


def _run_baseline(bench: PipelineBenchmark) -> None:
    bench.change_files()
    names = [node.name for node in bench.testbed.nodes]
    run_in_parallel([bench.make_ssh_command(name, READINGS_COMMAND) for name in names])
    run_in_parallel([_make_rsync_command(bench)])
    activate = f". {_WORKSPACE}/grid_env/bin/activate"
    install = "pip install --no-index --disable-pip-version-check -q -r"
    run_in_parallel(
        [bench.make_ssh_command(BEST_NODE, f"{activate} && {install} {_RSYNC_WORKSPACE}/requirements.txt")]
    )
    done = subprocess.run(
        bench.make_ssh_command(BEST_NODE, f"{activate} && {COMMAND}"),
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == EXPECTED_OUTPUT, done


def _make_rsync_command(bench: PipelineBenchmark) -> list[str]:
    ssh = f"ssh -F {bench.testbed.ssh_config}"
    return ["rsync", "-a", "--delete", "-e", ssh, f"{bench.tree}/", f"{BEST_NODE}:{_RSYNC_WORKSPACE}/"]


if __name__ == "__main__":
    sys.exit(main())
