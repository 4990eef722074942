"""The short scenario of the seeds: an innocent tenant runs jobs, while faults of one kind are injected.

`run_seed` runs one seed and returns the violations of all invariants (genie/sim/invariants.py); the kind
selects the faults. In the kind `hostile` nothing fails; another tenant is hostile (faults/hostile.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from genie.agent.journal import Journal
from genie.errors import GenieError, JobNotFoundError, JobRefusedError
from genie.model.job import JobSpec, PlacementConstraints, Resources
from genie.model.messages import GetJob, PutBlob, StatBlob
from genie.runtime.connection_limits import ConnectionLimits
from genie.sim import loop
from genie.sim.cluster import CONTROLLER_CONFIG, SimCluster
from genie.sim.drain_checker import DrainChecker
from genie.sim.faults import fault_injector, hostile
from genie.sim.faults.restores import RestoreChecker
from genie.sim.gossip import GossipMedium
from genie.sim.invariants import (
    InnocentTenantChecker,
    InvariantChecker,
    LeadershipChecker,
    NodeLossChecker,
    RequestRateChecker,
)
from genie.sim.locks import LockInvariantChecker, SimLockClient
from genie.sim.world import CpuCost
from tests.sim.lying_gossip import report_lies_periodically

_Reply = TypeVar("_Reply")

INNOCENT_TENANT = "blue"
JOB_COUNT = 10
NODES, GPUS = 2, 2
FAULT_INJECTION_S, FAULT_DURATION_S_MAX = 20.0, 10.0
SCENARIO_S_MAX = 250.0
"""The jobs take 1 to 10 s each on four accelerators, after 20 s of faults; a closed node (up to 60 s) and the
backoff of a job (up to 60 s) can delay them."""
_STORE_BYTES_MAX = 4 << 20
"""Small enough that a hostile tenant can try to fill it with rows below 256 KiB, within 20 s."""
_STORE_USED_SHARE_MAX = 0.95
"""Submissions end at 0.7; a quarter is reserved for the controllers' own writes."""
_BLOBS_BYTES_MAX = 400_000
_INNOCENT_WORKDIR = b"working directory of the innocent tenant"
_SHORT_NODE_TTL_S = 10.0
"""Most kinds use a short time to live, which jobs survive less easily."""
_JOB_READ_INTERVAL_S = 1.0
_FAULTS_REMOVING_CAPACITY = ("change_gpus", "quota", "remove_node")
"""Prefixes of the kinds of faults that leave too few accelerators for some jobs."""
_REPLY_TIME_S_MAX = 10.0
"""Maximum time of a request, with its retries, while nothing fails: a timeout (5 s) and a second attempt."""
_JOB_GRACE_S = 3.0
_JOB_TIME_LIMIT_S = 3000.0
"""Longer than any run, and shorter than a step of the clock."""
_CONNECTION_LIMITS = ConnectionLimits.for_open_file_limit(576)
"""320 connections: a hostile tenant can reach this limit within 20 s."""
_SCENARIO_CONTROLLER_CONFIG = replace(CONTROLLER_CONFIG, blobs_bytes_max=_BLOBS_BYTES_MAX)
_CONTROLLER_CPU_COST = CpuCost(cpu_s_per_received_frame=0.0001, cpu_s_per_sent_byte=0.00000008)
"""A small request costs client and controller together 57 us (`python -m tests.sim.measure_cpu`, 2 cores,
commit ff0e4d4); 100 us also cover TLS or a slower machine. Encoding costs 1 ns/byte; 80 ns/byte is a link of
100 Mbit/s, on which replies to nodes and to clients queue behind each other."""


@dataclass(frozen=True)
class ScenarioKind:
    faults: tuple[str, ...]
    controllers: int = 1
    nodes: int = NODES
    mean_fault_interval_s: float = 2.5
    node_ttl_s: float = _SHORT_NODE_TTL_S
    fault_injection_s: float = FAULT_INJECTION_S
    job_duration_s_max: float = 10.0
    fault_duration_s_max: float = FAULT_DURATION_S_MAX
    restartable_share: float = 0.5
    """Fraction of the innocent tenant's jobs that are restartable."""
    jobs: int = JOB_COUNT
    lock_clients: int = 0
    scenario_s_max: float = SCENARIO_S_MAX
    has_lying_gossip: bool = False


SCENARIO_KINDS = {
    "network": ScenarioKind(fault_injector.NETWORK_FAULTS, controllers=2),
    "disk": ScenarioKind(fault_injector.DISK_FAULTS),
    "time": ScenarioKind(fault_injector.TIME_FAULTS, controllers=2),
    "store": ScenarioKind(fault_injector.STORE_FAULTS, controllers=2),
    "power": ScenarioKind(
        fault_injector.POWER_FAULTS,
        controllers=3,
        node_ttl_s=CONTROLLER_CONFIG.node_ttl_s,
        fault_injection_s=60.0,
        job_duration_s_max=40.0,
    ),
    "outage": ScenarioKind(
        fault_injector.OUTAGE_FAULTS,
        controllers=2,
        nodes=3,
        mean_fault_interval_s=8.0,
        fault_injection_s=50.0,
        job_duration_s_max=40.0,
    ),
    "recovery": ScenarioKind(
        tuple(fault_injector.RECOVERY_FAULTS),
        controllers=3,
        mean_fault_interval_s=8.0,
        node_ttl_s=CONTROLLER_CONFIG.node_ttl_s,
        fault_injection_s=60.0,
        job_duration_s_max=40.0,
        scenario_s_max=2 * SCENARIO_S_MAX,  # all jobs may start again after the faults
    ),
    "drain": ScenarioKind(
        fault_injector.DRAIN_FAULTS,
        controllers=2,
        node_ttl_s=CONTROLLER_CONFIG.node_ttl_s,
        fault_injection_s=60.0,
        job_duration_s_max=30.0,
        fault_duration_s_max=20.0,
        mean_fault_interval_s=8.0,
        restartable_share=0.7,
    ),
    "locks": ScenarioKind(
        fault_injector.LOCK_FAULTS, controllers=2, fault_injection_s=40.0, jobs=0, lock_clients=4
    ),
    "gossip": ScenarioKind(
        fault_injector.POWER_FAULTS,
        controllers=3,
        node_ttl_s=CONTROLLER_CONFIG.node_ttl_s,
        fault_injection_s=40.0,
        job_duration_s_max=30.0,
        has_lying_gossip=True,
    ),
    "hostile": ScenarioKind(tuple(hostile.HOSTILE_ACTIONS), mean_fault_interval_s=5.0),
    "mixed": ScenarioKind(
        tuple(
            dict.fromkeys(
                (
                    *fault_injector.MIXED_FAULTS_AND_OWNER_ACTIONS,
                    *fault_injector.NETWORK_FAULTS,
                    *fault_injector.DISK_FAULTS,
                    *fault_injector.TIME_FAULTS,
                    *fault_injector.OUTAGE_FAULTS,
                    *fault_injector.STORE_FAULTS,
                    *hostile.HOSTILE_ACTIONS,
                )
            )
        ),
        controllers=2,
    ),
    "skew": ScenarioKind(fault_injector.SKEW_FAULTS, controllers=3),
}


def hold_mismatch_s_max(node_ttl_s: float) -> float:
    """Twice the time until the jobs of a silent node are reclaimed, and a few ticks."""
    return 2 * (node_ttl_s + CONTROLLER_CONFIG.node_reclaim_grace_s + 2.0)


def run_seed(seed: int, kind: str, directory: Path, *, faults: tuple[str, ...] = ()) -> list[str]:
    """Run a seed; `faults` replaces those of the kind. Return the violations."""
    chosen = SCENARIO_KINDS[kind]
    return loop.run_simulated(_run_scenario(seed, directory, replace(chosen, faults=faults or chosen.faults)))


async def _run_scenario(seed: int, directory: Path, kind: ScenarioKind) -> list[str]:
    async with asyncio.TaskGroup() as group:
        cluster = _make_cluster(seed, directory, group, kind)
        checker, innocent = make_invariant_checkers(cluster, node_ttl_s=kind.node_ttl_s)
        restores = RestoreChecker(cluster, checker, innocent)
        drains = DrainChecker(cluster, checker)
        await cluster.start()
        await cluster.wait_for_nodes()
        cluster.store.add_commit_listener(drains.on_store_commit)
        cluster.store.add_commit_listener(checker.on_store_commit)
        rate = RequestRateChecker(
            cluster.world,
            cluster.machines,
            cluster.node_hosts,
            workers_per_node_max=GPUS,
            controller_count=kind.controllers,
        )
        leadership = LeadershipChecker(cluster)
        watching = [
            group.create_task(each)
            for each in (
                checker.check_periodically(),
                drains.check_periodically(),
                rate.check_periodically(),
                leadership.check_periodically(),
                NodeLossChecker(cluster).check_periodically(),
                _check_store_space_periodically(cluster),
            )
        ]
        if cluster.gossip_medium is not None:
            watching.append(group.create_task(report_lies_periodically(cluster, cluster.gossip_medium)))
        with _record_exceptions_as_violations(cluster.machines.violations):
            running = group.create_task(_run_jobs(cluster, checker, restores, kind))
            await _wait_for_end_or_violation(running, cluster, checker, scenario_s_max=kind.scenario_s_max)
            running.cancel()
            await asyncio.wait({running})
        for task in watching:
            task.cancel()
        await cluster.stop()
    return cluster.machines.violations


def _make_cluster(seed: int, directory: Path, group: asyncio.TaskGroup, kind: ScenarioKind) -> SimCluster:
    cluster = SimCluster(
        seed,
        directory,
        group,
        node_count=kind.nodes,
        gpus_per_node=GPUS,
        controller_count=kind.controllers,
        store_bytes_max=_STORE_BYTES_MAX,
        connection_limits=_CONNECTION_LIMITS,
        config=replace(_SCENARIO_CONTROLLER_CONFIG, node_ttl_s=kind.node_ttl_s),
        gossip_medium=GossipMedium() if kind.has_lying_gossip else None,
    )
    for host in cluster.controller_hosts:
        cluster.world.set_cpu_cost(host, _CONTROLLER_CPU_COST)
    return cluster


def make_invariant_checkers(
    cluster: SimCluster, *, node_ttl_s: float
) -> tuple[InvariantChecker, InnocentTenantChecker]:
    checker = InvariantChecker(
        cluster.world,
        cluster.machines,
        get_accepted_epoch=lambda node_id, worker_name: _accepted_epoch(cluster, node_id, worker_name),
        hold_mismatch_s_max=hold_mismatch_s_max(node_ttl_s),
    )
    innocent = InnocentTenantChecker(
        cluster.world, cluster.machines, checker, tenant=INNOCENT_TENANT, faults=cluster.faults
    )
    return checker, innocent


async def _wait_for_end_or_violation(
    running: asyncio.Task[None],
    cluster: SimCluster,
    checker: InvariantChecker,
    *,
    scenario_s_max: float,
) -> None:
    """Jobs that take too long are a violation, too."""
    end_s = cluster.world.now_s + scenario_s_max
    while not running.done() and not cluster.machines.violations:
        await asyncio.wait({running}, timeout=1.0)
        if cluster.world.now_s > end_s:
            pending = [job.reason for job in checker.current_jobs.values() if not job.state.is_final]
            cluster.machines.report_violation(f"jobs have not ended after {scenario_s_max:g} s: {pending}")


async def _run_jobs(
    cluster: SimCluster, checker: InvariantChecker, restores: RestoreChecker, kind: ScenarioKind
) -> None:
    async with asyncio.TaskGroup() as group:
        submitting = group.create_task(_submit_innocent_jobs(cluster, restores, kind))
        locking = _start_lock_clients(cluster, group, count=kind.lock_clients)
        await fault_injector.inject_faults(
            cluster,
            duration_s=kind.fault_injection_s,
            mean_interval_s=kind.mean_fault_interval_s,
            kinds=kind.faults,
            fault_duration_s_max=kind.fault_duration_s_max,
        )
        await fault_injector.undo_owner_actions(cluster)
        for client in locking:
            client.stop()
        job_ids = set(await submitting) - restores.lost_job_ids
    await _wait_until_nothing_is_held(cluster, checker, job_ids)
    stored = {job.job_id for job in checker.ended_jobs.values() if job.tenant == INNOCENT_TENANT}
    if stored != job_ids:
        cluster.machines.report_violation(f"{len(stored)} jobs for {len(job_ids)} submissions")


def _start_lock_clients(cluster: SimCluster, group: asyncio.TaskGroup, *, count: int) -> list[SimLockClient]:
    if not count:
        return []
    checker = LockInvariantChecker(cluster)
    clients = [SimLockClient(cluster, checker, number=number) for number in range(count)]
    for client in clients:
        group.create_task(client.run())
    return clients


async def _await_reply_in_time(cluster: SimCluster, request: Awaitable[_Reply]) -> _Reply:
    """Return the reply. Unless a machine has a fault, it must arrive in time."""

    def report() -> None:
        if _has_only_hostile_actions(cluster):
            cluster.machines.report_violation(f"a client waited {_REPLY_TIME_S_MAX:g} s for a reply")

    timer = asyncio.get_running_loop().call_later(_REPLY_TIME_S_MAX, report)
    try:
        return await request
    finally:
        timer.cancel()


def _has_only_hostile_actions(cluster: SimCluster) -> bool:
    """Whether no machine has had a fault: all that happened was the hostile tenant."""
    return all(fault.kind in hostile.HOSTILE_ACTIONS for fault in cluster.faults)


async def _check_store_space_periodically(cluster: SimCluster) -> None:
    """Check that the store has space for the writes of the controllers."""
    while True:
        await asyncio.sleep(1.0)
        used_bytes = (await cluster.store.measure_space(timeout_s=SCENARIO_S_MAX)).used_bytes
        if used_bytes > _STORE_USED_SHARE_MAX * _STORE_BYTES_MAX:
            cluster.machines.report_violation(f"the store is full: {used_bytes} bytes")


async def _submit_innocent_jobs(
    cluster: SimCluster, restores: RestoreChecker, kind: ScenarioKind
) -> list[str]:
    """Submit the jobs of the innocent tenant and read them until they have ended; return their IDs."""
    if not kind.jobs:
        return []
    rng, job_ids = random.Random(cluster.seed), []
    digest = hashlib.sha256(_INNOCENT_WORKDIR).hexdigest()
    token = await cluster.get_user_token(INNOCENT_TENANT)
    await cluster.send_request(
        PutBlob(digest=digest, offset=0, data=_INNOCENT_WORKDIR, is_last=True), token=token
    )
    async with asyncio.TaskGroup() as readers:
        for _ in range(kind.jobs):
            await asyncio.sleep(rng.uniform(0.1, 3.0))
            workers = rng.choice((1, 1, 1, 2, 3))
            is_restartable = rng.random() < kind.restartable_share
            spec = JobSpec(
                name=INNOCENT_TENANT,
                command=("simulated",),
                resources=Resources(gpus=1),
                constraints=PlacementConstraints(
                    workers=workers,
                    time_limit_s=_JOB_TIME_LIMIT_S,
                    preemptible=is_restartable,
                    grace_s=_JOB_GRACE_S,
                ),
            )
            try:
                sent = cluster.submit_spec(
                    spec, seconds=rng.uniform(1, kind.job_duration_s_max), tenant=INNOCENT_TENANT
                )
                job_id = await _await_reply_in_time(cluster, sent)
            except JobRefusedError as error:  # too few accelerators are left for it
                if not any(fault.kind.startswith(_FAULTS_REMOVING_CAPACITY) for fault in cluster.faults):
                    cluster.machines.report_violation(f"a job was rejected: {error}")
                continue
            job_ids.append(job_id)
            readers.create_task(_read_until_ended(cluster, restores, job_id))
    # A blob is on one controller only, so it is not available after a failover.
    if _has_only_hostile_actions(cluster):
        stored = await cluster.send_request(StatBlob(digest=digest), token=token)
        if not stored.complete:
            cluster.machines.report_violation("a working directory was evicted")
    return job_ids


async def _read_until_ended(cluster: SimCluster, restores: RestoreChecker, job_id: str) -> None:
    """Check that what a client has read or written never disappears, except by a restore."""
    token = await cluster.get_user_token(INNOCENT_TENANT)
    transitions = restore_count = 0
    while True:
        await asyncio.sleep(_JOB_READ_INTERVAL_S)
        try:
            sent = cluster.send_request(GetJob(job_id=job_id), token=token)
            job = (await _await_reply_in_time(cluster, sent)).job
        except JobNotFoundError as error:
            if job_id not in restores.lost_job_ids:
                cluster.machines.report_violation(f"a submitted job has disappeared: {error}")
            return
        except GenieError as error:
            cluster.machines.report_violation(f"a job could not be read: {error}")
            return
        if len(job.history) < transitions and restores.restore_count == restore_count:
            cluster.machines.report_violation(f"a client has read an older state than before: {job}")
        if job.state.is_final:
            return
        transitions, restore_count = len(job.history), restores.restore_count


async def _wait_until_nothing_is_held(
    cluster: SimCluster, checker: InvariantChecker, job_ids: set[str]
) -> None:
    """Wait until all jobs have ended and nothing is held."""
    checker.have_faults_ended = True
    while True:
        unfinished = [job.job_id for job in checker.current_jobs.values() if not job.state.is_final]
        missing = job_ids - checker.ended_jobs.keys()
        held = [hold.job_id for view in await cluster.fetch_node_views() for hold in view.node_holds.holds]
        if not unfinished and not missing and not held and not cluster.machines.live_processes():
            return
        await asyncio.sleep(1.0)


def _accepted_epoch(cluster: SimCluster, node_id: str, worker_name: str) -> int:
    host = next(host for host in cluster.node_hosts if cluster.node_id(host) == node_id)
    record = Journal(cluster.node_dir(host)).read_job_record(worker_name)
    return 0 if record is None else record.epoch


class _ExceptionRecorder(logging.Handler):
    """Records logged exceptions as violations, except those of isolated rows."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._violations = violations

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and "quarantined" not in record.msg:
            self._violations.append(logging.Formatter("%(message)s").format(record))


@contextmanager
def _record_exceptions_as_violations(violations: list[str]) -> Iterator[None]:
    handler, logger = _ExceptionRecorder(violations), logging.getLogger("genie")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
