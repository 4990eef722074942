"""A server join that is not complete: what it has written and added, to undo or to continue it.

    STATE/server-join.json    exists while a join as a server is not complete

The file is written before the key of the CA, and removed when all processes of the server have started. If
`genie up` continues the join, it is removed when a majority of the etcd members has replied, before the other
processes start. It contains no secrets.

The record of the etcd member (STATE/etcd/member.json) is written before the request that makes the member a
voter. While it exists, the join is only undone after the member was removed from the cluster: without the
data of a voter, a cluster of two would never have a majority again. After a crash, the next `genie up`
continues such a join.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from genie.agent.identity import AGENTS_DIR
from genie.agent.launcher import kill_jobs_of_stopped_agent
from genie.controller.etcd.local_member import (
    LocalMember,
    etcd_member_directory,
    has_member_record,
    make_managed_etcd_address,
)
from genie.controller.store.open import CONTROLLER_DIRECTORY
from genie.errors import GenieError, StoreError, StoreFullError, TokenMissingError, TokenRefusedError
from genie.model.messages import RevokeToken
from genie.model.names import parse_endpoint
from genie.processes import files
from genie.runtime.controller_connection import open_controller_connection
from genie.runtime.credentials import (
    OWNER_TOKEN_FILE,
    Access,
    make_pinned_client_tls,
    read_owner_token,
)
from genie.runtime.known_servers import read_known_servers
from genie.runtime.network import TcpNetwork
from genie.tenancy.access import Token

_RECORD_FILE = "server-join.json"
_PROMOTE_TIMEOUT_S = 2.0
_REVOKE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class IncompleteJoin:
    """`peer_url` is that of the added etcd member; empty before one was added. `is_member_removed`: it was
    removed again. `controller`: HOST:PORT of a controller of the cluster; empty if not known."""

    etcd_endpoints: tuple[str, ...]
    had_agents_before: bool
    controller: str = ""
    peer_url: str = ""
    is_member_removed: bool = False

    @classmethod
    def read(cls, state_dir: Path) -> IncompleteJoin | None:
        """None without an incomplete join. A damaged record names no member."""
        path = state_dir / _RECORD_FILE
        try:
            body = json.loads(files.read_small_file(path))
            return cls(
                etcd_endpoints=tuple(map(str, body["etcd_endpoints"])),
                had_agents_before=bool(body["had_agents_before"]),
                controller=str(body.get("controller", "")),
                peer_url=str(body["peer_url"]),
                is_member_removed=bool(body.get("is_member_removed", False)),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return cls(etcd_endpoints=(), had_agents_before=True)

    def write(self, state_dir: Path) -> None:
        files.write_private(state_dir / _RECORD_FILE, json.dumps(asdict(self)).encode())

    def may_vote(self, state_dir: Path) -> bool:
        """Whether the etcd member of this machine may be a voter, so that its data must be kept."""
        return not self.is_member_removed and has_member_record(state_dir)

    async def remove_added_member(
        self, state_dir: Path, *, progress: Callable[[str], None]
    ) -> IncompleteJoin:
        """Removes the etcd member; best effort, because the cluster may be unreachable. Returns the new
        record."""
        if not self.peer_url or self.is_member_removed:
            return self
        from genie.controller.etcd.membership import open_etcd_cluster  # late: needs gRPC

        try:
            address = make_managed_etcd_address(self.etcd_endpoints, state_dir=state_dir)
            async with open_etcd_cluster(address) as cluster:
                members = await cluster.list_members()
                found = [member for member in members if member.peer_url == self.peer_url]
                if not found and self.may_vote(state_dir):  # the list of etcd 3.4 may be out of date
                    raise StoreError("it is not in the list of members")
                for member in found:
                    await cluster.remove_member(member.member_id)
                    progress(f"removed etcd member {member.label} again")
        except GenieError as error:
            remedy = (
                "it may be a voter, so its data is kept: 'genie up' continues the join"
                if self.may_vote(state_dir)
                else "remove it with 'genie etcd remove' on another server"
            )
            progress(
                f"warning: could not remove the etcd member of this machine ({self.peer_url}) again: "
                f"{error.message}; {remedy}"
            )
            return self
        removed = replace(self, is_member_removed=True)
        with suppress(StoreFullError):
            removed.write(state_dir)
        return removed

    async def revoke_owner_token(self, state_dir: Path, *, progress: Callable[[str], None]) -> None:
        """Revokes the owner token that the join got, unless the etcd member may be a voter. If that fails,
        reports its ID: nothing stores it any more."""
        try:
            token = read_owner_token(state_dir)
        except TokenMissingError:
            return  # damaged, so that its ID is not known
        if token is None or self.may_vote(state_dir):
            return
        problem = "the address of a controller is not known"
        try:
            if self.controller:
                await _revoke_own_token(token, *parse_endpoint(self.controller), state_dir=state_dir)
                return
        except TokenRefusedError:
            return  # revoked before
        except GenieError as error:
            problem = error.message
        except TimeoutError:
            problem = f"no reply within {_REVOKE_TIMEOUT_S:g} s"
        progress(
            f"warning: the owner token of this join, {token.token_id}, is still valid: {problem}; revoke it "
            f"with 'genie token revoke {token.token_id}' on a server"
        )

    def remove_written_files(self, state_dir: Path) -> None:
        """Removes what the join has written, unless the etcd member may be a voter. Call it when its
        processes have ended.

        Ends the jobs of an agent of the join. Raises NodeError, and keeps their records, if that fails.
        """
        if self.may_vote(state_dir):
            return
        shutil.rmtree(state_dir / CONTROLLER_DIRECTORY, ignore_errors=True)
        shutil.rmtree(etcd_member_directory(state_dir), ignore_errors=True)
        (state_dir / OWNER_TOKEN_FILE).unlink(missing_ok=True)
        if not self.had_agents_before:
            agents = state_dir / AGENTS_DIR
            for node_dir in sorted(agents.glob("*")):
                kill_jobs_of_stopped_agent(node_dir, must_end=True)
            shutil.rmtree(agents, ignore_errors=True)
        mark_join_complete(state_dir)


def mark_join_complete(state_dir: Path) -> None:
    """Removes the record of an incomplete join if there is one, also from the disk."""
    with suppress(FileNotFoundError):
        (state_dir / _RECORD_FILE).unlink()
        files.sync_directory(state_dir)


async def undo_incomplete_join(state_dir: Path, *, progress: Callable[[str], None]) -> bool:
    """Removes what a killed join has left, unless its etcd member may be a voter; returns whether it did.

    Call it while no process of this state directory runs. Raises NodeError if jobs cannot be ended."""
    found = IncompleteJoin.read(state_dir)
    if found is None or found.may_vote(state_dir):
        return False
    progress("an earlier join of this machine as a server was interrupted: removing what it has left")
    found = await found.remove_added_member(state_dir, progress=progress)
    await found.revoke_owner_token(state_dir, progress=progress)
    found.remove_written_files(state_dir)
    progress("removed the key of the certificate authority, the owner token and the etcd member's files")
    return True


async def _revoke_own_token(token: Token, host: str, port: int, *, state_dir: Path) -> None:
    network = TcpNetwork()
    trusted = await make_pinned_client_tls(
        network, host, port, pin=token.pin, state_dir=state_dir, timeout_s=_REVOKE_TIMEOUT_S
    )
    known = read_known_servers(state_dir, token.pin)
    access = Access(host, port, token, trusted, other_servers=known)
    async with (
        asyncio.timeout(_REVOKE_TIMEOUT_S),
        open_controller_connection(
            access, network=network, program="genie join", timeout_s=_REVOKE_TIMEOUT_S
        ) as connection,
    ):
        await connection.call(RevokeToken(token_id=token.token_id), timeout_s=_REVOKE_TIMEOUT_S)


async def try_promote_member_of_incomplete_join(member: LocalMember, *, state_dir: Path) -> None:
    """Makes the running etcd member of this machine a voter if its join was interrupted before that. Returns
    if that fails, such as while the other members do not respond."""
    if IncompleteJoin.read(state_dir) is None or not member.endpoints:
        return
    from genie.controller.etcd.membership import open_etcd_cluster  # late: needs gRPC

    address = make_managed_etcd_address(member.endpoints, state_dir=state_dir)
    with suppress(GenieError):
        async with open_etcd_cluster(address) as cluster:
            for each in await cluster.list_members(timeout_s=_PROMOTE_TIMEOUT_S):
                if each.peer_url == member.peer_url and each.is_learner:
                    await cluster.promote_learner(each.member_id, timeout_s=_PROMOTE_TIMEOUT_S)
