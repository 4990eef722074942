"""Lists skipped tests and files with their reasons, and optionally fails the run for them.

The plugin SkipReport uses test reports, which xdist forwards to the main process. needs.py decides what to
skip.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

# These need hardware: they may be skipped even if everything is required.
_MAY_BE_SKIPPED = "tests/gpu/"
# Above this number, the tests of a file that are all skipped for one reason share a line.
_TESTS_LISTED_MAX = 3


class SkipReport:
    """The pytest hooks. With `required`, a skipped test outside of tests/gpu fails the run."""

    def __init__(self, *, required: bool) -> None:
        self._required = required
        self._reasons: dict[str, str] = {}
        self._files_with_run_tests: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._reasons[report.nodeid] = _skip_reason(report)
        elif report.when == "call":
            self._files_with_run_tests.add(_file_of_test(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._reasons[report.nodeid] = _skip_reason(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Makes the reports of files that are skipped in a shared function distinct: every worker collects
        every file, and xdist drops reports that equal an earlier one."""
        report = yield
        if report.skipped and isinstance(report.longrepr, tuple):
            report.longrepr = (str(collector.path), *report.longrepr[1:])
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._fails_run():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._reasons:
            return
        failing = self._fails_run()
        terminalreporter.section("skipped", red=failing, yellow=not failing)
        for line in _format_skip_lines(self._reasons, self._files_with_run_tests):
            terminalreporter.line(line)
        if failing:
            terminalreporter.line("GENIE_TEST_REQUIRE_ALL=1: a skipped test fails the run", red=True)

    def _fails_run(self) -> bool:
        return self._required and any(not name.startswith(_MAY_BE_SKIPPED) for name in self._reasons)


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _file_of_test(name: str) -> str:
    return name.partition("::")[0]


def _format_skip_lines(reasons: dict[str, str], files_with_run_tests: set[str]) -> list[str]:
    """One line per test, or per file with many tests that were all skipped for the same reason; sorted,
    because workers finish in any order."""
    groups: dict[str, dict[str, list[str]]] = {}
    for name, reason in sorted(reasons.items()):
        groups.setdefault(_file_of_test(name), {}).setdefault(reason, []).append(name)
    lines = []
    for file, by_reason in groups.items():
        is_whole = len(by_reason) == 1 and file not in files_with_run_tests
        for reason, names in by_reason.items():
            shown = [f"{file} ({len(names)} tests)"] if is_whole and len(names) > _TESTS_LISTED_MAX else names
            lines += [f"{name}: {reason}" for name in shown]
    return lines
