"""Checks drains in a simulated cluster: restartable jobs leave draining nodes, and only those.

Observes the store, so it does not depend on the memory of any controller. A job on a draining node must leave
it within a bounded time in which there was a leader and the node was running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from genie.controller.rows import NodeRecord
from genie.controller.store import Delete, Put
from genie.model.job import Job, JobState, StopReason
from genie.sim.cluster import SimCluster
from genie.sim.invariants import InvariantChecker

_NODE_KEY_PREFIX, _JOB_KEY_PREFIX = "node/", "job/"
_CHECK_INTERVAL_S = 0.5
_STOP_S_MAX = 6.0
"""From the drain, or the start of a job, to the end of the job, besides its grace period: a tick, an order
that a heartbeat repeats, and a reconnection of the node to a new leader."""
_MOVES_AFTER_UNDRAIN_S_MAX = 2.0
"""A tick that has begun before may still stop jobs."""


class DrainChecker:
    """Register `on_store_commit` with the store, before that of `checker`, whose rows are then the previous
    ones, and run `check_periodically` concurrently with the cluster."""

    def __init__(self, cluster: SimCluster, checker: InvariantChecker) -> None:
        self._cluster = cluster
        self._checker = checker
        self._emptying_nodes: set[str] = set()
        self._undrained_at_s: dict[str, float] = {}
        self._time_on_draining_node_s: dict[tuple[str, int, str], float] = {}
        """By job, epoch and node: how long it could have been stopped."""

    def on_store_commit(self, operations: Sequence[Put | Delete]) -> None:
        for operation in operations:
            prefix, _, row_id = operation.key.partition("/")
            value = operation.value if isinstance(operation, Put) else None
            if prefix + "/" == _NODE_KEY_PREFIX and value is not None:
                self._on_node_changed(row_id, msgspec.json.decode(value, type=NodeRecord))
            elif prefix + "/" == _JOB_KEY_PREFIX and value is not None:
                self._check_move(msgspec.json.decode(value, type=Job))

    async def check_periodically(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            if self._cluster.leader is None:
                continue
            for job in self._checker.current_jobs.values():
                if job.state is JobState.RUNNING and job.spec.is_restartable:
                    self._check_job_leaves(job)

    def _on_node_changed(self, node_id: str, record: NodeRecord) -> None:
        if record.drain_status and record.moves_jobs:
            self._emptying_nodes.add(node_id)
        elif node_id in self._emptying_nodes:
            self._emptying_nodes.discard(node_id)
            self._undrained_at_s[node_id] = self._cluster.world.now_s

    def _check_move(self, job: Job) -> None:
        before = self._checker.current_jobs.get(job.job_id)
        if not _is_being_moved(job) or (before is not None and _is_being_moved(before)):
            return
        nodes = {placement.node_id for placement in job.placements}
        oldest_undrain_s = self._cluster.world.now_s - _MOVES_AFTER_UNDRAIN_S_MAX
        if not any(
            node in self._emptying_nodes or self._undrained_at_s.get(node, -1.0) > oldest_undrain_s
            for node in nodes
        ):
            self._cluster.machines.report_violation(f"{job.job_id} is moved, but none of {nodes} drains")

    def _check_job_leaves(self, job: Job) -> None:
        nodes = {placement.node_id for placement in job.placements if placement.outcome is None}
        for node_id in filter(self._can_stop_jobs, sorted(nodes)):
            key = (job.job_id, job.epoch, node_id)
            time_s = self._time_on_draining_node_s.get(key, 0.0) + _CHECK_INTERVAL_S
            self._time_on_draining_node_s[key] = time_s
            if time_s > _STOP_S_MAX + job.spec.constraints.grace_s:
                self._cluster.machines.report_violation(
                    f"{job.job_id} is still on the draining node {node_id}: {job.reason}"
                )

    def _can_stop_jobs(self, node_id: str) -> bool:
        """Whether the node drains, and its agent runs."""
        if node_id not in self._emptying_nodes:
            return False
        host = next(host for host in self._cluster.node_hosts if self._cluster.node_id(host) == node_id)
        world = self._cluster.world
        return self._cluster.is_up(host) and not world.is_paused(host) and not world.is_frozen(host)


def _is_being_moved(job: Job) -> bool:
    """Whether the job is stopped because one of its nodes drains; it is queued again."""
    return job.spec.is_restartable and job.stop is StopReason.PREEMPT and "moving from " in job.reason
