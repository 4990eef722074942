"""Injects faults into a cluster of real processes and checks what they left: `make faults`.

    python -m tests.faults.run [--rounds 1] [--fault NAME]... [--nodes 2] [--seed N] [--json] [--results DIR]

Each round sets up three servers and some nodes in a new sandbox (namespaces.py), runs jobs of two tenants all
the time, injects the faults in random order, and then checks the revision history of etcd and the records of
the jobs (checks.py). Prints one line per fault: the time until each other server accepted a submission, and
until a lost node was reported; then the largest and median times over all rounds, and whether the goals were
met. Exits with 1 if an invariant was violated; times do not change the exit code.

Requires root, iproute2, nftables, etcd and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults import namespaces
from tests.faults.faults import FAULTS, Fault
from tests.faults.reports import (
    format_goals,
    format_row,
    format_summary,
    make_goal_results,
    make_summary_rows,
)
from tests.faults.rounds import FaultResult, RoundResult, run_round

_MEMORY_DIRECTORY = Path("/dev/shm")
_SEED_MAX = 10**6
_CGROUPS = "/sys/fs/cgroup"
_RESULT_FILE = "result.json"
_DIRECTORY_PREFIX = "genie-faults-"


def main(arguments: Sequence[str] | None = None) -> int:
    given = _make_parser().parse_args(arguments)
    if given.inside is not None:
        return namespaces.run_as_init(lambda: _run_inside(given))
    if problem := find_missing_requirement():
        print(f"error: cannot run faults: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # removes the directory
    results = [_run_round_in_sandbox(given, number) for number in range(given.rounds)]
    faults = [fault for result in results for fault in result.faults]
    if not given.json:
        print(format_summary(make_summary_rows(faults)))
        print(format_goals(make_goal_results(faults)))
    violations = [line for result in results for line in result.violations]
    for line in violations:
        print(f"violation: {line}", file=sys.stderr)
    print(f"{len(violations)} violations in {given.rounds} rounds", file=sys.stderr)
    return 1 if violations else 0


def find_missing_requirement() -> str:
    """What fault runs require and this machine does not have; empty if nothing is missing."""
    if os.geteuid() != 0:
        return "requires root"
    missing = namespaces.find_missing_programs()
    needed = {"etcd": "etcd-server", "cc": "gcc"}
    missing += [f"{name} (Debian: {package})" for name, package in needed.items() if not shutil.which(name)]
    return f"requires {', '.join(missing)}" if missing else ""


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds (default: 1)")
    parser.add_argument("--fault", action="append", choices=names, help="inject this fault; repeatable")
    parser.add_argument("--nodes", type=int, default=2, help="nodes besides the three servers (default: 2)")
    parser.add_argument("--seed", type=int, help="seed of the order of faults and their targets")
    parser.add_argument("--json", action="store_true", help="print one JSON object per fault")
    parser.add_argument("--results", type=Path, help="directory for the logs and the history of each round")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser


def _chosen_faults(given: argparse.Namespace) -> list[Fault]:
    return [fault for fault in FAULTS if not given.fault or fault.name in given.fault]


def _run_round_in_sandbox(given: argparse.Namespace, number: int) -> RoundResult:
    """Runs one round; what it prints appears at once."""
    seed = random.randrange(_SEED_MAX) if given.seed is None else given.seed + number
    parent = _MEMORY_DIRECTORY if os.access(_MEMORY_DIRECTORY, os.W_OK) else Path(tempfile.gettempdir())
    remove_directories_of_killed_runs(parent)
    print(f"round {number + 1} of {given.rounds}, seed {seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=f"{_DIRECTORY_PREFIX}{os.getpid()}-", dir=parent) as directory:
        arguments = ["--inside", directory, "--seed", str(seed), "--nodes", str(given.nodes)]
        arguments += [text for name in given.fault or () for text in ("--fault", name)]
        arguments += ["--json"] if given.json else []
        if given.results is not None:
            arguments += ["--results", str(given.results.absolute() / f"round-{number + 1}")]
        code = namespaces.run_in_sandbox(["-m", "tests.faults.run", *arguments])
        path = Path(directory) / _RESULT_FILE
        if path.exists():
            return RoundResult.from_json(json.loads(path.read_text("utf-8")))
    return RoundResult(faults=[], violations=[f"round {number + 1} ended with exit code {code}"])


def remove_directories_of_killed_runs(parent: Path) -> None:
    """Removes what a run left whose process was killed: the directory below which its machines were."""
    for path in parent.glob(f"{_DIRECTORY_PREFIX}*"):
        pid = path.name.removeprefix(_DIRECTORY_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


def _run_inside(given: argparse.Namespace) -> int:
    """One round, inside of the sandbox."""
    folder: Path = given.inside / "machines"
    folder.mkdir()
    namespaces.run_command("mount", "-t", "tmpfs", "none", str(folder))
    # Control groups would outlive the sandbox. Without them, agents find processes by other means.
    namespaces.run_command("mount", "-t", "tmpfs", "none", _CGROUPS)

    def print_fault(result: FaultResult) -> None:
        print(json.dumps(result.to_json()) if given.json else format_row(result), flush=True)

    result = run_round(
        folder,
        _chosen_faults(given),
        nodes=given.nodes,
        rng=random.Random(given.seed),
        on_result=print_fault,
        results_directory=given.results,
    )
    (given.inside / _RESULT_FILE).write_text(json.dumps(result.to_json()))
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
