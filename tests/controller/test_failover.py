"""Failover: two controllers on a real etcd; the standby takes over when the leader fails."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from genie.controller.requests.service import STORE_RETRY_AFTER_S
from genie.controller.store.etcd import EtcdStore
from genie.errors import GenieError, NotLeaderError, StoreUnavailableError
from genie.model.job import JobState
from genie.model.tenant import TokenKind
from genie.sim.store import MemoryStore
from genie.tenancy.access import parse_token
from tests.controller.running_controller import running_controller
from tests.controller.store.etcd_server import EtcdServer
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def test_standby_takes_over_the_jobs_of_the_leader(etcd: EtcdServer, tmp_path: Path) -> None:
    one_store, two_store = await EtcdStore.open(etcd.url), await EtcdStore.open(etcd.url)
    async with (
        running_controller(tmp_path / "1", store=one_store, leader_ttl_s=4.0, name="one") as one,
        running_controller(tmp_path / "2", store=two_store, leader_ttl_s=4.0, name="two") as two,
    ):
        assert one.controller is not None
        assert two.controller is not None
        token = (one.state_dir / "owner.token").read_text()
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with one.client() as owner, agent.connected(one.network, access):
            before = await agent.register()
            assert set(before.controllers) == {one.controller.address, two.controller.address}
            await agent.beat()
            job = await owner.submit(gpus=1)
            launch = await agent.start_next()
            waiting = await owner.submit(gpus=1)
            await one_store.close()  # it can neither renew nor resign
            await until(lambda: two.controller is not None and two.controller.is_leading, timeout_s=30)
            assert not one.controller.is_leading
            assert not (await agent.beat()).leading
            with pytest.raises(GenieError):
                await owner.submit()
        elsewhere = await two.access(str(access.token))
        async with two.client(token) as owner, agent.connected(two.network, elsewhere):
            after = await agent.register()
            assert after.leader_token > before.leader_token
            assert (await agent.beat()).jobs_to_kill == ()
            assert (await owner.job(job.job_id)).state is JobState.RUNNING
            agent.end(launch)
            await agent.beat()
            assert (await agent.start_next()).job_id == waiting.job_id
            assert await owner.held("n1") == [waiting.job_id]


async def test_clients_get_a_retry_time_and_no_address_while_the_store_is_unavailable(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    store = await EtcdStore.open(etcd.url)
    async with (
        running_controller(tmp_path / "1", store=store, leader_ttl_s=2.0) as one,
        one.client() as owner,
        one.client(token := await one.token(TokenKind.USER, tenant="red")) as user,
    ):
        etcd.kill()
        errors = [await _error_of(user.submit(gpus=1))]
        await until(lambda: one.controller is not None and not one.controller.is_leading, timeout_s=30)
        errors.append(await _error_of(user.submit(gpus=1)))
        assert [type(error) for error in errors] == [StoreUnavailableError] * 2
        with pytest.raises(NotLeaderError, match="its store is unavailable") as login:
            async with one.client(_with_other_id(token)):  # the tokens in memory are still accepted
                pass
        for error in (*errors, login.value):
            assert error.retry_after_s == STORE_RETRY_AFTER_S
            assert "store is unavailable" in error.message and "try again" in error.hint
            assert "127.0.0.1" not in str(error) and "etcd" not in str(error)
        assert etcd.endpoint in (await _error_of(owner.submit(gpus=1))).hint
        assert etcd.endpoint in (await owner.status()).store_reason
        assert (await user.status()).store_reason == ""


def _with_other_id(token: str) -> str:
    known = parse_token(token)
    return str(replace(known, token_id=known.token_id[::-1]))


async def _error_of(call: Coroutine[object, object, object]) -> GenieError:
    with pytest.raises(GenieError) as caught:
        await call
    return caught.value


async def test_agents_learn_about_a_new_controller(tmp_path: Path) -> None:
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    async with running_controller(tmp_path / "1", store=memory.connect(), clock=clock, name="one") as one:
        access = await one.join("n1")
        async with FakeAgent(make_node_info("n1")).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
            assert agent.peer is not None
            known = agent.peer
            async with running_controller(
                tmp_path / "2", store=memory.connect(), clock=clock, name="two"
            ) as two:

                async def is_closed() -> bool:
                    await clock.advance(0.5)
                    return known.is_closed

                await until(is_closed, what="the leader closes the connection of the agent")
                async with agent.connected(one.network, access):
                    registered = await agent.register()
                assert two.controller is not None
                assert two.controller.address in registered.controllers
    await memory.close()
