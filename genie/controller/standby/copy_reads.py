"""Answers reads from a standby's copy of the ledger.

The rules of access are those of the leader, because the handlers are. Heartbeats, readings of accelerators
and pending reasons are in the memory of the leader only: nodes are shown as suspect, without them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from genie.controller.change_notifier import ChangeNotifier
from genie.controller.connection import Connection, Handlers
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.ledger import LedgerTables
from genie.controller.nodes.snapshots import NodeSnapshot
from genie.controller.requests.jobs import JobReads
from genie.controller.requests.nodes import NodeList, NodeRequests
from genie.controller.requests.open_waits import OpenWaits
from genie.controller.requests.queue import QueueRequests
from genie.controller.requests.quotas import make_quotas_reply
from genie.controller.requests.reply_size import truncate_to_reply
from genie.controller.rows import NodeRecord
from genie.controller.standby.ledger_copy import LedgerCopy
from genie.controller.tokens import check_token_not_revoked, check_token_readable, token_records_after
from genie.model.messages import (
    COPY_REQUESTS,
    AgedReply,
    ListQuotas,
    ListTokens,
    Message,
    QuotasReply,
    StatusReply,
    TokensReply,
)
from genie.model.node import GPUInfo, NodeStatus
from genie.model.tenant import Identity
from genie.processes.clock import Clock
from genie.scheduler.decisions import Wait
from genie.scheduler.explain import PendingJobExplanation

_NODE_STATUS_REASON = "no leader responds, and only the leader receives heartbeats"


class CopyReads:
    def __init__(self, copy: LedgerCopy, *, clock: Clock, waits: OpenWaits) -> None:
        self._copy = copy
        self._clock = clock
        self._jobs = JobCatalog(copy.tables, notifier=ChangeNotifier(clock), wake=lambda: None)
        self._node_list = NodeList(copy.tables, _StoredNodes(copy.tables))
        check = copy.check_usable
        self._handlers: Handlers = {
            **JobReads(self._jobs, waits=waits, check_readable=check).handlers(),
            **QueueRequests(self._jobs, _NoPlanner(), clock=clock, check_readable=check).handlers(),
            **NodeRequests(self._node_list, check_readable=check).handlers(),
            ListQuotas: self._list_quotas,
            ListTokens: self._list_tokens,
        }
        assert self._handlers.keys() == {*COPY_REQUESTS}

    async def respond(self, connection: Connection, request: Message) -> Message:
        """Answer with the age of the copy. Raise NotLeaderError if it is not usable, TokenRefusedError if it
        shows that the token was revoked."""
        self._check_identity(connection.identity)
        reply = await self._handlers[type(request)](connection, request)
        assert isinstance(reply, AgedReply)
        return msgspec.structs.replace(reply, age_s=round(self._copy.age_s, 3))

    def add_cluster_data(self, status: StatusReply, identity: Identity) -> StatusReply:
        """Return the status of this controller with what the copy shows of the cluster."""
        self._check_identity(identity)
        cluster = self._copy.tables.cluster.get("")
        gpus_total, gpus_free = self._node_list.count_total_and_free_gpus()
        return msgspec.structs.replace(
            status,
            cluster_id=cluster.cluster_id if cluster else "",
            nodes=self._node_list.count_by_status(),
            jobs={state: count for state, count in self._jobs.count_by_state().items() if count},
            gpus_total=gpus_total,
            gpus_free=gpus_free,
            has_cluster_data=True,
            age_s=round(self._copy.age_s, 3),
        )

    def _check_identity(self, identity: Identity) -> None:
        self._copy.check_usable()
        check_token_readable(self._copy.tables.tokens, identity.token_id)
        record = self._copy.tables.tokens.get(identity.token_id)
        check_token_not_revoked(identity.token_id, record, now=self._clock.wall_s())

    async def _list_quotas(self, connection: Connection, request: ListQuotas) -> QuotasReply:
        return make_quotas_reply(self._copy.tables, connection.identity)

    async def _list_tokens(self, connection: Connection, request: ListTokens) -> TokensReply:
        records = token_records_after(self._copy.tables.tokens, request.after_token_id)
        tokens, more = truncate_to_reply(records)
        return TokensReply(tokens=tokens, more=more)


class _NoPlanner:
    """Only the leader has a planner: jobs are listed by age, with their stored reasons."""

    def pending_jobs(self) -> list[Wait]:
        return []

    def explain(self, job_id: str) -> PendingJobExplanation | None:
        return None


class _StoredNodes:
    """The nodes as they last registered. Their snapshots are made when they change, not for each request."""

    def __init__(self, tables: LedgerTables) -> None:
        self._tables = tables
        self._snapshots: dict[str, NodeSnapshot] = {}
        self._reset()
        tables.add_after_load_listener(self._reset)
        tables.nodes.add_listener(self._on_node_changed)

    def current_snapshots(self) -> Mapping[str, NodeSnapshot]:
        return self._snapshots

    def _reset(self) -> None:
        self._snapshots = {node_id: _make_snapshot(record) for node_id, record in self._tables.nodes.items()}

    def _on_node_changed(self, node_id: str, before: NodeRecord | None, after: NodeRecord | None) -> None:
        if after is None:
            self._snapshots.pop(node_id, None)
        else:
            self._snapshots[node_id] = _make_snapshot(after)


def _make_snapshot(record: NodeRecord) -> NodeSnapshot:
    info = msgspec.structs.replace(
        record.info,
        status=NodeStatus.SUSPECT,
        status_reason=_NODE_STATUS_REASON,
        last_heartbeat=0.0,
        memory_used_bytes=0,
        gpus=tuple(map(_without_readings, record.info.gpus)),
    )
    return NodeSnapshot(info, record.drain_status, record.has_left)


def _without_readings(gpu: GPUInfo) -> GPUInfo:
    return msgspec.structs.replace(
        gpu,
        memory_used_bytes=0,
        memory_outside_bytes=0,
        utilization_pct=None,
        temperature_c=None,
        power_w=None,
    )
