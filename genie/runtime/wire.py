"""The wire format between controller, agents and clients: a preface, then frames of limited size.

A connection starts with eight bytes in each direction: b"GENIE", the number of earlier versions that the
sender speaks too, and the highest one; both sides then use the highest common version. A frame is a header
(payload length, kind, call ID; big endian) and a payload, which is one msgpack struct of a known type. The
length is checked against the limit before memory is allocated. There is no pickle and no free-form value.

Decoding is strict. What a peer of a newer release adds to a request is rejected by name, because it may
change the meaning of the rest; in a reply it is ignored.

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

from genie.errors import (
    FrameTooLargeError,
    GenieError,
    ProtocolError,
    UsageError,
    VersionError,
    error_from_code,
)
from genie.model.messages import Message
from genie.model.messages.numbers import find_number_out_of_range
from genie.model.release import ProtocolVersions, choose_common_version
from genie.model.unknown_fields import build_without_unknown_parts, find_unknown_parts
from genie.version import __version__

SUPPORTED_VERSIONS = ProtocolVersions(lowest=1, highest=1)
PREFACE_BYTES = 8
FRAME_BYTES_MAX = 1024 * 1024
UNAUTHENTICATED_FRAME_BYTES_MAX = 16 * 1024
"""Maximum frame size of an unauthenticated peer."""
RETRY_AFTER_S_MAX = 3600.0

_TYPE_FIELD = "type"
_NAME_CHARS_MAX = 60
_UPGRADE_HINT = (
    "upgrade this side first, or do not use that feature yet; the order is: servers, agents, clients"
)
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


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown fields are ignored, as in every reply."""

    code: str
    message: str
    hint: str = ""
    retry_after_s: Annotated[float, msgspec.Meta(ge=0, le=RETRY_AFTER_S_MAX)] = 0.0


_encoder = msgspec.msgpack.Encoder()
_error_decoder = msgspec.msgpack.Decoder(ErrorBody)


def make_preface(versions: ProtocolVersions = SUPPORTED_VERSIONS) -> bytes:
    return _PREFACE_FORMAT.pack(b"GENIE", versions.earlier_count, versions.highest)


def choose_version(preface: bytes, *, own: ProtocolVersions = SUPPORTED_VERSIONS, peer: str) -> int:
    """The version to use with the sender of `preface`. Raises VersionError if no version is common,
    ProtocolError if it is not a preface."""
    magic, earlier_count, highest = _PREFACE_FORMAT.unpack(preface)
    if magic != b"GENIE":
        raise ProtocolError(
            f"{peer} does not speak the Genie protocol: it sent {preface!r}",
            hint="check the address and the port; another program may be listening there",
        )
    theirs = ProtocolVersions.from_counts(highest=highest, earlier_count=earlier_count)
    return choose_common_version(own, theirs, protocol="Genie protocol", peer=peer)


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
        self._type_by_name: dict[str, type[Message]] = {kind.__name__: kind for kind in types}

    def decode(self, payload: bytes, *, peer: str) -> Message:
        """Raises VersionError for what only another release knows, UsageError for a number out of range, and
        ProtocolError."""
        try:
            return _decode(self._decoder, payload, peer)
        except ProtocolError:
            self._check_known_to_this_release(payload, peer)
            self._check_numbers(payload)
            raise

    def _check_numbers(self, payload: bytes) -> None:
        value = _decode_untyped(payload)
        name = value.get(_TYPE_FIELD)
        kind = self._type_by_name.get(name) if isinstance(name, str) else None
        found = None if kind is None else find_number_out_of_range(kind, value)
        if found is not None:
            raise UsageError(
                f"{name}: {found.field} = {found.value} is not allowed", hint=f"allowed: {found.allowed}"
            )

    def _check_known_to_this_release(self, payload: bytes, peer: str) -> None:
        value = _decode_untyped(payload)
        name = value.get(_TYPE_FIELD)
        kind = self._type_by_name.get(name) if isinstance(name, str) else None
        if kind is None and isinstance(name, str) and name.isidentifier():
            raise VersionError(
                f"{peer} sent the request {name[:_NAME_CHARS_MAX]}, which Genie {__version__} does not have",
                hint=_UPGRADE_HINT,
            )
        if kind is not None and (unknown := find_unknown_parts(kind, value)):
            raise VersionError(
                f"{peer} sent {name} with {', '.join(unknown)}, which Genie {__version__} does not know and "
                "must not ignore",
                hint=_UPGRADE_HINT,
            )


def decode_reply(kind: type[_Reply], payload: bytes, *, peer: str) -> _Reply:
    """Ignores what only a newer release knows: unknown fields, and values of enums, which stay text."""
    try:
        reply: _Reply = _decode(_reply_decoder(kind), payload, peer)
    except ProtocolError:
        found = build_without_unknown_parts(kind, _decode_untyped(payload))
        if found is None:
            raise
        return found
    return reply


def _decode_untyped(payload: bytes) -> dict[object, object]:
    """The fields of a message that its decoder has rejected; empty if it is damaged."""
    try:
        value = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


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
