"""The size of a stored job: bounded at its submission, so that every later change fits into the store."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.controller.checks import check_job
from genie.controller.store.protocol import VALUE_BYTES_MAX
from genie.errors import RowTooLargeError, UsageError
from genie.model.job import (
    JOB_HISTORY_MAX,
    RUNS_KEPT,
    Job,
    JobSpec,
    JobState,
    Placement,
    PlacementConstraints,
    Resources,
    is_shrunk_job,
    shrink_oversized_job,
    truncate_reason,
    with_state,
)
from genie.model.limits import (
    COMMAND_ARGUMENTS_MAX,
    GPUS_OF_JOB_MAX,
    JOB_LIST_ENTRIES_MAX,
    NAME_CHARS_MAX,
    REASON_BYTES_MAX,
    SPEC_BYTES_MAX,
    TEXT_BYTES_MAX,
    TEXT_CHARS_MAX,
    WORKERS_MAX,
)

NAME = "n" * NAME_CHARS_MAX


def largest_spec() -> JobSpec:
    spec = JobSpec(
        name=NAME,
        command=("true",),
        resources=Resources(gpus=GPUS_OF_JOB_MAX // WORKERS_MAX, cpus=999_999.123456789),
        constraints=PlacementConstraints(workers=WORKERS_MAX),
    )
    spare = SPEC_BYTES_MAX - len(msgspec.json.encode(spec)) - len(',"env":{"A":""}')
    spec = msgspec.structs.replace(spec, env={"A": "a" * TEXT_BYTES_MAX})
    command = ("true", "a" * (spare - TEXT_BYTES_MAX - len(',""')))
    return msgspec.structs.replace(spec, command=command)


def test_largest_job_fits_into_a_row_after_every_transition() -> None:
    spec = msgspec.structs.replace(largest_spec(), env={"A": "a" * (TEXT_BYTES_MAX - 1)})
    check_job(spec)
    assert len(msgspec.json.encode(spec)) >= SPEC_BYTES_MAX - 10
    job = Job(
        job_id="j-aaaaaaaa",
        tenant=NAME,
        owner=NAME,
        spec=spec,
        state=JobState.QUEUED,
        reason="",
        submitted_at=1e12 + 0.123456,
        sequence=1 << 62,
        request_id=NAME,
        session=NAME,
        ticket_sha256="f" * 64,
    )
    gpus = tuple(range(2**20 - spec.resources.gpus, 2**20))
    placements = tuple(
        Placement(node_id=NAME, incarnation=1 << 62, gpu_ids=gpus, epoch=1 << 62) for _ in range(WORKERS_MAX)
    )
    reason, at = "\x01\\" * REASON_BYTES_MAX, 1e12 + 0.123456
    for _ in range(max(JOB_HISTORY_MAX // 3, RUNS_KEPT) + 1):
        job = with_state(job, JobState.PLACING, reason=reason, at=at, placements=placements)
        job = with_state(job, JobState.RUNNING, reason=reason, at=at)
        queued = with_state(job, JobState.QUEUED, reason=reason, at=at)
        assert len(msgspec.json.encode(queued)) < VALUE_BYTES_MAX
        job = queued
    job = with_state(job, JobState.PLACING, reason=reason, at=at, placements=placements)
    ended = tuple(
        msgspec.structs.replace(each, outcome=JobState.CANCELLED, exit_code=-64) for each in placements
    )
    job = with_state(job, JobState.CANCELLED, reason=reason, at=at, placements=ended)
    size_bytes = len(msgspec.json.encode(msgspec.structs.replace(job, exit_code=-64)))
    assert size_bytes < VALUE_BYTES_MAX


@pytest.mark.parametrize("character", ["\x01", '"', "\\"])
def test_job_that_grows_when_it_is_stored_is_rejected_at_submission(character: str) -> None:
    env = {"A": character * (TEXT_BYTES_MAX - 1)}
    command = ("true", character * 60_000)
    spec = JobSpec(name="job", command=command, env=env)
    with pytest.raises(RowTooLargeError, match=f"the maximum is {SPEC_BYTES_MAX}"):
        check_job(spec)


def test_job_with_more_accelerators_than_a_row_can_list_is_rejected() -> None:
    spec = JobSpec(
        name="job",
        command=("true",),
        resources=Resources(gpus=1024),
        constraints=PlacementConstraints(workers=1024),
    )
    with pytest.raises(UsageError, match=r"workers \* gpus"):
        check_job(spec)


@given(st.text())
def test_short_printable_reasons_are_unchanged_and_all_are_bounded(text: str) -> None:
    for reason in (text, text * 1000):
        stored = msgspec.json.encode(truncate_reason(reason))
        assert len(stored) <= REASON_BYTES_MAX + 2
    if text.isprintable() and len(text) < 200:
        assert truncate_reason(text) == text


def test_reason_with_characters_that_cannot_be_stored_is_readable() -> None:
    assert truncate_reason("a\nb\x00\udcff") == "a b??"


def test_shrunk_job_fits_whatever_an_earlier_version_stored() -> None:
    texts = tuple("\x01" * TEXT_CHARS_MAX for _ in range(JOB_LIST_ENTRIES_MAX))
    spec = JobSpec(
        name=NAME,
        command=("\x01" * 100,) * COMMAND_ARGUMENTS_MAX,
        env={"A": "\x01" * TEXT_BYTES_MAX},
        constraints=PlacementConstraints(
            gpu_models=texts, labels={text + str(at): "" for at, text in enumerate(texts)}
        ),
    )
    job = Job(
        job_id="j-aaaaaaaa",
        tenant=NAME,
        owner=NAME,
        spec=spec,
        state=JobState.QUEUED,
        reason="\x01" * 10_000,
        submitted_at=0.0,
        sequence=1,
    )
    small = shrink_oversized_job(job)
    assert is_shrunk_job(small)
    assert not is_shrunk_job(job)
    assert len(msgspec.json.encode(small)) < 16 * 1024
