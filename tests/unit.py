"""The unit tests: the files of unit.txt, none of which starts a process. `make test-unit` runs them.

With --unit no other file is imported, and a test that starts a process fails, to keep the run fast.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")
_STARTS_A_PROCESS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"))


class UnitTestSelection:
    """The pytest hooks, registered only with --unit."""

    def __init__(self) -> None:
        self._files = frozenset(read_unit_files())
        self._is_in_test = False
        sys.addaudithook(self._fail_test_that_starts_process)

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
            return None
        return collection_path.relative_to(config.rootpath).as_posix() not in self._files or None

    def pytest_runtest_setup(self) -> None:
        self._is_in_test = True

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        self._is_in_test = False

    def _fail_test_that_starts_process(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_in_test and event in _STARTS_A_PROCESS:
            pytest.fail(
                f"a unit test started a process ({event} {arguments[:1]}): remove its file from {LIST.name}"
            )


def read_unit_files() -> list[str]:
    """Paths relative to the repository."""
    lines = LIST.read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]
