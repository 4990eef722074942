"""The documented calls pass a type checker."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import needs

ROOT = Path(__file__).parents[2]
VALID_SAMPLES = """
    import asyncio

    import genie
    from genie.cluster.monitoring import create_resource_monitor


    async def client() -> None:
        await genie.init(master_addr='gpu-server.example.com')
        await genie.shutdown()


    async def server() -> None:
        await genie.init(
            node_role='server',
            master_port=5555
        )


    async def server_with_monitoring() -> None:
        await genie.init(master_addr='localhost', node_role='server')
        monitor = create_resource_monitor(local_node=genie.get_cluster_state().local_node)
        await monitor.start()


    async def development() -> None:
        state: genie.ClusterState = await genie.init(
            master_addr='localhost', backend='tcp', heartbeat_interval=5.0
        )
        print(state.backend)


    def script() -> None:
        with genie.session() as state:
            print(state.nodes)
        genie.connect(node_role='server')


    asyncio.run(client())
"""
INVALID_SAMPLE = """
    import genie

    async def main() -> None:
        await genie.init(master_addr=5555)
"""


@pytest.mark.long("mypy reads all of Genie where 'make lint' has left no cache")
def test_documented_samples_pass_mypy_strict(tmp_path: Path) -> None:
    needs.require_module("mypy", package="mypy")
    for name, code in (("samples", VALID_SAMPLES), ("wrong", INVALID_SAMPLE)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    options = ["--strict", "--follow-imports=silent", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(tmp_path / "samples.py"), str(tmp_path / "wrong.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(found) == 1, done.stdout + done.stderr
    assert 'wrong.py:5: error: Argument "master_addr" to "init" has incompatible type "int"' in found[0]
