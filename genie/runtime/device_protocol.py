"""The handshake of a connection to an executor: preface, ticket, reply.

Each side sends a preface of eight bytes: b"GENIEX", the number of earlier versions that it speaks too, and
the highest one; both use the highest common version. The client then sends Open, and the executor replies
with Opened or Error. Each message is a length (u32, big endian) and one msgpack struct of a known type; the
length is checked against the limit before memory is allocated. Requests are decoded strictly; what a newer
executor adds to a reply is ignored. After Opened both sides end TLS if `plaintext` is set, and use the op
stream of native/torch/wire.h. Another executor sends Fetch instead, gets Fetched and one parcel (see wire.h),
and may then send Fetch again.

Does not open connections: device/ and executor/ pass a pipe.
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
    error_from_code,
)
from genie.model.release import ProtocolVersions, choose_common_version

SUPPORTED_VERSIONS = ProtocolVersions(lowest=4, highest=4)
HANDSHAKE_REQUEST_BYTES_MAX = 4096
"""Maximum size of a message from an unauthenticated peer."""
HANDSHAKE_REPLY_BYTES_MAX = 64 * 1024
TEXT_CHARACTERS_MAX = 4096

_PREFACE_MAGIC = b"GENIEX"
_PREFACE_FORMAT = struct.Struct(">6sBB")
_LENGTH_PREFIX = struct.Struct(">I")
_BoundedText: TypeAlias = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
_NonNegativeInteger: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]


class Pipe(Protocol):
    """A connection, with or without TLS. Raises OSError if it is lost or the timeout expires."""

    def read_exactly(self, count: int, timeout_s: float) -> bytes: ...

    def write_all(self, data: bytes, timeout_s: float) -> None: ...


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message of the handshake."""


class _Reply(_Message, frozen=True, array_like=True, forbid_unknown_fields=False):
    """A message of the executor."""


class Open(_Message, frozen=True, tag="open"):
    """First message of a client. `machine` is machine_identity().

    With the `session_key` of an earlier Opened it resumes that session; `replies_received` is then the
    number of the last reply that it received.
    """

    ticket: Annotated[str, Meta(max_length=512)]
    session_key: Annotated[str, Meta(max_length=128)] = ""
    replies_received: _NonNegativeInteger = 0
    machine: Annotated[str, Meta(max_length=128)] = ""


class Opened(_Reply, frozen=True, tag="opened"):
    """`kind` is the torch device type of the executor; `job_id` is its ID in the cluster.

    The client resends the frames after `frames_received`. `plaintext`: the op stream does not use TLS,
    because both processes are on one machine or the connection has no TLS.
    """

    kind: _BoundedText
    name: _BoundedText
    memory_bytes: _NonNegativeInteger
    job_id: _BoundedText
    torch_version: _BoundedText
    session_key: Annotated[str, Meta(max_length=128)] = ""
    frames_received: _NonNegativeInteger = 0
    plaintext: bool = False
    fetch_key: Annotated[str, Meta(max_length=128)] = ""
    """Secret from which the client derives tokens for other executors (make_fetch_token)."""


class Fetch(_Message, frozen=True, tag="fetch"):
    """First message of another executor: it requests the parcel `number`. `token`: see make_fetch_token()."""

    number: Annotated[int, Meta(ge=1, le=1 << 62)]
    token: Annotated[str, Meta(max_length=128)]
    machine: Annotated[str, Meta(max_length=128)] = ""


class Fetched(_Reply, frozen=True, tag="fetched"):
    """The parcel follows as soon as it is available. `plaintext` as in Opened."""

    plaintext: bool = False


class Error(_Reply, frozen=True, tag="error"):
    """Why the connection was rejected. `code` is one of errors.py."""

    code: _BoundedText
    message: _BoundedText


_request_decoder: msgspec.msgpack.Decoder[Open | Fetch] = msgspec.msgpack.Decoder(Open | Fetch)
_fetch_decoder = msgspec.msgpack.Decoder(Fetch)
_opened_decoder: msgspec.msgpack.Decoder[Opened | Error] = msgspec.msgpack.Decoder(Opened | Error)
_fetched_decoder: msgspec.msgpack.Decoder[Fetched | Error] = msgspec.msgpack.Decoder(Fetched | Error)


def open_session(
    pipe: Pipe, request: Open, *, peer: str, timeout_s: float, answer_timeout_s: float | None = None
) -> Opened:
    """The handshake of a client. Raises the error of the executor, or TransportError.

    An executor that has sent its preface may be busy: `answer_timeout_s` is the timeout from then on.
    """
    handshake = _Handshake(pipe, peer, timeout_s)
    handshake.exchange_prefaces()
    if answer_timeout_s is not None:
        handshake = _Handshake(pipe, peer, answer_timeout_s)
    return handshake.request(request, _opened_decoder)


def request_fetch(
    pipe: Pipe, request: Fetch, *, peer: str, timeout_s: float, is_reused: bool = False
) -> Fetched:
    """The handshake of an executor that fetches from another one. Raises as `open_session` does.

    `is_reused`: this connection has been used to fetch before.
    """
    handshake = _Handshake(pipe, peer, timeout_s)
    if not is_reused:
        handshake.exchange_prefaces()
    return handshake.request(request, _fetched_decoder)


def receive_request(pipe: Pipe, *, peer: str, timeout_s: float) -> Open | Fetch:
    """The executor's side of the handshake: returns the first message of the peer."""
    handshake = _Handshake(pipe, peer, timeout_s)
    handshake.exchange_prefaces()
    return handshake.read_message(_request_decoder, HANDSHAKE_REQUEST_BYTES_MAX)


def receive_fetch(pipe: Pipe, *, peer: str, timeout_s: float) -> Fetch:
    """Returns the next request of an executor that fetches."""
    return _Handshake(pipe, peer, timeout_s).read_message(_fetch_decoder, HANDSHAKE_REQUEST_BYTES_MAX)


def ticket_digest(ticket: str) -> str:
    """The digest of a ticket, by which an executor verifies it."""
    return hashlib.sha256(ticket.encode()).hexdigest()


def make_fetch_token(fetch_key: str, number: int) -> str:
    """The token to fetch the parcel `number` from the executor that sent this key to its client."""
    return hmac.new(fetch_key.encode(), f"ship {number}".encode(), hashlib.sha256).hexdigest()


def send_reply(pipe: Pipe, message: Opened | Fetched | Error, *, peer: str, timeout_s: float) -> None:
    _Handshake(pipe, peer, timeout_s).write(encode(message))


def make_preface(versions: ProtocolVersions = SUPPORTED_VERSIONS) -> bytes:
    return _PREFACE_FORMAT.pack(_PREFACE_MAGIC, versions.earlier_count, versions.highest)


def choose_version(preface: bytes, *, own: ProtocolVersions = SUPPORTED_VERSIONS, peer: str) -> int:
    """The version to use with the sender of `preface`. Raises VersionError if no version is common,
    ProtocolError if it is not a preface."""
    magic, earlier_count, highest = _PREFACE_FORMAT.unpack(preface)
    if magic != _PREFACE_MAGIC:
        raise ProtocolError(
            f"{peer} does not speak the executor protocol: it sent {preface!r}",
            hint="check the address and the port; another program may be listening there",
        )
    theirs = ProtocolVersions.from_counts(highest=highest, earlier_count=earlier_count)
    return choose_common_version(own, theirs, protocol="executor protocol", peer=peer)


def encode(message: _Message) -> bytes:
    """A message with its length."""
    payload = msgspec.msgpack.encode(message)
    return _LENGTH_PREFIX.pack(len(payload)) + payload


@cache
def machine_identity() -> str:
    """An ID that processes share if and only if they share kernel and loopback interface; '' if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return ""  # not Linux
    return f"{boot}/{network}"


_T = TypeVar("_T")
_Answer = TypeVar("_Answer", Opened, Fetched)


class _Handshake:
    """A pipe with one deadline for the whole handshake."""

    def __init__(self, pipe: Pipe, peer: str, timeout_s: float) -> None:
        self._pipe = pipe
        self._peer = peer
        self._deadline = time.monotonic() + timeout_s

    def exchange_prefaces(self) -> None:
        self.write(make_preface())
        choose_version(self._read(_PREFACE_FORMAT.size), peer=self._peer)

    def request(self, request: Open | Fetch, decoder: msgspec.msgpack.Decoder[_Answer | Error]) -> _Answer:
        self.write(encode(request))
        reply = self.read_message(decoder, HANDSHAKE_REPLY_BYTES_MAX)
        if isinstance(reply, Error):
            raise error_from_code(reply.code, f"{self._peer} rejected the connection: {reply.message}")
        return reply

    def write(self, data: bytes) -> None:
        try:
            self._pipe.write_all(data, self._remaining_s())
        except OSError as error:
            raise self._to_transport_error(error) from error

    def read_message(self, decoder: msgspec.msgpack.Decoder[_T], bytes_max: int) -> _T:
        (length,) = _LENGTH_PREFIX.unpack(self._read(_LENGTH_PREFIX.size))
        if length > bytes_max:
            raise FrameTooLargeError(
                f"{self._peer} announced a message of {length} bytes; the limit is {bytes_max}",
                hint="the peer is broken or is not Genie",
            )
        payload = self._read(length)
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"{self._peer} sent an invalid message: {error}") from None

    def _read(self, count: int) -> bytes:
        try:
            return self._pipe.read_exactly(count, self._remaining_s())
        except OSError as error:
            raise self._to_transport_error(error) from error

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _to_transport_error(self, error: OSError) -> ConnectionLostError | DeadlineError:
        if isinstance(error, TimeoutError) or time.monotonic() >= self._deadline:
            return DeadlineError(f"timed out waiting for {self._peer} during the handshake")
        return ConnectionLostError(f"the connection to {self._peer} was lost: {error}")
