"""The bed of SSH nodes, started once for each worker, and a pool of connections to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from genie.grid.grid_file import GridFile, parse_grid_file
from genie.grid.ssh_pool import SshPool
from tests.grid.bed import Bed

NODES = 10


@pytest.fixture(scope="session")
def bed_of_session(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Bed]:
    with Bed(tmp_path_factory.mktemp("bed") / "nodes", count=NODES, nvml=nvml_library) as bed:
        yield bed


@pytest.fixture
def bed(bed_of_session: Bed) -> Bed:
    """Ten nodes, gpu1 to gpu10, which all tests share: one that breaks a node takes `own_bed`."""
    return bed_of_session


@pytest.fixture
def own_bed(tmp_path: Path, nvml_library: Path) -> Iterator[Bed]:
    """Two nodes of the test's own, gpu1 and gpu2, to be broken."""
    with Bed(tmp_path / "nodes", count=2, nvml=nvml_library) as bed:
        yield bed


@pytest.fixture
def grid_file(bed: Bed) -> GridFile:
    return grid_file_of(bed)


def grid_file_of(bed: Bed, *, more: str = "") -> GridFile:
    """A file for these nodes that gives a busy machine time."""
    more = more or "ssh: {connect_timeout: 10, max_retries: 1}\n"
    return parse_grid_file(bed.grid_yaml(more=more), name="grid.yaml")


@pytest_asyncio.fixture
async def pool(bed: Bed, grid_file: GridFile) -> AsyncIterator[SshPool]:
    async with SshPool(grid_file, ssh_config=bed.ssh_config) as pool:
        yield pool
