"""Fixtures: the testbed of SSH nodes, started once per pytest worker, and a connection pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from genie.grid.grid_file import GridFile, parse_grid_file
from genie.grid.ssh.pool import SshPool
from tests.grid.bed import Bed
from tests.grid.leases import BedLease
from tests.grid.quick_venv import quick_venv
from tests.leaks import LeakCheck

__all__ = ["quick_venv"]

NODES = 10


@pytest.fixture(scope="session")
def bed_of_session(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Bed]:
    with Bed(tmp_path_factory.mktemp("bed") / "nodes", count=NODES, nvml=nvml_library) as bed:
        yield bed


@pytest.fixture
def bed(bed_of_session: Bed) -> Bed:
    """Ten nodes, gpu1 to gpu10, shared by all tests. Tests that break a node use `own_bed`."""
    return bed_of_session


@pytest.fixture(scope="session")
def bed_lease(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, nvml_library: Path
) -> Iterator[BedLease]:
    leaks = pytestconfig.pluginmanager.get_plugin("genie-leaks")
    assert isinstance(leaks, LeakCheck)
    with Bed(tmp_path_factory.mktemp("own") / "nodes", count=2, nvml=nvml_library) as bed:
        yield BedLease(bed, on_start=leaks.allow_child)


@pytest.fixture
def own_bed(bed_lease: BedLease) -> Iterator[Bed]:
    """Two nodes, gpu1 and gpu2, that the test may break; they are restored for the next test."""
    with bed_lease.take() as bed:
        yield bed


@pytest.fixture
def grid_file(bed: Bed) -> GridFile:
    return grid_file_of(bed)


def grid_file_of(bed: Bed, *, more: str = "") -> GridFile:
    """Return a grid file for these nodes, with timeouts for a busy machine."""
    more = more or "ssh: {connect_timeout: 10, max_retries: 1}\n"
    return parse_grid_file(bed.grid_yaml(more=more), name="grid.yaml")


@pytest_asyncio.fixture
async def pool(bed: Bed, grid_file: GridFile) -> AsyncIterator[SshPool]:
    async with SshPool(grid_file, ssh_config=bed.ssh_config) as pool:
        yield pool
