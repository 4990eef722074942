"""Waits until a majority of the etcd members responds, and says which of them do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from genie.controller.etcd.local_member import LocalMember
from genie.errors import GenieError, StoreError, StoreUnavailableError
from genie.supervisor.child import Child

if TYPE_CHECKING:
    from genie.controller.etcd.membership import MemberStatus

WAITING_PREFIX = "waiting for "
"""Of a line of progress that repeats while something is awaited."""
_READ_TIMEOUT_S = 1.0
_POLL_S = 0.2
_REPORT_INTERVAL_S = 2.0


async def wait_for_majority(
    member: LocalMember, child: Child, *, state_dir: Path, progress: Callable[[str], None]
) -> None:
    """Returns when a read through this member succeeds, which needs a majority. Reports what is missing every
    few seconds. Raises LaunchError if the process of the member ends."""
    from genie.controller.store.etcd import EtcdStore  # late: needs gRPC

    loop = asyncio.get_running_loop()
    report_at_s = loop.time() + _REPORT_INTERVAL_S
    store = await EtcdStore.open_address(member.address(state_dir))
    try:
        while True:
            child.check_not_exited()
            try:
                await store.get("cluster", timeout_s=_READ_TIMEOUT_S)
                return
            except (StoreUnavailableError, StoreError):
                pass
            if loop.time() >= report_at_s:
                progress(await _describe_missing_members(member, state_dir=state_dir))
                report_at_s = loop.time() + _REPORT_INTERVAL_S
            await asyncio.sleep(_POLL_S)
    finally:
        await store.close()


async def _describe_missing_members(member: LocalMember, *, state_dir: Path) -> str:
    from genie.controller.etcd.membership import open_etcd_cluster  # late: needs gRPC

    try:
        async with open_etcd_cluster(member.address(state_dir)) as cluster:
            statuses = await cluster.fetch_statuses()
    except GenieError as error:
        return f"{WAITING_PREFIX}the etcd members: {error.message}"
    return f"{WAITING_PREFIX}a majority of the etcd members: {describe_responding_members(statuses)}"


def describe_responding_members(statuses: Sequence[MemberStatus]) -> str:
    """Which members respond and which do not, with their addresses, and how many are needed."""
    voters = [status for status in statuses if not status.info.is_learner]
    needed, missing = len(voters) // 2 + 1, [status for status in voters if status.problem]
    counts = f"{len(voters) - len(missing)} of {len(voters)} respond, {needed} needed"
    if not missing:
        return f"{counts}; they are electing a leader"
    names = ", ".join(_name_and_endpoint(status) for status in missing)
    return f"{counts}; no response from {names}"


def _name_and_endpoint(status: MemberStatus) -> str:
    if status.info.name in ("", status.info.endpoint):
        return status.info.endpoint or status.info.label
    return f"{status.info.name} ({status.info.endpoint})"
