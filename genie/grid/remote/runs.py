"""Runs on a node: commands that go on without a connection, what they print and how they end.

Each has a folder below `<remote_root>/.grid/runs`, named by the id that its client made: meta.json says
what it is, `out` and `err` take its output, `pid` and `exit` are records of a fixed size, written once
beforehand so that a full disk cannot lose them. A supervisor, detached from the connection, renames the
prepared folder to its name, which only one can do: so a run that is asked for twice is started once. It
starts the command as `ssh HOST COMMAND` would, by the user's own shell, in a session of its own.

Runs on nodes, so: standard library only, Python 3.8. Not for: nodes without Python (grid/plain_runs.py),
and which GPUs a run gets (gpu_runs.py).
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
"""Ended runs that a node keeps. Older ones go when a new run starts."""
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
    """Starts a run unless its id is there already; either way says how it is.

    `take_gpus` is given what runs hold (a run's id by the number of a GPU), and gives numbers and variables.
    A run that is over within quick_s is told whole, so that nobody need ask again: `first` is what
    runs.read would answer.
    """
    found = _started(args, blob, take_gpus)
    folder = _folder(args)
    deadline = time.monotonic() + min(float(args.get("quick_s") or 0), _QUICK_S_MAX)
    while _record(os.path.join(folder, "exit"), ("code", "ended")) is None:
        if time.monotonic() >= deadline:
            return found
        time.sleep(_QUICK_PAUSE_S)
    first, output = read({"root": args["root"], "id": args["id"], "out": 0, "err": 0}, b"")
    return (dict(found, **_state(folder), first=first), output) if first["end"] else found


def _started(args: Args, blob: bytes, take_gpus: Any) -> Args:
    folder = _folder(args)
    if os.path.isdir(folder):
        return dict(_status(folder), created=False)
    runs = os.path.dirname(folder)
    root = os.path.dirname(os.path.dirname(runs))
    try:
        os.makedirs(runs, 0o700, exist_ok=True)
        _prune(runs)
    except OSError as error:
        raise _named(error, runs) from None
    cwd = os.path.join(root, os.path.expanduser(args.get("cwd") or ""))
    if not os.path.isdir(cwd):
        raise OpError("missing", "there is no folder " + cwd)
    if take_gpus is None:
        return _begin(folder, dict(args, cwd=cwd, root=root, gpu_env={}), [], blob)
    lock = _lock(runs)
    try:
        if os.path.isdir(folder):  # this very run was being started, and now holds its GPUs
            return dict(_status(folder), created=False)
        gpus, env = take_gpus(_held(runs))
        return _begin(folder, dict(args, cwd=cwd, root=root, gpu_env=env), gpus, blob)
    finally:
        os.close(lock)


@op("runs.status")
def status(args: Args, blob: bytes) -> Answer:
    return _status(_folder(args))


@op("runs.read")
def read(args: Args, blob: bytes) -> Answer:
    """Output from the offsets `out` and `err` on; waits up to wait_s until there is some, or the end."""
    folder = _folder(args)
    deadline = time.monotonic() + min(float(args.get("wait_s", 0)), _WAIT_S_MAX)
    pause_s = 0.001
    while True:
        found = _state(folder)  # before the output: what has ended has written everything
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
    """To the run's whole process group, if that still is the run's."""
    folder = _folder(args)
    number = getattr(signal, "SIG" + str(args["signal"]), None)
    if not isinstance(number, signal.Signals):
        raise OpError("usage", "there is no signal " + str(args["signal"]))
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
    """Newest first. `prefix` is the beginning of the ids."""
    runs = _runs(args)
    found = []
    for name in _names(runs):
        if name.startswith(str(args.get("prefix", ""))):
            try:
                one = _status(os.path.join(runs, name))
            except OpError:
                continue  # removed since, or not ours
            if len(one["command"]) > _COMMAND_SHOWN:
                one["command"] = one["command"][:_COMMAND_SHOWN] + " ..."
            found.append(one)
    found.sort(key=lambda one: -one["started"])
    return {"runs": found[:_LISTED_MAX], "more": len(found) > _LISTED_MAX}


@op("runs.remove")
def remove(args: Args, blob: bytes) -> Answer:
    folder = _folder(args)
    if _state(folder)["state"] in ("running", "starting"):
        raise OpError("running", f"run {args['id']} still runs")
    _remove(folder)
    return {}


# --- starting -----------------------------------------------------------------------------------


def _begin(folder: str, args: Args, gpus: Any, blob: bytes) -> Args:
    new = f"{os.path.dirname(folder)}/.new-{args['id']}-{os.getpid()}-{time.monotonic_ns()}"
    try:
        _prepare(new, args, gpus, blob)
    except OSError as error:
        _remove_files(new)
        raise _named(error, new) from None
    keys = ("command", "env", "gpu_env", "cwd", "root", "id", "timeout_s")
    passed = {key: args.get(key) for key in keys}
    watcher = core.SPAWNER.spawn(__name__, "supervise", dict(passed, new=new, folder=folder))
    deadline = time.monotonic() + _BEGIN_S_MAX
    pause_s = _QUICK_PAUSE_S
    while time.monotonic() < deadline:
        gone = _process(watcher)[0] in ("", "Z", "X")  # asked first: what it did is seen below
        pid = _record(os.path.join(folder, "pid")) or {}
        if gone or "pid" in pid or _record(os.path.join(folder, "exit")):
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.02)
    if not os.path.isdir(folder):
        _remove(new)  # now it can begin no more, if it has not just done so
        if not os.path.isdir(folder):
            raise OpError("start", "the process that was to watch the run has not begun")
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
    """Removes the oldest ended runs beyond those that are kept, and what a killed start has left."""
    found = os.listdir(runs)
    for path in [os.path.join(runs, name) for name in found if name.startswith((".new-", ".old-"))]:
        if time.time() - _changed(path) > _STALE_S:
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
            continue  # someone else has removed it
        if found["state"] in ("exited", "lost"):
            ended.append((found["ended"] or _changed(folder), folder))
    for _, folder in sorted(ended)[: max(0, len(ended) - RUNS_KEPT)]:
        _remove(folder)


def _changed(path: str) -> float:
    """When; now, for what is gone meanwhile."""
    try:
        return os.lstat(path).st_mtime
    except FileNotFoundError:
        return time.time()


# --- the supervisor, in a process of its own ------------------------------------------------------


def supervise(args: Args) -> None:
    new, folder = args["new"], args["folder"]
    out = os.open(os.path.join(new, "out"), os.O_WRONLY | os.O_APPEND)
    err = os.open(os.path.join(new, "err"), os.O_WRONLY | os.O_APPEND)
    pid_file = os.open(os.path.join(new, "pid"), os.O_WRONLY)
    exit_file = os.open(os.path.join(new, "exit"), os.O_WRONLY)
    source = _source(new)
    pid = {"boot": _boot(), "watcher": os.getpid(), "watcher_start": _process(os.getpid())[1]}
    _write_record(pid_file, pid)
    try:
        os.rename(new, folder)
    except OSError:  # someone else has that id: this one was asked for twice
        _remove(new)
        return
    try:
        ended = _run(args, pid, pid_file, (source, out, err))
    except OSError as error:
        ended = {"code": CANNOT_START, "error": error.strerror or str(error)}
    _write_record(exit_file, dict(ended, ended=time.time()))
    os.fsync(exit_file)


def _source(new: str) -> int:
    """What the command reads. The file is gone once it is open: nobody needs it again."""
    try:
        source = os.open(os.path.join(new, "in"), os.O_RDONLY)
    except FileNotFoundError:
        return os.open(os.devnull, os.O_RDONLY)
    os.unlink(os.path.join(new, "in"))
    return source


def _run(args: Args, pid: Args, pid_file: int, streams: Any) -> Args:
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        _become(args, ready, go, streams)
    os.close(ready)
    for number in streams:
        os.close(number)
    # Only when it is written down who the command is, may it begin.
    _write_record(pid_file, dict(pid, pid=child, pid_start=_process(child)[1]))
    os.write(go, b"1")
    os.close(go)
    code, timed_out = _wait(child, args.get("timeout_s"))
    if os.WIFSIGNALED(code):
        return {"signal": os.WTERMSIG(code), "code": 128 + os.WTERMSIG(code), "timed_out": timed_out}
    return {"code": os.WEXITSTATUS(code), "timed_out": timed_out}


def _become(args: Args, ready: int, go: int, streams: Any) -> NoReturn:
    try:
        os.close(go)
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        if not os.read(ready, 1):
            os._exit(CANNOT_START)
        # Python ignores these, and what is ignored stays so in the program.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.chdir(args["cwd"])
        shell = os.environ.get("SHELL") or "/bin/sh"
        os.execve(shell, [shell, "-c", args["command"]], environment(os.environ, args))  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot be started: {error.strerror}: {error.filename}\n".encode())
    finally:
        os._exit(CANNOT_START)


def environment(own: Any, args: Args) -> Args:
    """What the command gets: what the login has, the grid's environment if there is one, and --env."""
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


# --- how a run is -----------------------------------------------------------------------------


def _status(folder: str) -> Args:
    try:
        with open(os.path.join(folder, "meta.json"), "rb") as file:
            meta = json.loads(file.read(_META_BYTES_MAX).decode())
    except FileNotFoundError:
        raise OpError("missing", "no run has the id " + os.path.basename(folder)) from None
    except (OSError, ValueError, RecursionError):
        meta = None
    if not is_meta(meta):
        raise OpError("damaged", folder + "/meta.json is damaged")
    return dict(meta, id=os.path.basename(folder), **_state(folder))


def is_meta(meta: Any) -> bool:
    """Not so after a power cut, which may leave an empty file, or where someone else wrote it."""
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
    for _ in range(2):  # it may end between two looks
        ended = _record(os.path.join(folder, "exit"), ("code", "ended"))
        pid = _record(os.path.join(folder, "pid"), ("boot", "watcher"))
        if pid is None and not os.path.isdir(folder):
            raise OpError("missing", "no run has the id " + os.path.basename(folder))
        found = state_of(ended, pid or {}, _boot(), _process)
        if found["state"] != "lost":
            break
    return found


def state_of(ended: Any, pid: Args, boot: str, look: Any) -> Args:
    """How a run is, by its records. `look` gives a process's state and when it began.

    Lost: it is gone and left no word of how it ended, because the node or its supervisor was killed.
    """
    found: Args = {"state": "lost", "exit_code": None, "signal": None, "ended": None, "error": ""}
    if ended is not None:
        code = TIMED_OUT if ended.get("timed_out") else ended["code"]
        found.update(state="exited", exit_code=code, ended=ended["ended"])
        found.update(signal=ended.get("signal"), error=ended.get("error", ""))
    elif is_alive(pid, "pid", boot, look) or is_alive(pid, "watcher", boot, look):
        found["state"] = "running" if "pid" in pid else "starting"
    return found


def is_alive(pid: Args, who: str, boot: str, look: Any) -> bool:
    """The very process that was written down, not another one that has got its number since."""
    if who not in pid or pid["boot"] != boot:
        return False
    letter, began = look(pid[who])
    return letter not in ("", "Z", "X") and began == pid.get(who + "_start")


def _process(pid: int) -> tuple[str, int]:
    """One letter for its state, '' if there is none, and when it began, in ticks since the boot."""
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
    """None where nothing is written yet, or where it is not what we write."""
    try:
        with open(path, "rb") as file:
            text = file.read(_RECORD_BYTES).strip()
        found = json.loads(text.decode()) if text else None
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) and all(key in found for key in needed) else None


def _write_record(file: int, record: Args) -> None:
    """In one write over what is there already: no new space is needed."""
    text = json.dumps(record, separators=(",", ":")).encode()[:_RECORD_BYTES]
    os.pwrite(file, text.ljust(_RECORD_BYTES), 0)


def _chunk(path: str, offset: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), CHUNK_BYTES, max(0, offset))


# --- folders ------------------------------------------------------------------------------------


def _runs(args: Args) -> str:
    root = os.path.expanduser(str(args["root"]))
    if not os.path.isabs(root) or ".." in root.split("/"):
        raise OpError("usage", "remote_root must be a whole path: " + root)
    return own_folder(root, "runs")


def _folder(args: Args) -> str:
    if not _ID.fullmatch(str(args["id"])):
        raise OpError("usage", "that is not the id of a run")
    return os.path.join(_runs(args), str(args["id"]))


def _names(runs: str) -> list[str]:
    try:
        return [name for name in os.listdir(runs) if _ID.fullmatch(name)]
    except FileNotFoundError:
        return []


def _remove(folder: str) -> None:
    """Out of sight first: a folder that is half empty must not look like a run."""
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


def _named(error: OSError, path: str) -> OSError:
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
                raise OpError("busy", "other runs that want GPUs are being started") from None
        time.sleep(0.01)


def _held(runs: str) -> Args:
    """Which run has a GPU. Call it with the lock, and keep that until the run has its folder."""
    held = {}
    for name in _names(runs):
        try:
            found = _status(os.path.join(runs, name))
        except OpError:
            continue  # removed since, or damaged: what it still uses, the driver tells
        if found["state"] in ("running", "starting"):
            held.update(dict.fromkeys(found["gpus"], name))
    return held
