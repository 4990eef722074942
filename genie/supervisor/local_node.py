"""The nodes that this machine is, or was, in a cluster: their directories, and joining as a new node.

A node that the cluster has removed keeps its directory. It joins again under its name with a new join token,
after the jobs that it has left were ended.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from genie.agent import joining
from genie.agent.identity import list_node_dirs, read_controller_addresses, read_identity
from genie.agent.launcher import kill_jobs_of_stopped_agent
from genie.config import ClusterConfig, Settings
from genie.controller.etcd.local_member import LocalMember
from genie.errors import (
    ConfigError,
    GenieError,
    NodeNotAcceptedError,
    NodeRemovedError,
    PermissionError_,
    TokenMissingError,
    TokenRefusedError,
    UsageError,
)
from genie.model.messages import CreateToken
from genie.model.names import address_text, is_loopback, node_id_from, parse_endpoint, validate_node_id
from genie.model.tenant import TokenKind
from genie.runtime.controller_connection import ControllerConnection
from genie.runtime.credentials import connect_authenticated, read_owner_token
from genie.runtime.network import TcpNetwork
from genie.supervisor.connection import open_connection
from genie.tenancy.access import NO_PIN, parse_token

_CONNECT_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 20.0


def local_node_id(settings: Settings) -> str:
    """The node ID of this machine: the setting, or one derived from the host name."""
    node_id = settings.cluster.node_id
    return validate_node_id(node_id) if node_id is not None else node_id_from(socket.gethostname())


def address_of_access(access: ClusterConfig) -> tuple[str, int]:
    if access.master_addr is None:
        raise ConfigError("the address of the controller is missing", hint="pass master_addr")
    return parse_endpoint(access.master_addr, what="master_addr", port=access.master_port)


def can_list_nodes(access: ClusterConfig) -> bool:
    """False without a token or with a join token, which only admits a node."""
    return access.token is not None and parse_token(access.token).kind not in (
        TokenKind.JOIN,
        TokenKind.SERVER_JOIN,
    )


@asynccontextmanager
async def open_connection_of_access(
    settings: Settings, access: ClusterConfig
) -> AsyncIterator[ControllerConnection]:
    """Opens a connection to the controller of `access`."""
    async with open_connection(
        replace(settings, cluster=access),
        network=TcpNetwork(),
        timeout_s=_CONNECT_TIMEOUT_S,
        program="genie up",
        is_address_fixed=True,
    ) as connection:
        yield connection


def has_joined(node_dir: Path, access: ClusterConfig, *, requires_address_if_unpinned: bool = False) -> bool:
    """Whether this is a node of the cluster of `access`.

    Clusters are compared by the pin of the token. Without a token, the address must be one that the node has
    stored; with `requires_address_if_unpinned` also in clusters without TLS, whose tokens have no pin.
    """
    pin = parse_token((node_dir / "node.token").read_text("utf-8")).pin
    if access.token is not None:
        same = parse_token(access.token).pin == pin
        return same and (
            pin != NO_PIN
            or not requires_address_if_unpinned
            or _has_controller_address(node_dir, *address_of_access(access))
        )
    return _has_controller_address(node_dir, *address_of_access(access))


class LocalNode:
    """The node that this machine becomes in the cluster of the settings. `node_id` is the one that it has, or
    else the one to request."""

    def __init__(self, settings: Settings, *, progress: Callable[[str], None]) -> None:
        self._settings = settings
        self._state_dir = settings.paths.state_dir.absolute()
        self._progress = progress
        self.node_id = local_node_id(settings)
        self.use_name_of_member()

    def use_name_of_member(self) -> None:
        """Requests the name of this machine's etcd member as node ID, unless the user has set one."""
        member = LocalMember.read(self._state_dir)
        if member is not None and not self._is_node_id_configured:
            self.node_id = member.name

    async def find_or_join(self, access: ClusterConfig, *, rejoin: bool) -> Path:
        """Returns the directory of the node: one that has joined this cluster before, or a new one.

        With `rejoin` or a join token, a node whose token the cluster refuses joins again; otherwise that
        raises NodeNotAcceptedError.
        """
        node_dir = self._find_joined_node(access)
        if node_dir is None:
            node_dir = await self._join_as_new_node(access)
        elif (refusal := await _find_refusal(node_dir, access)) is not None:
            has_join_token = access.token is not None and parse_token(access.token).kind is TokenKind.JOIN
            if not rejoin and not has_join_token:
                if isinstance(refusal, NodeRemovedError):  # not if its token is only unknown there
                    await self._end_jobs(node_dir)
                raise _not_accepted_error(node_dir.name, access, refusal)
            node_dir = await self._join_again(node_dir, access, refusal)
        self.node_id = node_dir.name
        return node_dir

    async def _join_again(self, node_dir: Path, access: ClusterConfig, refusal: TokenRefusedError) -> Path:
        self._progress(f"{refusal.message}; joining again")
        self.node_id = node_dir.name
        joined = await self._join_as_new_node(access)
        # An unknown token proves nothing (docs/decisions/0002-dead-man-timer.md): those jobs keep running,
        # and the leader decides about them when the agent has registered.
        if isinstance(refusal, NodeRemovedError):
            await self._end_jobs(node_dir)
        return joined

    async def _end_jobs(self, node_dir: Path) -> None:
        """Ends what the agent of a removed node has left: the cluster has recorded its jobs as lost."""
        if count := await asyncio.to_thread(kill_jobs_of_stopped_agent, node_dir):
            self._progress(f"ended processes of jobs that node {node_dir.name} had left running: {count}")

    def _find_joined_node(self, access: ClusterConfig) -> Path | None:
        """Returns the directory of a node of this machine that has joined this cluster before.

        Raises UsageError if there are several, no node ID is set, and there is no token to join a new one.
        """
        joined = [path for path in list_node_dirs(self._state_dir) if has_joined(path, access)]
        # If the host name was in use as node ID, the controller has appended a number.
        given = re.compile(re.escape(self.node_id) + ("" if self._is_node_id_configured else r"(-\d+)?"))
        named = [path for path in joined if given.fullmatch(path.name)]
        if named or self._is_node_id_configured:
            return named[0] if named else None
        if access.token is not None and not (self._is_own_cluster(access) and len(joined) == 1):
            return None
        if len(joined) > 1:
            raise UsageError(
                f"this machine has several nodes of this cluster: {', '.join(path.name for path in joined)}",
                hint="choose one with --node-id",
            )
        return joined[0] if joined else None

    def _is_own_cluster(self, access: ClusterConfig) -> bool:
        """Whether this machine hosts the cluster: its node keeps the name that it was given once."""
        return access.token == str(read_owner_token(self._state_dir) or "")

    @property
    def _is_node_id_configured(self) -> bool:
        """Whether the user has set the node ID."""
        return self._settings.sources["cluster.node_id"] != "default"

    async def _join_as_new_node(self, access: ClusterConfig) -> Path:
        """Joins as a new node with the given join token, or with one that the owner token creates."""
        host, port = address_of_access(access)
        where = address_text(host, port)
        if access.token is None:
            raise TokenMissingError(
                f"joining {where} requires a token",
                hint="create one with 'genie token create --join' and pass it with --token-file FILE",
            )
        text = access.token
        if parse_token(text).kind is TokenKind.USER:
            raise PermissionError_(
                f"joining {where} requires a join token: a user token cannot add a machine",
                hint="get one from the owner of the cluster ('genie token create --join'), and pass it as "
                f"token or to 'genie join {where} --token-file FILE'",
            )
        if can_list_nodes(access):
            async with open_connection_of_access(self._settings, access) as connection:
                request = CreateToken(kind=TokenKind.JOIN, name=self.node_id)
                # Repeated if the leader is lost meanwhile: a token that was not received expires unused.
                text = (await connection.call(request, timeout_s=_CALL_TIMEOUT_S)).token
        self._progress(f"joining the cluster as {self.node_id}")
        return await joining.join_cluster(
            host,
            port,
            text,
            state_dir=self._state_dir,
            requested_node_id=self.node_id,
            network=TcpNetwork(),
            # The controller may append a number to a node ID from the host name, but not to one that was set.
            is_node_id_fixed=self._is_node_id_configured,
        )


async def _find_refusal(node_dir: Path, access: ClusterConfig) -> TokenRefusedError | None:
    """Why the cluster refuses the token of this node; None if it accepts it, or if that is not known."""
    try:
        identity = read_identity(node_dir, controller=address_of_access(access))
        async with connect_authenticated(
            TcpNetwork(), identity, timeout_s=_CONNECT_TIMEOUT_S, program="genie join"
        ):
            return None
    except TokenRefusedError as error:
        return error
    except GenieError:
        return None  # the agent retries, and renews an expired certificate


def _not_accepted_error(
    node_id: str, access: ClusterConfig, refusal: TokenRefusedError
) -> NodeNotAcceptedError:
    where = address_text(*address_of_access(access))
    is_removed = isinstance(refusal, NodeRemovedError)
    kept = "" if is_removed else "; this may be another state of the cluster, so its jobs keep running"
    return NodeNotAcceptedError(
        f"the cluster does not accept node {node_id}: {refusal.message}{kept}",
        hint="to add this machine again, create a token with 'genie token create --join' on a server, then "
        f"run 'genie join {where} --token-file FILE' here",
    )


def _has_controller_address(node_dir: Path, host: str, port: int) -> bool:
    try:
        known = read_controller_addresses(node_dir)
    except GenieError:
        return False
    return any(
        port == at and (host == name or (is_loopback(host) and is_loopback(name))) for name, at in known
    )
