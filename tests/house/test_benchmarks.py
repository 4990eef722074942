"""The benchmarks run, say what they found in one form, and fail when a goal is missed."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house.sources import ROOT, shown
from tests.waiting import wait_until

PLACEMENT = ROOT / "benchmarks" / "bench_placement.py"
KEYS = ["name", "value", "unit", "baseline", "ratio", "spread", "goal", "ok"]
SMALLER = {"bench_grid.py": ["--connections", "10", "--files", "500"]}
"""Sizes for those whose one round takes half a minute or more at their own."""


@pytest.fixture
def report() -> dict[str, Any]:  # Any: the names of a script
    return runpy.run_path(str(ROOT / "benchmarks" / "report.py"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("bench_*.py")), ids=shown)
def test_a_benchmark_writes_figures_only_and_its_end_says_whether_goals_were_met(path: Path) -> None:
    environment = os.environ | {"GENIE_MASTER_PORT": "none", "GENIE_CONFIG": "no-such-file.toml"}
    bench = subprocess.Popen(
        [sys.executable, str(path), "--json", "--rounds", "1", *SMALLER.get(path.name, [])],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, told = bench.communicate(timeout=200)
    finally:
        _end(bench)
    figures = [json.loads(line) for line in out.splitlines()]
    assert figures, told
    assert [list(figure) for figure in figures] == [KEYS] * len(figures)
    assert bench.returncode == (0 if all(figure["ok"] for figure in figures) else 1), told
    machine = [line for line in told.splitlines() if "Python" in line and "commit" in line]
    assert len(machine) == 1
    spreads = {figure["name"]: figure["spread"] for figure in figures}
    for name in (name for name in spreads if name.endswith("_p99")):
        assert spreads[name] != spreads.get(name.replace("_p99", "_p50"), ()), name


def _end(bench: subprocess.Popen[str]) -> None:
    """One that takes too long leaves through its own end, so that its cluster ends with it."""
    if bench.poll() is None:
        bench.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            bench.communicate(timeout=20)
        bench.kill()
        bench.wait()


def test_sigterm_leaves_a_benchmark_through_its_own_end(tmp_path: Path) -> None:
    """The nodes are the test: servers of their own, which nothing else would end."""
    bench = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "bench_grid.py"), "--only", "cold", "--rounds", "1000"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(_servers(tmp_path)) == 20, timeout_s=60, what="every node has a server")
        nodes = _servers(tmp_path)
        bench.terminate()
        _, told = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.wait()
    left = [pid for pid in nodes if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (bench.returncode, left, list(tmp_path.iterdir())) == (143, [], []), told.decode()


def _servers(folder: Path) -> list[int]:
    found = [path.read_text().strip() for path in folder.glob("gb-*/bed/node*/sshd.pid")]
    return [int(pid) for pid in found if pid]


def test_a_place_that_is_left_takes_its_folder_and_its_answer_to_sigterm_along(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with pytest.raises(SystemExit) as left, report["own_place"](tmp_path) as folder:
            assert list(tmp_path.iterdir()) == [folder]
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)  # one more on the way out changes nothing
                (folder / "on the way out").touch()
        assert (left.value.code, list(tmp_path.iterdir()), came) == (143, [], [])
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


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


def test_a_p99_has_a_spread_of_its_own_or_none(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    values = [value for worst in range(1, 11) for value in (worst, *[0.5] * 99)]
    assert report["p99s"](values) == list(range(1, 11))
    assert [len(report["p99s"](values * 3)), len(report["p99s"](values[:450]))] == [10, 4]
    few = report["figure"]("it", 1.0, samples=report["p99s"](values[:199]))
    assert few.spread is None and few.ok
    assert report["conclude"]([few], as_json=False) == 0
    assert "spread" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "there is no trace"),
        (("openb_node_list_gpu_node.csv",), "there is no openb pod list"),
        (("openb_node_list_gpu_node.csv", "openb_pod_list_one.csv"), "there is no workload 'two'"),
    ],
)
def test_traces_that_are_not_there_are_told_in_a_line(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).write_text("sn,cpu_milli,memory_mib,gpu,model\n", "utf-8")
    done = subprocess.run(
        [sys.executable, str(PLACEMENT), "--traces", str(tmp_path), "--workload", "two"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
