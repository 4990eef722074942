"""Monitors a grid: health of the nodes, metrics for Prometheus, and a run with debug logging.

    python examples/grid/monitor.py --rounds 3 --every 5

The nodes are those of config/cluster_config.yaml (or GENIE_GRID_FILE). On the command line:
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
from genie.grid.health.check import NodeHealthChecker
from genie.grid.metrics import GridMetrics
from genie.grid.ssh.pool import SshPool


async def monitor(*, rounds: int, every_s: float) -> GridMetrics:
    settings = load()
    file = read_grid_file(settings.grid.file)
    metrics = GridMetrics(settings.paths.state_dir.expanduser())
    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        checker = NodeHealthChecker(pool, file, clock=time.time)
        for number in range(rounds):
            if number:
                await asyncio.sleep(every_s)
            nodes = await checker.check_all_nodes(fresh=True)
            metrics.record_node_scores({node.name: node.effective_score for node in nodes})
            for node in nodes:
                score = "-" if node.score is None else f"{node.score:.1f}"
                print(f"{node.name:<12} {node.state.value:<12} {score:>8}  {node.note}")
    return metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="number of health checks (default: 2)")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="interval of health checks (default: 1)"
    )
    given = parser.parse_args()
    metrics = asyncio.run(monitor(rounds=given.rounds, every_s=given.every))
    Path("metrics.txt").write_text(metrics.text())
    print("wrote metrics.txt")
    return grid_main(["run", "echo test", "--log-level", "DEBUG"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GenieError as error:
        print(f"monitor: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
