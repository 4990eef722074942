"""A project to sync, and its syncer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from genie.grid.grid_file import GridFile
from genie.grid.ssh.pool import SshPool
from genie.grid.sync.syncer import Syncer, SyncReport
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.testbed import SshTestbed


class SyncedProject:
    """A local folder and its target on a node."""

    def __init__(self, testbed: SshTestbed, syncer: Syncer, root: Path, *, node: str, remote: str) -> None:
        self.root = root
        self.there = testbed[node].home / remote
        self.node = node
        self._syncer = syncer

    async def sync(self, **options: object) -> SyncReport:
        """Syncs to its node. Raises the error of the node."""
        (report,) = await self._syncer.sync(self.root, [self.node], **options)  # type: ignore[arg-type]
        if report.error is not None:
            raise report.error
        return report


Make = Callable[..., SyncedProject]


def make_sync_grid_file(testbed: SshTestbed, remote: str, more: str = "") -> GridFile:
    return make_testbed_grid_file(
        testbed, more=f"remote_root: ~/{remote}\nssh: {{connect_timeout: 10, max_retries: 1}}\n{more}"
    )


@pytest_asyncio.fixture
async def project(
    testbed: SshTestbed, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[SyncedProject]:
    """On gpu1, in a folder unique to the test."""
    remote = f"ws-{abs(hash(request.node.nodeid))}"
    file = make_sync_grid_file(testbed, remote)
    root = tmp_path / "project"
    root.mkdir()
    async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=tmp_path / "state")
        yield SyncedProject(testbed, syncer, root, node="gpu1", remote=remote)
    await asyncio.sleep(0)
