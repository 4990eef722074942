"""Agents: registration, incarnations, heartbeats, failure detection and reclaiming."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from genie.controller.rows import NodeRecord
from genie.errors import FencedError, GenieError, PermissionError_, UsageError, WorkersMissingError
from genie.model.job import JobSpec, JobState, PlacementConstraints, Resources
from genie.model.messages import CancelJob, Heartbeat, Launch, ListNodes, RunningJob
from genie.model.node import GPUInfo, NodeStatus
from genie.model.tenant import TokenKind
from tests.controller.running_controller import (
    Client,
    RunningController,
    advance_until_launch,
    job_spec,
    running_controller,
)
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def test_registered_node_is_listed_with_its_hardware(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1", gpus=2) as agent:
        node = await owner.node("n1")
        assert (node.status, node.gpu_count, node.cpus) == (NodeStatus.HEALTHY, 2, 8.0)
        registered = await agent.register()
        assert registered.leader_token > 0
        assert registered.ttl_s == 10.0
        assert registered.controllers == (f"127.0.0.1:{one.port}",)
        await agent.beat()
        status = await owner.status()
        assert (status.gpus_total, status.gpus_free, status.nodes) == (2, 2, {"healthy": 1})


async def test_status_counts_only_accelerators_that_jobs_can_use(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1", gpus=128):
        status = await owner.status()
        assert (status.gpus_total, status.gpus_free) == (16, 16)
        assert status.alarms == ("node n1 has 128 accelerators; jobs can use only the first 16",)
        async with one.client(await one.token(TokenKind.USER)) as user:
            assert (await user.status()).alarms == ()


async def test_node_may_send_requests_only_for_itself(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        async with FakeAgent(make_node_info("other")).connected(one.network, access) as agent:
            with pytest.raises(PermissionError_):
                await agent.register()


async def test_node_description_is_validated(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        info = make_node_info("n1", gpus=2)
        twice = (info.gpus[0], info.gpus[0])
        wrong = [
            msgspec.structs.replace(info, cpus=float("nan")),
            msgspec.structs.replace(info, memory_total_bytes=-1),
            msgspec.structs.replace(info, gpus=twice),
            msgspec.structs.replace(info, hostname="x" * 5000),
            msgspec.structs.replace(info, last_heartbeat=float("inf")),
            msgspec.structs.replace(info, rack="a b"),
            *(msgspec.structs.replace(info, labels=labels) for labels in invalid_label_sets()),
            *(msgspec.structs.replace(info, gpus=(gpu,)) for gpu in invalid_gpus(info.gpus[0])),
        ]
        for bad in wrong:
            async with FakeAgent(bad).connected(one.network, access) as agent:
                with pytest.raises(UsageError):
                    await agent.register()


async def test_changed_heartbeat_is_validated_and_unchanged_one_is_reused(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1", gpus=2) as agent:
        assert one.controller is not None
        await agent.beat()
        member = one.controller._membership.get("n1")
        assert member is not None
        first = member.reported_info
        await agent.beat()
        assert member.reported_info is first, "unchanged"
        good = agent.info
        agent.info = msgspec.structs.replace(good, memory_total_bytes=-1)
        with pytest.raises(UsageError):
            await agent.beat()
        agent.info = msgspec.structs.replace(good, cpus=3.0)
        await agent.beat()
        assert (await owner.node("n1")).cpus == 3.0


def invalid_label_sets() -> list[dict[str, str]]:
    too_many = {f"k{number}": "v" for number in range(65)}
    return [too_many, {"": "v"}, {"k": ""}, {"k" * 64: "v"}, {"k": "v" * 64}, {"a=b": "c"}, {"k": "a\nb"}]


def invalid_gpus(gpu: GPUInfo) -> list[GPUInfo]:
    wrong: list[dict[str, object]] = [
        {"memory_outside_bytes": -1},
        {"memory_outside_bytes": 1 << 61},
        {"capability": (-1, 0)},
        {"capability": (9, 1000)},
        {"island": -1},
        {"island": 1 << 21},
        {"numa": -1},
        {"numa": 1024},
    ]
    return [msgspec.structs.replace(gpu, **fields) for fields in wrong]


async def test_node_is_listed_with_its_labels_rack_and_gpus(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        access = await one.join("n1")
        info = make_node_info("n1", gpus=1)
        gpu = msgspec.structs.replace(
            info.gpus[0], capability=(9, 0), island=3, numa=1, memory_outside_bytes=1 << 20
        )
        labels = {f"{number:->63}": "v" * 63 for number in range(64)}
        reported = msgspec.structs.replace(info, gpus=(gpu,), labels=labels, rack="hall-2/r7")
        async with FakeAgent(reported).connected(one.network, access) as agent:
            await agent.register()
            node = await owner.node("n1")
    assert (node.gpus, node.labels, node.rack) == ((gpu,), labels, "hall-2/r7")


async def test_new_incarnation_ends_the_jobs_of_the_previous_one(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        access = await one.join("n1")
        async with FakeAgent(make_node_info("n1", gpus=3)).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
            reported, unreported, unstarted = [await owner.submit(gpus=1) for _ in range(3)]
            launches = {launch.job_id: launch for launch in [await agent.next_launch() for _ in range(3)]}
            await agent.confirm(launches[reported.job_id])
            await agent.confirm(launches[unreported.job_id])
            report = agent.end(launches[reported.job_id], 7)
        reborn = agent.restarted()
        async with reborn.connected(one.network, access):
            await reborn.register(report)
            await reborn.beat()
            first, second = await owner.job(reported.job_id), await owner.job(unreported.job_id)
            assert (first.state, first.exit_code) == (JobState.FAILED, 7)
            assert (second.state, second.reason) == (JobState.LOST, "node n1 restarted")
            again = await reborn.next_launch()
            assert again.job_id == unstarted.job_id, "the unstarted job is launched again"
            assert again.placement.incarnation == 2


async def test_new_incarnation_keeps_the_jobs_that_it_has_adopted(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        access = await one.join("n1")
        async with FakeAgent(make_node_info("n1", gpus=3)).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
            adopted, other_epoch, unstarted = [await owner.submit(gpus=1) for _ in range(3)]
            launches = {launch.job_id: launch for launch in [await agent.next_launch() for _ in range(3)]}
            await agent.confirm(launches[adopted.job_id])
            await agent.confirm(launches[other_epoch.job_id])
        reborn = agent.restarted()
        epochs = {job_id: launch.placement.epoch for job_id, launch in launches.items()}
        epochs[other_epoch.job_id] += 1
        reborn.running = {job_id: RunningJob(job_id=job_id, epoch=epoch) for job_id, epoch in epochs.items()}
        async with reborn.connected(one.network, access):
            await reborn.register()
            assert (await owner.job(adopted.job_id)).state is JobState.RUNNING
            lost = await owner.job(other_epoch.job_id)
            assert (lost.state, lost.reason) == (JobState.LOST, "node n1 restarted")
            assert (await owner.job(unstarted.job_id)).state is JobState.PLACING
            ack = await reborn.beat()
            assert [order.job_id for order in ack.jobs_to_kill] == [other_epoch.job_id]
            assert sorted(await owner.held("n1")) == sorted([adopted.job_id, unstarted.job_id])
            await reborn.confirm(launches[unstarted.job_id])
            assert (await owner.job(unstarted.job_id)).state is JobState.RUNNING
            reborn.end(launches[adopted.job_id], 0)
            await reborn.beat()
            assert (await owner.job(adopted.job_id)).state is JobState.SUCCEEDED


async def test_older_incarnation_is_rejected_and_a_newer_one_replaces_it(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        old = FakeAgent(make_node_info("n1"))
        new = old.restarted()
        async with old.connected(one.network, access), new.connected(one.network, access):
            await old.register()
            await old.beat()
            await new.register()
            await new.beat()
            assert old.peer is not None
            await until(lambda: old.peer.is_closed, what="the older connection is closed")
            late = FakeAgent(make_node_info("n1"))
            async with late.connected(one.network, access):
                with pytest.raises(FencedError, match="incarnation 1 of node n1 was replaced by 2"):
                    await late.register()
            assert (await new.beat()).leading


async def test_heartbeat_needs_a_registration_on_its_connection(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        async with FakeAgent(make_node_info("n1")).connected(one.network, access) as agent:
            with pytest.raises(FencedError, match="not registered on this connection"):
                await agent.beat()


async def test_running_job_without_a_hold_in_the_ledger_is_killed(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit(gpus=1)
        launch = await agent.start_next()
        stray = (RunningJob(job_id="j-unknown", epoch=1), RunningJob(job_id=job.job_id, epoch=99))
        mine = RunningJob(job_id=job.job_id, epoch=launch.placement.epoch)
        ack = await agent.beat(running=(*stray, mine))
        assert [(order.job_id, order.epoch) for order in ack.jobs_to_kill] == [
            ("j-unknown", 1),
            (job.job_id, 99),
        ]


async def test_job_that_its_agent_no_longer_runs_is_lost_and_released_once(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit(gpus=1)
        launch = await agent.start_next()
        await agent.beat(running=())
        assert (await owner.job(job.job_id)).state is JobState.RUNNING, (
            "one may have crossed the confirmation"
        )
        await agent.beat(running=())
        lost = await owner.job(job.job_id)
        assert (lost.state, lost.reason) == (JobState.LOST, "the agent of node n1 no longer runs it")
        other = await owner.submit(gpus=1)
        await agent.start_next()
        agent.end(launch)  # a late report about the lost one
        ack = await agent.beat()
        assert [order.job_id for order in ack.settled_exits] == [job.job_id]
        assert await owner.held("n1") == [other.job_id]
        assert (await owner.job(job.job_id)).state is JobState.LOST


async def test_node_without_heartbeats_is_suspect_then_disconnected_until_the_next_one(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        await clock.advance(2.9)
        assert (await owner.node("n1")).status is NodeStatus.HEALTHY
        await clock.advance(0.2)
        assert (await owner.node("n1")).status is NodeStatus.SUSPECT
        job = await owner.submit(gpus=1)
        assert job.reason == "no suitable node: n1: suspect: no heartbeat for 3 s"
        await clock.advance(7.0)
        node = await owner.node("n1")
        assert (node.status, node.status_reason) == (NodeStatus.DISCONNECTED, "no heartbeat for 10 s")
        assert (await owner.status()).gpus_total == 0
        await agent.beat()
        assert (await owner.node("n1")).status is NodeStatus.HEALTHY
        assert (await advance_until_launch(clock, agent)).job_id == job.job_id


async def _run_restartable_job_until_node_is_lost(
    one: RunningController, clock: FakeClock, owner: Client, agent: FakeAgent
) -> str:
    job = await owner.submit_spec(job_spec(preemptible=True))
    await agent.start_next()
    await clock.advance(12.0)
    assert (await owner.job(job.job_id)).state is JobState.RUNNING, "not before the grace period expires"

    async def is_queued_again() -> bool:
        await clock.advance(0.5)
        return (await owner.job(job.job_id)).state is JobState.QUEUED

    await until(is_queued_again)
    return job.job_id


async def test_restartable_jobs_of_a_disconnected_node_are_queued_again_after_the_grace_period(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        job_id = await _run_restartable_job_until_node_is_lost(one, clock, owner, agent)
        job = await owner.job(job_id)
        assert job.history[-1].reason.startswith("queued again: node n1 sent no heartbeat for 1")
        assert await owner.held("n1") == []
        ack = await agent.beat()
        assert [order.job_id for order in ack.jobs_to_kill] == [job_id], "it must not run without a hold"
        agent.running.clear()
        await agent.beat()
        launch = await advance_until_launch(clock, agent)
        assert launch.job_id == job_id
        assert launch.placement.epoch > job.earlier[-1].epoch
        assert await owner.held("n1") == [job_id]


async def test_cancelled_restartable_job_on_a_disconnected_node_ends_as_cancelled(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit_spec(job_spec(preemptible=True))
        await agent.start_next()
        await owner.ask(CancelJob(job_id=job.job_id))

        async def over() -> bool:
            await clock.advance(1.0)
            return (await owner.job(job.job_id)).state.is_final

        await until(over)
        assert (await owner.job(job.job_id)).state is JobState.CANCELLED


async def _start_job_with_time_limit(owner: Client, *agents: FakeAgent, clock: FakeClock) -> list[Launch]:
    """One worker on each node, with a time limit of 5 s."""
    constraints = PlacementConstraints(workers=len(agents), time_limit_s=5.0, preemptible=True)
    spec = JobSpec(name="timed", command=("true",), resources=Resources(gpus=1), constraints=constraints)
    await owner.submit_spec(spec)
    await until(lambda: _advance_and_check_launched(clock, *agents), what="launches")
    launches = [await agent.next_launch() for agent in agents]
    for agent, launch in zip(agents[:-1], launches, strict=False):
        with pytest.raises(WorkersMissingError):
            await agent.confirm(launch)
    for agent, launch in zip(reversed(agents), reversed(launches), strict=True):
        await agent.confirm(launch)
    for agent in agents:
        await agent.beat()
    return launches


async def _advance_and_check_launched(clock: FakeClock, *agents: FakeAgent) -> bool:
    await clock.advance(0.5)
    for agent in agents:
        await agent.beat()
    return not any(agent.launches.empty() for agent in agents)


async def test_job_that_ended_within_its_limit_on_a_disconnected_node_succeeds(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        [launch] = await _start_job_with_time_limit(owner, agent, clock=clock)
        agent.end(launch, 0)
        for _ in range(8):
            await clock.advance(1.0)
        assert not (await owner.job(launch.job_id)).stop, "it is unknown whether it still runs"
        await agent.beat()
        assert (await owner.job(launch.job_id)).state is JobState.SUCCEEDED


async def test_job_that_ended_within_its_limit_without_a_leader_succeeds(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            [launch] = await _start_job_with_time_limit(owner, agent, clock=clock)
        report = agent.end(launch, 0)
        await clock.advance(8.0)
        await one.restart()
        for _ in range(3):
            await clock.advance(0.5)
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register(report)
            assert (await owner.job(launch.job_id)).state is JobState.SUCCEEDED


async def test_job_over_its_limit_on_a_disconnected_node_is_queued_again(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        [launch] = await _start_job_with_time_limit(owner, agent, clock=clock)

        async def is_queued_again() -> bool:
            await clock.advance(1.0)
            return (await owner.job(launch.job_id)).state is JobState.QUEUED

        await until(is_queued_again)
        assert "sent no heartbeat" in (await owner.job(launch.job_id)).history[-1].reason


async def test_connected_workers_are_killed_when_the_time_limit_expires(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a") as silent,
        one.agent("b") as responsive,
    ):
        await _start_job_with_time_limit(owner, silent, responsive, clock=clock)

        async def is_killed() -> bool:
            await clock.advance(0.5)
            await responsive.beat()
            return not responsive.kills.empty()

        await until(is_killed)
        assert (await responsive.next_kill()).reason == "exceeded its time limit of 5 s"


async def test_time_limit_of_a_job_does_not_follow_the_wall_clock(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        [launch] = await _start_job_with_time_limit(owner, agent, clock=clock)
        clock.step_wall(3600.0)
        for _ in range(4):
            await clock.advance(1.0)
            await agent.beat()
        assert not (await owner.job(launch.job_id)).stop
        clock.step_wall(-7200.0)

        async def is_killed() -> bool:
            await clock.advance(0.5)
            await agent.beat()
            return not agent.kills.empty()

        await until(is_killed)


async def test_time_limit_continues_after_a_restart_of_the_controller(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            await _start_job_with_time_limit(owner, agent, clock=clock)
        clock.step_wall(-3600.0)
        await one.restart()
        async with agent.connected(one.network, access):
            await agent.register()
            agent.elapsed_s = 4.9
            await agent.beat()

            async def is_killed() -> bool:
                await clock.advance(0.2)
                return not agent.kills.empty()

            await until(is_killed)


async def test_jobs_of_a_node_that_does_not_know_this_controller_are_not_reclaimed(tmp_path: Path) -> None:
    """Its agent polls only the controllers that it knows, and may see no leader among them."""
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        job = await owner.submit_spec(job_spec(preemptible=True))
        await agent.start_next()
        assert one.controller is not None
        ledger = one.controller._ledger
        record = ledger.nodes.get("n1")
        assert record is not None
        elsewhere = msgspec.structs.replace(record, controllers=("elsewhere:1",))
        await ledger.write(lambda txn: txn.put(ledger.nodes, "n1", elsewhere))
        for _ in range(30):
            await clock.advance(1.0)
        assert (await owner.job(job.job_id)).state is JobState.RUNNING
        assert (await owner.node("n1")).status is NodeStatus.DISCONNECTED


async def test_slow_store_does_not_delay_the_heartbeat_reply(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path, node_ttl_s=1.0) as one,
        one.client() as owner,
        one.agent() as agent,
    ):
        await owner.submit(gpus=1)
        launch = await agent.start_next()
        agent.end(launch)
        free = asyncio.Event()
        commit = one.store.commit

        async def slow(*arguments: object, **settings: object) -> object:
            await free.wait()
            return await commit(*arguments, **settings)  # type: ignore[arg-type]

        one.store.commit = slow  # type: ignore[method-assign, assignment]
        ack = await agent.beat()
        assert (ack.leading, ack.settled_exits) == (True, ())
        free.set()

        async def settled() -> bool:
            await agent.beat()
            return not agent.exits

        await until(settled)


async def test_nodes_are_listed_in_pages_within_the_frame_limit(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        assert one.controller is not None
        ledger = one.controller._ledger
        for index in range(300):
            access_free = make_node_info(f"n{index:03}", gpus=32)
            await ledger.write(
                lambda txn, info=access_free: txn.put(ledger.nodes, info.node_id, NodeRecord(info=info))
            )
        found: list[str] = []
        more = True
        while more:
            page = await owner.ask(ListNodes(after_node_id=found[-1] if found else ""))
            found += [view.info.node_id for view in page.nodes]
            more = page.more
        assert found == [f"n{index:03}" for index in range(300)]


async def test_heartbeat_for_another_node_is_rejected(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.agent("n1") as agent:
        assert agent.peer is not None
        lie = Heartbeat(node_id="n2", incarnation=1, node=agent.info)
        with pytest.raises(GenieError, match="belongs to node n1"):
            await agent.peer.call(lie, timeout_s=5)
