"""The invariants of a fault run. Pure: they compare records and return violations.

The records are the revisions of etcd (store_history.py), the events that jobs have written (job_wrapper.py),
the submissions that clients saw accepted (workload.py), and the faults with the nodes whose jobs may end.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from genie.controller.election import LEADER_KEY
from genie.controller.ledger import COUNTER_KEY_PREFIX, EPOCH_COUNTER
from genie.controller.rows import Counter
from genie.model.allocation import FULL_MILLI, NodeHolds
from genie.model.job import ALLOWED_TRANSITIONS, Job, JobState, StopReason
from tests.faults.store_history import Revision
from tests.faults.workload import AcceptedJob

JOB_KEY_PREFIX, HOLDS_KEY_PREFIX = "job/", "ledger/"
_LEDGER_KEY_PREFIXES = (JOB_KEY_PREFIX, HOLDS_KEY_PREFIX, COUNTER_KEY_PREFIX, "node/", "token/", "quota/")


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What the program of a job has recorded."""

    kind: str
    """start, end, terminated or conflict."""
    job_id: str
    node_id: str
    pid: int
    boot_s: float
    gpu_ids: tuple[int, ...] = ()
    exit_code: int | None = None
    resource: str = ""
    """Of a conflict: what another process uses."""
    holder: str = ""
    """Of a conflict: the job of the other process."""


@dataclass(frozen=True)
class FaultWindow:
    """A fault, and the revisions from its injection until the next fault. Jobs on `ended_nodes` may end in
    it, because their processes are killed; of those on `isolated_nodes` only restartable ones may."""

    name: str
    first_revision: int
    last_revision: int
    ended_nodes: frozenset[str] = frozenset()
    isolated_nodes: frozenset[str] = frozenset()

    def may_end(self, job: Job, node_id: str) -> bool:
        return node_id in self.ended_nodes or (job.spec.is_restartable and node_id in self.isolated_nodes)


@dataclass
class Records:
    """Everything that is known of a run."""

    revisions: Sequence[Revision]
    events: Sequence[JobEvent] = ()
    accepted: Sequence[AcceptedJob] = ()
    unaccepted: frozenset[str] = frozenset()
    """Idempotency keys of submissions with an unknown outcome."""
    windows: Sequence[FaultWindow] = ()
    leader_tokens: dict[str, list[int]] = field(default_factory=dict)
    """Fencing tokens that the agent of each node had accepted, in the order of the samples."""


def read_job_events(directory: Path) -> list[JobEvent]:
    path = directory / "events.jsonl"
    if not path.exists():
        return []
    return [msgspec.convert(json.loads(line), JobEvent) for line in path.read_text("utf-8").splitlines()]


def find_violations(records: Records) -> list[str]:
    """Every violation of an invariant, one line each."""
    return [
        *find_double_allocations(records.revisions),
        *find_fencing_violations(records.revisions, records.leader_tokens),
        *find_epoch_violations(records.revisions),
        *find_invalid_job_changes(records.revisions),
        *find_lost_submissions(records),
        *find_process_conflicts(records),
        *find_unrecorded_exits(records),
        *find_unexpected_ends(records),
    ]


# --- the store ----------------------------------------------------------------------------------


def find_double_allocations(revisions: Iterable[Revision]) -> Iterator[str]:
    """An accelerator is held by more than one worker at some revision."""
    for revision in revisions:
        for key, value in revision.changes.items():
            if not key.startswith(HOLDS_KEY_PREFIX) or value is None:
                continue
            holds = msgspec.json.decode(value, type=NodeHolds)
            for gpu_id in sorted({gpu_id for hold in holds.holds for gpu_id in hold.gpu_ids}):
                if holds.gpu_used_milli(gpu_id) > FULL_MILLI:
                    workers = [hold.job_id for hold in holds.holds if gpu_id in hold.gpu_ids]
                    yield (
                        f"revision {revision.number}: accelerator {gpu_id} of {holds.node_id} is held by "
                        f"{', '.join(workers)}"
                    )


def find_fencing_violations(
    revisions: Iterable[Revision], leader_tokens: dict[str, list[int]]
) -> Iterator[str]:
    """A row of the ledger changes without a leader, terms overlap, or an agent accepts a token that is not
    that of a term or is lower than an earlier one."""
    terms: set[int] = set()
    leader: bytes | None = None
    for revision in revisions:
        if leader is None and terms:
            for key in revision.changes:
                if key.startswith(_LEDGER_KEY_PREFIXES):
                    yield f"revision {revision.number}: {key} was written while no controller led"
        if LEADER_KEY in revision.changes:
            value = revision.changes[LEADER_KEY]
            if value is not None and leader is not None:
                yield f"revision {revision.number}: a term began before the previous one had ended"
            if value is not None:
                terms.add(revision.number)
            leader = value
    for node_id, tokens in leader_tokens.items():
        for before, after in pairwise(tokens):
            if after < before:
                yield f"{node_id}: the agent accepted fencing token {after} after {before}"
        for token in sorted(set(tokens) - terms - {0}):
            yield f"{node_id}: the agent accepted fencing token {token}, which no leader had"


def find_epoch_violations(revisions: Iterable[Revision]) -> Iterator[str]:
    """The counter of epochs decreases, or a placement has an epoch that was used before."""
    counter = 0
    epochs: dict[int, str] = {}
    for revision in revisions:
        value = revision.changes.get(COUNTER_KEY_PREFIX + EPOCH_COUNTER)
        if value is not None:
            number = msgspec.json.decode(value, type=Counter).value
            if number < counter:
                yield f"revision {revision.number}: the counter of epochs fell from {counter} to {number}"
            counter = max(counter, number)
        for job in _jobs_changed_in(revision):
            if job.epoch > counter:
                yield f"revision {revision.number}: {job.job_id} has epoch {job.epoch}, above {counter}"
            if job.epoch and epochs.setdefault(job.epoch, job.job_id) != job.job_id:
                yield f"revision {revision.number}: {job.job_id} has the epoch of {epochs[job.epoch]}"


def find_invalid_job_changes(revisions: Iterable[Revision]) -> Iterator[str]:
    """A job disappears, changes after its final state, or makes a transition that is not allowed."""
    known: dict[str, Job] = {}
    for revision in revisions:
        for key, value in revision.changes.items():
            if key.startswith(JOB_KEY_PREFIX) and value is None:
                yield f"revision {revision.number}: {key} was deleted"
        for job in _jobs_changed_in(revision):
            before = known.get(job.job_id)
            known[job.job_id] = job
            if before is not None and before.state.is_final and job.state is not before.state:
                yield (
                    f"revision {revision.number}: {job.job_id} became {job.state} after it had {before.state}"
                )
            for step, following in pairwise(job.history):
                if following.state not in ALLOWED_TRANSITIONS[step.state]:
                    yield (
                        f"revision {revision.number}: {job.job_id} changed from {step.state} to "
                        f"{following.state}"
                    )


def _jobs_changed_in(revision: Revision) -> Iterator[Job]:
    for key, value in revision.changes.items():
        if key.startswith(JOB_KEY_PREFIX) and value is not None:
            yield msgspec.json.decode(value, type=Job)


def last_jobs(revisions: Iterable[Revision]) -> dict[str, Job]:
    """The last row of each job."""
    return {job.job_id: job for revision in revisions for job in _jobs_changed_in(revision)}


# --- submissions and processes ------------------------------------------------------------------


def find_lost_submissions(records: Records) -> Iterator[str]:
    """An accepted submission has no job, another job, or several; or its job has not ended at the end."""
    jobs = last_jobs(records.revisions)
    by_key: dict[tuple[str, str], list[str]] = defaultdict(list)
    for job in jobs.values():
        by_key[(job.tenant, job.request_id)].append(job.job_id)
    for (tenant, request_id), found in by_key.items():
        if len(found) > 1:
            yield f"submission {request_id} of {tenant} has several jobs: {', '.join(sorted(found))}"
    for accepted in records.accepted:
        if accepted.job_id not in by_key[(accepted.tenant, accepted.request_id)]:
            yield f"submission {accepted.request_id} was accepted as {accepted.job_id}, which does not exist"
    known = {accepted.request_id for accepted in records.accepted} | records.unaccepted
    for job in jobs.values():
        if not job.state.is_final:
            yield f"{job.job_id} is {job.state} at the end: {job.reason}"
        if job.request_id not in known and job.request_id:
            yield f"{job.job_id} was submitted by no client of the run"


def find_process_conflicts(records: Records) -> Iterator[str]:
    """Two processes used one accelerator, or ran one job, at the same time; or a job that cannot be restarted
    has started twice."""
    jobs = last_jobs(records.revisions)
    starts: dict[str, int] = defaultdict(int)
    for event in records.events:
        if event.kind == "conflict":
            yield (
                f"{event.job_id} started on {event.node_id} while {event.resource} was in use by "
                f"{event.holder or 'another process'}"
            )
        if event.kind == "start":
            starts[event.job_id] += 1
    for job_id, count in starts.items():
        job = jobs.get(job_id)
        if job is None:
            yield f"{job_id} has run, but is not in the store"
        elif count > 1 and not job.spec.is_restartable:
            yield f"{job_id} cannot be restarted, but has started {count} times"


def find_unrecorded_exits(records: Records) -> Iterator[str]:
    """A program has ended with another exit code than its job, or a job has succeeded without an exit."""
    jobs = last_jobs(records.revisions)
    ends: dict[str, list[JobEvent]] = defaultdict(list)
    for event in records.events:
        if event.kind == "end":
            ends[event.job_id].append(event)
    ended_by_faults = {job_id for job_id, _ in _ends_allowed_by_faults(records)}
    for job_id, found in ends.items():
        job = jobs.get(job_id)
        if job is None or job_id in ended_by_faults or job.state is JobState.CANCELLED:
            continue
        if job.exit_code != found[-1].exit_code:
            yield f"{job_id} ended with exit code {found[-1].exit_code}, but the store has {job.exit_code}"
    for job in jobs.values():
        if job.state is JobState.SUCCEEDED and job.job_id not in ends:
            yield f"{job.job_id} has succeeded, but its program has not ended by itself"


def find_unexpected_ends(records: Records) -> Iterator[str]:
    """A job was lost, or queued again after it had run, although no fault has ended the processes of its
    node."""
    allowed = set(_ends_allowed_by_faults(records))
    for job, node_id, revision, state in _ends_by_node(records.revisions):
        if (job.job_id, revision) not in allowed:
            names = [each.name for each in records.windows if each.first_revision <= revision]
            yield (
                f"revision {revision}: {job.job_id} on {node_id} became {state} during "
                f"{names[-1] if names else 'the start'}: {job.reason}"
            )


def _ends_allowed_by_faults(records: Records) -> Iterator[tuple[str, int]]:
    """Job IDs and revisions of the ends that a fault explains."""
    for job, node_id, revision, _ in _ends_by_node(records.revisions):
        for window in records.windows:
            if window.first_revision <= revision <= window.last_revision and window.may_end(job, node_id):
                yield job.job_id, revision


def _ends_by_node(revisions: Iterable[Revision]) -> Iterator[tuple[Job, str, int, JobState]]:
    """Jobs that were lost or queued again after they had run, other than by preemption: the new row, the
    node, the revision and the new state."""
    known: dict[str, Job] = {}
    for revision in revisions:
        for job in _jobs_changed_in(revision):
            before = known.get(job.job_id)
            known[job.job_id] = job
            if before is None or before.placement is None or before.state is not JobState.RUNNING:
                continue
            if before.stop is StopReason.PREEMPT:
                continue
            if job.state is JobState.LOST or job.state is JobState.QUEUED:
                yield job, before.placement.node_id, revision.number, job.state
