"""A bare client of the executor's wire (native/torch/wire.h), for tests that say things which the torch
device never would. Every byte of it is packed here, so that the two sides share no code.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from genie.agent.executor.session import ALLOWED_OPS
from genie.runtime import native, opwire

TIMEOUT_S = 30.0
FRAME_BYTES_MAX = 4 << 20
INLINE_BYTES_MAX = 64 << 10
RECORDS, BYTES = 1, 2
ACKNOWLEDGE, REPLY, ERROR, FAREWELL = 0, 1, 2, 3
HAS_OFFSET, CONJUGATE, NEGATIVE = 1, 2, 4
# name -> (torch's number, bytes)
DTYPES = {
    "uint8": (0, 1), "int8": (1, 1), "int32": (3, 4), "int64": (4, 8), "float16": (5, 2), "float32": (6, 4),
    "float64": (7, 8), "complex64": (9, 8), "complex128": (10, 16), "bool": (11, 1), "bfloat16": (15, 2),
}  # fmt: skip
_DTYPE_NAMES = {number: name for name, (number, _) in DTYPES.items()}

_FRAME = struct.Struct("<IIQQ")
_REPLY = struct.Struct("<QQQII")


class Record(IntEnum):
    OP = 0
    ASK = 1
    BIND = 2
    TEMPLATE = 3
    FORGET = 4
    ALLOCATE = 5
    FREE = 6
    RESIZE = 7
    PUT = 8
    GET = 9
    SYNC = 10
    SEED = 11
    GENERATOR_STATE = 12
    SET_GENERATOR = 13
    FREE_GENERATOR = 14
    STATS = 15
    GOODBYE = 16
    GRAPH_BEGIN = 17
    GRAPH_END = 18
    GRAPH_REPLAY = 19
    GRAPH_FREE = 20
    GRAPH_STEP = 21
    GRAPH_RESULT = 22
    GRAPH_REPORT = 23
    SHIP = 24
    LAND = 25
    UNSHIP = 26


# --- values -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A tensor on a storage of the executor. Without strides: contiguous."""

    storage: int
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    strides: tuple[int, ...] | None = None
    offset: int = 0
    flags: int = 0

    def steps(self) -> tuple[int, ...]:
        return contiguous(self.shape) if self.strides is None else self.strides

    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class New:
    """An output as it is predicted."""

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Same:
    index: int = 0


@dataclass(frozen=True)
class Scalar:
    """A CPU tensor without dimensions; `number` when it stands for a Python number."""

    data: bytes
    dtype: str = "float64"
    number: bool = True


@dataclass(frozen=True)
class Generator:
    number: int


@dataclass(frozen=True)
class Data:
    """A number that travels with each call."""

    value: int | float


@dataclass(frozen=True)
class Raw:
    """An argument or output as it is, for what cannot be said otherwise."""

    template: bytes
    data: bytes = b""


class _Mark:
    def __init__(self, kind: int) -> None:
        self.kind = kind


UNDEFINED = _Mark(3)
HERE = _Mark(10)
# Any: an argument is whatever an op takes.
Value = Any


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


# --- packing ------------------------------------------------------------------------------------


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def i64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def text(value: str) -> bytes:
    data = value.encode()
    return u32(len(data)) + data


def record(kind: int, argument: int = 0, body: bytes = b"") -> bytes:
    return u32(kind << 24 | argument) + body


def landing(
    tensor: Tensor,
    port: int,
    number: int,
    token: str,
    *,
    host: str = "127.0.0.1",
    server_name: str = "",
    size_bytes: int | None = None,
) -> bytes:
    size = tensor.size_bytes() if size_bytes is None else size_bytes
    address = text(host) + u32(port) + text(server_name) + u64(number) + text(token)
    return record(Record.LAND, 0, view(tensor) + u64(size) + address + text("the source"))


def frame(number: int, payload: bytes, *, kind: int = RECORDS, replies_received: int = 0) -> bytes:
    return _FRAME.pack(len(payload), kind, number, replies_received) + payload


def view(tensor: Tensor) -> bytes:
    head = struct.pack("<BBBB", DTYPES[tensor.dtype][0], len(tensor.shape), tensor.flags, 0)
    return u32(tensor.storage) + head + i64(tensor.offset, *tensor.shape, *tensor.steps())


def argument(value: Value) -> tuple[bytes, bytes]:
    """What the template says of it, and what travels with each call."""
    match value:
        case Raw():
            return value.template, value.data
        case None:
            return b"\x00", b""
        case Tensor():
            flags = value.flags | (HAS_OFFSET if value.offset else 0)
            head = struct.pack("<BBBB", 1, DTYPES[value.dtype][0], len(value.shape), flags)
            offset = i64(value.offset) if value.offset else b""
            return head + i64(*value.shape, *value.steps()), u32(value.storage) + offset
        case Scalar():
            return struct.pack("<BBB", 2, DTYPES[value.dtype][0], value.number), value.data.ljust(16, b"\0")
        case Generator():
            return b"\x0b", u32(value.number)
        case Data(value=int()):
            return b"\x0c", i64(value.value)
        case Data():
            return b"\x0d", struct.pack("<d", value.value)
        case _Mark():
            return bytes([value.kind]), b""
        case list():
            parts = [argument(item) for item in value]
            return b"\x09" + u32(len(parts)) + b"".join(p[0] for p in parts), b"".join(p[1] for p in parts)
    return _plain(value), b""


def _plain(value: bool | int | float | complex | str) -> bytes:
    match value:
        case bool():
            return b"\x05" + bytes([value])
        case int():
            return b"\x04" + i64(value)
        case float():
            return b"\x06" + struct.pack("<d", value)
        case complex():
            return b"\x07" + struct.pack("<dd", value.real, value.imag)
        case str():
            return b"\x08" + text(value)
    raise AssertionError(f"{value!r} cannot be packed")


def output(value: Value) -> bytes:
    match value:
        case Raw():
            return value.template
        case None:
            return b"\x00"
        case New():
            strides = contiguous(value.shape) if value.strides is None else value.strides
            return struct.pack("<BBB", 1, DTYPES[value.dtype][0], len(value.shape)) + i64(
                *value.shape, *strides
            )
        case Same():
            return b"\x02" + u32(value.index)
        case list():
            return b"\x03" + u32(len(value)) + b"".join(output(item) for item in value)
        case int():
            return b"\x04" + i64(value)
    raise AssertionError(f"{value!r} cannot be predicted")


def template_body(op: str, args: Sequence[Value], outputs: Sequence[Value] | None) -> bytes:
    name, _, overload = op.partition(".")
    body = text(name) + text(overload) + u32(len(args)) + b"".join(argument(a)[0] for a in args)
    if outputs is None:
        return body + b"\x00"
    return body + b"\x01" + u32(len(outputs)) + b"".join(output(o) for o in outputs)


def count_new(outputs: Sequence[Value]) -> int:
    return sum(count_new(o) if isinstance(o, list) else isinstance(o, New) for o in outputs)


# --- unpacking ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Error:
    code: str
    op: str
    number: int
    message: str


@dataclass(frozen=True)
class Reply:
    number: int
    payload: bytes


@dataclass(frozen=True)
class Changed:
    index: int
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What an Ask gave; a New has become the Tensor that it was bound to."""

    values: list[Value]
    changed: list[Changed]


@dataclass
class Scanner:
    data: bytes
    at: int = 0

    def unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def one(self, form: str) -> Any:
        return self.unpack(form)[0]

    def text(self) -> str:
        return bytes(self.unpack(f"{self.one('I')}s")[0]).decode()

    def error(self) -> Error:
        return Error(self.text(), self.text(), self.one("Q"), self.text())

    def output(self) -> Value:
        match self.one("B"):
            case 0:
                return None
            case 1:
                dtype, dimensions = self.unpack("BB")
                shape, strides = self.unpack(f"{dimensions}q"), self.unpack(f"{dimensions}q")
                return New(shape, _DTYPE_NAMES[dtype], strides)
            case 2:
                return Same(self.one("I"))
            case 3:
                return [self.output() for _ in range(self.one("I"))]
            case 4:
                return self.one("q")
            case 5:
                return self.one("d")
            case 6:
                return bool(self.one("B"))
            case 7:
                return complex(*self.unpack("dd"))
            case kind:
                raise AssertionError(f"an output of kind {kind}")

    def change(self) -> Changed:
        index, size, dimensions, offset = self.unpack("IQBq")
        return Changed(index, size, offset, self.unpack(f"{dimensions}q"), self.unpack(f"{dimensions}q"))


# --- the client ---------------------------------------------------------------------------------


class SocketPipe:
    """opwire.Pipe over a plain socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def read_exactly(self, count: int, timeout_s: float) -> bytes:
        self.sock.settimeout(timeout_s)
        data = bytearray()
        while len(data) < count:
            part = self.sock.recv(count - len(data))
            if not part:
                raise ConnectionResetError("the peer has closed the connection")
            data += part
        return bytes(data)

    def write_all(self, data: bytes, timeout_s: float) -> None:
        self.sock.settimeout(timeout_s)
        self.sock.sendall(data)

    def close(self) -> None:
        self.sock.close()


@dataclass
class Client:
    """Speaks after the ticket. Numbers what the torch device would number."""

    pipe: Any  # Any: SocketPipe, or a stream of the compiled library
    frames: int = 0
    replies: int = 0
    """The last reply that was received."""
    sent: list[bytes] = field(default_factory=list)
    """Every frame, to be sent again."""
    acknowledged: int = 0
    """The last frame that the executor has said to have."""
    farewell: Error | None = None
    """The executor's last words."""
    _storages: int = 0
    _templates: int = 0

    def close(self) -> None:
        self.pipe.close()

    # --- frames

    def write(self, data: bytes) -> None:
        self.pipe.write_all(data, TIMEOUT_S)

    def send(self, *records: bytes, kind: int = RECORDS) -> None:
        self.frames += 1
        data = frame(self.frames, b"".join(records), kind=kind, replies_received=self.replies)
        self.sent.append(data)
        self.write(data)

    def send_bytes(self, data: bytes, *, part: int = FRAME_BYTES_MAX) -> None:
        for start in range(0, len(data), part):
            self.send(data[start : start + part], kind=BYTES)

    def receive(self) -> Reply | Error:
        """The next reply, or a farewell, after which the executor waits for this side to close."""
        while True:
            size, number, frames, kind, _ = _REPLY.unpack(self.pipe.read_exactly(_REPLY.size, TIMEOUT_S))
            self.acknowledged = frames
            payload = self.pipe.read_exactly(size, TIMEOUT_S) if size else b""
            if kind == ACKNOWLEDGE:
                assert size == 0
                continue
            if kind == FAREWELL:
                self.farewell = Scanner(payload).error()
                return self.farewell
            assert number == self.replies + 1, f"reply {number} came after {self.replies}"
            self.replies = number
            return Scanner(payload).error() if kind == ERROR else Reply(number, payload)

    def receive_acknowledgement(self) -> int:
        size, _, frames, kind, _ = _REPLY.unpack(self.pipe.read_exactly(_REPLY.size, TIMEOUT_S))
        assert (size, kind) == (0, ACKNOWLEDGE)
        return int(frames)

    def ask_for(self, *records: bytes) -> Reply | Error:
        self.send(*records)
        return self.receive()

    def hear_the_end(self) -> None:
        """Waits until the executor says farewell or closes, whatever it said before."""
        try:
            while self.farewell is None:
                self.receive()
        except OSError:
            pass
        self.close()

    # --- ops

    def new_storage(self) -> int:
        self._storages += 1
        return self._storages

    def template(self, op: str, args: Sequence[Value], outputs: Sequence[Value] | None) -> tuple[int, bytes]:
        """Its number, and the record that makes it."""
        self._templates += 1
        body = template_body(op, args, outputs)
        return self._templates, record(Record.TEMPLATE, self._templates, u32(len(body)) + body)

    def op(self, op: str, *args: Value, gives: Sequence[Value] = ()) -> list[Tensor]:
        """Sends an op and gives the tensors that it is to make; nothing is waited for."""
        number, made = self.template(op, args, list(gives))
        storages = [self.new_storage() for _ in range(count_new(gives))]
        data = b"".join(argument(a)[1] for a in args)
        self.send(made, record(Record.OP, number, data + u32(*storages)))
        return bound(gives, storages)

    def made(self, op: str, *args: Value, gives: Sequence[Value]) -> Tensor:
        """The one tensor that an op makes."""
        (tensor,) = self.op(op, *args, gives=gives)
        return tensor

    def asked(self, op: str, *args: Value) -> Answer | Error:
        number, made = self.template(op, args, None)
        reply = self.ask_for(made, record(Record.ASK, number, b"".join(argument(a)[1] for a in args)))
        if isinstance(reply, Error):
            return reply
        scanner = Scanner(reply.payload)
        outputs = [scanner.output() for _ in range(scanner.one("I"))]
        changed = [scanner.change() for _ in range(scanner.one("I"))]
        assert scanner.at == len(reply.payload)
        storages = [self.new_storage() for _ in range(count_new(outputs))]
        self.send(record(Record.BIND, len(storages), u64(reply.number) + u32(*storages)))
        tensors = iter(bound(outputs, storages))
        return Answer([_with_tensors(o, tensors) for o in outputs], changed)

    def refused(self, op: str, *args: Value) -> Error:
        answer = self.asked(op, *args)
        assert isinstance(answer, Error), answer
        return answer

    # --- memory

    def allocate(self, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
        tensor = Tensor(self.new_storage(), shape, dtype)
        self.send(record(Record.ALLOCATE, 0, u32(tensor.storage) + u64(tensor.size_bytes())))
        return tensor

    def put(self, tensor: Tensor, data: bytes) -> None:
        inside = len(data) <= INLINE_BYTES_MAX
        self.send(record(Record.PUT, inside, view(tensor) + u64(len(data)) + (data if inside else b"")))
        if not inside:
            self.send_bytes(data)

    def uploaded(self, shape: tuple[int, ...], data: bytes, dtype: str = "float32") -> Tensor:
        tensor = self.allocate(shape, dtype)
        self.put(tensor, data)
        return tensor

    def floats(self, *values: float) -> Tensor:
        return self.uploaded((len(values),), struct.pack(f"<{len(values)}f", *values))

    def free(self, *tensors: Tensor) -> None:
        self.send(*(record(Record.FREE, 0, u32(tensor.storage)) for tensor in tensors))

    def get(self, tensor: Tensor) -> bytes | Error:
        reply = self.ask_for(record(Record.GET, 0, view(tensor)))
        return reply.payload if isinstance(reply, Reply) else reply

    def floats_in(self, tensor: Tensor) -> tuple[float, ...]:
        data = self.get(tensor)
        assert isinstance(data, bytes), data
        return struct.unpack(f"<{len(data) // 4}f", data)

    # --- copies between executors

    def ship(self, number: int, tensor: Tensor) -> None:
        self.send(record(Record.SHIP, 0, u64(number) + view(tensor)))

    def unship(self, number: int) -> None:
        self.send(record(Record.UNSHIP, 0, u64(number)))

    def land(self, tensor: Tensor, port: int, number: int, token: str, **more: Any) -> None:
        self.send(landing(tensor, port, number, token, **more))

    def sync(self) -> Error | None:
        reply = self.ask_for(record(Record.SYNC))
        return reply if isinstance(reply, Error) else None

    def stats(self) -> Stats:
        reply = self.ask_for(record(Record.STATS))
        assert isinstance(reply, Reply), reply
        return Stats(*struct.unpack("<5Q", reply.payload))

    def goodbye(self) -> None:
        self.send(record(Record.GOODBYE))


@dataclass(frozen=True)
class Stats:
    storages: int
    bytes_allocated: int
    bytes_allocated_peak: int
    bytes_max: int
    ops: int


def bound(outputs: Sequence[Value], storages: Sequence[int]) -> list[Tensor]:
    """The new tensors among outputs, in order, on these storages."""
    flat = [item for o in outputs for item in (o if isinstance(o, list) else [o])]
    news = [item for item in flat if isinstance(item, New)]
    return [
        Tensor(storage, new.shape, new.dtype, new.strides)
        for new, storage in zip(news, storages, strict=True)
    ]


def _with_tensors(value: Value, tensors: Iterator[Tensor]) -> Value:
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    return next(tensors) if isinstance(value, New) else value


# --- connections --------------------------------------------------------------------------------


def dial(port: int) -> SocketPipe:
    return SocketPipe(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))


def enter(pipe: Any, ticket: str, **more: Any) -> opwire.Opened:
    """Raises what the executor refuses with."""
    return opwire.enter(pipe, opwire.Open(ticket, **more), peer="the executor", timeout_s=TIMEOUT_S)


@dataclass
class ServedSession:
    """A session of the C++ library and the threads that serve it, without door and process around it."""

    native: Any
    outcomes: list[str] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def connect(self, *, replies_received: int = 0) -> SocketPipe:
        ours, theirs = socket.socketpair()
        stream = native.load("genie_executor").Stream.bare(theirs.detach())

        def serve() -> None:
            self.outcomes.append(self.native.serve(stream, replies_received))
            stream.close()

        self._threads.append(threading.Thread(target=serve))
        self._threads[-1].start()
        return SocketPipe(ours)

    def wait_end(self) -> str:
        """How the last connection ended."""
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "the session did not end with its client"
        self._threads.clear()
        return self.outcomes[-1]


@contextmanager
def served_session(
    *,
    memory_bytes_max: int = 0,
    allowed_ops: Sequence[str] = sorted(ALLOWED_OPS),
    device: str = "cpu",
    capture: object = None,
    compiler: object = None,
) -> Iterator[tuple[ServedSession, Client]]:
    library = native.load("genie_executor")
    session = ServedSession(
        library.Session(device, memory_bytes_max, allowed_ops, capture=capture, compiler=compiler)
    )
    client = Client(session.connect())
    try:
        yield session, client
    finally:
        client.close()
        session.wait_end()
        session.native.close()
        assert session.native.stats()["bytes_allocated"] == 0
