"""Nodes behind a slow network: everything works, only slower."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.grid.health.check import HealthState, NodeHealthChecker
from genie.grid.runs.run_client import Runner
from genie.grid.ssh.pool import SshPool
from genie.grid.sync.syncer import Syncer
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.delay_proxy import run_delay_proxy
from tests.grid.sync.trees import read_tree, write_files
from tests.grid.testbed import SshTestbed

DELAY_MS = 50.0


@pytest.fixture
def delayed_testbed(own_testbed: SshTestbed, unused_tcp_port: int) -> Iterator[SshTestbed]:
    """gpu1 has a delayed connection, gpu2 does not."""
    node = own_testbed["gpu1"]
    known = own_testbed.known_hosts.read_text()
    own_testbed.known_hosts.write_text(known + f"[{node.address}]:{unused_tcp_port} {node.public_key}\n")
    with run_delay_proxy([node.address], port=unused_tcp_port, target_port=node.port, delay_ms=DELAY_MS):
        own_testbed.write_ssh_config(ports={"gpu1": unused_tcp_port})
        yield own_testbed


async def test_health_run_and_sync_work_on_a_slow_node(delayed_testbed: SshTestbed, tmp_path: Path) -> None:
    file = make_testbed_grid_file(
        delayed_testbed, more="ssh: {connect_timeout: 30}\nhealth_check: {timeout: 30}\n"
    )
    project = tmp_path / "project"
    write_files(project, {b"d%d/f" % number: b"%d" % number * 1000 for number in range(50)})
    output = []
    async with SshPool(file, ssh_config=delayed_testbed.ssh_config) as pool:
        slow, quick = await NodeHealthChecker(pool, file, clock=time.time).check_all_in_file_order()
        assert (slow.state, quick.state) == (HealthState.OK, HealthState.OK)
        assert slow.took_s > 2 * DELAY_MS / 1000  # gpu1 is the delayed one
        runner = Runner(pool, file)
        run = await runner.start("gpu1", "echo first; sleep 0.3; echo second; exit 4")
        assert await runner.follow_until_end(run, lambda _, data: output.append(data)) == 4
        syncer = Syncer(pool, file, state_dir=tmp_path / "state")
        for unchanged in (False, True):
            reports = await syncer.sync(project, ["gpu1", "gpu2"])
            assert [(each.error, each.unchanged) for each in reports] == [(None, unchanged)] * 2
    assert b"".join(output) == b"first\nsecond\n"
    for node in delayed_testbed.nodes:
        assert read_tree(node.home / "grid_workspace") == read_tree(project)
