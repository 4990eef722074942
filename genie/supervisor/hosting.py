"""The session roles server and worker: which processes they start on this machine.

A server hosts a cluster on the given address of this machine. If a cluster already listens there, this
machine joins it, as a worker does. Without an address, only this machine can connect.
Linux and macOS only; imported only for these roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from contextlib import AsyncExitStack
from dataclasses import replace

from genie.config import ClusterConfig, Settings
from genie.controller.nodes.admission import advertised_host
from genie.errors import ConfigError, TokenMissingError
from genie.model.names import address_text, is_loopback, parse_endpoint
from genie.model.tenant import TokenKind
from genie.runtime.credentials import LocalCluster, find_address, find_token, is_wildcard, login_hint
from genie.supervisor import local_cluster, this_machine
from genie.supervisor.local_node import local_node_id
from genie.tenancy.access import parse_token

_log = logging.getLogger(__name__)

_LISTENER_PROBE_TIMEOUT_S = 2.0
_LOOPBACK_ADDRESS = "127.0.0.1"
JOIN_TOKEN_COMMAND = "(umask 077; genie token create --join > join.token)"


def with_node_id_of_agent(settings: Settings) -> Settings:
    """Gives the session the node ID of this machine's agent."""
    node_id = local_node_id(settings)
    return replace(settings, cluster=replace(settings.cluster, node_id=node_id))


async def start_or_find_cluster(
    settings: Settings, stack: AsyncExitStack, *, timeout_s: float
) -> tuple[Settings, bool]:
    """Starts a cluster for a server unless one is running. Returns the settings that connect to the cluster,
    and whether it was started.

    `stack` ends the children with the session.
    """
    config = settings.cluster
    host, port = parse_endpoint(
        config.master_addr or _LOOPBACK_ADDRESS, what="master_addr", port=config.master_port
    )
    bind = await asyncio.to_thread(_find_bind_address, host)
    if bind is None:
        own = ", ".join(await asyncio.to_thread(this_machine.list_own_addresses)) or "none found"
        _log.info("%s is not an address of this machine (%s): joining the cluster there", host, own)
        return settings, False
    if await _is_listening(bind, port):
        settings = _without_stored_login(settings, host, port)
        async with this_machine.add_local_cluster_hint(host, port, state_dir=settings.paths.state_dir):
            _check_token_for_listener(settings, host, port)
        return settings, False
    controller = replace(settings.controller, port=port)
    is_bind_set = settings.sources["controller.bind"] != "default"
    if not is_bind_set:
        controller = replace(controller, bind=bind)
    hosted = replace(settings, controller=controller)
    supervisor = await stack.enter_async_context(
        local_cluster.run_local_cluster(hosted, progress=_log_progress_message, timeout_s=timeout_s)
    )
    assert supervisor.cluster is not None
    is_served = controller.bind == bind or (is_wildcard(controller.bind) and not is_loopback(host))
    named = host if is_served else advertised_host(controller)
    _print_connection_guide(format_connection_guide(named, supervisor.cluster.port, is_bind_set=is_bind_set))
    return _with_access_to_cluster(settings, supervisor.cluster), True


def format_connection_guide(host: str, port: int, *, is_bind_set: bool = False) -> list[str]:
    """How other machines join and use the cluster at this address, one instruction per line.

    `is_bind_set`: controller.bind is configured, which takes precedence over master_addr.
    """
    where = address_text(host, port)
    if is_loopback(host):
        remedy = (
            "set controller.bind (GENIE_CONTROLLER_BIND) to an address of this machine"
            if is_bind_set
            else "pass an address of this machine as master_addr"
        )
        return [
            f"the cluster listens on {where}: only this machine can connect "
            f"(to allow other machines, {remedy})"
        ]
    return [
        f"the cluster listens on {where}: other machines can connect with a token",
        f"to add a machine: {JOIN_TOKEN_COMMAND} here, then there: "
        f"genie join {where} --token-file join.token",
        f"to connect a client: genie token create here, then there: genie login {where}",
    ]


def _print_connection_guide(lines: list[str]) -> None:
    """Prints to standard error: a program may hide INFO messages of the log."""
    if sys.stderr is None:  # closed: print() would write to standard output
        return
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        print(*(f"genie: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)  # noqa: T201


def _find_bind_address(host: str) -> str | None:
    """The IP address to listen on; None if `host` is another machine. May block on a name lookup."""
    if host.lower() == "localhost":
        return _LOOPBACK_ADDRESS
    if is_loopback(host):
        return this_machine.normalize_ip(host)
    if not this_machine.is_own_address(host):
        return None
    addresses = this_machine.resolve_host(host)
    if any(is_wildcard(address) for address in addresses):  # '0' and '::0', too
        raise _unusable_master_addr_error(
            f"master_addr = {host!r} is not an address that other machines can connect to"
        )
    reachable = this_machine.list_own_addresses(addresses)
    if not reachable:
        raise _unusable_master_addr_error(
            f"master_addr = {host!r} resolves to {', '.join(addresses)} here: "
            "none of them is reachable from other machines"
        )
    return reachable[0]


def _unusable_master_addr_error(message: str) -> ConfigError:
    own = ", ".join(this_machine.list_own_addresses()) or "none found"
    return ConfigError(
        message, hint=f"pass an address of this machine ({own}), or localhost for this machine only"
    )


async def start_worker_agent(
    settings: Settings, access: ClusterConfig, stack: AsyncExitStack, *, timeout_s: float
) -> None:
    """Starts an agent that joins the cluster of `access`, unless this machine already runs one.

    Raises AgentRunningError if that is an agent of another cluster.
    """
    state_dir = settings.paths.state_dir
    running = local_cluster.find_running_cluster(state_dir)
    if running is not None and local_cluster.AGENT in running.pids:
        local_cluster.check_agent_is_of_cluster(running, access, state_dir=state_dir)
        _log.info("this machine has already joined the cluster: %s", running)
        return
    await stack.enter_async_context(
        local_cluster.run_local_agent(settings, access, progress=_log_progress_message, timeout_s=timeout_s)
    )


def split_join_token(settings: Settings) -> tuple[Settings, str | None]:
    """For a worker: returns the settings to connect with, and the token to join with (None for the same one).

    A join token only admits a node, so the session needs another token.
    """
    token = settings.cluster.token
    if token is None or parse_token(token).kind is not TokenKind.JOIN:
        return settings, None
    config, state_dir = replace(settings.cluster, token=None), settings.paths.state_dir
    host, port = find_address(config, state_dir)
    if find_token(config, state_dir, host=host, port=port) is None:
        raise TokenMissingError(
            "a join token admits this machine's agent, but not this session",
            hint=f"run 'genie login {address_text(host, port)}' first, or 'genie join' for an agent alone",
        )
    return replace(settings, cluster=config), token


def _with_access_to_cluster(settings: Settings, cluster: LocalCluster) -> Settings:
    owner = local_cluster.make_owner_access(settings.paths.state_dir, cluster)
    config = replace(
        settings.cluster,
        discovery_method="address",
        master_addr=owner.master_addr,
        master_port=owner.master_port,
        token=settings.cluster.token or owner.token,
    )
    return replace(settings, cluster=config)


def _without_stored_login(settings: Settings, host: str, port: int) -> Settings:
    """Ignores the last login if no address was given: the agent must not join that cluster."""
    if settings.cluster.master_addr is not None or LocalCluster.read(settings.paths.state_dir) is not None:
        return settings
    config = replace(settings.cluster, discovery_method="address", master_addr=host, master_port=port)
    return replace(settings, cluster=config)


def _check_token_for_listener(settings: Settings, host: str, port: int) -> None:
    """Raises TokenMissingError if this user has no token for what listens on this address."""
    config, state_dir = settings.cluster, settings.paths.state_dir
    if find_address(config, state_dir) != (host, port):
        return
    if find_token(config, state_dir, host=host, port=port) is None:
        where = address_text(host, port)
        raise TokenMissingError(
            f"no token for {where}: the port is in use by another program or another user's cluster",
            hint=f"choose another master_port; or, to join that cluster, {login_hint(host, port)}",
        )


async def _is_listening(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_LISTENER_PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # includes TimeoutError
        return False
    writer.close()
    return True


def _log_progress_message(message: str) -> None:
    _log.info("cluster processes of this machine: %s", message)
