"""Indexes of jobs against a plain list, and the cost of reads."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from genie.controller.blobs.storage import blob_name
from genie.controller.jobs.index import JobIndex, StagedIndex
from genie.model.job import FINAL_STATES, Job, JobKind, JobSpec, JobState, Workdir
from genie.model.messages import ListJobs
from genie.model.tenant import TokenKind
from tests.controller.running_controller import running_controller

TENANTS = ("red", "blue")


def make_job(sequence: int, state: JobState = JobState.QUEUED, *, tenant: str = "red", **spec: object) -> Job:
    fields = {"name": f"name-{sequence % 3}", "command": ("true",), **spec}
    return Job(
        job_id=f"j-{sequence}",
        tenant=tenant,
        owner="",
        spec=JobSpec(**fields),  # type: ignore[arg-type]
        state=state,
        reason="",
        submitted_at=0.0,
        sequence=sequence,
        request_id=f"r-{sequence}",
        session="c" if fields.get("kind") is JobKind.SESSION else "",
    )


changes = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([*JobState, None])), max_size=200)


@given(changes, st.integers(0, 41))
def test_index_lists_the_same_jobs_as_a_sorted_list(
    steps: list[tuple[int, JobState | None]], before: int
) -> None:
    index, staged, jobs = JobIndex(), StagedIndex(), dict[int, Job]()
    for sequence, state in steps:
        old = jobs.pop(sequence, None)
        new = make_job(sequence, state, tenant=TENANTS[sequence % 2]) if state is not None else None
        if new is not None:
            jobs[sequence] = new
        if old is None and new is None:
            continue
        index.update(old, new)
        staged.update(f"j-{sequence}", old, new)
        # A staged change is reverted and made again.
        staged.update(f"j-{sequence}", new, old)
        staged.update(f"j-{sequence}", old, new)
    for tenant in (None, *TENANTS):
        for states in (list(JobState), [JobState.RUNNING], list(FINAL_STATES)):
            expected = [
                jobs[sequence]
                for sequence in sorted(jobs, reverse=True)
                if sequence < before and jobs[sequence].state in states
            ]
            visible = [one for one in expected if tenant in (None, one.tenant)]
            assert list(index.jobs_newest_first(states, before=before, tenant=tenant)) == visible
    assert [one.sequence for one in index.jobs_oldest_first(JobState)] == sorted(jobs)
    queued = [one for one in jobs.values() if one.state is JobState.QUEUED]
    assert staged.queued_count == len(queued)
    assert +staged.queued_count_by_tenant == _count_by_tenant(queued)
    assert staged.job_id_by_request == {(one.tenant, one.request_id): one.job_id for one in jobs.values()}
    for name in ("name-0", "name-1", "name-2"):
        for tenant in (None, *TENANTS):
            ids = {o.job_id for o in jobs.values() if o.spec.name == name and tenant in (None, o.tenant)}
            found, count = index.find_ids_by_name(name, tenant, limit=100)
            assert (set(found), count) == (ids, len(ids))


def _count_by_tenant(jobs: list[Job]) -> dict[str, int]:
    return {tenant: n for tenant in TENANTS if (n := sum(job.tenant == tenant for job in jobs))}


def test_blobs_and_sessions_of_unfinished_jobs_are_known() -> None:
    index = JobIndex()
    workdir = Workdir(digest="d" * 64, size_bytes=1)
    first, second = make_job(1, workdir=workdir), make_job(2, workdir=workdir)
    session = make_job(3, kind=JobKind.SESSION)
    for one in (first, second, session):
        index.update(None, one)
    name = blob_name("d" * 64, "red")
    index.update(first, msgspec.structs.replace(first, state=JobState.CANCELLED))
    assert name in index.needed_blobs()
    index.update(second, msgspec.structs.replace(second, state=JobState.RUNNING))
    assert name in index.needed_blobs()
    index.update(
        msgspec.structs.replace(second, state=JobState.RUNNING),
        msgspec.structs.replace(second, state=JobState.LOST),
    )
    assert name not in index.needed_blobs()
    assert index.session_jobs() == index.session_jobs_of_client("red", "c") == [session]
    assert index.session_jobs_of_client("blue", "c") == []
    index.update(session, msgspec.structs.replace(session, state=JobState.LOST))
    assert index.session_jobs() == []


def test_read_visits_about_as_many_jobs_as_it_returns() -> None:
    index = JobIndex()
    for sequence in range(10_000):
        index.update(None, make_job(sequence, JobState.QUEUED))
    index.update(None, make_job(10_000, JobState.QUEUED, tenant="blue"))
    for sequence in range(5_000, 10_000):  # the newest ones end
        index.update(make_job(sequence), make_job(sequence, JobState.SUCCEEDED))
    reads = 100
    for _ in range(reads):
        page = index.jobs_newest_first([JobState.QUEUED], before=None, tenant="red")
        assert [one.sequence for one in islice(page, 10)] == list(range(4_999, 4_989, -1))
        assert len(list(islice(index.jobs_newest_first(JobState, tenant="blue"), 10))) == 1
    assert index.visited_entry_count < 6_000 + reads * 20, (
        "removed entries are skipped once, not in every read"
    )


async def test_listing_jobs_of_one_tenant_does_not_visit_those_of_others(tmp_path: Path) -> None:
    async with running_controller(tmp_path, queue_max=1000) as one, one.client() as owner:
        blue = await one.token(TokenKind.USER, tenant="blue")
        for _ in range(200):
            await owner.submit()
        async with one.client(blue) as client:
            job = await client.submit()
            assert one.controller is not None
            index = one.controller._jobs.catalog._index
            before = index.visited_entry_count
            listed = await client.ask(ListJobs())
            assert [each.job_id for each in listed.jobs] == [job.job_id]
            assert index.visited_entry_count - before <= 2


def test_jobs_that_have_left_a_state_are_not_visited_again() -> None:
    """Most jobs only pass through a state that nobody lists."""
    index, passed = JobIndex(), 10_000
    for sequence in range(1, passed):
        index.update(None, make_job(sequence))
        index.update(make_job(sequence), make_job(sequence, JobState.PLACING))
    index.update(None, make_job(passed))
    assert [found.sequence for found in index.jobs_newest_first([JobState.QUEUED])] == [passed]
    assert index.visited_entry_count < passed / 10
