"""Heartbeats of a session: intervals, node changes, lost connections."""

from __future__ import annotations

import asyncio

import pytest

import genie
from genie.cluster.events import EventType
from genie.cluster.lifecycle import heartbeats, init_phases
from genie.model.messages import ListNodes, SessionHeartbeat
from genie.model.node import NodeStatus
from tests.cluster.small_controller import QUIET_SETTINGS, SmallController, has_event, make_gpu, make_node
from tests.waiting import until, wait_until


async def test_heartbeats_continue_while_user_code_blocks_its_loop(controller: SmallController) -> None:
    await genie.init(heartbeat_interval=0.05, **QUIET_SETTINGS)
    before = controller.count(SessionHeartbeat)
    wait_until(lambda: controller.count(SessionHeartbeat) >= before + 5)  # blocks this loop


async def test_heartbeats_update_the_nodes_and_publish_changes(controller: SmallController) -> None:
    state = await genie.init(heartbeat_interval=0.05, **QUIET_SETTINGS)
    controller.nodes = (
        make_node("n1", make_gpu(), status=NodeStatus.DISCONNECTED),
        make_node("n2", make_gpu()),
    )
    expected = {(EventType.NODE_LOST, "n1"), (EventType.NODE_JOINED, "n2")}
    await until(lambda: expected <= {(event.type, event.node_id) for event in state.events.history()})
    assert set(state.nodes) == {"n1", "n2"}
    assert state.nodes["n1"].status is NodeStatus.DISCONNECTED


async def test_peer_without_heartbeat_is_disconnected(
    controller: SmallController,
) -> None:
    state = await genie.init(heartbeat_interval=0.05, heartbeat_timeout=0.3, **QUIET_SETTINGS)

    def list_lost_node_ids() -> list[str | None]:
        return [event.node_id for event in state.events.history() if event.type is EventType.NODE_LOST]

    await until(list_lost_node_ids)  # published by another thread, after the status has changed
    assert list_lost_node_ids() == ["n1"]
    assert state.nodes["n1"].status is NodeStatus.DISCONNECTED


async def test_nodes_are_fetched_once_without_heartbeats(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[float] = []

    async def wait_for_next_round(self: heartbeats.HeartbeatSender, interval_s: float) -> None:
        rounds.append(interval_s)
        await asyncio.sleep(0)

    monkeypatch.setattr(heartbeats.HeartbeatSender, "_wait_for_interval_or_reconnection", wait_for_next_round)
    state = await genie.init(enable_heartbeat=False, **QUIET_SETTINGS)
    assert set(state.nodes) == {"n1"}
    await until(lambda: len(rounds) > 5)
    assert (controller.count(SessionHeartbeat), controller.count(ListNodes)) == (0, 1)


async def test_session_with_an_executor_sends_heartbeats_even_if_disabled(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "HEARTBEAT_INTERVAL_WITH_DEVICE_S_MAX", 0.02)
    state = await genie.init(enable_heartbeat=False, **QUIET_SETTINGS)
    assert state.transport_coordinator is not None
    await asyncio.to_thread(state.transport_coordinator.open_executor_blocking, 0)
    await until(lambda: controller.count(SessionHeartbeat) >= 2)


async def test_first_heartbeat_is_sent_within_the_lease_of_the_first_executor(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[tuple[float, float]] = []

    async def wait_for_next_round(self: heartbeats.HeartbeatSender, step_s: float) -> None:
        await until(lambda: self._has_open_executors)
        rounds.append((self._state.stats["heartbeats_sent"], step_s))
        await asyncio.sleep(0)

    monkeypatch.setattr(heartbeats.HeartbeatSender, "_wait_for_interval_or_reconnection", wait_for_next_round)
    state = await genie.init(enable_heartbeat=False, heartbeat_interval=60.0, **QUIET_SETTINGS)
    assert state.transport_coordinator is not None
    await asyncio.to_thread(state.transport_coordinator.open_executor_blocking, 0)
    await until(lambda: len(rounds) >= 5)
    assert rounds[:5] == [(0, 20.0), (1, 20.0), (1, 20.0), (1, 20.0), (2, 20.0)]
    (first, *_) = (request for request in controller.asked if isinstance(request, SessionHeartbeat))
    assert first.interval_s == 60.0


async def test_long_interval_is_capped_only_while_a_device_is_open(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[float] = []

    async def wait_for_next_round(self: heartbeats.HeartbeatSender, step_s: float) -> None:
        steps.append(step_s)
        await asyncio.sleep(0)

    monkeypatch.setattr(heartbeats.HeartbeatSender, "_wait_for_interval_or_reconnection", wait_for_next_round)
    caplog.set_level("INFO", logger="genie")
    state = await genie.init(heartbeat_interval=90.0, **QUIET_SETTINGS)
    await until(lambda: len(steps) >= 5)
    assert steps[:5] == [20.0, 20.0, 20.0, 20.0, 10.0]
    assert "while a device is open" not in caplog.text
    assert state.transport_coordinator is not None
    await asyncio.to_thread(state.transport_coordinator.open_executor_blocking, 0)
    await until(lambda: "while a device is open" in caplog.text)
    controller.asked.clear()
    steps.clear()
    await until(lambda: controller.count(SessionHeartbeat) >= 3)
    await genie.shutdown()
    beats = [request for request in controller.asked if isinstance(request, SessionHeartbeat)]
    assert {request.interval_s for request in beats} == {60.0}
    # Three steps of 20 s to each heartbeat; at both ends one of the two may be missing.
    assert 3 * (len(beats) - 1) <= len(steps) <= 3 * (len(beats) + 1)
    assert caplog.text.count("every 60 s instead of every 90 s while a device is open") == 1


async def test_interval_of_a_minute_is_kept_while_a_device_is_open(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waited: list[float] = []

    async def wait_for_next_round(self: heartbeats.HeartbeatSender, step_s: float) -> None:
        waited.append(step_s)
        await asyncio.sleep(0)

    monkeypatch.setattr(heartbeats.HeartbeatSender, "_wait_for_interval_or_reconnection", wait_for_next_round)
    caplog.set_level("INFO", logger="genie")
    state = await genie.init(heartbeat_interval=60.0, **QUIET_SETTINGS)
    assert state.transport_coordinator is not None
    await asyncio.to_thread(state.transport_coordinator.open_executor_blocking, 0)
    await until(lambda: controller.count(SessionHeartbeat) >= 3)
    await genie.shutdown()
    beats = [request for request in controller.asked if isinstance(request, SessionHeartbeat)]
    assert {request.interval_s for request in beats} == {60.0}
    assert sum(waited) >= 60.0 * (len(beats) - 1), "the first one is part of init()"
    assert "while a device is open" not in caplog.text


@pytest.mark.parametrize(
    ("given", "timeout_s"),
    [
        ({}, 60.0),
        ({"heartbeat_interval": 60.0}, 120.0),
        ({"heartbeat_interval": 60.0, "heartbeat_timeout": 70.0}, 70.0),
    ],
)
async def test_default_timeout_tolerates_one_lost_heartbeat(
    controller: SmallController, given: dict[str, float], timeout_s: float
) -> None:
    state = await genie.init(**QUIET_SETTINGS, **given)
    assert state.config.heartbeat_timeout == timeout_s


async def test_network_check_uses_the_round_trip_of_the_last_heartbeat(controller: SmallController) -> None:
    state = await genie.init(heartbeat_interval=0.05, **QUIET_SETTINGS)
    state.rtt_ms = 5000.0
    await until(lambda: state.rtt_ms is not None and state.rtt_ms < 5000.0)


async def test_session_without_health_checks_is_healthy(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.cluster.lifecycle.init_phases.local_address_towards", lambda *_: "10.0.0.9")
    state = await genie.init(**QUIET_SETTINGS)
    assert (state.local_node.status, state.local_node.host) == (NodeStatus.HEALTHY, "10.0.0.9")


async def test_lost_connection_is_restored_and_both_events_are_published(controller: SmallController) -> None:
    state = await genie.init(heartbeat_interval=0.1, **QUIET_SETTINGS)
    controller.stop()
    await until(lambda: has_event(state, EventType.CONNECTION_LOST))
    assert genie.is_initialized()
    controller.asked.clear()
    controller.start()
    await until(lambda: has_event(state, EventType.CONNECTION_RESTORED))
    await until(lambda: controller.count(SessionHeartbeat) > 0)
    assert state.stats["reconnects"] == 1


async def test_reconnect_during_init_is_counted(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = init_phases.open_controller_connection

    def open_connection_and_report_one_reconnect(*args: object, **kwargs: object) -> object:
        for connected in (False, True):
            kwargs["on_change"](connected, "a test")  # type: ignore[operator]
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(init_phases, "open_controller_connection", open_connection_and_report_one_reconnect)
    state = await genie.init(**QUIET_SETTINGS)
    assert state.stats["reconnects"] == 1
