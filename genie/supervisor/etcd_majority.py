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

from genie.controller.etcd.local_member import LocalMember
from genie.errors import ConfigError, StoreAccessError, StoreUnavailableError
from genie.model.names import parse_endpoint
from genie.supervisor.child import Child

_READ_TIMEOUT_S = 1.0
_CONNECT_TIMEOUT_S = 1.0
_POLL_S = 0.05
_REPORT_INTERVAL_S = 2.0
_OTHER_CLUSTER_TEXT = "cluster ID mismatch"
_LOG_LINES_READ = 20


async def wait_for_majority(
    member: LocalMember, child: Child, *, state_dir: Path, progress: Callable[[str], None]
) -> None:
    """Returns when a read through this member succeeds, which needs a majority. Reports what is missing every
    few seconds. Raises LaunchError if the process of the member ends."""
    loop = asyncio.get_running_loop()
    report_at_s = loop.time() + _REPORT_INTERVAL_S
    while True:
        child.check_not_exited()
        if await _can_read(member, state_dir=state_dir):
            return
        if loop.time() >= report_at_s:
            progress(await _describe_missing_members(member, child))
            report_at_s = loop.time() + _REPORT_INTERVAL_S
        await asyncio.sleep(_POLL_S)


async def _describe_missing_members(member: LocalMember, child: Child) -> str:
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
    if any(_OTHER_CLUSTER_TEXT in line for line in child.last_log_lines(count=_LOG_LINES_READ)):
        return (
            f"{what}; another server belongs to another etcd cluster, such as after a restore there: to join "
            "that cluster, run 'genie down', remove STATE/controller, STATE/etcd and STATE/owner.token, and "
            "run 'genie join --server'"
        )
    if not member.endpoints:
        return (
            "waiting for the etcd members to elect a leader; this server has stored no address of another one"
        )
    if not missing:
        return f"{what}; no leader is elected yet"
    return f"{what}; no connection to {', '.join(missing)}"


async def _can_read(member: LocalMember, *, state_dir: Path) -> bool:
    from genie.controller.store.etcd import EtcdStore  # late: needs gRPC

    address = replace(member, endpoints=()).address(state_dir)
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
        return f"{remaining}, a majority: the cluster goes on without this one"
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
