"""A client: connects to a cluster, multiplies two matrices there, and checks the result locally.

python examples/basic_client.py                    the cluster on this machine, or GENIE_MASTER_ADDR
python examples/basic_client.py gpu-box            a cluster on another machine, after `genie login gpu-box`
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import torch

import genie
from genie.errors import GenieError


async def main(address: str | None) -> None:
    state = await genie.init(**({"master_addr": address} if address else {}))
    try:
        for node in state.nodes.values():
            names = ", ".join(gpu.name for gpu in node.gpus)
            print(f"node {node.node_id}: {node.status}, accelerators: {node.gpu_count} ({names})")
        print(f"backend {state.backend}: {state.selection.reason if state.selection else ''}")

        torch.manual_seed(0)
        local = torch.randn(1000, 1000)
        remote = local.to("remote_accelerator:0")
        product = (remote @ remote).cpu()
        difference = (product - local @ local).abs().max().item()
        print(f"{tuple(product.shape)} on {remote.device}, difference to local result: {difference:.2g}")
    finally:
        await genie.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", help="address of the controller (default: GENIE_MASTER_ADDR)")
    try:
        asyncio.run(main(parser.parse_args().address))
    except GenieError as error:
        sys.exit(f"basic_client: {error}")
