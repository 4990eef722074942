"""Reports how much of torch's op database gives the same results on a remote device, forward and backward.

    python tests/device/opinfo_report.py [--json] [--device cpu|cuda] [--dtypes float32,...] [--ops NAME...]
                                         [--shard I/N] [--samples N] [--list-failures]
                                         [--database ops|modules|optimizers]

Starts an executor on this machine, on the CPU or on cuda:0, and compares with the same device used directly;
with cuda, the process that compares holds that GPU as well. float32 is compared with every sample, other
dtypes with a few; --samples caps all. --shard 2/4 takes the second of four parts. --list-failures prints
failures as lines for opinfo_exceptions.txt. Exits with 1 if an entry is wrong or crashed, or if the list and
the results disagree.

Everything runs in a child process, sequentially. An entry that kills the child or the executor, or hangs,
counts as crashed, and new processes continue with the next. An op passes if every sample in every dtype does;
the percentages are of the ops that torch supports on that device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.device import findings
from tests.device.comparison import VENDORS, Comparison
from tests.device.findings import ComparisonUnit, Outcome, Summary

DTYPES = ("float32", "float64", "bfloat16", "int64", "bool", "complex64")
DATABASES = {"ops": "opinfo", "modules": "moduleinfo", "optimizers": "optiminfo"}
_ALL_SAMPLES = "float32"
_OTHER_SAMPLES_MAX = 5
_PROGRESS_EVERY = 100


def main(arguments: Sequence[str]) -> int:
    options = _parse_arguments(arguments)
    with Comparison(DATABASES[options.database], options.device) as comparison:
        describe_entries = comparison.describe_entries()
        units = _make_units(
            _select_entries(describe_entries["entries"], options), options.dtypes.split(","), options.samples
        )
        found = []
        for number, one in enumerate(comparison.run(units), start=1):
            found.append(one)
            if number % _PROGRESS_EVERY == 0 or number == len(units):
                print(f"{number} of {len(units)}", file=sys.stderr, flush=True)
    summary = Summary(found)
    if options.list_failures:
        for line in findings.exception_lines(summary.problems, options.device):
            print(line)
    elif options.json:
        _print_json(summary, describe_entries, options)
    else:
        _print_table(summary)
    bad = summary.named(Outcome.WRONG) or summary.named(Outcome.CRASHED)
    return 1 if _report_list_mismatches(summary, options) or bad else 0


def _parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="torch's databases on a remote device")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--database", choices=list(DATABASES), default="ops")
    parser.add_argument("--device", choices=sorted(VENDORS), default="cpu")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--ops", nargs="+", metavar="NAME", help="as in the report: add, std.unbiased")
    parser.add_argument("--shard", default="1/1", metavar="I/N")
    parser.add_argument("--samples", type=int, metavar="N", help="maximum number of samples per op and dtype")
    parser.add_argument("--list-failures", action="store_true")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.dtypes.split(",") if name not in DTYPES]
    if unknown:  # an empty report would look like success
        parser.error(f"--dtypes: {', '.join(unknown)} is not among {', '.join(DTYPES)}")
    return options


def _select_entries(entries: dict[str, list[str]], options: argparse.Namespace) -> dict[str, list[str]]:
    unknown = set(options.ops or ()) - set(entries)
    if unknown:
        sys.exit(f"not in the database: {', '.join(sorted(unknown))}")
    names = list(options.ops or entries)
    number, _, of = options.shard.partition("/")
    first, step = int(number) - 1, int(of)
    if not 0 <= first < step:
        sys.exit(f"--shard {options.shard}: from 1/{of} to {of}/{of}")
    return {name: entries[name] for name in names[first::step]}


def _make_units(
    entries: dict[str, list[str]], dtypes: Sequence[str], samples: int | None
) -> list[ComparisonUnit]:
    """Inputs that must raise are added for the first dtype of an op."""
    units = []
    for name, supported in entries.items():
        wanted = [dtype for dtype in dtypes if dtype in supported]
        for dtype in wanted:
            count = samples
            if dtype != _ALL_SAMPLES:
                count = _OTHER_SAMPLES_MAX if samples is None else min(samples, _OTHER_SAMPLES_MAX)
            units.append(ComparisonUnit(name, dtype, count, errors=dtype == wanted[0]))
    return units


def _report_list_mismatches(summary: Summary, options: argparse.Namespace) -> bool:
    """Whether the list and the results disagree. A line may need more samples than --samples allows."""
    listed = [line for line in findings.read_exceptions() if line.device == options.device]
    unlisted = findings.unlisted_problems(summary.problems, listed)
    stale = findings.stale_exceptions(summary, listed) if options.samples is None else []
    for problem in unlisted:
        print(f"not in the list: {problem.name} {problem.dtype} {problem.direction}", file=sys.stderr)
    for line, dtype in stale:
        print(f"in the list, but not so: {line.name} {dtype} {line.direction}", file=sys.stderr)
    return bool(unlisted or stale)


def _print_json(summary: Summary, describe_entries: dict[str, Any], options: argparse.Namespace) -> None:
    for name, several in summary.by_name.items():
        problems = [problem for problem in summary.problems if problem.name == name]
        raised = [text for one in several for text in (*one.raised.nothing, *one.raised.other_type)]
        if problems:
            print(json.dumps({"op": name, "problems": [problem.as_json() for problem in problems]}))
        if raised:
            print(json.dumps({"op": name, "raises_otherwise": raised}))
    last = {
        "ops": len(summary.counted("forward")),
        "forward_pct": summary.percent("forward"),
        "backward_ops": len(summary.counted("backward")),
        "backward_pct": summary.percent("backward"),
        "wrong": summary.named(Outcome.WRONG),
        "crashed": summary.named(Outcome.CRASHED),
        "refused": summary.named(Outcome.REFUSED),
        "failed": summary.named(Outcome.FAILED),
        "not_on_device": summary.missing_locally,
        "as_on_cpu": [name for name, several in summary.by_name.items() if any(x.as_on_cpu for x in several)],
        "varies": summary.named(Outcome.VARIES),
        "compared": summary.compared(),
        "raised": summary.raised(),
        "torch": describe_entries["torch"],
        "device": describe_entries["device"],
        "dtypes": options.dtypes.split(","),
    }
    print(json.dumps(last))


def _print_table(summary: Summary) -> None:
    for one in summary.problems:
        print(f"{one.name:40} {one.dtype:10} {one.direction:8} {one.outcome:8} {one.reason}")
    for direction in findings.DIRECTIONS:
        print(f"{direction:9} {len(summary.counted(direction))} ops, {summary.percent(direction)}% pass")
    for outcome in list(Outcome)[1:]:
        print(f"{outcome:9} {len(summary.named(outcome))}")
    raised = summary.raised()
    print(
        f"raises here: {raised['same']} the same there, {raised['other_type']} another type, "
        f"{raised['nothing']} nothing"
    )
    print(f"not on this device: {', '.join(summary.not_here) or 'none'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
