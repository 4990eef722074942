"""The wire between the torch device and an executor: a preface, capped frames, typed messages.

A connection starts with eight bytes each way: b"GENIEX" and the version. A frame is a header
(payload length, kind, sequence; big endian) and a payload: one msgpack struct of a known type
(CONTROL), or raw tensor bytes (DATA). Requests are numbered by the client; an answer and the
data that belongs to it carry the number of the request. A length over the cap of its kind is an
error before any memory is taken. Tensors are named by integers that mean something on their own
connection only; a device other than the executor's own, a file or an object cannot be said.

Not for: torch (device/ and agent/executor/ turn its values into these), and what an op may do.
"""

from __future__ import annotations

import enum
import math
import socket
import struct
import time
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    FrameTooLargeError,
    OpRefusedError,
    ProtocolError,
    VersionError,
)

VERSION = 1
PREFACE_BYTES = 8
CONTROL_BYTES_MAX = 1024 * 1024
CONTROL_BYTES_MAX_STRANGER = 4096
"""Cap before the ticket is accepted; no data frame is allowed then."""
DATA_BYTES_MAX = 16 * 1024 * 1024
INLINE_BYTES_MAX = 64 * 1024
"""Small CPU tensors ride inside RunOp up to this size."""
HANDLES_PER_FREE_MAX = 10_000
DIMENSIONS_MAX = 64
LIST_ITEMS_MAX = 65536
TEXT_CHARACTERS_MAX = 4096
OUT_OF_MEMORY = "device.out_of_memory"
"""Code of an Error that the client raises as torch.OutOfMemoryError."""

_MAGIC = b"GENIEX"
_PREFACE = struct.Struct(">6sH")
_HEADER = struct.Struct(">IBI")
HEADER_BYTES = _HEADER.size
SEQUENCE_MODULUS = 1 << 32


class Kind(enum.IntEnum):
    CONTROL = 1
    DATA = 2


class Header(NamedTuple):
    length_bytes: int
    kind: Kind
    sequence: int


# --- values -------------------------------------------------------------------------------------

DTypeName = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
DTYPE_NAMES: tuple[DTypeName, ...] = get_args(DTypeName)
_ITEM_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int8": 1, "int16": 2, "int32": 4,
    "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_SIZE_MAX = 1 << 62

Number: TypeAlias = Annotated[int, Meta(ge=1, le=_SIZE_MAX)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=_SIZE_MAX)]
Shape: TypeAlias = Annotated[tuple[Size, ...], Meta(max_length=DIMENSIONS_MAX)]


class _Value(Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """A value that msgpack has no form for."""


class Handle(_Value, frozen=True, tag="h"):
    """A tensor that lives on the executor."""

    number: Number


class Inline(_Value, frozen=True, tag="i"):
    """A small tensor that travels with the call: contiguous, little endian."""

    dtype: DTypeName
    shape: Shape
    data: Annotated[bytes, Meta(max_length=INLINE_BYTES_MAX)]


class DType(_Value, frozen=True, tag="d"):
    name: DTypeName


class Layout(_Value, frozen=True, tag="l"):
    name: Literal["strided"]


class MemoryFormat(_Value, frozen=True, tag="m"):
    name: Literal["contiguous_format", "preserve_format", "channels_last", "channels_last_3d"]


class OwnDevice(_Value, frozen=True, tag="v"):
    """The executor's own accelerator; no other can be named."""


class Complex(_Value, frozen=True, tag="c"):
    real: float
    imag: float


class TensorMeta(_Value, frozen=True, tag="o", omit_defaults=True):
    """What an op gave back: where it lives and how it looks. `conj` and `neg` are torch's lazy bits."""

    handle: Number
    dtype: DTypeName
    shape: Shape
    strides: Shape
    offset: Size
    conj: bool = False
    neg: bool = False


_Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
Item: TypeAlias = (
    bool | int | float | _Text | Handle | Inline | DType | Layout | MemoryFormat | OwnDevice | Complex | None
)
# aten knows lists of plain things and no lists of lists, so neither does the wire.
Value: TypeAlias = Item | Annotated[list[Item], Meta(max_length=LIST_ITEMS_MAX)]
ResultItem: TypeAlias = bool | int | float | Complex | TensorMeta | None
ResultValue: TypeAlias = ResultItem | Annotated[list[ResultItem], Meta(max_length=LIST_ITEMS_MAX)]
OpName: TypeAlias = Annotated[
    str, Meta(pattern=r"^aten::[A-Za-z_][A-Za-z_0-9]*(\.[A-Za-z_0-9]+)?\Z", max_length=128)
]


# --- messages -----------------------------------------------------------------------------------


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One control frame."""


class Open(_Message, frozen=True, tag="open"):
    """The first frame of a client. Answered by Opened."""

    ticket: Annotated[str, Meta(max_length=512)]


class RunOp(_Message, frozen=True, tag="run"):
    """One op below autograd. Answered by Result."""

    op: OpName
    args: Annotated[list[Value], Meta(max_length=256)]
    kwargs: Annotated[dict[Annotated[str, Meta(max_length=64)], Value], Meta(max_length=64)]


class Upload(_Message, frozen=True, tag="upload"):
    """Fills a tensor of exactly this dtype and shape. Answered by Ready; then DATA follows, then Done."""

    handle: Number
    dtype: DTypeName
    shape: Shape


class Download(_Message, frozen=True, tag="download"):
    """Answered by Content; then its bytes follow as DATA, contiguous."""

    handle: Number


class Free(_Message, frozen=True, tag="free"):
    """Forgets tensors. Not answered."""

    handles: Annotated[list[Number], Meta(max_length=HANDLES_PER_FREE_MAX)]


class Stats(_Message, frozen=True, tag="stats"):
    """Answered by Counters."""


class Seed(_Message, frozen=True, tag="seed"):
    """Seeds this session's random numbers. Answered by Done."""

    value: Annotated[int, Meta(ge=0)]


class GetRngState(_Message, frozen=True, tag="get_rng"):
    """Answered by RngState."""


class SetRngState(_Message, frozen=True, tag="set_rng"):
    """Answered by Done."""

    state: Annotated[bytes, Meta(max_length=INLINE_BYTES_MAX)]


class Synchronize(_Message, frozen=True, tag="sync"):
    """Answered by Done when everything sent before has been carried out."""


class Opened(_Message, frozen=True, tag="opened"):
    """`kind` is the executor's torch device type; `job_id` names the executor in the cluster."""

    kind: _Text
    name: _Text
    memory_bytes: Size
    job_id: _Text
    torch_version: _Text


class Result(_Message, frozen=True, tag="result"):
    """One value for each return of the op, and the tensors given in whose shape the op changed."""

    values: Annotated[list[ResultValue], Meta(max_length=256)]
    changed: Annotated[list[TensorMeta], Meta(max_length=256)]


class Ready(_Message, frozen=True, tag="ready"):
    """The executor waits for the data."""


class Content(_Message, frozen=True, tag="content"):
    dtype: DTypeName
    shape: Shape


class Counters(_Message, frozen=True, tag="counters"):
    """`bytes_allocated` counts each storage once; `bytes_max` is the session's quota, 0 for none."""

    tensors: Size
    bytes_allocated: Size
    bytes_allocated_peak: Size
    bytes_max: Size
    ops: Size


class RngState(_Message, frozen=True, tag="rng"):
    state: Annotated[bytes, Meta(max_length=INLINE_BYTES_MAX)]


class Done(_Message, frozen=True, tag="done"):
    pass


class Error(_Message, frozen=True, tag="error"):
    """`code` is one of errors.py or OUT_OF_MEMORY; `op` is empty when no op was run."""

    code: _Text
    message: _Text
    op: _Text
    number: Size


Request: TypeAlias = (
    Open | RunOp | Upload | Download | Free | Stats | Seed | GetRngState | SetRngState | Synchronize
)
Reply: TypeAlias = Opened | Result | Ready | Content | Counters | RngState | Done | Error

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


# --- encode and decode: no sockets --------------------------------------------------------------


def size_bytes(dtype: DTypeName, shape: Sequence[int]) -> int:
    """Bytes of a contiguous tensor. Exact, however large."""
    return math.prod(shape) * _ITEM_BYTES[dtype]


def preface(version: int = VERSION) -> bytes:
    return _PREFACE.pack(_MAGIC, version)


def check_preface(data: bytes, *, peer: str) -> None:
    """VersionError for another version of this wire, ProtocolError for anything else."""
    magic, version = _PREFACE.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError(
            f"{peer} does not speak the executor's wire: it began with {data!r}",
            hint="check the address and the port; another program may be listening there",
        )
    if version != VERSION:
        raise VersionError(
            f"{peer} speaks version {version} of the executor's wire, this side speaks {VERSION}",
            hint="install the same release of Genie on both sides",
        )


def encode(sequence: int, message: Request | Reply) -> bytes:
    """A whole control frame. OpRefusedError for a value that msgpack cannot hold."""
    try:
        payload = _encoder.encode(message)
    except OverflowError as error:
        raise OpRefusedError(f"a number is too large for the wire: {error}") from None
    except UnicodeEncodeError as error:
        raise OpRefusedError(f"a text cannot be sent: {error}") from None
    if len(payload) > CONTROL_BYTES_MAX:
        raise FrameTooLargeError(
            f"a call of {len(payload)} bytes is over the cap of {CONTROL_BYTES_MAX}",
            hint="pass large data as tensors, not as lists",
        )
    return _HEADER.pack(len(payload), Kind.CONTROL, sequence) + payload


def data_header(sequence: int, length_bytes: int) -> bytes:
    assert 0 < length_bytes <= DATA_BYTES_MAX
    return _HEADER.pack(length_bytes, Kind.DATA, sequence)


def decode_header(header: bytes, *, trusted: bool, peer: str) -> Header:
    """Checked before a byte of the payload is read. A peer is trusted once its ticket is accepted."""
    length, kind, sequence = _HEADER.unpack(header)
    if kind == Kind.CONTROL:
        cap = CONTROL_BYTES_MAX if trusted else CONTROL_BYTES_MAX_STRANGER
    elif kind == Kind.DATA and trusted:
        cap = DATA_BYTES_MAX
    else:
        raise ProtocolError(f"{peer} sent a frame of kind {kind}, which is not allowed here")
    if length > cap:
        raise FrameTooLargeError(
            f"{peer} announced a frame of {length} bytes; the cap is {cap}",
            hint="the peer is broken or is not Genie",
        )
    return Header(length, Kind(kind), sequence)


def decode_request(payload: bytes | bytearray, *, peer: str) -> Request:
    return _decoded(_request_decoder, payload, peer)


def decode_reply(payload: bytes | bytearray, *, peer: str) -> Reply:
    return _decoded(_reply_decoder, payload, peer)


_T = TypeVar("_T")


def _decoded(decoder: msgspec.msgpack.Decoder[_T], payload: bytes | bytearray, peer: str) -> _T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{peer} sent a message that cannot be read: {error}") from None


# --- over a blocking socket ---------------------------------------------------------------------


def tune(sock: socket.socket) -> None:
    """Small messages leave at once; a peer whose machine has vanished is noticed within about a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        option = getattr(socket, name, None)  # macOS knows only some of them
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Channel:
    """One end of a connection. Every read and write has a deadline, in seconds from the call.

    Not safe for several threads at once; close() may be called from any. Reading or writing that
    fails in the middle leaves the stream unusable: close it.
    """

    def __init__(self, sock: socket.socket, *, peer: str, trusted: bool) -> None:
        self._sock = sock
        self.peer = peer
        self.trusted = trusted

    def exchange_prefaces(self, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._write(preface(), deadline)
        data = bytearray(PREFACE_BYTES)
        self._read_exactly(memoryview(data), deadline)
        check_preface(bytes(data), peer=self.peer)

    def send(self, sequence: int, message: Request | Reply, *, timeout_s: float) -> None:
        self.send_frames(encode(sequence, message), timeout_s=timeout_s)

    def send_frames(self, frames: bytes, *, timeout_s: float) -> None:
        self._write(frames, time.monotonic() + timeout_s)

    def send_data(self, sequence: int, data: memoryview, *, timeout_s: float) -> None:
        """All bytes of a tensor, as DATA frames. The deadline holds for each frame."""
        for start in range(0, len(data), DATA_BYTES_MAX):
            chunk = data[start : start + DATA_BYTES_MAX]
            deadline = time.monotonic() + timeout_s
            self._write(data_header(sequence, len(chunk)), deadline)
            self._write(chunk, deadline)

    def receive_request(self, *, timeout_s: float, wait_s: float | None) -> tuple[int, Request] | None:
        """The next request; waits `wait_s` for it to begin (None: for ever). None: the peer has closed."""
        header = self._read_header(timeout_s=timeout_s, wait_s=wait_s)
        if header is None:
            return None
        payload = self._read_control(header, timeout_s)
        return header.sequence, decode_request(payload, peer=self.peer)

    def receive_reply(self, sequence: int, *, timeout_s: float) -> Reply:
        header = self._read_header(timeout_s=timeout_s, wait_s=timeout_s)
        if header is None:
            raise ConnectionLostError(f"{self.peer} closed the connection instead of answering")
        reply = decode_reply(self._read_control(header, timeout_s), peer=self.peer)
        # Last words before the peer gives up carry whatever number it was waiting for.
        if header.sequence != sequence and not isinstance(reply, Error):
            raise ProtocolError(f"{self.peer} answered request {header.sequence} instead of {sequence}")
        return reply

    def receive_data(self, sequence: int, into: memoryview, *, timeout_s: float) -> None:
        """Fills `into` from DATA frames. The deadline holds for each frame."""
        while into:
            header = self._read_header(timeout_s=timeout_s, wait_s=timeout_s)
            if header is None:
                raise ConnectionLostError(f"{self.peer} closed the connection in the middle of a tensor")
            if header.kind is not Kind.DATA or header.sequence != sequence or header.length_bytes == 0:
                raise ProtocolError(f"{self.peer} sent something else in the middle of a tensor")
            if header.length_bytes > len(into):
                raise FrameTooLargeError(f"{self.peer} sent more data than it had announced")
            self._read_exactly(into[: header.length_bytes], time.monotonic() + timeout_s)
            into = into[header.length_bytes :]

    def close(self) -> None:
        """Wakes a thread that is blocked on the connection; it then sees the connection as lost."""
        try:
            # Past ssl's own shutdown, which would wait for the peer's close_notify.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass  # never connected, or closed by the peer already
        self._sock.close()

    def abandon(self) -> None:
        """Gives up this process's copy of the connection only; for a child after fork."""
        self._sock.close()

    def finish(self, *, timeout_s: float) -> None:
        """Closes after what was sent has been read by the peer, so that its last words arrive."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            self._sock.settimeout(timeout_s)
            scratch = bytearray(65536)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and socket.socket.recv_into(self._sock, scratch):
                pass
        except OSError:
            pass  # the peer is gone, or does not close in time: nothing more to say to it
        self.close()

    def _read_control(self, header: Header, timeout_s: float) -> bytearray:
        if header.kind is not Kind.CONTROL:
            raise ProtocolError(f"{self.peer} sent data where a message was due")
        payload = bytearray(header.length_bytes)
        self._read_exactly(memoryview(payload), time.monotonic() + timeout_s)
        return payload

    def _read_header(self, *, timeout_s: float, wait_s: float | None) -> Header | None:
        raw = bytearray(HEADER_BYTES)
        view = memoryview(raw)
        got = self._read_some(view, None if wait_s is None else time.monotonic() + wait_s)
        if got == 0:
            return None
        self._read_exactly(view[got:], time.monotonic() + timeout_s)
        return decode_header(bytes(raw), trusted=self.trusted, peer=self.peer)

    def _read_exactly(self, into: memoryview, deadline: float) -> None:
        while into:
            got = self._read_some(into, deadline)
            if got == 0:
                raise ConnectionLostError(f"{self.peer} closed the connection in the middle of a message")
            into = into[got:]

    def _read_some(self, into: memoryview, deadline: float | None) -> int:
        try:
            self._sock.settimeout(_left(deadline))
            return self._sock.recv_into(into)
        except TimeoutError:
            raise DeadlineError(f"{self.peer} sent nothing in time") from None
        except (OSError, ValueError) as error:  # ValueError: another thread has closed a TLS socket
            raise ConnectionLostError(f"the connection to {self.peer} broke: {error}") from error

    def _write(self, data: bytes | memoryview, deadline: float) -> None:
        try:
            self._sock.settimeout(_left(deadline))
            self._sock.sendall(data)
        except TimeoutError:
            raise DeadlineError(f"{self.peer} does not take what is sent to it") from None
        except (OSError, ValueError) as error:
            raise ConnectionLostError(f"the connection to {self.peer} broke: {error}") from error


def _left(deadline: float | None) -> float | None:
    # Never 0, which would make the socket non-blocking.
    return None if deadline is None else max(0.001, deadline - time.monotonic())
