"""Real clusters for the integration tests: a shared one, and separate ones for tests that break them.

The shared cluster is started on this machine, or is that of GENIE_TEST_SERVER=HOST[:PORT]; its token is then
that of GENIE_TOKEN, of `genie login` or of the owner, as for any client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from genie import config
from genie.cluster import init
from genie.cluster.client import ClusterClient, open_client
from genie.model.names import parse_endpoint
from genie.runtime.credentials import find_token, login_hint
from tests import needs
from tests.integration.running_cluster import RunningCluster, StartedCluster


def _external_cluster() -> RunningCluster | None:
    """Evaluated at import: tests/conftest.py removes all GENIE_* variables later."""
    if needs.SERVER is None:
        return None
    settings = config.load()
    port = settings.cluster.master_port
    host, port = parse_endpoint(needs.SERVER, what="GENIE_TEST_SERVER", port=port)
    found = find_token(settings.cluster, settings.paths.state_dir, host=host, port=port)
    if found is None:
        raise pytest.UsageError(f"no token for GENIE_TEST_SERVER={needs.SERVER}: {login_hint(host, port)}")
    return RunningCluster(host, port, str(found[0]), Path())


EXTERNAL_CLUSTER = _external_cluster()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    client_dir = tmp_path_factory.mktemp("client")
    if EXTERNAL_CLUSTER is not None:
        yield replace(EXTERNAL_CLUSTER, state_dir=client_dir)
        return
    state_dir = tmp_path_factory.mktemp("c")
    settings = config.load({"paths.state_dir": state_dir, "controller.port": 0, "cluster.node_id": "n1"})
    with StartedCluster(settings) as started:
        yield replace(started.running, state_dir=client_dir)


@pytest.fixture
def cluster(shared_cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningCluster]:
    """The shared cluster, configured for sessions of this process. Ends open sessions afterwards."""
    shared_cluster.configure_for_this_process(monkeypatch)
    yield shared_cluster
    init.shutdown_blocking()


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[ClusterClient]:
    async with open_client(cluster.settings()) as opened:
        yield opened


@pytest.fixture
def own_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartedCluster]:
    """A separate cluster that the test may break."""
    settings = config.load({"paths.state_dir": tmp_path / "c", "controller.port": 0, "cluster.node_id": "n1"})
    with StartedCluster(settings) as started:
        started.running.configure_for_this_process(monkeypatch)
        yield started
        init.shutdown_blocking()
