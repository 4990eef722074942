"""The roles server and worker of a session: which processes it starts on this machine, if any.

A server hosts a cluster where none listens yet; where one does, it lends it this machine, as a worker
does. Linux and macOS only, and imported only for these roles. Not for: the processes themselves
(local.py).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace

from genie.cluster import local
from genie.config import ClusterConfig, Settings
from genie.errors import TokenMissingError
from genie.model.names import parse_endpoint
from genie.model.tenant import TokenKind
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster, is_loopback
from genie.tenancy.access import parse_token

_log = logging.getLogger(__name__)

_PROBE_S = 2.0
_LOOPBACK = "127.0.0.1"


def with_node_id(settings: Settings) -> Settings:
    """This session and the agent on this machine go by one name."""
    node_id = local.local_node_id(settings)
    return replace(settings, cluster=replace(settings.cluster, node_id=node_id))


async def host_cluster(settings: Settings, stack: AsyncExitStack, *, timeout_s: float) -> Settings | None:
    """Starts a cluster for a server and gives the settings to reach it with; None where one is there.

    The children are on the stack: they end with the session.
    """
    config = settings.cluster
    host, port = parse_endpoint(config.master_addr or _LOOPBACK, what="master_addr", port=config.master_port)
    if not is_loopback(host) or await _listens(host, port):
        return None
    controller = replace(settings.controller, port=port)
    if settings.sources["controller.bind"] == "default":
        controller = replace(controller, bind=_LOOPBACK if host == "localhost" else host)
    hosted = replace(settings, controller=controller)
    supervisor = await stack.enter_async_context(local.up(hosted, progress=_progress, timeout_s=timeout_s))
    assert supervisor.cluster is not None
    return _reached(settings, supervisor.cluster)


async def lend_machine(
    settings: Settings, access: ClusterConfig, stack: AsyncExitStack, *, timeout_s: float
) -> None:
    """Starts an agent that joins the cluster of `access`; not where this machine has one already.

    AgentRunningError where this machine has an agent of another cluster.
    """
    state_dir = settings.paths.state_dir
    running = local.find_running(state_dir)
    if running is not None and local.AGENT in running.pids:
        local.check_agent_is_of(running, access, state_dir=state_dir)
        _log.info("this machine is in the cluster already: %s", running)
        return
    await stack.enter_async_context(local.up_agent(settings, access, progress=_progress, timeout_s=timeout_s))


def joining_token(settings: Settings) -> tuple[Settings, str | None]:
    """For a worker: the settings to connect with, and the token to join with (None for the same one).

    A join token admits a node and nothing else, so the session needs another one beside it.
    """
    token = settings.cluster.token
    if token is None or parse_token(token).kind is not TokenKind.JOIN:
        return settings, None
    if not (settings.paths.state_dir / OWNER_TOKEN_FILE).exists():
        raise TokenMissingError(
            "a join token lets this machine's agent in, but not this session",
            hint="use the owner's token, or run 'genie join' for an agent alone",
        )
    return replace(settings, cluster=replace(settings.cluster, token=None)), token


def _reached(settings: Settings, cluster: LocalCluster) -> Settings:
    owner = local.owner_access(settings.paths.state_dir, cluster)
    config = replace(
        settings.cluster,
        discovery_method="address",
        master_addr=owner.master_addr,
        master_port=owner.master_port,
        token=settings.cluster.token or owner.token,
    )
    return replace(settings, cluster=config)


async def _listens(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # a TimeoutError is one, too
        return False
    writer.close()
    return True


def _progress(line: str) -> None:
    _log.info("%s", line)
