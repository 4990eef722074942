"""Frames and messages: round trips and validation."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from genie.errors import (
    FrameTooLargeError,
    GenieError,
    NotLeaderError,
    OverloadedError,
    ProtocolError,
    UsageError,
    VersionError,
)
from genie.model.job import JobSpec, Placement
from genie.model.messages import (
    AGENT_REQUESTS,
    CONTROLLER_REQUESTS,
    GetJob,
    Heartbeat,
    JobReply,
    Launch,
    RunningJob,
    SubmitJob,
    reply_type,
)
from genie.model.messages.handshake import Hello
from genie.model.release import ProtocolVersions
from genie.runtime import wire
from genie.version import __version__
from tests.model.sample_values import make_sample


def test_preface_of_releases_without_negotiation_is_sent_and_accepted() -> None:
    assert wire.make_preface() == b"GENIE\x00\x00\x01"
    assert wire.choose_version(b"GENIE\x00\x00\x01", peer="x") == 1
    assert wire.choose_version(b"GENIE\x00\x00\x01", own=ProtocolVersions(lowest=1, highest=9), peer="x") == 1


@given(
    own=st.lists(st.integers(1, 200), min_size=2, max_size=2),
    theirs=st.lists(st.integers(1, 200), min_size=2, max_size=2),
)
def test_both_sides_choose_the_highest_common_version(own: list[int], theirs: list[int]) -> None:
    one, other = (ProtocolVersions(lowest=min(each), highest=max(each)) for each in (own, theirs))
    common = set(range(one.lowest, one.highest + 1)) & set(range(other.lowest, other.highest + 1))
    if common:
        for mine, its in ((one, other), (other, one)):
            assert wire.choose_version(wire.make_preface(its), own=mine, peer="x") == max(common)
    else:
        with pytest.raises(VersionError, match=r"version .* of the Genie protocol, this side .* speaks"):
            wire.choose_version(wire.make_preface(other), own=one, peer="x")


def test_error_names_both_ranges_and_which_side_to_upgrade() -> None:
    ours = ProtocolVersions(lowest=2, highest=3)
    for highest, earlier_count, ranges, older in (
        (7, 2, "speaks version 5 to 7 .* speaks 2 to 3", "a newer release .* upgrade this side first"),
        (1, 0, "speaks version 1 .* speaks 2 to 3", "an older release .* upgrade x first"),
    ):
        theirs = ProtocolVersions.from_counts(highest=highest, earlier_count=earlier_count)
        with pytest.raises(VersionError, match=ranges) as caught:
            wire.choose_version(wire.make_preface(theirs), own=ours, peer="x")
        assert re.search(older, caught.value.hint)
        assert f"(Genie {__version__})" in caught.value.message


def test_other_programs_are_recognized_by_their_preface() -> None:
    for data in (b"HTTP/1.1", b"GENIX\x01\x00\x01", b"\0" * 8):
        with pytest.raises(ProtocolError, match="does not speak the Genie protocol"):
            wire.choose_version(data, peer="x")


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


def test_invalid_requests_are_rejected() -> None:
    decoder = wire.RequestDecoder((GetJob, Hello))
    assert decoder.decode(wire.encode_message(GetJob(job_id="j")), peer="x") == GetJob(job_id="j")
    for body in (
        msgspec.msgpack.encode({"type": "GetJob", "job_id": 7}),
        msgspec.msgpack.encode({"type": "GetJob"}),
        b"\x91" * 100_000,
    ):
        with pytest.raises(ProtocolError, match="sent an invalid message"):
            decoder.decode(body, peer="x")


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9)
    | st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary(max_size=9))
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=9) | st.integers(-9, 9) | st.none(), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def requests_with_any_fields(draw: st.DrawFn) -> dict[str, object]:
    """Fields of requests that this release knows, with any values, and some that it does not know."""
    kind = draw(st.sampled_from(CONTROLLER_REQUESTS))
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    names.append("orbit")
    fields: dict[str, object] = {
        name: draw(_VALUES) for name in draw(st.lists(st.sampled_from(names), unique=True))
    }
    return {"type": draw(st.just(kind.__name__) | _VALUES), **fields}


@given(value=_VALUES | requests_with_any_fields())
@example(value={"type": []})
@example(value={"type": {}})
@example(value={"type": msgspec.msgpack.Ext(5, b"x")})
@example(value={"type": "GetJob", "job_id": []})
def test_any_value_is_decoded_or_rejected_by_name(value: object) -> None:
    decoder = wire.RequestDecoder(CONTROLLER_REQUESTS)
    try:
        request = decoder.decode(msgspec.msgpack.encode(value), peer="x")
    except (ProtocolError, UsageError):  # VersionError is a ProtocolError; UsageError: a number out of range
        return
    assert isinstance(request, CONTROLLER_REQUESTS)


def _encode_fields(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def test_request_of_a_newer_release_is_rejected_by_name() -> None:
    decoder = wire.RequestDecoder((GetJob, SubmitJob, Hello))
    spec = {"name": "n", "command": ["true"], "wishes": {"pods": 2}}
    for body, what in (
        (
            _encode_fields(type="PauseJob", job_id="j"),
            "sent the request PauseJob, which Genie .* does not have",
        ),
        (_encode_fields(type="GetJob", job_id="j", more=1), "sent GetJob with more, which Genie .* not know"),
        (
            _encode_fields(type="GetJob", job_id="j", while_state="paused"),
            "with while_state = 'paused', which",
        ),
        (
            _encode_fields(type="SubmitJob", spec=spec, request_id="r"),
            "sent SubmitJob with spec.wishes.pods, ",
        ),
    ):
        with pytest.raises(VersionError, match=what) as caught:
            decoder.decode(body, peer="1.2.3.4:5 (Genie 0.9.0)")
        assert caught.value.message.startswith("1.2.3.4:5 (Genie 0.9.0) sent ")
        assert "upgrade this side first" in caught.value.hint


def test_launch_with_a_field_that_the_agent_does_not_know_is_rejected() -> None:
    """So an agent never starts a job whose dead-man timer, or another rule, it would not follow."""
    launch = Launch(
        job_id="j",
        tenant="t",
        spec=JobSpec(name="n", command=("true",)),
        placement=Placement(node_id="a", epoch=1, incarnation=1, gpu_ids=()),
        leader_token=1,
        has_deadman_timer=False,
    )
    fields = msgspec.msgpack.decode(wire.encode_message(launch))
    assert fields.pop("deadman") is False
    with pytest.raises(VersionError, match=r"sent Launch with dead_man_2, which Genie .* must not ignore"):
        wire.RequestDecoder(AGENT_REQUESTS).decode(_encode_fields(**fields, dead_man_2=False), peer="x")


def test_names_in_a_version_error_are_short_and_printable() -> None:
    decoder = wire.RequestDecoder((GetJob,))
    many = {f"\n{number}" + "x" * 5000: 1 for number in range(5000)}
    with pytest.raises(VersionError) as caught:
        decoder.decode(_encode_fields(type="GetJob", job_id="j", **many), peer="x")
    assert len(caught.value.message) < 1000
    assert caught.value.message.isprintable()


def test_launch_without_a_deadman_timer_is_rejected_by_agents_that_do_not_know_the_field() -> None:
    """They would end the job at the dead-man time. A launch with the timer has no such field."""
    without_timer = msgspec.structs.replace(make_sample(Launch), has_deadman_timer=False)
    with_timer = msgspec.structs.replace(without_timer, has_deadman_timer=True)
    assert b"deadman" not in wire.encode_message(with_timer)
    body = wire.encode_message(without_timer)
    decoder = wire.RequestDecoder((Launch,))
    assert decoder.decode(body, peer="x") == without_timer
    with pytest.raises(VersionError, match="unknown"):  # as the field is to such an agent
        decoder.decode(body.replace(b"deadman", b"unknown"), peer="x")


def test_report_of_a_newer_release_is_read_without_its_unknown_parts() -> None:
    gpu = {"gpu_id": 0, "name": "TPU", "vendor": "acme", "cooling": "liquid"}
    node = {
        "node_id": "a",
        "hostname": "a",
        "role": "worker",
        "host": "h",
        "status": "throttled",
        "gpus": [gpu],
    }
    body = _encode_fields(
        type="Heartbeat",
        node_id="a",
        incarnation=1,
        node={**node, "orbit": "low"},
        running=[{"job_id": "j", "epoch": 1, "mood": 3}],
        exits=[{"job_id": "k", "epoch": 1, "exit_code": 0, "reason": "", "ended_at": 1.0, "oom": True}],
        weather="fair",
    )
    heartbeat = wire.RequestDecoder((Heartbeat,)).decode(body, peer="x")
    assert isinstance(heartbeat, Heartbeat)
    assert (heartbeat.node.status, heartbeat.node.gpus[0].vendor) == ("throttled", "acme")
    assert heartbeat.running == (RunningJob(job_id="j", epoch=1),)
    again = wire.RequestDecoder((Heartbeat,)).decode(wire.encode_message(heartbeat), peer="x")
    assert again == heartbeat


def test_reply_of_a_newer_release_is_read_without_its_unknown_parts() -> None:
    job = {
        "job_id": "j",
        "tenant": "t",
        "owner": "o",
        "spec": {"name": "n", "command": ["true"], "wishes": {"pods": 2, "workers": 3}},
        "state": "paused",
        "reason": "",
        "submitted_at": 1.0,
        "sequence": 4,
        "stop": "pause",
        "mood": "good",
    }
    reply = wire.decode_reply(JobReply, _encode_fields(type="JobReply", job=job, more=[1]), peer="x")
    assert (reply.job.job_id, reply.job.sequence, reply.job.spec.constraints.workers) == ("j", 4, 3)
    assert (reply.job.state, f"{reply.job.state}", reply.job.stop) == ("paused", "paused", "pause")
    assert not reply.job.state.is_final
    for damaged in ({**job, "sequence": "x"}, {**job, "spec": {}}, {"job_id": "j"}):
        with pytest.raises(ProtocolError, match="sent an invalid message"):
            wire.decode_reply(JobReply, _encode_fields(type="JobReply", job=damaged), peer="x")


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
    unknown = _encode_fields(code="of.tomorrow", message="m", hint="", cause="unknown too")
    assert type(wire.decode_error(unknown, peer="x")) is GenieError
    with pytest.raises(ProtocolError):
        wire.decode_error(b"\x00", peer="x")
