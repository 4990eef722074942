"""Requests about the cluster: its nodes and its status.

A user sees how much other tenants hold on a node, but not their job IDs and names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from genie.controller.connection import Connection, Handlers
from genie.controller.election import Election, StoreHealth
from genie.controller.jobs.space import JobSpace
from genie.controller.ledger import Ledger, LedgerTables
from genie.controller.nodes.snapshots import NodeSnapshot
from genie.controller.requests.reply_size import truncate_to_reply
from genie.model.allocation import Hold, NodeHolds
from genie.model.messages import GetStatus, ListNodes, NodesReply, NodeView, StatusReply
from genie.model.node import GPUInfo, NodeStatus
from genie.model.tenant import Identity, TokenKind
from genie.scheduler.placement.protocol import NODE_GPUS_MAX
from genie.version import __version__

_QUARANTINED_SHOWN_MAX = 20
_UNUSABLE_GPU_ALARMS_MAX = 5


class NodeSnapshotSource(Protocol):
    def current_snapshots(self) -> Mapping[str, NodeSnapshot]:
        """Snapshots of all registered nodes, by node ID."""
        ...


class NodeList:
    """The nodes as clients see them; nodes that have left the cluster are omitted."""

    def __init__(self, ledger: LedgerTables, snapshots: NodeSnapshotSource) -> None:
        self._ledger = ledger
        self._node_snapshots = snapshots

    def snapshots(self) -> list[NodeSnapshot]:
        nodes = self._node_snapshots.current_snapshots().values()
        return [node for node in nodes if not self._ledger.nodes[node.node_id].has_left]

    def holds_of_node(self, node_id: str) -> NodeHolds:
        return self._ledger.holds.get(node_id) or NodeHolds(node_id=node_id)

    def count_by_status(self) -> dict[str, int]:
        return dict(Counter(str(node.info.status) for node in self.snapshots()))

    def count_total_and_free_gpus(self) -> tuple[int, int]:
        """Count the accelerators of all connected nodes, and those that are free."""
        up = [node for node in self.snapshots() if node.info.status is not NodeStatus.DISCONNECTED]
        total = sum(len(_usable_gpus(node)) for node in up)
        return total, sum(self._count_free_gpus(node) for node in up if not node.blocked_reason)

    def _count_free_gpus(self, node: NodeSnapshot) -> int:
        used = self.holds_of_node(node.node_id)
        return sum(gpu.available and used.gpu_used_milli(gpu.gpu_id) == 0 for gpu in _usable_gpus(node))

    def make_nodes_reply(self, identity: Identity, *, after_node_id: str = "") -> NodesReply:
        """List the nodes with IDs greater than `after_node_id`, as many as fit into one reply."""
        nodes = self._node_snapshots.current_snapshots()
        views = (
            NodeView(
                info=nodes[node_id].info,
                node_holds=_mask_holds(self.holds_of_node(node_id), identity),
                drained=self._ledger.nodes[node_id].drain_status,
            )
            for node_id in sorted(node_id for node_id in nodes if node_id > after_node_id)
            if not self._ledger.nodes[node_id].has_left
        )
        fitting, more = truncate_to_reply(views)
        return NodesReply(nodes=fitting, more=more)


class NodeRequests:
    def __init__(self, nodes: NodeList, *, check_readable: Callable[[], None]) -> None:
        self._node_list = nodes
        self._check_readable = check_readable

    def handlers(self) -> Handlers:
        return {ListNodes: self.list_nodes}

    async def list_nodes(self, connection: Connection, request: ListNodes) -> NodesReply:
        self._check_readable()
        return self._node_list.make_nodes_reply(connection.identity, after_node_id=request.after_node_id)


class StatusRequests:
    """Handles GetStatus on every controller, also on one that does not lead.

    `count_jobs` returns the number of jobs by state, `count_clients` the number of clients with a valid
    lease, `policy_fault` why a custom policy is disabled, `alarms` what needs attention.
    """

    def __init__(
        self,
        ledger: Ledger,
        nodes: NodeList,
        election: Election,
        health: StoreHealth,
        *,
        count_jobs: Callable[[], dict[str, int]],
        count_clients: Callable[[], int],
        policy_fault: Callable[[], str],
        policy_name: str,
        store_name: str,
        store_members: Callable[[], tuple[str, ...]],
        started_at: float,
        alarms: Callable[[], list[str]],
        space: JobSpace,
    ) -> None:
        self._ledger = ledger
        self._node_list = nodes
        self._election = election
        self._store_health = health
        self._count_jobs = count_jobs
        self._count_clients = count_clients
        self._get_policy_fault = policy_fault
        self._policy_name = policy_name
        self._store_name = store_name
        self._get_store_members = store_members
        self._started_at = started_at
        self._get_alarms = alarms
        self._job_space = space

    def handlers(self) -> Handlers:
        return {GetStatus: self.get_status}

    async def get_status(self, connection: Connection, request: GetStatus) -> StatusReply:
        nodes, leader = self._node_list.snapshots(), self._election.leader
        up = [node for node in nodes if node.info.status is not NodeStatus.DISCONNECTED]
        gpus_total, gpus_free = self._node_list.count_total_and_free_gpus()
        record, is_owner = self._ledger.cluster.get(""), connection.identity.kind is TokenKind.OWNER
        quarantined = self._ledger.quarantined
        return StatusReply(
            cluster_id=record.cluster_id if record else "",
            version=__version__,
            leading=self._ledger.is_up_to_date,
            leader=leader.address if leader else "",
            store=self._store_name,
            store_members=tuple(sorted(self._get_store_members())) if is_owner else (),
            store_ok=self._store_health.is_ok,
            started_at=self._started_at,
            nodes=self._node_list.count_by_status(),
            jobs={state: count for state, count in self._count_jobs().items() if count},
            gpus_total=gpus_total,
            gpus_free=gpus_free,
            clients=self._count_clients(),
            policy=self._policy_name,
            policy_fault=_visible_policy_fault(self._get_policy_fault(), connection.identity),
            alarms=(*self._get_alarms(), *_unusable_gpu_alarms(up)) if is_owner else (),
            quarantined=tuple(islice(quarantined.values(), _QUARANTINED_SHOWN_MAX)) if is_owner else (),
            quarantined_count=len(quarantined),
            store_used_bytes=self._job_space.used_bytes if is_owner else 0,
            store_bytes_max=self._job_space.store_bytes_max if is_owner else 0,
            store_reason=self._store_health.failure_reason if is_owner else "",
        )


def _usable_gpus(node: NodeSnapshot) -> tuple[GPUInfo, ...]:
    """The accelerators of a node that jobs can use."""
    return node.info.gpus[:NODE_GPUS_MAX]


def _unusable_gpu_alarms(nodes: Sequence[NodeSnapshot]) -> list[str]:
    larger = [node for node in nodes if len(node.info.gpus) > NODE_GPUS_MAX]
    return [
        f"node {node.node_id} has {len(node.info.gpus)} accelerators; jobs can use only the first "
        f"{NODE_GPUS_MAX}"
        for node in larger[:_UNUSABLE_GPU_ALARMS_MAX]
    ]


def _mask_holds(node_holds: NodeHolds, identity: Identity) -> NodeHolds:
    """Remove job IDs and tenants from the holds of other tenants, unless the identity is the owner."""
    if identity.kind is TokenKind.OWNER:
        return node_holds
    holds = [
        hold if hold.tenant == identity.tenant else _without_job_and_tenant(hold) for hold in node_holds.holds
    ]
    return msgspec.structs.replace(node_holds, holds=tuple(holds))


def _without_job_and_tenant(hold: Hold) -> Hold:
    return msgspec.structs.replace(hold, job_id="", tenant="", epoch=0)


def _visible_policy_fault(fault: str, identity: Identity) -> str:
    """Users see only that the policy is disabled: the message may name jobs of other tenants."""
    return fault if identity.kind is TokenKind.OWNER else fault and "the policy is disabled"
