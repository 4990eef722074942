"""The contract of Gossip, for the real implementation on loopback and for the simulated one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from genie.errors import AddressInUseError, ConfigError
from genie.model.member import Member, MemberRole, MemberState
from genie.model.names import parse_endpoint
from genie.processes.clock import SystemClock
from genie.runtime.gossip.kinship_gossip import KinshipGossip
from genie.runtime.gossip.protocol import Gossip, GossipIdentity
from genie.sim.gossip import GossipMedium, SimGossip
from tests.waiting import until

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


@dataclass
class GossipCluster:
    """Creates members, and stops those that still run at the end."""

    kind: str
    stack: AsyncExitStack
    medium: GossipMedium = field(
        default_factory=lambda: GossipMedium(suspect_after_s=0.02, dead_after_s=0.04)
    )

    def new_member(
        self,
        name: str,
        *,
        role: MemberRole = MemberRole.NODE,
        host: str = "127.0.0.1",
        port: int = 0,
        controller_address: str = "",
        machine_name: str = "",
    ) -> Gossip:
        identity = GossipIdentity(
            name=name,
            role=role,
            release="1.2.3",
            controller_address=controller_address,
            machine_name=machine_name,
        )
        member: Gossip
        if self.kind == "kinship":
            member = KinshipGossip(identity, host=host, port=port, clock=SystemClock())
        else:
            member = SimGossip(self.medium, identity, host=host, port=port, clock=SystemClock())
        self.stack.push_async_callback(member.stop, leave=False)
        return member

    async def start_joined(self, *names: str) -> list[Gossip]:
        members = [self.new_member(name) for name in names]
        for member in members:
            await member.start([KEY])
            await member.join([members[0].address])
        for member in members:
            await until_states(member, dict.fromkeys(names, MemberState.ALIVE))
        return members


@pytest.fixture(params=["kinship", "simulated"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[GossipCluster]:
    async with AsyncExitStack() as stack:
        yield GossipCluster(request.param, stack)


def states_by_name(gossip: Gossip) -> dict[str, MemberState]:
    return {member.name: member.state for member in gossip.members()}


async def until_states(gossip: Gossip, expected: dict[str, MemberState]) -> None:
    await until(lambda: states_by_name(gossip) == expected, what=f"{expected}, not {states_by_name(gossip)}")


def find_member(gossip: Gossip, name: str) -> Member:
    return next(member for member in gossip.members() if member.name == name)


async def test_joined_members_list_each_other_with_their_metadata(cluster: GossipCluster) -> None:
    server = cluster.new_member(
        "a0", role=MemberRole.SERVER, controller_address="127.0.0.1:5555", machine_name="m0"
    )
    node = cluster.new_member("a0")
    for member in (server, node):
        await member.start([KEY])
    assert await node.join([server.address]) == 1
    for member in (server, node):
        await until(lambda member=member: len(member.members()) == 2, what="two members")
        assert [(each.role, each.name) for each in member.members()] == [
            (MemberRole.SERVER, "a0"),
            (MemberRole.NODE, "a0"),
        ]
        found = member.members()[0]
        assert (found.address, found.release, found.controller_address, found.state) == (
            server.address,
            "1.2.3",
            "127.0.0.1:5555",
            MemberState.ALIVE,
        )
        assert found.machine_name == "m0"


async def test_member_that_leaves_has_left(cluster: GossipCluster) -> None:
    first, second = await cluster.start_joined("n1", "n2")
    await second.stop(leave=True)
    await until_states(first, {"n1": MemberState.ALIVE, "n2": MemberState.LEFT})


async def test_crashed_member_is_suspect_then_dead_and_alive_after_a_restart(cluster: GossipCluster) -> None:
    first, second, third = await cluster.start_joined("n1", "n2", "n3")
    seen: list[MemberState] = []
    first.add_listener(lambda: seen.append(find_member(first, "n3").state))
    since = find_member(first, "n3").since
    await third.stop(leave=False)
    await until_states(first, {"n1": MemberState.ALIVE, "n2": MemberState.ALIVE, "n3": MemberState.DEAD})
    assert list(dict.fromkeys(seen)) == [MemberState.SUSPECT, MemberState.DEAD]
    assert find_member(first, "n3").since > since
    again = cluster.new_member("n3", port=parse_endpoint(find_member(first, "n3").address)[1])
    await again.start([KEY])
    await again.join([second.address])
    await until_states(first, dict.fromkeys(("n1", "n2", "n3"), MemberState.ALIVE))


async def test_member_with_another_key_cannot_join(cluster: GossipCluster) -> None:
    (first,) = await cluster.start_joined("n1")
    stranger = cluster.new_member("n2")
    await stranger.start([OTHER_KEY])
    assert await stranger.join([first.address]) == 0
    assert states_by_name(first) == {"n1": MemberState.ALIVE}
    assert states_by_name(stranger) == {"n2": MemberState.ALIVE}


async def test_key_changes_in_steps_without_a_gap_and_locks_the_old_key_out(cluster: GossipCluster) -> None:
    first, second = await cluster.start_joined("n1", "n2")
    seen: set[MemberState] = set()
    first.add_listener(lambda: seen.add(find_member(first, "n2").state))
    for keys in ([KEY, OTHER_KEY], [OTHER_KEY, KEY], [OTHER_KEY]):
        for member in (first, second):
            await member.use_keys(keys)
    assert await second.join([first.address]) == 1
    assert seen <= {MemberState.ALIVE}
    outdated = cluster.new_member("n3")
    await outdated.start([KEY])
    assert await outdated.join([first.address]) == 0


async def test_address_for_other_machines_requires_a_key(cluster: GossipCluster) -> None:
    with pytest.raises(ConfigError, match="key"):
        await cluster.new_member("n1", host="0.0.0.0").start([])
    await cluster.new_member("n1").start([])


async def test_port_in_use_is_an_error(cluster: GossipCluster) -> None:
    (first,) = await cluster.start_joined("n1")
    with pytest.raises(AddressInUseError, match="in use"):
        await cluster.new_member("n2", port=parse_endpoint(first.address)[1]).start([KEY])


async def test_seed_that_does_not_respond_is_not_counted(cluster: GossipCluster) -> None:
    (first,) = await cluster.start_joined("n1")
    assert await first.join(["127.0.0.1:9"]) == 0
