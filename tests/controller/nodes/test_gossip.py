"""Gossip on a server: who gets the keys, the list of members, suspicion of nodes, and changes of the key."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from genie.controller.backups.restore import adopt_store
from genie.controller.election import LEADER_KEY
from genie.controller.ledger import read_cluster_record
from genie.controller.nodes import gossip_keys
from genie.controller.nodes.gossip_keys import KEY_CHANGE_STEP_S
from genie.controller.rows import ClusterRecord
from genie.errors import AddressInUseError, GossipError, PermissionError_
from genie.model.member import MemberRole, MemberState
from genie.model.messages import (
    CreateToken,
    GetGossipSettings,
    ListMembers,
    ListTokens,
    RemoveNode,
    RevokeToken,
)
from genie.model.node import NodeStatus
from genie.model.tenant import TokenKind
from genie.processes.clock import SystemClock
from genie.runtime.credentials import connect_authenticated
from genie.runtime.gossip.protocol import Gossip, GossipIdentity, GossipSupport
from genie.sim.gossip import GossipMedium, SimGossip
from tests.controller.running_controller import CALL_S, RunningController, running_controller
from tests.fakes.clock import FakeClock
from tests.waiting import until


def make_support(medium: GossipMedium) -> GossipSupport:
    return GossipSupport(
        lambda identity, _port: SimGossip(medium, identity, host="127.0.0.1", port=0, clock=SystemClock()), ""
    )


async def until_gossip_runs(one: RunningController) -> None:
    async def is_running() -> bool:
        async with one.client() as owner:
            return bool((await owner.ask(ListMembers())).members)

    await until(is_running, what="gossip runs")


async def test_only_nodes_get_the_keys(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on", gossip=make_support(GossipMedium())) as one:
        await until_gossip_runs(one)
        async with one.agent("n1") as agent:
            settings = await agent.peer.call(GetGossipSettings(), timeout_s=CALL_S)
            assert settings.is_enabled and len(settings.seeds) == 1
            assert [len(base64.b64decode(key)) for key in settings.keys] == [32]
            assert not any(key in repr(settings) for key in settings.keys), "logs contain no key"
        for kind in (TokenKind.OWNER, TokenKind.USER):
            token = await one.token(kind, tenant="" if kind is TokenKind.OWNER else "t")
            async with one.client(token) as client:
                with pytest.raises(PermissionError_):
                    await client.ask(GetGossipSettings())
                assert len((await client.ask(ListMembers())).members) == 1


async def test_members_are_listed_with_their_observer(tmp_path: Path) -> None:
    medium = GossipMedium(suspect_after_s=0.01, dead_after_s=0.02)
    async with running_controller(tmp_path, gossip=make_support(medium)) as one, one.agent("n1"):
        await until_gossip_runs(one)
        node = SimGossip(
            medium,
            GossipIdentity(name="n1", role=MemberRole.NODE, release="1.0"),
            host="127.0.0.1",
            port=0,
            clock=SystemClock(),
        )
        await node.start([])
        async with one.client() as owner:
            reply = await owner.ask(ListMembers())
            await node.join([member.address for member in reply.members])
            reply = await owner.ask(ListMembers())
            assert (reply.observer, reply.off_reason) == ("one", "")
            assert [(member.role, member.state) for member in reply.members] == [
                (MemberRole.SERVER, MemberState.ALIVE),
                (MemberRole.NODE, MemberState.ALIVE),
            ]
            assert reply.members[0].controller_address == f"127.0.0.1:{one.port}"
            await node.stop(leave=False)

            async def is_suspect() -> bool:
                return (await owner.node("n1")).status is NodeStatus.SUSPECT

            await until(is_suspect, what="the node, which sends no more heartbeats, is suspect")
            assert "gossip reports that it is dead" in (await owner.node("n1")).status_reason


async def test_server_with_gossip_disabled_says_why(tmp_path: Path) -> None:
    support = GossipSupport(off_reason="it is disabled", is_disabled=True)
    async with running_controller(tmp_path, tls="on", gossip=support) as one:
        async with one.client() as owner:
            assert (await owner.ask(ListMembers())).off_reason == "it is disabled"
        access = await one.join("n1")
        async with connect_authenticated(one.network, access, timeout_s=CALL_S, program="test") as (peer, _):
            settings = await peer.call(GetGossipSettings(), timeout_s=CALL_S)
            assert (settings.is_enabled, settings.keys, settings.seeds) == (False, (), ())


class FailingGossip(SimGossip):
    async def start(self, keys: Sequence[bytes]) -> None:
        raise AddressInUseError("the port is in use")


def make_failing_gossip(identity: GossipIdentity, _port: int) -> Gossip:
    return FailingGossip(GossipMedium(), identity, host="127.0.0.1", port=0, clock=SystemClock())


@pytest.mark.parametrize(
    ("support", "reason"),
    [
        (GossipSupport(off_reason="kinship is missing"), "kinship is missing"),
        (GossipSupport(make_failing_gossip, ""), "the port is in use|not started yet"),
    ],
)
async def test_server_that_cannot_take_part_does_not_say_that_gossip_is_disabled(
    tmp_path: Path, support: GossipSupport, reason: str
) -> None:
    async with running_controller(tmp_path, gossip=support) as one, one.agent("n1") as agent:
        with pytest.raises(GossipError, match=f"server one takes no part in gossip: .*({reason})"):
            await agent.peer.call(GetGossipSettings(), timeout_s=CALL_S)


async def test_leader_resigns_before_it_leaves_gossip(tmp_path: Path) -> None:
    """Leaving takes a moment, and another controller must not wait for it."""
    leader_keys_at_stop: list[object] = []

    class RecordingGossip(SimGossip):
        async def stop(self, *, leave: bool) -> None:
            leader_keys_at_stop.append(await one.store.get(LEADER_KEY))
            await super().stop(leave=leave)

    medium, clock = GossipMedium(), SystemClock()
    support = GossipSupport(
        lambda identity, _port: RecordingGossip(medium, identity, host="127.0.0.1", port=0, clock=clock), ""
    )
    async with running_controller(tmp_path, gossip=support) as one:
        await until_gossip_runs(one)
        assert await one.store.get(LEADER_KEY) is not None
        await one.stop()
        assert leader_keys_at_stop == [None]
        await one.start()


async def test_removing_a_node_changes_the_key(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on", gossip=make_support(GossipMedium())) as one:
        await until_gossip_runs(one)
        await one.join("n1")  # it never registers, so that it can be removed at once
        async with one.agent("n2") as agent:
            before = (await agent.peer.call(GetGossipSettings(), timeout_s=CALL_S)).keys
            async with one.client() as owner:
                await owner.ask(RemoveNode(node_id="n1"))

            async def find_new_keys() -> tuple[str, ...] | None:
                keys = (await agent.peer.call(GetGossipSettings(), timeout_s=CALL_S)).keys
                return keys if keys != before else None

            keys = await until(find_new_keys, what="a second key")
            assert keys is not None and len(keys) == 2 and keys[0] == before[0], "the old key is still used"


async def test_revoking_the_token_of_a_node_and_removing_it_change_the_key(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:

        async def read_record() -> ClusterRecord:
            record = await read_cluster_record(one.store)
            assert record is not None
            return record

        async def has_changed_key() -> bool:
            await clock.advance(0.5)
            return (await read_record()).gossip_key_number == 1

        async with one.agent("n1"):
            pass
        tokens = (await owner.ask(ListTokens())).tokens
        token_id = next(each.token_id for each in tokens if each.kind is TokenKind.NODE)
        await owner.ask(RevokeToken(token_id=token_id))
        await until(has_changed_key, what="the change after the token was revoked")
        assert not (await read_record()).is_gossip_key_change_due
        await clock.advance(14.0)
        await owner.ask(RemoveNode(node_id="n1"))
        assert (await read_record()).is_gossip_key_change_due, "the node has no token left to revoke"


async def test_revoking_a_token_of_a_client_keeps_the_key(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        created = await owner.ask(CreateToken(kind=TokenKind.USER, tenant="t"))
        await owner.ask(RevokeToken(token_id=created.record.token_id))
        record = await read_cluster_record(one.store)
        assert record is not None and not record.is_gossip_key_change_due and record.gossip_key_number == 0


def test_key_changes_in_three_steps() -> None:
    record = ClusterRecord(cluster_id="c", ca_pin="p")
    assert gossip_keys.current_key_numbers(record, now=1000.0) == (0,)
    due = msgspec.structs.replace(record, is_gossip_key_change_due=True)
    assert not gossip_keys.can_change_key(record, now=1000.0) and gossip_keys.can_change_key(due, now=1000.0)
    changed = gossip_keys.with_next_key(due, now=1000.0)
    steps = [(0.0, (0, 1)), (KEY_CHANGE_STEP_S, (1, 0)), (2 * KEY_CHANGE_STEP_S, (1,)), (-5.0, (1,))]
    for elapsed_s, numbers in steps:
        assert gossip_keys.current_key_numbers(changed, now=1000.0 + elapsed_s) == numbers
    again = msgspec.structs.replace(changed, is_gossip_key_change_due=True)
    assert not gossip_keys.can_change_key(again, now=1000.0 + 1.9 * KEY_CHANGE_STEP_S), "one at a time"
    assert gossip_keys.can_change_key(again, now=1000.0 + 2 * KEY_CHANGE_STEP_S)


def test_keys_differ_by_generation_and_number() -> None:
    purposes = {
        gossip_keys.gossip_key_purpose(generation=generation, number=number)
        for generation in (0, 1, 11)
        for number in (0, 1, 11)
    }
    assert len(purposes) == 9


async def test_a_restore_does_not_repeat_a_key(tmp_path: Path) -> None:
    """It sets the number of the key back; a node that was removed since knows the key of that number."""
    async with running_controller(tmp_path, tls="on", gossip=make_support(GossipMedium())) as one:
        await until_gossip_runs(one)
        async with one.agent("n1") as agent:
            keys = (await agent.peer.call(GetGossipSettings(), timeout_s=CALL_S)).keys
        await one.stop()
        await adopt_store(one.store, store_name="test", now_s=SystemClock().wall_s())
        await one.start()
        await until_gossip_runs(one)
        async with one.agent("n2") as agent:
            after = (await agent.peer.call(GetGossipSettings(), timeout_s=CALL_S)).keys
        assert len(after) == 1 and set(after).isdisjoint(keys)
