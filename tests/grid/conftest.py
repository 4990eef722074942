"""Fixtures: the testbed of SSH nodes, started once per pytest worker, and a connection pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from genie.grid.grid_file import GridFile, parse_grid_file
from genie.grid.ssh.pool import SshPool
from tests.grid.quick_venv import quick_venv
from tests.grid.testbed import SshTestbed
from tests.grid.testbed_lease import SshTestbedLease
from tests.leaks import LeakCheck

__all__ = ["quick_venv"]

NODES = 10


@pytest.fixture(scope="session")
def session_testbed(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[SshTestbed]:
    with SshTestbed(tmp_path_factory.mktemp("testbed") / "nodes", count=NODES, nvml=nvml_library) as testbed:
        yield testbed


@pytest.fixture
def testbed(session_testbed: SshTestbed) -> SshTestbed:
    """Ten nodes, gpu1 to gpu10, shared by all tests. Tests that break a node use `own_testbed`."""
    return session_testbed


@pytest.fixture(scope="session")
def testbed_lease(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, nvml_library: Path
) -> Iterator[SshTestbedLease]:
    leaks = pytestconfig.pluginmanager.get_plugin("genie-leaks")
    assert isinstance(leaks, LeakCheck)
    with SshTestbed(tmp_path_factory.mktemp("own") / "nodes", count=2, nvml=nvml_library) as testbed:
        yield SshTestbedLease(testbed, on_start=leaks.allow_child)


@pytest.fixture
def own_testbed(testbed_lease: SshTestbedLease) -> Iterator[SshTestbed]:
    """Two nodes, gpu1 and gpu2, that the test may break; they are restored for the next test."""
    with testbed_lease.take() as testbed:
        yield testbed


@pytest.fixture
def grid_file(testbed: SshTestbed) -> GridFile:
    return make_testbed_grid_file(testbed)


def make_testbed_grid_file(testbed: SshTestbed, *, more: str = "") -> GridFile:
    """Return a grid file for these nodes, with timeouts for a busy machine."""
    more = more or "ssh: {connect_timeout: 10, max_retries: 1}\n"
    return parse_grid_file(testbed.grid_yaml(more=more), name="grid.yaml")


@pytest_asyncio.fixture
async def pool(testbed: SshTestbed, grid_file: GridFile) -> AsyncIterator[SshPool]:
    async with SshPool(grid_file, ssh_config=testbed.ssh_config) as pool:
        yield pool
