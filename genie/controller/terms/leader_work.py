"""What a controller does while it leads, besides answering requests: passes, ticks and housekeeping.

A scheduling pass runs at every change and at every tick. A tick also reclaims jobs of lost nodes, queues
unconfirmed launches again, enforces time limits and drops clients whose lease has expired. Housekeeping runs
concurrently with the passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from genie.config import ControllerConfig
from genie.controller.change_notifier import wait_event
from genie.controller.connection import Connections
from genie.controller.election import ControllerAddresses
from genie.controller.jobs.history import JobHistory
from genie.controller.jobs.lifecycle import CHANGES_PER_TICK_MAX
from genie.controller.jobs.sessions import Sessions
from genie.controller.locks.lock_table import LockTable
from genie.controller.nodes.agents import Agents
from genie.controller.nodes.drains import NodeDrains
from genie.controller.nodes.gossip import ServerGossip
from genie.controller.nodes.releases import ServerReleases
from genie.controller.nodes.snapshots import NodeSnapshots
from genie.controller.nodes.status_log import NodeStatusLog
from genie.controller.placement.pass_runner import PassRunner
from genie.controller.requests.backups import BackupRequests
from genie.controller.store_monitor import StoreMonitor
from genie.controller.terms.periodic_steps import PeriodicStepRunner
from genie.controller.tokens import TokenRegistry
from genie.errors import LeadershipError, StoreError
from genie.model.job import StopReason
from genie.processes import memory
from genie.processes.clock import Clock
from genie.processes.tasks import Offload

_log = logging.getLogger(__name__)

_TICK_INTERVAL_S_MAX = 0.5
# Until an agent knows about a new controller, it cannot switch to it when this one fails.
_HOUSEKEEPING_INTERVAL_S = 2.0
_FAILED_PASS_RETRY_S = 1.0
_MEMORY_RETURN_INTERVAL_S = 60.0


class LeaderWork:
    """`wake_event` is set at every change that may allow a placement. `get_own_address` returns HOST:PORT of
    this controller, `write_local_access_files` writes the files with which this machine reaches it."""

    def __init__(
        self,
        config: ControllerConfig,
        *,
        clock: Clock,
        offload: Offload,
        wake_event: asyncio.Event,
        pass_runner: PassRunner,
        agents: Agents,
        sessions: Sessions,
        locks: LockTable,
        drains: NodeDrains,
        node_snapshots: NodeSnapshots,
        job_history: JobHistory,
        tokens: TokenRegistry,
        store_monitor: StoreMonitor,
        addresses: ControllerAddresses,
        releases: ServerReleases,
        backup_requests: BackupRequests,
        gossip: ServerGossip,
        connections: Connections,
        get_own_address: Callable[[], str],
        write_local_access_files: Callable[[], Awaitable[None]],
    ) -> None:
        self._clock = clock
        self._offload = offload
        self._wake_event = wake_event
        self._pass_runner = pass_runner
        self._agents = agents
        self._sessions = sessions
        self._locks = locks
        self._drains = drains
        self._node_snapshots = node_snapshots
        self._job_history = job_history
        self._tokens = tokens
        self._store_monitor = store_monitor
        self._addresses = addresses
        self._releases = releases
        self._backup_requests = backup_requests
        self._gossip = gossip
        self._connections = connections
        self._get_own_address = get_own_address
        self._write_local_access_files = write_local_access_files
        self._node_status_log = NodeStatusLog()
        self._periodic_step_runner = PeriodicStepRunner(clock)
        self._tick_interval_s = min(_TICK_INTERVAL_S_MAX, config.node_suspect_s / 4)
        self._next_tick_s = 0.0
        self._last_memory_return_s = -_MEMORY_RETURN_INTERVAL_S

    def alarms(self) -> list[str]:
        """Return the steps that failed in their last run, for the owner."""
        return self._periodic_step_runner.alarms()

    async def run(self) -> None:
        """Work until cancelled."""
        self._next_tick_s = 0.0
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_passes_forever(), name="passes")
            group.create_task(self._housekeep_forever(), name="housekeeping")

    async def _run_passes_forever(self) -> None:
        while True:
            self._wake_event.clear()
            try:
                await self._run_due_tick_and_pass()
            except (StoreError, LeadershipError) as error:
                _log.warning("scheduling pass postponed: %s", error)
                await self._clock.sleep(self._tick_interval_s)
            except Exception:  # a task boundary: a failed pass must not end the controller
                _log.exception("scheduling pass failed")
                await self._clock.sleep(_FAILED_PASS_RETRY_S)
            await wait_event(self._wake_event, clock=self._clock, timeout_s=self._tick_interval_s)

    async def _run_due_tick_and_pass(self) -> None:
        if self._clock.monotonic_s() >= self._next_tick_s:
            self._next_tick_s = self._clock.monotonic_s() + self._tick_interval_s
            self._pass_runner.log_launches()
            await self._run_tick_steps()
        await self._pass_runner.run()

    async def _run_tick_steps(self) -> None:
        """Do the work that depends on time alone, not on changes."""
        await self._periodic_step_runner.run_steps(
            {
                "logging node states": self._log_node_statuses,
                "reclaiming jobs of lost nodes": self._agents.reclaim_jobs,
                "requeueing unconfirmed launches": self._agents.requeue_unconfirmed,
                "ending expired sessions": self._end_expired_sessions,
                "ending expired leases of locks": self._locks.end_expired_leases,
                "enforcing time limits": self._enforce_time_limits,
                "moving jobs off draining nodes": self._drains.move_jobs,
            }
        )

    async def _end_expired_sessions(self) -> None:
        for job in await self._sessions.cancel_expired():
            self._agents.send_kills(job)

    async def _enforce_time_limits(self) -> None:
        expired = [
            (job, f"exceeded its time limit of {job.spec.constraints.time_limit_s:g} s")
            for job in self._agents.jobs_exceeding_time_limit()[:CHANGES_PER_TICK_MAX]
        ]
        await self._pass_runner.stop_jobs(expired, StopReason.TIME_LIMIT)

    async def _housekeep_forever(self) -> None:
        """Runs concurrently with the passes: deleting many old jobs must not delay new ones."""
        while True:
            try:
                await self._housekeep()
            except (StoreError, LeadershipError) as error:
                _log.warning("housekeeping postponed: %s", error)
            except Exception:  # a task boundary: as in _run_passes_forever
                _log.exception("housekeeping failed")
            await self._clock.sleep(_HOUSEKEEPING_INTERVAL_S)

    async def _housekeep(self) -> None:
        await self._periodic_step_runner.run_steps(
            {
                "measuring the store": self._store_monitor.measure_and_compact_if_due,
                "deleting old jobs": self._job_history.delete_old_jobs,
                "deleting old tokens": self._tokens.delete_old_tokens,
                "storing and reading the addresses of controllers": self._addresses.register,
                "reading the releases of the servers": self._releases.refresh,
                "announcing the release of this server": self._announce_release,
                "disconnecting outdated nodes": self._disconnect_outdated_nodes,
                "writing the files of this cluster": self._write_local_access_files,
                "closing abandoned backups": self._backup_requests.close_if_idle,
                "changing the key of gossip": self._gossip.change_key_if_due,
                "returning memory": self._return_freed_memory_to_system,
            }
        )

    async def _announce_release(self) -> None:
        await self._releases.announce(self._get_own_address())

    async def _disconnect_outdated_nodes(self) -> None:
        self._agents.disconnect_outdated_nodes()

    async def _return_freed_memory_to_system(self) -> None:
        """Return the memory of many closed connections to the system."""
        now_s = self._clock.monotonic_s()
        has_shrunk = self._connections.is_memory_return_worthwhile()
        if not has_shrunk or now_s - self._last_memory_return_s < _MEMORY_RETURN_INTERVAL_S:
            return
        self._connections.reset_peak_count()
        self._last_memory_return_s = now_s
        memory.collect_garbage()
        await self._offload(memory.trim_heap)

    async def _log_node_statuses(self) -> None:
        nodes = self._node_snapshots.current_snapshots().values()
        self._node_status_log.log_changes(node.info for node in nodes)
