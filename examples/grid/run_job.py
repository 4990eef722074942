"""Runs one job on the best node of a grid: with the command line, then from Python.

    python examples/grid/run_job.py "python train.py --epochs 100"

The nodes are those of config/cluster_config.yaml (or GENIE_GRID_FILE). The working directory is copied to the
node first. Prints the output of the job and exits with its exit code.
"""

from __future__ import annotations

import argparse
import sys

from genie.cli import grid_main
from genie.errors import GenieError
from genie.grid import OptimizedExecutor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "command", nargs="?", default="echo a job on $(hostname)", help="shell command to run"
    )
    command = parser.parse_args().command

    # grid-cli run --sync . "COMMAND"
    code = grid_main(["run", "--sync", ".", command])
    if code:
        return code

    # The same from Python. Connections stay open until the end of the block.
    with OptimizedExecutor() as executor:
        result = executor.run_distributed(command)
        print(result)
        print(f"ran on {result.node} as {result.run_id}, exit code {result.exit_code}")
    return result.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GenieError as error:
        print(f"could not run the job: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
