"""The command `make sim`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim import run
from tests.sim.defects import DEFECTS
from tests.sim.scenario import SCENARIO_KINDS, ScenarioKind

ROOT = Path(__file__).parents[2]


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        run.main(arguments)
    return ended.value.code


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ([], ""),
        (["SEEDS=30000"], "--seeds '30000'"),
        (["SEED=7", "KIND=disk"], "--seed '7' --kind 'disk'"),
        (["SEEDS=2", "FIRST=5"], "--seeds '2' --first '5'"),
    ],
)
def test_make_passes_its_variables_to_the_program(variables: list[str], expected: str) -> None:
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", "sim", *variables]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    line = printed.replace("\\\n", " ").splitlines()[-1]
    assert " ".join(line.split()) == f".venv/bin/python -m tests.sim.run {expected}".strip()


def test_command_runs_seeds_of_all_kinds(capfd: pytest.CaptureFixture[str]) -> None:
    count = len(SCENARIO_KINDS)
    command = [sys.executable, "-m", "tests.sim.run", "--seeds", str(count), "--first", "3"]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=300).returncode == 0
    assert f"{count} seeds, 0 failed" in capfd.readouterr().out
    assert {run.kind_of_seed(seed) for seed in range(3, 3 + count)} == set(SCENARIO_KINDS)


def test_failing_seeds_are_printed_with_their_replay_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert run._run_seeds_and_count_failed([(0, "disk"), (3, "no-such-kind")]) == 1
    out = capfd.readouterr().out
    assert "no-such-kind seed 3 fails; replay: make sim SEED=3 KIND=no-such-kind\n" in out
    assert "KeyError: 'no-such-kind'" in out
    assert "2 seeds, 1 failed" in out


def test_replay_prints_the_violations_of_a_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    defect = DEFECTS["full disk as fault of the job"]
    seed = str(defect.seeds[0])
    assert exit_code("--seed", seed, "--kind", "disk") == 0
    assert f"disk seed {seed} passes" in capsys.readouterr().out
    defect.plant(monkeypatch)
    monkeypatch.setitem(SCENARIO_KINDS, "disk", ScenarioKind(("full_disk",)))
    assert exit_code("--seed", seed, "--kind", "disk") == 1
    out = capsys.readouterr().out
    assert f"disk seed {seed} fails; replay: make sim SEED={seed} KIND=disk\n" in out
    assert "ended without a fault of its node" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--seeds", "many"], "'many' is not an integer from 1 to"),
        (["--seeds", "0"], "'0' is not an integer from 1 to"),
        (["--seeds", ""], "'' is not an integer from 1 to"),
        (["--seed", "-1"], "'-1' is not an integer from 0 to"),
        (["--first", "1e3"], "'1e3' is not an integer from 0 to"),
        (["--kind", "weather"], "invalid choice: 'weather'"),
        (["--seed", "1", "--seeds", "2"], "not allowed with argument"),
        (["--seed", "1", "--first", "2"], "FIRST has no effect with SEED"),
    ],
)
def test_invalid_values_are_rejected(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert "usage: make sim" in shown
