"""What a run left out: each skipped test and file is listed by name and reason, or fails the run.

LeftOut, which conftest.py registers, goes by reports: with xdist they reach the process that started the
workers, and it speaks for the run. Not for: deciding what to skip (needs.py).
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

# Nobody can install what these need, so they may be left out even where everything is required.
_MAY_BE_LEFT_OUT = "tests/gpu/"
# More tests of one file with one reason share a line.
_NAMED_MAX = 3


class LeftOut:
    """The hooks. With `required`, the run fails for what is left out without an excuse."""

    def __init__(self, *, required: bool) -> None:
        self._required = required
        self._reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._reasons[report.nodeid] = _reason(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._reasons[report.nodeid] = _reason(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Every worker collects every file, and xdist drops reports that look like an earlier one: two files
        that were skipped by one line, in a function that they share, must not look the same."""
        report = yield
        if report.skipped and isinstance(report.longrepr, tuple):
            report.longrepr = (str(collector.path), *report.longrepr[1:])
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_failing():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._reasons:
            return
        failing = self._is_failing()
        terminalreporter.section("left out", red=failing, yellow=not failing)
        for line in _listed(self._reasons):
            terminalreporter.line(line)
        if failing:
            terminalreporter.line("GENIE_TEST_REQUIRE_ALL=1: a test that is left out fails the run", red=True)

    def _is_failing(self) -> bool:
        return self._required and any(not name.startswith(_MAY_BE_LEFT_OUT) for name in self._reasons)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _listed(reasons: dict[str, str]) -> list[str]:
    """A line for each test, or one for the file where it would be many lines with the same reason. By name:
    workers finish in any order."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in sorted(reasons.items()):
        groups.setdefault((name.partition("::")[0], reason), []).append(name)
    lines = []
    for (file, reason), names in groups.items():
        shown = names if len(names) <= _NAMED_MAX else [f"{file} ({len(names)} tests)"]
        lines += [f"{name}: {reason}" for name in shown]
    return lines
