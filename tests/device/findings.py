"""Results of a comparison with torch's databases: outcomes, totals, and the list of known exceptions.

Imports no torch, and runs nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

EXCEPTIONS_PATH = Path(__file__).with_name("opinfo_exceptions.txt")
DIRECTIONS = ("forward", "backward")
TEXT_MAX = 300


class Outcome(enum.StrEnum):
    """From best to worst. VARIES counts as right, and must be listed."""

    PASS = "pass"
    VARIES = "varies"
    REFUSED = "refused"
    FAILED = "failed"
    WRONG = "wrong"
    CRASHED = "crashed"

    @property
    def severity(self) -> int:
        return list(Outcome).index(self)


@dataclass(frozen=True)
class ComparisonUnit:
    """The unit of comparison: one entry of a database in one dtype."""

    name: str
    dtype: str
    samples: int | None
    """Maximum number of samples; None: all."""
    errors: bool
    """Whether to add inputs that must raise."""


@dataclass
class Verdict:
    """The worst outcome of an entry's samples in one direction, with `reason` and `sample` of its first
    occurrence."""

    outcome: Outcome = Outcome.PASS
    reason: str = ""
    sample: str = ""
    compared: int = 0
    bad: int = 0

    def note(self, outcome: Outcome, reason: str = "", sample: str = "") -> None:
        self.compared += 1
        self.bad += outcome not in (Outcome.PASS, Outcome.VARIES)
        if outcome.severity > self.outcome.severity:
            self.outcome, self.reason, self.sample = outcome, shorten(reason), shorten(sample)


@dataclass
class RaisedErrors:
    """Remote behaviour of samples that raise locally. `other_type` and `nothing` name them."""

    same: int = 0
    other_type: list[str] = field(default_factory=list)
    nothing: list[str] = field(default_factory=list)


@dataclass
class Findings:
    """Result of one entry in one dtype. `compared` is 0 if nothing could be compared."""

    name: str
    dtype: str
    forward: Verdict = field(default_factory=Verdict)
    backward: Verdict = field(default_factory=Verdict)
    raised: RaisedErrors = field(default_factory=RaisedErrors)
    as_on_cpu: list[str] = field(default_factory=list)
    """Samples where torch's GPU differs from its CPU, and the remote device gives what the CPU gives."""
    seconds: float = 0.0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Findings:
        verdicts = {name: _verdict_from_json(values[name]) for name in DIRECTIONS}
        return cls(**(values | verdicts | {"raised": RaisedErrors(**values["raised"])}))

    @classmethod
    def crashed(cls, name: str, dtype: str, *, reason: str, sample: str) -> Findings:
        """Counts in both directions: later samples were not compared."""
        findings = cls(name, dtype)
        for verdict in (findings.forward, findings.backward):
            verdict.note(Outcome.CRASHED, reason, sample)
        return findings

    @property
    def is_crashed(self) -> bool:
        return Outcome.CRASHED in (self.forward.outcome, self.backward.outcome)

    @property
    def has_problem(self) -> bool:
        return (self.forward.outcome, self.backward.outcome) != (Outcome.PASS, Outcome.PASS)


def _verdict_from_json(values: dict[str, Any]) -> Verdict:
    return Verdict(**(values | {"outcome": Outcome(values["outcome"])}))


@dataclass(frozen=True, order=True)
class Problem:
    """An entry that does not pass, in one dtype and direction."""

    name: str
    dtype: str
    direction: str
    outcome: Outcome
    reason: str = field(compare=False)
    sample: str = field(default="", compare=False)

    def as_json(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items() if name != "name"}


class Summary:
    """Results of a run, counted by entry: an entry passes if all its dtypes do."""

    def __init__(self, findings: Iterable[Findings]) -> None:
        self.by_name: dict[str, list[Findings]] = {}
        for one in findings:
            self.by_name.setdefault(one.name, []).append(one)

    @property
    def missing_locally(self) -> list[str]:
        """Entries that raise locally with every sample: torch does not support them on this device."""
        return [name for name in self.by_name if not self._compared(name, "forward")]

    @property
    def problems(self) -> list[Problem]:
        return [
            Problem(one.name, one.dtype, direction, verdict.outcome, verdict.reason, verdict.sample)
            for several in self.by_name.values()
            for one in several
            for direction, verdict in ((name, getattr(one, name)) for name in DIRECTIONS)
            if verdict.outcome is not Outcome.PASS
        ]

    def counted(self, direction: str) -> list[str]:
        """Entries that have something to compare in that direction."""
        return [name for name in self.by_name if self._compared(name, direction)]

    def named(self, outcome: Outcome) -> list[str]:
        return sorted({problem.name for problem in self.problems if problem.outcome is outcome})

    def percent(self, direction: str) -> float:
        counted = self.counted(direction)
        bad = {
            problem.name
            for problem in self.problems
            if problem.direction == direction and problem.outcome is not Outcome.VARIES
        }
        return round(100 * (1 - len(bad) / len(counted)), 2) if counted else 100.0

    def compared(self) -> dict[str, int]:
        """Calls whose results were compared."""
        every = [one for several in self.by_name.values() for one in several]
        return {name: sum(getattr(one, name).compared for one in every) for name in DIRECTIONS}

    def raised(self) -> dict[str, int]:
        every = [one.raised for several in self.by_name.values() for one in several]
        return {
            "same": sum(one.same for one in every),
            "other_type": sum(len(one.other_type) for one in every),
            "nothing": sum(len(one.nothing) for one in every),
        }

    def _compared(self, name: str, direction: str) -> bool:
        return any(getattr(one, direction).compared for one in self.by_name[name])


@dataclass(frozen=True)
class ListedException:
    """A line of the list: an entry that is known to fail; one that fails forward also fails backward."""

    name: str
    device: str
    dtypes: tuple[str, ...]
    direction: str
    outcome: Outcome
    reason: str

    def covers(self, problem: Problem) -> bool:
        return (
            self.name == problem.name
            and self.direction in ("forward", problem.direction)
            and problem.dtype in self.dtypes
            and problem.outcome is self.outcome
        )


def read_exceptions(path: Path = EXCEPTIONS_PATH) -> list[ListedException]:
    """All lines except empty ones and comments."""
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    return [parse_exception(line) for line in lines if line and not line.startswith("#")]


def parse_exception(line: str) -> ListedException:
    """ValueError if the line is malformed."""
    parts = [part.strip() for part in line.split("|")]
    if len(parts) != 6 or parts[3] not in DIRECTIONS:
        raise ValueError(f"{EXCEPTIONS_PATH.name}: not a line of the list: {line}")
    name, device, dtypes, direction, outcome, reason = parts
    return ListedException(name, device, tuple(dtypes.split(",")), direction, Outcome(outcome), reason)


def exception_lines(problems: Sequence[Problem], device: str) -> list[str]:
    """The problems as lines of the list, one for all dtypes with the same outcome."""
    forward = {(one.name, one.dtype, one.outcome) for one in problems if one.direction == "forward"}
    groups: dict[tuple[str, str, Outcome], list[Problem]] = {}
    for one in sorted(problems):
        if one.direction == "forward" or (one.name, one.dtype, one.outcome) not in forward:
            groups.setdefault((one.name, one.direction, one.outcome), []).append(one)
    return [
        " | ".join(
            [name, device, ",".join(p.dtype for p in group), direction, outcome, _format_problem_group(group)]
        )
        for (name, direction, outcome), group in groups.items()
    ]


def unlisted_problems(problems: Iterable[Problem], listed: Sequence[ListedException]) -> list[Problem]:
    return [one for one in problems if not any(line.covers(one) for line in listed)]


def stale_exceptions(
    summary: Summary, listed: Sequence[ListedException]
) -> list[tuple[ListedException, str]]:
    """Obsolete lines, with their dtype, among the entries that were run.

    Entries that vary are excluded: a single run may pass.
    """
    ran = {(one.name, one.dtype) for several in summary.by_name.values() for one in several}
    return [
        (line, dtype)
        for line in listed
        for dtype in line.dtypes
        if (line.name, dtype) in ran
        and line.outcome is not Outcome.VARIES
        and not any(
            line.covers(problem) and (problem.dtype, problem.direction) == (dtype, line.direction)
            for problem in summary.problems
        )
    ]


def shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."


def _format_problem_group(group: Sequence[Problem]) -> str:
    return group[0].reason.partition(" [")[0].replace("|", "/")[:100]
