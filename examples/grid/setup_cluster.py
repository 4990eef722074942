"""Sets up a new grid: installs an environment on every node, then starts a Ray cluster on them.

The nodes are those of config/cluster_config.yaml (or GENIE_GRID_FILE). On the command line:

    grid-cli setup
    grid-cli cluster start

Run:  python examples/grid/setup_cluster.py     # installs ray, torch and numpy
      python examples/grid/setup_cluster.py --wheels wheels/ --package small-thing   # nodes without internet
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from genie.config import load
from genie.errors import GenieError
from genie.grid.grid_file import read_grid_file
from genie.grid.ray.cluster import RayCluster
from genie.grid.setup import DEFAULT_PACKAGES, EnvironmentSetup, read_environment_spec
from genie.grid.ssh.pool import SshPool


def print_progress(node: str, text: str) -> None:
    print(f"{node}: {text}", flush=True)


async def set_up(packages: list[str], wheels: Path | None) -> int:
    settings = load()
    file = read_grid_file(settings.grid.file)
    async with SshPool(file, ssh_config=settings.grid.ssh_config) as pool:
        wanted = read_environment_spec(requirements=None, packages=packages, wheels=wheels)
        reports = await EnvironmentSetup(pool, file).run(wanted, on_progress=print_progress)
        failed = [report for report in reports if report.error]
        for report in failed:
            print(f"{report.node} failed: {report.error}\n{report.hint}")
        if failed:
            return 1
        cluster = RayCluster(pool, file, state_dir=settings.paths.state_dir)
        view = await cluster.start(on_progress=print_progress)
        gpus = sum(node.gpus for node in view.nodes)
        print(f"Ray {view.version} is {view.state} on {len(view.nodes)} nodes with {gpus:g} GPUs")
        print(f"the head is {view.head}; the token is in {cluster.token_file}")
        return 0 if view.state == "running" else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--package", action="append", default=[], help="package to install; repeatable")
    parser.add_argument(
        "--wheels", type=Path, help="install from the wheels in this folder, without a package index"
    )
    args = parser.parse_args()
    try:
        return asyncio.run(set_up(args.package or list(DEFAULT_PACKAGES), args.wheels))
    except GenieError as error:
        print(f"{error.message}\n{error.hint}")
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
