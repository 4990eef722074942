"""Ray on this node: finds the installation, starts and stops Ray, reports its state, queries its dashboard.

Started processes are recorded in ROOT/.grid/ray/cluster.json with their start times and the cluster ID, which
is also in their environment. Only these and their descendants are ever stopped; `ray stop` would also stop
other clusters.

Runs on nodes: standard library only, Python 3.8. Does not decide the role of a node (ray/plan.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from typing import Any, Callable  # noqa: UP035 - Callable[...] at run time needs Python 3.9

from genie.grid.remote.core import OpArgs, OpError, OpReply, register_op
from genie.grid.remote.own_folder import grid_folder_path
from genie.grid.remote.ray_namespace import SITECUSTOMIZE_SOURCE

RAY_CLUSTER_ENV_VARIABLE = "GRID_RAY_CLUSTER"
"""Environment variable of all started processes: cluster ID and node name."""
_FILE_BYTES_MAX = 1 << 20
_START_LOG_TAIL_BYTES = 4000
_JOB_LOG_CHUNK_BYTES_MAX = 1 << 20
_QUERY_COMMAND_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.05
_KILL_TIMEOUT_S = 5.0
_RAY_LOCK_TIMEOUT_S = 5.0  # after a disconnect, the previous helper takes a moment to exit
_PRINT_VERSIONS_SCRIPT = (
    "import sys\n"
    "from importlib.metadata import version\n"
    "print(version('ray'), '%d.%d.%d' % sys.version_info[:3])\n"
)


@register_op("ray_node.facts")
def read_ray_facts(args: OpArgs, blob: bytes) -> OpReply:
    """Return the Ray installation, address, number of GPUs and cluster record of this node."""
    root = _remote_root(args)
    program = _find_ray_program(root)
    version, python = _read_ray_and_python_versions(program) if program else ("", "")
    return {
        "root": root,
        "address": _find_own_address(),
        "ray": program or "",
        "version": version,
        "python": python,
        "gpus": _count_gpus(),
        "record": _summarize_with_alive_count(_read_cluster_record(root)),
    }


@register_op("ray_node.record", quick=True)
def report_cluster_record(args: OpArgs, blob: bytes) -> OpReply:
    return _summarize_with_alive_count(_read_cluster_record(_remote_root(args)))


@register_op("ray_node.start")
def start_ray(args: OpArgs, blob: bytes) -> OpReply:
    """Run `ray start` with these options; the blob is the token. On failure, everything is stopped."""
    folder = _ray_folder(_remote_root(args))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with _RayStartStopLock(folder):
        return _start_ray_while_locked(folder, args, blob)


def _start_ray_while_locked(folder: str, args: OpArgs, token: bytes) -> OpReply:
    for port in args["free_ports"]:
        _check_port_free(port["host"], port["port"], port["key"])
    entry = {
        "cluster": args["cluster"],
        "mark": args["cluster"] + "." + args["node"],
        "role": args["role"],
        "head": args["head"],
        "dashboard_port": args["dashboard_port"],
        "boot": _read_boot_id(),
        "session": 0,
        "processes": [],
        "session_dir": "",
    }
    _write_new_cluster_record(folder, entry)
    try:
        _write_private_file(os.path.join(folder, "token"), token)
        _write_private_file(os.path.join(folder, "env.sh"), _format_env_script(folder, args).encode())
        _write_python_modules(folder, args)
        _run_ray_start(folder, args, entry)
    except BaseException:
        _stop_processes_and_get_total_killed_left(entry, grace_s=1.0)
        _remove_cluster_files(folder, entry)
        raise
    return _summarize_with_alive_count(entry)


@register_op("ray_node.stop")
def stop_ray(args: OpArgs, blob: bytes) -> OpReply:
    """Stop the recorded cluster and remove the record. If `cluster` is given, stop only that cluster."""
    root = _remote_root(args)
    folder = _ray_folder(root)
    if not os.path.isdir(folder):
        return {"was": None, "ended": 0, "killed": 0}
    # A start in progress is stopped too: it then cleans up and releases the lock.
    with _RayStartStopLock(folder, on_wait=lambda: _stop_ray_while_locked(root, args, remove_record=False)):
        return _stop_ray_while_locked(root, args)


def _stop_ray_while_locked(root: str, args: OpArgs, remove_record: bool = True) -> OpReply:
    entry = _read_cluster_record(root)
    if entry is None:
        return {"was": None, "ended": 0, "killed": 0}
    if args.get("cluster") and args["cluster"] != entry["cluster"]:
        raise OpError("another cluster is running on this node: " + entry["cluster"], reason="other")
    ended, killed, left = _stop_processes_and_get_total_killed_left(entry, grace_s=float(args["grace_s"]))
    if left:
        raise OpError("could not stop these processes: " + ", ".join(map(str, left[:20])), reason="left")
    if remove_record:
        _remove_cluster_files(_ray_folder(root), entry)
    return {"was": {"cluster": entry["cluster"], "role": entry["role"]}, "ended": ended, "killed": killed}


@register_op("ray_node.request_dashboard")
def request_dashboard(args: OpArgs, blob: bytes) -> OpReply:
    """Send one HTTP request to the dashboard on this node's loopback, with the stored token."""
    import http.client

    root = _remote_root(args)
    entry = _read_cluster_record(root)
    if entry is None:
        raise OpError("no Ray cluster is recorded on this node", reason="missing")
    with open(os.path.join(_ray_folder(root), "token"), "rb") as file:
        token = file.read(4096).decode().strip()
    link = http.client.HTTPConnection("127.0.0.1", int(entry["dashboard_port"]), timeout=args["timeout_s"])
    headers = {"Authorization": "Bearer " + token, "Content-Type": "application/json"}
    try:
        link.request(args["method"], args["path"], body=blob or None, headers=headers)
        answer = link.getresponse()
        body = answer.read((8 << 20) + 1)
    except http.client.HTTPException as error:
        raise OpError("invalid HTTP response from the dashboard: " + repr(error), reason="http") from None
    finally:
        link.close()
    if len(body) > 8 << 20:
        raise OpError("the dashboard's response is larger than 8 MiB", reason="large")
    return {"status": answer.status}, body


@register_op("ray_node.job_log")
def read_job_log(args: OpArgs, blob: bytes) -> OpReply:
    """Return the log of a job from an offset; wait up to wait_s for output. `there`: the log exists."""
    entry = _read_cluster_record(_remote_root(args))
    name = args["job"]
    if entry is None or not name.replace("-", "").replace("_", "").isalnum():
        raise OpError("no such Ray job on this node", reason="missing")
    path = os.path.join(entry["session_dir"], "logs", "job-driver-" + name + ".log")
    deadline = time.monotonic() + min(float(args["wait_s"]), 30.0)
    while True:
        there, data = _log_exists_and_bytes_from(path, int(args["offset"]))
        if data or time.monotonic() >= deadline:
            return {"there": there, "next": int(args["offset"]) + len(data)}, data
        time.sleep(0.1)


def _log_exists_and_bytes_from(path: str, offset: int) -> tuple[bool, bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return True, file.read(_JOB_LOG_CHUNK_BYTES_MAX)
    except FileNotFoundError:
        return False, b""


# --- the installation ---


def _remote_root(args: OpArgs) -> str:
    return os.path.expanduser(str(args["root"]))


def _ray_folder(root: str) -> str:
    return grid_folder_path(root, "ray")


def _find_ray_program(root: str) -> str | None:
    own = os.path.join(root, "grid_env", "bin", "ray")
    if os.access(own, os.X_OK):
        return own
    return _find_on_login_path("ray")


def _find_on_login_path(program: str) -> str | None:
    """Search PATH, then the PATH of a login shell, to which profiles add directories."""
    found = shutil.which(program)
    if found:
        return found
    shell = os.environ.get("SHELL") or "/bin/sh"
    code, out = _run_and_get_exit_code_and_output([shell, "-lc", "command -v " + program])
    lines = out.strip().splitlines()
    path = lines[-1].strip() if code == 0 and lines else ""
    return path if os.path.isabs(path) and os.access(path, os.X_OK) else None


def _read_ray_and_python_versions(program: str) -> tuple[str, str]:
    """Return the versions of Ray and of its Python; '' if unknown."""
    python = _read_script_interpreter(program)
    if python:
        code, out = _run_and_get_exit_code_and_output([python, "-c", _PRINT_VERSIONS_SCRIPT])
        parts = out.split()
        if code == 0 and len(parts) == 2:
            return parts[0], parts[1]
    code, out = _run_and_get_exit_code_and_output([program, "--version"], timeout_s=60.0)
    words = out.split()
    return (words[-1] if code == 0 and words else ""), ""


def _read_script_interpreter(program: str) -> str | None:
    """Return the Python in the script's first line: `ray --version` would take seconds to import Ray."""
    try:
        with open(program, "rb") as file:
            first = file.readline(1024)
    except OSError:
        return None
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env" and len(words) == 2:
        words = [shutil.which(words[1]) or ""]
    path = words[0] if len(words) == 1 else ""
    return path if os.path.basename(path).startswith("python") else None


def _run_and_get_exit_code_and_output(
    command: list[str], timeout_s: float = _QUERY_COMMAND_TIMEOUT_S
) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 127, ""
    return done.returncode, done.stdout[:65536].decode("utf-8", "replace")


def _count_gpus() -> int | None:
    """Return the number of NVIDIA GPUs; None if unknown, and Ray then detects them itself."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    code, out = _run_and_get_exit_code_and_output([program, "--query-gpu=index", "--format=csv,noheader"])
    return len([line for line in out.splitlines() if line.strip()]) if code == 0 else None


def _find_own_address() -> str:
    """Return this node's address of the SSH connection, which is its own even behind NAT."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


# --- starting ---


class _RayStartStopLock:
    """Allows one start or stop at a time on this node; the kernel releases it when the helper exits."""

    def __init__(self, folder: str, on_wait: Callable[[], object] = lambda: None) -> None:
        """`on_wait` is called repeatedly while another process holds the lock."""
        self._path = os.path.join(folder, "lock")
        self._on_wait = on_wait
        self._lock_fd = -1

    def __enter__(self) -> None:
        import fcntl

        self._lock_fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        deadline = time.monotonic() + _RAY_LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(self._lock_fd)
                    raise OpError(
                        "another start or stop is in progress on this node", reason="busy"
                    ) from None
                self._on_wait()
                time.sleep(_POLL_INTERVAL_S)
            else:
                return

    def __exit__(self, *_: object) -> None:
        os.close(self._lock_fd)


def _check_port_free(host: str, port: int, key: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OpError(f"cannot bind port {port} ({key}): {error.strerror}", reason="port") from None


def _write_new_cluster_record(folder: str, entry: OpArgs) -> None:
    path = os.path.join(folder, "cluster.json")
    old = _read_cluster_record(os.path.dirname(os.path.dirname(folder)))
    if old is not None and not _find_cluster_processes(old, _read_process_table()):
        _remove_cluster_files(folder, old)
    if os.path.lexists(path):  # not a race: the lock is held
        raise OpError(
            "a Ray cluster is already running on this node; stop it: grid-cli cluster stop", reason="running"
        )
    _write_cluster_record(folder, entry)


def _format_env_script(folder: str, args: OpArgs) -> str:
    """Return env.sh, which `grid_env/bin/activate` reads, so that `ray status` works on the node."""
    lines = [
        "export RAY_AUTH_MODE=token",
        "export RAY_AUTH_TOKEN_PATH=" + _quote_for_shell(folder + "/token"),
    ]
    if args["role"] == "head":
        lines.append(f"export RAY_API_SERVER_ADDRESS=http://127.0.0.1:{args['dashboard_port']}")
    lines.append("export RAY_ADDRESS=" + _quote_for_shell(args["head"]))
    lines.append("export RAY_NAMESPACE=" + _quote_for_shell(args["namespace"]))
    lines.append(
        "export PYTHONPATH="
        + _quote_for_shell(_python_modules_folder(folder))
        + "${PYTHONPATH:+:$PYTHONPATH}"
    )
    return "\n".join(lines) + "\n"


def _quote_for_shell(text: str) -> str:
    import shlex

    return shlex.quote(text)


def _run_ray_start(folder: str, args: OpArgs, entry: OpArgs) -> None:
    log_path = os.path.join(folder, "start.log")
    command = [args["ray"], "start", *args["options"]]
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_make_ray_environment(folder, args),
            cwd=os.path.dirname(os.path.dirname(folder)),
            start_new_session=True,
            close_fds=True,
        )
    entry["session"] = process.pid
    entry["processes"] = [[process.pid, _read_process_table().get(process.pid, _ProcessInfo()).start_ticks]]
    _write_cluster_record(folder, entry)
    try:
        code = process.wait(float(args["timeout_s"]))
    except subprocess.TimeoutExpired:
        text = f"'ray start' timed out after {args['timeout_s']:g} s:\n{_read_start_log_tail(log_path)}"
        raise OpError(text, reason="timeout") from None
    table = _read_process_table()
    members = _find_cluster_processes(entry, table)
    # Record only the daemons; workers are found as their descendants.
    daemons = sorted(pid for pid in members if table[pid].parent_pid not in members)
    entry["processes"] = [[pid, table[pid].start_ticks] for pid in daemons]
    entry["session_dir"] = _find_ray_session_folder(members)
    _write_cluster_record(folder, entry)
    if code != 0:
        raise OpError(
            f"'ray start' exited with code {code}:\n{_read_start_log_tail(log_path)}", reason="start"
        )


def _make_ray_environment(folder: str, args: OpArgs) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    env.pop("RAY_ADDRESS", None)
    # Jobs and workers inherit it, so that their `python` is the one with this Ray.
    env["PATH"] = os.path.dirname(args["ray"]) + os.pathsep + env.get("PATH", os.defpath)
    env.update(
        {
            RAY_CLUSTER_ENV_VARIABLE: args["cluster"] + "." + args["node"],
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": os.path.join(folder, "token"),
            "RAY_NAMESPACE": args["namespace"],
            "RAY_USAGE_STATS_ENABLED": "0",
            "NO_COLOR": "1",
        }
    )
    if args["log_level"] != "info":  # Ray's default; setting it makes every program print a notice
        env["RAY_BACKEND_LOG_LEVEL"] = args["log_level"]
    env["PYTHONPATH"] = os.pathsep.join(
        filter(None, [_python_modules_folder(folder), env.get("PYTHONPATH", "")])
    )
    if args["loopback"]:
        env["RAY_START_HOOK"] = "genie_grid_loopback.bind"
    return env


def _python_modules_folder(folder: str) -> str:
    return os.path.join(folder, "python")


def _write_python_modules(folder: str, args: OpArgs) -> None:
    """Write modules for the cluster's Python. Ray replaces a loopback address unless the hook restores it."""
    python = _python_modules_folder(folder)
    os.makedirs(python, mode=0o700, exist_ok=True)
    _write_private_file(os.path.join(python, "sitecustomize.py"), SITECUSTOMIZE_SOURCE.encode())
    if args["loopback"]:
        text = "def bind(params, head):\n    params.node_ip_address = '127.0.0.1'\n"
        _write_private_file(os.path.join(python, "genie_grid_loopback.py"), text.encode())


def _find_ray_session_folder(members: dict[int, str]) -> str:
    for pid in members:
        for word in _read_bytes_or_empty(f"/proc/{pid}/cmdline").split(b"\0"):
            name, _, value = word.partition(b"=")
            if name in (b"--session_dir", b"--session-dir") and value:
                return os.fsdecode(value)
    return ""


def _read_start_log_tail(path: str) -> str:
    """Return the end of the output of `ray start`, without the colours that it prints despite NO_COLOR."""
    import re

    text = _read_bytes_or_empty(path)[-_START_LOG_TAIL_BYTES:].decode("utf-8", "replace")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).strip().splitlines()
    return "\n".join(lines[-15:])


# --- the cluster record ---


def _read_cluster_record(root: str) -> OpArgs | None:
    path = os.path.join(_ray_folder(root), "cluster.json")
    try:
        with open(path, "rb") as file:
            entry = json.loads(file.read(_FILE_BYTES_MAX).decode())
    except FileNotFoundError:
        return None
    except ValueError:
        raise OpError("damaged file: " + path, reason="damaged") from None
    return entry


def _summarize_with_alive_count(entry: OpArgs | None) -> OpArgs | None:
    """Return the record with the number of its processes that are alive."""
    if entry is None:
        return None
    table = _read_process_table()
    same_boot = entry["boot"] == _read_boot_id()
    alive = [
        pid
        for pid, start_ticks in entry["processes"]
        if same_boot and _is_same_process_alive(table, pid, start_ticks)
    ]
    return {
        "cluster": entry["cluster"],
        "role": entry["role"],
        "head": entry["head"],
        "dashboard_port": entry["dashboard_port"],
        "session_dir": entry["session_dir"],
        "recorded": len(entry["processes"]),
        "alive": len(alive),
    }


def _write_cluster_record(folder: str, entry: OpArgs) -> None:
    _write_private_file(os.path.join(folder, "cluster.json"), json.dumps(entry).encode())


def _write_private_file(path: str, data: bytes) -> None:
    temporary = f"{path}.{os.getpid()}.part"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def _remove_cluster_files(folder: str, entry: OpArgs) -> None:
    for name in ("token", "env.sh", "cluster.json"):
        try:
            os.unlink(os.path.join(folder, name))
        except FileNotFoundError:
            pass
    shutil.rmtree(_python_modules_folder(folder), ignore_errors=True)
    _remove_ray_address_file(entry)


def _remove_ray_address_file(entry: OpArgs) -> None:
    """Remove Ray's file with the address of the current cluster, if it is this cluster."""
    temporary = os.path.dirname(entry["session_dir"]) if entry["session_dir"] else ""
    path = os.path.join(temporary, "ray_current_cluster")
    if temporary and _read_bytes_or_empty(path).decode("utf-8", "replace").strip() == entry["head"]:
        try:
            os.unlink(path)
        except OSError:
            pass


# --- processes ---


class _ProcessInfo:
    def __init__(
        self, parent_pid: int = 0, session_id: int = 0, start_ticks: str = "", state_letter: str = "Z"
    ) -> None:
        self.parent_pid = parent_pid
        self.session_id = session_id
        self.start_ticks = start_ticks
        self.state_letter = state_letter


def _read_process_table() -> dict[int, _ProcessInfo]:
    """Return all processes by PID, without zombies."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        data = _read_bytes_or_empty(f"/proc/{name}/stat")
        words = data[data.rfind(b")") + 2 :].split()
        if len(words) > 19 and words[0] not in (b"Z", b"X"):
            found[int(name)] = _ProcessInfo(
                int(words[1]), int(words[3]), words[19].decode(), words[0].decode()
            )
    return found


def _is_same_process_alive(table: dict[int, _ProcessInfo], pid: int, start_ticks: str) -> bool:
    return pid in table and table[pid].start_ticks == start_ticks


def _find_cluster_processes(entry: OpArgs, table: dict[int, _ProcessInfo]) -> dict[int, str]:
    """Return the start times (in clock ticks since boot) of the cluster's processes on this node by PID.

    These are the recorded processes, those with the cluster ID in their environment, their session (Ray
    overwrites the environment of its workers), and all descendants.
    """
    if entry["boot"] != _read_boot_id():
        return {}
    known = {
        pid for pid, start_ticks in entry["processes"] if _is_same_process_alive(table, pid, start_ticks)
    }
    mark = (RAY_CLUSTER_ENV_VARIABLE + "=" + entry["mark"]).encode()
    known |= {pid for pid in table if mark in _read_bytes_or_empty(f"/proc/{pid}/environ").split(b"\0")}
    if entry["session"] and any(table[pid].session_id == entry["session"] for pid in known):
        known |= {pid for pid, process in table.items() if process.session_id == entry["session"]}
    grown = -1
    while grown != len(known):
        grown = len(known)
        known |= {pid for pid, process in table.items() if process.parent_pid in known}
    known.discard(os.getpid())
    return {pid: table[pid].start_ticks for pid in known}


def _stop_processes_and_get_total_killed_left(entry: OpArgs, grace_s: float) -> tuple[int, int, list[int]]:
    """Send SIGTERM, then SIGKILL. Returns the total, the number killed, and the PIDs that are still alive."""
    members = _find_cluster_processes(entry, _read_process_table())
    total = len(members)
    # The GCS last: the others deregister with it, and would wait if it had stopped.
    last = {
        pid: start_ticks for pid, start_ticks in members.items() if _read_program_name(pid) == b"gcs_server"
    }
    first = {pid: start_ticks for pid, start_ticks in members.items() if pid not in last}
    left = {}
    for each in (first, last):
        _signal_processes(each, signal.SIGTERM)
        left.update(_wait_and_find_still_alive(each, grace_s / 2))
    left.update(_find_cluster_processes(entry, _read_process_table()))
    killed = len(left)
    _signal_processes(left, signal.SIGKILL)
    left = _wait_and_find_still_alive(left, _KILL_TIMEOUT_S)
    return total, killed, sorted(left)


def _read_program_name(pid: int) -> bytes:
    return os.path.basename(_read_bytes_or_empty(f"/proc/{pid}/cmdline").split(b"\0")[0])


def _signal_processes(members: dict[int, str], number: int) -> None:
    table = _read_process_table()
    for pid, start_ticks in members.items():
        if _is_same_process_alive(table, pid, start_ticks):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                pass


def _wait_and_find_still_alive(members: dict[int, str], limit_s: float) -> dict[int, str]:
    deadline = time.monotonic() + limit_s
    while True:
        table = _read_process_table()
        left = {
            pid: start_ticks
            for pid, start_ticks in members.items()
            if _is_same_process_alive(table, pid, start_ticks)
        }
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_INTERVAL_S)


def _read_boot_id() -> str:
    return _read_bytes_or_empty("/proc/sys/kernel/random/boot_id").decode().strip()


def _read_bytes_or_empty(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data: Any = file.read(_FILE_BYTES_MAX)
    except OSError:
        return b""
    return bytes(data)
