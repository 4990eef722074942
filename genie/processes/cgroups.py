"""Control groups (cgroups, version 1 and 2) that contain all processes of a job.

A process inherits the group of its parent and cannot leave it by forking, by changing its environment or by
outliving its parent; it can leave it only where it may write to another group. No resources are limited here.

Standard library only, and importable as a file: see process_table.py.
"""

from __future__ import annotations

import importlib
import os
import signal

if __package__:
    from genie.processes import process_table
else:
    process_table = importlib.import_module("process_table")

_CGROUP_V1_HIERARCHIES = ("freezer", "pids", "cpuacct", "name=systemd")
"""Hierarchies in which a new group needs no settings, preferred first."""
_PROBE_GROUP = "probe"
_CREATE_ATTEMPTS_MAX = 5
_NESTED_GROUPS_DEPTH_MAX = 32


def own_control_groups(root: str = "/") -> list[str]:
    """Directories of the groups of this process, preferred first: version 2, then version 1."""
    own: dict[str, str] = {}
    for line in _read_text_or_empty(os.path.join(root, "proc/self/cgroup")).splitlines():  # noqa: PTH118
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    mounts = _mounted_hierarchies(root)
    found = []
    for hierarchy in ("", *_CGROUP_V1_HIERARCHIES):
        if hierarchy in own and hierarchy in mounts:
            top, point = mounts[hierarchy]
            path = own[hierarchy]
            if "/.." not in path and os.path.commonpath([top, path]) == top:  # else it is not visible here
                below = os.path.relpath(path, top)
                found.append(os.path.normpath(os.path.join(root, point.lstrip("/"), below)))  # noqa: PTH118
    return found


def find_usable(name: str, parents: list[str]) -> str | None:
    """The path of a group of this name below the first parent where this process may create groups, and
    move processes into them; None if there is none. It does not exist until `create`."""
    for parent in parents:
        path = os.path.join(parent, name)  # noqa: PTH118 - fast start
        if _can_create_and_enter(os.path.join(path, _PROBE_GROUP)):  # noqa: PTH118
            return path
    return None


def create(path: str) -> None:
    """Creates the group and its parent. Raises OSError."""
    for _ in range(_CREATE_ATTEMPTS_MAX):
        try:
            os.makedirs(path, exist_ok=True)  # noqa: PTH103
        except FileNotFoundError:
            continue  # another process has just removed the empty parent
        return
    os.mkdir(path)  # noqa: PTH102


def enter(path: str) -> None:
    """Moves this process into the group. Raises OSError."""
    _write_group_file(path, "cgroup.procs", "0")


def children(path: str) -> list[str]:
    """Paths of the groups directly below this one; empty if it does not exist."""
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def processes(path: str) -> dict[int, str]:
    """The processes of the group and of those below it, with their start marks; without zombies."""
    marks = {pid: process_table.start_mark(pid) for pid in _read_pids_in_subtree(path)}
    # A process that ended in between has no mark, or its ID is that of a process elsewhere.
    members = _read_pids_in_subtree(path) if marks else set()
    return {
        pid: mark for pid, mark in marks.items() if mark and pid in members and process_table.is_running(pid)
    }


def kill(path: str) -> None:
    """Sends SIGKILL to all processes of the group and of those below it. Repeat it until there are none."""
    if _try_write_group_file(path, "cgroup.kill", "1"):
        return
    freezes = _try_freeze(path)
    try:
        for number in (signal.SIGKILL,) if freezes else (signal.SIGSTOP, signal.SIGKILL):
            for pid, mark in processes(path).items():
                process_table.send_signal(pid, mark, number)
    finally:
        for group in _list_group_and_descendants(path):
            _try_thaw(group)


def remove(path: str) -> bool:
    """Removes the group and those below it, and its parent if that is empty. Returns False if one of them
    has processes."""
    for group in reversed(_list_group_and_descendants(path)):
        try:
            os.rmdir(group)  # noqa: PTH106
        except FileNotFoundError:
            pass
        except OSError:
            return False
    try:
        os.rmdir(os.path.dirname(path))  # noqa: PTH106, PTH120
    except OSError:
        pass  # it has other groups
    return True


def _mounted_hierarchies(root: str) -> dict[str, tuple[str, str]]:
    """Mounted subtree and mount point by controller; '' is version 2."""
    found: dict[str, tuple[str, str]] = {}
    for line in _read_text_or_empty(os.path.join(root, "proc/self/mountinfo")).splitlines():  # noqa: PTH118
        before, _, after = line.partition(" - ")
        top, point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("", (top, point))
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, (top, point))
    return found


def _can_create_and_enter(path: str) -> bool:
    """Whether a process can be moved into a group that is created here."""
    import subprocess  # imported here: the shim does not need it for this module

    try:
        create(path)
        if not os.path.exists(os.path.join(path, "cgroup.procs")):  # noqa: PTH110, PTH118
            return False
        probe = subprocess.run(
            ["/bin/sh", "-c", 'echo 0 > "$1"/cgroup.procs', "sh", path],
            capture_output=True,
            check=False,
            timeout=10,
        )
        return probe.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        remove(path)


def _read_pids_in_subtree(path: str) -> set[int]:
    found = set()
    for group in _list_group_and_descendants(path):
        for word in _read_text_or_empty(os.path.join(group, "cgroup.procs")).split():  # noqa: PTH118
            if word.isdigit() and word != "0":  # 0: a process of another PID namespace
                found.add(int(word))
    return found


def _list_group_and_descendants(path: str, depth: int = 0) -> list[str]:
    """The group and all below it, each before those below it."""
    found = [path]
    if depth < _NESTED_GROUPS_DEPTH_MAX:
        for child in children(path):
            found += _list_group_and_descendants(child, depth + 1)
    return found


def _try_freeze(path: str) -> bool:
    return _try_write_group_file(path, "cgroup.freeze", "1") or _try_write_group_file(
        path, "freezer.state", "FROZEN"
    )


def _try_thaw(path: str) -> None:
    if not _try_write_group_file(path, "cgroup.freeze", "0"):
        _try_write_group_file(path, "freezer.state", "THAWED")


def _try_write_group_file(path: str, name: str, text: str) -> bool:
    try:
        _write_group_file(path, name, text)
    except OSError:
        return False
    return True


def _write_group_file(path: str, name: str, text: str) -> None:
    fd = os.open(os.path.join(path, name), os.O_WRONLY | os.O_CLOEXEC)  # noqa: PTH118
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read_text_or_empty(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - fast start
            return file.read()
    except OSError:
        return ""
