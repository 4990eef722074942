"""A server: runs a cluster on this machine with its accelerators and prints the cluster events.

    python examples/gpu_server.py                      until Ctrl-C, on port 5555 or GENIE_MASTER_PORT
    python examples/gpu_server.py --seconds 10
    python examples/gpu_server.py --address 10.0.0.5    reachable from other machines

Clients connect with examples/basic_client.py, from another machine after `genie login`. `genie up` does the
same in the background.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import genie
from genie.cluster.events import ClusterEvent
from genie.cluster.monitoring import create_resource_monitor
from genie.errors import GenieError


def print_event(event: ClusterEvent) -> None:
    print(f"{event.type}: {event.reason}", flush=True)


async def main(address: str, seconds: float | None) -> None:
    state = await genie.init(master_addr=address, node_role="server")
    state.events.subscribe(None, print_event)
    monitor = create_resource_monitor(local_node=genie.get_cluster_state().local_node, interval_s=2.0)
    try:
        await monitor.start()
        node = monitor.local_node
        print(f"node {node.node_id} has accelerators: {', '.join(gpu.name for gpu in node.gpus)}", flush=True)
        where = f"{state.config.master_addr}, port {state.config.master_port}"
        print(f"clients connect to {where}; press Ctrl-C to stop", flush=True)
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_future()
    except TimeoutError:
        print(f"stopping after {seconds:g} s")
    finally:
        await monitor.stop()
        await genie.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--address", default="localhost", help="address or host name of this machine (default: localhost)"
    )
    parser.add_argument(
        "--seconds", type=float, default=None, help="stop after this time (default: run until Ctrl-C)"
    )
    given = parser.parse_args()
    try:
        asyncio.run(main(given.address, given.seconds))
    except KeyboardInterrupt:
        print("stopped")
    except GenieError as error:
        sys.exit(f"gpu_server: {error}")
