"""A client: connects to a cluster, multiplies two matrices there, and compares with the same done here.

python examples/basic_client.py                    the cluster on this machine, or GENIE_MASTER_ADDR
python examples/basic_client.py gpu-box            a cluster elsewhere; its token is in GENIE_TOKEN
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
            print(f"node {node.node_id} is {node.status} and has {node.gpu_count}: {names}")
        print(f"backend {state.backend}: {state.selection.reason if state.selection else ''}")

        torch.manual_seed(0)
        here = torch.randn(1000, 1000)
        there = here.to("remote_accelerator:0")
        product = (there @ there).cpu()
        difference = (product - here @ here).abs().max().item()
        print(f"{tuple(product.shape)} on {there.device}, at most {difference:.2g} from the product here")
    finally:
        await genie.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", help="the controller")
    try:
        asyncio.run(main(parser.parse_args().address))
    except GenieError as error:
        sys.exit(f"basic_client: {error}")
