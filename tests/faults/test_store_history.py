"""Access to etcd between faults: repeated while the store is unavailable; when etcd counts as healthy."""

from __future__ import annotations

import pytest

from genie.controller.etcd.membership import MemberInfo, MemberStatus
from genie.controller.store.etcd_errors import NO_LEADER_MESSAGE
from genie.errors import StoreUnavailableError
from tests.faults.store_history import find_etcd_problem, repeat_until_store_responds


def make_status(name: str, *, is_leader: bool = False, **more: object) -> MemberStatus:
    info = MemberInfo(member_id=1, name=name, peer_url="", endpoint="", is_learner=False)
    return MemberStatus(info=info, is_leader=is_leader, **more)  # type: ignore[arg-type]


HEALTHY = (make_status("s1"), make_status("s2", is_leader=True), make_status("s3"))


def test_etcd_is_healthy_when_every_member_follows_one_leader() -> None:
    assert find_etcd_problem(HEALTHY, members=3) == ""


@pytest.mark.parametrize(
    ("statuses", "problem"),
    [
        ((*HEALTHY[:2], make_status("s3", alarms=(NO_LEADER_MESSAGE,))), "s3: etcdserver: no leader"),
        ((*HEALTHY[:2], make_status("s3", problem="no response")), "s3: no response"),
        ((*HEALTHY[:2], make_status("s3", is_leader=True)), "leaders: s2, s3"),
        ((HEALTHY[0], HEALTHY[2], make_status("s2")), "leaders: none"),
        (HEALTHY[:2], "2 of 3 members"),
        ((), "0 of 3 members; leaders: none"),
    ],
)
def test_member_that_follows_no_leader_is_a_problem(statuses: tuple[MemberStatus, ...], problem: str) -> None:
    assert find_etcd_problem(statuses, members=3) == problem


async def test_call_is_repeated_until_the_store_responds() -> None:
    failures = [StoreUnavailableError(f"commit failed: {NO_LEADER_MESSAGE!r}")]

    async def call() -> int:
        if failures:
            raise failures.pop()
        return 7

    assert await repeat_until_store_responds(call, timeout_s=30.0) == 7


async def test_store_that_never_responds_is_an_error_with_the_last_reason() -> None:
    async def call() -> int:
        raise StoreUnavailableError(NO_LEADER_MESSAGE)

    with pytest.raises(StoreUnavailableError, match=r"unavailable for 0\.01 s: etcdserver: no leader"):
        await repeat_until_store_responds(call, timeout_s=0.01)
