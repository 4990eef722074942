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
from genie.grid.remote.core import Answer, Args, OpError, op
from genie.grid.remote.own_folder import own_folder

RUNS_KEPT = 200
"""Number of ended runs that a node keeps. Older ones are removed when a new run starts."""
CHUNK_BYTES = 256 << 10
TIMED_OUT = 124
CANNOT_START = 126
_PRUNE_EVERY = 32
_RECORD_BYTES = 512
_TIME_S_MAX = 1e11
_META_BYTES_MAX = 1 << 20
_LISTED_MAX = 1000
_COMMAND_SHOWN = 400
_WAIT_S_MAX = 30.0
_BEGIN_S_MAX = 10.0
_QUICK_S_MAX = 1.0
_QUICK_PAUSE_S = 0.0005
_LOCK_S_MAX = 20.0
_GRACE_S = 10.0
_STALE_S = 3600.0
_PAUSE_S_MAX = 0.1
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_FILES = ("meta.json", "out", "err", "in", "pid", "exit")


# --- ops --------------------------------------------------------------------------------------


@op("runs.start")
def start(args: Args, blob: bytes) -> Answer:
    return start_run(args, blob)


def start_run(args: Args, blob: bytes, take_gpus: Any = None) -> Answer:
    """Start a run unless its ID exists already; return its status.

    `take_gpus` gets the held GPUs (run ID by GPU index) and returns GPU indexes and environment variables.
    For a run that ends within quick_s, `first` is the result of runs.read, which saves a round trip.
    """
    found = _start_once(args, blob, take_gpus)
    folder = _folder(args)
    deadline = time.monotonic() + min(float(args.get("quick_s") or 0), _QUICK_S_MAX)
    while _record(os.path.join(folder, "exit"), ("code", "ended")) is None:
        if time.monotonic() >= deadline:
            return found
        time.sleep(_QUICK_PAUSE_S)
    first, output = read({"root": args["root"], "id": args["id"], "out": 0, "err": 0}, b"")
    return (dict(found, **_state(folder), first=first), output) if first["end"] else found


def _start_once(args: Args, blob: bytes, take_gpus: Any) -> Args:
    folder = _folder(args)
    if os.path.isdir(folder):
        return dict(_status(folder), created=False)
    runs = os.path.dirname(folder)
    root = os.path.dirname(os.path.dirname(runs))
    try:
        os.makedirs(runs, 0o700, exist_ok=True)
        _prune(runs)
    except OSError as error:
        raise _with_path(error, runs) from None
    cwd = os.path.join(root, os.path.expanduser(args.get("cwd") or ""))
    if not os.path.isdir(cwd):
        raise OpError("missing", "there is no folder " + cwd)
    if take_gpus is None:
        return _begin(folder, dict(args, cwd=cwd, root=root, gpu_env={}), [], blob)
    lock = _lock(runs)
    try:
        if os.path.isdir(folder):  # a concurrent request started this run, which now holds its GPUs
            return dict(_status(folder), created=False)
        gpus, env = take_gpus(_held_gpus(runs))
        return _begin(folder, dict(args, cwd=cwd, root=root, gpu_env=env), gpus, blob)
    finally:
        os.close(lock)


@op("runs.status")
def status(args: Args, blob: bytes) -> Answer:
    return _status(_folder(args))


@op("runs.read")
def read(args: Args, blob: bytes) -> Answer:
    """Return output from the offsets `out` and `err`; wait up to wait_s for output or the end."""
    folder = _folder(args)
    deadline = time.monotonic() + min(float(args.get("wait_s", 0)), _WAIT_S_MAX)
    pause_s = 0.001
    while True:
        found = _state(folder)  # before the output: an ended run has written everything
        ended = found["state"] in ("exited", "lost")
        out = _chunk(os.path.join(folder, "out"), int(args["out"]))
        err = _chunk(os.path.join(folder, "err"), int(args["err"]))
        if out or err or ended or time.monotonic() >= deadline:
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.25, _PAUSE_S_MAX)
    end = ended and len(out) < CHUNK_BYTES and len(err) < CHUNK_BYTES
    return dict(found, out=len(out), err=len(err), end=end), out + err


@op("runs.signal")
def send_signal(args: Args, blob: bytes) -> Answer:
    """Send a signal to the run's process group, if it still belongs to the run."""
    folder = _folder(args)
    number = getattr(signal, "SIG" + str(args["signal"]), None)
    if not isinstance(number, signal.Signals):
        raise OpError("usage", "unknown signal " + str(args["signal"]))
    pid = _record(os.path.join(folder, "pid")) or {}
    found = _state(folder)
    sent = found["state"] == "running" and is_alive(pid, "pid", _boot(), _process)
    if sent:
        try:
            os.killpg(pid["pid"], number)
        except ProcessLookupError:
            sent = False
    return dict(found, sent=sent)


@op("runs.list")
def list_runs(args: Args, blob: bytes) -> Answer:
    """Return runs whose ID starts with `prefix`, newest first."""
    runs = _runs(args)
    found = []
    for name in _names(runs):
        if name.startswith(str(args.get("prefix", ""))):
            try:
                one = _status(os.path.join(runs, name))
            except OpError:
                continue  # removed meanwhile, or not a run
            if len(one["command"]) > _COMMAND_SHOWN:
                one["command"] = one["command"][:_COMMAND_SHOWN] + " ..."
            found.append(one)
    found.sort(key=lambda one: -one["started"])
    return {"runs": found[:_LISTED_MAX], "more": len(found) > _LISTED_MAX}


@op("runs.remove")
def remove(args: Args, blob: bytes) -> Answer:
    folder = _folder(args)
    if _state(folder)["state"] in ("running", "starting"):
        raise OpError("running", f"run {args['id']} is still running")
    _remove(folder)
    return {}


# --- starting -----------------------------------------------------------------------------------


def _begin(folder: str, args: Args, gpus: Any, blob: bytes) -> Args:
    new = f"{os.path.dirname(folder)}/.new-{args['id']}-{os.getpid()}-{time.monotonic_ns()}"
    try:
        _prepare(new, args, gpus, blob)
    except OSError as error:
        _remove_files(new)
        raise _with_path(error, new) from None
    keys = ("command", "env", "gpu_env", "cwd", "root", "id", "timeout_s")
    passed = {key: args.get(key) for key in keys}
    watcher = core.SPAWNER.spawn(__name__, "supervise", dict(passed, new=new, folder=folder))
    deadline = time.monotonic() + _BEGIN_S_MAX
    pause_s = _QUICK_PAUSE_S
    while time.monotonic() < deadline:
        exited = _process(watcher)[0] in ("", "Z", "X")  # checked before the records that it writes
        pid = _record(os.path.join(folder, "pid")) or {}
        if exited or "pid" in pid or _record(os.path.join(folder, "exit")):
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02)
    if not os.path.isdir(folder):
        _remove(new)  # the supervisor cannot start after this, unless it just has
        if not os.path.isdir(folder):
            raise OpError("start", "the supervisor of the run did not start")
    return dict(_status(folder), created=True)


def _prepare(new: str, args: Args, gpus: Any, blob: bytes) -> None:
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
        "pid": b" " * _RECORD_BYTES,
        "exit": b" " * _RECORD_BYTES,
    }
    if blob:
        contents["in"] = blob
    for name, data in contents.items():
        with open(os.path.join(new, name), "xb", buffering=0, opener=_private) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0 :]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _prune(runs: str) -> None:
    """Remove the oldest ended runs beyond RUNS_KEPT, and leftovers of interrupted starts."""
    found = os.listdir(runs)
    for path in [os.path.join(runs, name) for name in found if name.startswith((".new-", ".old-"))]:
        if time.time() - _modified_at(path) > _STALE_S:
            _remove_files(path)
    names = [name for name in found if _ID.fullmatch(name)]
    if len(names) <= RUNS_KEPT + _PRUNE_EVERY:
        return
    ended = []
    for name in names:
        folder = os.path.join(runs, name)
        try:
            found = _state(folder)
        except OpError:
            continue  # removed by another process
        if found["state"] in ("exited", "lost"):
            ended.append((found["ended"] or _modified_at(folder), folder))
    for _, folder in sorted(ended)[: max(0, len(ended) - RUNS_KEPT)]:
        _remove(folder)


def _modified_at(path: str) -> float:
    """Return the modification time; the current time if the path no longer exists."""
    try:
        return os.lstat(path).st_mtime
    except FileNotFoundError:
        return time.time()


# --- the supervisor, a separate process -----------------------------------------------------------


def supervise(args: Args) -> None:
    new, folder = args["new"], args["folder"]
    out = os.open(os.path.join(new, "out"), os.O_WRONLY | os.O_APPEND)
    err = os.open(os.path.join(new, "err"), os.O_WRONLY | os.O_APPEND)
    pid_file = os.open(os.path.join(new, "pid"), os.O_WRONLY)
    exit_file = os.open(os.path.join(new, "exit"), os.O_WRONLY)
    source = _open_stdin(new)
    pid = {"boot": _boot(), "watcher": os.getpid(), "watcher_start": _process(os.getpid())[1]}
    _write_record(pid_file, pid)
    try:
        os.rename(new, folder)
    except OSError:  # the ID exists: the run was requested twice
        _remove(new)
        return
    try:
        ended = _run(args, pid, pid_file, (source, out, err))
    except OSError as error:
        ended = {"code": CANNOT_START, "error": error.strerror or str(error)}
    _write_record(exit_file, dict(ended, ended=time.time()))
    os.fsync(exit_file)


def _open_stdin(new: str) -> int:
    """Open the command's standard input and unlink its file."""
    try:
        source = os.open(os.path.join(new, "in"), os.O_RDONLY)
    except FileNotFoundError:
        return os.open(os.devnull, os.O_RDONLY)
    os.unlink(os.path.join(new, "in"))
    return source


def _run(args: Args, pid: Args, pid_file: int, streams: Any) -> Args:
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
    _write_record(pid_file, dict(pid, pid=child, pid_start=_process(child)[1]))
    try:
        os.write(go, b"1")
    except BrokenPipeError:
        pass  # a signal has ended the child already
    os.close(go)
    code, timed_out = _wait(child, args.get("timeout_s"))
    if os.WIFSIGNALED(code):
        return {"signal": os.WTERMSIG(code), "code": 128 + os.WTERMSIG(code), "timed_out": timed_out}
    return {"code": os.WEXITSTATUS(code), "timed_out": timed_out}


def _exec_command(args: Args, ready: int, announce: int, streams: Any) -> NoReturn:
    try:
        os.setsid()
        # Python handles or ignores these signals, and exec would keep what is ignored.
        for each in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(each, signal.SIG_DFL)
        os.write(announce, b"1")
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        if not os.read(ready, 1):
            os._exit(CANNOT_START)
        os.chdir(args["cwd"])
        shell = os.environ.get("SHELL") or "/bin/sh"
        os.execve(shell, [shell, "-c", args["command"]], environment(os.environ, args))  # noqa: S606
    except OSError as error:
        os.write(2, f"could not start the command: {error.strerror}: {error.filename}\n".encode())
    finally:
        os._exit(CANNOT_START)


def environment(own: Any, args: Args) -> Args:
    """Return the command's environment: the login's, grid_env if it exists, GPUs, and --env."""
    env = dict(own, GRID_RUN_ID=args["id"], GRID_ROOT=args["root"])
    venv = os.path.join(args["root"], "grid_env")
    if os.path.exists(os.path.join(venv, "bin", "python")):
        env.update(VIRTUAL_ENV=venv, PATH=os.path.join(venv, "bin") + ":" + env.get("PATH", os.defpath))
    env.update(args.get("gpu_env") or {})
    env.update(args.get("env") or {})
    return env


def _wait(child: int, timeout_s: Any) -> tuple[int, bool]:
    if not timeout_s:
        return os.waitpid(child, 0)[1], False
    deadline = time.monotonic() + float(timeout_s)
    kills = [(deadline + _GRACE_S, signal.SIGKILL), (deadline, signal.SIGTERM)]
    pause_s = 0.002
    while True:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            return code, len(kills) < 2
        if kills and time.monotonic() >= kills[-1][0]:
            os.killpg(child, kills.pop()[1])
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _PAUSE_S_MAX)


# --- status -----------------------------------------------------------------------------------


def _status(folder: str) -> Args:
    try:
        with open(os.path.join(folder, "meta.json"), "rb") as file:
            meta = json.loads(file.read(_META_BYTES_MAX).decode())
    except FileNotFoundError:
        raise OpError("missing", "no run has the ID " + os.path.basename(folder)) from None
    except (OSError, ValueError, RecursionError):
        meta = None
    if not is_meta(meta):
        raise OpError("damaged", folder + "/meta.json is damaged")
    return dict(meta, id=os.path.basename(folder), **_state(folder))


def is_meta(meta: Any) -> bool:
    """True for valid metadata. A power cut may leave an empty file."""
    return (
        isinstance(meta, dict)
        and isinstance(meta.get("command"), str)
        and isinstance(meta.get("started"), (int, float))
        and 0 <= meta["started"] <= _TIME_S_MAX
        and isinstance(meta.get("gpus"), list)
        and all(isinstance(gpu, int) for gpu in meta["gpus"])
    )


def _state(folder: str) -> Args:
    found: Args = {}
    for _ in range(2):  # the run may end between reading the two records
        ended = _record(os.path.join(folder, "exit"), ("code", "ended"))
        pid = _record(os.path.join(folder, "pid"), ("boot", "watcher"))
        if pid is None and not os.path.isdir(folder):
            raise OpError("missing", "no run has the ID " + os.path.basename(folder))
        found = state_of(ended, pid or {}, _boot(), _process)
        if found["state"] != "lost":
            break
    return found


def state_of(ended: Any, pid: Args, boot: str, look: Any) -> Args:
    """Return the state of a run from its records. `look` returns a process's state and start time.

    A run is lost if it ended without an exit record, because the node or its supervisor was killed.
    """
    found: Args = {"state": "lost", "exit_code": None, "signal": None, "ended": None, "error": ""}
    if ended is not None:
        code = TIMED_OUT if ended.get("timed_out") else ended["code"]
        found.update(state="exited", exit_code=code, ended=ended["ended"])
        found.update(signal=ended.get("signal"), error=ended.get("error", ""))
    elif is_alive(pid, "pid", boot, look) or is_alive(pid, "watcher", boot, look):
        found["state"] = "running" if "pid" in pid else "starting"
    return found


def is_alive(pid: Args, process: str, boot: str, look: Any) -> bool:
    """True if the recorded process is alive, and not another one with the same PID."""
    if process not in pid or pid["boot"] != boot:
        return False
    state, start = look(pid[process])
    return state not in ("", "Z", "X") and start == pid.get(process + "_start")


def _process(pid: int) -> tuple[str, int]:
    """Return the state letter of a process ('' if it does not exist) and its start in ticks since boot."""
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(64).strip()
    except OSError:
        return ""


def _record(path: str, needed: tuple[str, ...] = ()) -> Any:
    """Return a record; None if it is empty or invalid."""
    try:
        with open(path, "rb") as file:
            text = file.read(_RECORD_BYTES).strip()
        found = json.loads(text.decode()) if text else None
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) and all(key in found for key in needed) else None


def _write_record(file: int, record: Args) -> None:
    """Overwrite the allocated record in one write, which needs no disk space."""
    text = json.dumps(record, separators=(",", ":")).encode()[:_RECORD_BYTES]
    os.pwrite(file, text.ljust(_RECORD_BYTES), 0)


def _chunk(path: str, offset: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), CHUNK_BYTES, max(0, offset))


# --- folders ------------------------------------------------------------------------------------


def _runs(args: Args) -> str:
    root = os.path.expanduser(str(args["root"]))
    if not os.path.isabs(root) or ".." in root.split("/"):
        raise OpError("usage", "remote_root must be an absolute path: " + root)
    return own_folder(root, "runs")


def _folder(args: Args) -> str:
    if not _ID.fullmatch(str(args["id"])):
        raise OpError("usage", "invalid run ID")
    return os.path.join(_runs(args), str(args["id"]))


def _names(runs: str) -> list[str]:
    try:
        return [name for name in os.listdir(runs) if _ID.fullmatch(name)]
    except FileNotFoundError:
        return []


def _remove(folder: str) -> None:
    """Rename the directory before removing it, so that a partial one does not look like a run."""
    old = f"{os.path.dirname(folder)}/.old-{os.getpid()}-{time.monotonic_ns()}"
    try:
        os.rename(folder, old)
    except FileNotFoundError:
        return
    _remove_files(old)


def _remove_files(folder: str) -> None:
    for name in _FILES:
        try:
            os.unlink(os.path.join(folder, name))
        except OSError:
            pass
    try:
        os.rmdir(folder)
    except OSError:
        pass


def _with_path(error: OSError, path: str) -> OSError:
    return OSError(error.errno, error.strerror or str(error), error.filename or path)


def _lock(runs: str) -> int:
    import fcntl

    file = os.open(os.path.join(runs, ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + _LOCK_S_MAX
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                os.close(file)
                raise OpError("busy", "timed out waiting for other GPU runs to start") from None
        time.sleep(0.01)


def _held_gpus(runs: str) -> Args:
    """Return the run ID by held GPU. The caller holds the lock until the new run has its directory."""
    held = {}
    for name in _names(runs):
        try:
            found = _status(os.path.join(runs, name))
        except OpError:
            continue  # removed or damaged; GPUs still in use show up in the readings
        if found["state"] in ("running", "starting"):
            held.update(dict.fromkeys(found["gpus"], name))
    return held
