"""The life cycle of a job, and the ledger's arithmetic."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.model.allocation import Hold, NodeLedger
from genie.model.job import (
    ALLOWED_MOVES,
    FINAL_STATES,
    HISTORY_MAX,
    Job,
    JobSpec,
    JobState,
    Placement,
    Stop,
    Transition,
    moved,
)


def job(state: JobState = JobState.QUEUED) -> Job:
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
def test_a_step_is_taken_if_and_only_if_the_table_has_it(before: JobState, after: JobState) -> None:
    if after in ALLOWED_MOVES[before]:
        step = moved(job(before), after, reason="because", at=5.0)
        assert (step.state, step.reason) == (after, "because")
        assert step.history[-1] == Transition(state=after, at=5.0, reason="because")
        assert (step.ended_at == 5.0) == after.is_final
        assert (step.started_at == 5.0) == (after is JobState.RUNNING)
    else:
        with pytest.raises(AssertionError):
            moved(job(before), after, reason="because", at=5.0)


def test_nothing_leaves_a_final_state() -> None:
    assert {state for state, moves in ALLOWED_MOVES.items() if not moves} == FINAL_STATES


def test_going_back_to_the_queue_forgets_the_place() -> None:
    placement = Placement(node_id="n", incarnation=1, gpu_ids=(0,), epoch=1)
    placing = msgspec.structs.replace(job(JobState.PLACING), placements=(placement,))
    assert moved(placing, JobState.QUEUED, reason="r", at=1.0).placement is None
    assert moved(placing, JobState.RUNNING, reason="r", at=1.0).placement == placement


def test_a_history_without_end_keeps_its_beginning_and_its_end() -> None:
    one = job()
    for number in range(200):
        state = JobState.PLACING if one.state is JobState.QUEUED else JobState.QUEUED
        one = moved(one, state, reason=str(number), at=float(number))
    assert len(one.history) == HISTORY_MAX
    assert one.history[0].reason == "r"
    assert one.history[-1].reason == "199"


def test_a_job_survives_the_store() -> None:
    one = msgspec.structs.replace(job(), stop=Stop.CANCEL, session="laptop", request_id="r")
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
def test_a_ledger_never_holds_more_than_all_of_an_accelerator(holds: list[Hold]) -> None:
    ledger = NodeLedger(node_id="n")
    for hold in holds:
        fits = all(ledger.gpu_used_milli(gpu) + hold.gpu_milli <= 1000 for gpu in hold.gpu_ids)
        if fits:
            after = ledger.with_hold(hold)
            assert after.without_job(hold.job_id) == ledger
            ledger = after
        else:
            with pytest.raises(AssertionError):
                ledger.with_hold(hold)
    assert ledger.cpus_used == sum(hold.cpus for hold in ledger.holds)
    assert ledger.memory_used_bytes == sum(hold.memory_bytes for hold in ledger.holds)


def test_what_has_its_default_is_not_written_and_comes_back() -> None:
    spec = JobSpec(name="n", command=("true",))
    written = msgspec.json.encode(spec)
    assert written == b'{"name":"n","command":["true"]}'
    assert msgspec.json.decode(written, type=JobSpec) == spec
    assert msgspec.json.decode(msgspec.json.encode(job()), type=Job) == job()
