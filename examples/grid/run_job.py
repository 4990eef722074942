"""Run one job on the best node of a grid: by the command line's door, then by the Python one.

    python examples/grid/run_job.py "python train.py --epochs 100"

The nodes are those of config/cluster_config.yaml (or GENIE_GRID_FILE). The job's output and its exit code
become those of this program.
"""

from __future__ import annotations

import argparse
import sys

from genie.cli import grid_main
from genie.errors import GenieError
from genie.grid.executor import Executor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", nargs="?", default="echo a job on $(hostname)", help="a line of shell")
    command = parser.parse_args().command

    # grid-cli run "COMMAND"
    code = grid_main(["run", command])
    if code:
        return code

    # The same from Python. Connections stay open until the block is left.
    with Executor() as executor:
        result = executor.run_distributed(command)
        print(result)
        print(f"ran on {result.node} as {result.run_id}, exit code {result.exit_code}")
    return result.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GenieError as error:
        print(f"the job could not be run: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
