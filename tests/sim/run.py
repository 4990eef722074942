"""Runs seeds of the short scenario on all cores: `make sim SEEDS=30000`; or one: `make sim SEED=7 KIND=disk`.

Prints the seeds that fail with their violations and the command that replays each. Exits with 1 if any fails.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.sim.scenario import KINDS, run_seed

_FAILURES_SHOWN_MAX = 10
_VIOLATIONS_SHOWN_MAX = 5
_PROGRESS_S = 30.0
_MEMORY_DIRECTORY = Path("/dev/shm")


@dataclass(frozen=True)
class Result:
    seed: int
    kind: str
    violations: list[str]

    def describe(self) -> str:
        shown = "".join(f"\n  {each}" for each in self.violations[:_VIOLATIONS_SHOWN_MAX])
        return f"{self.kind} seed {self.seed} fails; replay: {replay_command(self.seed, self.kind)}{shown}"


def replay_command(seed: int, kind: str) -> str:
    return f"make sim SEED={seed} KIND={kind}"


def kind_of_seed(seed: int) -> str:
    """The kinds take turns, so that any range of seeds has all of them."""
    return list(KINDS)[seed % len(KINDS)]


def try_seed(seed: int, kind: str) -> Result:
    """Run a seed in a new directory, in memory if possible. An exception is a violation."""
    with temporary_directory() as directory:
        try:
            return Result(seed, kind, run_seed(seed, kind, directory))
        except Exception:  # a task boundary: the other seeds must run
            return Result(seed, kind, [traceback.format_exc()])


@contextmanager
def temporary_directory() -> Iterator[Path]:
    parent = _MEMORY_DIRECTORY if os.access(_MEMORY_DIRECTORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="genie-sim-", dir=parent) as directory:
        yield Path(directory)


def _run_task(task: tuple[int, str]) -> Result:
    return try_seed(*task)


def _run_many(tasks: list[tuple[int, str]]) -> int:
    start_s = shown_s = time.monotonic()
    failed = 0
    with multiprocessing.get_context("spawn").Pool(initializer=_set_log_level) as pool:
        for done, result in enumerate(pool.imap_unordered(_run_task, tasks, chunksize=4), 1):
            if result.violations:
                failed += 1
                if failed <= _FAILURES_SHOWN_MAX:
                    print(result.describe(), flush=True)
            if time.monotonic() > shown_s + _PROGRESS_S:
                shown_s = time.monotonic()
                print(f"{done} of {len(tasks)} seeds, {failed} failed", flush=True)
    rate = len(tasks) / (time.monotonic() - start_s)
    print(f"{len(tasks)} seeds, {failed} failed, {rate:.1f} seeds/s")
    return failed


def _set_log_level() -> None:
    logging.getLogger("genie").setLevel(logging.ERROR)
    logging.getLogger("genie").addHandler(logging.NullHandler())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim.run", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--seeds", type=int, default=300, metavar="N", help="number of seeds (default: 300)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed (default: 0)")
    parser.add_argument("--seed", type=int, help="replay one seed and show its log")
    parser.add_argument("--kind", choices=list(KINDS), help="kind of the faults (default: all in turn)")
    options = parser.parse_args()
    if options.seed is not None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        result = try_seed(options.seed, options.kind or kind_of_seed(options.seed))
        print(result.describe() if result.violations else f"{result.kind} seed {result.seed} passes")
        sys.exit(1 if result.violations else 0)
    seeds = range(options.first, options.first + options.seeds)
    sys.exit(1 if _run_many([(seed, options.kind or kind_of_seed(seed)) for seed in seeds]) else 0)


if __name__ == "__main__":
    main()
