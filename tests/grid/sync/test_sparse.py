"""Huge sparse files: their cost depends on their data only, here and on the nodes.

The limits are on work, not on time: bytes hashed here, and CPU seconds of a process on a node. A terabyte of
zeros is far beyond both.
"""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from genie.grid.remote import contents, tree
from genie.grid.ssh.pool import SshPool
from genie.grid.sync import syncer
from genie.grid.sync.syncer import Syncer, SyncProgress
from tests.grid.sync.conftest import make_sync_grid_file
from tests.grid.sync.trees import load_compiled_engine, read_tree, write_files
from tests.grid.testbed import SshTestbed

TIB = 1 << 40
NODES = ("gpu1", "gpu2")
REGIONS = {0: 70_000, (1 << 33) + 4096: 1_500_001, (1 << 39) - 5: 10, TIB - 65_536 - 7: 65_543}
ON_NODE_S = 10


def write_sparse_file(
    path: Path, *, size: int = TIB, regions: dict[int, int] = REGIONS, seed: int = 1
) -> int:
    """Writes a sparse file; returns its data bytes as counted by the file system."""
    dice = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for at, length in regions.items():
            os.pwrite(file.fileno(), dice.randbytes(length), at)
        file.truncate(size)
    return count_data_bytes(path)


def count_data_bytes(path: Path) -> int:
    return sum(size for is_data, _, size in list_extents(path) if is_data)


def list_extents(path: Path) -> list[tuple[bool, int, int]]:
    with path.open("rb") as file:
        return list(contents.list_extents(file.fileno(), os.fstat(file.fileno())))


def read_sparse_file(path: Path) -> tuple[int, dict[int, bytes]]:
    """Returns the size and the blocks that are not all zero; reads only data extents."""
    found: dict[int, bytes] = {}
    with path.open("rb") as file:
        for is_data, offset, size in list_extents(path):
            first = offset // contents.DIGEST_BLOCK_BYTES
            for number in range(first, -(-(offset + size) // contents.DIGEST_BLOCK_BYTES)) if is_data else ():
                block = os.pread(
                    file.fileno(), contents.DIGEST_BLOCK_BYTES, number * contents.DIGEST_BLOCK_BYTES
                )
                if any(block):
                    found[number] = block
    return path.stat().st_size, found


@pytest.fixture
def testbed_with_cpu_and_hashing_limits(
    own_testbed: SshTestbed, monkeypatch: pytest.MonkeyPatch
) -> SshTestbed:
    """Nodes, and this machine, with limits that a terabyte of zeros would exceed."""
    for name in NODES:
        own_testbed[name].restart(before=f"ulimit -t {ON_NODE_S}")
    real, hashed = hashlib.sha256, [0]

    class Counted:
        def __init__(self, data: bytes = b"") -> None:
            self._real = real()
            self.update(data)

        def update(self, data: bytes) -> None:
            hashed[0] += len(data)
            assert hashed[0] < 256 << 20, "zeros are hashed"
            self._real.update(data)

        def digest(self) -> bytes:
            return self._real.digest()

        def hexdigest(self) -> str:
            return self._real.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Counted)
    monkeypatch.setattr(syncer, "_SYNC_ATTEMPTS", 1)
    return own_testbed


@pytest.mark.parametrize("kind", ["plain", "compiled"])
async def test_sparse_terabyte_is_synced_and_a_second_sync_sends_nothing(
    testbed_with_cpu_and_hashing_limits: SshTestbed, tmp_path: Path, kind: str
) -> None:
    engine = tree.PlainEngine() if kind == "plain" else load_compiled_engine()
    file, root = make_sync_grid_file(testbed_with_cpu_and_hashing_limits, "ws"), tmp_path / "project"
    data = write_sparse_file(root / "huge")
    write_sparse_file(root / "copies/huge")
    data += write_sparse_file(root / "ends in a hole", regions={12_345: 3_000_000}, seed=2)
    data += write_sparse_file(root / "nothing", size=TIB + 1, regions={})
    write_files(root, {b"small": b"1"})
    seen: list[SyncProgress] = []
    async with SshPool(file, ssh_config=testbed_with_cpu_and_hashing_limits.ssh_config) as pool:
        one = Syncer(pool, file, state_dir=tmp_path / "state", engine=engine)
        for report in await one.sync(root, NODES, progress=seen.append):
            assert report.error is None
            assert (report.sent_files, report.sent_bytes) == (5, data + 1)
        for name in NODES:
            for path in ("huge", "copies/huge", "ends in a hole", "nothing", "small"):
                there = testbed_with_cpu_and_hashing_limits[name].home / "ws" / path
                assert read_sparse_file(there) == read_sparse_file(root / path), path
                assert there.stat().st_blocks * 512 < 8 << 20, "zeros are written"
                # Its times have changed: the node has to read it.
                os.utime(there, ns=(10**18, (root / path).stat().st_mtime_ns))
        for report in await one.sync(root, NODES):
            assert report.error is None
            assert (report.unchanged, report.sent_files, report.sent_bytes) == (True, 0, 0)
    assert {each.bytes_total for each in seen} == {seen[-1].bytes_total}
    assert seen[-1].sent_bytes == data + 1 <= seen[-1].bytes_total < 16 << 20


async def test_dry_run_reports_data_bytes_of_sparse_files(own_testbed: SshTestbed, tmp_path: Path) -> None:
    file, root = make_sync_grid_file(own_testbed, "ws"), tmp_path / "project"
    data = write_sparse_file(root / "huge")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        (report,) = await Syncer(pool, file, state_dir=tmp_path / "state").sync(root, ["gpu1"], dry_run=True)
    assert (report.sent_files, report.sent_bytes) == (1, data)


async def test_connection_lost_within_a_sparse_file_is_retried(
    own_testbed: SshTestbed, tmp_path: Path
) -> None:
    file, root, there = (
        make_sync_grid_file(own_testbed, "ws"),
        tmp_path / "project",
        own_testbed["gpu1"].home / "ws",
    )
    first = write_sparse_file(root / "a", regions={1 << 39: 6 << 20})
    second = write_sparse_file(root / "b", regions={4096: 1 << 20, 1 << 38: 12 << 20}, seed=2)
    seen: list[object] = []

    def cut_once(progress: SyncProgress) -> None:
        if not seen and progress.sent_bytes > first + second // 2:
            seen.append(dict(read_tree(there)))
            own_testbed["gpu1"].kill_connections()

    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        one = Syncer(pool, file, state_dir=tmp_path / "state")
        (report,) = await one.sync(root, ["gpu1"], progress=cut_once)
        assert report.error is None
        assert seen == [{}], "nothing is visible before all of it is there"
        assert report.sent_bytes == second, "a file that had arrived is not sent again"
        assert (await one.sync(root, ["gpu1"]))[0].unchanged
    for name in ("a", "b"):
        assert read_sparse_file(there / name) == read_sparse_file(root / name)
        assert (there / name).stat().st_blocks * 512 < 32 << 20
