"""The benchmarks run, print figures in a common format, and fail when a goal is missed."""

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

from tests.house.repository_files import ROOT, relative_path
from tests.needs import require_namespaces, require_program
from tests.waiting import wait_until

PLACEMENT = ROOT / "benchmarks" / "bench_placement.py"
KEYS = ["name", "value", "unit", "baseline", "ratio", "spread", "goal", "ok"]
SMALLER = {
    "bench_connections.py": ["--quick"],
    "bench_control.py": ["--quick", "--nodes", "12"],
    "bench_gossip.py": ["--members", "4"],
    "bench_grid.py": ["--connections", "10", "--files", "500"],
    "bench_grid_pipeline.py": ["--nodes", "2", "--files", "100"],
    "bench_grid_ray.py": ["--nodes", "2", "--tasks", "20"],
    "bench_leaks.py": ["--quick"],
    "bench_load.py": ["--jobs", "2000"],
    "bench_overload.py": ["--quick", "--nodes", "12"],
    "bench_utilisation.py": ["--jobs", "300", "--nodes", "32"],
}
"""Smaller sizes for benchmarks with long rounds."""
QUICK = (
    "bench_load.py",
    "bench_placement.py",
    "bench_scheduler.py",
    "bench_store.py",
    "bench_utilisation.py",
)
# One process for all values: soak.py imports torch.
_EXIT_CODES_OF_SOAK = """
import sys
import soak

for hours in sys.argv[1:]:
    sys.argv = ["soak.py", f"--hours={hours}"]
    try:
        soak.main()
    except SystemExit as end:
        print(f"{hours}:{end.code}")
"""
BENCHMARKS = [
    pytest.param(
        path, id=relative_path(path), marks=() if path.name in QUICK else pytest.mark.long("a benchmark")
    )
    for path in sorted((ROOT / "benchmarks").glob("bench_*.py"))
]


@pytest.fixture
def report_namespace() -> dict[str, Any]:  # Any: the names of a script
    return runpy.run_path(str(ROOT / "benchmarks" / "report.py"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", BENCHMARKS)
def test_benchmark_prints_figures_and_exits_with_1_if_a_goal_is_missed(path: Path, tmp_path: Path) -> None:
    if path.name.startswith("bench_grid"):
        _require_testbed()
    environment = os.environ | {
        "GENIE_MASTER_PORT": "none",
        "GENIE_CONFIG": "no-such-file.toml",
        "TMPDIR": str(tmp_path),  # in memory: a sync takes no time
    }
    bench = subprocess.Popen(
        [sys.executable, str(path), "--json", "--rounds", "1", *SMALLER.get(path.name, [])],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = bench.communicate(timeout=200)
    finally:
        _end_benchmark(bench)
    figures = [json.loads(line) for line in out.splitlines()]
    assert figures, errors
    assert [list(figure) for figure in figures] == [KEYS] * len(figures)
    assert bench.returncode == (0 if all(figure["ok"] for figure in figures) else 1), errors
    machine = [line for line in errors.splitlines() if "Python" in line and "commit" in line]
    assert len(machine) == 1
    spreads = {figure["name"]: figure["spread"] for figure in figures}
    for name in (name for name in spreads if name.endswith("_p99")):
        assert spreads[name] != spreads.get(name.replace("_p99", "_p50"), ()), name


@pytest.mark.long("starts a cluster with a session")
@pytest.mark.timeout(240)
def test_soak_reports_progress_and_ends_with_a_verdict(tmp_path: Path) -> None:
    """Whether a goal is met is left to longer runs."""
    soak = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--hours", "0.001", "--json"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = soak.communicate(timeout=200)
    finally:
        _end_benchmark(soak)
    figures = [json.loads(line) for line in out.splitlines()]
    slopes = {figure["name"] for figure in figures if figure["unit"] == "B/op"}
    processes = ("client", "controller", "agent", "shim", "executor")
    assert slopes == {f"{name}_rss_slope" for name in processes}, errors
    assert "operations: client " in errors
    passed = all(figure["ok"] for figure in figures)
    assert soak.returncode == (0 if passed else 1)
    assert ("soak: passed" if passed else "soak: FAILED") in errors.splitlines()[-1]


def test_make_soak_passes_hours_to_the_script() -> None:
    require_program("make", package="make")
    done = subprocess.run(
        ["make", "--dry-run", "soak", "HOURS=0.05"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert 'benchmarks/soak.py --hours "0.05"' in done.stdout, done.stderr


def test_soak_needs_a_positive_number_of_hours() -> None:
    values = ("0", "-1", "nan", "inf", "three")
    done = subprocess.run(
        [sys.executable, "-c", _EXIT_CODES_OF_SOAK, *values],
        cwd=ROOT / "benchmarks",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [f"{hours}:2" for hours in values], done.stderr
    assert done.stderr.count("is not a positive number of hours") == len(values)


def _require_testbed() -> None:
    require_namespaces("mount", "uts")
    require_program("sshd", package="openssh-server")
    require_program("ssh", package="openssh-client")
    require_program("rsync", package="rsync")
    require_program("cc", package="gcc")


def _end_benchmark(bench: subprocess.Popen[str]) -> None:
    """Sends SIGTERM first, so that the benchmark ends its cluster."""
    if bench.poll() is None:
        bench.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            bench.communicate(timeout=20)
        bench.kill()
        bench.wait()


def test_benchmark_cleans_up_on_sigterm(tmp_path: Path) -> None:
    """Checks the SSH servers of the nodes, which are separate processes."""
    _require_testbed()
    bench = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "bench_grid.py"), "--only", "cold", "--rounds", "1000"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        # Written after all servers were started: a signal during the start of one could lose that process.
        wait_until(lambda: [*tmp_path.glob("gb-*/testbed/ssh_config")], timeout_s=60, what="the nodes")
        wait_until(
            lambda: len(_list_sshd_pids(tmp_path)) == 20, timeout_s=60, what="an SSH server on every node"
        )
        nodes = _list_sshd_pids(tmp_path)
        bench.terminate()
        _, errors = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.wait()
    left = [pid for pid in nodes if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (bench.returncode, left, list(tmp_path.iterdir())) == (143, [], []), errors.decode()


def _list_sshd_pids(folder: Path) -> list[int]:
    found = [path.read_text().strip() for path in folder.glob("gb-*/testbed/node*/sshd.pid")]
    return [int(pid) for pid in found if pid]


def test_temporary_state_removes_its_folder_and_restores_the_sigterm_handler(
    report_namespace: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with pytest.raises(SystemExit) as left, report_namespace["use_temporary_state"](tmp_path) as folder:
            assert list(tmp_path.iterdir()) == [folder]
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)  # ignored during the cleanup
                (folder / "written during cleanup").touch()
        assert (left.value.code, list(tmp_path.iterdir()), received) == (143, [], [])
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("rounds", ["0", "-1", "many"])
def test_rounds_must_be_a_positive_integer(
    report_namespace: dict[str, Any], rounds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        report_namespace["make_parser"]("Benchmark.", rounds=1).parse_args(["--rounds", rounds])
    assert "not a positive integer" in capsys.readouterr().err


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
def test_missed_goal_sets_the_exit_code(
    report_namespace: dict[str, Any], rule: str, limit: float, met: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = report_namespace["make_figure"](
        "it", 20.0, samples=[10, 20, 30], baseline=10.0, goal=report_namespace[rule](limit)
    )
    assert figure.ok is met
    assert report_namespace["print_figures"]([figure], as_json=False) == (0 if met else 1)
    assert ("MISSED" not in capsys.readouterr().out) is met


def test_spread_is_the_10th_and_90th_percentile(report_namespace: dict[str, Any]) -> None:
    figure = report_namespace["make_figure"]("it", 50.0, samples=list(range(100, 0, -1)))
    assert (figure.spread, figure.ratio, figure.goal, figure.ok) == ((11, 91), None, None, True)


def test_spread_of_a_p99_needs_at_least_200_values(
    report_namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    values = [value for worst in range(1, 11) for value in (worst, *[0.5] * 99)]
    assert report_namespace["p99_samples"](values) == list(range(1, 11))
    assert [
        len(report_namespace["p99_samples"](values * 3)),
        len(report_namespace["p99_samples"](values[:450])),
    ] == [10, 4]
    few = report_namespace["make_figure"]("it", 1.0, samples=report_namespace["p99_samples"](values[:199]))
    assert few.spread is None and few.ok
    assert report_namespace["print_figures"]([few], as_json=False) == 0
    assert "spread" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "no such trace file"),
        (("openb_node_list_gpu_node.csv",), "no openb pod list found"),
        (("openb_node_list_gpu_node.csv", "openb_pod_list_one.csv"), "unknown workload 'two'"),
    ],
)
def test_missing_traces_are_reported_in_one_line(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("sn,cpu_milli,memory_mib,gpu,model\n", "utf-8")
    done = subprocess.run(
        [sys.executable, str(PLACEMENT), "--traces", str(tmp_path), "--workload", "two"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
