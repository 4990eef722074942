"""Opens a connection to the controller of the settings; its errors mention the clusters of this machine.

While the supervisor of this state directory restarts the controller, nothing listens on its port: commands
wait for it instead of failing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from genie.config import Settings
from genie.errors import GenieError, NothingListensError
from genie.model.names import is_loopback
from genie.runtime.controller_connection import ControllerConnection, open_controller_connection
from genie.runtime.credentials import LocalCluster, find_access, find_address
from genie.runtime.network import Network
from genie.supervisor.process_records import SUPERVISOR, read_record
from genie.supervisor.this_machine import add_local_cluster_hint

RESTART_WAIT_S_MAX = 10.0
_RETRY_INTERVAL_S = 0.2


@asynccontextmanager
async def open_connection(
    settings: Settings, *, network: Network, timeout_s: float, program: str
) -> AsyncIterator[ControllerConnection]:
    """Finds address, token and CA, and keeps a connection open for the block."""
    loop, state_dir = asyncio.get_running_loop(), settings.paths.state_dir
    deadline_s = loop.time() + RESTART_WAIT_S_MAX

    async def connect(stack: AsyncExitStack) -> ControllerConnection:
        while True:
            host, port = find_address(settings.cluster, state_dir)
            try:
                async with add_local_cluster_hint(host, port, state_dir=state_dir):
                    access = await find_access(
                        settings.cluster, state_dir=state_dir, network=network, timeout_s=timeout_s
                    )
                    return await stack.enter_async_context(
                        open_controller_connection(
                            access, network=network, program=program, timeout_s=timeout_s
                        )
                    )
            except NothingListensError:
                if loop.time() >= deadline_s or not _is_supervised_controller(host, port, state_dir):
                    raise
            await asyncio.sleep(_RETRY_INTERVAL_S)

    async with AsyncExitStack() as stack:
        yield await connect(stack)


def _is_supervised_controller(host: str, port: int, state_dir: Path) -> bool:
    """Whether this is the address of the controller that a supervisor of this state directory restarts."""
    if not is_loopback(host) or read_record(state_dir, SUPERVISOR) is None:
        return False
    try:
        local = LocalCluster.read(state_dir)
    except GenieError:
        return False
    return local is not None and local.port == port
