"""Limits on the requests that a standby forwards."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, ExitStack

import pytest

from genie.controller.standby import forward_limits
from genie.controller.standby.forward_limits import ForwardLimits
from genie.errors import OverloadedError, ReplyLostError
from genie.model.tenant import Identity, TokenKind
from genie.runtime import rpc
from tests.fakes.clock import FakeClock

OWNER = Identity(token_id="own1", kind=TokenKind.OWNER, tenant="")


def make_user(tenant: str) -> Identity:
    return Identity(token_id=f"{tenant}1", kind=TokenKind.USER, tenant=tenant)


def count_one(
    limits: ForwardLimits, identity: Identity, *, is_wait: bool = False
) -> AbstractContextManager[None]:
    return limits.count_in_flight(identity, is_wait=is_wait, handled_s_max=10.0)


def fill_slots(limits: ForwardLimits, identity: Identity, stack: ExitStack, *, is_wait: bool = False) -> int:
    """Count requests until one is rejected, and return their number."""
    count = 0
    try:
        while True:
            stack.enter_context(count_one(limits, identity, is_wait=is_wait))
            count += 1
    except OverloadedError:
        return count


@pytest.mark.parametrize("is_wait", [True, False])
def test_every_further_tenant_gets_slots(is_wait: bool) -> None:
    limits = ForwardLimits(FakeClock())
    with ExitStack() as stack:
        counts = [fill_slots(limits, make_user(f"t{number}"), stack, is_wait=is_wait) for number in range(6)]
        assert counts[0] == forward_limits.TENANT_WAITS_MAX // 2
        assert all(count >= 12 for count in counts)


def test_waits_leave_the_slots_of_other_requests_free_and_tenants_those_of_the_owner() -> None:
    limits = ForwardLimits(FakeClock())
    with ExitStack() as stack:
        for tenant in ("red", "blue"):
            fill_slots(limits, make_user(tenant), stack, is_wait=True)
        with count_one(limits, make_user("red")):
            pass
        for tenant in ("red", "blue"):
            fill_slots(limits, make_user(tenant), stack)
        assert fill_slots(limits, OWNER, stack, is_wait=True) == forward_limits.OWNER_WAITS_MAX
        assert fill_slots(limits, OWNER, stack) == forward_limits.OWNER_REQUESTS_MAX
    assert limits.in_flight == 0


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ReplyLostError("the reply is overdue")])
async def test_request_without_a_reply_is_counted_until_the_leader_has_handled_it(
    error: BaseException,
) -> None:
    """Otherwise clients that disconnect and send again fill the connection to the leader."""
    clock = FakeClock()
    limits, red = ForwardLimits(clock), make_user("red")
    for _ in range(2):
        with pytest.raises(type(error)), count_one(limits, red, is_wait=True):
            raise error
    assert limits.in_flight == 2
    await clock.advance(10.0)
    with count_one(limits, red):
        assert limits.in_flight == 1
    with pytest.raises(type(error)), count_one(limits, red):
        raise error
    limits.release_unanswered()
    assert limits.in_flight == 0


def test_error_of_the_leader_ends_a_request() -> None:
    limits = ForwardLimits(FakeClock())
    with pytest.raises(KeyError), count_one(limits, OWNER):
        raise KeyError
    assert limits.in_flight == 0


def test_all_limits_together_are_below_that_of_the_connection() -> None:
    slots = (
        forward_limits.TENANT_WAITS_MAX
        + forward_limits.TENANT_REQUESTS_MAX
        + forward_limits.OWNER_WAITS_MAX
        + forward_limits.OWNER_REQUESTS_MAX
    )
    assert slots < rpc.CLUSTER_PEER_REQUESTS_IN_FLIGHT_MAX
