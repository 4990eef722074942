"""Commands for the etcd cluster that Genie runs: etcd status, remove and defrag. They run on a server.

They connect to etcd with the certificate of this machine's member, not through the controller, so that they
also work while no controller leads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.quantities import format_size
from genie.errors import (
    ConfigError,
    DeadlineError,
    GenieError,
    StoreError,
    StoreUnavailableError,
    UsageError,
)

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.controller.etcd.local_member import LocalMember
    from genie.controller.etcd.membership import EtcdCluster, MemberStatus
    from genie.controller.nodes.releases import ServerRelease
    from genie.controller.store import Store

etcd_app = typer.Typer(
    name="etcd",
    help="Show and repair the etcd cluster of 'genie up --store etcd'.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(etcd_app)

_CONTROLLER_STOP_TIMEOUT_S = 30.0
_DELETE_RECORDS_TIMEOUT_S = 15.0
_RETRY_INTERVAL_S = 0.2
_STATUS_COLUMNS = ("member", "endpoint", "role", "version", "size", "fragmented", "revision", "health")
_STATUS_COLUMNS_DROPPED_IF_NARROW = ("version", "revision")


@command(etcd_app, "status", example="genie etcd status --json")
def status(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """Show members, leader, health, size and revision of the etcd cluster.

    If no member responds, only the name of the own one is known. Exit code 1 without a majority.
    """
    settings = invocation.load_settings()
    statuses = asyncio.run(_fetch_member_statuses(settings))
    if as_json:
        output.write_json({"members": [_member_status_to_json(each) for each in statuses]})
    else:
        output.write_table(
            _STATUS_COLUMNS,
            [_member_status_row(each) for each in statuses],
            droppable=_STATUS_COLUMNS_DROPPED_IF_NARROW,
        )
    if problem := _find_majority_problem(statuses):
        output.print_message(problem)
        if waits_for := _read_missing_servers(settings):
            output.print_message(f"this server is {waits_for}")
        raise typer.Exit(1)


def _read_missing_servers(settings: Settings) -> str:
    """Return what the server of this machine waits for: it responds only with a majority."""
    from genie.supervisor.process_records import SUPERVISOR, read_process_record

    record = read_process_record(settings.paths.state_dir, SUPERVISOR)
    return "" if record is None else record.missing_servers


@command(etcd_app, "remove", example="genie etcd remove gpu-box-2")
def remove(
    invocation: Invocation,
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Member name, as in 'genie etcd status'.")],
    running: Annotated[
        bool,
        typer.Option("--running", help="Also remove a member that responds: its etcd and controller stop."),
    ] = False,
) -> None:
    """Remove a member for good, so that another server can take its place.

    Revokes the owner tokens of that server. Agents and clients no longer try the address of its controller.
    Fails while the member responds, unless --running is given: of two servers, one can only be removed while
    both run. Its agent and jobs go on. If the command is interrupted, repeat it.
    """
    settings = invocation.load_settings()
    removed, others = asyncio.run(_remove_member(settings, name, allows_running=running))
    output.write_line(f"{name}: removed")
    for server in removed:
        output.print_message(f"removed the address of its controller, {server.address}")
    if removed:
        asyncio.run(_revoke_owner_tokens(settings, removed, others))


@command(etcd_app, "defrag", example="genie etcd defrag")
def defrag(invocation: Invocation) -> None:
    """Return free space of every member to the file system, one after another, etcd's leader last.

    A member does not respond meanwhile. Also clears the alarm of a full store. The leading controller
    defragments by itself when more than half of a file is free.
    """
    for member in asyncio.run(_defragment_members_and_get_names(invocation.load_settings())):
        output.write_line(f"{member}: defragmented")


def _read_local_member(settings: Settings) -> LocalMember:
    from genie.controller.etcd.local_member import LocalMember

    member = LocalMember.read(settings.paths.state_dir)
    if member is None:
        raise ConfigError(
            f"there is no etcd member in {settings.paths.state_dir}",
            hint="run this on a server of a cluster that was started with 'genie up --store etcd'",
        )
    return member


def _open_cluster(settings: Settings) -> AbstractAsyncContextManager[EtcdCluster]:
    member = _read_local_member(settings)  # first: only servers have the packages of the etcd extra
    # Errors of connections are shown by the commands. gRPC reads this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from genie.controller.etcd.membership import open_etcd_cluster

    return open_etcd_cluster(member.address(settings.paths.state_dir))


async def _fetch_member_statuses(settings: Settings) -> tuple[MemberStatus, ...]:
    own = _read_local_member(settings)
    async with _open_cluster(settings) as cluster:
        return tuple(
            dataclasses.replace(each, info=dataclasses.replace(each.info, name=own.name))
            if each.info.name == each.info.endpoint == own.endpoint
            else each
            for each in await cluster.fetch_statuses()
        )


def _find_majority_problem(statuses: Sequence[MemberStatus]) -> str:
    """Empty if a majority of the voting members responds."""
    voters = [each for each in statuses if not each.info.is_learner]
    responding, needed = sum(not each.problem for each in voters), len(voters) // 2 + 1
    if responding >= needed:
        return ""
    return f"{responding} of {len(voters)} members respond, {needed} needed"


async def _remove_member(
    settings: Settings, name: str, *, allows_running: bool
) -> tuple[list[ServerRelease], list[ServerRelease]]:
    """Removes the member and the records of its server. Returns these, and those of the other servers.

    If it is interrupted, it can be repeated: the records of a lost server are removed first, and those of a
    running one, which writes them, are found without its member. Prints the ID of its owner token before,
    because nothing stores it afterwards."""
    async with _open_cluster(settings) as cluster:
        from genie.controller.etcd.removed_server import list_controllers_of_server, list_other_servers
        from genie.controller.store.etcd import EtcdStore

        local = _read_local_member(settings)
        statuses = await cluster.fetch_statuses()
        member = _choose_member(statuses, name)
        if member is not None:
            _check_removable(statuses, member, own_name=local.name, allows_running=allows_running)
        store = await EtcdStore.open_address(local.address(settings.paths.state_dir))
        try:
            removed = await list_controllers_of_server(store, name)
            others = await list_other_servers(store, name)
            if member is None and not removed:
                known = ", ".join(each.info.label for each in statuses)
                raise UsageError(f"no member has the name {name[:80]!r}", hint=f"members: {known}")
            for server in removed.values():
                if server.owner_token_id:
                    output.print_message(f"the owner token of that server is {server.owner_token_id}")
            if member is not None and not member.problem:
                await cluster.remove_member(member.info.member_id)
            if member is None or not member.problem:
                await _wait_until_controllers_stopped(removed.values(), name)
            for controller in removed:
                await _delete_records_when_it_does_not_lead(store, controller, name)
        finally:
            await store.close()
        if member is not None and member.problem:
            await cluster.remove_member(member.info.member_id)
        return list(removed.values()), others


def _choose_member(statuses: Sequence[MemberStatus], name: str) -> MemberStatus | None:
    chosen = [each for each in statuses if each.info.label == name]
    if len(chosen) > 1:
        known = ", ".join(each.info.label for each in statuses)
        raise UsageError(f"several members have the name {name[:80]!r}", hint=f"members: {known}")
    return chosen[0] if chosen else None


def _check_removable(
    statuses: Sequence[MemberStatus], member: MemberStatus, *, own_name: str, allows_running: bool
) -> None:
    name = member.info.label
    if not member.problem and not allows_running:
        raise UsageError(
            f"cannot remove etcd member {name}: it is responding",
            hint=f"to remove it all the same: 'genie etcd remove {name} --running', after which its etcd and "
            "controller stop and its jobs continue",
        )
    if not member.problem and name == own_name:
        raise UsageError(
            f"cannot remove etcd member {name}: it is that of this machine, and it is running",
            hint="run this on another server",
        )
    if problem := _find_majority_problem(statuses):
        raise StoreError(
            f"cannot remove etcd member {name}: {problem}",
            hint=f"start other servers with 'genie up'; if {name} can be started, do that, and run 'genie "
            f"etcd remove {name} --running' here; if they are lost for good, restore a backup on this one "
            "('genie down --keep-jobs', then 'genie store restore FILE')",
        )
    if problem := _find_majority_problem([each for each in statuses if each is not member]):
        raise StoreError(
            f"cannot remove etcd member {name}: of the others, {problem}",
            hint="start other servers with 'genie up', or remove a member that does not respond first",
        )


async def _wait_until_controllers_stopped(servers: Iterable[ServerRelease], name: str) -> None:
    """Their supervisor stops them when the etcd member was removed."""
    from genie.supervisor.etcd_majority import find_connect_problem

    deadline_s = time.monotonic() + _CONTROLLER_STOP_TIMEOUT_S
    for server in servers:
        while not await find_connect_problem(server.address):
            if time.monotonic() >= deadline_s:
                raise DeadlineError(
                    f"etcd member {name} is removed, but the controller of that server still listens on "
                    f"{server.address}",
                    hint=f"run 'genie down' on its machine, then 'genie etcd remove {name}' here again",
                )
            await asyncio.sleep(_RETRY_INTERVAL_S)


async def _delete_records_when_it_does_not_lead(store: Store, controller: str, name: str) -> None:
    """Retries while the remaining members elect a leader, or the controller's lease has not expired."""
    from genie.controller.etcd.removed_server import delete_records_of_controller

    deadline_s = time.monotonic() + _DELETE_RECORDS_TIMEOUT_S
    while True:
        try:
            await delete_records_of_controller(store, controller, etcd_member=name)
            return
        except (UsageError, StoreUnavailableError):
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(_RETRY_INTERVAL_S)


async def _revoke_owner_tokens(
    settings: Settings, removed: list[ServerRelease], others: list[ServerRelease]
) -> None:
    """Revokes the owner tokens of a removed server; if that fails, prints how to do it."""
    from genie.cluster.client import open_client
    from genie.controller.etcd.removed_server import choose_owner_tokens_of_server
    from genie.runtime.credentials import find_owner_token_id

    own = find_owner_token_id(settings.paths.state_dir)
    known = {server.owner_token_id for server in removed} - {"", own}
    try:
        async with open_client(settings) as client:
            tokens = await client.list_tokens()
            chosen = choose_owner_tokens_of_server(tokens, removed=removed, others=others, own_token_id=own)
            for token_id in chosen:
                known.add(token_id)
                await client.revoke_token(token_id)
                known.discard(token_id)
                output.print_message(f"revoked the owner token of that server, {token_id}")
    except GenieError as error:
        ids = " ".join(sorted(known)) or "ID"
        output.print_message(
            f"warning: owner tokens of that server are still valid: {error.message}; revoke them with 'genie "
            f"token revoke {ids}'"
        )
        return
    if not chosen:
        output.print_message(
            "the owner token of that server is not known, or is that of this one, too, and stays valid: "
            "'genie token list' shows all, 'genie token revoke ID' revokes one"
        )


async def _defragment_members_and_get_names(settings: Settings) -> list[str]:
    async with _open_cluster(settings) as cluster:
        statuses = await cluster.fetch_statuses()
        _check_all_members_respond(statuses)
        for each in sorted(statuses, key=lambda status: status.is_leader):
            await cluster.defragment(each.info.endpoint)
        if any(each.alarms for each in statuses):
            await _clear_space_alarm_and_print(cluster)
        return [each.info.label for each in statuses]


def _check_all_members_respond(statuses: tuple[MemberStatus, ...]) -> None:
    silent = [each for each in statuses if each.problem]
    if silent:
        raise StoreError(
            f"cannot defragment: etcd member {silent[0].info.label} does not respond: {silent[0].problem}",
            hint="a member pauses during defragmentation, so all others must respond; start it again, or "
            "remove it with 'genie etcd remove'",
        )


async def _clear_space_alarm_and_print(cluster: EtcdCluster) -> None:
    await cluster.clear_space_alarm()
    output.print_message("cleared the alarm of the full store")


def _member_status_row(each: MemberStatus) -> tuple[str, ...]:
    role = "learner" if each.info.is_learner else "leader" if each.is_leader else "follower"
    health = "; ".join(each.alarms) or "healthy"
    if each.problem:
        name = "-" if each.info.name == each.info.endpoint else each.info.label  # only its address is known
        return (name, each.info.endpoint or "-", "-", "-", "-", "-", "-", each.problem)
    return (
        each.info.label,
        each.info.endpoint,
        role,
        each.version,
        format_size(each.size_bytes),
        f"{each.fragmented_bytes / max(each.size_bytes, 1):.0%}",
        str(each.revision),
        health,
    )


def _member_status_to_json(each: MemberStatus) -> dict[str, Any]:
    values = dataclasses.asdict(each)
    info: dict[str, Any] = values.pop("info")
    # 64-bit IDs are hexadecimal, as etcdctl prints them: JSON numbers have 53 bits.
    info["member_id"] = f"{each.info.member_id:x}"
    return info | values | {"fragmented_bytes": each.fragmented_bytes, "healthy": not each.problem}
