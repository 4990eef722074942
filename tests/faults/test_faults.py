"""Five of the faults of `make faults`, with real processes: no invariant is violated."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.faults import FAULTS
from tests.faults.machines import compile_stepped_clock
from tests.faults.run import main
from tests.needs import require_namespaces, require_program

FAULTS_IN_CI = (
    "leading-controller-killed",
    "leading-controller-suspended",
    "etcd-leader-cut-towards-peers",
    "leading-server-isolated",
    "leader-changed-in-burst",
)
_TIMEOUT_S = 280.0


@pytest.mark.long("three servers and two nodes as processes, and five failovers")
@pytest.mark.timeout(300)
def test_no_fault_violates_an_invariant(tmp_path: Path) -> None:
    require_namespaces("net", "pid", "mount")
    require_program("etcd", package="etcd-server")
    require_program("nft", package="nftables")
    require_program("ip", package="iproute2")
    arguments = [text for name in FAULTS_IN_CI for text in ("--fault", name)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.run", "--json", "--results", str(tmp_path), *arguments],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {result["fault"] for result in results} == set(FAULTS_IN_CI)
    assert all(len(result["accepted_s"]) >= 2 for result in results)
    assert "0 violations in 1 rounds" in done.stderr


def test_there_are_twenty_faults_with_different_names() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) == 20
    assert set(FAULTS_IN_CI) <= set(names)


def test_missing_program_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("tests.faults.run.os.geteuid", lambda: 0)
    assert main(["--fault", "agent-killed"]) == 2
    assert "etcd (Debian: etcd-server)" in capsys.readouterr().err


def test_ordinary_user_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.faults.run.os.geteuid", lambda: 1000)
    assert main([]) == 2
    assert "requires root" in capsys.readouterr().err


def test_stepped_clock_moves_the_wall_clock_and_no_other(tmp_path: Path) -> None:
    library, offset_file = compile_stepped_clock(tmp_path), tmp_path / "offset"
    offset_file.write_bytes(struct.pack("=q", 3600))
    code = "import time; print(time.time(), time.monotonic())"
    environ = {**os.environ, "LD_PRELOAD": str(library), "STEPPED_CLOCK_FILE": str(offset_file)}
    wall_s, monotonic_s = time.time(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    stepped_wall_s, stepped_monotonic_s = map(float, done.stdout.split())
    assert stepped_wall_s >= wall_s + 3600
    assert monotonic_s <= stepped_monotonic_s < monotonic_s + 1800
