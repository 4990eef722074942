"""The grid compared with ssh processes, a ControlMaster, rsync and other tools.

    python benchmarks/bench_grid.py [--json] [--rounds N] [--delay-ms MS] [--peers FOLDER] [--only PART...]

The nodes are real SSH servers on loopback, so client and nodes share the cores of this machine, for the grid
and the baseline alike. Both use the same key exchange and cipher, alternate round by round, and collect the
same readings. The baseline starts nvidia-smi on the node, here a script that is cheaper than the real
program; the grid does so too before it has a connection, and then reads NVML, here a fake (tests/fakes/nvml)
with the same GPUs. --delay-ms adds a round-trip delay. --peers names a virtual environment with ansible-core,
clustershell, paramiko and parallel-ssh; each runs the same command on the same ten nodes. Requires root,
openssh-server, a C compiler and rsync. Does not measure real networks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grid_sync_cases
import report
from alternation import ratio_figure, run_in_parallel, time_alternately, time_alternately_async

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from genie.grid.grid_file import GridFile, parse_grid_file  # noqa: E402 - the path comes first
from genie.grid.health.check import HealthState, NodeHealthChecker  # noqa: E402
from genie.grid.runs.run_client import Runner  # noqa: E402
from genie.grid.ssh.pool import SshPool  # noqa: E402
from tests.fakes.nvml.fake_nvml import compile_fake_nvml  # noqa: E402
from tests.grid.delay_proxy import run_delay_proxy  # noqa: E402
from tests.grid.testbed import SshTestbed  # noqa: E402

NODE_COUNT = 20
GPUS_PER_NODE = 8
BENCHMARK_PARTS = ("cold", "many", "warm", "sync", "peers")
READINGS_COMMAND = (
    "cat /proc/loadavg; nproc; head -3 /proc/meminfo; df -Pk .; nvidia-smi "
    "--query-gpu=index,name,uuid,memory.total,memory.used,utilization.gpu,temperature.gpu,"
    "ecc.errors.uncorrected.volatile.total --format=csv,noheader,nounits; "
    "dmesg 2>/dev/null | grep 'NVRM: Xid'; true"
)
"""Readings that the baseline collects; the grid collects the same."""
COMMAND = "hostname"
CIPHER_OPTION = "  Ciphers aes128-gcm@openssh.com\n"
"""The cipher that the grid selects by default; the baseline uses it too."""
WARM_COMMAND_COUNT = 20
_GRID_FILE_LIMITS = (
    "ssh: {pool_size: 200, connect_timeout: 60, timeout: 60, max_retries: 0}\n"
    "health_check: {timeout: 60, max_workers: 200, refresh_interval: 0}\n"
)


@dataclass
class GridBenchmark:
    """The testbed and the names of its nodes."""

    testbed: SshTestbed
    folder: Path
    rounds: int
    connections: int
    many_hosts_ssh_config: Path
    """SSH configuration with one host alias per connection."""

    @property
    def first_ten_nodes(self) -> list[str]:
        return [node.name for node in self.testbed.nodes[:10]]

    @property
    def all_nodes(self) -> list[str]:
        return [node.name for node in self.testbed.nodes]

    @property
    def many_node_names(self) -> list[str]:
        return [f"many{number}" for number in range(self.connections)]

    def make_grid_file(self, names: Sequence[str]) -> GridFile:
        return parse_grid_file(self.testbed.grid_yaml(nodes=names, more=_GRID_FILE_LIMITS), name="bench")

    def ssh_config_for(self, name: str) -> Path:
        return self.many_hosts_ssh_config if name.startswith("many") else self.testbed.ssh_config

    def make_ssh_command(self, name: str, command: str, *more: str) -> list[str]:
        return ["ssh", "-F", str(self.ssh_config_for(name)), *more, name, command]


def main() -> int:
    parser = report.make_parser("Compare the grid with ssh and rsync.", rounds=7)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="added round-trip delay (default: 0)")
    parser.add_argument("--peers", type=Path, help="virtual environment of the other tools")
    parser.add_argument("--connections", type=int, default=100, help="concurrent connections (default: 100)")
    parser.add_argument("--files", type=int, default=10_000, help="files in the tree (default: 10000)")
    parser.add_argument("--only", nargs="+", choices=BENCHMARK_PARTS, default=BENCHMARK_PARTS)
    given = parser.parse_args()
    _raise_file_limit()
    sizes = {"rounds": given.rounds, "connections": given.connections}
    with report.use_temporary_state(), _open_benchmark(given.delay_ms, **sizes) as bench:
        figures: list[report.Figure] = []
        if "cold" in given.only:
            figures += measure_cold_health(bench)
        if "many" in given.only:
            figures += measure_many_cold_connections(bench)
        if "warm" in given.only:
            figures += asyncio.run(measure_warm_connections(bench))
        if "peers" in given.only:
            figures += measure_other_tools(bench, given.peers)
        if "sync" in given.only:
            figures += measure_sync(bench, files=given.files)
    suffix = f"_{given.delay_ms:g}ms" if given.delay_ms else ""
    named = [dataclasses.replace(each, name=each.name + suffix) for each in figures]
    return report.print_figures(named, as_json=given.json)


@contextlib.contextmanager
def _open_benchmark(delay_ms: float, *, rounds: int, connections: int) -> Iterator[GridBenchmark]:
    with contextlib.ExitStack() as stack:
        # Not below the state directory: the path of a control socket is limited to about 100 characters.
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gb-")))
        nvml = compile_fake_nvml("cc", short)
        testbed = stack.enter_context(SshTestbed(short / "testbed", count=NODE_COUNT, nvml=nvml))
        for node in testbed.nodes:
            node.gpus(GPUS_PER_NODE)
        port = testbed.nodes[0].port
        testbed.write_ssh_config(more=CIPHER_OPTION)
        if delay_ms:
            port = _free_port()
            addresses = [node.address for node in testbed.nodes]
            stack.enter_context(
                run_delay_proxy(
                    addresses, port=port, target_port=testbed.nodes[0].port, delay_ms=delay_ms / 2
                )
            )
            testbed.write_ssh_config(ports={node.name: port for node in testbed.nodes}, more=CIPHER_OPTION)
            known = testbed.known_hosts.read_text()
            testbed.known_hosts.write_text(known + known.replace(f"]:{testbed.nodes[0].port} ", f"]:{port} "))
        aliases = "".join(
            f"Host many{number}\n  HostName {testbed.nodes[number % NODE_COUNT].address}\n  Port {port}\n"
            for number in range(connections)
        )
        many_hosts_ssh_config = short / "many_hosts_ssh_config"
        many_hosts_ssh_config.write_text(aliases + testbed.ssh_config.read_text())
        yield GridBenchmark(testbed, short, rounds, connections, many_hosts_ssh_config)


# --- cold: no connection is open --------------------------------------------------------------


def measure_cold_health(bench: GridBenchmark) -> list[report.Figure]:
    """Health check of ten nodes, whose logins compete for the cores of this machine, and of one node."""
    goals = {10: report.ratio_at_most(0.6), 1: None}
    figures = []
    for count, goal in goals.items():
        names = bench.first_ten_nodes[:count]
        ours, theirs = time_alternately(
            bench.rounds,
            lambda names=names: asyncio.run(_check_health_once(bench, names)),  # type: ignore[misc]
            lambda names=names: run_in_parallel(
                [bench.make_ssh_command(name, READINGS_COMMAND) for name in names]
            ),  # type: ignore[misc]
        )
        noun = "node" if count == 1 else "nodes"
        figures.append(ratio_figure(f"cold_health_{count}_{noun}", ours, theirs, goal=goal))
    return figures


def measure_many_cold_connections(bench: GridBenchmark) -> list[report.Figure]:
    """One connection to each of 100 nodes; and 100 commands on ten nodes over shared connections."""
    rounds, count = max(1, bench.rounds // 2), bench.connections
    ours, theirs = time_alternately(
        rounds,
        lambda: asyncio.run(_check_health_once(bench, bench.many_node_names)),
        lambda: run_in_parallel(
            [bench.make_ssh_command(name, READINGS_COMMAND) for name in bench.many_node_names]
        ),
    )
    shared, apart = time_alternately(
        rounds,
        lambda: asyncio.run(_run_commands_once(bench, bench.first_ten_nodes)),
        lambda: run_in_parallel(
            [bench.make_ssh_command(bench.first_ten_nodes[number % 10], COMMAND) for number in range(count)]
        ),
    )
    return [
        ratio_figure(f"cold_{count}_connections", ours, theirs, goal=report.ratio_at_most(0.4)),
        ratio_figure(f"cold_{count}_commands_10_nodes", shared, apart, goal=report.ratio_at_most(0.4)),
    ]


async def _check_health_once(bench: GridBenchmark, names: Sequence[str]) -> None:
    file = bench.make_grid_file(names)
    async with SshPool(file, ssh_config=bench.ssh_config_for(names[0])) as pool:
        reports = await NodeHealthChecker(pool, file, clock=time.time).check_all_in_file_order(fresh=True)
        assert all(node.state is HealthState.OK for node in reports), reports


async def _run_commands_once(bench: GridBenchmark, names: Sequence[str]) -> None:
    file = bench.make_grid_file(names)
    async with SshPool(file, ssh_config=bench.testbed.ssh_config) as pool:

        async def run_on_node(name: str) -> None:
            async with pool.connect(name, without_helper=True) as link:
                assert (await link.run_command(COMMAND, timeout_s=60)).exit_code == 0

        await asyncio.gather(
            *(run_on_node(names[number % len(names)]) for number in range(bench.connections))
        )


# --- warm: connections are open ----------------------------------------------------------------


async def measure_warm_connections(bench: GridBenchmark) -> list[report.Figure]:
    file = bench.make_grid_file(bench.all_nodes)
    with grid_sync_cases.open_control_masters(bench.all_nodes, bench.testbed) as sockets:
        async with SshPool(file, ssh_config=bench.testbed.ssh_config) as pool:
            checker, runner = NodeHealthChecker(pool, file, clock=time.time), Runner(pool, file)
            await checker.check_all_in_file_order(fresh=True)
            await checker.check_all_in_file_order(fresh=True)

            def ssh_command(name: str, command: str) -> list[str]:
                return bench.make_ssh_command(name, command, "-S", str(sockets[name]))

            async def commands() -> None:
                async with pool.connect("gpu1") as link:
                    for _ in range(WARM_COMMAND_COUNT):
                        assert (await link.run_command(COMMAND, timeout_s=60)).stdout == b"gpu1\n"

            async def runs() -> None:
                for _ in range(WARM_COMMAND_COUNT):
                    run = await runner.start("gpu1", COMMAND)
                    assert await runner.follow_until_end(run, lambda *_: None) == 0

            async def baseline_commands() -> None:
                for _ in range(WARM_COMMAND_COUNT):
                    await asyncio.to_thread(run_in_parallel, [ssh_command("gpu1", COMMAND)])

            async def health() -> None:
                await checker.check_all_in_file_order(fresh=True)

            async def baseline_health() -> None:
                await asyncio.to_thread(
                    run_in_parallel,
                    [ssh_command(name, READINGS_COMMAND) for name in bench.all_nodes],
                )

            one, other = await time_alternately_async(bench.rounds, commands, baseline_commands)
            command = ratio_figure(
                "warm_command",
                [each / WARM_COMMAND_COUNT for each in one],
                [each / WARM_COMMAND_COUNT for each in other],
                goal=report.ratio_at_most(0.5),
            )
            one, other = await time_alternately_async(bench.rounds, runs, baseline_commands)
            run = ratio_figure(
                "warm_run_that_outlives_us",
                [each / WARM_COMMAND_COUNT for each in one],
                [each / WARM_COMMAND_COUNT for each in other],
            )
            ours, theirs = await time_alternately_async(bench.rounds, health, baseline_health)
    return [command, run, ratio_figure("warm_health_20_nodes", ours, theirs, goal=report.ratio_at_most(0.1))]


# --- other tools ------------------------------------------------------------------------------


def measure_other_tools(bench: GridBenchmark, environment: Path | None) -> list[report.Figure]:
    """Cold run of one command on ten nodes by each tool, including the start of its process."""
    if environment is None:
        print("skipping Ansible, ClusterShell, paramiko and parallel-ssh: no --peers", file=sys.stderr)
        return []
    inventory = bench.folder / "inventory"
    inventory.write_text("".join(f"{name}\n" for name in bench.first_ten_nodes))
    bin_folder = environment / "bin"
    python = str(bin_folder / "python")
    ssh_config = str(bench.testbed.ssh_config)
    script = ROOT / "benchmarks" / "peers" / "ssh_clients.py"
    commands = {
        "ansible": [
            str(bin_folder / "ansible"), "all", "-i", str(inventory), "-m", "raw", "-a", COMMAND,
            "-f", "10", "--ssh-common-args", f"-F {ssh_config} -o ControlMaster=no -o ControlPath=none",
        ],
        "clustershell": [
            str(bin_folder / "clush"), "-w", ",".join(bench.first_ten_nodes),
            "-O", f"ssh_options=-F {ssh_config}", COMMAND,
        ],
        "paramiko": [python, str(script), "paramiko", ssh_config, COMMAND, *bench.first_ten_nodes],
        "parallel_ssh": [python, str(script), "pssh", ssh_config, COMMAND, *bench.first_ten_nodes],
    }  # fmt: skip
    grid_file = bench.folder / "grid.yaml"
    grid_file.write_text(bench.testbed.grid_yaml(nodes=bench.first_ten_nodes, more=_GRID_FILE_LIMITS))
    environ = os.environ | {"GENIE_GRID_FILE": str(grid_file), "GENIE_GRID_SSH_CONFIG": ssh_config}
    ours_command = [sys.executable, "-m", "genie", "grid", "run", "--all", COMMAND]
    figures = []
    for name, command in commands.items():
        ours, theirs = time_alternately(
            max(1, bench.rounds // 2),
            lambda: run_in_parallel([ours_command], environ=environ),
            lambda command=command: run_in_parallel([command]),  # type: ignore[misc]
        )
        figures.append(ratio_figure(f"run_10_nodes_beside_{name}", ours, theirs))
    return figures


def measure_sync(bench: GridBenchmark, *, files: int) -> list[report.Figure]:
    return grid_sync_cases.measure_all_cases(
        bench.testbed, rounds=bench.rounds, files=files, folder=bench.folder
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def _raise_file_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
