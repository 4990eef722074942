"""A lease of a lock, on a fake clock, with a scripted controller: when it begins, is renewed, and is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from genie.cluster.locking.lock_lease import LOCK_REPLY_ALLOWANCE_S, LockLease, make_timeout_error
from genie.errors import DeadlineError, LockLimitError, LockLostError, NotLeaderError
from genie.model.lock import HOLDER_LEASE_SHARE
from genie.model.messages.locks import (
    AcquireLock,
    LockGrant,
    LockReleased,
    LockRenewal,
    ReleaseLock,
    RenewLock,
)
from tests.fakes.clock import FakeClock
from tests.waiting import until

TTL_S = 9.0
LEASE_S = HOLDER_LEASE_SHARE * TTL_S
GRANTED = LockGrant(fencing_token=7, holder="me")


class ScriptedSender:
    """Answers each request with the next scripted answer of its type, or with that of a free lock. An answer
    is a reply, an error, or a function that returns one of them later."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.timeouts_s: list[float] = []
        """Of the requests, in the same order."""
        self.answers: dict[type, deque[Any]] = {
            kind: deque() for kind in (AcquireLock, RenewLock, ReleaseLock)
        }

    async def call(self, request: Any, *, timeout_s: float, idempotent: bool = True) -> Any:
        assert timeout_s > 0
        self.requests.append(request)
        self.timeouts_s.append(timeout_s)
        defaults = {
            AcquireLock: GRANTED,
            RenewLock: LockRenewal(),
            ReleaseLock: LockReleased(was_held=True),
        }
        answers = self.answers[type(request)]
        answer = answers.popleft() if answers else defaults[type(request)]
        if callable(answer):
            answer = await answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def count(self, kind: type) -> int:
        return sum(isinstance(request, kind) for request in self.requests)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def sender() -> ScriptedSender:
    return ScriptedSender()


def make_lease(
    clock: FakeClock, sender: ScriptedSender, *, on_lost: Callable[[str], None] = lambda _reason: None
) -> LockLease:
    return LockLease("l", ttl_s=TTL_S, holder="me", sender=sender, clock=clock, on_lost=on_lost)


async def reply_after(clock: FakeClock, seconds: float, answer: Any) -> Any:
    await clock.advance(seconds)
    return answer


async def test_the_lease_counts_from_the_request_and_ends_before_that_of_the_leader(
    clock: FakeClock, sender: ScriptedSender
) -> None:
    lease = make_lease(clock, sender)
    sender.answers[AcquireLock].append(lambda: reply_after(clock, 2.0, GRANTED))
    assert not lease.is_held
    assert await lease.acquire(timeout_s=None)
    assert lease.is_held and lease.fencing_token == 7
    await clock.advance(LEASE_S - 2.0 - 0.01)
    assert lease.is_held
    await clock.advance(0.01)
    assert not lease.is_held
    assert lease.is_lost
    with pytest.raises(LockLostError, match=r"lost lock 'l' .fencing token 7.: its lease expired"):
        await lease.release()


async def test_a_late_grant_is_renewed_before_it_is_used(clock: FakeClock, sender: ScriptedSender) -> None:
    lease = make_lease(clock, sender)
    sender.answers[AcquireLock].append(lambda: reply_after(clock, LEASE_S + 1.0, GRANTED))
    assert await lease.acquire(timeout_s=None)
    assert lease.is_held
    assert sender.count(RenewLock) == 1


async def test_a_late_grant_that_has_expired_is_requested_again_with_another_acquisition_id(
    clock: FakeClock, sender: ScriptedSender
) -> None:
    lease = make_lease(clock, sender)
    sender.answers[AcquireLock].append(lambda: reply_after(clock, LEASE_S + 1.0, GRANTED))
    sender.answers[AcquireLock].append(LockGrant(fencing_token=9))
    sender.answers[RenewLock].append(LockRenewal(lost_reason="its lease expired"))
    assert await lease.acquire(timeout_s=None)
    assert lease.is_held and lease.fencing_token == 9
    first, second = [one for one in sender.requests if isinstance(one, AcquireLock)]
    assert first.acquisition_id != second.acquisition_id
    assert sender.count(ReleaseLock) == 1


async def test_a_release_waits_no_longer_than_the_time_to_live(
    clock: FakeClock, sender: ScriptedSender
) -> None:
    lease = make_lease(clock, sender)
    await lease.acquire(timeout_s=None)
    assert await lease.release()
    assert isinstance(sender.requests[-1], ReleaseLock)
    assert sender.timeouts_s[-1] == TTL_S


async def test_the_timeout_of_an_acquisition_limits_its_requests(
    clock: FakeClock, sender: ScriptedSender
) -> None:
    lease = make_lease(clock, sender)
    no_quorum = NotLeaderError("no controller of the cluster accepted the request", hint="start etcd")
    sender.answers[AcquireLock].append(lambda: reply_after(clock, 4.0, no_quorum))
    assert not await lease.acquire(timeout_s=1.0)
    assert sender.timeouts_s[0] == 1.0 + LOCK_REPLY_ALLOWANCE_S
    error = make_timeout_error(lease, 1.0)
    assert str(error) == f"could not acquire lock 'l' within 1 s: {no_quorum}"
    assert error.exit_code == 124


async def test_a_waiting_acquisition_reports_once_that_another_client_holds_the_lock(
    clock: FakeClock, sender: ScriptedSender
) -> None:
    lease, reports = make_lease(clock, sender), list[str]()
    sender.answers[AcquireLock].extend([LockGrant(holder="other"), LockGrant(holder="other")])
    assert await lease.acquire(timeout_s=None, on_waiting=lambda: reports.append(lease.other_holder))
    assert reports == ["other"]
    waits = [request.wait_s for request in sender.requests if isinstance(request, AcquireLock)]
    assert waits == [0.0, TTL_S / 3, TTL_S / 3]


async def test_polls_are_shorter_than_the_lease(clock: FakeClock, sender: ScriptedSender) -> None:
    sender.answers[AcquireLock].append(LockGrant(holder="other"))
    assert await make_lease(clock, sender).acquire(timeout_s=None)
    assert {request.wait_s for request in sender.requests} == {TTL_S / 3}
    assert len({request.acquisition_id for request in sender.requests}) == 1


async def test_an_acquisition_that_does_not_wait_withdraws(clock: FakeClock, sender: ScriptedSender) -> None:
    lease = make_lease(clock, sender)
    sender.answers[AcquireLock].append(LockGrant(holder="other"))
    assert not await lease.acquire(timeout_s=0.0)
    assert [type(request) for request in sender.requests] == [AcquireLock, ReleaseLock]
    assert sender.requests[0].wait_s == 0.0
    assert not lease.is_held
    assert "within 0 s: other holds it" in str(make_timeout_error(lease, 0.0))


async def test_an_acquisition_continues_after_a_change_of_leader(
    clock: FakeClock, sender: ScriptedSender
) -> None:
    sender.answers[AcquireLock].extend((NotLeaderError("no leader"), DeadlineError("timeout")))
    async with asyncio.TaskGroup() as group:
        acquisition = group.create_task(make_lease(clock, sender).acquire(timeout_s=60.0))
        await until(lambda: _advance_until_done(clock, acquisition))
    assert acquisition.result()
    assert len({request.acquisition_id for request in sender.requests}) == 1


async def _advance_until_done(clock: FakeClock, task: asyncio.Task[Any]) -> bool:
    await clock.advance(0.5)
    return task.done()


async def test_an_error_that_a_retry_cannot_solve_is_raised_and_withdraws(
    clock: FakeClock, sender: ScriptedSender
) -> None:
    sender.answers[AcquireLock].append(LockLimitError("too many"))
    with pytest.raises(LockLimitError):
        await make_lease(clock, sender).acquire(timeout_s=None)
    assert sender.count(ReleaseLock) == 1


async def test_a_cancelled_acquisition_withdraws(clock: FakeClock, sender: ScriptedSender) -> None:
    async def wait_forever() -> None:
        await asyncio.Event().wait()

    sender.answers[AcquireLock].append(wait_forever)
    acquisition = asyncio.get_running_loop().create_task(make_lease(clock, sender).acquire(timeout_s=None))
    await until(lambda: sender.count(AcquireLock))
    acquisition.cancel()
    await asyncio.wait({acquisition})
    assert acquisition.cancelled()
    assert sender.count(ReleaseLock) == 1


async def test_renewals_keep_the_lease(clock: FakeClock, sender: ScriptedSender) -> None:
    lease = make_lease(clock, sender)
    await lease.acquire(timeout_s=None)
    async with asyncio.TaskGroup() as group:
        group.create_task(lease.keep_until_ended())
        await clock.advance(0.0)
        for _ in range(30):
            await clock.advance(TTL_S / 3)
            assert lease.is_held
        assert sender.count(RenewLock) >= 29
        await lease.release()
    assert not lease.is_held and not lease.is_lost


async def test_a_failed_renewal_is_repeated_soon(clock: FakeClock, sender: ScriptedSender) -> None:
    lease = make_lease(clock, sender)
    await lease.acquire(timeout_s=None)
    sender.answers[RenewLock].extend(DeadlineError("timeout") for _ in range(5))
    async with asyncio.TaskGroup() as group:
        group.create_task(lease.keep_until_ended())
        await clock.advance(0.0)
        await clock.advance(TTL_S / 3 + 5 * 0.5 + 0.01)
        assert sender.count(RenewLock) == 6
        await clock.advance(TTL_S / 3)
        assert lease.is_held
        await lease.release()


async def test_the_lock_is_lost_when_no_renewal_succeeds_in_time(
    clock: FakeClock, sender: ScriptedSender
) -> None:
    losses: list[str] = []
    lease = make_lease(clock, sender, on_lost=losses.append)
    await lease.acquire(timeout_s=None)
    sender.answers[RenewLock].extend(DeadlineError("no reply") for _ in range(100))
    async with asyncio.TaskGroup() as group:
        group.create_task(lease.keep_until_ended())
        await clock.advance(0.0)
        await clock.advance(LEASE_S - 0.01)
        assert lease.is_held and not losses
        await clock.advance(0.02)
        assert not lease.is_held
    (reason,) = losses
    assert "expired" in reason or "no reply" in reason


async def test_the_lock_is_lost_when_the_leader_says_so(clock: FakeClock, sender: ScriptedSender) -> None:
    losses: list[str] = []
    lease = make_lease(clock, sender, on_lost=losses.append)
    await lease.acquire(timeout_s=None)
    sender.answers[RenewLock].append(LockRenewal(lost_reason="it was released by the owner"))
    async with asyncio.TaskGroup() as group:
        group.create_task(lease.keep_until_ended())
        await clock.advance(0.0)
        await clock.advance(TTL_S / 3)
    assert losses == ["it was released by the owner"]
    assert not lease.is_held and lease.is_lost


async def test_a_renewal_whose_reply_arrives_after_the_lease_does_not_count(
    clock: FakeClock, sender: ScriptedSender
) -> None:
    """The leader may have granted the lock to another client and back since the request."""
    losses: list[str] = []
    lease = make_lease(clock, sender, on_lost=losses.append)
    await lease.acquire(timeout_s=None)
    arrival = asyncio.Event()

    async def renewal() -> LockRenewal:
        await arrival.wait()
        return LockRenewal()

    sender.answers[RenewLock].append(renewal)
    async with asyncio.TaskGroup() as group:
        group.create_task(lease.keep_until_ended())
        await clock.advance(0.0)
        await clock.advance(LEASE_S)
        arrival.set()
    assert len(losses) == 1 and not lease.is_held
