"""State of a run from its records, and the environment of its command."""

from __future__ import annotations

import ast
import importlib.resources
import json
from pathlib import Path

import pytest

from genie.grid.remote import runs
from tests.forkserver import ForkServer

PID = {"boot": "b", "watcher": 10, "watcher_start": 100, "pid": 11, "pid_start": 101}


@pytest.mark.parametrize(
    ("ended", "pid", "boot", "processes", "state"),
    [
        (None, PID, "b", {10: ("S", 100), 11: ("R", 101)}, "running"),
        (None, PID, "b", {11: ("R", 101)}, "running"),
        (None, PID, "b", {10: ("S", 100), 11: ("Z", 101)}, "running"),
        (
            None,
            {key: PID[key] for key in ("boot", "watcher", "watcher_start")},
            "b",
            {10: ("S", 100)},
            "starting",
        ),
        (None, PID, "b", {}, "lost"),
        (None, PID, "b", {10: ("S", 999), 11: ("R", 999)}, "lost"),
        (None, PID, "other boot", {10: ("S", 100), 11: ("R", 101)}, "lost"),
        (None, PID, "b", {10: ("Z", 100), 11: ("Z", 101)}, "lost"),
        (None, {}, "b", {}, "lost"),
        ({"code": 0, "ended": 5.0}, PID, "other boot", {}, "exited"),
    ],
)
def test_run_state_is_derived_from_its_records(
    ended: dict[str, object] | None,
    pid: dict[str, object],
    boot: str,
    processes: dict[int, tuple[str, int]],
    state: str,
) -> None:
    found = runs.run_state_from_records(ended, pid, boot, lambda number: processes.get(number, ("", 0)))
    assert found["state"] == state
    assert (found["exit_code"] is None) == (state != "exited")


def test_truncated_record_is_read_as_none(tmp_path: Path) -> None:
    (tmp_path / "exit").write_bytes(b'{"code":3,"en')
    assert runs._read_run_record(str(tmp_path / "exit")) is None


META = '{"id":"../../x","command":"c","started":1,"gpus":[0]}'


@pytest.mark.parametrize(
    ("meta", "pid", "ended", "state"),
    [
        ("", "", "", None),
        ("[]", "", "", None),
        ("{}", "", "", None),
        ('{"command":null,"started":1,"gpus":[]}', "", "", None),
        ('{"command":"c","started":"x","gpus":[]}', "", "", None),
        ('{"command":"c","started":1,"gpus":5}', "", "", None),
        (META, "5", "", "lost"),
        (META, '{"pid":1}', "", "lost"),
        (META, '{"boot":"b","watcher":1}', "[]", "lost"),
        (META, "", "{}", "lost"),
    ],
)
def test_damaged_run_does_not_break_list_or_hold_gpus(
    tmp_path: Path, meta: str, pid: str, ended: str, state: str | None
) -> None:
    folder = tmp_path / ".grid" / "runs" / "r-damaged"
    folder.mkdir(parents=True)
    for name, text in (("meta.json", meta), ("pid", pid), ("exit", ended)):
        (folder / name).write_text(text)
    found = runs.list_runs({"root": str(tmp_path)}, b"")["runs"]
    assert [(one["id"], one["state"]) for one in found] == ([("r-damaged", state)] if state else [])
    assert runs._run_id_by_held_gpu(str(folder.parent)) == {}


@pytest.mark.parametrize(("length", "shown"), [(400, "c" * 400), (401, "c" * 400 + " ...")])
def test_long_command_is_truncated_in_list(tmp_path: Path, length: int, shown: str) -> None:
    folder = tmp_path / ".grid" / "runs" / "r-long"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(META.replace('"c"', f'"{"c" * length}"'))
    (found,) = runs.list_runs({"root": str(tmp_path)}, b"")["runs"]
    assert found["command"] == shown


INTERRUPTED_AT_ITS_RECORD = """
import json, os, signal, time
from genie.grid.remote import runs

setsid = os.setsid

def set_late():
    time.sleep(0.2)
    setsid()

os.setsid = set_late
runs._write_run_record = lambda _, record: os.killpg(record["pid"], signal.SIGINT)
streams = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
args = {"command": "sleep 60", "cwd": "/", "root": "/", "id": "r-a"}
print(json.dumps(runs._run_command_and_get_exit_record(args, {}, -1, streams)))
"""


def test_signal_sent_as_soon_as_the_pid_is_recorded_reaches_the_command(fork_server: ForkServer) -> None:
    """The signal arrives as soon as the PID is recorded, and the child is slow to start."""
    done = fork_server.run(["-c", INTERRUPTED_AT_ITS_RECORD], timeout=60)
    assert json.loads(done.stdout) == {"signal": 2, "code": 130, "timed_out": False}, done.stderr


def test_variables_of_the_user_take_precedence(tmp_path: Path) -> None:
    args = {
        "id": "r-a",
        "root": str(tmp_path),
        "gpu_env": {"CUDA_VISIBLE_DEVICES": "1"},
        "env": {"PATH": "/mine"},
    }
    env = runs.make_command_environment({"PATH": "/bin", "HOME": "/root"}, args)
    assert env == {
        "PATH": "/mine",
        "HOME": "/root",
        "GRID_RUN_ID": "r-a",
        "GRID_ROOT": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "1",
    }


def test_remote_modules_are_valid_python_3_8() -> None:
    for path in importlib.resources.files("genie.grid.remote").iterdir():
        if path.name.endswith(".py"):
            ast.parse(path.read_text(), feature_version=(3, 8))
