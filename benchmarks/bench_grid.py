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
from alternation import alternate, alternate_async, ratio_figure, run_all

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from genie.grid.grid_file import GridFile, parse_grid_file  # noqa: E402 - the path comes first
from genie.grid.health.check import HealthState, NodeHealthChecker  # noqa: E402
from genie.grid.runs.runner import Runner  # noqa: E402
from genie.grid.ssh.pool import SshPool  # noqa: E402
from tests.fakes.nvml.fake import build  # noqa: E402
from tests.grid.bed import Bed  # noqa: E402
from tests.grid.delay_proxy import delayed  # noqa: E402

NODES = 20
GPUS = 8
PARTS = ("cold", "many", "warm", "sync", "peers")
READINGS = (
    "cat /proc/loadavg; nproc; head -3 /proc/meminfo; df -Pk .; nvidia-smi "
    "--query-gpu=index,name,uuid,memory.total,memory.used,utilization.gpu,temperature.gpu,"
    "ecc.errors.uncorrected.volatile.total --format=csv,noheader,nounits; "
    "dmesg 2>/dev/null | grep 'NVRM: Xid'; true"
)
"""Readings that the baseline collects; the grid collects the same."""
COMMAND = "hostname"
CIPHER = "  Ciphers aes128-gcm@openssh.com\n"
"""The cipher that the grid selects by default; the baseline uses it too."""
WARM_COMMANDS = 20
_LIMITS = (
    "ssh: {pool_size: 200, connect_timeout: 60, timeout: 60, max_retries: 0}\n"
    "health_check: {timeout: 60, max_workers: 200, refresh_interval: 0}\n"
)


@dataclass
class Testbed:
    """The test bed and the names of its nodes."""

    bed: Bed
    folder: Path
    rounds: int
    connections: int
    many_config: Path
    """SSH configuration with one host alias per connection."""

    @property
    def ten(self) -> list[str]:
        return [node.name for node in self.bed.nodes[:10]]

    @property
    def twenty(self) -> list[str]:
        return [node.name for node in self.bed.nodes]

    @property
    def many(self) -> list[str]:
        return [f"many{number}" for number in range(self.connections)]

    def file(self, names: Sequence[str]) -> GridFile:
        return parse_grid_file(self.bed.grid_yaml(nodes=names, more=_LIMITS), name="bench")

    def config(self, name: str) -> Path:
        return self.many_config if name.startswith("many") else self.bed.ssh_config

    def ssh(self, name: str, command: str, *more: str) -> list[str]:
        return ["ssh", "-F", str(self.config(name)), *more, name, command]


def main() -> int:
    parser = report.options("Compare the grid with ssh and rsync.", rounds=7)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="added round-trip delay (default: 0)")
    parser.add_argument("--peers", type=Path, help="virtual environment of the other tools")
    parser.add_argument("--connections", type=int, default=100, help="concurrent connections (default: 100)")
    parser.add_argument("--files", type=int, default=10_000, help="files in the tree (default: 10000)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    _raise_file_limit()
    sizes = {"rounds": given.rounds, "connections": given.connections}
    with report.temporary_state(), _testbed(given.delay_ms, **sizes) as testbed:
        figures: list[report.Figure] = []
        if "cold" in given.only:
            figures += cold_health(testbed)
        if "many" in given.only:
            figures += cold_many(testbed)
        if "warm" in given.only:
            figures += asyncio.run(warm(testbed))
        if "peers" in given.only:
            figures += peers(testbed, given.peers)
        if "sync" in given.only:
            figures += sync(testbed, files=given.files)
    suffix = f"_{given.delay_ms:g}ms" if given.delay_ms else ""
    named = [dataclasses.replace(each, name=each.name + suffix) for each in figures]
    return report.conclude(named, as_json=given.json)


@contextlib.contextmanager
def _testbed(delay_ms: float, *, rounds: int, connections: int) -> Iterator[Testbed]:
    with contextlib.ExitStack() as stack:
        # Not below the state directory: the path of a control socket is limited to about 100 characters.
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gb-")))
        nvml = build("cc", short)
        bed = stack.enter_context(Bed(short / "bed", count=NODES, nvml=nvml))
        for node in bed.nodes:
            node.gpus(GPUS)
        port = bed.nodes[0].port
        bed.write_ssh_config(more=CIPHER)
        if delay_ms:
            port = _free_port()
            addresses = [node.address for node in bed.nodes]
            stack.enter_context(
                delayed(addresses, port=port, target_port=bed.nodes[0].port, delay_ms=delay_ms / 2)
            )
            bed.write_ssh_config(ports={node.name: port for node in bed.nodes}, more=CIPHER)
            known = bed.known_hosts.read_text()
            bed.known_hosts.write_text(known + known.replace(f"]:{bed.nodes[0].port} ", f"]:{port} "))
        aliases = "".join(
            f"Host many{number}\n  HostName {bed.nodes[number % NODES].address}\n  Port {port}\n"
            for number in range(connections)
        )
        many_config = short / "many_config"
        many_config.write_text(aliases + bed.ssh_config.read_text())
        yield Testbed(bed, short, rounds, connections, many_config)


# --- cold: no connection is open --------------------------------------------------------------


def cold_health(testbed: Testbed) -> list[report.Figure]:
    """Health check of ten nodes, whose logins compete for the cores of this machine, and of one node."""
    goals = {10: report.ratio_at_most(0.6), 1: None}
    figures = []
    for count, goal in goals.items():
        names = testbed.ten[:count]
        ours, theirs = alternate(
            testbed.rounds,
            lambda names=names: asyncio.run(_cold_health(testbed, names)),  # type: ignore[misc]
            lambda names=names: run_all([testbed.ssh(name, READINGS) for name in names]),  # type: ignore[misc]
        )
        noun = "node" if count == 1 else "nodes"
        figures.append(ratio_figure(f"cold_health_{count}_{noun}", ours, theirs, goal=goal))
    return figures


def cold_many(testbed: Testbed) -> list[report.Figure]:
    """One connection to each of 100 nodes; and 100 commands on ten nodes over shared connections."""
    rounds, count = max(1, testbed.rounds // 2), testbed.connections
    ours, theirs = alternate(
        rounds,
        lambda: asyncio.run(_cold_health(testbed, testbed.many)),
        lambda: run_all([testbed.ssh(name, READINGS) for name in testbed.many]),
    )
    shared, apart = alternate(
        rounds,
        lambda: asyncio.run(_cold_commands(testbed, testbed.ten)),
        lambda: run_all([testbed.ssh(testbed.ten[number % 10], COMMAND) for number in range(count)]),
    )
    return [
        ratio_figure(f"cold_{count}_connections", ours, theirs, goal=report.ratio_at_most(0.4)),
        ratio_figure(f"cold_{count}_commands_10_nodes", shared, apart, goal=report.ratio_at_most(0.4)),
    ]


async def _cold_health(testbed: Testbed, names: Sequence[str]) -> None:
    file = testbed.file(names)
    async with SshPool(file, ssh_config=testbed.config(names[0])) as pool:
        reports = await NodeHealthChecker(pool, file, clock=time.time).check_all(fresh=True)
        assert all(node.state is HealthState.OK for node in reports), reports


async def _cold_commands(testbed: Testbed, names: Sequence[str]) -> None:
    file = testbed.file(names)
    async with SshPool(file, ssh_config=testbed.bed.ssh_config) as pool:

        async def one(name: str) -> None:
            async with pool.connect(name, without_helper=True) as link:
                assert (await link.run_command(COMMAND, timeout_s=60)).exit_code == 0

        await asyncio.gather(*(one(names[number % len(names)]) for number in range(testbed.connections)))


# --- warm: connections are open ----------------------------------------------------------------


async def warm(testbed: Testbed) -> list[report.Figure]:
    file = testbed.file(testbed.twenty)
    with grid_sync_cases.masters(testbed.twenty, testbed.bed) as sockets:
        async with SshPool(file, ssh_config=testbed.bed.ssh_config) as pool:
            checker, runner = NodeHealthChecker(pool, file, clock=time.time), Runner(pool, file)
            await checker.check_all(fresh=True)
            await checker.check_all(fresh=True)

            def ssh_command(name: str, command: str) -> list[str]:
                return testbed.ssh(name, command, "-S", str(sockets[name]))

            async def commands() -> None:
                async with pool.connect("gpu1") as link:
                    for _ in range(WARM_COMMANDS):
                        assert (await link.run_command(COMMAND, timeout_s=60)).stdout == b"gpu1\n"

            async def runs() -> None:
                for _ in range(WARM_COMMANDS):
                    run = await runner.start("gpu1", COMMAND)
                    assert await runner.wait(run, lambda *_: None) == 0

            async def baseline_commands() -> None:
                for _ in range(WARM_COMMANDS):
                    await asyncio.to_thread(run_all, [ssh_command("gpu1", COMMAND)])

            async def health() -> None:
                await checker.check_all(fresh=True)

            async def baseline_health() -> None:
                await asyncio.to_thread(run_all, [ssh_command(name, READINGS) for name in testbed.twenty])

            one, other = await alternate_async(testbed.rounds, commands, baseline_commands)
            command = ratio_figure(
                "warm_command",
                [each / WARM_COMMANDS for each in one],
                [each / WARM_COMMANDS for each in other],
                goal=report.ratio_at_most(0.5),
            )
            one, other = await alternate_async(testbed.rounds, runs, baseline_commands)
            run = ratio_figure(
                "warm_run_that_outlives_us",
                [each / WARM_COMMANDS for each in one],
                [each / WARM_COMMANDS for each in other],
            )
            ours, theirs = await alternate_async(testbed.rounds, health, baseline_health)
    return [command, run, ratio_figure("warm_health_20_nodes", ours, theirs, goal=report.ratio_at_most(0.1))]


# --- other tools ------------------------------------------------------------------------------


def peers(testbed: Testbed, environment: Path | None) -> list[report.Figure]:
    """Cold run of one command on ten nodes by each tool, including the start of its process."""
    if environment is None:
        print("skipping Ansible, ClusterShell, paramiko and parallel-ssh: no --peers", file=sys.stderr)
        return []
    inventory = testbed.folder / "inventory"
    inventory.write_text("".join(f"{name}\n" for name in testbed.ten))
    bin_folder = environment / "bin"
    ssh_config = str(testbed.bed.ssh_config)
    script = ROOT / "benchmarks" / "peers" / "ssh_clients.py"
    commands = {
        "ansible": [
            str(bin_folder / "ansible"), "all", "-i", str(inventory), "-m", "raw", "-a", COMMAND,
            "-f", "10", "--ssh-common-args", f"-F {ssh_config} -o ControlMaster=no -o ControlPath=none",
        ],
        "clustershell": [
            str(bin_folder / "clush"), "-w", ",".join(testbed.ten),
            "-O", f"ssh_options=-F {ssh_config}", COMMAND,
        ],
        "paramiko": [str(bin_folder / "python"), str(script), "paramiko", ssh_config, COMMAND, *testbed.ten],
        "parallel_ssh": [str(bin_folder / "python"), str(script), "pssh", ssh_config, COMMAND, *testbed.ten],
    }  # fmt: skip
    grid_file = testbed.folder / "grid.yaml"
    grid_file.write_text(testbed.bed.grid_yaml(nodes=testbed.ten, more=_LIMITS))
    environ = os.environ | {"GENIE_GRID_FILE": str(grid_file), "GENIE_GRID_SSH_CONFIG": ssh_config}
    ours_command = [sys.executable, "-m", "genie", "grid", "run", "--all", COMMAND]
    figures = []
    for name, command in commands.items():
        ours, theirs = alternate(
            max(1, testbed.rounds // 2),
            lambda: run_all([ours_command], environ=environ),
            lambda command=command: run_all([command]),  # type: ignore[misc]
        )
        figures.append(ratio_figure(f"run_10_nodes_beside_{name}", ours, theirs))
    return figures


def sync(testbed: Testbed, *, files: int) -> list[report.Figure]:
    return grid_sync_cases.cases(testbed.bed, rounds=testbed.rounds, files=files, folder=testbed.folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def _raise_file_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
