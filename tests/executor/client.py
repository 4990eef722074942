"""A minimal client of the wire protocol (native/torch/wire.h), for tests that send what the torch device does
not send. It packs every byte itself, so that the two sides share no code.
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

from genie.executor.session import ALLOWED_OPS
from genie.native import libraries
from genie.runtime import device_protocol

TIMEOUT_S = 30.0
FRAME_BYTES_MAX = 4 << 20
INLINE_BYTES_MAX = 64 << 10
RECORDS, BYTES = 1, 2
ACKNOWLEDGE, REPLY, ERROR, FATAL = 0, 1, 2, 3
HAS_OFFSET, CONJUGATE, NEGATIVE = 1, 2, 4
# name -> (torch's number, bytes)
DTYPES = {
    "uint8": (0, 1), "int8": (1, 1), "int32": (3, 4), "int64": (4, 8), "float16": (5, 2), "float32": (6, 4),
    "float64": (7, 8), "complex64": (9, 8), "complex128": (10, 16), "bool": (11, 1), "bfloat16": (15, 2),
}  # fmt: skip
_DTYPE_NAMES = {number: name for name, (number, _) in DTYPES.items()}

_FRAME = struct.Struct("<IIQQ")
_REPLY = struct.Struct("<QQQII")


class RecordKind(IntEnum):
    OP = 0
    DYNAMIC_OP = 1
    BIND_OUTPUTS = 2
    DEFINE_TEMPLATE = 3
    DROP_TEMPLATE = 4
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
    CLOSE_SESSION = 16
    GRAPH_BEGIN = 17
    GRAPH_END = 18
    GRAPH_REPLAY = 19
    GRAPH_FREE = 20
    GRAPH_STEP = 21
    GRAPH_RESULT = 22
    GRAPH_REPORT = 23
    PUBLISH_PARCEL = 24
    FETCH_PARCEL = 25
    DROP_PARCEL = 26
    SETTINGS = 27


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

    def effective_strides(self) -> tuple[int, ...]:
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class NewOutput:
    """A predicted output."""

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class AliasOutput:
    index: int = 0


@dataclass(frozen=True)
class Scalar:
    """A CPU tensor without dimensions; `number` if it wraps a Python number."""

    data: bytes
    dtype: str = "float64"
    number: bool = True


@dataclass(frozen=True)
class Generator:
    number: int


@dataclass(frozen=True)
class CallNumber:
    """A number that is sent with each call."""

    value: int | float


@dataclass(frozen=True)
class RawBytes:
    """An encoded argument or output, for invalid ones."""

    template: bytes
    data: bytes = b""


class _KindOnlyArgument:
    def __init__(self, kind: int) -> None:
        self.kind = kind


UNDEFINED = _KindOnlyArgument(3)
DEVICE = _KindOnlyArgument(10)
# Any: an argument is whatever an op takes.
Value = Any


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
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


def encode_text(value: str) -> bytes:
    data = value.encode()
    return u32(len(data)) + data


def record(kind: int, argument: int = 0, body: bytes = b"") -> bytes:
    return u32(kind << 24 | argument) + body


def fetch_parcel_record(
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
    address = encode_text(host) + u32(port) + encode_text(server_name) + u64(number) + encode_text(token)
    return record(
        RecordKind.FETCH_PARCEL, 0, encode_view(tensor) + u64(size) + address + encode_text("the source")
    )


def frame(number: int, payload: bytes, *, kind: int = RECORDS, replies_received: int = 0) -> bytes:
    return _FRAME.pack(len(payload), kind, number, replies_received) + payload


def encode_view(tensor: Tensor) -> bytes:
    head = struct.pack("<BBBB", DTYPES[tensor.dtype][0], len(tensor.shape), tensor.flags, 0)
    return u32(tensor.storage) + head + i64(tensor.offset, *tensor.shape, *tensor.effective_strides())


def encode_argument(value: Value) -> tuple[bytes, bytes]:
    """Its part of the template, and the data that is sent with each call."""
    match value:
        case RawBytes():
            return value.template, value.data
        case None:
            return b"\x00", b""
        case Tensor():
            flags = value.flags | (HAS_OFFSET if value.offset else 0)
            head = struct.pack("<BBBB", 1, DTYPES[value.dtype][0], len(value.shape), flags)
            offset = i64(value.offset) if value.offset else b""
            return head + i64(*value.shape, *value.effective_strides()), u32(value.storage) + offset
        case Scalar():
            return struct.pack("<BBB", 2, DTYPES[value.dtype][0], value.number), value.data.ljust(16, b"\0")
        case Generator():
            return b"\x0b", u32(value.number)
        case CallNumber(value=int()):
            return b"\x0c", i64(value.value)
        case CallNumber():
            return b"\x0d", struct.pack("<d", value.value)
        case _KindOnlyArgument():
            return bytes([value.kind]), b""
        case list():
            parts = [encode_argument(item) for item in value]
            return b"\x09" + u32(len(parts)) + b"".join(p[0] for p in parts), b"".join(p[1] for p in parts)
    return _encode_plain_argument(value), b""


def _encode_plain_argument(value: bool | int | float | complex | str) -> bytes:
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
            return b"\x08" + encode_text(value)
    raise AssertionError(f"{value!r} cannot be packed")


def encode_output(value: Value) -> bytes:
    match value:
        case RawBytes():
            return value.template
        case None:
            return b"\x00"
        case NewOutput():
            strides = contiguous_strides(value.shape) if value.strides is None else value.strides
            return struct.pack("<BBB", 1, DTYPES[value.dtype][0], len(value.shape)) + i64(
                *value.shape, *strides
            )
        case AliasOutput():
            return b"\x02" + u32(value.index)
        case list():
            return b"\x03" + u32(len(value)) + b"".join(encode_output(item) for item in value)
        case int():
            return b"\x04" + i64(value)
    raise AssertionError(f"{value!r} cannot be predicted")


def template_body(op: str, args: Sequence[Value], outputs: Sequence[Value] | None) -> bytes:
    name, _, overload = op.partition(".")
    body = (
        encode_text(name)
        + encode_text(overload)
        + u32(len(args))
        + b"".join(encode_argument(a)[0] for a in args)
    )
    if outputs is None:
        return body + b"\x00"
    return body + b"\x01" + u32(len(outputs)) + b"".join(encode_output(o) for o in outputs)


def count_new_outputs(outputs: Sequence[Value]) -> int:
    return sum(count_new_outputs(o) if isinstance(o, list) else isinstance(o, NewOutput) for o in outputs)


# --- unpacking ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorReply:
    code: str
    op: str
    number: int
    message: str


@dataclass(frozen=True)
class Reply:
    number: int
    payload: bytes


@dataclass(frozen=True)
class ResizedInput:
    index: int
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class DynamicResult:
    """Outputs of a dynamic op; each New is replaced by the Tensor that it was bound to."""

    values: list[Value]
    changed: list[ResizedInput]


@dataclass
class ReplyReader:
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

    def error(self) -> ErrorReply:
        return ErrorReply(self.text(), self.text(), self.one("Q"), self.text())

    def output(self) -> Value:
        match self.one("B"):
            case 0:
                return None
            case 1:
                dtype, dimensions = self.unpack("BB")
                shape, strides = self.unpack(f"{dimensions}q"), self.unpack(f"{dimensions}q")
                return NewOutput(shape, _DTYPE_NAMES[dtype], strides)
            case 2:
                return AliasOutput(self.one("I"))
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

    def change(self) -> ResizedInput:
        index, size, dimensions, offset = self.unpack("IQBq")
        return ResizedInput(index, size, offset, self.unpack(f"{dimensions}q"), self.unpack(f"{dimensions}q"))


# --- the client ---------------------------------------------------------------------------------


class SocketPipe:
    """device_protocol.Pipe over a plain socket."""

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
    """A client after the handshake. Assigns numbers as the torch device does."""

    pipe: Any  # Any: SocketPipe, or a stream of the compiled library
    frames: int = 0
    replies: int = 0
    """Number of the last received reply."""
    sent: list[bytes] = field(default_factory=list)
    """All frames, for resending."""
    acknowledged: int = 0
    """Number of the last frame that the executor has acknowledged."""
    fatal_error: ErrorReply | None = None
    """The error that ended the session."""
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

    def receive(self) -> Reply | ErrorReply:
        """Return the next reply or the fatal error, after which the executor waits for this side to close."""
        while True:
            size, number, frames, kind, _ = _REPLY.unpack(self.pipe.read_exactly(_REPLY.size, TIMEOUT_S))
            self.acknowledged = frames
            payload = self.pipe.read_exactly(size, TIMEOUT_S) if size else b""
            if kind == ACKNOWLEDGE:
                assert size == 0
                continue
            if kind == FATAL:
                self.fatal_error = ReplyReader(payload).error()
                return self.fatal_error
            assert number == self.replies + 1, f"reply {number} received after {self.replies}"
            self.replies = number
            return ReplyReader(payload).error() if kind == ERROR else Reply(number, payload)

    def receive_acknowledgement(self) -> int:
        size, _, frames, kind, _ = _REPLY.unpack(self.pipe.read_exactly(_REPLY.size, TIMEOUT_S))
        assert (size, kind) == (0, ACKNOWLEDGE)
        return int(frames)

    def request(self, *records: bytes) -> Reply | ErrorReply:
        self.send(*records)
        return self.receive()

    def receive_until_end(self) -> None:
        """Receive until the fatal error or the end of the connection."""
        try:
            while self.fatal_error is None:
                self.receive()
        except OSError:
            pass
        self.close()

    # --- ops

    def new_storage(self) -> int:
        self._storages += 1
        return self._storages

    def template(self, op: str, args: Sequence[Value], outputs: Sequence[Value] | None) -> tuple[int, bytes]:
        """Return its number and the record that defines it."""
        self._templates += 1
        body = template_body(op, args, outputs)
        return self._templates, record(RecordKind.DEFINE_TEMPLATE, self._templates, u32(len(body)) + body)

    def op(self, op: str, *args: Value, outputs: Sequence[Value] = ()) -> list[Tensor]:
        """Send an op and return its predicted tensors, without waiting."""
        number, made = self.template(op, args, list(outputs))
        storages = [self.new_storage() for _ in range(count_new_outputs(outputs))]
        data = b"".join(encode_argument(a)[1] for a in args)
        self.send(made, record(RecordKind.OP, number, data + u32(*storages)))
        return bind_outputs(outputs, storages)

    def op_output(self, op: str, *args: Value, outputs: Sequence[Value]) -> Tensor:
        """Send an op with one output and return that."""
        (tensor,) = self.op(op, *args, outputs=outputs)
        return tensor

    def run_dynamic(self, op: str, *args: Value) -> DynamicResult | ErrorReply:
        number, made = self.template(op, args, None)
        reply = self.request(
            made, record(RecordKind.DYNAMIC_OP, number, b"".join(encode_argument(a)[1] for a in args))
        )
        if isinstance(reply, ErrorReply):
            return reply
        scanner = ReplyReader(reply.payload)
        outputs = [scanner.output() for _ in range(scanner.one("I"))]
        changed = [scanner.change() for _ in range(scanner.one("I"))]
        assert scanner.at == len(reply.payload)
        storages = [self.new_storage() for _ in range(count_new_outputs(outputs))]
        self.send(record(RecordKind.BIND_OUTPUTS, len(storages), u64(reply.number) + u32(*storages)))
        tensors = iter(bind_outputs(outputs, storages))
        return DynamicResult([_replace_new_outputs(o, tensors) for o in outputs], changed)

    def run_refused(self, op: str, *args: Value) -> ErrorReply:
        answer = self.run_dynamic(op, *args)
        assert isinstance(answer, ErrorReply), answer
        return answer

    # --- memory

    def allocate(self, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
        tensor = Tensor(self.new_storage(), shape, dtype)
        self.send(record(RecordKind.ALLOCATE, 0, u32(tensor.storage) + u64(tensor.size_bytes())))
        return tensor

    def put(self, tensor: Tensor, data: bytes) -> None:
        is_inline = len(data) <= INLINE_BYTES_MAX
        self.send(
            record(
                RecordKind.PUT, is_inline, encode_view(tensor) + u64(len(data)) + (data if is_inline else b"")
            )
        )
        if not is_inline:
            self.send_bytes(data)

    def upload(self, shape: tuple[int, ...], data: bytes, dtype: str = "float32") -> Tensor:
        tensor = self.allocate(shape, dtype)
        self.put(tensor, data)
        return tensor

    def floats(self, *values: float) -> Tensor:
        return self.upload((len(values),), struct.pack(f"<{len(values)}f", *values))

    def free(self, *tensors: Tensor) -> None:
        self.send(*(record(RecordKind.FREE, 0, u32(tensor.storage)) for tensor in tensors))

    def get(self, tensor: Tensor) -> bytes | ErrorReply:
        reply = self.request(record(RecordKind.GET, 0, encode_view(tensor)))
        return reply.payload if isinstance(reply, Reply) else reply

    def floats_in(self, tensor: Tensor) -> tuple[float, ...]:
        data = self.get(tensor)
        assert isinstance(data, bytes), data
        return struct.unpack(f"<{len(data) // 4}f", data)

    # --- copies between executors

    def publish_parcel(self, number: int, tensor: Tensor) -> None:
        self.send(record(RecordKind.PUBLISH_PARCEL, 0, u64(number) + encode_view(tensor)))

    def drop_parcel(self, number: int) -> None:
        self.send(record(RecordKind.DROP_PARCEL, 0, u64(number)))

    def fetch_parcel(self, tensor: Tensor, port: int, number: int, token: str, **more: Any) -> None:
        self.send(fetch_parcel_record(tensor, port, number, token, **more))

    def sync(self) -> ErrorReply | None:
        reply = self.request(record(RecordKind.SYNC))
        return reply if isinstance(reply, ErrorReply) else None

    def stats(self) -> SessionStats:
        reply = self.request(record(RecordKind.STATS))
        assert isinstance(reply, Reply), reply
        return SessionStats(*struct.unpack("<5Q", reply.payload))

    def close_session(self) -> None:
        self.send(record(RecordKind.CLOSE_SESSION))


@dataclass(frozen=True)
class SessionStats:
    storages: int
    bytes_allocated: int
    bytes_allocated_peak: int
    bytes_max: int
    ops: int


def bind_outputs(outputs: Sequence[Value], storages: Sequence[int]) -> list[Tensor]:
    """The new tensors among outputs, in order, on these storages."""
    flat = [item for o in outputs for item in (o if isinstance(o, list) else [o])]
    news = [item for item in flat if isinstance(item, NewOutput)]
    return [
        Tensor(storage, new.shape, new.dtype, new.strides)
        for new, storage in zip(news, storages, strict=True)
    ]


def _replace_new_outputs(value: Value, tensors: Iterator[Tensor]) -> Value:
    if isinstance(value, list):
        return [_replace_new_outputs(item, tensors) for item in value]
    return next(tensors) if isinstance(value, NewOutput) else value


# --- connections --------------------------------------------------------------------------------


def open_pipe(port: int) -> SocketPipe:
    return SocketPipe(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))


def handshake(pipe: Any, ticket: str, **more: Any) -> device_protocol.Opened:
    """Raises the error of the executor if it refuses."""
    return device_protocol.open_session(
        pipe, device_protocol.Open(ticket, **more), peer="the executor", timeout_s=TIMEOUT_S
    )


@dataclass
class ServedSession:
    """A session of the C++ library and its serving threads, without listener and process."""

    native: Any
    outcomes: list[str] = field(default_factory=list)
    _handshake_thread_count: list[threading.Thread] = field(default_factory=list)

    def connect(self, *, replies_received: int = 0) -> SocketPipe:
        ours, theirs = socket.socketpair()
        stream = libraries.load("genie_executor").Stream.plaintext(theirs.detach())

        def serve() -> None:
            self.outcomes.append(self.native.serve(stream, replies_received))
            stream.close()

        self._handshake_thread_count.append(threading.Thread(target=serve))
        self._handshake_thread_count[-1].start()
        return SocketPipe(ours)

    def wait_end(self) -> str:
        """Return the outcome of the last connection."""
        for thread in self._handshake_thread_count:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "the session did not end with its client"
        self._handshake_thread_count.clear()
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
    library = libraries.load("genie_executor")
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
