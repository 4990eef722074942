"""Opens a connection to the controller of the settings; its errors mention the clusters of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from genie.config import Settings
from genie.runtime.controller_connection import ControllerConnection, open_controller_connection
from genie.runtime.credentials import find_access, find_address
from genie.runtime.network import Network
from genie.supervisor.this_machine import add_local_cluster_hint


@asynccontextmanager
async def open_connection(
    settings: Settings, *, network: Network, timeout_s: float, program: str
) -> AsyncIterator[ControllerConnection]:
    """Finds address, token and CA, and keeps a connection open for the block."""
    state_dir = settings.paths.state_dir
    host, port = find_address(settings.cluster, state_dir)
    async with AsyncExitStack() as stack:
        async with add_local_cluster_hint(host, port, state_dir=state_dir):
            access = await find_access(
                settings.cluster, state_dir=state_dir, network=network, timeout_s=timeout_s
            )
            connection = await stack.enter_async_context(
                open_controller_connection(access, network=network, program=program, timeout_s=timeout_s)
            )
        yield connection
