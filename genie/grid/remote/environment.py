"""Installs the Python environment of a node, ROOT/grid_env, with venv and pip.

A file in it has the specification that was installed, so that repeating a setup costs nothing. One setup runs
at a time: the lock is held by the running programs, also after the helper has exited. The lock file contains
the requester, the start time and the PID of the holder.

Runs on nodes: standard library only, Python 3.8. Does not decide what is installed (setup.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from typing import Any

from genie.grid.remote.core import OpArgs, OpError, OpReply, register_op
from genie.grid.remote.own_folder import grid_folder_path

_INSTALLED_SPEC_FILE_NAME = "genie-grid.json"
_LOG_TAIL_BYTES = 16000
_LOG_TAIL_LINES = 25
_HASH_CHUNK_BYTES = 1 << 20
_STALE_UPLOAD_AGE_S = 3600.0
_DISK_FREE_BYTES_MIN = 1 << 20
_ACTIVATE_SCRIPT_ADDITION = """
# Written by grid-cli setup: lets `ray` find the grid's Ray cluster and its token.
if [ -r {path} ]; then . {path}; fi
"""


@register_op("environment.inspect")
def inspect_environment(args: OpArgs, blob: bytes) -> OpReply:
    """Return the installed specification, the requested Python and its version, and the uploaded wheels."""
    folder = _environment_folder(args)
    python = _find_requested_python(args)
    return {
        "python": python,
        "version": _read_python_version(python),
        "stamp": _read_installed_spec(folder),
        "wheels": _hash_uploaded_wheels(folder),
    }


@register_op("environment.put_wheel")
def write_wheel_part(args: OpArgs, blob: bytes) -> OpReply:
    """Write a part of a wheel at `offset`; after the last part, check the hash and rename the file."""
    folder = os.path.join(_setup_folder(args), "wheels")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, _validate_file_name(args["name"]))
    part = path + "." + _validate_file_name(args["upload"]) + ".part"
    if not args["offset"]:
        _remove_stale_uploads(folder)
    with open(part, "r+b" if args["offset"] else "wb") as file:
        file.seek(int(args["offset"]))
        file.write(blob)
        file.truncate()
    if args["last"]:
        if _file_sha256(part) != args["sha256"]:
            raise OpError(args["name"] + " was damaged in transfer", reason="damaged")
        os.replace(part, path)
        with open(path + ".sha256", "w") as file:
            file.write(args["sha256"])
    return {}


@register_op("environment.install")
def install_environment(args: OpArgs, blob: bytes) -> OpReply:
    """Create the environment, install the packages, record the specification; blob: a requirements file."""
    import fcntl

    setup = _setup_folder(args)
    os.makedirs(setup, mode=0o700, exist_ok=True)
    # Links are not followed, because the target would be overwritten.
    lock = os.open(os.path.join(setup, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OpError(_describe_lock_holder(lock), reason="locked") from None
        holder = {"since": time.time(), "who": str(args.get("who", ""))}
        return _install_while_locked(args, blob, setup, _SetupLock(lock, holder))
    finally:
        os.close(lock)


class _SetupLock:
    """The locked file, whose contents describe the holder."""

    def __init__(self, lock_fd: int, holder: dict[str, Any]) -> None:
        self.lock_fd = lock_fd
        self._holder = holder
        self.record_holder_pid(os.getpid())

    def record_holder_pid(self, pid: int) -> None:
        data = json.dumps(dict(self._holder, pid=pid)).encode()
        try:
            os.ftruncate(self.lock_fd, 0)
            os.pwrite(self.lock_fd, data, 0)
        except OSError:
            pass  # full disk: the contents are informational


def _describe_lock_holder(lock: int) -> str:
    text = "another setup is in progress"
    try:
        holder = json.loads(os.pread(lock, 4096, 0).decode())
        who = " by " + holder["who"] if holder["who"] else ""
        since_s = max(0.0, time.time() - holder["since"])
        text += f", started{who} {since_s:.0f} s ago (process {holder['pid']})"
    except (ValueError, TypeError, KeyError, OverflowError, OSError, RecursionError):
        pass  # not written yet, or by another version or program
    return text


@register_op("environment.progress", quick=True)
def read_install_progress(args: OpArgs, blob: bytes) -> OpReply:
    """Return the last line of the installation log."""
    lines = _read_log_tail(os.path.join(_setup_folder(args), "setup.log")).splitlines()
    return {"line": lines[-1] if lines else ""}


def _install_while_locked(args: OpArgs, requirements: bytes, setup: str, lock: _SetupLock) -> OpReply:
    folder = _environment_folder(args)
    log_path = os.path.join(setup, "setup.log")
    deadline = time.monotonic() + float(args["timeout_s"])
    with open(log_path, "wb") as log:
        run = _LoggedCommandRunner(log, log_path, deadline, lock)
        if not _is_environment_reusable(folder, args):
            shutil.rmtree(folder, ignore_errors=True)
            run(_make_venv_command(args, folder), reason="venv")
        elif _uses_system_packages(folder) != bool(args["system_packages"]):
            run(_make_venv_command(args, folder), reason="venv")  # in place: installed packages are kept
        _remove_installed_spec(folder)
        for command in _make_pip_commands(args, folder, setup, requirements):
            run(command, reason="pip")
    _extend_activate_script(args, folder)
    with open(os.path.join(folder, _INSTALLED_SPEC_FILE_NAME), "w") as file:
        json.dump(args["stamp"], file)
    return {"packages": len(_list_installed_packages(folder))}


class _LoggedCommandRunner:
    """Runs programs with their output in a log. They inherit the lock, so it is held while they run."""

    def __init__(self, log: Any, log_path: str, deadline: float, lock: _SetupLock) -> None:
        self._log = log
        self._log_path = log_path
        self._deadline = deadline
        self._setup_lock = lock

    def __call__(self, command: list[str], reason: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
        env.update({"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"})
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=(self._setup_lock.lock_fd,),
        ) as process:
            self._setup_lock.record_holder_pid(process.pid)
            try:
                code = process.wait(max(1.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                tail = _read_log_tail(self._log_path)
                raise OpError(
                    "the installation timed out; last lines of the log:\n" + tail, reason="timeout"
                ) from None
        if code != 0:
            _check_disk_space(self._log_path)
            raise OpError(
                _read_log_tail(self._log_path) or f"{command[0]} exited with code {code}", reason=reason
            )


def _check_disk_space(path: str) -> None:
    """Raise OpError if the disk is full: the failed program may not have been able to log that."""
    found = os.statvfs(os.path.dirname(path))
    if found.f_bavail * found.f_frsize < _DISK_FREE_BYTES_MIN:
        raise OpError("No space left on device: " + os.path.dirname(path), reason="no_space")


def _make_venv_command(args: OpArgs, folder: str) -> list[str]:
    more = ["--system-site-packages"] if args["system_packages"] else []
    return [_find_requested_python(args), "-m", "venv", *more, "--", folder]


def _make_pip_commands(args: OpArgs, folder: str, setup: str, requirements: bytes) -> list[list[str]]:
    """Return one command, or two if the requirements have hashes: pip then rejects packages without them."""
    command = [os.path.join(folder, "bin", "python"), "-m", "pip", "install", "--progress-bar", "off"]
    if args["wheels"]:
        command += ["--no-index", "--find-links", os.path.join(setup, "wheels")]
    packages = ["--", *args["packages"]] if args["packages"] else []
    if not requirements:
        return [command + packages] if packages else []
    listed = ["-r", _write_file_and_get_path(os.path.join(setup, "requirements.txt"), requirements)]
    if packages and re.search(rb"(^|\s|\xef\xbb\xbf)--(hash|require-hashes)\b", requirements):
        constraints = _write_file_and_get_path(
            os.path.join(setup, "constraints.txt"),
            _requirements_to_constraints(requirements.decode()).encode(),
        )
        return [command + listed, [*command, "-c", constraints, *packages]]
    return [command + listed + packages]


def _requirements_to_constraints(requirements: str) -> str:
    """Return the requirements without hashes, extras and plain URLs, which constraints do not allow."""
    lines = []
    for line in _join_continued_lines(requirements.lstrip("\ufeff")):
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if text.startswith("-"):
            # Remove only the flag: the line may also select an index.
            text = re.sub(r"(^|\s)--require-hashes(?=\s|$)", "", text).strip()
        elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
            text = ""
        else:
            version = re.split(r"\s--", text, maxsplit=1)[0].rstrip()
            text = re.sub(r"^([\w.-]+)\s*\[[^\]]*\]", r"\1", version)
        lines += [text] if text else []
    return "\n".join([*lines, ""])


def _join_continued_lines(text: str) -> list[str]:
    """Join lines at a backslash like pip: a comment line is not continued, and ends a continued one."""
    lines, parts = [], []
    for line in text.splitlines():
        is_comment = line.lstrip().startswith("#")
        parts.append(" " + line if is_comment else line.rstrip("\\"))
        if is_comment or not line.endswith("\\"):
            lines.append("".join(parts))
            parts = []
    return [*lines, "".join(parts)]


def _write_file_and_get_path(path: str, data: bytes) -> str:
    with open(path, "wb") as file:
        file.write(data)
    return path


def _uses_system_packages(folder: str) -> bool:
    with open(os.path.join(folder, "pyvenv.cfg")) as file:
        return re.search(r"^include-system-site-packages *= *true", file.read(), re.MULTILINE) is not None


def _is_environment_reusable(folder: str, args: OpArgs) -> bool:
    """False for an environment of another Python version or an incomplete one."""
    version = _read_python_version(os.path.join(folder, "bin", "python"), check=False)
    same = version.split(".")[:2] == str(args["stamp"]["python"]).split(".")[:2]
    pip = os.path.join(folder, "bin", "pip")
    return same and os.path.exists(pip) and os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def _extend_activate_script(args: OpArgs, folder: str) -> None:
    """Append _ACTIVATE_SCRIPT_ADDITION to bin/activate, once."""
    import shlex

    path = os.path.join(folder, "bin", "activate")
    env = grid_folder_path(_remote_root(args), "ray", "env.sh")
    text = _ACTIVATE_SCRIPT_ADDITION.format(path=shlex.quote(env))
    with open(path, "r+") as file:
        if text not in file.read():
            file.write(text)


def _list_installed_packages(folder: str) -> list[str]:
    lib = os.path.join(folder, "lib")
    found = []
    for python in os.listdir(lib):
        site = os.path.join(lib, python, "site-packages")
        if os.path.isdir(site):
            found += [name for name in os.listdir(site) if name.endswith(".dist-info")]
    return found


def _remote_root(args: OpArgs) -> str:
    return os.path.expanduser(str(args["root"]))


def _environment_folder(args: OpArgs) -> str:
    return os.path.join(_remote_root(args), "grid_env")


def _setup_folder(args: OpArgs) -> str:
    return grid_folder_path(_remote_root(args), "setup")


def _find_requested_python(args: OpArgs) -> str:
    """Return the path of the requested Python. Raises OpError if it is not found."""
    name = str(args.get("python") or "python3")
    path = shutil.which(os.path.expanduser(name))
    if path is None:
        raise OpError("program not found: " + name, reason="missing")
    return path


def _read_python_version(python: str, check: bool = True) -> str:
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
        raise OpError(python + " is not a working Python", reason="python")
    return text


def _read_installed_spec(folder: str) -> Any:
    try:
        with open(os.path.join(folder, _INSTALLED_SPEC_FILE_NAME), "rb") as file:
            return json.loads(file.read(1 << 20).decode())
    except (OSError, ValueError):
        return None


def _remove_installed_spec(folder: str) -> None:
    try:
        os.unlink(os.path.join(folder, _INSTALLED_SPEC_FILE_NAME))
    except FileNotFoundError:
        pass


def _hash_uploaded_wheels(folder: str) -> dict[str, str]:
    """Return the hashes of the uploaded wheels by file name."""
    wheels = grid_folder_path(os.path.dirname(folder), "setup", "wheels")
    found = {}
    for name in os.listdir(wheels) if os.path.isdir(wheels) else []:
        if name.endswith(".sha256") and os.path.exists(os.path.join(wheels, name[: -len(".sha256")])):
            with open(os.path.join(wheels, name)) as file:
                found[name[: -len(".sha256")]] = file.read(100)
    return found


def _remove_stale_uploads(folder: str) -> None:
    """Remove the parts of interrupted uploads; those of active ones are younger than _STALE_UPLOAD_AGE_S."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            if name.endswith(".part") and os.path.getmtime(path) < time.time() - _STALE_UPLOAD_AGE_S:
                os.unlink(path)
        except OSError:
            pass


def _validate_file_name(name: str) -> str:
    if os.path.basename(name) != name or name.startswith((".", "-")):
        raise OpError("invalid file name: " + repr(name), reason="name")
    return name


def _file_sha256(path: str) -> str:
    import hashlib

    found = hashlib.sha256()
    with open(path, "rb") as file:
        while True:
            data = file.read(_HASH_CHUNK_BYTES)
            if not data:
                return found.hexdigest()
            found.update(data)


def _read_log_tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _LOG_TAIL_BYTES))
            data = file.read(_LOG_TAIL_BYTES)
    except OSError:
        return ""
    lines = data.decode("utf-8", "replace").replace("\r", "\n").strip().splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])
