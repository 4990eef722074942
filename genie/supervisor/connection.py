"""Opens a connection to the cluster of the settings; its errors mention the clusters of this machine.

Stores the addresses of all controllers, so that the next command finds another one if the first is down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from genie.config import Settings
from genie.errors import StoreFullError
from genie.runtime.controller_connection import ControllerConnection, open_controller_connection
from genie.runtime.credentials import find_access, find_address
from genie.runtime.known_servers import store_known_servers
from genie.runtime.network import Network
from genie.supervisor.this_machine import add_local_cluster_hint

_log = logging.getLogger(__name__)


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
    state_dir = settings.paths.state_dir
    host, port = find_address(settings.cluster, state_dir)
    async with AsyncExitStack() as stack:
        async with add_local_cluster_hint(host, port, state_dir=state_dir):
            access = await find_access(
                settings.cluster,
                state_dir=state_dir,
                network=network,
                timeout_s=timeout_s,
                is_address_fixed=is_address_fixed or _is_address_argument(settings),
            )
            connection = await stack.enter_async_context(
                open_controller_connection(access, network=network, program=program, timeout_s=timeout_s)
            )
        await remember_servers(connection, state_dir)
        yield connection


async def remember_servers(connection: ControllerConnection, state_dir: Path) -> None:
    """Stores the controllers that the cluster announced. A failure affects only later commands."""
    pin, servers = connection.access.token.pin, connection.announced_servers
    try:
        await asyncio.to_thread(store_known_servers, state_dir, pin, servers)
    except StoreFullError as error:
        _log.info("could not store the addresses of the controllers: %s", error)


def _is_address_argument(settings: Settings) -> bool:
    """Whether the address was passed by the caller, not by the environment or the settings file."""
    source = settings.sources["cluster.master_addr"]
    return settings.cluster.master_addr is not None and not source.startswith(("environment ", "file "))
