"""Sync of a tree of many small files, compared with rsync over an open OpenSSH connection.

`measure_all_cases()` returns figures for bench_grid.py. Both sides alternate on the same testbed and send
the same tree. Before each first sync the tree is removed from the nodes; the compiled library stays there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.report import Figure, make_figure, ratio_at_most
from genie.grid.grid_file import parse_grid_file
from genie.grid.ssh.pool import SshPool
from genie.grid.sync.syncer import Syncer
from tests.grid.testbed import SshTestbed

NODE_COUNT = 5
_CHANGED_FILES = 10
_QUICK = 5
"""Repetitions per round of the cases that take milliseconds."""
_FILE_SIZES_BYTES = (200, 1000, 3000, 8000, 12000)
_RATIO_GOAL_BY_CASE = {
    "sync, no change": 0.25,
    "sync, 10 changed": 0.4,
    "first sync": 0.8,
    "first sync, 5 nodes": 0.8,
}
_COMMAND_TIMEOUT_S = 300


def measure_all_cases(testbed: SshTestbed, rounds: int, *, folder: Path, files: int = 10_000) -> list[Figure]:
    """Measures all cases. `folder` holds the tree and the caches; the testbed needs at least five nodes."""
    tree = folder / "project"
    make_tree(tree, files=files)
    with open_control_masters([node.name for node in testbed.nodes[:NODE_COUNT]], testbed) as sockets:
        return asyncio.run(_SyncComparison(testbed, tree, folder, sockets).run(rounds))


def make_tree(root: Path, *, files: int, seed: int = 1) -> None:
    """Writes source-sized random files into 20 folders with 20 subfolders each."""
    rng = random.Random(seed)
    for number in range(files):
        folder = root / f"part{number % 20}" / f"module{number % 400}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"file{number}.py").write_bytes(rng.randbytes(rng.choice(_FILE_SIZES_BYTES)))


@contextlib.contextmanager
def open_control_masters(nodes: Sequence[str], testbed: SshTestbed) -> Iterator[dict[str, Path]]:
    """Opens an OpenSSH ControlMaster to each node and yields the control sockets by node."""
    ssh = ["ssh", "-F", str(testbed.ssh_config)]
    # Not in TMPDIR: the path of a control socket is limited to about 90 characters.
    with tempfile.TemporaryDirectory(prefix="gb-", dir="/tmp") as folder:
        sockets = {name: Path(folder, name) for name in nodes}
        try:
            for name, socket in sockets.items():
                subprocess.run(
                    [*ssh, "-M", "-S", str(socket), "-fN", name], check=True, timeout=_COMMAND_TIMEOUT_S
                )
            yield sockets
        finally:
            for name, socket in sockets.items():
                end = [*ssh, "-S", str(socket), "-O", "exit", name]
                subprocess.run(end, check=False, capture_output=True, timeout=30)


class _SyncComparison:
    def __init__(self, testbed: SshTestbed, tree: Path, folder: Path, sockets: dict[str, Path]) -> None:
        self._bed = testbed
        self._tree = tree
        self._folder = folder
        self._control_sockets = sockets
        self._nodes = testbed.nodes[:NODE_COUNT]
        self._samples: dict[str, tuple[list[float], list[float]]] = {
            name: ([], []) for name in _RATIO_GOAL_BY_CASE
        }
        self._rng = random.Random(2)

    async def run(self, rounds: int) -> list[Figure]:
        names = [node.name for node in self._nodes]
        file = parse_grid_file(
            self._bed.grid_yaml(nodes=names, more="ssh: {connect_timeout: 30}\n"), name="grid"
        )
        async with SshPool(file, ssh_config=self._bed.ssh_config) as pool:
            syncer = Syncer(pool, file, state_dir=self._folder)
            await self._sync(syncer, names)  # opens the connections and uploads the library
            for turn in range(rounds):
                await self._run_round(syncer, names, ours_first=turn % 2 == 0)
        return [self._make_figure(name, limit) for name, limit in _RATIO_GOAL_BY_CASE.items()]

    async def _run_round(self, syncer: Syncer, names: list[str], *, ours_first: bool) -> None:
        one = names[:1]

        async def measure(case: str, nodes: list[str]) -> None:
            await self._time_pair(
                case, lambda: self._sync(syncer, nodes), lambda: self._rsync(nodes), ours_first=ours_first
            )

        self._clear_nodes_and_cache()
        await measure("first sync", one)
        await self._sync(syncer, one)
        for _ in range(_QUICK):
            await measure("sync, no change", one)
        for _ in range(_QUICK):
            self._change_files()
            await measure("sync, 10 changed", one)
        self._clear_nodes_and_cache()
        await measure("first sync, 5 nodes", names)

    async def _time_pair(
        self,
        case: str,
        ours: Callable[[], Awaitable[None]],
        theirs: Callable[[], Awaitable[None]],
        *,
        ours_first: bool,
    ) -> None:
        grid, baseline = self._samples[case]
        order = [(ours, grid), (theirs, baseline)]
        for work, samples in order if ours_first else order[::-1]:
            start = time.perf_counter()
            await work()
            samples.append((time.perf_counter() - start) * 1000)

    async def _sync(self, syncer: Syncer, nodes: list[str]) -> None:
        for report in await syncer.sync(self._tree, nodes):
            if report.error is not None:
                raise report.error

    async def _rsync(self, nodes: list[str]) -> None:
        processes = [await asyncio.create_subprocess_exec(*self._rsync_command(name)) for name in nodes]
        codes = await asyncio.gather(*(process.wait() for process in processes))
        assert not any(codes), codes

    def _rsync_command(self, name: str) -> list[str]:
        shell = f"ssh -F {self._bed.ssh_config} -S {self._control_sockets[name]}"
        return ["rsync", "-a", "--delete", "-e", shell, f"{self._tree}/", f"{name}:rsynced/"]

    def _clear_nodes_and_cache(self) -> None:
        """Removes the tree from all nodes and the local sync cache."""
        shutil.rmtree(self._folder / "grid", ignore_errors=True)
        for node in self._nodes:
            shutil.rmtree(node.home / "rsynced", ignore_errors=True)
            for path in (node.home / "grid_workspace").glob("[!.]*"):
                shutil.rmtree(path)
            for path in (node.home / "grid_workspace/.grid/sync").iterdir():
                if path.is_dir():
                    shutil.rmtree(path)

    def _change_files(self) -> None:
        for path in self._rng.sample(sorted(self._tree.rglob("*.py")), _CHANGED_FILES):
            path.write_bytes(self._rng.randbytes(self._rng.choice(_FILE_SIZES_BYTES)))

    def _make_figure(self, name: str, limit: float) -> Figure:
        grid, baseline = self._samples[name]
        return make_figure(
            name,
            statistics.median(grid),
            samples=grid,
            baseline=statistics.median(baseline),
            goal=ratio_at_most(limit),
        )
