"""The grid beside what people use today: ssh processes, a ControlMaster, rsync, and other tools.

    python benchmarks/bench_grid.py [--json] [--rounds N] [--delay-ms MS] [--peers FOLDER] [--only PART...]

The nodes are real SSH servers on loopback, all on this machine, so the cost of a node's side is paid here
too, by us and by the baseline alike. Everyone uses the same key exchange and cipher. We and the baseline
take turns, round by round, and both ask for the same readings. The baseline starts nvidia-smi on the node, a
script here that costs less than the real one; so does the grid while nothing is connected. When connected,
it asks NVML: a stand-in here (tests/fakes/nvml) with the same GPUs. --delay-ms holds everything back on its
way, so that a round trip takes that long. --peers names a virtual environment with ansible-core,
clustershell, paramiko and parallel-ssh; each runs the same command on the same ten nodes. Needs root,
openssh-server, a C compiler and rsync.
Not for: real networks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from genie.grid.grid_file import GridFile, parse_grid_file  # noqa: E402 - the path comes first
from genie.grid.health_check import HealthChecker, NodeState  # noqa: E402
from genie.grid.runner import Runner  # noqa: E402
from genie.grid.ssh_pool import SshPool  # noqa: E402
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
"""What the baseline asks a node for; the grid reads the same."""
COMMAND = "hostname"
CIPHER = "  Ciphers aes128-gcm@openssh.com\n"
"""What the grid would choose by itself; everyone gets it, as everyone gets the same key exchange."""
WARM_COMMANDS = 20
_LIMITS = (
    "ssh: {pool_size: 200, connect_timeout: 60, timeout: 60, max_retries: 0}\n"
    "health_check: {timeout: 60, max_workers: 200, refresh_interval: 0}\n"
)


@dataclass
class Place:
    """The bed, and the names under which everyone reaches its nodes."""

    bed: Bed
    folder: Path
    rounds: int
    connections: int
    many_config: Path
    """With a name for each connection; twenty nodes have no use for a hundred more."""

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
    parser = report.options("the grid beside ssh and rsync", rounds=7)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="time of a round trip that is added")
    parser.add_argument("--peers", type=Path, help="virtual environment with the other tools")
    parser.add_argument("--connections", type=int, default=100, help="connections, and commands, at once")
    parser.add_argument("--files", type=int, default=10_000, help="files of the tree that is brought over")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    _raise_file_limit()
    sizes = {"rounds": given.rounds, "connections": given.connections}
    with report.own_place(), _place(given.delay_ms, **sizes) as place:
        figures: list[report.Figure] = []
        if "cold" in given.only:
            figures += cold_health(place)
        if "many" in given.only:
            figures += cold_many(place)
        if "warm" in given.only:
            figures += asyncio.run(warm(place))
        if "peers" in given.only:
            figures += peers(place, given.peers)
        if "sync" in given.only:
            figures += sync(place, files=given.files)
    suffix = f"_{given.delay_ms:g}ms" if given.delay_ms else ""
    named = [dataclasses.replace(each, name=each.name + suffix) for each in figures]
    return report.conclude(named, as_json=given.json)


@contextlib.contextmanager
def _place(delay_ms: float, *, rounds: int, connections: int) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        # Not below the state directory: a control socket's path has 100 characters at most.
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
        yield Place(bed, short, rounds, connections, many_config)


# --- cold: nothing is connected yet -----------------------------------------------------------


def cold_health(place: Place) -> list[report.Figure]:
    """Of ten nodes, whose logins share this machine's cores; and of one, which has them to itself."""
    goals = {10: report.ratio_at_most(0.6), 1: None}
    figures = []
    for count, goal in goals.items():
        names = place.ten[:count]
        ours, theirs = _in_turns(
            place.rounds,
            lambda names=names: asyncio.run(_cold_health(place, names)),  # type: ignore[misc]
            lambda names=names: _all_at_once([place.ssh(name, READINGS) for name in names]),  # type: ignore[misc]
        )
        noun = "node" if count == 1 else "nodes"
        figures.append(_compared(f"cold_health_{count}_{noun}", ours, theirs, goal=goal))
    return figures


def cold_many(place: Place) -> list[report.Figure]:
    """A connection for each of a hundred nodes; and a hundred commands for ten, which share connections."""
    rounds, count = max(1, place.rounds // 2), place.connections
    ours, theirs = _in_turns(
        rounds,
        lambda: asyncio.run(_cold_health(place, place.many)),
        lambda: _all_at_once([place.ssh(name, READINGS) for name in place.many]),
    )
    shared, apart = _in_turns(
        rounds,
        lambda: asyncio.run(_cold_commands(place, place.ten)),
        lambda: _all_at_once([place.ssh(place.ten[number % 10], COMMAND) for number in range(count)]),
    )
    return [
        _compared(f"cold_{count}_connections", ours, theirs, goal=report.ratio_at_most(0.4)),
        _compared(f"cold_{count}_commands_10_nodes", shared, apart, goal=report.ratio_at_most(0.4)),
    ]


async def _cold_health(place: Place, names: Sequence[str]) -> None:
    file = place.file(names)
    async with SshPool(file, ssh_config=place.config(names[0])) as pool:
        answers = await HealthChecker(pool, file, clock=time.time).check_all(fresh=True)
        assert all(answer.state is NodeState.OK for answer in answers), answers


async def _cold_commands(place: Place, names: Sequence[str]) -> None:
    file = place.file(names)
    async with SshPool(file, ssh_config=place.bed.ssh_config) as pool:

        async def one(name: str) -> None:
            async with pool.use(name, bare=True) as link:
                assert (await link.command(COMMAND, timeout_s=60)).exit_code == 0

        await asyncio.gather(*(one(names[number % len(names)]) for number in range(place.connections)))


# --- warm: everyone has a connection ----------------------------------------------------------


async def warm(place: Place) -> list[report.Figure]:
    file = place.file(place.twenty)
    with _masters(place, place.twenty) as through:
        async with SshPool(file, ssh_config=place.bed.ssh_config) as pool:
            checker, runner = HealthChecker(pool, file, clock=time.time), Runner(pool, file)
            await checker.check_all(fresh=True)
            await checker.check_all(fresh=True)

            async def commands() -> None:
                async with pool.use("gpu1") as link:
                    for _ in range(WARM_COMMANDS):
                        assert (await link.command(COMMAND, timeout_s=60)).stdout == b"gpu1\n"

            async def runs() -> None:
                for _ in range(WARM_COMMANDS):
                    run = await runner.start("gpu1", COMMAND)
                    assert await runner.wait(run, lambda *_: None) == 0

            async def their_commands() -> None:
                for _ in range(WARM_COMMANDS):
                    await asyncio.to_thread(_all_at_once, [through("gpu1", COMMAND)])

            async def health() -> None:
                await checker.check_all(fresh=True)

            async def their_health() -> None:
                await asyncio.to_thread(_all_at_once, [through(name, READINGS) for name in place.twenty])

            one, other = await _in_turns_async(place.rounds, commands, their_commands)
            command = _compared(
                "warm_command",
                [each / WARM_COMMANDS for each in one],
                [each / WARM_COMMANDS for each in other],
                goal=report.ratio_at_most(0.5),
            )
            one, other = await _in_turns_async(place.rounds, runs, their_commands)
            run = _compared(
                "warm_run_that_outlives_us",
                [each / WARM_COMMANDS for each in one],
                [each / WARM_COMMANDS for each in other],
            )
            ours, theirs = await _in_turns_async(place.rounds, health, their_health)
    return [command, run, _compared("warm_health_20_nodes", ours, theirs, goal=report.ratio_at_most(0.1))]


@contextlib.contextmanager
def _masters(place: Place, names: Sequence[str]) -> Iterator[Callable[[str, str], list[str]]]:
    """A ControlMaster for each node; gives the command that goes through it."""

    def through(name: str, command: str) -> list[str]:
        return place.ssh(name, command, "-S", str(place.folder / f"m-{name}"))

    for name in names:
        _all_at_once(
            [place.ssh(name, "true", "-M", "-S", str(place.folder / f"m-{name}"), "-o", "ControlPersist=600")]
        )
    try:
        yield through
    finally:
        for name in names:
            stop = [
                "ssh",
                "-F",
                str(place.bed.ssh_config),
                "-S",
                str(place.folder / f"m-{name}"),
                "-O",
                "exit",
                name,
            ]
            subprocess.run(stop, stderr=subprocess.DEVNULL, check=False, timeout=30)


# --- others -----------------------------------------------------------------------------------


def peers(place: Place, environment: Path | None) -> list[report.Figure]:
    """The same command, cold, on ten nodes, by programs as people start them: their own start included."""
    if environment is None:
        print(
            "without --peers, Ansible, ClusterShell, paramiko and parallel-ssh are left out", file=sys.stderr
        )
        return []
    inventory = place.folder / "inventory"
    inventory.write_text("".join(f"{name}\n" for name in place.ten))
    bin_folder = environment / "bin"
    ssh_config = str(place.bed.ssh_config)
    script = ROOT / "benchmarks" / "peers" / "ssh_clients.py"
    commands = {
        "ansible": [
            str(bin_folder / "ansible"), "all", "-i", str(inventory), "-m", "raw", "-a", COMMAND,
            "-f", "10", "--ssh-common-args", f"-F {ssh_config} -o ControlMaster=no -o ControlPath=none",
        ],
        "clustershell": [
            str(bin_folder / "clush"), "-w", ",".join(place.ten),
            "-O", f"ssh_options=-F {ssh_config}", COMMAND,
        ],
        "paramiko": [str(bin_folder / "python"), str(script), "paramiko", ssh_config, COMMAND, *place.ten],
        "parallel_ssh": [str(bin_folder / "python"), str(script), "pssh", ssh_config, COMMAND, *place.ten],
    }  # fmt: skip
    grid_file = place.folder / "grid.yaml"
    grid_file.write_text(place.bed.grid_yaml(nodes=place.ten, more=_LIMITS))
    environ = os.environ | {"GENIE_GRID_FILE": str(grid_file), "GENIE_GRID_SSH_CONFIG": ssh_config}
    ours_command = [sys.executable, "-m", "genie", "grid", "run", "--all", COMMAND]
    figures = []
    for name, command in commands.items():
        ours, theirs = _in_turns(
            max(1, place.rounds // 2),
            lambda: _all_at_once([ours_command], environ=environ),
            lambda command=command: _all_at_once([command]),  # type: ignore[misc]
        )
        figures.append(_compared(f"run_10_nodes_beside_{name}", ours, theirs))
    return figures


def sync(place: Place, *, files: int) -> list[report.Figure]:
    import grid_sync_cases

    return grid_sync_cases.cases(place.bed, rounds=place.rounds, files=files, folder=place.folder)


# --- measuring --------------------------------------------------------------------------------


def _in_turns(
    rounds: int, ours: Callable[[], object], theirs: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """Seconds of each, one after the other, after one of each that is not counted."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for work, times in zip((ours, theirs), taken, strict=True):
            start = time.perf_counter()
            work()
            if number:
                times.append(time.perf_counter() - start)
    return taken


async def _in_turns_async(
    rounds: int, ours: Callable[[], Awaitable[None]], theirs: Callable[[], Awaitable[None]]
) -> tuple[list[float], list[float]]:
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for work, times in zip((ours, theirs), taken, strict=True):
            start = time.perf_counter()
            await work()
            if number:
                times.append(time.perf_counter() - start)
    return taken


def _compared(
    name: str, ours_s: Sequence[float], theirs_s: Sequence[float], *, goal: report.Goal | None = None
) -> report.Figure:
    samples = [each * 1000 for each in ours_s]
    return report.figure(
        name,
        statistics.median(samples),
        samples=samples,
        baseline=statistics.median(theirs_s) * 1000,
        goal=goal,
    )


def _all_at_once(commands: Sequence[Sequence[str]], *, environ: dict[str, str] | None = None) -> None:
    running = [
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ
        )
        for command in commands
    ]
    for process in running:
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told.decode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def _raise_file_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
