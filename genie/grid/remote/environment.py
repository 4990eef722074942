"""A Python environment on this node: ROOT/grid_env, made with venv and filled with pip.

A stamp in it says what was asked for, so the same wish again costs nothing. One installation at a time:
the lock is held by the programs that run, also when the helper is gone, and goes away with them. The
file has who asked for it, when, and which process holds it.

Runs on nodes, so: standard library only, Python 3.8. Not for: deciding what is installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from typing import Any

from genie.grid.remote.core import Answer, Args, OpError, op
from genie.grid.remote.own_folder import own_folder

_STAMP = "genie-grid.json"
_TAIL_BYTES = 16000
_LINES = 25
_CHUNK_BYTES = 1 << 20
_PART_S = 3600.0
_SPACE_BYTES_MIN = 1 << 20
_ACTIVATE = """
# Written by grid-cli setup: where the grid has started Ray, `ray` finds it and its token.
if [ -r {path} ]; then . {path}; fi
"""


@op("environment.look")
def look(args: Args, blob: bytes) -> Answer:
    """The stamp of the environment, the version of the Python asked for, and the wheels that are here."""
    folder = _folder(args)
    python = _python(args)
    return {
        "python": python,
        "version": _version(python),
        "stamp": _read_stamp(folder),
        "wheels": _wheels(folder),
    }


@op("environment.put_wheel")
def put_wheel(args: Args, blob: bytes) -> Answer:
    """A part of a wheel from `offset`; the last part gives it its name, if its hash is right."""
    folder = os.path.join(_setup_folder(args), "wheels")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, _file_name(args["name"]))
    part = path + "." + _file_name(args["upload"]) + ".part"
    if not args["offset"]:
        _remove_old_parts(folder)
    with open(part, "r+b" if args["offset"] else "wb") as file:
        file.seek(int(args["offset"]))
        file.write(blob)
        file.truncate()
    if args["last"]:
        if _sha256(part) != args["sha256"]:
            raise OpError("damaged", args["name"] + " arrived damaged")
        os.replace(part, path)
        with open(path + ".sha256", "w") as note:
            note.write(args["sha256"])
    return {}


@op("environment.install")
def install(args: Args, blob: bytes) -> Answer:
    """Makes the environment and installs; the blob is a requirements file. Ends with the stamp written."""
    import fcntl

    setup = _setup_folder(args)
    os.makedirs(setup, mode=0o700, exist_ok=True)
    # A link is not followed: what it leads to would be written over.
    lock = os.open(os.path.join(setup, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OpError("locked", _under_way(lock)) from None
        holder = {"since": time.time(), "who": str(args.get("who", ""))}
        return _install(args, blob, setup, _Lock(lock, holder))
    finally:
        os.close(lock)


class _Lock:
    """`file` is open and locked; what it has in it says who holds it."""

    def __init__(self, file: int, holder: dict[str, Any]) -> None:
        self.file = file
        self._holder = holder
        self.held_by(os.getpid())

    def held_by(self, pid: int) -> None:
        data = json.dumps(dict(self._holder, pid=pid)).encode()
        try:
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, data, 0)
        except OSError:
            pass  # a full disk: it is only told


def _under_way(lock: int) -> str:
    text = "another setup is under way here"
    try:
        holder = json.loads(os.pread(lock, 4096, 0).decode())
        who = " by " + holder["who"] if holder["who"] else ""
        since_s = max(0.0, time.time() - holder["since"])
        text += f", begun{who} {since_s:.0f} s ago (process {holder['pid']})"
    except (ValueError, TypeError, KeyError, OverflowError, OSError, RecursionError):
        pass  # written by an older version, not yet, or by someone else
    return text


@op("environment.progress", quick=True)
def progress(args: Args, blob: bytes) -> Answer:
    """The last line of the log of the installation."""
    lines = _tail(os.path.join(_setup_folder(args), "setup.log")).splitlines()
    return {"line": lines[-1] if lines else ""}


def _install(args: Args, requirements: bytes, setup: str, lock: _Lock) -> Answer:
    folder = _folder(args)
    log_path = os.path.join(setup, "setup.log")
    deadline = time.monotonic() + float(args["timeout_s"])
    with open(log_path, "wb") as log:
        run = _Run(log, log_path, deadline, lock)
        if not _is_whole(folder, args):
            shutil.rmtree(folder, ignore_errors=True)
            run(_venv_command(args, folder), reason="venv")
        elif _sees_system(folder) != bool(args["system_packages"]):
            run(_venv_command(args, folder), reason="venv")  # over the old one: what is installed stays
        _forget_stamp(folder)
        command = _pip_command(args, folder, setup, requirements)
        if command:
            run(command, reason="pip")
    _teach_activate(args, folder)
    with open(os.path.join(folder, _STAMP), "w") as file:
        json.dump(args["stamp"], file)
    return {"packages": len(_installed(folder))}


class _Run:
    """Runs one program after the other into a log; they keep the lock while they live."""

    def __init__(self, log: Any, log_path: str, deadline: float, lock: _Lock) -> None:
        self._log = log
        self._log_path = log_path
        self._deadline = deadline
        self._lock = lock

    def __call__(self, command: list[str], reason: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
        env.update({"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"})
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=(self._lock.file,),
        ) as process:
            self._lock.held_by(process.pid)
            try:
                code = process.wait(max(1.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                told = _tail(self._log_path)
                raise OpError("timeout", "it took too long; the last lines:\n" + told) from None
        if code != 0:
            _check_space(self._log_path)
            raise OpError(reason, _tail(self._log_path) or f"it ended with code {code}")


def _check_space(path: str) -> None:
    """On a full disk nothing can be said in a file: whoever failed may not have been able to say why."""
    found = os.statvfs(os.path.dirname(path))
    if found.f_bavail * found.f_frsize < _SPACE_BYTES_MIN:
        raise OpError("no_space", "No space left on device: " + os.path.dirname(path))


def _venv_command(args: Args, folder: str) -> list[str]:
    more = ["--system-site-packages"] if args["system_packages"] else []
    return [_python(args), "-m", "venv", *more, "--", folder]


def _pip_command(args: Args, folder: str, setup: str, requirements: bytes) -> list[str]:
    command = [os.path.join(folder, "bin", "python"), "-m", "pip", "install", "--progress-bar", "off"]
    if args["wheels"]:
        command += ["--no-index", "--find-links", os.path.join(setup, "wheels")]
    wanted = []
    if requirements:
        path = os.path.join(setup, "requirements.txt")
        with open(path, "wb") as file:
            file.write(requirements)
        wanted += ["-r", path]
    if args["packages"]:
        wanted += ["--", *args["packages"]]
    return command + wanted if wanted else []


def _sees_system(folder: str) -> bool:
    with open(os.path.join(folder, "pyvenv.cfg")) as file:
        return re.search(r"^include-system-site-packages *= *true", file.read(), re.MULTILINE) is not None


def _is_whole(folder: str, args: Args) -> bool:
    """An environment of another Python, or one whose making broke off, is made anew."""
    version = _version(os.path.join(folder, "bin", "python"), check=False)
    same = version.split(".")[:2] == str(args["stamp"]["python"]).split(".")[:2]
    pip = os.path.join(folder, "bin", "pip")
    return same and os.path.exists(pip) and os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def _teach_activate(args: Args, folder: str) -> None:
    import shlex

    path = os.path.join(folder, "bin", "activate")
    env = own_folder(_root(args), "ray", "env.sh")
    text = _ACTIVATE.format(path=shlex.quote(env))
    with open(path, "r+") as file:
        if text not in file.read():
            file.write(text)


def _installed(folder: str) -> list[str]:
    lib = os.path.join(folder, "lib")
    found = []
    for python in os.listdir(lib):
        site = os.path.join(lib, python, "site-packages")
        if os.path.isdir(site):
            found += [name for name in os.listdir(site) if name.endswith(".dist-info")]
    return found


def _root(args: Args) -> str:
    return os.path.expanduser(str(args["root"]))


def _folder(args: Args) -> str:
    return os.path.join(_root(args), "grid_env")


def _setup_folder(args: Args) -> str:
    return own_folder(_root(args), "setup")


def _python(args: Args) -> str:
    """Raises OpError where there is no such program."""
    wanted = str(args.get("python") or "python3")
    path = shutil.which(os.path.expanduser(wanted))
    if path is None:
        raise OpError("missing", "there is no program " + wanted)
    return path


def _version(python: str, check: bool = True) -> str:
    try:
        done = subprocess.run(
            [python, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
        )
        text = done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        text = ""
    if check and not text:
        raise OpError("python", python + " is no Python that runs")
    return text


def _read_stamp(folder: str) -> Any:
    try:
        with open(os.path.join(folder, _STAMP), "rb") as file:
            return json.loads(file.read(1 << 20).decode())
    except (OSError, ValueError):
        return None


def _forget_stamp(folder: str) -> None:
    try:
        os.unlink(os.path.join(folder, _STAMP))
    except FileNotFoundError:
        pass


def _wheels(folder: str) -> dict[str, str]:
    place = own_folder(os.path.dirname(folder), "setup", "wheels")
    found = {}
    for name in os.listdir(place) if os.path.isdir(place) else []:
        if name.endswith(".sha256") and os.path.exists(os.path.join(place, name[: -len(".sha256")])):
            with open(os.path.join(place, name)) as file:
                found[name[: -len(".sha256")]] = file.read(100)
    return found


def _remove_old_parts(folder: str) -> None:
    """Of uploads that broke off; those under way are younger."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            if name.endswith(".part") and os.path.getmtime(path) < time.time() - _PART_S:
                os.unlink(path)
        except OSError:
            pass


def _file_name(name: str) -> str:
    if os.path.basename(name) != name or name.startswith((".", "-")):
        raise OpError("name", "this is no name of a file: " + repr(name))
    return name


def _sha256(path: str) -> str:
    import hashlib

    found = hashlib.sha256()
    with open(path, "rb") as file:
        while True:
            data = file.read(_CHUNK_BYTES)
            if not data:
                return found.hexdigest()
            found.update(data)


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError:
        return ""
    lines = data.decode("utf-8", "replace").replace("\r", "\n").strip().splitlines()
    return "\n".join(lines[-_LINES:])
