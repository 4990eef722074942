"""The life cycle of a job, the holds of a node, and the encoding of renamed fields."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.model.allocation import Hold, NodeHolds
from genie.model.job import (
    ALLOWED_TRANSITIONS,
    FINAL_STATES,
    JOB_HISTORY_MAX,
    Job,
    JobSpec,
    JobState,
    Placement,
    PlacementConstraints,
    Resources,
    StopReason,
    Transition,
    with_state,
)
from genie.model.messages import NodesRuledOut, NodeView, QueuedJob
from genie.model.messages.handshake import Join
from genie.model.record import Record
from tests.fakes.agent import make_node_info


def make_job(state: JobState = JobState.QUEUED) -> Job:
    return Job(
        job_id="j-1",
        tenant="t",
        owner="o",
        spec=JobSpec(name="n", command=("true",)),
        state=state,
        reason="r",
        submitted_at=0.0,
        sequence=1,
        history=(Transition(state=state, at=0.0, reason="r"),),
    )


@pytest.mark.parametrize(("before", "after"), list(itertools.product(JobState, JobState)))
def test_transition_is_allowed_if_and_only_if_it_is_in_the_table(before: JobState, after: JobState) -> None:
    if after in ALLOWED_TRANSITIONS[before]:
        step = with_state(make_job(before), after, reason="because", at=5.0)
        assert (step.state, step.reason) == (after, "because")
        assert step.history[-1] == Transition(state=after, at=5.0, reason="because")
        assert (step.ended_at == 5.0) == after.is_final
        assert (step.started_at == 5.0) == (after is JobState.RUNNING)
    else:
        with pytest.raises(AssertionError):
            with_state(make_job(before), after, reason="because", at=5.0)


def test_final_states_have_no_transitions() -> None:
    assert {state for state, moves in ALLOWED_TRANSITIONS.items() if not moves} == FINAL_STATES


def test_requeued_job_has_no_placement() -> None:
    placement = Placement(node_id="n", incarnation=1, gpu_ids=(0,), epoch=1)
    placing = msgspec.structs.replace(make_job(JobState.PLACING), placements=(placement,))
    assert with_state(placing, JobState.QUEUED, reason="r", at=1.0).placement is None
    assert with_state(placing, JobState.RUNNING, reason="r", at=1.0).placement == placement


def test_long_history_keeps_its_start_and_end() -> None:
    one = make_job()
    for number in range(200):
        state = JobState.PLACING if one.state is JobState.QUEUED else JobState.QUEUED
        one = with_state(one, state, reason=str(number), at=float(number))
    assert len(one.history) == JOB_HISTORY_MAX
    assert one.history[0].reason == "r"
    assert one.history[-1].reason == "199"


def test_job_is_unchanged_by_encoding_and_decoding() -> None:
    one = msgspec.structs.replace(make_job(), stop=StopReason.CANCEL, session="laptop", request_id="r")
    assert msgspec.json.decode(msgspec.json.encode(one), type=Job) == one


HOLDS = st.builds(
    Hold,
    job_id=st.uuids().map(str),
    tenant=st.just("t"),
    epoch=st.integers(1, 99),
    incarnation=st.just(1),
    gpu_ids=st.sets(st.integers(0, 3)).map(lambda ids: tuple(sorted(ids))),
    gpu_milli=st.sampled_from([100, 500, 1000]),
    cpus=st.sampled_from([0.0, 0.5, 2.0]),
    memory_bytes=st.integers(0, 100),
)


@given(holds=st.lists(HOLDS, max_size=8))
def test_holds_never_over_allocate_an_accelerator(holds: list[Hold]) -> None:
    node_holds = NodeHolds(node_id="n")
    for hold in holds:
        fits = all(node_holds.gpu_used_milli(gpu) + hold.gpu_milli <= 1000 for gpu in hold.gpu_ids)
        if fits:
            after = node_holds.with_hold(hold)
            assert after.without_worker(hold.job_id, epoch=hold.epoch) == node_holds
            node_holds = after
        else:
            with pytest.raises(AssertionError):
                node_holds.with_hold(hold)
    assert node_holds.cpus_used == sum(hold.cpus for hold in node_holds.holds)
    assert node_holds.memory_used_bytes == sum(hold.memory_bytes for hold in node_holds.holds)


def test_defaults_are_not_encoded_and_are_restored() -> None:
    spec = JobSpec(name="n", command=("true",))
    written = msgspec.json.encode(spec)
    assert written == b'{"name":"n","command":["true"]}'
    assert msgspec.json.decode(written, type=JobSpec) == spec
    assert msgspec.json.decode(msgspec.json.encode(make_job()), type=Job) == make_job()


CONSTRAINTS = PlacementConstraints(workers=2)


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (JobSpec(name="n", command=("true",), constraints=CONSTRAINTS), "wishes"),
        (
            QueuedJob(
                position=1,
                job_id="j-1",
                name="n",
                tenant="t",
                resources=Resources(),
                constraints=CONSTRAINTS,
                submitted_at=0.0,
                reason="r",
            ),
            "wishes",
        ),
        (NodesRuledOut(reason="r", count=1, nodes=("n",), is_permanent=True), "ever"),
        (NodeView(info=make_node_info("n"), node_holds=NodeHolds(node_id="n")), "ledger"),
        (Join(token="t", requested_node_id="n", csr_pem=""), "node_id_wish"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_renamed_field_keeps_its_encoded_name(record: Record, name: str) -> None:
    """Jobs that are stored and processes of another revision use that name."""
    encoded = msgspec.json.encode(record)
    assert name in msgspec.json.decode(encoded)
    assert msgspec.json.decode(encoded, type=type(record)) == record
