"""Which finished jobs are deleted when the history is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from genie.controller.jobs.history import HistoryExcess, select_jobs_to_delete
from genie.controller.jobs.index import JobIndex
from genie.model.job import Job, JobSpec, JobState

NEVER = 0.0
histories = st.lists(st.tuples(st.sampled_from(["red", "blue", "green"]), st.integers(1, 50)), max_size=40)


def make_job(sequence: int, tenant: str, state: JobState = JobState.SUCCEEDED) -> Job:
    return Job(
        job_id=f"j-{sequence}",
        tenant=tenant,
        owner="",
        spec=JobSpec(name="x", command=("true",)),
        state=state,
        reason="",
        submitted_at=0.0,
        ended_at=float(sequence) if state.is_final else None,
        sequence=sequence,
        request_id="",
        session="",
    )


def select_deleted_positions(
    history: Sequence[tuple[str, int]], excess: HistoryExcess, *, limit: int = 1000
) -> list[int]:
    """Return the positions in `history`, tenants and sizes, oldest first, of the jobs to delete."""
    index, sizes, usage = JobIndex(), dict[str, int](), Counter[str]()
    for sequence, (tenant, size_bytes) in enumerate(history, 1):
        each = make_job(sequence, tenant)
        index.update(None, each)
        sizes[each.job_id] = size_bytes
        usage[tenant] += size_bytes
    index.update(None, make_job(len(history) + 1, "red", JobState.QUEUED))
    found = select_jobs_to_delete(
        index, excess, bytes_by_tenant=usage, get_size_bytes=sizes.__getitem__, limit=limit
    )
    return [each.sequence - 1 for each in found]


def test_tenant_with_large_jobs_loses_them_before_other_tenants_lose_any() -> None:
    history = [("blue", 1)] * 3 + [("red", 100)] * 5
    excess = HistoryExcess(delete_ended_before=NEVER, job_count=0, size_bytes=300)
    assert select_deleted_positions(history, excess) == [3, 4, 5]


def test_tenant_with_many_jobs_loses_them_before_other_tenants_lose_any() -> None:
    history = [("blue", 1000)] * 2 + [("red", 1)] * 10
    assert select_deleted_positions(
        history, HistoryExcess(delete_ended_before=NEVER, job_count=6, size_bytes=0)
    ) == [
        2,
        3,
        4,
        5,
        6,
        7,
    ]


def test_old_jobs_of_all_tenants_are_deleted() -> None:
    history = [("blue", 1), ("red", 1), ("blue", 1), ("red", 1)]
    assert select_deleted_positions(
        history, HistoryExcess(delete_ended_before=3.0, job_count=0, size_bytes=0)
    ) == [
        0,
        1,
    ]


def test_nothing_is_deleted_within_the_limits() -> None:
    history = [("blue", 1), ("red", 1)]
    assert (
        select_deleted_positions(history, HistoryExcess(delete_ended_before=NEVER, job_count=0, size_bytes=0))
        == []
    )


def test_one_call_selects_no_more_than_its_limit() -> None:
    history = [("red", 1)] * 10
    for excess in (
        HistoryExcess(delete_ended_before=100.0, job_count=0, size_bytes=0),
        HistoryExcess(delete_ended_before=NEVER, job_count=9, size_bytes=0),
        HistoryExcess(delete_ended_before=NEVER, job_count=0, size_bytes=9),
    ):
        assert select_deleted_positions(history, excess, limit=4) == [0, 1, 2, 3]


@given(histories, st.integers(-5, 45), st.integers(-5, 1500), st.integers(0, 20))
def test_deletion_is_sufficient_and_fair(
    history: list[tuple[str, int]], jobs: int, size_bytes: int, aged: int
) -> None:
    selected = select_deleted_positions(
        history, HistoryExcess(delete_ended_before=float(aged) + 1, job_count=jobs, size_bytes=size_bytes)
    )
    deleted, all_of_them = set(selected), set(range(len(history)))
    assert len(selected) == len(deleted)
    by_age = {position for position in all_of_them if position < aged}
    assert by_age <= deleted
    assert len(deleted) >= min(jobs, len(history))
    assert sum(history[position][1] for position in deleted) >= min(
        size_bytes, sum(size for _, size in history)
    )
    if size_bytes <= 0:
        assert_deletion_is_fair(history, deleted, by_age, cost=lambda position: 1)
    if jobs <= 0:
        assert_deletion_is_fair(history, deleted, by_age, cost=lambda position: history[position][1])


def assert_deletion_is_fair(
    history: list[tuple[str, int]], deleted: set[int], by_age: set[int], cost: Callable[[int], int]
) -> None:
    """A tenant that lost a job used at least as much before as any other tenant has left."""
    left: Counter[str] = Counter()
    for position, (tenant, _) in enumerate(history):
        if position not in deleted:
            left[tenant] += cost(position)
    for tenant in {history[position][0] for position in deleted - by_age}:
        last = max(each for each in deleted - by_age if history[each][0] == tenant)
        assert left[tenant] + cost(last) >= max(left.values(), default=0)
        kept = [each for each in range(len(history)) if history[each][0] == tenant and each not in deleted]
        assert all(each > last for each in kept), "the newest ones are kept"


def test_counts_of_finished_jobs_ignore_unfinished_ones() -> None:
    index = JobIndex()
    queued = make_job(1, "red", JobState.QUEUED)
    index.update(None, queued)
    index.update(None, make_job(2, "blue"))
    assert index.finished_count_by_tenant() == {"red": 0, "blue": 1}
    index.update(queued, msgspec.structs.replace(queued, state=JobState.FAILED))
    assert index.finished_count_by_tenant() == {"red": 1, "blue": 1}
