"""The heartbeat of a session: renews its lease at the controller, and fetches the list of nodes.

A heartbeat is sent every interval and immediately after a reconnection, so that a restarted controller knows
the session before it reclaims its executors. With heartbeats disabled, the first one is sent within
_DUE_CHECK_INTERVAL_S_MAX of opening an executor. Each contains the interval, from which the controller
derives the lease. While executors are open, the interval is at most HEARTBEAT_INTERVAL_WITH_DEVICE_S_MAX,
regardless of the setting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

import msgspec

from genie.cluster.lifecycle.peers import PeerChange, PeerTable
from genie.cluster.state import ClusterState
from genie.errors import DeadlineError, GenieError
from genie.model.event import EventType
from genie.model.messages import SESSION_INTERVAL_S_MAX, NodeView, SessionHeartbeat
from genie.runtime.controller_connection import ControllerConnection, fetch_nodes

_log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_WITH_DEVICE_S_MAX = SESSION_INTERVAL_S_MAX
_DUE_CHECK_INTERVAL_S_MAX = 20.0
"""Maximum delay until an opened executor is detected: a third of the shortest lease."""
_HEARTBEAT_REPLY_TIMEOUT_S_MIN = 1.0
_HEARTBEAT_REPLY_TIMEOUT_S_MAX = 20.0


class HeartbeatSender:
    """Updates `nodes`, `node.last_heartbeat`, `rtt_ms` and two counters of the state."""

    def __init__(self, state: ClusterState, connection: ControllerConnection) -> None:
        self._state = state
        self._connection = connection
        self._peers = PeerTable(timeout_s=state.config.heartbeat_timeout)
        self._waited_since_heartbeat_s = 0.0
        self._is_interval_cap_logged = False
        state.stats |= {"heartbeats_sent": 0, "heartbeats_failed": 0}

    async def run(self) -> None:
        """Runs until cancelled. Counts failed heartbeats; peers then expire.

        With heartbeats disabled, only a session with open executors sends them: otherwise the controller
        would reclaim those.
        """
        config = self._state.config
        while True:
            await self._wait_until_next_due_check()
            if not self._is_heartbeat_due:
                continue
            self._waited_since_heartbeat_s = 0.0
            try:
                timeout_s = min(
                    self._effective_interval_s(), config.heartbeat_timeout, _HEARTBEAT_REPLY_TIMEOUT_S_MAX
                )
                await self.send_heartbeat(timeout_s=max(timeout_s, _HEARTBEAT_REPLY_TIMEOUT_S_MIN))
            except DeadlineError as error:
                self._handle_failed_heartbeat(error)
                # Connected but no reply: a new connection shows whether the controller is running.
                self._connection.disconnect()
            except GenieError as error:
                self._handle_failed_heartbeat(error)

    async def send_heartbeat(self, *, timeout_s: float) -> None:
        """Sends one heartbeat and applies the reply."""
        state = self._state
        node = msgspec.structs.replace(state.local_node, node_id=state.session_id or state.node.node_id)
        began_s = time.monotonic()
        interval_s = min(state.config.heartbeat_interval, HEARTBEAT_INTERVAL_WITH_DEVICE_S_MAX)
        request = SessionHeartbeat(node=node, interval_s=interval_s)
        reply = await self._connection.call(request, timeout_s=timeout_s)
        state.rtt_ms = 1000.0 * (time.monotonic() - began_s)
        self._state.stats["heartbeats_sent"] += 1
        self._state.node = msgspec.structs.replace(self._state.node, last_heartbeat=time.time())
        if not reply.leading:
            # The server has lost its store. Another one may lead, and would end this session.
            await self._connection.move_to_leader(timeout_s=timeout_s)
        views = await fetch_nodes(self._connection, reply, timeout_s=timeout_s)
        self._apply_node_list(views)
        if (devices := state.transport_coordinator) is not None:
            await devices.mark_lost_executors({view.info.node_id: view.info for view in views})

    async def fetch_and_apply_node_list(self, *, timeout_s: float) -> None:
        """Fetches the list of nodes, for a session without heartbeats."""
        self._apply_node_list(await fetch_nodes(self._connection, timeout_s=timeout_s))

    @property
    def _has_open_executors(self) -> bool:
        devices = self._state.transport_coordinator
        return devices is not None and devices.opened_executor_count > 0

    def _effective_interval_s(self) -> float:
        """The configured interval, capped while this session has open executors."""
        configured_s = self._state.config.heartbeat_interval
        if configured_s <= HEARTBEAT_INTERVAL_WITH_DEVICE_S_MAX or not self._has_open_executors:
            return configured_s
        if not self._is_interval_cap_logged:
            self._is_interval_cap_logged = True
            _log.info(
                "heartbeats are sent every %g s instead of every %g s while a device is open",
                HEARTBEAT_INTERVAL_WITH_DEVICE_S_MAX,
                configured_s,
            )
        return HEARTBEAT_INTERVAL_WITH_DEVICE_S_MAX

    @property
    def _is_heartbeat_due(self) -> bool:
        if not (self._state.config.enable_heartbeat or self._has_open_executors):
            return False
        if not self._state.stats["heartbeats_sent"]:
            return True  # it contains the interval: until then the controller grants the shortest lease
        return (
            self._connection.reconnected_event.is_set()
            or self._waited_since_heartbeat_s >= self._effective_interval_s()
        )

    async def _wait_until_next_due_check(self) -> None:
        """Waits at most until the next heartbeat; shorter to detect an executor that was opened meanwhile."""
        remaining_s = self._effective_interval_s() - self._waited_since_heartbeat_s
        step_s_max = min(_DUE_CHECK_INTERVAL_S_MAX, HEARTBEAT_INTERVAL_WITH_DEVICE_S_MAX)
        step_s = min(remaining_s, step_s_max) if remaining_s > 0 else step_s_max
        await self._wait_for_interval_or_reconnection(step_s)
        self._waited_since_heartbeat_s += step_s

    def _apply_node_list(self, views: Iterable[NodeView]) -> None:
        """Apply the complete list: a node that it does not contain counts as lost."""
        changes = self._peers.replace_nodes((view.info for view in views), now_s=time.monotonic())
        self._publish_peer_changes(changes)
        devices = self._state.transport_coordinator
        for ref in devices.add_new_accelerators(self._state.nodes.values()) if devices is not None else ():
            _log.info("%s has joined; it is the next remote_accelerator device", ref)

    def _handle_failed_heartbeat(self, error: GenieError) -> None:
        _log.warning("a heartbeat to %s failed: %s", self._connection.where, error)
        self._state.stats["heartbeats_failed"] += 1
        self._publish_peer_changes(self._peers.disconnect_expired_nodes(now_s=time.monotonic()))

    def _publish_peer_changes(self, changes: Iterable[PeerChange]) -> None:
        self._state.nodes = self._peers.nodes
        for change in changes:
            level = logging.WARNING if change.type is EventType.NODE_LOST else logging.INFO
            _log.log(level, "node %s: %s", change.node_id, change.reason)
            self._state.events.publish(change.type, node_id=change.node_id, reason=change.reason)

    async def _wait_for_interval_or_reconnection(self, interval_s: float) -> None:
        self._connection.reconnected_event.clear()
        try:
            async with asyncio.timeout(interval_s):
                await self._connection.reconnected_event.wait()
        except TimeoutError:
            pass
