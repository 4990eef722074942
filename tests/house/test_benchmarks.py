"""The benchmarks run, say what they found in one form, and fail when a goal is missed."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house.sources import ROOT, shown

KEYS = ["name", "value", "unit", "baseline", "ratio", "spread", "goal", "ok"]


@pytest.fixture
def report() -> dict[str, Any]:  # Any: the names of a script
    return runpy.run_path(str(ROOT / "benchmarks" / "report.py"))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("bench_*.py")), ids=shown)
def test_a_benchmark_writes_figures_only_and_its_end_says_whether_goals_were_met(path: Path) -> None:
    environment = os.environ | {"GENIE_MASTER_PORT": "none", "GENIE_CONFIG": "no-such-file.toml"}
    done = subprocess.run(
        [sys.executable, str(path), "--json", "--rounds", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=80,
        stdin=subprocess.DEVNULL,
    )
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert figures, done.stderr
    assert [list(figure) for figure in figures] == [KEYS] * len(figures)
    assert done.returncode == (0 if all(figure["ok"] for figure in figures) else 1), done.stderr
    machine = [line for line in done.stderr.splitlines() if "Python" in line and "commit" in line]
    assert len(machine) == 1


@pytest.mark.parametrize("rounds", ["0", "-1", "many"])
def test_a_benchmark_of_no_rounds_is_refused(
    report: dict[str, Any], rounds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        report["options"]("a benchmark", rounds=1).parse_args(["--rounds", rounds])
    assert "whole number from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "limit", "met"),
    [
        ("value_at_most", 20, True),
        ("value_at_most", 19, False),
        ("ratio_at_most", 2, True),
        ("ratio_at_most", 1.9, False),
        ("ratio_at_least", 2, True),
        ("ratio_at_least", 2.1, False),
        ("value_at_least", 20, True),
        ("value_at_least", 20.1, False),
        ("distance_at_most", 10, True),
        ("distance_at_most", 9.9, False),
    ],
)
def test_a_missed_goal_is_the_exit_code(
    report: dict[str, Any], rule: str, limit: float, met: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = report["figure"]("it", 20.0, samples=[10, 20, 30], baseline=10.0, goal=report[rule](limit))
    assert figure.ok is met
    assert report["conclude"]([figure], as_json=False) == (0 if met else 1)
    assert ("MISSED" not in capsys.readouterr().out) is met


def test_the_spread_is_what_most_samples_lie_within(report: dict[str, Any]) -> None:
    figure = report["figure"]("it", 50.0, samples=list(range(100, 0, -1)))
    assert (figure.spread, figure.ratio, figure.goal, figure.ok) == ((11, 91), None, None, True)
