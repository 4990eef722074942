"""Requests of sessions: heartbeats, opening remote devices, and the end of a session."""

from __future__ import annotations

from collections.abc import Callable

from genie.controller.checks import check_interval_s, check_node, clamp_wait_s
from genie.controller.connection import Connection, Handlers
from genie.controller.election import Election
from genie.controller.jobs.sessions import Sessions
from genie.controller.placement.planner import Planner
from genie.controller.requests.jobs import check_quota_allows
from genie.controller.requests.nodes import NodeList
from genie.controller.requests.open_waits import OpenWaits, too_many
from genie.model.job import Job, JobSpec
from genie.model.messages import (
    DeviceReply,
    Done,
    NodesReply,
    OpenDevice,
    SessionEnd,
    SessionHeartbeat,
    WaitDevice,
)


class SessionRequests:
    """`kill` and `check_readable` are as in JobRequests."""

    def __init__(
        self,
        sessions: Sessions,
        nodes: NodeList,
        planner: Planner,
        election: Election,
        *,
        waits: OpenWaits,
        kill: Callable[[Job], None],
        check_readable: Callable[[], None],
    ) -> None:
        self._sessions = sessions
        self._nodes = nodes
        self._planner = planner
        self._election = election
        self._waits = waits
        self._kill = kill
        self._check_readable = check_readable

    def handlers(self) -> Handlers:
        return {
            SessionHeartbeat: self.session_heartbeat,
            SessionEnd: self.session_end,
            OpenDevice: self.open_device,
            WaitDevice: self.wait_device,
        }

    async def session_heartbeat(self, connection: Connection, request: SessionHeartbeat) -> NodesReply:
        check_node(request.node)
        interval_s = check_interval_s(request.interval_s)
        self._sessions.renew(
            connection.identity, request.node.node_id, interval_s=interval_s, peer=connection.peer
        )
        self._check_readable()
        return self._nodes.reply(connection.identity)

    async def session_end(self, connection: Connection, request: SessionEnd) -> Done:
        for job in await self._sessions.end(connection.identity, request.node_id):
            self._kill(job)
        return Done()

    async def open_device(self, connection: Connection, request: OpenDevice) -> DeviceReply:
        self._election.require_token()
        identity = connection.identity

        def check(spec: JobSpec) -> None:
            check_quota_allows(self._planner, spec, tenant=identity.tenant)

        return await self._sessions.open_device(request, identity, check=check)

    async def wait_device(self, connection: Connection, request: WaitDevice) -> DeviceReply:
        self._check_readable()
        wait_s, identity = clamp_wait_s(request.wait_s), connection.identity
        with self._waits.wait_of(identity.tenant) as is_allowed:
            if not is_allowed:
                raise too_many(f"waits of tenant {identity.tenant}")
            return await self._sessions.wait_device(request.job_id, identity, wait_s=wait_s)
