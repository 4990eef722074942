"""Reports which snippets behave differently on a remote device than on a local device of the same kind.

    python -m tests.device.differential.run [--local cpu|cuda] [--json] [--only NAME...] [--list-failures]
                                            [--layouts] [--shard I/N]

Starts an executor on this machine, on the CPU or on cuda:0, and compares with the same device used directly.
A name is that of a snippet (views.transpose) or a topic (views). --layouts compares PyTorch's op database in
other memory formats instead (layouts.py); a name is then that of an op. --list-failures prints failures as
lines for exceptions.txt. Exits with 1 if a snippet differs that is not in the list, or if a listed one does
not differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.device import findings
from tests.device.comparison import VENDORS, Comparison
from tests.device.findings import ComparisonUnit, ListedException, Outcome, Summary

EXCEPTIONS = Path(__file__).with_name("exceptions.txt")


def main(arguments: Sequence[str]) -> int:
    options = _parse_arguments(arguments)
    summary, seconds, about = compare(
        options.local,
        options.only,
        database="layouts" if options.layouts else "database",
        shard=options.shard,
    )
    listed = [line for line in findings.read_exceptions(EXCEPTIONS) if line.device == options.local]
    unlisted, stale = check_list(summary, listed)
    if options.list_failures:
        for line in findings.exception_lines(summary.problems, options.local):
            print(line)
    elif options.json:
        _print_json(summary, about, seconds)
    else:
        _print_table(summary, seconds)
    for text in unlisted + stale:
        print(text, file=sys.stderr)
    return 1 if unlisted or stale else 0


def compare(
    local: str, only: Sequence[str] = (), *, database: str = "database", shard: str = "1/1"
) -> tuple[Summary, float, dict[str, Any]]:
    """Runs the snippets with these names or topics, or all. Also returns seconds and versions."""
    with Comparison(f"differential.{database}", local) as comparison:
        about = comparison.describe_entries()
        chosen = [
            name for name in about["entries"] if not only or name in only or name.partition(".")[0] in only
        ]
        if not chosen:
            sys.exit(f"no snippet is named {', '.join(only)}")
        number, _, of = shard.partition("/")
        units = [
            ComparisonUnit(name, "any", None, errors=False) for name in chosen[int(number) - 1 :: int(of)]
        ]
        began = time.monotonic()
        summary = Summary(comparison.run(units))
        return summary, time.monotonic() - began, about


def check_list(summary: Summary, listed: Sequence[ListedException]) -> tuple[list[str], list[str]]:
    """Differences that are not in the list, and lines of the list without a difference, as texts."""
    unlisted = findings.unlisted_problems(summary.problems, listed)
    stale = findings.stale_exceptions(summary, listed)
    return (
        [f"not in the list: {one.name}: {one.outcome}: {one.reason}" for one in unlisted],
        [f"in the list, but does not differ: {line.name}" for line, _ in stale],
    )


def _parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="snippets on a remote device and on a local one")
    parser.add_argument("--local", choices=sorted(VENDORS), default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--list-failures", action="store_true")
    parser.add_argument("--layouts", action="store_true")
    parser.add_argument("--shard", default="1/1", metavar="I/N")
    return parser.parse_args(arguments)


def _counts(summary: Summary) -> dict[str, int]:
    outcomes = [several[0].forward.outcome for several in summary.by_name.values()]
    return {str(outcome): outcomes.count(outcome) for outcome in Outcome}


def _print_json(summary: Summary, about: dict[str, Any], seconds: float) -> None:
    for problem in summary.problems:
        print(json.dumps({"snippet": problem.name, **problem.as_json()}))
    last = {
        "snippets": len(summary.by_name),
        **_counts(summary),
        "torch": about["torch"],
        "device": about["device"],
        "seconds": round(seconds, 1),
    }
    print(json.dumps(last))


def _print_table(summary: Summary, seconds: float) -> None:
    for problem in summary.problems:
        if problem.direction == "forward":
            print(f"{problem.name:45} {problem.outcome:8} {problem.reason}")
    topics: dict[str, list[str]] = {}
    for name, several in summary.by_name.items():
        topics.setdefault(name.partition(".")[0], []).append(several[0].forward.outcome)
    print(f"\n{'topic':20} {'snippets':>8} {'pass':>6} {'differ':>6}")
    for topic, outcomes in topics.items():
        same = outcomes.count(Outcome.PASS)
        print(f"{topic:20} {len(outcomes):8} {same:6} {len(outcomes) - same:6}")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in _counts(summary).items())
    print(f"\n{len(summary.by_name)} snippets in {seconds:.0f} s: {counts}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
