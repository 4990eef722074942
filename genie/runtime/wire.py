"""The wire format between controller, agents and clients: a preface, then frames of limited size.

A connection starts with eight bytes in each direction: b"GENIE", a zero, and the version. A frame is a header
(payload length, kind, call ID; big endian) and a payload, which is one msgpack struct of a known type. The
length is checked against the limit before memory is allocated. There is no pickle and no free-form value.

Connections are in network.py and rpc.py, the protocol of executors in device_protocol.py.
"""

from __future__ import annotations

import enum
import functools
import operator
import struct
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from genie.errors import FrameTooLargeError, GenieError, ProtocolError, VersionError, error_from_code
from genie.model.messages import Message

VERSION = 1
PREFACE_BYTES = 8
FRAME_BYTES_MAX = 1024 * 1024
UNAUTHENTICATED_FRAME_BYTES_MAX = 16 * 1024
"""Maximum frame size of an unauthenticated peer."""
RETRY_AFTER_S_MAX = 3600.0

_PREFACE_FORMAT = struct.Struct(">5sBH")
_FRAME_HEADER_FORMAT = struct.Struct(">IBI")
HEADER_BYTES = _FRAME_HEADER_FORMAT.size

_Reply = TypeVar("_Reply", bound=Message)


class FrameKind(enum.IntEnum):
    REQUEST = 1
    REPLY = 2
    ERROR = 3


# A lookup takes a fifth of the time of a call of the enum.
_KIND_BY_NUMBER: dict[int, FrameKind] = {kind.value: kind for kind in FrameKind}


class Frame(NamedTuple):
    kind: FrameKind
    call_id: int
    payload: bytes


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    code: str
    message: str
    hint: str = ""
    retry_after_s: Annotated[float, msgspec.Meta(ge=0, le=RETRY_AFTER_S_MAX)] = 0.0


_encoder = msgspec.msgpack.Encoder()
_error_decoder = msgspec.msgpack.Decoder(ErrorBody)


def make_preface(version: int = VERSION) -> bytes:
    return _PREFACE_FORMAT.pack(b"GENIE", 0, version)


def check_preface(data: bytes, *, peer: str) -> None:
    """Raises VersionError for another version of the protocol, ProtocolError for anything else."""
    magic, zero, version = _PREFACE_FORMAT.unpack(data)
    if magic != b"GENIE" or zero != 0:
        raise ProtocolError(
            f"{peer} does not speak the Genie protocol: it sent {data!r}",
            hint="check the address and the port; another program may be listening there",
        )
    if version != VERSION:
        raise VersionError(
            f"{peer} uses version {version} of the Genie protocol, this side uses {VERSION}",
            hint="install the same release of Genie on both sides",
        )


def pack_frame(kind: FrameKind, call_id: int, payload: bytes) -> bytes:
    if len(payload) > FRAME_BYTES_MAX:
        raise FrameTooLargeError(
            f"a message of {len(payload)} bytes exceeds the limit of {FRAME_BYTES_MAX}",
            hint="send smaller messages",
        )
    return _FRAME_HEADER_FORMAT.pack(len(payload), kind, call_id) + payload


def unpack_header(data: bytes, at: int = 0, *, frame_bytes_max: int, peer: str) -> tuple[int, FrameKind, int]:
    """Length, kind and call ID of the header at offset `at`; checks them before the payload is read."""
    length, number, call_id = _FRAME_HEADER_FORMAT.unpack_from(data, at)
    if length > frame_bytes_max:
        raise FrameTooLargeError(
            f"{peer} announced a frame of {length} bytes; the limit is {frame_bytes_max}",
            hint="the peer is broken or is not Genie",
        )
    kind = _KIND_BY_NUMBER.get(number)
    if kind is None:
        raise ProtocolError(f"{peer} sent a frame of unknown kind {number}")
    return length, kind, call_id


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


class RequestDecoder:
    """Decodes exactly one of the given request types."""

    def __init__(self, types: Sequence[type[Message]]) -> None:
        union: Any = functools.reduce(operator.or_, types)  # Any: a union made at run time
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)

    def decode(self, payload: bytes, *, peer: str) -> Message:
        return _decode(self._decoder, payload, peer)


def decode_reply(kind: type[_Reply], payload: bytes, *, peer: str) -> _Reply:
    reply: _Reply = _decode(_reply_decoder(kind), payload, peer)
    return reply


@functools.cache
def _reply_decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    """One decoder per type of reply. Any: the cache has one type for all."""
    return msgspec.msgpack.Decoder(kind)


def encode_error(error: GenieError) -> bytes:
    body = ErrorBody(
        code=error.code,
        message=error.message[:4000],
        hint=error.hint[:4000],
        retry_after_s=min(error.retry_after_s, RETRY_AFTER_S_MAX),
    )
    return _encoder.encode(body)


def decode_error(payload: bytes, *, peer: str) -> GenieError:
    body = _decode(_error_decoder, payload, peer)
    return error_from_code(body.code, body.message, hint=body.hint, retry_after_s=body.retry_after_s)


_Value = TypeVar("_Value")


def _decode(decoder: msgspec.msgpack.Decoder[_Value], payload: bytes, peer: str) -> _Value:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{peer} sent an invalid message: {error}") from None
