"""Test nodes that can run Ray: this machine's Ray is on their PATH, and each has its own /tmp/ray."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from genie.grid.grid_file import GridFile, read_grid_file
from tests.grid.testbed import SshNode, SshTestbed
from tests.ports import free_ports

# Like pip's script, but with little memory, because all nodes share one machine.
_RAY = """#!{python}
import sys
from ray.scripts.scripts import main
if sys.argv[1:2] == ["start"]:
    sys.argv += ["--object-store-memory=80000000", "--num-cpus=2"]
sys.exit(main())
"""


@contextlib.contextmanager
def start_ray_testbed(folder: Path, *, count: int) -> Iterator[SshTestbed]:
    with SshTestbed(folder, count=count, kept=[Path(sys.base_prefix)]) as testbed:
        for node in testbed.nodes:
            (node.folder / "ray").mkdir()
            # Ray keeps its sockets in /tmp/ray, and the nodes share a machine.
            node.restart(before=f"mkdir -p /tmp/ray && mount --bind {node.folder}/ray /tmp/ray")
            install_ray_program(node, _RAY.format(python=sys.executable))
        yield testbed


def install_ray_program(node: SshNode, text: str) -> None:
    (node.bin / "ray").write_text(text)
    (node.bin / "ray").chmod(0o755)


def write_ray_grid_file(
    testbed: SshTestbed, path: Path, *, nodes: list[str] | None = None, more: str = ""
) -> GridFile:
    """Write a grid file with free ports."""
    redis, dashboard = free_ports(2)
    text = testbed.grid_yaml(
        nodes=nodes,
        more="ssh: {connect_timeout: 20, max_retries: 1}\n"
        f"ray: {{redis_port: {redis}, dashboard_port: {dashboard}{more}}}\n",
    )
    path.write_text(text)
    return read_grid_file(path)
