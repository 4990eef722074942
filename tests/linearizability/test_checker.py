"""The checker accepts linearizable histories, rejects planted bad ones, and agrees with the definition."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genie.model.job import JobState
from tests.linearizability.brute_force import is_linearizable_by_definition
from tests.linearizability.checker import (
    Model,
    Operation,
    SearchLimitExceededError,
    check_linearizable,
)
from tests.linearizability.models import (
    JOBS,
    LOCKS,
    REGISTERS,
    Acquire,
    BreakLock,
    Cancel,
    CompareAndSet,
    Expire,
    Read,
    ReadJob,
    ReadLock,
    Release,
    Submit,
    Write,
)

A, B = "client-a", "client-b"


def completed(client: str, called: float, returned: float, request: Hashable, output: Any) -> Operation:
    return Operation(client, request, output, called, returned)


def pending(client: str, called: float, request: Hashable) -> Operation:
    return Operation(client, request, None, called)


GOOD_HISTORIES: dict[str, tuple[Model, list[Operation]]] = {
    "empty": (REGISTERS, []),
    "a read sees the last write": (
        REGISTERS,
        [completed(A, 0, 1, Write(1), None), completed(B, 2, 3, Read(), 1)],
    ),
    "concurrent reads see the old and the new value": (
        REGISTERS,
        [
            completed(A, 0, 10, Write(1), None),
            completed(B, 1, 2, Read(), None),
            completed(B, 3, 4, Read(), 1),
        ],
    ),
    "a write of unknown outcome takes effect later": (
        REGISTERS,
        [
            pending(A, 0, Write(1)),
            completed(B, 1, 2, Read(), None),
            completed(B, 3, 4, Read(), 1),
        ],
    ),
    "one of two concurrent compare-and-set succeeds": (
        REGISTERS,
        [
            completed(A, 0, 5, CompareAndSet(None, 1), True),
            completed(B, 1, 4, CompareAndSet(None, 2), False),
        ],
    ),
    "a lock changes hands": (
        LOCKS,
        [
            completed(A, 0, 1, Acquire("l", A), 4),
            completed(B, 2, 3, Acquire("l", B), None),
            completed(A, 4, 6, Release("l", A, 4), True),
            completed(B, 5, 7, Acquire("l", B), 9),
            completed(A, 8, 9, ReadLock("l"), (B, 9)),
        ],
    ),
    "a lock is granted after its lease may have expired": (
        LOCKS,
        [
            completed(A, 0, 1, Acquire("l", A), 1),
            pending(A, 5, Expire("l", A, 1)),
            completed(B, 2, 6, Acquire("l", B), 2),
            completed(A, 7, 8, Release("l", A, 1), False),
        ],
    ),
    "a grant whose reply was lost blocks others until it expires": (
        LOCKS,
        [
            pending(A, 0, Acquire("l", A)),
            completed(B, 1, 2, Acquire("l", B), None),
            pending(A, 3, Expire("l", A)),
            completed(B, 4, 5, Acquire("l", B), 2),
        ],
    ),
    "an administrator breaks a lock": (
        LOCKS,
        [
            completed(A, 0, 1, Acquire("l", A), 1),
            completed("admin", 2, 3, BreakLock("l"), True),
            completed(B, 4, 5, Acquire("l", B), 2),
        ],
    ),
    "different locks are independent": (
        LOCKS,
        [completed(A, 0, 1, Acquire("l", A), 7), completed(B, 2, 3, Acquire("m", B), 3)],
    ),
    "a job runs and ends": (
        JOBS,
        [
            completed(A, 0, 1, Submit("r"), "j-1"),
            completed(A, 2, 3, Submit("r"), "j-1"),
            completed(B, 2, 3, ReadJob("r"), ("j-1", JobState.RUNNING)),
            completed(B, 4, 5, ReadJob("r"), ("j-1", JobState.QUEUED)),
            completed(B, 6, 7, ReadJob("r"), ("j-1", JobState.SUCCEEDED)),
        ],
    ),
    "a cancelled job ends": (
        JOBS,
        [
            completed(A, 0, 1, Submit("r"), "j-1"),
            completed(A, 2, 3, Cancel("r"), ("j-1", JobState.RUNNING)),
            completed(B, 4, 5, ReadJob("r"), ("j-1", JobState.CANCELLED)),
        ],
    ),
    "a submission of unknown outcome created the job": (
        JOBS,
        [
            pending(A, 0, Submit("r")),
            completed(B, 1, 2, ReadJob("r"), None),
            completed(B, 3, 4, ReadJob("r"), ("j-1", JobState.QUEUED)),
            completed(A, 5, 6, Submit("r"), "j-1"),
        ],
    ),
}

BAD_HISTORIES: dict[str, tuple[Model, list[Operation]]] = {
    "stale read after an acknowledged write": (
        REGISTERS,
        [
            completed(A, 0, 1, Write(1), None),
            completed(A, 2, 3, Write(2), None),
            completed(B, 4, 5, Read(), 1),
        ],
    ),
    "reads go back in time": (
        REGISTERS,
        [
            completed(A, 0, 10, Write(1), None),
            completed(B, 1, 2, Read(), 1),
            completed(B, 3, 4, Read(), None),
        ],
    ),
    "both of two compare-and-set succeed": (
        REGISTERS,
        [
            completed(A, 0, 5, CompareAndSet(None, 1), True),
            completed(B, 1, 4, CompareAndSet(None, 2), True),
        ],
    ),
    "two holders at once": (
        LOCKS,
        [completed(A, 0, 1, Acquire("l", A), 1), completed(B, 2, 3, Acquire("l", B), 2)],
    ),
    "two concurrent grants": (
        LOCKS,
        [completed(A, 0, 3, Acquire("l", A), 1), completed(B, 1, 2, Acquire("l", B), 2)],
    ),
    "granted before the lease may have expired": (
        LOCKS,
        [
            completed(A, 0, 1, Acquire("l", A), 1),
            completed(B, 2, 4, Acquire("l", B), 2),
            pending(A, 5, Expire("l", A, 1)),
        ],
    ),
    "the token does not grow": (
        LOCKS,
        [
            completed(A, 0, 1, Acquire("l", A), 3),
            completed(A, 2, 3, Release("l", A, 3), True),
            completed(B, 4, 5, Acquire("l", B), 3),
        ],
    ),
    "the token does not grow after a grant whose reply was lost": (
        LOCKS,
        [
            completed(A, 0, 1, Acquire("l", A), 3),
            completed(A, 2, 3, Release("l", A, 3), True),
            pending(B, 4, Acquire("l", B)),
            completed(A, 5, 6, Acquire("l", A), None),
            pending(B, 7, Expire("l", B)),
            completed(A, 8, 9, Acquire("l", A), 4),
        ],
    ),
    "a released lock cannot be acquired": (
        LOCKS,
        [
            completed(A, 0, 1, Acquire("l", A), 1),
            completed(A, 2, 3, Release("l", A, 1), True),
            completed(B, 4, 5, Acquire("l", B), None),
        ],
    ),
    "a lost lock is released": (
        LOCKS,
        [
            completed(A, 0, 1, Acquire("l", A), 1),
            pending(A, 2, Expire("l", A, 1)),
            completed(B, 3, 4, Acquire("l", B), 2),
            completed(A, 5, 6, Release("l", A, 1), True),
        ],
    ),
    "a stale holder is listed": (
        LOCKS,
        [
            completed(A, 0, 1, Acquire("l", A), 1),
            completed(A, 2, 3, Release("l", A, 1), True),
            completed(B, 4, 5, ReadLock("l"), (A, 1)),
        ],
    ),
    "a submitted job is lost": (
        JOBS,
        [completed(A, 0, 1, Submit("r"), "j-1"), completed(A, 2, 3, ReadJob("r"), None)],
    ),
    "one request creates two jobs": (
        JOBS,
        [completed(A, 0, 1, Submit("r"), "j-1"), completed(A, 2, 3, Submit("r"), "j-2")],
    ),
    "an ended job runs again": (
        JOBS,
        [
            completed(A, 0, 1, Submit("r"), "j-1"),
            completed(B, 2, 3, ReadJob("r"), ("j-1", JobState.SUCCEEDED)),
            completed(B, 4, 5, ReadJob("r"), ("j-1", JobState.RUNNING)),
        ],
    ),
    "a final state changes": (
        JOBS,
        [
            completed(A, 0, 1, Submit("r"), "j-1"),
            completed(B, 2, 3, ReadJob("r"), ("j-1", JobState.LOST)),
            completed(B, 4, 5, ReadJob("r"), ("j-1", JobState.SUCCEEDED)),
        ],
    ),
    "a cancelled job is queued again": (
        JOBS,
        [
            completed(A, 0, 1, Submit("r"), "j-1"),
            completed(A, 2, 3, Cancel("r"), ("j-1", JobState.RUNNING)),
            completed(B, 4, 5, ReadJob("r"), ("j-1", JobState.QUEUED)),
        ],
    ),
    "a job that no request created": (
        JOBS,
        [completed(B, 0, 1, ReadJob("r"), ("j-1", JobState.QUEUED)), pending(A, 2, Submit("r"))],
    ),
}


@pytest.mark.parametrize("name", GOOD_HISTORIES)
def test_a_good_history_is_accepted(name: str) -> None:
    model, history = GOOD_HISTORIES[name]
    found = check_linearizable(model, history)
    assert found is None, found.describe()


@pytest.mark.parametrize("name", BAD_HISTORIES)
def test_a_bad_history_is_rejected(name: str) -> None:
    model, history = BAD_HISTORIES[name]
    found = check_linearizable(model, history)
    assert found is not None
    assert found.blocked or found.longest_order


def test_a_counterexample_shows_the_order_and_the_operation_that_contradicts_it() -> None:
    model, history = BAD_HISTORIES["two holders at once"]
    found = check_linearizable(model, history)
    assert found is not None
    assert found.partition == "l"
    assert found.longest_order == (history[0],)
    assert found.blocked == (history[1],)
    text = found.describe()
    assert "'l' is not linearizable" in text
    assert "client-b: Acquire(lock='l', holder='client-b') -> 2" in text


def test_one_bad_partition_is_found_among_good_ones() -> None:
    history = [
        *(completed(A, n, n + 0.5, Write(n, register=f"r{n}"), None) for n in range(50)),
        completed(B, 60, 61, Read(register="r7"), 8),
    ]
    found = check_linearizable(REGISTERS, history)
    assert found is not None
    assert found.partition == "r7"


def test_many_concurrent_writes_are_checked_within_the_limit() -> None:
    history = [completed(f"c{n}", 0, 100, Write(n), None) for n in range(12)]
    history.append(completed("reader", 101, 102, Read(), 3))
    assert check_linearizable(REGISTERS, history) is None
    history.append(completed("reader", 103, 104, Read(), 4))
    assert check_linearizable(REGISTERS, history) is not None


def test_a_long_history_of_one_lock_is_checked() -> None:
    history = []
    for n in range(2000):
        holder = f"c{n % 5}"
        history.append(completed(holder, 4 * n, 4 * n + 1.5, Acquire("l", holder), n + 1))
        history.append(completed("other", 4 * n + 1.6, 4 * n + 1.7, Acquire("l", "other"), None))
        if n % 7:
            history.append(completed(holder, 4 * n + 2, 4 * n + 4.2, Release("l", holder, n + 1), True))
        else:
            history.append(pending(holder, 4 * n + 2, Expire("l", holder, n + 1)))
    assert check_linearizable(LOCKS, history) is None


def test_a_search_without_a_result_is_an_error() -> None:
    history = [completed(f"c{n}", 0, 100, Write(n), None) for n in range(12)]
    history.append(completed("reader", 101, 102, Read(), "never written"))
    with pytest.raises(SearchLimitExceededError, match="after 100 steps"):
        check_linearizable(REGISTERS, history, steps_max=100)


# --- The same verdict as the definition, for random small histories ---------------------------


def times() -> st.SearchStrategy[tuple[float, float]]:
    interval = st.tuples(st.integers(0, 12), st.integers(0, 5)).map(lambda each: (each[0], sum(each)))
    return st.one_of(interval, interval, interval, interval.map(lambda each: (each[0], math.inf)))


def operations(requests: st.SearchStrategy[tuple[Hashable, Any]]) -> st.SearchStrategy[list[Operation]]:
    one = st.builds(
        lambda client, request, time: Operation(client, request[0], request[1], *time),
        st.sampled_from([A, B]),
        requests,
        times(),
    )
    return st.lists(one, max_size=6)


values = st.integers(0, 2)
register_requests = st.one_of(
    st.tuples(st.just(Read()), st.one_of(st.none(), values)),
    st.tuples(values.map(Write), st.none()),
    st.tuples(st.builds(CompareAndSet, values, values), st.booleans()),
)
holders, tokens = st.sampled_from([A, B]), st.integers(1, 3)
lock_requests = st.one_of(
    st.tuples(st.builds(Acquire, st.just("l"), holders), st.one_of(tokens, st.none())),
    st.tuples(st.builds(Acquire, st.just("l"), holders), tokens),
    st.tuples(st.builds(Release, st.just("l"), holders, tokens), st.booleans()),
    st.tuples(st.builds(Expire, st.just("l"), holders, st.one_of(st.none(), tokens)), st.none()),
    st.tuples(st.just(BreakLock("l")), st.booleans()),
    st.tuples(st.just(ReadLock("l")), st.one_of(st.none(), st.tuples(holders, tokens))),
)
job_states = st.sampled_from([JobState.QUEUED, JobState.RUNNING, JobState.CANCELLED, JobState.LOST])
job_outputs = st.one_of(st.none(), st.tuples(st.sampled_from(["j-1", "j-2"]), job_states))
job_requests = st.one_of(
    st.tuples(st.just(Submit("r")), st.sampled_from(["j-1", "j-1", "j-2"])),
    st.tuples(st.just(ReadJob("r")), job_outputs),
    st.tuples(st.just(Cancel("r")), job_outputs),
)


@settings(max_examples=400)
@given(
    st.one_of(
        st.tuples(st.just(REGISTERS), operations(register_requests)),
        st.tuples(st.just(LOCKS), operations(lock_requests)),
        st.tuples(st.just(JOBS), operations(job_requests)),
    )
)
def test_the_verdict_is_that_of_the_definition(case: tuple[Model, list[Operation]]) -> None:
    model, history = case
    is_accepted = check_linearizable(model, history) is None
    assert is_accepted == is_linearizable_by_definition(model, history)
