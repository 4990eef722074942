"""Run seeds of the fault simulation on all cores: `make sim SEEDS=30000`. One: `make sim SEED=7 KIND=disk`.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.sim.scenario import SCENARIO_KINDS, run_seed

_FAILURES_SHOWN_MAX = 10
_VIOLATIONS_SHOWN_MAX = 5
_PROGRESS_INTERVAL_S = 30.0
_SEED_MAX = 10**9
_MEMORY_DIRECTORY = Path("/dev/shm")


@dataclass(frozen=True)
class SeedResult:
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
    return list(SCENARIO_KINDS)[seed % len(SCENARIO_KINDS)]


def try_seed(seed: int, kind: str) -> SeedResult:
    """Run a seed in a new directory, in memory if possible. An exception is a violation."""
    with temporary_directory() as directory:
        try:
            return SeedResult(seed, kind, run_seed(seed, kind, directory))
        except Exception:  # a task boundary: the other seeds must run
            return SeedResult(seed, kind, [traceback.format_exc()])


@contextmanager
def temporary_directory() -> Iterator[Path]:
    parent = _MEMORY_DIRECTORY if os.access(_MEMORY_DIRECTORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="genie-sim-", dir=parent) as directory:
        yield Path(directory)


def _try_seed_and_kind(task: tuple[int, str]) -> SeedResult:
    return try_seed(*task)


def _run_seeds_and_count_failed(tasks: list[tuple[int, str]]) -> int:
    start_s = shown_s = time.monotonic()
    failed = 0
    with multiprocessing.get_context("spawn").Pool(initializer=_set_log_level) as pool:
        for done, result in enumerate(pool.imap_unordered(_try_seed_and_kind, tasks, chunksize=4), 1):
            if result.violations:
                failed += 1
                if failed <= _FAILURES_SHOWN_MAX:
                    print(result.describe(), flush=True)
            if time.monotonic() > shown_s + _PROGRESS_INTERVAL_S:
                shown_s = time.monotonic()
                print(f"{done} of {len(tasks)} seeds, {failed} failed", flush=True)
    rate = len(tasks) / (time.monotonic() - start_s)
    print(f"{len(tasks)} seeds, {failed} failed, {rate:.1f} seeds/s")
    return failed


def _set_log_level() -> None:
    logging.getLogger("genie").setLevel(logging.ERROR)
    logging.getLogger("genie").addHandler(logging.NullHandler())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="make sim",
        usage="make sim [SEEDS=N] [FIRST=SEED] [KIND=KIND] | make sim SEED=SEED [KIND=KIND]",
        description=(__doc__ or "").split(":")[0],
    )
    numbers = parser.add_mutually_exclusive_group()
    numbers.add_argument("--seeds", type=_parse_count, default=300, help="number of seeds (default: 300)")
    numbers.add_argument("--seed", type=_parse_seed, help="replay one seed and print its log")
    parser.add_argument("--first", type=_parse_seed, help="first seed (default: 0)")
    parser.add_argument(
        "--kind", choices=list(SCENARIO_KINDS), help="kind of the faults (default: all in turn)"
    )
    options = parser.parse_args(arguments)
    if options.seed is not None:
        if options.first is not None:
            parser.error("FIRST has no effect with SEED")
        sys.exit(_replay_seed(options.seed, options.kind or kind_of_seed(options.seed)))
    first = options.first or 0
    seeds = range(first, first + options.seeds)
    sys.exit(
        1
        if _run_seeds_and_count_failed([(seed, options.kind or kind_of_seed(seed)) for seed in seeds])
        else 0
    )


def _replay_seed(seed: int, kind: str) -> int:
    """Print the log of a seed and its violations; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    result = try_seed(seed, kind)
    print(result.describe() if result.violations else f"{kind} seed {seed} passes")
    return 1 if result.violations else 0


def _parse_count(text: str) -> int:
    return _parse_number(text, low=1)


def _parse_seed(text: str) -> int:
    return _parse_number(text, low=0)


def _parse_number(text: str, *, low: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= _SEED_MAX):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {low} to {_SEED_MAX}")
    return int(text)


if __name__ == "__main__":
    main()
