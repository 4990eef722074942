"""Shared by all benchmarks: options, a temporary state directory, figures, goals and their output.

One line per figure: name, value, unit, baseline, ratio (value / baseline), spread (10th and 90th percentile
of the samples, if any), goal, ok. Figures are written to standard output, with --json as one object per line;
the description of machine and commit is written to standard error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Goal:
    """An inclusive limit for the value, its ratio to the baseline, or its distance from the baseline."""

    quantity: str
    comparison: str
    limit: float

    def __str__(self) -> str:
        return f"{self.quantity} {self.comparison} {self.limit:g}"

    def is_met(self, *, value: float, baseline: float | None) -> bool:
        measured = value
        if self.quantity != "value":
            assert baseline, "a goal for the ratio or the distance needs a baseline"
            measured = value / baseline if self.quantity == "ratio" else abs(value - baseline)
        return measured <= self.limit if self.comparison == "<=" else measured >= self.limit


def value_at_most(limit: float) -> Goal:
    return Goal("value", "<=", limit)


def value_at_least(limit: float) -> Goal:
    return Goal("value", ">=", limit)


def distance_at_most(limit: float) -> Goal:
    return Goal("distance", "<=", limit)


def ratio_at_most(limit: float) -> Goal:
    return Goal("ratio", "<=", limit)


def ratio_at_least(limit: float) -> Goal:
    return Goal("ratio", ">=", limit)


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    spread: tuple[float, float] | None
    goal: str | None
    ok: bool


def make_figure(
    name: str,
    value: float,
    *,
    samples: Sequence[float],
    baseline: float | None = None,
    unit: str = "ms",
    goal: Goal | None = None,
) -> Figure:
    """`samples` are the measurements behind `value`, in the same unit; the spread is None without samples."""
    ratio = value / baseline if baseline else None
    return Figure(
        name=name,
        value=round(value, 3),
        unit=unit,
        baseline=None if baseline is None else round(baseline, 3),
        ratio=None if ratio is None else round(ratio, 2),
        spread=_percentiles_10_90(samples),
        goal=None if goal is None else str(goal),
        ok=goal is None or goal.is_met(value=value, baseline=baseline),
    )


def _percentiles_10_90(samples: Sequence[float]) -> tuple[float, float] | None:
    return (round(percentile(samples, 0.1), 3), round(percentile(samples, 0.9), 3)) if samples else None


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest value from above: with 50 values, the 99th percentile is the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def p99_samples(values: Sequence[float]) -> list[float]:
    """Samples for the spread of a p99: the p99 of each chunk of at least 100 consecutive values. Empty if
    there are fewer than two chunks."""
    chunks = min(10, len(values) // 100)
    if chunks < 2:
        return []
    bounds = [len(values) * number // chunks for number in range(chunks + 1)]
    return [percentile(values[start:end], 0.99) for start, end in itertools.pairwise(bounds)]


def make_parser(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """Parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    shown = f"number of rounds (default: {rounds})"
    parser.add_argument("--rounds", type=parse_positive_int, default=rounds, help=shown)
    return parser


def parse_positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


@contextmanager
def use_temporary_state(parent: Path | None = None) -> Iterator[Path]:
    """Creates a temporary folder, uses it as the state directory and ignores the settings of the user.

    SIGTERM raises SystemExit inside the block, so that processes and files are cleaned up.
    """
    with _exit_on_sigterm(), tempfile.TemporaryDirectory(dir=parent, prefix="genie-bench-") as name:
        folder = Path(name)
        for variable in [item for item in os.environ if item.startswith("GENIE_")]:
            del os.environ[variable]
        (folder / "config.toml").touch()
        os.environ["GENIE_CONFIG"] = str(folder / "config.toml")
        os.environ["GENIE_STATE_DIR"] = str(folder)
        # Installed packages have bytecode; Genie must have it too for a fair comparison.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        yield folder


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    def exit_(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the cleanup
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, exit_)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_figures(figures: Iterable[Figure], *, as_json: bool) -> int:
    """Prints the figures and returns the exit code: 1 if a goal was missed, otherwise 0."""
    print(describe_machine(), file=sys.stderr)
    shown = list(figures)
    for item in shown:
        print(json.dumps(asdict(item)) if as_json else _format_figure(item))
    return 0 if all(item.ok for item in shown) else 1


def describe_machine() -> str:
    machine = f"{platform.platform()}, {os.cpu_count()} cores"
    return f"{machine}, Python {platform.python_version()}, commit {_current_commit()}"


def _current_commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _format_figure(item: Figure) -> str:
    text = f"{item.name:<30}{item.value:>11} {item.unit:<4}"
    if item.spread is not None:
        text += f" spread {item.spread[0]} to {item.spread[1]}"
    if item.baseline is not None:
        text += f", baseline {item.baseline}, ratio {item.ratio}"
    if item.goal is not None:
        text += f", goal {item.goal}: {'ok' if item.ok else 'MISSED'}"
    return text
