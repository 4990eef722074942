"""Requests of sessions: heartbeats, opening remote devices, and the end of a session."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from genie.controller.checks import check_node, clamp_wait_s
from genie.controller.connection import Connection, Handlers
from genie.controller.election import Election
from genie.controller.jobs.sessions import Sessions
from genie.controller.placement.planner import Planner
from genie.controller.requests.jobs import check_quota_allows
from genie.controller.requests.nodes import NodeList
from genie.controller.requests.open_waits import OpenWaits, too_many_open_error
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
        self._node_list = nodes
        self._planner = planner
        self._election = election
        self._open_waits = waits
        self._send_kills = kill
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
        interval_s = request.interval_s
        self._check_readable()
        self._sessions.renew_lease(
            connection.identity, request.node.node_id, interval_s=interval_s, peer=connection.peer
        )
        reply = self._node_list.make_nodes_reply(connection.identity)
        return reply if self._election.is_leading else msgspec.structs.replace(reply, leading=False)

    async def session_end(self, connection: Connection, request: SessionEnd) -> Done:
        for job in await self._sessions.close_jobs_of_client(connection.identity, request.node_id):
            self._send_kills(job)
        return Done()

    async def open_device(self, connection: Connection, request: OpenDevice) -> DeviceReply:
        self._election.require_fencing_token()
        identity = connection.identity

        def check_allowed(spec: JobSpec) -> None:
            check_quota_allows(self._planner, spec, tenant=identity.tenant)

        return await self._sessions.open_device(request, identity, check_allowed=check_allowed)

    async def wait_device(self, connection: Connection, request: WaitDevice) -> DeviceReply:
        self._check_readable()
        wait_s, identity = clamp_wait_s(request.wait_s), connection.identity
        with self._open_waits.try_open_wait(identity.tenant) as is_allowed:
            if not is_allowed:
                raise too_many_open_error(f"waits of tenant {identity.tenant}")
            return await self._sessions.wait_device(request.job_id, identity, wait_s=wait_s)
