"""The helper's main loop: reads requests from standard input and writes responses to standard output.

A message consists of two lengths (JSON, blob) and both parts. Requests are {"id", "op", "args"}; responses
have the ID and either "ok" or "error" (a reason and a text), in any order. Ops that may block run in threads.
The helper exits when standard input ends; processes started through the fork server, a small process forked
before there were threads, continue.

Runs on nodes: standard library only, Python 3.8. Does not define ops.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import types
from typing import Any, Callable, NoReturn  # noqa: UP035 - Callable[...] at run time needs Python 3.9

PROTOCOL_VERSION = 1
FIRST_REPLY_MAGIC = b"\0genie-grid-1\0"
"""Precedes the first response; output of a login shell comes before it."""
MESSAGE_HEADER = struct.Struct(">II")
MESSAGE_JSON_BYTES_MAX = 8 << 20
MESSAGE_BLOB_BYTES_MAX = 16 << 20
OP_THREADS_MAX = 64

OpReply = Any  # a JSON value, or (JSON value, bytes)
OpArgs = Any  # a JSON object
Op = Callable[[OpArgs, bytes], OpReply]

OP_AND_IS_QUICK_BY_NAME: dict[str, tuple[Op, bool]] = {}


class OpError(Exception):
    """The op failed. `reason` is an identifier for programs, the text is for people."""

    def __init__(self, text: str, *, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


def register_op(name: str, *, quick: bool = False) -> Callable[[Op], Op]:
    """Register a function of (args, blob). A quick one never blocks and runs in the loop itself."""

    def register(function: Op) -> Op:
        OP_AND_IS_QUICK_BY_NAME[name] = (function, quick)
        return function

    return register


def load_module_from_source(name: str, text: str) -> None:
    """Create a module from its source, under the name that imports use."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            package = types.ModuleType(parent)
            package.__path__ = []
            sys.modules[parent] = package
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, name, "exec"), module.__dict__)  # noqa: S102 - our own source, sent by the logged-in user


class ForkServer:
    """Forks processes that outlive the connection. Serves one request at a time."""

    def __init__(self) -> None:
        self._request_lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._channel.close()
            _fork_server_main(theirs)
        theirs.close()
        self.pid = pid

    def load_module(self, name: str, text: str) -> None:
        self._request({"load": name, "text": text})

    def spawn(self, module: str, function: str, args: OpArgs) -> int:
        """Call module.function(args) in a new process with its own session; returns its PID."""
        return int(self._request({"module": module, "function": function, "args": args})["pid"])

    def _request(self, message: OpArgs) -> OpArgs:
        with self._request_lock:
            try:
                _send_message(self._channel, message)
                answer = _receive_message(self._channel)
            except OSError:
                answer = None
        if answer is None:  # the fork server was killed: exit, so that the next helper starts a new one
            os._exit(4)
        return answer


FORK_SERVER: ForkServer


def main() -> NoReturn:
    """Serve requests until the connection ends; never returns."""
    global FORK_SERVER  # noqa: PLW0603 - it must be forked here, before there are threads
    # Output of ops and of child processes must not mix with the responses.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    os.set_inheritable(answers.fileno(), False)
    FORK_SERVER = ForkServer()
    RequestLoop(sys.stdin.buffer, answers).run()


class RequestLoop:
    def __init__(self, requests: Any, answers: Any) -> None:
        self._request_stream = requests
        self._reply_stream = answers
        self._write_lock = threading.Lock()
        self._thread_slots = threading.Semaphore(OP_THREADS_MAX)

    def run(self) -> NoReturn:
        python = ".".join(map(str, sys.version_info[:3]))
        self._write_or_exit(FIRST_REPLY_MAGIC)
        self.send_reply({"id": 0, "ok": {"version": PROTOCOL_VERSION, "python": python, "pid": os.getpid()}})
        while True:
            head = self._read_exactly_or_exit(MESSAGE_HEADER.size)
            json_bytes, blob_bytes = MESSAGE_HEADER.unpack(head)
            if json_bytes > MESSAGE_JSON_BYTES_MAX or blob_bytes > MESSAGE_BLOB_BYTES_MAX:
                os._exit(3)
            request = json.loads(self._read_exactly_or_exit(json_bytes).decode())
            self._dispatch_request(request, self._read_exactly_or_exit(blob_bytes))

    def _dispatch_request(self, request: OpArgs, blob: bytes) -> None:
        if request["op"] == "load":
            load_module_from_source(request["args"]["name"], blob.decode())
            FORK_SERVER.load_module(request["args"]["name"], blob.decode())
            return
        function, quick = OP_AND_IS_QUICK_BY_NAME.get(request["op"], (_reject_unknown_op, True))
        if quick:
            self._execute_op_and_reply(function, request, blob)
        elif not self._thread_slots.acquire(blocking=False):
            self._send_error_reply(request, "busy", f"more than {OP_THREADS_MAX} requests are in progress")
        else:
            threading.Thread(
                target=self._execute_op_in_thread, args=(function, request, blob), daemon=True
            ).start()

    def _execute_op_in_thread(self, function: Op, request: OpArgs, blob: bytes) -> None:
        try:
            self._execute_op_and_reply(function, request, blob)
        finally:
            self._thread_slots.release()

    def _execute_op_and_reply(self, function: Op, request: OpArgs, blob: bytes) -> None:
        try:
            answer = function(request.get("args", {}), blob)
        except OpError as error:
            self._send_error_reply(request, error.reason, str(error))
        except OSError as error:
            self._send_error_reply(request, *reason_and_text_of_os_error(error))
        except Exception as error:
            import traceback

            self._send_error_reply(
                request, "bug", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            )
        else:
            value, data = answer if isinstance(answer, tuple) else (answer, b"")
            self.send_reply({"id": request["id"], "ok": value}, data)

    def _send_error_reply(self, request: OpArgs, reason: str, text: str) -> None:
        self.send_reply({"id": request["id"], "error": {"reason": reason, "text": text}})

    def send_reply(self, message: OpArgs, blob: bytes = b"") -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        self._write_or_exit(MESSAGE_HEADER.pack(len(body), len(blob)) + body + blob)

    def _write_or_exit(self, data: bytes) -> None:
        view = memoryview(data)
        with self._write_lock:
            try:
                while view:
                    view = view[self._reply_stream.write(view) :]
            except OSError:
                os._exit(0)

    def _read_exactly_or_exit(self, count: int) -> bytes:
        data = self._request_stream.read(count)
        if len(data) < count:
            os._exit(0)
        return bytes(data)


def _reject_unknown_op(args: OpArgs, blob: bytes) -> OpReply:
    raise OpError("the helper on the node has no such op", reason="unknown")


def reason_and_text_of_os_error(error: OSError) -> tuple[str, str]:
    """Return the reason for callers to distinguish, and the text."""
    where = ": " + str(error.filename) if error.filename else ""
    return _REASON_BY_ERRNO.get(error.errno or 0, "os"), (error.strerror or str(error)) + where


_REASON_BY_ERRNO = {
    1: "denied",
    2: "missing",
    13: "denied",
    17: "exists",
    28: "no_space",
    30: "read_only",
    122: "no_space",
}
"""Linux errno numbers that callers distinguish."""


def _fork_server_main(channel: socket.socket) -> NoReturn:
    """Main loop of the fork server: serve requests until the helper exits."""
    _detach_stdio()
    while True:
        request = _receive_message(channel)
        if request is None:
            os._exit(0)
        _reap_children()
        if "load" in request:
            load_module_from_source(request["load"], request["text"])
            _send_message(channel, {})
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            _run_function_in_fork(request)
        _send_message(channel, {"pid": pid})


def _run_function_in_fork(request: OpArgs) -> NoReturn:
    status = 70
    try:
        os.setsid()
        getattr(sys.modules[request["module"]], request["function"])(request["args"])
        status = 0
    finally:
        os._exit(status)


def _detach_stdio() -> None:
    """Close the connection's pipes, which would keep the SSH channel open after the helper exits."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        number = int(name)
        if number > 2 and not _is_socket(number) and number != null:
            _close_quietly(number)


def _is_socket(fd: int) -> bool:
    import stat

    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def _close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass


def _reap_children() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _send_message(channel: socket.socket, message: OpArgs) -> None:
    body = json.dumps(message).encode()
    channel.sendall(struct.pack(">I", len(body)) + body)


def _receive_message(channel: socket.socket) -> OpArgs:
    head = _receive_exactly(channel, 4)
    body = _receive_exactly(channel, struct.unpack(">I", head)[0]) if head else None
    return json.loads(body.decode()) if body else None


def _receive_exactly(channel: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        try:
            part = channel.recv(min(count, 1 << 16))
        except OSError:
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
