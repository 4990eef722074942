"""How a connection to an executor is set up: a preface, the client's ticket, and the executor's answer.

Eight bytes each way: b"GENIEX" and the version. Then the client sends Open and the executor answers
Opened or Error; each is a length (u32, big endian) and one msgpack struct of a known type. A length
over the cap is an error before any memory is taken. After Opened both sides end TLS if it says
`bare`, and speak the op stream of native/torch/wire.h. Another executor, sent by the client, says
Fetch instead and is answered with Fetched; then comes one parcel, as wire.h says, and after that it
may say Fetch again.

Not for: the op stream itself, and connecting (device/ and agent/executor/ bring the pipe).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import time
from functools import cache
from pathlib import Path
from typing import Annotated, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    FrameTooLargeError,
    ProtocolError,
    VersionError,
    from_code,
)

VERSION = 3
OPEN_BYTES_MAX = 4096
"""Cap of what a stranger may send, whose ticket has not been seen yet."""
ANSWER_BYTES_MAX = 64 * 1024
TEXT_CHARACTERS_MAX = 4096

_MAGIC = b"GENIEX"
_PREFACE = struct.Struct(">6sH")
_LENGTH = struct.Struct(">I")
_Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]


class Pipe(Protocol):
    """A connection, with or without TLS. OSError when it breaks or the time is over."""

    def read_exactly(self, count: int, timeout_s: float) -> bytes: ...

    def write_all(self, data: bytes, timeout_s: float) -> None: ...


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One message of the set-up."""


class Open(_Message, frozen=True, tag="open"):
    """What a client says first. With the `session_key` of an earlier Opened it goes on where that one broke
    off; `replies_received` is then the number of the last reply it has. `machine` is this_machine()."""

    ticket: Annotated[str, Meta(max_length=512)]
    session_key: Annotated[str, Meta(max_length=128)] = ""
    replies_received: _Count = 0
    machine: Annotated[str, Meta(max_length=128)] = ""


class Opened(_Message, frozen=True, tag="opened"):
    """`kind` is the executor's torch device type; `job_id` names the executor in the cluster.

    The client sends the frames after `frames_received` again. `bare` means that the op stream
    goes without TLS: both ends are processes of one machine, or there was no TLS to begin with.
    """

    kind: _Text
    name: _Text
    memory_bytes: _Count
    job_id: _Text
    torch_version: _Text
    session_key: Annotated[str, Meta(max_length=128)] = ""
    frames_received: _Count = 0
    bare: bool = False


class Fetch(_Message, frozen=True, tag="fetch"):
    """What another executor says first, to get what the client ships under `number`. `token` is
    fetch_token() of that, and good for nothing else."""

    number: Annotated[int, Meta(ge=1, le=1 << 62)]
    token: Annotated[str, Meta(max_length=128)]
    machine: Annotated[str, Meta(max_length=128)] = ""


class Fetched(_Message, frozen=True, tag="fetched"):
    """The parcel comes next, as soon as it is there. `bare` as in Opened."""

    bare: bool = False


class Error(_Message, frozen=True, tag="error"):
    """Why the client is not let in. `code` is one of errors.py."""

    code: _Text
    message: _Text


_request_decoder: msgspec.msgpack.Decoder[Open | Fetch] = msgspec.msgpack.Decoder(Open | Fetch)
_fetch_decoder = msgspec.msgpack.Decoder(Fetch)
_opened_decoder: msgspec.msgpack.Decoder[Opened | Error] = msgspec.msgpack.Decoder(Opened | Error)
_fetched_decoder: msgspec.msgpack.Decoder[Fetched | Error] = msgspec.msgpack.Decoder(Fetched | Error)


def enter(
    pipe: Pipe, request: Open, *, peer: str, timeout_s: float, answer_timeout_s: float | None = None
) -> Opened:
    """The client's side. Raises what the executor refused with, or a TransportError.

    An executor that has given its preface is alive, and may be busy: `answer_timeout_s` is for the rest.
    """
    line = _Line(pipe, peer, timeout_s)
    line.exchange_prefaces()
    if answer_timeout_s is not None:
        line = _Line(pipe, peer, answer_timeout_s)
    return line.ask(request, _opened_decoder)


def fetch(pipe: Pipe, request: Fetch, *, peer: str, timeout_s: float, again: bool = False) -> Fetched:
    """The side of an executor that fetches from another; `again`: not for the first time on this connection.
    Raises as `enter` does."""
    line = _Line(pipe, peer, timeout_s)
    if not again:
        line.exchange_prefaces()
    return line.ask(request, _fetched_decoder)


def receive_request(pipe: Pipe, *, peer: str, timeout_s: float) -> Open | Fetch:
    """The executor's side, up to the first message of whoever came."""
    line = _Line(pipe, peer, timeout_s)
    line.exchange_prefaces()
    return line.read_message(_request_decoder, OPEN_BYTES_MAX)


def receive_fetch(pipe: Pipe, *, peer: str, timeout_s: float) -> Fetch:
    """What whoever has fetched something says next."""
    return _Line(pipe, peer, timeout_s).read_message(_fetch_decoder, OPEN_BYTES_MAX)


def ticket_digest(ticket: str) -> str:
    """What an executor knows of its ticket."""
    return hashlib.sha256(ticket.encode()).hexdigest()


def fetch_token(digest: str, number: int) -> str:
    """Lets whoever has it fetch this one number from the executor whose ticket has the digest."""
    return hmac.new(digest.encode(), f"ship {number}".encode(), hashlib.sha256).hexdigest()


def answer(pipe: Pipe, message: Opened | Fetched | Error, *, peer: str, timeout_s: float) -> None:
    _Line(pipe, peer, timeout_s).write(encode(message))


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


def encode(message: Open | Opened | Fetch | Fetched | Error) -> bytes:
    """A whole message, with its length."""
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


@cache
def this_machine() -> str:
    """The same for two processes exactly when they share a kernel and its loopback; empty when unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return ""  # not Linux
    return f"{boot}/{network}"


_T = TypeVar("_T")
_Answer = TypeVar("_Answer", Opened, Fetched)


class _Line:
    """A pipe with one deadline for everything that is said over it."""

    def __init__(self, pipe: Pipe, peer: str, timeout_s: float) -> None:
        self._pipe = pipe
        self._peer = peer
        self._deadline = time.monotonic() + timeout_s

    def exchange_prefaces(self) -> None:
        self.write(preface())
        check_preface(self._read(_PREFACE.size), peer=self._peer)

    def ask(self, request: Open | Fetch, decoder: msgspec.msgpack.Decoder[_Answer | Error]) -> _Answer:
        self.write(encode(request))
        answer = self.read_message(decoder, ANSWER_BYTES_MAX)
        if isinstance(answer, Error):
            raise from_code(answer.code, f"{self._peer} refused: {answer.message}")
        return answer

    def write(self, data: bytes) -> None:
        try:
            self._pipe.write_all(data, self._left_s())
        except OSError as error:
            raise self._failure(error) from error

    def read_message(self, decoder: msgspec.msgpack.Decoder[_T], bytes_max: int) -> _T:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > bytes_max:
            raise FrameTooLargeError(
                f"{self._peer} announced a message of {length} bytes; the cap is {bytes_max}",
                hint="the peer is broken or is not Genie",
            )
        payload = self._read(length)
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"{self._peer} sent a message that cannot be read: {error}") from None

    def _read(self, count: int) -> bytes:
        try:
            return self._pipe.read_exactly(count, self._left_s())
        except OSError as error:
            raise self._failure(error) from error

    def _left_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _failure(self, error: OSError) -> ConnectionLostError | DeadlineError:
        if isinstance(error, TimeoutError) or time.monotonic() >= self._deadline:
            return DeadlineError(f"{self._peer} did not say in time what was due")
        return ConnectionLostError(f"the connection to {self._peer} broke: {error}")
