"""What the node decides by itself: how a run is, and what its command gets."""

from __future__ import annotations

import ast
import importlib.resources
from pathlib import Path

import pytest

from genie.grid.remote import runs

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
def test_how_a_run_is_by_its_records(
    ended: dict[str, object] | None,
    pid: dict[str, object],
    boot: str,
    processes: dict[int, tuple[str, int]],
    state: str,
) -> None:
    found = runs.state_of(ended, pid, boot, lambda number: processes.get(number, ("", 0)))
    assert found["state"] == state
    assert (found["exit_code"] is None) == (state != "exited")


def test_a_record_that_is_only_half_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "exit").write_bytes(b'{"code":3,"en')
    assert runs._record(str(tmp_path / "exit")) is None


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
def test_a_damaged_run_holds_up_neither_the_list_nor_gpus(
    tmp_path: Path, meta: str, pid: str, ended: str, state: str | None
) -> None:
    folder = tmp_path / ".grid" / "runs" / "r-damaged"
    folder.mkdir(parents=True)
    for name, text in (("meta.json", meta), ("pid", pid), ("exit", ended)):
        (folder / name).write_text(text)
    found = runs.list_runs({"root": str(tmp_path)}, b"")["runs"]
    assert [(one["id"], one["state"]) for one in found] == ([("r-damaged", state)] if state else [])
    assert runs._held(str(folder.parent)) == {}


@pytest.mark.parametrize(("length", "shown"), [(400, "c" * 400), (401, "c" * 400 + " ...")])
def test_a_command_that_is_not_listed_whole_says_so(tmp_path: Path, length: int, shown: str) -> None:
    folder = tmp_path / ".grid" / "runs" / "r-long"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(META.replace('"c"', f'"{"c" * length}"'))
    (found,) = runs.list_runs({"root": str(tmp_path)}, b"")["runs"]
    assert found["command"] == shown


def test_variables_of_the_user_have_the_last_word(tmp_path: Path) -> None:
    args = {
        "id": "r-a",
        "root": str(tmp_path),
        "gpu_env": {"CUDA_VISIBLE_DEVICES": "1"},
        "env": {"PATH": "/mine"},
    }
    env = runs.environment({"PATH": "/bin", "HOME": "/root"}, args)
    assert env == {
        "PATH": "/mine",
        "HOME": "/root",
        "GRID_RUN_ID": "r-a",
        "GRID_ROOT": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "1",
    }


def test_what_is_sent_to_nodes_is_python_3_8() -> None:
    for path in importlib.resources.files("genie.grid.remote").iterdir():
        if path.name.endswith(".py"):
            ast.parse(path.read_text(), feature_version=(3, 8))
