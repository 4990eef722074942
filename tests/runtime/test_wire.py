"""Frames and messages: round trips and validation."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.errors import (
    FrameTooLargeError,
    GenieError,
    NotLeaderError,
    OverloadedError,
    ProtocolError,
    VersionError,
)
from genie.model.messages import CONTROLLER_REQUESTS, Done, GetJob, Hello, JobReply, reply_type
from genie.runtime import wire


def test_only_the_preface_of_this_version_is_accepted() -> None:
    wire.check_preface(wire.make_preface(), peer="x")
    with pytest.raises(VersionError, match="uses version 2 of the Genie protocol, this side uses 1"):
        wire.check_preface(wire.make_preface(2), peer="x")
    for data in (b"HTTP/1.1", b"GENIE\x01\x00\x01", b"\0" * 8):
        with pytest.raises(ProtocolError, match="does not speak the Genie protocol"):
            wire.check_preface(data, peer="x")


@given(
    kind=st.sampled_from(list(wire.FrameKind)),
    call_id=st.integers(0, 2**32 - 1),
    payload=st.binary(max_size=99),
)
def test_frame_round_trips(kind: wire.FrameKind, call_id: int, payload: bytes) -> None:
    packed = wire.pack_frame(kind, call_id, payload)
    header, body = packed[: wire.HEADER_BYTES], packed[wire.HEADER_BYTES :]
    assert wire.unpack_header(header, frame_bytes_max=99, peer="x") == (len(payload), kind, call_id)
    assert body == payload


def test_oversized_length_is_rejected_before_the_payload_is_read() -> None:
    header = wire.pack_frame(wire.FrameKind.REQUEST, 1, b"12345")[: wire.HEADER_BYTES]
    with pytest.raises(FrameTooLargeError, match="announced a frame of 5 bytes; the limit is 4"):
        wire.unpack_header(header, frame_bytes_max=4, peer="x")
    with pytest.raises(FrameTooLargeError):
        wire.pack_frame(wire.FrameKind.REQUEST, 1, bytes(wire.FRAME_BYTES_MAX + 1))


@given(header=st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES))
def test_any_header_is_decoded_or_rejected(header: bytes) -> None:
    try:
        length, kind, _ = wire.unpack_header(header, frame_bytes_max=1000, peer="x")
    except ProtocolError:
        return
    assert length <= 1000
    assert kind in wire.FrameKind


@given(payload=st.binary(max_size=300))
def test_any_payload_is_decoded_or_rejected(payload: bytes) -> None:
    decoder = wire.RequestDecoder(CONTROLLER_REQUESTS)
    try:
        request = decoder.decode(payload, peer="x")
    except ProtocolError:
        return
    assert isinstance(request, CONTROLLER_REQUESTS)


def test_unknown_requests_and_fields_are_rejected() -> None:
    decoder = wire.RequestDecoder((GetJob, Hello))
    assert decoder.decode(wire.encode_message(GetJob(job_id="j")), peer="x") == GetJob(job_id="j")
    for body in (
        wire.encode_message(Done()),
        msgspec.msgpack.encode({"type": "GetJob", "job_id": "j", "more": 1}),
        msgspec.msgpack.encode({"type": "GetJob", "job_id": 7}),
        msgspec.msgpack.encode({"type": "GetJob"}),
        b"\x91" * 100_000,
    ):
        with pytest.raises(ProtocolError, match="sent an invalid message"):
            decoder.decode(body, peer="x")


def test_every_request_has_a_reply_type() -> None:
    assert reply_type(GetJob) is JobReply
    for request in CONTROLLER_REQUESTS:
        assert issubclass(reply_type(request), msgspec.Struct)  # type: ignore[type-var]


def test_error_keeps_type_message_and_hint() -> None:
    sent = wire.encode_error(NotLeaderError("not the leader", hint="use b"))
    received = wire.decode_error(sent, peer="x")
    assert (type(received), received.message, received.hint) == (NotLeaderError, "not the leader", "use b")
    overloaded = wire.decode_error(
        wire.encode_error(OverloadedError("too many requests", retry_after_s=0.5)), peer="x"
    )
    assert (type(overloaded), overloaded.retry_after_s) == (OverloadedError, 0.5)
    unknown = msgspec.msgpack.encode({"code": "of.tomorrow", "message": "m", "hint": ""})
    assert type(wire.decode_error(unknown, peer="x")) is GenieError
    with pytest.raises(ProtocolError):
        wire.decode_error(b"\x00", peer="x")
