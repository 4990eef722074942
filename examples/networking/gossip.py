"""Gossip between members on this machine: a crash, a member that leaves, and a stranger with another key.

    python examples/networking/gossip.py

Servers and nodes of a cluster take part in the same way; `genie members` lists them, also without a leader.
Requires `pip install 'genie-gpu[gossip]'`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable

from genie.model.member import MemberRole, MemberState
from genie.processes.clock import SystemClock
from genie.runtime.gossip.kinship_gossip import KinshipGossip, why_kinship_is_missing
from genie.runtime.gossip.protocol import Gossip, GossipIdentity

TIMEOUT_S = 30.0


def new_member(name: str, role: MemberRole = MemberRole.NODE) -> Gossip:
    identity = GossipIdentity(name=name, role=role, release="1.0")
    return KinshipGossip(identity, host="127.0.0.1", port=0, clock=SystemClock())


def states(gossip: Gossip) -> dict[str, str]:
    return {member.name: str(member.state) for member in gossip.members()}


async def wait_until(gossip: Gossip, condition: Callable[[], bool]) -> None:
    changed = asyncio.Event()
    gossip.add_listener(changed.set)
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await changed.wait()
            changed.clear()


async def main() -> None:
    key = os.urandom(32)
    server = new_member("server-1", MemberRole.SERVER)
    nodes = [new_member(f"gpu-{number}") for number in range(1, 4)]
    stranger = new_member("stranger")
    try:
        await server.start([key])
        for node in nodes:
            await node.start([key])
            await node.join([server.address])
        await wait_until(server, lambda: len(server.members()) == 4)
        print("server-1 lists", states(server))

        await stranger.start([os.urandom(32)])
        responded = await stranger.join([server.address])
        print("members that respond to a stranger with another key:", responded)

        await nodes[0].stop(leave=True)
        await wait_until(server, lambda: states(server)["gpu-1"] == MemberState.LEFT)
        print("gpu-1 was stopped:", states(server)["gpu-1"])

        start_s = time.monotonic()
        await nodes[1].stop(leave=False)
        for state in (MemberState.SUSPECT, MemberState.DEAD):
            await wait_until(server, lambda state=state: states(server)["gpu-2"] == state)
            print(f"gpu-2 crashed: {state} after {time.monotonic() - start_s:.1f} s")
        await wait_until(nodes[2], lambda: states(nodes[2])["gpu-2"] == MemberState.DEAD)
        print("gpu-3 lists", states(nodes[2]))
    finally:
        for member in (server, stranger, *nodes):
            await member.stop(leave=True)


if __name__ == "__main__":
    if reason := why_kinship_is_missing():
        sys.exit(f"gossip is not available: {reason}")
    asyncio.run(main())
