"""A real cluster for the integration tests: one for the whole run, and others for tests that break theirs.

The shared one is on this machine, or the one that GENIE_TEST_SERVER=HOST[:PORT] names; then the token
comes from GENIE_TOKEN or from the state directory, as for any client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from genie import config
from genie.cluster import init
from genie.cluster.client import ClusterClient, open_client
from genie.runtime.credentials import OWNER_TOKEN_FILE
from tests import needs
from tests.integration.running import RunningCluster, StartedCluster


def _elsewhere() -> RunningCluster | None:
    """Read at import: conftest.py of the folder above hides every GENIE_* variable from the tests."""
    if needs.SERVER is None:
        return None
    host, _, port = needs.SERVER.partition(":")
    settings = config.load()
    token = settings.cluster.token
    if token is None:
        token = (settings.paths.state_dir / OWNER_TOKEN_FILE).read_text("utf-8").strip()
    return RunningCluster(host, int(port or settings.cluster.master_port), token, Path())


ELSEWHERE = _elsewhere()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    client_dir = tmp_path_factory.mktemp("client")
    if ELSEWHERE is not None:
        yield replace(ELSEWHERE, state_dir=client_dir)
        return
    state_dir = tmp_path_factory.mktemp("c")
    settings = config.load({"paths.state_dir": state_dir, "controller.port": 0, "cluster.node_id": "n1"})
    with StartedCluster(settings) as started:
        yield replace(started.running, state_dir=client_dir)


@pytest.fixture
def cluster(shared_cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningCluster]:
    """The shared cluster, as the one that this process's sessions use. A session that is left is ended."""
    shared_cluster.use(monkeypatch)
    yield shared_cluster
    init.shutdown_blocking()


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[ClusterClient]:
    async with open_client(cluster.settings()) as opened:
        yield opened


@pytest.fixture
def own_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartedCluster]:
    """A cluster that the test may break."""
    settings = config.load({"paths.state_dir": tmp_path / "c", "controller.port": 0, "cluster.node_id": "n1"})
    with StartedCluster(settings) as started:
        started.running.use(monkeypatch)
        yield started
        init.shutdown_blocking()
