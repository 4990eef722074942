"""Waits until a majority of the etcd members runs, and says which of them cannot be reached.

A member that was restarted serves no request before it has a majority. Its port accepts connections all the
same, and that is what tells a member that waits from one that does not run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from genie.controller.etcd.local_member import (
    LocalMember,
    etcd_member_directory,
    make_managed_etcd_address,
)
from genie.controller.store.open import CONTROLLER_DIRECTORY
from genie.errors import ConfigError, StoreAccessError, StoreError, StoreUnavailableError
from genie.model.names import parse_endpoint
from genie.runtime.credentials import OWNER_TOKEN_FILE
from genie.supervisor.child import Child
from genie.supervisor.incomplete_join import try_promote_member_of_incomplete_join

_READ_TIMEOUT_S = 1.0
_CONNECT_TIMEOUT_S = 1.0
_POLL_S = 0.05
_REPORT_INTERVAL_S = 2.0
_REMOVED_TEXT = "permanently removed from the cluster"
_LOG_BYTES_READ = 1 << 20


async def wait_for_majority(
    member: LocalMember, child: Child, *, state_dir: Path, progress: Callable[[str], None]
) -> None:
    """Waits until a read through this member succeeds, which needs a majority. Reports what is missing every
    few seconds. Promotes a learner whose join was interrupted. Stores the member with the ID of its etcd
    cluster and the addresses of all members.

    Raises ConfigError if another member belongs to another etcd cluster, or this one was removed from its
    cluster, and LaunchError if the process of the member ends for another reason."""
    loop = asyncio.get_running_loop()
    report_at_s = loop.time() + _REPORT_INTERVAL_S
    while True:
        if child.exit_code() is not None:
            _check_not_removed(member, child, state_dir=state_dir)
            child.check_not_exited()
        if await _can_read(member, state_dir=state_dir):
            member = await _update_from_etcd(member, state_dir=state_dir)
            member.write(state_dir)  # 'genie etcd status' lists these members, also if this start fails
            await _check_no_other_cluster(member, state_dir=state_dir)
            return
        await try_promote_member_of_incomplete_join(member, state_dir=state_dir)
        if loop.time() >= report_at_s:
            await _check_no_other_cluster(member, state_dir=state_dir)
            progress(await _describe_missing_members(member))
            report_at_s = loop.time() + _REPORT_INTERVAL_S
        await asyncio.sleep(_POLL_S)


async def _update_from_etcd(member: LocalMember, *, state_dir: Path) -> LocalMember:
    """The member with the ID of its etcd cluster and the addresses of all members, which may have joined
    while this one was stopped; as it was if etcd does not respond."""
    from genie.controller.etcd.membership import open_etcd_cluster  # late: needs gRPC

    own_address = make_managed_etcd_address((member.endpoint,), state_dir=state_dir)
    try:
        async with open_etcd_cluster(own_address) as cluster:
            cluster_id = await cluster.fetch_cluster_id(timeout_s=_READ_TIMEOUT_S)
            found = await cluster.list_members()
    except StoreError:
        return member
    known = member.with_endpoints({each.endpoint for each in found if each.endpoint})
    return replace(known, etcd_cluster_id=cluster_id)


def _check_not_removed(member: LocalMember, child: Child, *, state_dir: Path) -> None:
    """Raises ConfigError if the other members have rejected this one: etcd logs that, then its shutdown in
    dozens of lines, and exits with 0."""
    if was_removed_from_cluster(child):
        raise ConfigError(
            f"{member.name} was removed from the cluster with 'genie etcd remove'",
            hint=f"to add this machine again, {format_join_again(state_dir)}",
        )


def was_removed_from_cluster(child: Child) -> bool:
    """Whether an etcd member has ended because the other members have removed it. Blocks."""
    lines = child.last_log_lines(count=_LOG_BYTES_READ, bytes_max=_LOG_BYTES_READ)
    return any(_REMOVED_TEXT in line for line in lines)


async def _check_no_other_cluster(member: LocalMember, *, state_dir: Path) -> None:
    """Raises ConfigError if a server that this one knows has been restored into another etcd cluster: two
    clusters with the same jobs would run."""
    if not member.etcd_cluster_id:
        return
    found = await asyncio.gather(
        *(_fetch_cluster_id(endpoint, state_dir=state_dir) for endpoint in member.endpoints)
    )
    for endpoint, cluster_id in zip(member.endpoints, found, strict=True):
        if cluster_id not in ("", member.etcd_cluster_id):
            host, _ = parse_endpoint(endpoint)
            raise ConfigError(
                f"this server belongs to the cluster as it was before a restore on {host}: the etcd member "
                f"at {endpoint} belongs to another etcd cluster",
                hint=f"to join the restored cluster, {format_join_again(state_dir)}; "
                f"to continue with the previous cluster instead, run 'genie down' on {host}, then 'genie up' "
                "here and on the other previous servers, and remove its member with 'genie etcd remove'",
            )


def format_join_again(state_dir: Path) -> str:
    """How a machine whose etcd member was removed becomes a server again."""
    paths = (state_dir / CONTROLLER_DIRECTORY, etcd_member_directory(state_dir))
    removed = f"{', '.join(map(str, paths))} and {state_dir / OWNER_TOKEN_FILE}"
    return f"remove {removed}, and run 'genie join --server'"


async def _fetch_cluster_id(endpoint: str, *, state_dir: Path) -> str:
    """The ID of the etcd cluster of the member at this endpoint; empty if it does not respond in time."""
    from genie.controller.etcd.membership import open_etcd_cluster  # late: needs gRPC

    if await find_connect_problem(endpoint):
        return ""
    try:
        async with open_etcd_cluster(make_managed_etcd_address((endpoint,), state_dir=state_dir)) as cluster:
            return await cluster.fetch_cluster_id(timeout_s=_READ_TIMEOUT_S)
    except StoreError:
        return ""


async def _describe_missing_members(member: LocalMember) -> str:
    """What this member waits for, with the addresses of the members that cannot be reached."""
    problems = await asyncio.gather(*map(find_connect_problem, member.endpoints))
    missing = [
        f"{endpoint} ({problem})"
        for endpoint, problem in zip(member.endpoints, problems, strict=True)
        if problem
    ]
    count = 1 + len(member.endpoints)
    running, needed = count - len(missing), count // 2 + 1
    what = f"waiting for a majority of the etcd members: {running} of {count} running, {needed} needed"
    if not member.endpoints:
        return (
            "waiting for the etcd members to elect a leader; this server has stored no address of another one"
        )
    if not missing:
        return f"{what}; no leader is elected yet"
    return f"{what}; no connection to {', '.join(missing)}"


async def _can_read(member: LocalMember, *, state_dir: Path) -> bool:
    from genie.controller.store.etcd import EtcdStore  # late: needs gRPC

    address = make_managed_etcd_address((member.endpoint,), state_dir=state_dir)
    try:
        store = await EtcdStore.open_address(address, timeout_s=_READ_TIMEOUT_S)
        try:
            await store.get("cluster", timeout_s=_READ_TIMEOUT_S)
        finally:
            await store.close()
    except (StoreUnavailableError, StoreAccessError):
        return False
    return True


async def describe_remaining_servers(state_dir: Path) -> str:
    """How many servers run when this one stops, as connections to their etcd members show; a warning if they
    are no majority. Empty if this is no server, or the only one."""
    try:
        member = LocalMember.read(state_dir)
    except ConfigError:
        return ""
    if member is None or not member.endpoints:
        return ""
    problems = await asyncio.gather(*(find_connect_problem(endpoint) for endpoint in member.endpoints))
    running, total = sum(not problem for problem in problems), len(problems) + 1
    needed = total // 2 + 1
    remaining = f"{running} of {total} servers {'remains' if running == 1 else 'remain'}"
    if running >= needed:
        return f"{remaining}, a majority: the cluster stays available"
    return (
        f"warning: {remaining}, and {needed} are needed: without a leader, no job is accepted, started or "
        "recorded as ended until enough servers run again"
    )


async def find_connect_problem(endpoint: str) -> str:
    """Why no connection to this HOST:PORT can be opened; empty if one can."""
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*parse_endpoint(endpoint))
    except TimeoutError:
        return "no response"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    writer.close()
    return ""


def is_removal_in_log(lines: list[str]) -> bool:
    """Whether these lines of etcd's log say that the other members have removed this one."""
    return any(_REMOVED_TEXT in line for line in lines)
