"""A standby forwards requests to the leader, and answers reads from its copy while no leader responds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from genie.controller.ledger import CLUSTER_KEY
from genie.controller.nodes.releases import SERVER_RELEASE_KEY_PREFIX
from genie.controller.store import Delete, Put
from genie.errors import (
    GenieError,
    JobNotFoundError,
    NotLeaderError,
    PermissionError_,
    ProtocolError,
    ReplyLostError,
    TokenMissingError,
    TokenRefusedError,
)
from genie.model.job import JobState
from genie.model.messages import (
    AgedReply,
    CancelJob,
    CreateToken,
    ExplainJob,
    ForwardedRequest,
    GetJob,
    GetQueue,
    ListJobs,
    ListNodes,
    ListQuotas,
    ListTokens,
    Message,
    NodesReply,
    ReadLog,
    Request,
    RevokeToken,
    SessionHeartbeat,
    SetQuota,
)
from genie.model.messages.handshake import ServerHello
from genie.model.node import NodeStatus
from genie.model.tenant import QuotaRecord, TokenKind
from genie.runtime import rpc, wire
from genie.tenancy.access import parse_token
from genie.version import __version__
from tests.controller.running_controller import CALL_S, Client, RunningController
from tests.controller.standby.controllers_on_etcd import LeaderAndStandby, run_leader_and_standby
from tests.fakes.agent import make_node_info
from tests.waiting import until


async def test_reads_of_a_standby_are_those_of_its_leader(tmp_path: Path) -> None:
    async with (
        run_leader_and_standby(tmp_path) as cluster,
        cluster.leader.agent("n1"),
        cluster.leader.client() as of_leader,
        cluster.standby.client() as client,
    ):
        job = await of_leader.submit(gpus=1)
        for request in (
            ListNodes(),
            ListJobs(),
            GetQueue(),
            ListQuotas(),
            ListTokens(),
            ExplainJob(job_id=job.job_id),
        ):
            reply = await ask_for_aged_reply(client, request)
            assert reply.age_s == 0.0
            if not isinstance(reply, NodesReply):  # with the time of the last heartbeat
                assert reply == await ask_for_aged_reply(of_leader, request)
        assert (await client.node("n1")).status is NodeStatus.HEALTHY
        status = await client.status()
        assert (status.leading, status.leader, status.nodes) == (
            False,
            cluster.leader_address,
            {"healthy": 1},
        )
        assert (status.age_s, status.has_cluster_data, status.gpus_total) == (0.0, True, 1)


async def test_writes_to_a_standby_are_carried_out_by_its_leader(tmp_path: Path) -> None:
    async with (
        run_leader_and_standby(tmp_path) as cluster,
        cluster.leader.agent("n1") as agent,
        cluster.standby.client() as client,
    ):
        job = await client.submit(gpus=1, request_id="once")
        assert (await client.submit(gpus=1, request_id="once")).job_id == job.job_id
        assert (await agent.start_next()).job_id == job.job_id
        assert (await client.job(job.job_id)).state is JobState.RUNNING
        after = (await client.ask(CancelJob(job_id=job.job_id))).job
        token_id = parse_token((cluster.leader.state_dir / "owner.token").read_text()).token_id
        assert token_id in after.history[-1].reason or token_id in after.reason
        await client.ask(SetQuota(quota=QuotaRecord(tenant="red", gpus=2.0)))
        async with cluster.leader.client() as of_leader:
            assert [
                view.quota.tenant for view in (await of_leader.ask(ListQuotas())).quotas if view.quota.gpus
            ]


async def test_rules_of_access_are_those_of_the_leader(tmp_path: Path) -> None:
    async with run_leader_and_standby(tmp_path) as cluster:
        red, blue = await user_token(cluster, "red"), await user_token(cluster, "blue")
        async with cluster.standby.client(red) as user, cluster.standby.client(blue) as other:
            job = await user.submit()
            assert job.tenant == "red"
            with pytest.raises(JobNotFoundError):
                await other.job(job.job_id)
            with pytest.raises(JobNotFoundError):
                await other.ask(CancelJob(job_id=job.job_id))
            with pytest.raises(PermissionError_):
                await user.ask(ListTokens())
            await cluster.lose_leader()
            assert (await user.job(job.job_id)).tenant == "red"
            assert (await other.ask(ListJobs())).jobs == ()
            with pytest.raises(JobNotFoundError):
                await other.job(job.job_id)
            with pytest.raises(PermissionError_):
                await user.ask(ListTokens())


async def test_sessions_are_not_forwarded(tmp_path: Path) -> None:
    async with run_leader_and_standby(tmp_path) as cluster, cluster.standby.client() as client:
        with pytest.raises(NotLeaderError, match=cluster.leader_address):
            await client.ask(SessionHeartbeat(node=make_node_info("client")))


async def test_standby_answers_reads_from_its_copy_without_a_leader(tmp_path: Path) -> None:
    async with (
        run_leader_and_standby(tmp_path) as cluster,
        cluster.leader.agent("n1") as agent,
        cluster.standby.client() as client,
    ):
        job = await client.submit(gpus=1)
        await agent.start_next()
        await cluster.lose_leader()
        reply = await client.ask(ListJobs())
        assert [(each.job_id, each.state) for each in reply.jobs] == [(job.job_id, JobState.RUNNING)]
        assert 0 < reply.age_s < 10
        (view,) = (await client.ask(ListNodes())).nodes
        assert view.info.status is NodeStatus.SUSPECT and "no leader" in view.info.status_reason
        assert (view.info.last_heartbeat, view.info.gpus[0].utilization_pct) == (0.0, None)
        assert [hold.job_id for hold in view.node_holds.holds] == [job.job_id]
        status = await client.status()
        assert (status.leading, status.has_cluster_data, status.jobs) == (False, True, {"running": 1})
        assert (status.gpus_total, status.gpus_free, status.nodes) == (1, 0, {"suspect": 1})
        assert (await client.ask(ListTokens())).age_s > 0
        with pytest.raises(NotLeaderError, match=cluster.leader_address):
            await client.submit()
        with pytest.raises(NotLeaderError):
            await client.ask(ReadLog(job_id=job.job_id))


async def test_age_grows_while_neither_leader_nor_store_respond(tmp_path: Path) -> None:
    async with run_leader_and_standby(tmp_path) as cluster:
        new_on_standby = await user_token(cluster, "red")
        async with cluster.standby.client() as client:
            job = await client.submit()
            await cluster.lose_leader()
            cluster.etcd.suspend()
            before = (await client.ask(ListJobs())).age_s

            async def has_grown() -> bool:
                return (await client.ask(ListJobs())).age_s > before + 1.5

            await until(has_grown)
            assert (await client.job(job.job_id)).state is JobState.QUEUED
            status = await client.status()
            assert status.age_s > before + 1.5

            async def alarms() -> list[str]:
                return [each for each in (await client.status()).alarms if "no leader" in each]

            await until(alarms)
            assert await alarms() == ["no leader: the store does not respond"]
            assert "a write may have been applied" not in (await client.status()).store_reason
            async with cluster.standby.client(new_on_standby) as user:  # its token is only in the copy
                assert (await user.ask(ListJobs())).jobs == ()
            cluster.etcd.resume()

            async def is_current() -> bool:
                return (await client.ask(ListJobs())).age_s < 1.5

            await until(is_current)


async def test_waiting_read_of_the_copy_ends_with_the_change(tmp_path: Path) -> None:
    """A copy that answered at once would make clients that wait for a job poll without a pause."""
    async with run_leader_and_standby(tmp_path) as cluster, cluster.standby.client() as client:
        job = await client.submit()
        await cluster.lose_leader()
        request = GetJob(job_id=job.job_id, while_state=JobState.QUEUED, wait_s=1.0)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert (await client.ask(request)).job.state is JobState.QUEUED
        assert loop.time() - began_s >= 0.9


async def test_revoked_token_is_rejected_by_a_standby(tmp_path: Path) -> None:
    async with run_leader_and_standby(tmp_path) as cluster:
        token = await user_token(cluster, "red")
        async with cluster.standby.client(token) as user, cluster.leader.client() as owner:
            await user.ask(ListJobs())
            await owner.ask(RevokeToken(token_id=parse_token(token).token_id))
            await until(lambda: user.peer.is_closed, what="the standby closes the connection")
            await cluster.lose_leader()
            with pytest.raises(TokenRefusedError, match="revoked"):
                async with cluster.standby.client(token):
                    pass


async def test_leader_lost_before_its_reply_is_reported_as_ambiguous(tmp_path: Path) -> None:
    async with run_leader_and_standby(tmp_path) as cluster, cluster.standby.client() as client:
        await client.ask(ListJobs())
        await cluster.until_copied()
        is_committing = asyncio.Event()

        async def hang(*arguments: object, **settings: object) -> object:
            is_committing.set()
            return await asyncio.Event().wait()

        cluster.leader.store.commit = hang  # type: ignore[method-assign, assignment]
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(_error_of(client.ask(CreateToken(kind=TokenKind.USER))))
            await is_committing.wait()
            await cluster.lose_leader()
        error = sent.result()
        assert isinstance(error, ReplyLostError) and "may have been carried out" in error.hint
        assert error.retry_after_s <= 0.1, "another controller leads soon"
        assert (await client.ask(ListJobs())).age_s > 0  # the connection of the client remains


async def test_only_controllers_may_forward_requests(tmp_path: Path) -> None:
    async with run_leader_and_standby(tmp_path) as cluster:
        owner_token = (cluster.leader.state_dir / "owner.token").read_text()
        frame = forwarded(ListJobs(), parse_token(owner_token).token_id)
        access = await cluster.leader.access(owner_token)
        async with rpc.dial(
            cluster.leader.network, access.host, access.port, tls=access.tls, timeout_s=CALL_S
        ) as peer:
            with pytest.raises(TokenMissingError):
                await peer.call(frame, timeout_s=CALL_S)
        for token in (owner_token, await user_token(cluster, "red")):
            async with cluster.leader.client(token) as client:
                with pytest.raises(PermissionError_, match="cannot forward requests"):
                    await client.ask(frame)
        async with cluster.leader.agent("n1") as agent:
            assert agent.peer is not None
            with pytest.raises(PermissionError_, match="cannot forward requests"):
                await agent.peer.call(frame, timeout_s=CALL_S)


async def test_leader_checks_the_identity_of_a_forwarded_request(tmp_path: Path) -> None:
    async with run_leader_and_standby(tmp_path) as cluster:
        red = await user_token(cluster, "red")
        red_id = parse_token(red).token_id
        node = await cluster.leader.join("n1")
        async with cluster.leader.client() as owner, server_connection(cluster.leader) as peer:
            await forward(peer, ListJobs(), red_id)
            with pytest.raises(PermissionError_):
                await forward(peer, ListTokens(), red_id)
            for unusable in (node.token.token_id, "unknown"):
                with pytest.raises(TokenRefusedError):
                    await forward(peer, ListJobs(), unusable)
            await owner.ask(RevokeToken(token_id=red_id))
            with pytest.raises(TokenRefusedError, match="revoked"):
                await forward(peer, ListJobs(), red_id)


async def test_forwarded_request_is_not_forwarded_again(tmp_path: Path) -> None:
    async with run_leader_and_standby(tmp_path) as cluster:
        owner_id = parse_token((cluster.leader.state_dir / "owner.token").read_text()).token_id
        async with server_connection(cluster.standby) as peer:
            with pytest.raises(NotLeaderError):
                await peer.call(forwarded(ListJobs(), owner_id), timeout_s=CALL_S)


async def test_only_requests_of_clients_can_be_forwarded(tmp_path: Path) -> None:
    async with run_leader_and_standby(tmp_path) as cluster:
        owner_id = parse_token((cluster.leader.state_dir / "owner.token").read_text()).token_id
        async with server_connection(cluster.leader) as peer:
            for inner in (forwarded(ListJobs(), owner_id), SessionHeartbeat(node=make_node_info("client"))):
                with pytest.raises(ProtocolError):
                    await peer.call(forwarded(inner, owner_id), timeout_s=CALL_S)


async def ask_for_aged_reply(client: Client, request: Message) -> AgedReply:
    assert isinstance(request, Request)
    reply = await client.ask(request)
    assert isinstance(reply, AgedReply)
    return reply


async def user_token(cluster: LeaderAndStandby, tenant: str) -> str:
    return await cluster.leader.token(TokenKind.USER, tenant=tenant)


def forwarded(request: Message, token_id: str) -> ForwardedRequest:
    return ForwardedRequest(token_id=token_id, request=wire.encode_message(request))


async def forward(peer: rpc.Peer, request: Message, token_id: str) -> None:
    """Forward a request and raise its error."""
    reply = await peer.call(forwarded(request, token_id), timeout_s=CALL_S)
    if reply.error:
        raise wire.decode_error(reply.error, peer=peer.name)


@asynccontextmanager
async def server_connection(one: RunningController) -> AsyncIterator[rpc.Peer]:
    """A connection with the certificate of a controller."""
    assert one.controller is not None
    client_tls = one.controller._certificates.client_tls(one.state_dir / "controller")
    async with rpc.dial(one.network, "127.0.0.1", one.port, tls=client_tls, timeout_s=CALL_S) as peer:
        await peer.call(ServerHello(name="test", version=__version__), timeout_s=CALL_S)
        yield peer


async def _error_of(call: Coroutine[object, object, object]) -> GenieError:
    with pytest.raises(GenieError) as caught:
        await call
    return caught.value


async def test_standby_that_cannot_read_the_cluster_record_forwards_and_announces_its_release(
    tmp_path: Path,
) -> None:
    async with run_leader_and_standby(tmp_path) as cluster:
        store, release_key = cluster.leader_store, SERVER_RELEASE_KEY_PREFIX + "two"
        found = await store.get(CLUSTER_KEY)
        assert found is not None
        newer = msgspec.json.encode({**msgspec.json.decode(found.value), "fencing": "by other means"})
        await store.commit([], [Put(CLUSTER_KEY, newer), Delete(release_key)])
        await cluster.standby.restart()
        assert await store.get(release_key) is not None
        async with cluster.standby.client() as client:
            status = await client.status()
            assert (status.leader, status.store_ok) == (cluster.leader_address, True)
            (alarm,) = (each for each in status.alarms if "cannot lead" in each)
            assert "does not know fencing" in alarm
            assert (await client.submit()).state is JobState.QUEUED
        await store.commit([], [Put(CLUSTER_KEY, found.value)])

        async def is_alarm_cleared() -> bool:
            async with cluster.standby.client() as client:
                return not [each for each in (await client.status()).alarms if "cannot lead" in each]

        await until(is_alarm_cleared, timeout_s=30.0)
