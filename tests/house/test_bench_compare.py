"""make bench-compare, on a small repository whose benchmark prints the figures of its own revision."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.house.repository_files import ROOT
from tests.needs import require_program

BENCH = """
import json, pathlib, sys
here = pathlib.Path(__file__).parent
count = here / "count"
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
if "--fail" in sys.argv:
    sys.exit(3)
for name, unit, goal, values in {figures!r}:
    print(json.dumps({{"name": name, "value": values[number % len(values)], "unit": unit, "baseline": None,
                      "ratio": None, "spread": None, "goal": goal, "ok": True}}))
"""

Rows = list[tuple[str, str, str | None, list[float]]]


@dataclass(frozen=True)
class BenchmarkRepository:
    folder: Path

    def commit(self, figures: Rows) -> None:
        (self.folder / "benchmarks" / "bench_small.py").write_text(BENCH.format(figures=figures))
        self.git("add", "--all")
        self.git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message=change")

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", "-C", str(self.folder), *arguments], check=True, timeout=60)

    def compare(self, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        command = [sys.executable, str(self.folder / "benchmarks" / "compare.py"), "--json", *arguments]
        command[3:3] = ["--bench", "benchmarks/bench_small.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=80, cwd=self.folder)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> BenchmarkRepository:
    require_program("git", package="git")
    repository = BenchmarkRepository(tmp_path / "repository")
    (repository.folder / "benchmarks").mkdir(parents=True)
    for name in ("compare.py", "report.py"):
        shutil.copy(ROOT / "benchmarks" / name, repository.folder / "benchmarks")
    (repository.folder / ".gitignore").write_text("build\ncount\n__pycache__\n")
    repository.git("init", "--quiet")
    return repository


def test_each_figure_has_the_median_ratio_and_its_range(repository: BenchmarkRepository) -> None:
    repository.commit([("call", "ms", None, [10.0])])
    repository.commit([("call", "ms", None, [10.0, 11.0, 9.0])])
    code, figures, _ = repository.compare("--rounds", "3", "HEAD~1")
    assert code == 0
    assert figures == [
        {
            "name": "small.call",
            "value": 10.0,
            "unit": "ms",
            "baseline": 10.0,
            "ratio": 1.0,
            "spread": [0.9, 1.1],
            "goal": "median ratio <= 1.05 or best round <= 1",
            "ok": True,
        }
    ]


@pytest.mark.parametrize(
    ("unit", "goal", "values", "is_slower"),
    [
        ("ms", None, [12.0, 11.0, 13.0], True),
        ("ms", None, [12.0, 9.9, 13.0], False),  # one round was faster than the base
        ("ms", None, [10.4], False),  # below the threshold
        ("ms", None, [5.0], False),
        ("1/s", None, [8.0, 9.0, 7.0], True),
        ("1/s", None, [12.0], False),
        ("%", "value >= 5", [8.0], True),
        ("%", "value <= 20", [12.0], True),
        ("%", None, [12.0], False),  # neither unit nor goal defines whether more is better
        ("points", None, [8.0], False),
    ],
)
def test_slower_figure_sets_the_exit_code(
    repository: BenchmarkRepository, unit: str, goal: str | None, values: list[float], is_slower: bool
) -> None:
    repository.commit([("call", unit, goal, [10.0])])
    repository.commit([("call", unit, goal, values)])
    code, figures, _ = repository.compare("--rounds", "3", "HEAD~1")
    assert (code, [figure["ok"] for figure in figures]) == (int(is_slower), [not is_slower])


IMPORTS_GENIE = """
import genie
figure = {"name": "value", "value": getattr(genie, "VALUE", 0), "unit": "x", "baseline": None}
print(json.dumps(figure | {"ratio": None, "spread": None, "goal": None, "ok": True}))
"""


def test_base_revision_imports_its_own_genie(repository: BenchmarkRepository) -> None:
    """The editable install of this environment is an import hook that finds another genie first."""
    (repository.folder / "genie").mkdir()
    for value in (1, 2):
        (repository.folder / "genie" / "__init__.py").write_text(f"VALUE = {value}\n")
        bench = repository.folder / "benchmarks" / "bench_small.py"
        bench.write_text(BENCH.format(figures=[]) + IMPORTS_GENIE)
        repository.git("add", "--all")
        repository.git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message=change")
    code, (figure,), err = repository.compare("--rounds", "1", "HEAD~1")
    assert (code, figure["baseline"]) == (0, 1), err


def test_few_rounds_print_a_warning(repository: BenchmarkRepository) -> None:
    repository.commit([("call", "ms", None, [10.0])])
    warning = "a slower figure may be chance"
    assert warning in repository.compare("--rounds", "2", "HEAD")[2]
    assert warning not in repository.compare("HEAD")[2]


def test_threshold_is_an_option_and_uncommitted_changes_are_compared(repository: BenchmarkRepository) -> None:
    repository.commit([("call", "ms", None, [10.0])])
    bench = repository.folder / "benchmarks" / "bench_small.py"
    bench.write_text(bench.read_text().replace("10.0", "12.0"))
    assert repository.compare("--rounds", "1", "HEAD")[0] == 1
    assert repository.compare("--rounds", "1", "--threshold", "1.3", "HEAD")[0] == 0


def test_figure_missing_in_base_is_reported_and_zero_has_no_ratio(repository: BenchmarkRepository) -> None:
    repository.commit([("zero", "ms", None, [0.0])])
    repository.commit([("zero", "ms", None, [0.0]), ("added", "ms", None, [1.0])])
    code, figures, errors = repository.compare("--rounds", "1", "HEAD~1")
    assert (code, [(figure["name"], figure["ratio"]) for figure in figures]) == (0, [("small.zero", None)])
    assert "added: not measured by base" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-revision"], "'no-such-revision' is not a revision"),
        (["HEAD", "--", "--fail"], "failed with exit code 3"),
        (["HEAD", "--bench", "benchmarks/bench_other.py"], "bench_other.py does not exist"),
    ],
)
def test_failed_comparison_is_reported_in_one_line(
    repository: BenchmarkRepository, arguments: list[str], message: str
) -> None:
    repository.commit([("call", "ms", None, [10.0])])
    code, figures, errors = repository.compare("--rounds", "1", *arguments)
    assert (code, figures) == (2, [])
    assert message in errors.splitlines()[-1] and "Traceback" not in errors
