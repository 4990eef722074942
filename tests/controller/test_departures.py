"""How nodes go: in good order, or by the owner's word when they no longer answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.errors import GenieError, NodeError, NodeNotFoundError, TokenRefusedError, UsageError
from genie.model.job import JobState
from genie.model.messages import GetStatus, Join, ListNodes, RemoveNode
from genie.model.tenant import TokenKind
from genie.runtime import rpc
from tests.controller.standing import CALL_S, Client, standing
from tests.fakes.agent import FakeAgent, node_info
from tests.fakes.clock import FakeClock


async def _node_ids(owner: Client) -> list[str]:
    return [view.info.node_id for view in (await owner.ask(ListNodes())).nodes]


async def test_a_node_that_leaves_in_good_order_is_no_longer_listed_or_counted(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        await agent.leave()
        assert await _node_ids(owner) == []
        assert (await owner.ask(GetStatus())).gpus_total == 0


async def test_a_node_that_left_may_come_back_with_the_same_name(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        access = await one.join("n1")
        async with FakeAgent(node_info("n1")).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
            await agent.leave()
        async with agent.restarted().connected(one.network, access) as again:
            await again.register()
            await again.beat()
            assert await _node_ids(owner) == ["n1"]


async def test_a_node_that_holds_a_job_may_not_leave(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        job = await owner.submit("work", gpus=1)
        await agent.start_next()
        with pytest.raises(NodeError, match="still holds 1"):
            await agent.leave()
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_a_connected_node_is_not_removed(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("n1"):
        with pytest.raises(NodeError, match="is connected"):
            await owner.ask(RemoveNode(node_id="n1"))
        assert await _node_ids(owner) == ["n1"]


async def test_a_silent_node_is_removed_and_its_token_opens_nothing_any_more(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as owner:
        access = await one.join("n1")
        async with FakeAgent(node_info("n1")).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
        with pytest.raises(NodeError, match="until a moment ago"):
            await owner.ask(RemoveNode(node_id="n1"))
        await clock.advance(14.0)
        await owner.ask(RemoveNode(node_id="n1"))
        assert await _node_ids(owner) == []
        with pytest.raises(TokenRefusedError, match="revoked"):
            async with agent.restarted().connected(one.network, access):
                pass
        with pytest.raises(NodeNotFoundError, match="no node"):
            await owner.ask(RemoveNode(node_id="nobody"))


async def test_only_an_owner_removes_nodes(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        token = await one.token(TokenKind.USER, tenant="team")
        async with one.client(token) as user:
            with pytest.raises(GenieError, match="user token may not"):
                await user.ask(RemoveNode(node_id="n1"))


async def test_a_node_id_that_was_asked_for_by_name_is_that_or_an_error(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        await one.join("box")
        token = await one.token(TokenKind.JOIN)
        wish = Join(token=token, node_id_wish="box", csr_pem="", exact=True)
        async with rpc.dial(one.network, "127.0.0.1", one.port, tls=None, timeout_s=CALL_S) as peer:
            with pytest.raises(UsageError, match="'box' is taken"):
                await peer.call(wish, timeout_s=CALL_S)
            # The refusal did not use the token up.
            free = Join(token=token, node_id_wish="other", csr_pem="", exact=True)
            assert (await peer.call(free, timeout_s=CALL_S)).node_id == "other"
