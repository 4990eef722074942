"""The sandbox of a fault run: machines reach each other, network faults act, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.namespaces import run_in_sandbox
from tests.faults.run import remove_directories_of_killed_runs
from tests.needs import require_namespaces, require_program
from tests.waiting import wait_until

NETWORK_SCRIPT = """
import subprocess, sys
from tests.faults.namespaces import MachineNetwork, run_as_init
from tests.waiting import wait_until

def can_connect(network, source, target):
    code = f'import socket; socket.create_connection(({network.addresses[target]!r}, 9), 1)'
    command = [*network.command_prefix(source), sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True).stderr
    return "Connection refused" in output  # nothing listens there, but the machine answers

def check():
    network = MachineNetwork.create()
    for name in ("a", "b"):
        network.add_machine(name)
    wait_until(lambda: can_connect(network, "a", "b"))
    wait_until(lambda: can_connect(network, "b", "a"))
    network.unplug("a")
    assert not can_connect(network, "a", "b") and not can_connect(network, "b", "a")
    network.heal()
    wait_until(lambda: can_connect(network, "a", "b"))
    network.drop_packets(source="a", target="b")
    assert not can_connect(network, "a", "b")
    network.heal()
    network.drop_packets(source="a", target="b", etcd_peers_only=True)
    wait_until(lambda: can_connect(network, "a", "b"))
    network.heal()
    network.drop_packets_at_random("b", percent=50)
    network.heal()
    wait_until(lambda: can_connect(network, "a", "b"))
    sleeping = subprocess.Popen([*network.command_prefix("a"), "sleep", "60"])
    wait_until(lambda: network.list_processes("a") == [sleeping.pid])
    assert not network.list_processes("b")
    return 7

sys.exit(run_as_init(check))
"""
SLEEPING_SCRIPT = """
import subprocess, sys
from pathlib import Path
from tests.faults.namespaces import MachineNetwork, run_as_init

def sleep():
    network = MachineNetwork.create()
    network.add_machine("a")
    code = "import time; time.sleep(600)"
    command = [*network.command_prefix("a"), sys.executable, "-c", code, sys.argv[1]]
    subprocess.Popen(command, start_new_session=True)
    print("ready", flush=True)
    subprocess.run(["sleep", "600"])
    return 0

sys.exit(run_as_init(sleep))
"""
OUTER_SCRIPT = "import sys; from tests.faults.namespaces import run_in_sandbox; run_in_sandbox(sys.argv[1:])"


@pytest.fixture(autouse=True)
def _requirements() -> None:
    require_namespaces("net", "pid", "mount")
    require_program("ip", package="iproute2")
    require_program("nft", package="nftables")


def test_machines_reach_each_other_and_network_faults_act(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NETWORK_SCRIPT)
    assert run_in_sandbox([str(script)]) == 7


def test_killed_run_leaves_no_process(tmp_path: Path) -> None:
    script, mark = tmp_path / "script.py", f"mark-{tmp_path.name}"
    script.write_text(SLEEPING_SCRIPT)
    command = [sys.executable, "-c", OUTER_SCRIPT, str(script), mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "ready\n"
        assert find_processes(mark)
        os.kill(outer.pid, signal.SIGKILL)
    wait_until(lambda: not find_processes(mark), what="all processes of the sandbox end")


def find_processes(argument: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if argument.encode() in words:
            found.append(path.parent.name)
    return found


def test_directories_of_killed_runs_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    old, own = tmp_path / f"genie-faults-{ended.pid}-a", tmp_path / f"genie-faults-{os.getpid()}-b"
    for path in (old, own):
        path.mkdir()
    remove_directories_of_killed_runs(tmp_path)
    assert list(tmp_path.iterdir()) == [own]
