"""Starts Python processes by fork from a helper process that has already imported torch.

Importing torch takes more than a second of CPU time, and many tests need a separate process: an executor, or
a script that may crash. A forked process has its own arguments, environment, working directory, standard
streams and signal handlers, and exits like an interpreter. Differences to a new interpreter: the preloaded
modules are imported, /proc shows the command line and environment of the helper, and libraries have read
their variables (OMP_NUM_THREADS, TORCH_*) when the helper started. Use subprocess for tests of imports, of
start-up, of such variables, and of processes that are found by their command line.

If a preloaded module has started a thread (some builds of PyTorch do), a fork is not safe, and each process
starts as a new interpreter. The helper kills its children and exits when its parent closes the socket or
exits.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Self

ROOT = Path(__file__).parents[1]
_MESSAGE_BYTES_MAX = 1 << 20
_FDS_MAX = 32
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 20.0
_TORCH = ("torch",)

Stream = IO[Any] | int | None


class ForkServer:
    """Starts processes from a helper with these modules imported. Must be closed."""

    def __init__(self, preload: Sequence[str] = _TORCH) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._helper = subprocess.Popen(
                [sys.executable, "-m", "tests.forkserver", str(theirs.fileno()), *preload],
                # Threads of the helper would not survive the fork.
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def popen(
        self,
        arguments: Sequence[str],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ) -> ForkedProcess:
        """Like `subprocess.Popen([sys.executable, *arguments], ...)`, except for the differences in the
        module docstring. `arguments` are those of Python: -W OPTION, then -c CODE, -m MODULE or a script,
        then its arguments."""
        request = {
            "arguments": list(arguments),
            "env": dict(os.environ if env is None else env),
            "cwd": str(Path.cwd() if cwd is None else cwd),
            "pass_fds": list(pass_fds),
            "start_new_session": start_new_session,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as closing:
            closing.enter_context(theirs)
            null = closing.enter_context(Path(os.devnull).open("r+b"))
            pipes: list[IO[bytes] | None] = []
            streams: list[int] = []
            for inherited, stream in enumerate((stdin, stdout, stderr)):
                pipe, child_end = None, stream
                if stream == subprocess.PIPE:
                    pipe, child_end = _open_pipe(is_input=inherited == 0)
                    closing.callback(os.close, child_end)
                elif stream == subprocess.STDOUT:
                    child_end = streams[1]
                pipes.append(pipe)
                streams.append(_to_descriptor(child_end, null, inherited=inherited))
            message = json.dumps(request).encode()
            socket.send_fds(self._control, [message], [theirs.fileno(), *streams, *pass_fds])
        return ForkedProcess(ours, list(arguments), *pipes)

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        text: bool = True,
    ) -> subprocess.CompletedProcess[Any]:
        """Like `subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)`. Kills the
        process and raises TimeoutExpired on timeout."""
        mode = "w+" if text else "w+b"
        with tempfile.TemporaryFile(mode) as out, tempfile.TemporaryFile(mode) as err:
            process = self.popen(arguments, stdin=stdin, stdout=out, stderr=err, env=env, cwd=cwd)
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
                process.wait(_STOP_TIMEOUT_S)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(process.args, code, out.read(), err.read())

    @property
    def pid(self) -> int:
        return self._helper.pid

    def fileno(self) -> int:
        """File descriptor of the socket to the helper."""
        return self._control.fileno()

    def close(self) -> None:
        """Kills the processes that are still running, and ends the helper."""
        self._control.close()
        self._helper.wait(_STOP_TIMEOUT_S)


class ForkedProcess:
    """The part of subprocess.Popen that tests use. Call wait(), otherwise its socket leaks.

    As a context manager it kills the process at the end of the block; Popen would wait.
    """

    def __init__(
        self,
        status: socket.socket,
        args: list[str],
        stdin: IO[bytes] | None,
        stdout: IO[bytes] | None,
        stderr: IO[bytes] | None,
    ) -> None:
        self.args = args
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.returncode: int | None = None
        self._status = status
        status.settimeout(_START_TIMEOUT_S)
        try:
            self.pid = int(json.loads(status.recv(_MESSAGE_BYTES_MAX))["pid"])
        except BaseException:
            status.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait(_STOP_TIMEOUT_S)
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def communicate(self, *, timeout: float) -> tuple[bytes | None, bytes | None]:
        """Reads standard output and standard error to the end and waits for the process."""
        streams = {stream: bytearray() for stream in (self.stdout, self.stderr) if stream is not None}
        deadline = time.monotonic() + timeout
        waiting = set(streams)
        while waiting:
            ready = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout)
            for stream in ready:
                data = stream.read1()  # type: ignore[attr-defined]  # the reader of a pipe is buffered
                streams[stream] += data
                waiting -= set() if data else {stream}
        self.wait(max(0.0, deadline - time.monotonic()))
        out, err = (
            None if stream is None else bytes(streams[stream]) for stream in (self.stdout, self.stderr)
        )
        return out, err

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready = select.select([self._status], [], [], timeout)[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            message = self._status.recv(_MESSAGE_BYTES_MAX)
            self._status.close()
            # Empty: the helper has killed its children and exited.
            self.returncode = int(json.loads(message)["returncode"]) if message else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass  # it has ended since

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _open_pipe(*, is_input: bool) -> tuple[IO[bytes], int]:
    """Returns the end of this process and that of the child."""
    reading, writing = os.pipe()
    return (os.fdopen(writing, "wb"), reading) if is_input else (os.fdopen(reading, "rb"), writing)


def _to_descriptor(stream: Stream, null: IO[bytes], *, inherited: int) -> int:
    if stream is None:
        return inherited
    if stream == subprocess.DEVNULL:
        return null.fileno()
    if isinstance(stream, int):
        assert stream >= 0, f"invalid stream: {stream}"
        return stream
    return stream.fileno()


# --- one server for the whole run -----------------------------------------------------------------

_shared: dict[tuple[str, ...], ForkServer] = {}


def get_shared_server(*preload: str) -> ForkServer:
    """The server of the run with these modules, started on first use and closed by close_shared_servers()."""
    if preload not in _shared:
        _shared[preload] = ForkServer(preload or _TORCH)
    return _shared[preload]


def fork_server_pids() -> frozenset[int]:
    """PIDs of the shared servers, which remain after the test that started them."""
    return frozenset(server.pid for server in _shared.values())


def control_sockets() -> frozenset[str]:
    """Names in /proc of the sockets to the shared servers."""
    return frozenset(f"socket:[{os.fstat(server.fileno()).st_ino}]" for server in _shared.values())


def close_shared_servers() -> None:
    while _shared:
        _shared.popitem()[1].close()


atexit.register(close_shared_servers)


# --- the helper process ---------------------------------------------------------------------------


_HANDLED_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Server:
    """Forks for each request and reports the exit code of each child."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, socket.socket] = {}
        self.has_threads = False
        self._wakeup, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        # Ctrl-C reaches the whole process group, but only the parent may end the helper.
        for number in _HANDLED_SIGNALS:
            signal.signal(number, lambda *_: None)

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """Returns the request and its descriptors in each child, and None in the helper at the end."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wakeup.fileno() in ready:
                self._reap_ended_children()
            if self._control.fileno() not in ready:
                continue
            message, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES_MAX, _FDS_MAX)
            if not message:
                self._kill_children()
                return None
            if self._fork_and_is_child(fds):
                return json.loads(message), fds[1:]

    def _fork_and_is_child(self, fds: list[int]) -> bool:
        """True in the child."""
        if sys.platform == "linux":
            self.has_threads = len(os.listdir("/proc/self/task")) > 1  # noqa: PTH208
        # Signals to the child are delivered only after it has its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: exec follows
            pid = os.fork()
        if pid == 0:
            os.close(fds[0])
            self._reset_in_child()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
        if pid == 0:
            return True
        status = socket.socket(fileno=fds[0])
        for fd in fds[1:]:
            os.close(fd)
        self._children[pid] = status
        _send_message(status, pid=pid)
        return False

    def _reset_in_child(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for sock in (self._control, self._wakeup, self._wakeup_writer, *self._children.values()):
            sock.close()

    def _reap_ended_children(self) -> None:
        try:
            while self._wakeup.recv(4096):
                pass
        except BlockingIOError:
            pass
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._children.pop(pid) as sock:
                    _send_message(sock, returncode=os.waitstatus_to_exitcode(status))

    def _kill_children(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def _send_message(sock: socket.socket, **message: int) -> None:
    try:
        sock.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent no longer waits for it


def _run_request(request: dict[str, Any], fds: list[int], *, fresh: bool) -> NoReturn:
    """Runs the requested program in this process, or with `fresh` in a new interpreter (exec)."""
    if request["start_new_session"]:
        os.setsid()
    targets = [0, 1, 2, *request["pass_fds"]]
    high = max(*targets, *fds) + 1
    # Move all descriptors up first: one may have the target number of another.
    for fd in [_duplicate_above(fd, high) for fd in fds]:
        os.dup2(fd, targets.pop(0))
        os.close(fd)
    os.chdir(request["cwd"])
    if fresh:
        os.execve(sys.executable, [sys.executable, *request["arguments"]], request["env"])
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["env"])
    _run_python_arguments(request["arguments"])


def _duplicate_above(fd: int, lowest: int) -> int:
    import fcntl

    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    return moved


def _run_python_arguments(arguments: list[str]) -> NoReturn:
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
        del arguments[:2]
    option, target, others = arguments[0], "".join(arguments[1:2]), arguments[2:]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if option == "-c":
        sys.path[0] = ""
        sys.argv[:] = ["-c", *others]
        exec(compile(target, "<string>", "exec"), main.__dict__)
    elif not option.startswith("-"):
        sys.path[0] = str(Path(option).resolve().parent)
        sys.argv[:] = arguments
        main.__file__ = option
        exec(compile(Path(option).read_bytes(), option, "exec"), main.__dict__)
    else:
        assert option == "-m", f"unsupported option: {option}"
        sys.path[0] = os.getcwd()  # noqa: PTH109
        sys.argv[:] = ["-m", *others]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy all shared pages
    server = _Server(socket.socket(fileno=int(sys.argv[1])))
    work = server.serve()
    if work is not None:
        _run_request(*work, fresh=server.has_threads)
