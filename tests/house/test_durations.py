"""Recorded durations and the order of test files (tests/durations.py)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.durations import RECORD, DurationRecorder, read_durations, sort_longest_first

ROOT = RECORD.parent.parent


def make_test_items(*names: str) -> list[Any]:  # Any: fakes with the one attribute in use
    return [SimpleNamespace(path=ROOT / name) for name in names]


def list_item_paths(items: list[Any]) -> list[str]:
    return [str(item.path.relative_to(ROOT)) for item in items]


def test_unrecorded_files_come_first_then_the_longest() -> None:
    items = make_test_items("tests/test_short.py", "tests/test_new.py", "tests/test_long.py")
    sort_longest_first(items, {"tests/test_short.py": 0.1, "tests/test_long.py": 9}, root=ROOT)
    assert list_item_paths(items) == ["tests/test_new.py", "tests/test_long.py", "tests/test_short.py"]


def test_tests_of_one_file_keep_their_order() -> None:
    items = make_test_items("tests/test_a.py", "tests/test_b.py", "tests/test_a.py")
    for number, item in enumerate(items):
        item.number = number
    sort_longest_first(items, {}, root=ROOT)
    assert [item.number for item in items] == [0, 2, 1]


def test_record_is_updated_and_deleted_files_are_removed(tmp_path: Path) -> None:
    for name in ("test_ran.py", "test_other.py"):
        (tmp_path / name).touch()
    path = tmp_path / "durations.json"
    path.write_text(json.dumps({"test_ran.py": 3, "test_other.py": 2, "test_deleted.py": 7}))
    config = SimpleNamespace(rootpath=tmp_path)
    hooks = DurationRecorder(record=True, path=path)
    for phase_s in (0.04, 1.31):
        report: Any = SimpleNamespace(nodeid="test_ran.py::test_it", duration=phase_s)
        hooks.pytest_runtest_logreport(report)
    session: Any = SimpleNamespace(config=config)
    hooks.pytest_sessionfinish(session)
    assert read_durations(path) == {"test_ran.py": 1.4, "test_other.py": 2}


def test_plain_run_and_worker_do_not_change_the_record(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    plain: Any = SimpleNamespace(config=SimpleNamespace(rootpath=tmp_path))
    DurationRecorder(record=False, path=path).pytest_sessionfinish(plain)
    worker: Any = SimpleNamespace(config=SimpleNamespace(rootpath=tmp_path, workerinput={}))
    DurationRecorder(record=True, path=path).pytest_sessionfinish(worker)
    assert not path.exists()


def test_recorded_files_exist() -> None:
    assert [name for name in read_durations() if not (ROOT / name).is_file()] == []
