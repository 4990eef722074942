"""Runs on a node: commands that continue without a connection, their output and their exit status.

Each run has a directory below `<remote_root>/.grid/runs`, named by the ID from the client: meta.json
describes it, `out` and `err` contain its output, `pid` and `exit` are fixed-size records that are allocated
beforehand, so that a full disk cannot lose them. A supervisor, detached from the connection, renames the
prepared directory to its final name, which succeeds only once: a run that is requested twice starts once. It
starts the command like `ssh HOST COMMAND`, with the user's shell, in a new session.

Runs on nodes: standard library only, Python 3.8. Does not handle nodes without Python (runs/shell_runs.py) or
choose GPUs (gpu_runs.py).
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from typing import Any, NoReturn

from genie.grid.remote import core
from genie.grid.remote.core import OpArgs, OpError, OpReply, register_op
from genie.grid.remote.own_folder import grid_folder_path

ENDED_RUNS_KEPT = 200
"""Number of ended runs that a node keeps. Older ones are removed when a new run starts."""
OUTPUT_CHUNK_BYTES = 256 << 10
TIMEOUT_EXIT_CODE = 124
CANNOT_START_EXIT_CODE = 126
_EXCESS_RUNS_BEFORE_CLEANUP = 32
_RUN_RECORD_BYTES = 512
_UNIX_TIME_S_MAX = 1e11
_METADATA_FILE_BYTES_MAX = 1 << 20
_RUNS_LISTED_MAX = 1000
_COMMAND_CHARS_LISTED_MAX = 400
_OUTPUT_WAIT_S_MAX = 30.0
_SUPERVISOR_START_TIMEOUT_S = 10.0
_SHORT_RUN_WAIT_S_MAX = 1.0
_SHORT_RUN_POLL_INTERVAL_S = 0.0005
_RUNS_LOCK_TIMEOUT_S = 20.0
_TIMEOUT_KILL_GRACE_S = 10.0
_LEFTOVER_FOLDER_AGE_S_MIN = 3600.0
_POLL_INTERVAL_S_MAX = 0.1
_RUN_ID_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_RUN_FILE_NAMES = ("meta.json", "out", "err", "in", "pid", "exit")


# --- ops --------------------------------------------------------------------------------------


@register_op("runs.start")
def start_without_gpus(args: OpArgs, blob: bytes) -> OpReply:
    return start_run(args, blob)


def start_run(args: OpArgs, blob: bytes, take_gpus: Any = None) -> OpReply:
    """Start a run unless its ID exists already; return its status.

    `take_gpus` gets the held GPUs (run ID by GPU index) and returns GPU indexes and environment variables.
    For a run that ends within quick_s, `first` is the result of runs.read, which saves a round trip.
    """
    found = _start_unless_exists(args, blob, take_gpus)
    folder = _run_folder(args)
    deadline = time.monotonic() + min(float(args.get("quick_s") or 0), _SHORT_RUN_WAIT_S_MAX)
    while _read_run_record(os.path.join(folder, "exit"), ("code", "ended")) is None:
        if time.monotonic() >= deadline:
            return found
        time.sleep(_SHORT_RUN_POLL_INTERVAL_S)
    first, output = read_output({"root": args["root"], "id": args["id"], "out": 0, "err": 0}, b"")
    return (dict(found, **_read_run_state(folder), first=first), output) if first["end"] else found


def _start_unless_exists(args: OpArgs, blob: bytes, take_gpus: Any) -> OpArgs:
    folder = _run_folder(args)
    if os.path.isdir(folder):
        return dict(_read_run_status(folder), created=False)
    runs = os.path.dirname(folder)
    root = os.path.dirname(os.path.dirname(runs))
    try:
        os.makedirs(runs, 0o700, exist_ok=True)
        _remove_old_runs(runs)
    except OSError as error:
        raise _os_error_with_path(error, runs) from None
    cwd = os.path.join(root, os.path.expanduser(args.get("cwd") or ""))
    if not os.path.isdir(cwd):
        raise OpError("there is no directory " + cwd, reason="missing")
    if take_gpus is None:
        return _create_and_launch_run(folder, dict(args, cwd=cwd, root=root, gpu_env={}), [], blob)
    lock = _acquire_runs_lock(runs)
    try:
        if os.path.isdir(folder):  # a concurrent request started this run, which now holds its GPUs
            return dict(_read_run_status(folder), created=False)
        gpus, env = take_gpus(_run_id_by_held_gpu(runs))
        return _create_and_launch_run(folder, dict(args, cwd=cwd, root=root, gpu_env=env), gpus, blob)
    finally:
        os.close(lock)


@register_op("runs.status")
def read_status(args: OpArgs, blob: bytes) -> OpReply:
    return _read_run_status(_run_folder(args))


@register_op("runs.read")
def read_output(args: OpArgs, blob: bytes) -> OpReply:
    """Return output from the offsets `out` and `err`; wait up to wait_s for output or the end."""
    folder = _run_folder(args)
    deadline = time.monotonic() + min(float(args.get("wait_s", 0)), _OUTPUT_WAIT_S_MAX)
    pause_s = 0.001
    while True:
        found = _read_run_state(folder)  # before the output: an ended run has written everything
        ended = found["state"] in ("exited", "lost")
        out = _read_output_chunk(os.path.join(folder, "out"), int(args["out"]))
        err = _read_output_chunk(os.path.join(folder, "err"), int(args["err"]))
        if out or err or ended or time.monotonic() >= deadline:
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.25, _POLL_INTERVAL_S_MAX)
    end = ended and len(out) < OUTPUT_CHUNK_BYTES and len(err) < OUTPUT_CHUNK_BYTES
    return dict(found, out=len(out), err=len(err), end=end), out + err


@register_op("runs.signal")
def send_signal(args: OpArgs, blob: bytes) -> OpReply:
    """Send a signal to the run's process group, if it still belongs to the run."""
    folder = _run_folder(args)
    number = getattr(signal, "SIG" + str(args["signal"]), None)
    if not isinstance(number, signal.Signals):
        raise OpError("unknown signal " + str(args["signal"]), reason="usage")
    pid = _read_run_record(os.path.join(folder, "pid")) or {}
    found = _read_run_state(folder)
    sent = found["state"] == "running" and is_recorded_process_alive(
        pid, "pid", _read_boot_id(), _read_process_state_and_start_ticks
    )
    if sent:
        try:
            os.killpg(pid["pid"], number)
        except ProcessLookupError:
            sent = False
    return dict(found, sent=sent)


@register_op("runs.list")
def list_runs(args: OpArgs, blob: bytes) -> OpReply:
    """Return runs whose ID starts with `prefix`, newest first."""
    runs = _runs_folder(args)
    found = []
    for name in _list_run_ids(runs):
        if name.startswith(str(args.get("prefix", ""))):
            try:
                one = _read_run_status(os.path.join(runs, name))
            except OpError:
                continue  # removed meanwhile, or not a run
            if len(one["command"]) > _COMMAND_CHARS_LISTED_MAX:
                one["command"] = one["command"][:_COMMAND_CHARS_LISTED_MAX] + " ..."
            found.append(one)
    found.sort(key=lambda one: -one["started"])
    return {"runs": found[:_RUNS_LISTED_MAX], "more": len(found) > _RUNS_LISTED_MAX}


@register_op("runs.remove")
def remove_run(args: OpArgs, blob: bytes) -> OpReply:
    folder = _run_folder(args)
    if _read_run_state(folder)["state"] in ("running", "starting"):
        raise OpError(f"run {args['id']} is still running", reason="running")
    _remove_run_folder(folder)
    return {}


# --- starting -----------------------------------------------------------------------------------


def _create_and_launch_run(folder: str, args: OpArgs, gpus: Any, blob: bytes) -> OpArgs:
    new = f"{os.path.dirname(folder)}/.new-{args['id']}-{os.getpid()}-{time.monotonic_ns()}"
    try:
        _write_run_files(new, args, gpus, blob)
    except OSError as error:
        _remove_run_files(new)
        raise _os_error_with_path(error, new) from None
    keys = ("command", "env", "gpu_env", "cwd", "root", "id", "timeout_s")
    passed = {key: args.get(key) for key in keys}
    watcher = core.FORK_SERVER.spawn(__name__, "supervise_run", dict(passed, new=new, folder=folder))
    deadline = time.monotonic() + _SUPERVISOR_START_TIMEOUT_S
    pause_s = _SHORT_RUN_POLL_INTERVAL_S
    while time.monotonic() < deadline:
        exited = _read_process_state_and_start_ticks(watcher)[0] in (
            "",
            "Z",
            "X",
        )  # checked before the records that it writes
        pid = _read_run_record(os.path.join(folder, "pid")) or {}
        if exited or "pid" in pid or _read_run_record(os.path.join(folder, "exit")):
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02)
    if not os.path.isdir(folder):
        _remove_run_folder(new)  # the supervisor cannot start after this, unless it just has
        if not os.path.isdir(folder):
            raise OpError("the supervisor of the run did not start", reason="start")
    return dict(_read_run_status(folder), created=True)


def _write_run_files(new: str, args: OpArgs, gpus: Any, blob: bytes) -> None:
    os.mkdir(new, 0o700)
    meta = {
        "id": args["id"],
        "command": args["command"],
        "cwd": args["cwd"],
        "env": sorted(args.get("env") or {}),
        "who": args.get("who", ""),
        "gpus": gpus,
        "started": time.time(),
        "timeout_s": args.get("timeout_s"),
    }
    contents = {
        "meta.json": json.dumps(meta).encode(),
        "out": b"",
        "err": b"",
        "pid": b" " * _RUN_RECORD_BYTES,
        "exit": b" " * _RUN_RECORD_BYTES,
    }
    if blob:
        contents["in"] = blob
    for name, data in contents.items():
        with open(os.path.join(new, name), "xb", buffering=0, opener=_open_with_private_mode) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0 :]


def _open_with_private_mode(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remove_old_runs(runs: str) -> None:
    """Remove the oldest ended runs beyond ENDED_RUNS_KEPT, and leftovers of interrupted starts."""
    found = os.listdir(runs)
    for path in [os.path.join(runs, name) for name in found if name.startswith((".new-", ".old-"))]:
        if time.time() - _modification_time_or_now(path) > _LEFTOVER_FOLDER_AGE_S_MIN:
            _remove_run_files(path)
    names = [name for name in found if _RUN_ID_PATTERN.fullmatch(name)]
    if len(names) <= ENDED_RUNS_KEPT + _EXCESS_RUNS_BEFORE_CLEANUP:
        return
    ended = []
    for name in names:
        folder = os.path.join(runs, name)
        try:
            found = _read_run_state(folder)
        except OpError:
            continue  # removed by another process
        if found["state"] in ("exited", "lost"):
            ended.append((found["ended"] or _modification_time_or_now(folder), folder))
    for _, folder in sorted(ended)[: max(0, len(ended) - ENDED_RUNS_KEPT)]:
        _remove_run_folder(folder)


def _modification_time_or_now(path: str) -> float:
    """Return the modification time; the current time if the path no longer exists."""
    try:
        return os.lstat(path).st_mtime
    except FileNotFoundError:
        return time.time()


# --- the supervisor, a separate process -----------------------------------------------------------


def supervise_run(args: OpArgs) -> None:
    new, folder = args["new"], args["folder"]
    out = os.open(os.path.join(new, "out"), os.O_WRONLY | os.O_APPEND)
    err = os.open(os.path.join(new, "err"), os.O_WRONLY | os.O_APPEND)
    pid_file = os.open(os.path.join(new, "pid"), os.O_WRONLY)
    exit_file = os.open(os.path.join(new, "exit"), os.O_WRONLY)
    source = _open_and_unlink_stdin_file(new)
    pid = {
        "boot": _read_boot_id(),
        "watcher": os.getpid(),
        "watcher_start": _read_process_state_and_start_ticks(os.getpid())[1],
    }
    _write_run_record(pid_file, pid)
    try:
        os.rename(new, folder)
    except OSError:  # the ID exists: the run was requested twice
        _remove_run_folder(new)
        return
    try:
        ended = _run_command_and_get_exit_record(args, pid, pid_file, (source, out, err))
    except OSError as error:
        ended = {"code": CANNOT_START_EXIT_CODE, "error": error.strerror or str(error)}
    _write_run_record(exit_file, dict(ended, ended=time.time()))
    os.fsync(exit_file)


def _open_and_unlink_stdin_file(new: str) -> int:
    """Open the command's standard input and unlink its file."""
    try:
        source = os.open(os.path.join(new, "in"), os.O_RDONLY)
    except FileNotFoundError:
        return os.open(os.devnull, os.O_RDONLY)
    os.unlink(os.path.join(new, "in"))
    return source


def _run_command_and_get_exit_record(args: OpArgs, pid: OpArgs, pid_file: int, streams: Any) -> OpArgs:
    ready, go = os.pipe()
    group_ready, announce = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(group_ready)
        os.close(go)
        _exec_command(args, ready, announce, streams)
    for number in (ready, announce, *streams):
        os.close(number)
    # The PID is recorded when the child leads its process group, so that no signal misses it, and the
    # command starts only after that.
    os.read(group_ready, 1)
    os.close(group_ready)
    _write_run_record(pid_file, dict(pid, pid=child, pid_start=_read_process_state_and_start_ticks(child)[1]))
    try:
        os.write(go, b"1")
    except BrokenPipeError:
        pass  # a signal has ended the child already
    os.close(go)
    code, timed_out = _wait_for_child_status_and_timeout(child, args.get("timeout_s"))
    if os.WIFSIGNALED(code):
        return {"signal": os.WTERMSIG(code), "code": 128 + os.WTERMSIG(code), "timed_out": timed_out}
    return {"code": os.WEXITSTATUS(code), "timed_out": timed_out}


def _exec_command(args: OpArgs, ready: int, announce: int, streams: Any) -> NoReturn:
    try:
        os.setsid()
        # Python handles or ignores these signals, and exec would keep what is ignored.
        for each in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(each, signal.SIG_DFL)
        os.write(announce, b"1")
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        if not os.read(ready, 1):
            os._exit(CANNOT_START_EXIT_CODE)
        os.chdir(args["cwd"])
        shell = os.environ.get("SHELL") or "/bin/sh"
        os.execve(shell, [shell, "-c", args["command"]], make_command_environment(os.environ, args))  # noqa: S606
    except OSError as error:
        os.write(2, f"could not start the command: {error.strerror}: {error.filename}\n".encode())
    finally:
        os._exit(CANNOT_START_EXIT_CODE)


def make_command_environment(own: Any, args: OpArgs) -> OpArgs:
    """Return the command's environment: the login's, grid_env if it exists, GPUs, and --env."""
    env = dict(own, GRID_RUN_ID=args["id"], GRID_ROOT=args["root"])
    venv = os.path.join(args["root"], "grid_env")
    if os.path.exists(os.path.join(venv, "bin", "python")):
        env.update(VIRTUAL_ENV=venv, PATH=os.path.join(venv, "bin") + ":" + env.get("PATH", os.defpath))
    env.update(args.get("gpu_env") or {})
    env.update(args.get("env") or {})
    return env


def _wait_for_child_status_and_timeout(child: int, timeout_s: Any) -> tuple[int, bool]:
    if not timeout_s:
        return os.waitpid(child, 0)[1], False
    deadline = time.monotonic() + float(timeout_s)
    kills = [(deadline + _TIMEOUT_KILL_GRACE_S, signal.SIGKILL), (deadline, signal.SIGTERM)]
    pause_s = 0.002
    while True:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            return code, len(kills) < 2
        if kills and time.monotonic() >= kills[-1][0]:
            os.killpg(child, kills.pop()[1])
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_INTERVAL_S_MAX)


# --- status -----------------------------------------------------------------------------------


def _read_run_status(folder: str) -> OpArgs:
    try:
        with open(os.path.join(folder, "meta.json"), "rb") as file:
            meta = json.loads(file.read(_METADATA_FILE_BYTES_MAX).decode())
    except FileNotFoundError:
        raise OpError("no run has the ID " + os.path.basename(folder), reason="missing") from None
    except (OSError, ValueError, RecursionError):
        meta = None
    if not is_valid_metadata(meta):
        raise OpError(folder + "/meta.json is damaged", reason="damaged")
    return dict(meta, id=os.path.basename(folder), **_read_run_state(folder))


def is_valid_metadata(meta: Any) -> bool:
    """True for valid metadata. A power cut may leave an empty file."""
    return (
        isinstance(meta, dict)
        and isinstance(meta.get("command"), str)
        and isinstance(meta.get("started"), (int, float))
        and 0 <= meta["started"] <= _UNIX_TIME_S_MAX
        and isinstance(meta.get("gpus"), list)
        and all(isinstance(gpu, int) for gpu in meta["gpus"])
    )


def _read_run_state(folder: str) -> OpArgs:
    found: OpArgs = {}
    for _ in range(2):  # the run may end between reading the two records
        ended = _read_run_record(os.path.join(folder, "exit"), ("code", "ended"))
        pid = _read_run_record(os.path.join(folder, "pid"), ("boot", "watcher"))
        if pid is None and not os.path.isdir(folder):
            raise OpError("no run has the ID " + os.path.basename(folder), reason="missing")
        found = run_state_from_records(ended, pid or {}, _read_boot_id(), _read_process_state_and_start_ticks)
        if found["state"] != "lost":
            break
    return found


def run_state_from_records(ended: Any, pid: OpArgs, boot: str, read_process: Any) -> OpArgs:
    """Return the state of a run from its records. `read_process` returns a process's state and start time.

    A run is lost if it ended without an exit record, because the node or its supervisor was killed.
    """
    found: OpArgs = {"state": "lost", "exit_code": None, "signal": None, "ended": None, "error": ""}
    if ended is not None:
        code = TIMEOUT_EXIT_CODE if ended.get("timed_out") else ended["code"]
        found.update(state="exited", exit_code=code, ended=ended["ended"])
        found.update(signal=ended.get("signal"), error=ended.get("error", ""))
    elif is_recorded_process_alive(pid, "pid", boot, read_process) or is_recorded_process_alive(
        pid, "watcher", boot, read_process
    ):
        found["state"] = "running" if "pid" in pid else "starting"
    return found


def is_recorded_process_alive(pid: OpArgs, process: str, boot: str, read_process: Any) -> bool:
    """True if the recorded process is alive, and not another one with the same PID."""
    if process not in pid or pid["boot"] != boot:
        return False
    state, start = read_process(pid[process])
    return state not in ("", "Z", "X") and start == pid.get(process + "_start")


def _read_process_state_and_start_ticks(pid: int) -> tuple[str, int]:
    """Return the state letter of a process ('' if it does not exist) and its start in ticks since boot."""
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def _read_boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(64).strip()
    except OSError:
        return ""


def _read_run_record(path: str, needed: tuple[str, ...] = ()) -> Any:
    """Return a record; None if it is empty or invalid."""
    try:
        with open(path, "rb") as file:
            text = file.read(_RUN_RECORD_BYTES).strip()
        found = json.loads(text.decode()) if text else None
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) and all(key in found for key in needed) else None


def _write_run_record(file: int, record: OpArgs) -> None:
    """Overwrite the allocated record in one write, which needs no disk space."""
    text = json.dumps(record, separators=(",", ":")).encode()[:_RUN_RECORD_BYTES]
    os.pwrite(file, text.ljust(_RUN_RECORD_BYTES), 0)


def _read_output_chunk(path: str, offset: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), OUTPUT_CHUNK_BYTES, max(0, offset))


# --- folders ------------------------------------------------------------------------------------


def _runs_folder(args: OpArgs) -> str:
    root = os.path.expanduser(str(args["root"]))
    if not os.path.isabs(root) or ".." in root.split("/"):
        raise OpError("remote_root must be an absolute path: " + root, reason="usage")
    return grid_folder_path(root, "runs")


def _run_folder(args: OpArgs) -> str:
    if not _RUN_ID_PATTERN.fullmatch(str(args["id"])):
        raise OpError(f"invalid run ID {str(args['id'])[:80]!r}", reason="usage")
    return os.path.join(_runs_folder(args), str(args["id"]))


def _list_run_ids(runs: str) -> list[str]:
    try:
        return [name for name in os.listdir(runs) if _RUN_ID_PATTERN.fullmatch(name)]
    except FileNotFoundError:
        return []


def _remove_run_folder(folder: str) -> None:
    """Rename the directory before removing it, so that a partial one does not look like a run."""
    old = f"{os.path.dirname(folder)}/.old-{os.getpid()}-{time.monotonic_ns()}"
    try:
        os.rename(folder, old)
    except FileNotFoundError:
        return
    _remove_run_files(old)


def _remove_run_files(folder: str) -> None:
    for name in _RUN_FILE_NAMES:
        try:
            os.unlink(os.path.join(folder, name))
        except OSError:
            pass
    try:
        os.rmdir(folder)
    except OSError:
        pass


def _os_error_with_path(error: OSError, path: str) -> OSError:
    return OSError(error.errno, error.strerror or str(error), error.filename or path)


def _acquire_runs_lock(runs: str) -> int:
    import fcntl

    file = os.open(os.path.join(runs, ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + _RUNS_LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                os.close(file)
                raise OpError("timed out waiting for other GPU runs to start", reason="busy") from None
        time.sleep(0.01)


def _run_id_by_held_gpu(runs: str) -> OpArgs:
    """Return the run ID by held GPU. The caller holds the lock until the new run has its directory."""
    held = {}
    for name in _list_run_ids(runs):
        try:
            found = _read_run_status(os.path.join(runs, name))
        except OpError:
            continue  # removed or damaged; GPUs still in use show up in the readings
        if found["state"] in ("running", "starting"):
            held.update(dict.fromkeys(found["gpus"], name))
    return held
