"""`genie join --server`: makes this machine a server of an existing cluster.

Fetches the CA of the cluster inside the join, encrypted (controller/server_credentials_handover.py), and adds
an etcd member: first as a learner, which does not vote, and as a voter once it has caught up.
`remove_added_member` and `remove_written_files` undo it (incomplete_join.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from genie.agent.identity import AGENTS_DIR
from genie.agent.joining import call_leader
from genie.config import ControllerConfig
from genie.controller.etcd.local_member import (
    LocalMember,
    ca_path,
    etcd_data_directory,
    etcd_member_directory,
    make_managed_etcd_address,
)
from genie.controller.etcd.replacement import is_replacement_committed
from genie.controller.server_credentials_handover import ServerCredentials, ServerJoinAttempt
from genie.controller.store.open import CONTROLLER_DIRECTORY
from genie.errors import ConfigError, GenieError, TokenRefusedError
from genie.model.names import address_text, is_loopback
from genie.model.tenant import TokenKind
from genie.processes import files
from genie.processes.clock import SystemClock
from genie.runtime.credentials import OWNER_TOKEN_FILE
from genie.runtime.network import Network
from genie.supervisor.etcd_majority import format_join_again
from genie.supervisor.etcd_member import (
    EtcdMemberProcess,
    format_initial_cluster,
    new_local_member,
    write_etcd_member_certificate,
)
from genie.supervisor.incomplete_join import IncompleteJoin, mark_join_complete
from genie.tenancy.access import Token, parse_token

if TYPE_CHECKING:
    from genie.controller.etcd.membership import EtcdCluster, MemberInfo

_log = logging.getLogger(__name__)

_CONTROLLER_CALL_TIMEOUT_S = 15.0
_ADD_MEMBER_TIMEOUT_S = 60.0
_PROMOTE_MEMBER_TIMEOUT_S = 60.0


def parse_server_join_token(text: str) -> Token:
    """Raises TokenRefusedError for another kind of token."""
    token = parse_token(text)
    if token.kind is not TokenKind.SERVER_JOIN:
        raise TokenRefusedError(
            f"{token.kind.with_article} token cannot be used to join as a server",
            hint="create one on a server of the cluster: 'genie token create --server'",
        )
    return token


def check_not_a_server(state_dir: Path) -> None:
    """Raises ConfigError if the state directory has files of a cluster that this machine hosts."""
    if (member := LocalMember.read(state_dir)) is not None:
        is_incomplete = IncompleteJoin.read(state_dir) is not None
        raise ConfigError(
            f"cannot join as a server: this machine is the server {member.name} already",
            hint=f"start it with 'genie up'{', which continues its join' if is_incomplete else ''}; if it "
            f"was removed with 'genie etcd remove', {format_join_again(state_dir)} again",
        )
    # A failed join removes all of them again.
    for path, exists in (
        (state_dir / CONTROLLER_DIRECTORY, (state_dir / CONTROLLER_DIRECTORY).exists()),
        (etcd_member_directory(state_dir), _has_etcd_member(state_dir)),
        (state_dir / OWNER_TOKEN_FILE, (state_dir / OWNER_TOKEN_FILE).exists()),
    ):
        if exists:
            raise ConfigError(
                f"cannot join as a server: this machine already has a cluster of its own ({path})",
                hint="start that with 'genie up', or set GENIE_STATE_DIR to another directory",
            )


def _has_etcd_member(state_dir: Path) -> bool:
    """Data without a record counts: etcd would use it instead of joining."""
    return (
        LocalMember.read(state_dir) is not None
        or is_replacement_committed(state_dir)
        or (etcd_data_directory(state_dir) / "member").exists()
    )


async def fetch_server_credentials(
    host: str, port: int, token: Token, *, state_dir: Path, network: Network
) -> ServerCredentials:
    """Exchanges a server token for the CA of the cluster. The token can be used once.

    Follows a standby to the leader; each server is verified against the pin of the token.
    """
    client = ServerJoinAttempt.create(token)
    reply, _ = await call_leader(
        client.request,
        (host, port),
        pin=token.pin,
        state_dir=state_dir,
        network=network,
        timeout_s=_CONTROLLER_CALL_TIMEOUT_S,
        clock=SystemClock(),
    )
    return client.decrypt_credentials(reply)


class ServerJoin:
    """One attempt of this machine to become a server. The caller starts controller and agent after `run`."""

    def __init__(
        self,
        config: ControllerConfig,
        etcd: EtcdMemberProcess,
        *,
        state_dir: Path,
        network: Network,
        progress: Callable[[str], None],
    ) -> None:
        self._config = config
        self._etcd = etcd
        self._state_dir = state_dir
        self._network = network
        self._progress = progress
        self._etcd_endpoints: tuple[str, ...] = ()
        self._incomplete: IncompleteJoin | None = None
        """What is to be undone; None before anything was written."""

    async def run(self, host: str, port: int, token: Token, *, name: str, runs_agent: bool) -> None:
        """Returns when the etcd member of this machine votes."""
        self._progress(f"joining {address_text(host, port)} as a server")
        # Before the handover, which uses up the token.
        member = await asyncio.to_thread(new_local_member, self._config, name=name)
        member = replace(member, runs_agent=runs_agent)
        _check_reachable_by_servers(member, host)
        await self._etcd.check_can_start(member)
        credentials = await fetch_server_credentials(
            host, port, token, state_dir=self._state_dir, network=self._network
        )
        self._etcd_endpoints = credentials.etcd_endpoints
        had_agents = (self._state_dir / AGENTS_DIR).exists()
        self._record_progress(
            IncompleteJoin(
                self._etcd_endpoints, had_agents_before=had_agents, controller=address_text(host, port)
            )
        )
        self._write_credentials(credentials)
        await asyncio.to_thread(
            write_etcd_member_certificate, self._config, member, state_dir=self._state_dir
        )
        async with self._open_etcd_cluster() as cluster:
            await self._add_and_promote_member(cluster, member)

    async def remove_added_member(self) -> None:
        """Removes the member; best effort. Call it while the etcd of this machine still runs: in a cluster of
        two, removing one takes both."""
        if self._incomplete is not None:
            self._incomplete = await self._incomplete.remove_added_member(
                self._state_dir, progress=self._progress
            )

    async def revoke_owner_token(self) -> None:
        """Revokes the owner token that the join got; best effort. Call it after `remove_added_member`."""
        if self._incomplete is not None:
            await self._incomplete.revoke_owner_token(self._state_dir, progress=self._progress)

    def remove_written_files(self) -> None:
        """Removes what the join has written, unless its etcd member is still one. Call it when the processes
        have ended."""
        if self._incomplete is not None:
            try:
                self._incomplete.remove_written_files(self._state_dir)
            except GenieError as error:  # the error of the join takes precedence; the next command repeats it
                self._progress(f"warning: could not remove all files of the join: {error.message}")

    def mark_complete(self) -> None:
        """Call it when all processes have started: the join is not undone any more."""
        mark_join_complete(self._state_dir)

    def _record_progress(self, incomplete: IncompleteJoin) -> None:
        self._incomplete = incomplete
        incomplete.write(self._state_dir)

    def _write_credentials(self, credentials: ServerCredentials) -> None:
        files.make_private_directory(self._state_dir / CONTROLLER_DIRECTORY)
        ca = ca_path(self._state_dir)
        files.write_private(ca.with_suffix(".key"), credentials.ca_key_pem.encode())
        files.write_private(ca, credentials.ca_pem.encode())
        files.write_private(self._state_dir / OWNER_TOKEN_FILE, credentials.owner_token.encode())

    def _open_etcd_cluster(self) -> AbstractAsyncContextManager[EtcdCluster]:
        from genie.controller.etcd.membership import open_etcd_cluster  # late: needs gRPC

        return open_etcd_cluster(make_managed_etcd_address(self._etcd_endpoints, state_dir=self._state_dir))

    async def _add_and_promote_member(self, cluster: EtcdCluster, member: LocalMember) -> None:
        existing = await cluster.list_members()
        _check_peer_url_unused(existing, member)
        member = replace(member, name=_unused_member_name(member.name, existing))
        self._progress(f"adding etcd member {member.name}")
        assert self._incomplete is not None
        self._record_progress(replace(self._incomplete, peer_url=member.peer_url))
        added, members = await cluster.add_learner(member.peer_url, timeout_s=_ADD_MEMBER_TIMEOUT_S)
        # etcd compares the URLs; a member that has not started yet has no name.
        names = {each.member_id: each.label for each in members}
        names[added.member_id] = member.name
        peers = [(names[each.member_id], each.peer_url) for each in members]
        await self._etcd.start(member, initial_cluster=format_initial_cluster(peers), is_new_cluster=False)
        # Before the promotion: from this record on, the data of the member is kept (incomplete_join.py).
        member = replace(member, etcd_cluster_id=await cluster.fetch_cluster_id())
        member.with_endpoints({each.endpoint for each in existing if each.endpoint}).write(self._state_dir)
        self._progress("waiting until the etcd member has caught up")
        await cluster.promote_learner(added.member_id, timeout_s=_PROMOTE_MEMBER_TIMEOUT_S)


def _check_reachable_by_servers(member: LocalMember, host: str) -> None:
    """Raises ConfigError if the other servers could not reach this one."""
    if is_loopback(member.host) and not is_loopback(host):
        raise ConfigError(
            f"a server of the cluster at {host} must be reachable from the other servers, but this one would "
            f"listen on {member.host}",
            hint="give an address of this machine with --bind",
        )


def _check_peer_url_unused(members: tuple[MemberInfo, ...], member: LocalMember) -> None:
    for each in members:
        if each.peer_url == member.peer_url:
            raise ConfigError(
                f"the cluster already has an etcd member {each.label!r} at {member.peer_url}",
                hint=f"if that machine was lost, run 'genie etcd remove {each.label}' on another server; "
                "else choose another --bind or GENIE_CONTROLLER_ETCD_PEER_PORT",
            )


def _unused_member_name(name: str, members: tuple[MemberInfo, ...]) -> str:
    used, candidate, number = {member.name for member in members}, name, 1
    while candidate in used:
        number += 1
        candidate = f"{name}-{number}"
    return candidate
