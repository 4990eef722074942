"""One member of gossip in a process of its own, for bench_gossip.py: joins SEED, and runs until it is killed.

python benchmarks/gossip_member.py NAME SEED KEY, with KEY in hexadecimal
"""

from __future__ import annotations

import asyncio
import sys

from genie.model.member import MemberRole
from genie.processes.clock import SystemClock
from genie.runtime.gossip.kinship_gossip import KinshipGossip
from genie.runtime.gossip.protocol import GossipIdentity

JOIN_RETRY_S = 0.2


async def run_member(name: str, seed: str, key: bytes) -> None:
    identity = GossipIdentity(name=name, role=MemberRole.NODE, release="1.0")
    clock = SystemClock()
    gossip = KinshipGossip(identity, host="127.0.0.1", port=0, clock=clock)
    await gossip.start([key])
    while await gossip.join([seed]) == 0:
        await clock.sleep(JOIN_RETRY_S)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run_member(sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])))
