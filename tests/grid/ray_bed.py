"""Nodes of the bed that can run Ray: with this machine's Ray on their PATH, and a temporary folder each.

Not for: what the grid does with them.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from genie.grid.grid_file import GridFile, read_grid_file
from tests.grid.bed import Bed, Node

# As pip writes it, but with little memory: all nodes are one machine.
_RAY = """#!{python}
import sys
from ray.scripts.scripts import main
if sys.argv[1:2] == ["start"]:
    sys.argv += ["--object-store-memory=80000000", "--num-cpus=2"]
sys.exit(main())
"""


@contextlib.contextmanager
def ray_bed(folder: Path, *, count: int) -> Iterator[Bed]:
    with Bed(folder, count=count, kept=[Path(sys.base_prefix)]) as bed:
        for node in bed.nodes:
            (node.folder / "ray").mkdir()
            # One machine has one folder for Ray's sockets; these nodes are to be several.
            node.restart(before=f"mkdir -p /tmp/ray && mount --bind {node.folder}/ray /tmp/ray")
            install_ray(node, _RAY.format(python=sys.executable))
        yield bed


def install_ray(node: Node, text: str) -> None:
    (node.bin / "ray").write_text(text)
    (node.bin / "ray").chmod(0o755)


def ray_file(bed: Bed, path: Path, *, nodes: list[str] | None = None, more: str = "") -> GridFile:
    """A grid's file with ports that nobody has."""
    redis, dashboard = free_ports(2)
    text = bed.grid_yaml(
        nodes=nodes,
        more="ssh: {connect_timeout: 20, max_retries: 1}\n"
        f"ray: {{redis_port: {redis}, dashboard_port: {dashboard}{more}}}\n",
    )
    path.write_text(text)
    return read_grid_file(path)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("0.0.0.0", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
