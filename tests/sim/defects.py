"""Defects to plant into the code under simulation. Each removes a safeguard, and names a seed that needs it.

The seed passes without the defect and fails with it (test_planted.py). If a change of the code or of the
simulation moves the events of a run so that its seed no longer needs the safeguard, another one is found by
`python -m tests.sim.defects "NAME" --seeds 40`. If none is found, the simulation no longer sees the defect.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from genie.agent import joining
from genie.agent.heartbeats import NodeLease
from genie.agent.jobs import LocalJob, NodeJobs
from genie.agent.launcher import LaunchPlan
from genie.agent.leader_connection import LeaderConnection
from genie.cluster.locking.lock_lease import LockLease
from genie.controller.jobs import lifecycle
from genie.controller.jobs.changes import JobChange
from genie.controller.jobs.index import JobIndex
from genie.controller.jobs.lifecycle import JobLifecycle
from genie.controller.jobs.space import JobSpace
from genie.controller.jobs.submission import JobSubmission
from genie.controller.ledger import Ledger, Transaction
from genie.controller.locks.lock_table import LockTable
from genie.controller.nodes.agents import Agents
from genie.controller.nodes.drains import NodeDrains
from genie.controller.nodes.membership import Membership
from genie.controller.request_limits import RequestLimits, TokenUsage
from genie.controller.requests.open_waits import OpenWaits
from genie.controller.terms.leadership import Leadership
from genie.errors import StoreFullError, TokenRefusedError
from genie.hardware.host import DiskSpace
from genie.model.allocation import NodeHolds
from genie.model.job import FINAL_STATES, Job, JobState, parse_worker_name
from genie.model.lock import LockRecord
from genie.model.member import MemberState
from genie.model.messages import ExitReport, Message
from genie.processes import files
from genie.runtime import wire
from genie.runtime.connection_limits import ConnectionLimits
from genie.runtime.rpc import Peer
from genie.sim.disk import SimDisk
from genie.sim.processes import SimLauncher, make_exit_report
from genie.tenancy import access
from tests.sim.adoption_defects import ADOPTION_DEFECTS
from tests.sim.defect import Defect
from tests.sim.failover_defects import FAILOVER_DEFECTS
from tests.sim.run import temporary_directory
from tests.sim.scenario import run_seed

# -- rows and steps ---------------------------------------------------------------------------------


def _plant_failing_exits(patch: pytest.MonkeyPatch) -> None:
    """One exit that cannot be stored fails the whole heartbeat."""

    async def record_exits(
        self: JobLifecycle, node_id: str, reports: Sequence[ExitReport]
    ) -> list[ExitReport]:
        workers = ((report, *parse_worker_name(report.job_id)) for report in reports)
        exits = (
            JobChange(job_id, partial(self._stage_exit, node_id, report, rank))
            for report, job_id, rank in workers
        )
        builds = (partial(change.stage_change, self._ledger.jobs) for change in exits)
        for outcome in await self._ledger.write_each(builds):
            if isinstance(outcome, Exception):
                raise outcome
        return list(reports)

    patch.setattr(JobLifecycle, "record_exits", record_exits)


def _plant_rows_that_cannot_be_ended(patch: pytest.MonkeyPatch) -> None:
    """A job whose row has become too large keeps its accelerators."""
    patch.setattr("genie.controller.jobs.changes.shrink_oversized_job", lambda job: job)


def _plant_forgotten_requests(patch: pytest.MonkeyPatch) -> None:
    """A repeated submission creates another job."""
    patch.setattr(JobSubmission, "find_by_request_id", lambda self, tenant, request_id: None)


def _plant_drain_forgotten_by_the_next_leader(patch: pytest.MonkeyPatch) -> None:
    """Only the controller that handled the request moves the jobs of the node."""
    handled_by: dict[str, NodeDrains] = {}
    real_set_drain, real_jobs_on_node = NodeDrains._set_drain, NodeDrains._jobs_on_node

    async def set_drain(self: NodeDrains, node_id: str, *args: Any, **options: Any) -> None:
        await real_set_drain(self, node_id, *args, **options)
        handled_by[node_id] = self

    def jobs_on_node(self: NodeDrains, node_id: str) -> Iterator[Job]:
        return real_jobs_on_node(self, node_id) if handled_by.get(node_id) is self else iter(())

    patch.setattr(NodeDrains, "_set_drain", set_drain)
    patch.setattr(NodeDrains, "_jobs_on_node", jobs_on_node)


# -- limits -----------------------------------------------------------------------------------------


def _plant_blocking_reader(patch: pytest.MonkeyPatch) -> None:
    """Replies wait for requests, closing a connection does, too, and waits are unlimited."""
    blocked: set[Peer] = set()

    async def read(self: Peer, tasks: asyncio.TaskGroup) -> None:
        while True:
            frame = await self.channel.receive()
            if frame.kind is wire.FrameKind.REQUEST:
                while self._requests_in_flight >= 128:
                    blocked.add(self)
                    await asyncio.sleep(0.05)
                self._requests_in_flight += 1
                tasks.create_task(self._handle_and_reply(frame))
            elif (future := self._pending_calls.get(frame.call_id)) is not None and not future.done():
                future.set_result(frame)

    real_run = Peer.run

    async def run(self: Peer) -> None:
        try:
            await real_run(self)
        finally:
            if self in blocked:
                await asyncio.sleep(10.0)  # closing waits for the requests in flight

    patch.setattr(Peer, "_read_frames", read)
    patch.setattr(Peer, "run", run)
    patch.setattr(OpenWaits, "_count_while_open_if_allowed", lambda self, limits: nullcontext(True))


def _plant_unlimited_requests(patch: pytest.MonkeyPatch) -> None:
    async def run_list(
        self: RequestLimits, usage: TokenUsage, request: Message, handle: Callable[[], Awaitable[Message]]
    ) -> Message:
        return await handle()

    patch.setattr(RequestLimits, "check_and_charge_request", lambda self, usage, request, **options: None)
    patch.setattr(RequestLimits, "run_list_request", run_list)


def _plant_unlimited_space(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobSpace, "check_submission", lambda self, tenant: None)


def _plant_unfair_history(patch: pytest.MonkeyPatch) -> None:
    """The oldest finished jobs of all tenants are deleted."""

    def largest_first(
        index: JobIndex, usage: object, cost: object, skipped: Collection[str]
    ) -> Iterator[Job]:
        return (job for job in index.jobs_oldest_first(FINAL_STATES) if job.job_id not in skipped)

    patch.setattr("genie.controller.jobs.history._oldest_jobs_of_largest_tenants", largest_first)


def _plant_unpinned_blobs(patch: pytest.MonkeyPatch) -> None:
    """A tenant can evict the new blobs of others."""
    patch.setattr("genie.controller.blobs.storage.BLOB_PINNED_AFTER_USE_S", 0.0)


def _plant_unlimited_connections(patch: pytest.MonkeyPatch) -> None:
    """One tenant can use all connections of users."""
    patch.setattr(ConnectionLimits, "tenant_connections_max", property(lambda self: self.connections_max))


def _plant_impatient_confirmations(patch: pytest.MonkeyPatch) -> None:
    """A worker asks again and again whether the others are ready."""
    patch.setattr("genie.agent.jobs.CONFIRM_WAIT_FOR_WORKERS_S", 0.0)
    patch.setattr("genie.agent.jobs.LEADER_CALL_BACKOFF_S_MAX", 0.2)


def _plant_retries_without_backoff(patch: pytest.MonkeyPatch) -> None:
    """A worker repeats its request at a constant rate while the store is unavailable; the controller names no
    retry time."""
    patch.setattr("genie.agent.jobs.LEADER_CALL_BACKOFF_S_MAX", 0.2)
    patch.setattr("genie.controller.requests.service.STORE_RETRY_AFTER_S", 0.0)


# -- terms ------------------------------------------------------------------------------------------


def _plant_lease_not_renewed_while_loading(patch: pytest.MonkeyPatch) -> None:
    async def lead(self: Leadership) -> bool:
        self._has_term_begun = False
        if not await self._try_begin_term():
            await self._election.resign()
            return False
        patched = partial(_return_true)
        self._try_begin_term = patched  # type: ignore[method-assign]
        try:
            async with asyncio.TaskGroup() as group:
                term = group.create_task(self._run_term())
                await self._election.hold_leadership_until_term_ends()
                term.cancel()
        finally:
            del self._try_begin_term
        return self._has_term_begun

    patch.setattr(Leadership, "_lead_one_term", lead)


def _plant_outdated_tables(patch: pytest.MonkeyPatch) -> None:
    """A new leader answers from the tables of its previous term while it loads."""

    async def load(self: Ledger) -> None:
        async with self._store_lock:
            await self._load_tables_locked()

    patch.setattr(Ledger, "load_tables", load)
    patch.setattr(Ledger, "mark_outdated", lambda self: None)
    patch.setattr(
        Ledger, "is_up_to_date", property(lambda self: self.is_loaded and self._election.is_leading)
    )


def _plant_dead_man_time_below_discovery(patch: pytest.MonkeyPatch) -> None:
    """Jobs end after 6.8 s without a leader, before their agent can have found the next one."""
    patch.setattr("genie.agent.heartbeats.LEASE_TTL_SHARE", 0.35)


def _plant_standby_that_waits_for_its_store(patch: pytest.MonkeyPatch) -> None:
    """A standby answers Hello after the timeout of its store, when the agent has given up."""
    patch.setattr("genie.controller.tokens.TOKEN_READ_TIMEOUT_S", 5.0)


# -- outages of nodes -------------------------------------------------------------------------------


def _plant_early_reclaim(patch: pytest.MonkeyPatch) -> None:
    """The accelerators of a job without a dead-man timer are reclaimed while it may still run."""
    patch.setattr(NodeHolds, "reclaimable_holds", property(lambda self: self.holds))


def _plant_missing_dead_man_timer(patch: pytest.MonkeyPatch) -> None:
    """Restartable jobs keep running on an isolated node, as the others do."""
    real = SimLauncher.start_job

    async def start_job(self: SimLauncher, plan: LaunchPlan, *, deadman_expiry_s: float) -> None:
        await real(self, replace(plan, has_deadman_timer=False), deadman_expiry_s=deadman_expiry_s)

    patch.setattr(SimLauncher, "start_job", start_job)
    patch.setattr(LocalJob, "ends_with_lease", property(lambda self: False))


def _plant_dead_man_timer_for_all_jobs(patch: pytest.MonkeyPatch) -> None:
    """An outage ends jobs that cannot be restarted."""
    patch.setattr(LocalJob, "ends_with_lease", property(lambda self: True))


def _plant_jobs_ended_without_a_leader(patch: pytest.MonkeyPatch) -> None:
    """Restartable jobs end although every controller has replied that it does not lead."""
    patch.setattr(NodeLease, "extend_without_leader", lambda self, *, requested_at_s: None)


def _plant_lost_jobs_that_are_not_queued_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle, "can_be_requeued_after_end", lambda job, placements: False)


def _plant_removed_node_that_keeps_its_jobs(patch: pytest.MonkeyPatch) -> None:
    """A node that was removed tries to connect forever, and its jobs keep running."""
    patch.setattr(access, "NodeRemovedError", TokenRefusedError)


def _plant_wall_clock_limits(patch: pytest.MonkeyPatch) -> None:
    def exceeding(self: Agents) -> list[Job]:
        now = self._clock.wall_s()
        return [job for job in self._jobs.jobs_in_states(JobState.RUNNING) if _is_over_time_limit(job, now)]

    patch.setattr(Agents, "jobs_exceeding_time_limit", exceeding)


# -- locks ------------------------------------------------------------------------------------------


def _plant_early_expiry_after_a_leader_change(patch: pytest.MonkeyPatch) -> None:
    """A new leader knows no renewals, and treats every lease as expired."""
    real = LockTable._lease_deadline_s

    def deadline(self: LockTable, row: LockRecord) -> float:
        return real(self, row) if row.fencing_token in self._lease_deadline_s_by_token else 0.0

    patch.setattr(LockTable, "_lease_deadline_s", deadline)


def _plant_tokens_of_one_term(patch: pytest.MonkeyPatch) -> None:
    """Each leader counts the acquisitions from the start."""
    counts: dict[LockTable, int] = {}

    def next_token(self: LockTable, txn: Transaction) -> int:
        counts[self] = counts.get(self, 0) + 1
        return counts[self]

    patch.setattr(LockTable, "_next_fencing_token", next_token)


def _plant_lease_that_counts_from_the_reply(patch: pytest.MonkeyPatch) -> None:
    """A holder counts its whole lease from the reply to its last renewal."""

    def set_lease(self: LockLease, sent_s: float) -> None:
        self._deadline_s = self._clock.monotonic_s() + self.ttl_s

    patch.setattr(LockLease, "_set_lease_from", set_lease)


# -- disks and processes ----------------------------------------------------------------------------


def _plant_disk_on_event_loop(patch: pytest.MonkeyPatch) -> None:
    """The agent waits for its disk, and does nothing else meanwhile."""
    real = SimDisk.__call__

    async def call(self: SimDisk, work: Callable[[], Any], *, writes: bool = False) -> Any:
        if self.access_delay_s:
            self._world.pause_host(self._host, self.access_delay_s)
        return await real(self, work, writes=writes)

    patch.setattr(SimDisk, "__call__", call)


def _plant_writes_that_are_not_durable(patch: pytest.MonkeyPatch) -> None:
    """Except those of the identity of a node."""
    real_write, real_write_identity = files.write_private, joining.write_identity

    def write_identity(*arguments: Any, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as durable:
            durable.setattr(files, "write_private", real_write)
            real_write_identity(*arguments, **options)

    def write(path: Path, data: bytes) -> None:
        files.make_private_directory(path.parent)
        try:
            path.write_bytes(data)
        except OSError as error:
            raise StoreFullError(f"cannot write {path}: {os.strerror(error.errno or errno.EIO)}") from error

    patch.setattr(files, "write_private", write)
    patch.setattr(joining, "write_identity", write_identity)


def _plant_identity_that_is_not_durable(patch: pytest.MonkeyPatch) -> None:
    """A node that has joined again does not synchronize the files of its identity."""
    real = joining.write_identity

    def write(*arguments: Any, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as unsynchronized:
            unsynchronized.setattr(os, "fsync", lambda descriptor: None)
            real(*arguments, **options)

    patch.setattr(joining, "write_identity", write)


def _plant_exits_of_lingering_jobs(patch: pytest.MonkeyPatch) -> None:
    """A job ends with its command, although one of its processes still uses the accelerator."""

    def exits(self: SimLauncher) -> list[ExitReport]:
        ended = [
            one
            for one in self._process_by_job.values()
            if not one.is_alive or one.survives_sigkill_until_s is not None
        ]
        for process in ended:
            del self._process_by_job[process.job_id]
        return [make_exit_report(process, now_s=self._world.now_s) for process in ended]

    async def wait_for_exit_report(self: SimLauncher) -> None:
        await asyncio.sleep(0.2)

    patch.setattr(SimLauncher, "take_exit_reports", exits)
    patch.setattr(SimLauncher, "wait_for_exit_report", wait_for_exit_report)
    patch.setattr(NodeJobs, "_why_accelerators_not_free", lambda self, launch: "")


def _plant_full_disk_as_fault_of_the_job(patch: pytest.MonkeyPatch) -> None:
    """A node with a full disk gets launches, and rejects them as if the job were the reason."""
    patch.setattr("genie.agent.jobs.is_caused_by_node", lambda error: False)
    patch.setattr(
        SimDisk, "measure_space", lambda self, path: DiskSpace(total_bytes=1 << 40, free_bytes=1 << 39)
    )


def _plant_strict_replies(patch: pytest.MonkeyPatch) -> None:
    """A reply of a later release is rejected because of fields that this one does not know."""
    patch.setattr(wire, "build_without_unknown_parts", lambda kind, value: None)


# -- gossip -------------------------------------------------------------------------------------------


def _plant_trust_in_controllers_of_gossip(patch: pytest.MonkeyPatch) -> None:
    """Controllers that only gossip knows must respond before the absence of a leader extends the lease."""

    def set_controllers(self: LeaderConnection, addresses: Iterable[str]) -> None:
        self._add_controllers(tuple(addresses))

    patch.setattr(LeaderConnection, "set_controllers_known_by_gossip", set_controllers)


def _plant_reclaim_of_nodes_that_gossip_reports_dead(patch: pytest.MonkeyPatch) -> None:
    reclaimable_in_s = Membership.reclaimable_in_s

    def without_waiting(self: Membership, node_id: str, now_s: float, *, deadman_timeout_s: float) -> float:
        if self._get_reported_state(node_id) is MemberState.DEAD:
            return 0.0
        return reclaimable_in_s(self, node_id, now_s, deadman_timeout_s=deadman_timeout_s)

    patch.setattr(Membership, "reclaimable_in_s", without_waiting)


DEFECTS = {
    "failing exits": Defect(
        _plant_failing_exits, "hostile", ("store_oversized_job",), (0, 1), "have not ended"
    ),
    "rows that cannot be ended": Defect(
        _plant_rows_that_cannot_be_ended, "hostile", ("store_oversized_job",), (0,), "held without a process"
    ),
    "forgotten requests": Defect(_plant_forgotten_requests, "store", ("lose_reply",), (1,), "submissions"),
    "drain forgotten by the next leader": Defect(
        _plant_drain_forgotten_by_the_next_leader,
        "drain",
        ("drain_paused_node",),
        (4, 16),
        "is still on the draining node",
    ),
    "forgotten requests, duplicated frames": Defect(
        _plant_forgotten_requests, "network", ("duplicate",), (0, 3), "submissions"
    ),
    "blocking reader": Defect(
        _plant_blocking_reader, "hostile", ("flood_log_waits",), (1, 5), "without a fault"
    ),
    "unlimited requests": Defect(
        _plant_unlimited_requests, "hostile", ("flood_requests",), (18, 32), "without a fault"
    ),
    "unlimited space": Defect(_plant_unlimited_space, "hostile", ("fill_store",), (0,), "the store is full"),
    "unfair history": Defect(_plant_unfair_history, "hostile", ("fill_store",), (0,), "was deleted"),
    "unpinned blobs": Defect(_plant_unpinned_blobs, "hostile", ("upload_blobs",), (0,), "was evicted"),
    "unlimited connections": Defect(
        _plant_unlimited_connections, "hostile", ("flood_connections",), (0,), "a client waited"
    ),
    "impatient confirmations": Defect(
        _plant_impatient_confirmations, "disk", ("slow_disk",), (11, 2), "requests in"
    ),
    "retries without backoff": Defect(
        _plant_retries_without_backoff, "disk", ("slow_disk", "lose_store"), (37, 89, 95), "requests in"
    ),
    "lease not renewed while loading": Defect(
        _plant_lease_not_renewed_while_loading, "disk", ("slow_load",), (7, 1), "no controller has led"
    ),
    "outdated tables": Defect(_plant_outdated_tables, "store", ("fail_back",), (0, 2), "has disappeared"),
    "dead-man time below discovery": Defect(
        _plant_dead_man_time_below_discovery,
        "power",
        ("power_leader_and_store",),
        (0, 2),
        "without a fault",
    ),
    "standby that waits for its store": Defect(
        _plant_standby_that_waits_for_its_store, "power", ("hang_store",), (1, 3), "without a fault"
    ),
    "early reclaim": Defect(_plant_early_reclaim, "outage", ("isolate_node",), (0, 1), "without a fault"),
    "missing dead-man timer": Defect(
        _plant_missing_dead_man_timer, "outage", ("isolate_node",), (0, 1), "of another epoch"
    ),
    "dead-man timer for all jobs": Defect(
        _plant_dead_man_timer_for_all_jobs, "outage", ("isolate_node",), (2, 0), "without a fault"
    ),
    "jobs ended without a leader": Defect(
        _plant_jobs_ended_without_a_leader, "power", ("hang_store",), (1, 3), "without a fault"
    ),
    "lost jobs that are not queued again": Defect(
        _plant_lost_jobs_that_are_not_queued_again,
        "outage",
        ("isolate_node",),
        (0, 1),
        "was not queued again",
    ),
    "removed node that keeps its jobs": Defect(
        _plant_removed_node_that_keeps_its_jobs, "outage", ("remove_node",), (5, 2), "of a removed node"
    ),
    "early expiry after a leader change": Defect(
        _plant_early_expiry_after_a_leader_change, "locks", ("restart_controller",), (2, 3), "was taken from"
    ),
    "tokens of one term": Defect(
        _plant_tokens_of_one_term, "locks", ("restart_controller",), (0,), "was granted with token"
    ),
    "lease that counts from the reply": Defect(
        _plant_lease_that_counts_from_the_reply, "locks", ("pause_controller",), (15, 8, 19), "was taken from"
    ),
    "wall clock limits": Defect(
        _plant_wall_clock_limits, "time", ("step_controller",), (0,), "exceeded its time limit"
    ),
    "disk on event loop": Defect(
        _plant_disk_on_event_loop, "disk", ("slow_disk",), (10, 9), "without a fault"
    ),
    "full disk as fault of the job": Defect(
        _plant_full_disk_as_fault_of_the_job, "disk", ("full_disk",), (1, 2), "without a fault"
    ),
    "writes that are not durable": Defect(
        _plant_writes_that_are_not_durable, "disk", ("torn_write",), (0,), "could not read"
    ),
    "identity that is not durable": Defect(
        _plant_identity_that_is_not_durable,
        "outage",
        ("remove_node", "power_node"),
        (0, 1),
        "is not a Genie token",
    ),
    "controllers of gossip extend the lease": Defect(
        _plant_trust_in_controllers_of_gossip, "gossip", ("hang_store",), (0, 4), "without a fault"
    ),
    "gossip frees accelerators": Defect(
        _plant_reclaim_of_nodes_that_gossip_reports_dead, "gossip", ("hang_store",), (0,), "without a fault"
    ),
    "exits of lingering jobs": Defect(
        _plant_exits_of_lingering_jobs, "hostile", ("run_unkillable_job",), (0,), "overallocated"
    ),
    "strict replies": Defect(_plant_strict_replies, "skew", ("upgrade_controller",), (0, 5), "unknown field"),
    **ADOPTION_DEFECTS,
    **FAILOVER_DEFECTS,
}


def find_violations(defect: Defect, seed: int) -> list[str]:
    """Run a seed with the defect, with its faults only."""
    with pytest.MonkeyPatch.context() as patch:
        defect.plant(patch)
        return run_seed_with_faults(seed, defect.kind, defect.faults)


def run_seed_with_faults(seed: int, kind: str, faults: tuple[str, ...]) -> list[str]:
    """Run a seed with these faults only; return the violations."""
    with temporary_directory() as directory:
        try:
            return run_seed(seed, kind, directory, faults=faults)
        except (Exception, BaseExceptionGroup) as error:  # a defect may end a controller or an agent
            return [repr(error)]


async def _return_true() -> bool:
    return True


def _is_over_time_limit(job: Job, now: float) -> bool:
    limit_s = job.spec.constraints.time_limit_s
    return limit_s is not None and job.started_at is not None and now > job.started_at + limit_s


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim.defects", description="Find seeds that detect a planted defect."
    )
    parser.add_argument("name", choices=DEFECTS, help="name of the defect")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="number of seeds (default: 20)")
    options = parser.parse_args()
    logging.getLogger("genie").setLevel(logging.CRITICAL)
    defect, detecting = DEFECTS[options.name], []
    for seed in range(options.seeds):
        if clean := run_seed_with_faults(seed, defect.kind, defect.faults):
            print(f"seed {seed} fails without the defect: {clean[0][:200]}")
            continue
        found = find_violations(defect, seed)
        if any(defect.violation_text in violation for violation in found):
            detecting.append(seed)
        elif found:
            print(f"seed {seed} has other violations: {found[0][:200]}")
    print(f"{len(detecting)} of {options.seeds} seeds detect it: {detecting}")


if __name__ == "__main__":
    main()
