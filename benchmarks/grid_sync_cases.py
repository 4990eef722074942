"""Syncing a tree of many small files, beside rsync over a warm connection of OpenSSH.

`cases()` gives the figures that bench_grid.py shows. Both sides are measured in turn, in the same round, on
the same bed of nodes; what they send is the same tree. Before a first sync everything that was sent is
removed from the nodes, except the compiled library, which a node has from its first sync on.

Not for: the bed itself, and how figures are shown (report.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from benchmarks.report import Figure, figure, ratio_at_most
from genie.grid.grid_file import parse_grid_file
from genie.grid.ssh_pool import SshPool
from genie.grid.sync.syncer import Syncer
from tests.grid.bed import Bed, Node

NODES = 5
_CHANGED = 10
_QUICK = 5
"""How often a round measures what takes milliseconds."""
_SIZES = (200, 1000, 3000, 8000, 12000)
_GOALS = {"sync, no change": 0.25, "sync, 10 changed": 0.4, "first sync": 0.8, "first sync, 5 nodes": 0.8}
_COMMAND_S = 300


def cases(bed: Bed, rounds: int, *, folder: Path, files: int = 10_000) -> list[Figure]:
    """`folder` is for the tree and the caches. The bed needs five nodes or more."""
    tree = folder / "project"
    make_tree(tree, files=files)
    with masters(bed.nodes[:NODES], bed, folder) as sockets:
        return asyncio.run(_Measuring(bed, tree, folder, sockets).run(rounds))


def make_tree(root: Path, *, files: int, seed: int = 1) -> None:
    """20 folders with 20 folders each; sizes like those of sources."""
    dice = random.Random(seed)
    for number in range(files):
        folder = root / f"part{number % 20}" / f"module{number % 400}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"file{number}.py").write_bytes(dice.randbytes(dice.choice(_SIZES)))


@contextlib.contextmanager
def masters(nodes: list[Node], bed: Bed, folder: Path) -> Iterator[dict[str, Path]]:
    """A warm connection of OpenSSH to each node."""
    sockets = {node.name: folder / f"master-{node.name}" for node in nodes}
    ssh = ["ssh", "-F", str(bed.ssh_config)]
    try:
        for name, socket in sockets.items():
            subprocess.run([*ssh, "-M", "-S", str(socket), "-fN", name], check=True, timeout=_COMMAND_S)
        yield sockets
    finally:
        for name, socket in sockets.items():
            end = [*ssh, "-S", str(socket), "-O", "exit", name]
            subprocess.run(end, check=False, capture_output=True, timeout=30)


class _Measuring:
    def __init__(self, bed: Bed, tree: Path, folder: Path, sockets: dict[str, Path]) -> None:
        self._bed = bed
        self._tree = tree
        self._folder = folder
        self._sockets = sockets
        self._nodes = bed.nodes[:NODES]
        self._samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in _GOALS}
        self._dice = random.Random(2)

    async def run(self, rounds: int) -> list[Figure]:
        names = [node.name for node in self._nodes]
        file = parse_grid_file(
            self._bed.grid_yaml(nodes=names, more="ssh: {connect_timeout: 30}\n"), name="grid"
        )
        async with SshPool(file, ssh_config=self._bed.ssh_config) as pool:
            syncer = Syncer(pool, file, state_dir=self._folder)
            await self._sync(syncer, names)  # connects, and leaves the library on each node
            for turn in range(rounds):
                await self._round(syncer, names, ours_first=turn % 2 == 0)
        return [self._figure(name, limit) for name, limit in _GOALS.items()]

    async def _round(self, syncer: Syncer, names: list[str], *, ours_first: bool) -> None:
        one = names[:1]

        async def measure(case: str, nodes: list[str]) -> None:
            await self._pair(
                case, lambda: self._sync(syncer, nodes), lambda: self._rsync(nodes), ours_first=ours_first
            )

        self._clear()
        await measure("first sync", one)
        await self._sync(syncer, one)
        for _ in range(_QUICK):
            await measure("sync, no change", one)
        for _ in range(_QUICK):
            self._change()
            await measure("sync, 10 changed", one)
        self._clear()
        await measure("first sync, 5 nodes", names)

    async def _pair(
        self,
        case: str,
        ours: Callable[[], Awaitable[None]],
        theirs: Callable[[], Awaitable[None]],
        *,
        ours_first: bool,
    ) -> None:
        mine, baseline = self._samples[case]
        order = [(ours, mine), (theirs, baseline)]
        for work, samples in order if ours_first else order[::-1]:
            begun = time.perf_counter()
            await work()
            samples.append((time.perf_counter() - begun) * 1000)

    async def _sync(self, syncer: Syncer, nodes: list[str]) -> None:
        for report in await syncer.sync(self._tree, nodes):
            if report.error is not None:
                raise report.error

    async def _rsync(self, nodes: list[str]) -> None:
        processes = [await asyncio.create_subprocess_exec(*self._rsync_command(name)) for name in nodes]
        codes = await asyncio.gather(*(process.wait() for process in processes))
        assert not any(codes), codes

    def _rsync_command(self, name: str) -> list[str]:
        shell = f"ssh -F {self._bed.ssh_config} -S {self._sockets[name]}"
        return ["rsync", "-a", "--delete", "-e", shell, f"{self._tree}/", f"{name}:rsynced/"]

    def _clear(self) -> None:
        """Nothing of the tree is on any node, and nothing is known of it here."""
        shutil.rmtree(self._folder / "grid", ignore_errors=True)
        for node in self._nodes:
            shutil.rmtree(node.home / "rsynced", ignore_errors=True)
            for path in (node.home / "grid_workspace").glob("[!.]*"):
                shutil.rmtree(path)
            for path in (node.home / "grid_workspace/.grid/sync").iterdir():
                if path.is_dir():
                    shutil.rmtree(path)

    def _change(self) -> None:
        for path in self._dice.sample(sorted(self._tree.rglob("*.py")), _CHANGED):
            path.write_bytes(self._dice.randbytes(self._dice.choice(_SIZES)))

    def _figure(self, name: str, limit: float) -> Figure:
        mine, baseline = self._samples[name]
        return figure(
            name,
            statistics.median(mine),
            samples=mine,
            baseline=statistics.median(baseline),
            goal=ratio_at_most(limit),
        )
