"""A session's heartbeat: tells the controller that this process is alive, and learns who else is.

One goes out every interval, and one at once after a reconnection, so that a controller that was
restarted knows the session again before it gives its executors away. While executors are held the
interval is HOLDING_S_MAX at most, whatever is configured. Not for: agents' heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

import msgspec

from genie.cluster.link import Link
from genie.cluster.peers import PeerChange, PeerTable
from genie.cluster.state import ClusterState
from genie.errors import DeadlineError, GenieError
from genie.model.event import EventType
from genie.model.messages import ListNodes, NodesReply, SessionHeartbeat

_log = logging.getLogger(__name__)

HOLDING_S_MAX = 20.0
"""A third of the silence after which the controller takes a client's executors back."""
_ANSWER_S_MIN = 1.0


class Heartbeats:
    """Writes `nodes`, `node.last_heartbeat` and two counters of the state."""

    def __init__(self, state: ClusterState, link: Link) -> None:
        self._state = state
        self._link = link
        self._peers = PeerTable(timeout_s=state.config.heartbeat_timeout)
        self._waited_s = 0.0
        self._is_cap_told = False
        state.stats |= {"heartbeats_sent": 0, "heartbeats_failed": 0}

    async def run(self) -> None:
        """Until cancelled. A failed heartbeat is counted, and ages what is known of the others.

        With heartbeats switched off, only a session that holds executors sends them: without any, the
        controller would take those back.
        """
        config = self._state.config
        while True:
            await self._wait_step()
            if not self._is_due:
                continue
            self._waited_s = 0.0
            try:
                await self.beat(
                    timeout_s=max(min(self._interval_s(), config.heartbeat_timeout), _ANSWER_S_MIN)
                )
            except DeadlineError as error:
                self._failed(error)
                # Connected, but silent: a new connection shows whether the controller is there at all.
                self._link.drop()
            except GenieError as error:
                self._failed(error)

    async def beat(self, *, timeout_s: float) -> None:
        """One heartbeat and what follows from its answer."""
        state = self._state
        node = msgspec.structs.replace(state.local_node, node_id=state.session_id or state.node.node_id)
        began_s = time.monotonic()
        reply = await self._link.call(SessionHeartbeat(node=node), timeout_s=timeout_s)
        state.rtt_ms = 1000.0 * (time.monotonic() - began_s)
        self._state.stats["heartbeats_sent"] += 1
        self._state.node = msgspec.structs.replace(self._state.node, last_heartbeat=time.time())
        self._take(reply)

    async def look(self, *, timeout_s: float) -> None:
        """Only who is there, for a session that sends no heartbeats."""
        self._take(await self._link.call(ListNodes(), timeout_s=timeout_s))

    @property
    def _holds_executors(self) -> bool:
        devices = self._state.transport_coordinator
        return devices is not None and devices.opened > 0

    def _interval_s(self) -> float:
        """As configured; but whoever holds executors must be heard before they are taken back."""
        wished_s = self._state.config.heartbeat_interval
        if wished_s <= HOLDING_S_MAX or not self._holds_executors:
            return wished_s
        if not self._is_cap_told:
            self._is_cap_told = True
            _log.info(
                "heartbeats go out every %g s and not every %g s while executors are held",
                HOLDING_S_MAX,
                wished_s,
            )
        return HOLDING_S_MAX

    @property
    def _is_due(self) -> bool:
        if not (self._state.config.enable_heartbeat or self._holds_executors):
            return False
        return self._link.reopened.is_set() or self._waited_s >= self._interval_s()

    async def _wait_step(self) -> None:
        """A part of the interval, short enough to notice in time that an executor was opened meanwhile."""
        left_s = self._state.config.heartbeat_interval - self._waited_s
        step_s = min(left_s, HOLDING_S_MAX) if left_s > 0 else HOLDING_S_MAX
        await self._wait_interval(step_s)
        self._waited_s += step_s

    def _take(self, reply: NodesReply) -> None:
        changes = self._peers.heard((view.info for view in reply.nodes), now_s=time.monotonic())
        self._publish(changes)
        devices = self._state.transport_coordinator
        for ref in devices.follow(self._state.nodes.values()) if devices is not None else ():
            _log.info("%s has joined: it has the next index of remote_accelerator", ref)

    def _failed(self, error: GenieError) -> None:
        _log.warning("a heartbeat to %s failed: %s", self._link.where, error)
        self._state.stats["heartbeats_failed"] += 1
        self._publish(self._peers.aged(now_s=time.monotonic()))

    def _publish(self, changes: Iterable[PeerChange]) -> None:
        self._state.nodes = self._peers.nodes
        for change in changes:
            level = logging.WARNING if change.type is EventType.NODE_LOST else logging.INFO
            _log.log(level, "node %s: %s", change.node_id, change.reason)
            self._state.events.publish(change.type, node_id=change.node_id, reason=change.reason)

    async def _wait_interval(self, interval_s: float) -> None:
        self._link.reopened.clear()
        try:
            async with asyncio.timeout(interval_s):
                await self._link.reopened.wait()
        except TimeoutError:
            pass
