"""Requirements of tests are found in their sources, and the bare run rejects undeclared ones."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.house import declared_requirements
from tests.house.repository_files import ROOT, python_files, relative_path

REPORT = """<testsuites><testsuite>
<testcase file="tests/a/test_a.py" name="test_passes" time="60"/>
<testcase file="tests/a/test_a.py" name="test_skipped" time="0.1">
<skipped type="pytest.skip" message="{}"/></testcase>
<testcase file="tests/{}/test_b.py" name="test_other" time="{}">
<skipped type="pytest.skip" message="needs sshd"/></testcase>
</testsuite></testsuites>"""

STATUS = """Package: base
Status: install ok installed
Essential: yes
Depends: libbase (>= 2) | otherbase, any-awk

Package: libbase
Status: install ok installed

Package: mawk
Status: install ok installed
Provides: any-awk (= 1), other

Package: g++
Status: install ok installed
Depends: g++-12:any (>= 1)
Description: compiler
 Depends: not-a-field

Package: g++-12
Status: install ok installed

Package: otherbase
Status: deinstall ok config-files

Package: sshd
Status: install ok installed
"""


@pytest.fixture(scope="module")
def files_with_requirements() -> set[str]:
    return set(map(relative_path, declared_requirements.list_files_with_requirements()))


@pytest.fixture
def bare_script_namespace() -> dict[str, Any]:  # Any: the names of a script
    return runpy.run_path(str(ROOT / ".ci" / "bare.py"))


@pytest.mark.parametrize(
    "name",
    [
        "cli/grid/test_health.py",  # a fixture that conftest.py imports from another folder
        "cli/grid/test_run.py",  # an imported fixture of another folder
        "controller/store/test_etcd.py",  # a class that a fixture creates
        "controller/store/test_sqlite_full.py",  # one parameter of its own fixture
        "examples/test_examples.py",
        "grid/test_metrics_server.py",  # in the test itself
        "grid/ssh/test_pool.py",  # a fixture of conftest.py that uses another
        "house/test_benchmarks.py",  # a function of the file
    ],
)
def test_file_that_requires_root_or_an_optional_program_is_found(
    files_with_requirements: set[str], name: str
) -> None:
    assert (ROOT / "tests" / name).is_file()
    assert f"tests/{name}" in files_with_requirements


@pytest.mark.parametrize("name", ["native/test_libraries.py", "test_config.py", "grid/test_grid_file.py"])
def test_file_that_requires_only_a_compiler_is_not_selected(
    files_with_requirements: set[str], name: str
) -> None:
    assert (ROOT / "tests" / name).is_file()
    assert f"tests/{name}" not in files_with_requirements


def test_bare_run_has_a_file_of_every_folder(files_with_requirements: set[str]) -> None:
    chosen = declared_requirements.files_for_bare_run()
    tests = [path for path in python_files("tests") if path.name.startswith("test_")]
    assert {path.parent for path in chosen} == {path.parent for path in tests}
    assert files_with_requirements <= set(map(relative_path, chosen))
    assert len(chosen) < len(tests) / 2


def test_bare_run_includes_files_in_which_all_tests_are_long(files_with_requirements: set[str]) -> None:
    chosen = set(map(relative_path, declared_requirements.long_files_for_bare_run()))
    assert (
        {"tests/grid/test_login_shells.py", "tests/grid/ray/test_cluster.py"}
        <= chosen
        <= files_with_requirements
    )


@pytest.mark.parametrize(
    ("reason", "folder", "time", "words"),
    [
        ("needs root", "a", 0.1, ""),
        ("needs root", "gpu", 0.1, ""),
        ("flaky today", "a", 0.1, "test_a.py::test_skipped: skipped without a declared requirement"),
        ("needs root", "a", 20, "test_b.py::test_other: took 20 s to be skipped"),
        ("needs root", "b", 0.1, "tests/b: no test passed"),
    ],
)
def test_bare_run_rejects_undeclared_and_slow_skips(
    bare_script_namespace: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    reason: str,
    folder: str,
    time: float,
    words: str,
) -> None:
    (tmp_path / "report.xml").write_text(REPORT.format(reason, folder, time))
    assert bare_script_namespace["check"](tmp_path / "report.xml", ["tests/a", f"tests/{folder}"]) == (
        1 if words else 0
    )
    out = capsys.readouterr().out
    assert out.startswith(f"bare: 1 passed, {int(bool(words))} failed, 2 skipped") and words in out


def test_ci_installs_every_program_that_a_test_needs() -> None:
    """Otherwise tests are skipped on a clean machine, which fails the run only there."""
    needed = {
        value
        for path in python_files("tests")
        for value in re.findall(r'require_program\("[\w+-]+", package="([\w+-]+)"\)', path.read_text())
    }
    listed = re.search(r"^needed=\((.*?)\)", (ROOT / ".ci" / "run").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    installed = set(re.findall(r"[\w+-]+:([\w+-]+)", listed[1]))
    assert needed - installed <= {"binutils", "dash", "gcc", "make", "no-such-package", "nvidia-smi"}


def test_bare_run_sees_only_essential_packages_and_their_dependencies(
    bare_script_namespace: dict[str, Any],
) -> None:
    assert bare_script_namespace["_with_dependencies"](STATUS) == {"base", "libbase", "mawk", "g++", "g++-12"}
