"""A server: hosts a cluster on this machine, offers its accelerators, and prints what happens to them.

    python examples/gpu_server.py                      until Ctrl-C, on port 5555 or GENIE_MASTER_PORT
    python examples/gpu_server.py --seconds 10

Others on this machine then connect with examples/basic_client.py. `genie up` does the same for a longer
time, and for other machines.
"""

from __future__ import annotations

import argparse
import asyncio

import genie
from genie.cluster.events import ClusterEvent
from genie.cluster.monitoring import create_resource_monitor


def print_event(event: ClusterEvent) -> None:
    print(f"{event.type}: {event.reason}", flush=True)


async def main(seconds: float | None) -> None:
    state = await genie.init(master_addr="localhost", node_role="server")
    state.events.subscribe(None, print_event)
    monitor = create_resource_monitor(local_node=genie.get_cluster_state().local_node, interval_s=2.0)
    try:
        await monitor.start()
        node = monitor.local_node
        print(f"node {node.node_id} offers {', '.join(gpu.name for gpu in node.gpus)}", flush=True)
        print(f"clients connect to port {state.config.master_port}; Ctrl-C ends it", flush=True)
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_future()
    except TimeoutError:
        print(f"{seconds:g} s are over")
    finally:
        await monitor.stop()
        await genie.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=None, help="end after this time")
    try:
        asyncio.run(main(parser.parse_args().seconds))
    except KeyboardInterrupt:
        print("stopped")
