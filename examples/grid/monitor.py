"""Watch a grid: the nodes' health, the figures for Prometheus, and a run with everything logged.

    python examples/grid/monitor.py --rounds 3 --every 5

The nodes are those of config/cluster_config.yaml (or GENIE_GRID_FILE). Typed by hand, the same is
`grid-cli health`, `grid-cli metrics > metrics.txt` and `grid-cli run "echo test" --log-level DEBUG`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from genie.cli import grid_main
from genie.config import load
from genie.errors import GenieError
from genie.grid.grid_file import read_grid_file
from genie.grid.health_check import HealthChecker
from genie.grid.metrics import GridMetrics
from genie.grid.ssh_pool import SshPool


async def watch(*, rounds: int, every_s: float) -> GridMetrics:
    settings = load()
    file = read_grid_file(settings.grid.file)
    figures = GridMetrics(settings.paths.state_dir.expanduser())
    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        checker = HealthChecker(pool, file, clock=time.time)
        for number in range(rounds):
            if number:
                await asyncio.sleep(every_s)
            nodes = await checker.check_all(fresh=True)
            figures.node_scores({node.name: node.rank for node in nodes})
            for node in nodes:
                score = "-" if node.score is None else f"{node.score:.1f}"
                print(f"{node.name:<12} {node.state.value:<12} {score:>8}  {node.note}")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS")
    given = parser.parse_args()
    figures = asyncio.run(watch(rounds=given.rounds, every_s=given.every))
    Path("metrics.txt").write_text(figures.text())
    print("the figures are in metrics.txt")
    return grid_main(["run", "echo test", "--log-level", "DEBUG"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GenieError as error:
        print(f"the grid could not be watched: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
