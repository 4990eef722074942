"""What every benchmark shares: its options, a place of its own, and how a figure is shown and judged.

A line for each figure: name, value, unit, baseline, ratio (value / baseline), spread (10th and 90th
percentile of the samples, if they tell one), goal, ok. Figures go to standard output, with --json as one
object a line; what they were measured on goes to standard error, once. Not for: measuring.
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
    """A limit of the value, its ratio to the baseline or its distance from it. It is met at the limit."""

    of: str
    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.of} {self.sign} {self.limit:g}"

    def is_met(self, *, value: float, baseline: float | None) -> bool:
        measured = value
        if self.of != "value":
            assert baseline, "a goal for the ratio or the distance needs a baseline"
            measured = value / baseline if self.of == "ratio" else abs(value - baseline)
        return measured <= self.limit if self.sign == "<=" else measured >= self.limit


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


def figure(
    name: str,
    value: float,
    *,
    samples: Sequence[float],
    baseline: float | None = None,
    unit: str = "ms",
    goal: Goal | None = None,
) -> Figure:
    """`samples` are what `value` was made of, in the same unit. Without any, no spread is shown."""
    ratio = value / baseline if baseline else None
    return Figure(
        name=name,
        value=round(value, 3),
        unit=unit,
        baseline=None if baseline is None else round(baseline, 3),
        ratio=None if ratio is None else round(ratio, 2),
        spread=_spread(samples),
        goal=None if goal is None else str(goal),
        ok=goal is None or goal.is_met(value=value, baseline=baseline),
    )


def _spread(samples: Sequence[float]) -> tuple[float, float] | None:
    return (round(percentile(samples, 0.1), 3), round(percentile(samples, 0.9), 3)) if samples else None


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest value from above: with 50 rounds, the 99th is the worst."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def p99s(values: Sequence[float]) -> list[float]:
    """The samples of a p99, whose spread is not that of the values: the p99 of each part of 100 values or
    more, in their order. None where there is only one such part."""
    parts = min(10, len(values) // 100)
    if parts < 2:
        return []
    bounds = [len(values) * number // parts for number in range(parts + 1)]
    return [percentile(values[start:end], 0.99) for start, end in itertools.pairwise(bounds)]


def options(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has; it may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rounds", type=_at_least_one, default=rounds)
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


@contextmanager
def own_place(parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder, which is also the state directory; no setting of the user's counts inside.

    While it is held, SIGTERM leaves it like an exception, so that what was started and made here goes away.
    """
    with _unwound_at_sigterm(), tempfile.TemporaryDirectory(dir=parent, prefix="genie-bench-") as name:
        folder = Path(name)
        for variable in [item for item in os.environ if item.startswith("GENIE_")]:
            del os.environ[variable]
        (folder / "config.toml").touch()
        os.environ["GENIE_CONFIG"] = str(folder / "config.toml")
        os.environ["GENIE_STATE_DIR"] = str(folder)
        # People have Genie compiled already, as the programs beside it are.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        yield folder


@contextmanager
def _unwound_at_sigterm() -> Iterator[None]:
    def leave(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the way out
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def conclude(figures: Iterable[Figure], *, as_json: bool) -> int:
    """Shows them; the exit code is 1 when a goal was missed."""
    print(measured_on(), file=sys.stderr)
    shown = list(figures)
    for item in shown:
        print(json.dumps(asdict(item)) if as_json else _line(item))
    return 0 if all(item.ok for item in shown) else 1


def measured_on() -> str:
    machine = f"{platform.platform()}, {os.cpu_count()} cores"
    return f"{machine}, Python {platform.python_version()}, commit {_commit()}"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _line(item: Figure) -> str:
    text = f"{item.name:<30}{item.value:>11} {item.unit:<4}"
    if item.spread is not None:
        text += f" spread {item.spread[0]} to {item.spread[1]}"
    if item.baseline is not None:
        text += f", baseline {item.baseline}, ratio {item.ratio}"
    if item.goal is not None:
        text += f", goal {item.goal}: {'ok' if item.ok else 'MISSED'}"
    return text
