"""Opens a connection to the cluster of the settings; its errors mention the clusters of this machine.

Stores the addresses of all controllers, so that the next command finds another one if the first is down.
While the supervisor of this state directory restarts the controller, nothing listens on its port: commands
wait for it instead of failing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from genie.config import Settings
from genie.errors import (
    ConfigError,
    GenieError,
    NothingListensError,
    StoreFullError,
    TokenRefusedError,
    UnreachableError,
)
from genie.model.names import is_loopback
from genie.runtime.controller_connection import ControllerConnection, open_controller_connection
from genie.runtime.credentials import LocalCluster, find_access, find_address
from genie.runtime.known_servers import store_generation, store_known_servers
from genie.runtime.network import Network
from genie.supervisor.process_records import PROCESS_RECORDS_FOLDER, SUPERVISOR, read_process_record
from genie.supervisor.this_machine import add_local_cluster_hint

_log = logging.getLogger(__name__)

CONTROLLER_RESTART_WAIT_S_MAX = 10.0
_CONNECT_RETRY_INTERVAL_S = 0.2


@asynccontextmanager
async def open_connection(
    settings: Settings,
    *,
    network: Network,
    timeout_s: float,
    program: str,
    is_address_fixed: bool = False,
) -> AsyncIterator[ControllerConnection]:
    """Finds address, token and CA, and keeps a connection open for the block.

    With `is_address_fixed`, or if the address was passed as an argument, the first connection is to that
    address only. Otherwise to any controller that this machine knows.
    """
    loop, state_dir = asyncio.get_running_loop(), settings.paths.state_dir
    deadline_s = loop.time() + CONTROLLER_RESTART_WAIT_S_MAX

    async def connect(stack: AsyncExitStack) -> ControllerConnection:
        while True:
            host, port = _find_address(settings)
            try:
                async with add_local_cluster_hint(host, port, state_dir=state_dir):
                    access = await find_access(
                        settings.cluster,
                        state_dir=state_dir,
                        network=network,
                        timeout_s=timeout_s,
                        is_address_fixed=is_address_fixed or is_address_given_by_caller(settings),
                    )
                    return await stack.enter_async_context(
                        open_controller_connection(
                            access, network=network, program=program, timeout_s=timeout_s
                        )
                    )
            except TokenRefusedError as error:
                from genie.supervisor.local_server import find_removal  # late: as below

                if removal := find_removal(state_dir):
                    raise TokenRefusedError(
                        f"{removal.message}: {error.message}", hint=removal.hint
                    ) from error
                raise
            except NothingListensError:
                if loop.time() >= deadline_s or not _is_supervised_controller(host, port, state_dir):
                    raise
            await asyncio.sleep(_CONNECT_RETRY_INTERVAL_S)

    async with AsyncExitStack() as stack:
        connection = await connect(stack)
        await store_controller_addresses(connection, state_dir)
        yield connection


def _find_address(settings: Settings) -> tuple[str, int]:
    state_dir = settings.paths.state_dir
    try:
        return find_address(settings.cluster, state_dir)
    except ConfigError as error:
        if not (state_dir / PROCESS_RECORDS_FOLDER).exists():  # never a server
            raise
        from genie.supervisor.local_server import find_local_server_problem  # late: loads psutil

        if problem := find_local_server_problem(state_dir):
            raise UnreachableError(problem.message, hint=problem.hint) from error
        raise


def is_address_given_by_caller(settings: Settings) -> bool:
    """Whether the address was passed by the caller, not by the environment or the settings file."""
    source = settings.sources["cluster.master_addr"]
    return settings.cluster.master_addr is not None and not source.startswith(("environment ", "file "))


def _is_supervised_controller(host: str, port: int, state_dir: Path) -> bool:
    """Whether this is the address of the controller that a supervisor of this state directory restarts."""
    if read_process_record(state_dir, SUPERVISOR) is None:
        return False
    try:
        local = LocalCluster.read(state_dir)
    except GenieError:
        return False
    if local is None or local.port != port:
        return False
    return host == local.host or (is_loopback(host) and is_loopback(local.host))


async def store_controller_addresses(connection: ControllerConnection, state_dir: Path) -> None:
    """Stores the controllers that the cluster announced, and its generation. A failure affects only later
    commands."""
    access, servers = connection.access, connection.announced_servers
    try:
        await asyncio.to_thread(store_known_servers, state_dir, access.token.pin, servers)
        await asyncio.to_thread(store_generation, state_dir, access.token.pin, access.generation)
    except StoreFullError as error:
        _log.info("could not store the addresses of the controllers: %s", error)
