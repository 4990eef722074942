"""Restores of a simulated store as an operator does them: a backup is taken while the cluster works; later
the store is lost, all controllers are stopped, the backup is restored into an empty store with a higher
generation, and the controllers are started again. The code of backup and restore is the real one.

`restore_beside_old_controller` continues with a mistake: one server comes back with the store from before the
restore, and its controller leads there. Nodes that have seen the new generation must not follow it.

What was submitted after the backup is lost, and only that: `RestoreChecker.lost_job_ids`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from genie.agent.journal import LEADER_TOKEN_FILE
from genie.controller.backups.backup import open_store_backup_source, write_backup
from genie.controller.backups.backup_file import BackupReader
from genie.controller.backups.restore import next_generation, restore_backup
from genie.controller.store import Delete, Put
from genie.errors import StoreUnavailableError
from genie.model.fencing import make_fencing_token
from genie.model.job import Job, JobState
from genie.processes.tasks import run_inline
from genie.sim.cluster import STORE_HOST, SimCluster
from genie.sim.faults.outages import control_plane_fault, hanging_store, has_silent_server
from genie.sim.invariants import InnocentTenantChecker, InvariantChecker
from genie.sim.world import SimClock

_BACKUP_AGE_S_MAX = 15.0
_NEW_GENERATION_WAIT_S_MAX = 30.0
_CONTROLLER_STARTUP_TIME_S = 2.0
_POLL_INTERVAL_S = 0.2


class RestoreChecker:
    """Lets the other checkers continue with the rows of a restored store. Jobs that a restore does not change
    must continue."""

    def __init__(
        self, cluster: SimCluster, checker: InvariantChecker, innocent_tenant: InnocentTenantChecker
    ) -> None:
        self._cluster = cluster
        self._checker = checker
        self._innocent_tenant = innocent_tenant
        self.restore_count = 0
        self.lost_job_ids: set[str] = set()
        """Jobs that were submitted after the backup, which the restored store does not contain."""
        cluster.restore_listeners.append(self._on_store_restored)

    def _on_store_restored(self, operations: Sequence[Put | Delete], backup_began_at: float) -> None:
        self.restore_count += 1
        before = dict(self._checker.current_jobs)
        changed = self._checker.replace_rows(operations)
        after = self._checker.current_jobs
        # They may have ended since. Queued ones run again, and those that are being placed are queued again.
        self._innocent_tenant.excuse_jobs(
            {job_id for job_id in changed & after.keys() if after[job_id].state is JobState.RUNNING}
        )
        continuing = {(job.job_id, job.epoch) for job in after.values() if job.state is JobState.RUNNING}
        launches = {(job.job_id, job.epoch) for job in before.values()}
        self._cluster.machines.rolled_back_launches |= launches - continuing
        for job_id in before.keys() - after.keys():
            self._record_lost_job(before[job_id], backup_began_at)

    def _record_lost_job(self, job: Job, backup_began_at: float) -> None:
        self.lost_job_ids.add(job.job_id)
        if job.submitted_at < backup_began_at:
            self._cluster.machines.report_violation(f"{job.job_id} is not part of a later backup")


async def restore_store(cluster: SimCluster, kind: str, duration_s: float) -> None:
    """Restore the store, at most once per run."""
    if not cluster.has_restored_store:
        await _try_back_up_and_restore(cluster, kind, duration_s)


async def restore_beside_old_controller(cluster: SimCluster, kind: str, duration_s: float) -> None:
    """Restore the store, at most once per run; then a server returns with the previous store for a while."""
    if cluster.has_restored_store:
        return
    old_store = cluster.store
    generation = await _try_back_up_and_restore(cluster, kind, duration_s)
    if generation is None or not await _wait_until_nodes_have_seen(cluster, generation):
        return
    running = [host for host in cluster.controller_hosts if cluster.is_up(host)]
    if len(running) < 2:
        return
    host = cluster.world.random.choice(running)
    with control_plane_fault(cluster, kind, is_silent=has_silent_server(cluster)):
        cluster.crash(host)
        cluster.hosts_kept_down.add(host)
        cluster.outdated_controller_hosts.add(host)
        await asyncio.sleep(_CONTROLLER_STARTUP_TIME_S)  # requests of clients to this host fail meanwhile
        cluster.start_controller(host, old_store)
        await asyncio.sleep(cluster.failover_bounds.total_s + duration_s)
        cluster.crash(host)
        cluster.outdated_controller_hosts.discard(host)
        cluster.hosts_kept_down.discard(host)
        cluster.restart(host)
        await asyncio.sleep(cluster.failover_bounds.total_s)


async def _try_back_up_and_restore(cluster: SimCluster, kind: str, duration_s: float) -> int | None:
    """Return the new generation; None if no backup can be taken, because the store does not respond."""
    cluster.has_restored_store = True
    while not cluster.has_user_tokens:  # tokens that are created after the backup are lost, too
        await asyncio.sleep(_POLL_INTERVAL_S)
    random, path = cluster.world.random, cluster.directory / "store.backup"
    clock = SimClock(cluster.world, STORE_HOST)
    backup_began_at = clock.wall_s()
    try:
        await write_backup(
            partial(open_store_backup_source, cluster.store),
            path,
            clock=clock,
            offload=run_inline,
            progress=_ignore_progress,
        )
    except StoreUnavailableError:
        cluster.has_restored_store = False
        return None
    await asyncio.sleep(random.uniform(0.1, _BACKUP_AGE_S_MAX))
    with (
        control_plane_fault(cluster, kind, is_silent=has_silent_server(cluster)),
        hanging_store(cluster.store),
    ):
        await asyncio.sleep(random.uniform(0.1, duration_s))
        stopped = [host for host in cluster.controller_hosts if host not in cluster.hosts_kept_down]
        cluster.hosts_kept_down.update(stopped)
        for host in stopped:
            cluster.crash(host)
        generation = await _restore_backup_file(cluster, path, backup_began_at)
        await asyncio.sleep(random.uniform(0.1, duration_s))
        cluster.hosts_kept_down.difference_update(stopped)
        for host in stopped:
            cluster.restart(host)
        await asyncio.sleep(cluster.failover_bounds.total_s)
    return generation


async def _restore_backup_file(cluster: SimCluster, path: Path, backup_began_at: float) -> int:
    store = await cluster.open_empty_store()
    operations: list[Put | Delete] = []
    store.add_commit_listener(operations.extend)
    reader = BackupReader(path)
    now_s = SimClock(cluster.world, STORE_HOST).wall_s()
    restored = await restore_backup(
        reader,
        store,
        store_name="memory",
        generation=next_generation(reader.header.generation, now_s=now_s),
        offload=run_inline,
        progress=_ignore_progress,
    )
    cluster.replace_store(store)
    for listener in cluster.restore_listeners:
        listener(tuple(operations), backup_began_at)
    return restored.cluster.generation


async def _wait_until_nodes_have_seen(cluster: SimCluster, generation: int) -> bool:
    """Wait until all nodes have stored a leader token of this generation; False if they take too long."""
    token = make_fencing_token(generation=generation, revision=0)
    end_s = cluster.world.now_s + _NEW_GENERATION_WAIT_S_MAX
    while cluster.world.now_s < end_s:
        if all(_stored_leader_token(cluster, host) >= token for host in cluster.node_hosts):
            return True
        await asyncio.sleep(_POLL_INTERVAL_S)
    return False


def _stored_leader_token(cluster: SimCluster, node: str) -> int:
    path = cluster.node_dir(node) / LEADER_TOKEN_FILE
    return int(msgspec.json.decode(path.read_bytes())["leader_token"]) if path.exists() else 0


def _ignore_progress(row_count: int, size_bytes: int) -> None:
    pass
