"""Recorded durations of the test files, used to start the longest file first.

A worker runs whole files, so a run is shortest if long files start first. `make durations` writes the record,
tests/durations.json.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

RECORD = Path(__file__).with_suffix(".json")


class DurationRecorder:
    """The pytest hooks. With `record`, the main process writes the duration of each file."""

    def __init__(self, *, record: bool, path: Path = RECORD) -> None:
        self._record = record
        self._path = path
        self._seconds: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        sort_longest_first(items, read_durations(self._path), root=config.rootpath)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._record or hasattr(session.config, "workerinput"):
            return
        known = {
            file: s
            for file, s in read_durations(self._path).items()
            if (session.config.rootpath / file).is_file()
        }
        merged = known | {file: round(seconds, 1) for file, seconds in self._seconds.items()}
        self._path.write_text(json.dumps(dict(sorted(merged.items())), indent=1) + "\n", "utf-8")


def read_durations(path: Path = RECORD) -> dict[str, float]:
    """Seconds by path relative to the repository; empty if there is no record."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def sort_longest_first(items: list[pytest.Item], seconds: dict[str, float], *, root: Path) -> None:
    """Sorts by file and keeps the order within a file. Files without a record come first."""
    by_path = {root / name: s for name, s in seconds.items()}
    items.sort(key=lambda item: (-by_path.get(item.path, float("inf")), str(item.path)))
