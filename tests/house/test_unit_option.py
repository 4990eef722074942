"""The list of unit tests and the option --unit (tests/unit.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.house.repository_files import ROOT
from tests.unit import UnitTestSelection, read_unit_files


def test_listed_files_exist_and_are_sorted() -> None:
    files = read_unit_files()
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert files == sorted(set(files))


def test_most_folders_have_unit_tests() -> None:
    folders = {Path(name).parts[1] for name in read_unit_files()}
    assert {"agent", "cli", "cluster", "controller", "grid", "model", "runtime", "scheduler"} <= folders


def test_files_missing_in_the_list_are_not_collected() -> None:
    config: Any = SimpleNamespace(rootpath=ROOT)
    hooks = UnitTestSelection()
    assert hooks.pytest_ignore_collect(ROOT / "tests/device/test_opinfo.py", config) is True
    for name in (read_unit_files()[0], "tests/conftest.py", "tests/device"):
        assert hooks.pytest_ignore_collect(ROOT / name, config) is None


def test_unit_test_that_starts_a_process_fails() -> None:
    hooks = UnitTestSelection()
    hooks.pytest_runtest_setup()
    with pytest.raises(pytest.fail.Exception, match=r"started a process \(subprocess\.Popen"):
        hooks._fail_test_that_starts_process("subprocess.Popen", ("ls",))
    hooks._fail_test_that_starts_process("open", ("file",))
    hooks.pytest_runtest_teardown()
    hooks._fail_test_that_starts_process("subprocess.Popen", ("ls",))
