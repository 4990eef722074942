"""The checks of a fault run accept the records of a healthy run and reject each planted bad history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from genie.model.allocation import Hold, NodeHolds
from genie.model.job import (
    Job,
    JobSpec,
    JobState,
    Placement,
    PlacementConstraints,
    Resources,
    StopReason,
    Transition,
)
from tests.faults.checks import FaultWindow, JobEvent, Records, find_violations
from tests.faults.store_history import Revision
from tests.faults.workload import AcceptedJob

FIRST_TERM, SECOND_TERM = 1, 8
NODE = "n1"
QUEUED, PLACING, RUNNING, SUCCEEDED, LOST = (
    JobState.QUEUED,
    JobState.PLACING,
    JobState.RUNNING,
    JobState.SUCCEEDED,
    JobState.LOST,
)


def make_job(*states: JobState, job_id: str = "j-1", epoch: int = 1, restartable: bool = False) -> Job:
    """A job after these transitions."""
    has_run = len(states) > 1 and states[-1] is not QUEUED
    placement = Placement(node_id=NODE, incarnation=1, gpu_ids=(0,), epoch=epoch)
    return Job(
        job_id=job_id,
        tenant="red",
        owner="token",
        spec=JobSpec(
            name=job_id,
            command=("true",),
            resources=Resources(gpus=1),
            constraints=PlacementConstraints(preemptible=restartable),
        ),
        state=states[-1],
        reason="",
        submitted_at=0.0,
        sequence=1,
        placements=(placement,) if has_run else (),
        exit_code=0 if states[-1] is SUCCEEDED else None,
        history=tuple(Transition(state=state, at=0.0, reason="") for state in states),
        request_id=f"key-{job_id}",
    )


def job_row(job: Job) -> dict[str, bytes | None]:
    return {f"job/{job.job_id}": msgspec.json.encode(job)}


def epoch_row(number: int) -> dict[str, bytes | None]:
    return {"counter/epoch": msgspec.json.encode({"value": number})}


def holds_row(*job_ids: str, gpu_milli: int = 1000) -> dict[str, bytes | None]:
    holds = tuple(
        Hold(job_id=job_id, tenant="red", epoch=1, incarnation=1, gpu_ids=(0,), gpu_milli=gpu_milli)
        for job_id in job_ids
    )
    return {f"ledger/{NODE}": msgspec.json.encode(NodeHolds(node_id=NODE, holds=holds))}


def make_event(kind: str, *, job_id: str = "j-1", exit_code: int | None = None, **more: str) -> JobEvent:
    return JobEvent(
        kind=kind, job_id=job_id, node_id=NODE, pid=1, boot_s=0.0, gpu_ids=(0,), exit_code=exit_code, **more
    )


def make_records() -> Records:
    """One job that has succeeded, and a change of the leader."""
    changes: list[dict[str, bytes | None]] = [
        {"leader": b"{}"},
        job_row(make_job(QUEUED)),
        {**job_row(make_job(QUEUED, PLACING)), **holds_row("j-1"), **epoch_row(1)},
        job_row(make_job(QUEUED, PLACING, RUNNING)),
        {**job_row(make_job(QUEUED, PLACING, RUNNING, SUCCEEDED)), **holds_row()},
        {"controller/s1": b"{}"},
        {"leader": None},
        {"leader": b"{}"},
    ]
    return Records(
        [Revision(number, changed) for number, changed in enumerate(changes, FIRST_TERM)],
        [make_event("start"), make_event("end", exit_code=0)],
        [AcceptedJob("red", "key-j-1", "j-1")],
        leader_tokens={NODE: [0, FIRST_TERM, FIRST_TERM, SECOND_TERM]},
    )


def with_revision(records: Records, number: int, changes: dict[str, bytes | None]) -> Records:
    """The records with further changes at a revision of the run, or after it."""
    revisions = {revision.number: revision for revision in records.revisions}
    before = revisions[number].changes if number in revisions else {}
    revisions[number] = Revision(number, {**before, **changes})
    return replace(records, revisions=[revisions[key] for key in sorted(revisions)])


def with_end_of_job(records: Records, state: JobState, *, restartable: bool = False) -> Records:
    """The job changes from running to this state in revision 5, without an exit."""
    for number in range(2, 6):
        states = (QUEUED, PLACING, RUNNING, state)[: number - 1]
        job = make_job(*states, restartable=restartable)
        records = with_revision(records, number, job_row(job))
    return replace(records, events=[make_event("start")])


def test_records_of_a_healthy_run_are_accepted() -> None:
    assert find_violations(make_records()) == []


def plant_double_allocation(records: Records) -> Records:
    return with_revision(records, 4, holds_row("j-1", "j-2"))


def plant_write_without_leader(records: Records) -> Records:
    """Between the two terms."""
    moved = [Revision(9, {"leader": b"{}"}) if each.number == 8 else each for each in records.revisions]
    tokens = {NODE: [FIRST_TERM, 9]}
    return with_revision(replace(records, revisions=moved, leader_tokens=tokens), 8, holds_row())


def plant_overlapping_terms(records: Records) -> Records:
    return with_revision(records, 6, {"leader": b"{}"})


def plant_token_of_no_term(records: Records) -> Records:
    return replace(records, leader_tokens={NODE: [FIRST_TERM, 5]})


def plant_falling_token(records: Records) -> Records:
    return replace(records, leader_tokens={NODE: [SECOND_TERM, FIRST_TERM]})


def plant_falling_epoch_counter(records: Records) -> Records:
    return with_revision(records, 9, epoch_row(0))


def plant_repeated_epoch(records: Records) -> Records:
    job = make_job(QUEUED, PLACING, RUNNING, SUCCEEDED, job_id="j-2")
    return with_revision(records, 9, job_row(job))


def plant_invalid_transition(records: Records) -> Records:
    return with_revision(records, 5, job_row(make_job(QUEUED, RUNNING, SUCCEEDED)))


def plant_second_end(records: Records) -> Records:
    return with_revision(records, 9, job_row(make_job(QUEUED, PLACING, RUNNING, LOST)))


def plant_deleted_job(records: Records) -> Records:
    return with_revision(records, 9, {"job/j-1": None})


def plant_missing_job(records: Records) -> Records:
    return replace(records, accepted=[*records.accepted, AcceptedJob("red", "key-j-9", "j-9")])


def plant_second_job_of_a_submission(records: Records) -> Records:
    job = msgspec.structs.replace(make_job(QUEUED, job_id="j-2"), request_id="key-j-1")
    return with_revision(records, 9, job_row(job))


def plant_job_without_client(records: Records) -> Records:
    return replace(records, accepted=[])


def plant_job_that_never_ends(records: Records) -> Records:
    return replace(records, revisions=[each for each in records.revisions if each.number != 5])


def plant_process_conflict(records: Records) -> Records:
    conflict = make_event("conflict", resource="gpu-n1-0", holder="j-2")
    return replace(records, events=[*records.events, conflict])


def plant_second_start(records: Records) -> Records:
    return replace(records, events=[make_event("start"), *records.events])


def plant_process_of_no_job(records: Records) -> Records:
    return replace(records, events=[*records.events, make_event("start", job_id="j-9")])


def plant_wrong_exit_code(records: Records) -> Records:
    return replace(records, events=[make_event("start"), make_event("end", exit_code=3)])


def plant_success_without_exit(records: Records) -> Records:
    return replace(records, events=[make_event("start")])


def plant_lost_job_without_fault(records: Records) -> Records:
    return with_end_of_job(records, LOST)


def plant_job_that_an_isolated_node_has_ended(records: Records) -> Records:
    window = FaultWindow("node-isolated", 1, 9, isolated_nodes=frozenset((NODE,)))
    return replace(with_end_of_job(records, LOST), windows=[window])


def plant_lost_job_after_the_fault(records: Records) -> Records:
    window = FaultWindow("server-powered-off", 1, 4, ended_nodes=frozenset((NODE,)))
    return replace(with_end_of_job(records, LOST), windows=[window])


def plant_lost_job_on_another_node(records: Records) -> Records:
    window = FaultWindow("server-powered-off", 1, 9, ended_nodes=frozenset(("n2",)))
    return replace(with_end_of_job(records, LOST), windows=[window])


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (plant_double_allocation, "accelerator 0 of n1 is held by j-1, j-2"),
        (plant_write_without_leader, "was written while no controller led"),
        (plant_overlapping_terms, "a term began before the previous one had ended"),
        (plant_token_of_no_term, "accepted fencing token 5, which no leader had"),
        (plant_falling_token, "accepted fencing token 1 after 8"),
        (plant_falling_epoch_counter, "the counter of epochs fell from 1 to 0"),
        (plant_repeated_epoch, "j-2 has the epoch of j-1"),
        (plant_invalid_transition, "changed from queued to running"),
        (plant_second_end, "became lost after it had succeeded"),
        (plant_deleted_job, "job/j-1 was deleted"),
        (plant_missing_job, "accepted as j-9, which does not exist"),
        (plant_second_job_of_a_submission, "has several jobs: j-1, j-2"),
        (plant_job_without_client, "was submitted by no client"),
        (plant_job_that_never_ends, "is running at the end"),
        (plant_process_conflict, "while gpu-n1-0 was in use by j-2"),
        (plant_second_start, "has started 2 times"),
        (plant_process_of_no_job, "j-9 has run, but is not in the store"),
        (plant_wrong_exit_code, "ended with exit code 3, but the store has 0"),
        (plant_success_without_exit, "its program has not ended by itself"),
        (plant_lost_job_without_fault, "became lost during the start"),
        (plant_job_that_an_isolated_node_has_ended, "became lost during node-isolated"),
        (plant_lost_job_after_the_fault, "became lost during server-powered-off"),
        (plant_lost_job_on_another_node, "became lost during server-powered-off"),
    ],
)
def test_planted_violation_is_found(plant: Callable[[Records], Records], message: str) -> None:
    violations = find_violations(plant(make_records()))
    assert any(message in line for line in violations), violations


@pytest.mark.parametrize("restartable", [True, False])
def test_job_may_end_when_a_fault_kills_its_processes(restartable: bool) -> None:
    window = FaultWindow("server-powered-off", 4, 9, ended_nodes=frozenset((NODE,)))
    records = with_end_of_job(make_records(), LOST, restartable=restartable)
    assert find_violations(replace(records, windows=[window])) == []


def test_restartable_job_may_end_on_an_isolated_node() -> None:
    window = FaultWindow("node-isolated", 4, 9, isolated_nodes=frozenset((NODE,)))
    records = with_end_of_job(make_records(), LOST, restartable=True)
    assert find_violations(replace(records, windows=[window])) == []


def test_preempted_job_may_run_again() -> None:
    running = msgspec.structs.replace(
        make_job(QUEUED, PLACING, RUNNING, restartable=True), stop=StopReason.PREEMPT
    )
    again = (QUEUED, PLACING, RUNNING, QUEUED)
    rows = [
        job_row(make_job(QUEUED, restartable=True)),
        {**job_row(make_job(QUEUED, PLACING, restartable=True)), **epoch_row(1)},
        job_row(running),
        job_row(make_job(*again, restartable=True)),
        {**job_row(make_job(*again, PLACING, epoch=2, restartable=True)), **epoch_row(2)},
        job_row(make_job(*again, PLACING, RUNNING, SUCCEEDED, epoch=2, restartable=True)),
    ]
    revisions = [Revision(1, {"leader": b"{}"})]
    revisions += [Revision(number, changes) for number, changes in enumerate(rows, 2)]
    events = [make_event("start"), make_event("start"), make_event("end", exit_code=0)]
    records = Records(revisions, events, [AcceptedJob("red", "key-j-1", "j-1")])
    assert find_violations(records) == []


def test_fractions_of_one_accelerator_may_be_held_together() -> None:
    shared = with_revision(make_records(), 4, holds_row("j-1", "j-2", gpu_milli=500))
    assert find_violations(shared) == []
