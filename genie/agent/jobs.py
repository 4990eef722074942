"""The jobs of this node, from the controller's order to the end that it has been told of.

A launch is accepted, prepared, confirmed by the controller, then started; whatever fails on the
way becomes the job's end. A job is in `live` from its acceptance until its end, and then in
`ended` until the controller has made that durable; the two change together, so that every
heartbeat has it in exactly one. Not for: connections and time limits (agent.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from genie.agent import preparation
from genie.agent.journal import REASON_CHARS_MAX, JobRecord, Journal
from genie.agent.launcher import Launcher, LaunchPlan
from genie.agent.lease import Lease
from genie.config import AgentConfig
from genie.errors import FencedError, GenieError, LaunchError
from genie.model.allocation import FULL_MILLI
from genie.model.job import JobKind
from genie.model.messages import (
    ConfirmLaunch,
    Endpoint,
    ExecutorReady,
    ExitReport,
    Launch,
    Message,
    Request,
    RunningJob,
)
from genie.model.node import NodeInfo
from genie.runtime import tls
from genie.runtime.clock import Clock
from genie.runtime.tasks import Offload

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

LIVE_MAX = 1024
PREPARING_MAX = 8
PREPARE_S_MAX = 900.0
EXECUTOR_START_S_MAX = 90.0
EXECUTOR_BUSY_S_MAX = 1200.0
"""For one that says what it does: it may compile its library."""
RETRY_S = 0.2
CONTACT_LOST = "ended by Genie: the node lost contact with the controller"


class Ask(Protocol):
    """One request to the leader, once."""

    async def __call__(self, request: Request[_Reply]) -> _Reply: ...


@dataclass
class LocalJob:
    launch: Launch
    directory: Path
    started: bool = False
    unwanted: str = ""
    """Why it must not start any more; empty while it may."""
    endpoint: Endpoint | None = None
    note: str = ""
    """What an executor does that does not listen yet."""

    @property
    def epoch(self) -> int:
        return self.launch.placement.epoch


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a job meets on this node. Executors get certificates where there is a CA."""

    base_env: dict[str, str]
    listen_host: str
    advertised_host: str
    ca_path: Path | None
    offload: Offload
    node: Callable[[], NodeInfo]


class Jobs:
    def __init__(
        self,
        config: AgentConfig,
        *,
        journal: Journal,
        launcher: Launcher,
        lease: Lease,
        clock: Clock,
        ask: Ask,
        surroundings: Surroundings,
        changed: Callable[[], None],
    ) -> None:
        self.live: dict[str, LocalJob] = {}
        self.ended: dict[str, ExitReport] = {}
        self.closed = ""
        """Why nothing is accepted any more; empty while something is."""
        self.reported = asyncio.Event()
        """Set while no heartbeat is under way that could lack an accepted job."""
        self.reported.set()
        self._config = config
        self._journal = journal
        self._launcher = launcher
        self._lease = lease
        self._clock = clock
        self._ask_once = ask
        self._around = surroundings
        self._changed = changed
        self._slots = asyncio.Semaphore(PREPARING_MAX)

    def load(self) -> None:
        """Ends that an earlier life did not get confirmed."""
        self.ended = self._journal.pending_exits()

    def running(self) -> tuple[RunningJob, ...]:
        return tuple(
            RunningJob(job_id=job_id, epoch=job.epoch, endpoint=job.endpoint, note=job.note)
            for job_id, job in self.live.items()
        )

    def gpus_in_use(self) -> frozenset[int]:
        """Those on which a process of a job may be."""
        return frozenset(
            gpu_id for job in self.live.values() for gpu_id in job.launch.placement.gpu_ids if job.started
        )

    # --- orders -----------------------------------------------------------------------------

    def accept(self, launch: Launch) -> LocalJob:
        """Durably taken when this returns; `carry_out` must follow. LaunchError or FencedError otherwise."""
        self._check_acceptable(launch)
        record = JobRecord(
            job_id=launch.job_id,
            epoch=launch.placement.epoch,
            incarnation=launch.placement.incarnation,
            accepted_at=self._clock.wall_s(),
        )
        directory = self._journal.accept(record)
        self.ended.pop(launch.job_id, None)
        job = self.live[launch.job_id] = LocalJob(launch, directory)
        return job

    def _check_acceptable(self, launch: Launch) -> None:
        what, place = f"the launch of {launch.job_id}", launch.placement
        self._journal.obey(launch.leader_token, what=what)
        node_id = self._around.node().node_id
        if place.node_id != node_id:
            raise LaunchError(f"{what} is for node {place.node_id}, this is {node_id}")
        if place.incarnation != self._journal.incarnation:
            raise FencedError(
                f"{what} is for incarnation {place.incarnation} of this node, "
                f"which is now at {self._journal.incarnation}"
            )
        record = self._journal.record(launch.job_id)
        if record is not None and place.epoch <= record.epoch:
            raise FencedError(f"{what} has epoch {place.epoch}; this node has seen {record.epoch}")
        if launch.job_id in self.live:
            raise LaunchError(f"{what} is refused: an earlier attempt has not ended here yet")
        if self.closed:
            raise LaunchError(f"{what} is refused: {self.closed}")
        if not self._lease.is_good(self._clock.monotonic_s()):
            raise LaunchError(f"{what} is refused: this node has not been acknowledged lately")
        if crowded := self._crowded(launch):
            raise LaunchError(f"{what} is refused: {crowded}")
        if len(self.live) >= LIVE_MAX:
            raise LaunchError(f"{what} is refused: {LIVE_MAX} jobs are here already")

    def _crowded(self, launch: Launch) -> str:
        """Why its accelerators cannot take it yet; empty if they can.

        The ledger may know them as free while a process that it has given up still takes its time to
        end here: after a freeze of the whole machine nothing else stands between the two.
        """
        wish = launch.spec.resources.gpu_milli
        for gpu_id in launch.placement.gpu_ids:
            there = [job.launch for job in self.live.values() if gpu_id in job.launch.placement.gpu_ids]
            if any(other.tenant != launch.tenant for other in there):
                return f"a job of another tenant has not ended on accelerator {gpu_id} yet"
            if sum(other.spec.resources.gpu_milli for other in there) + wish > FULL_MILLI:
                return f"{there[0].job_id} has not ended on accelerator {gpu_id} yet"
        return ""

    def kill(self, job_id: str, *, epoch: int, reason: str, grace_s: float | None = None) -> None:
        """Takes effect at once or, for a job that is being prepared, at its next step."""
        job = self.live.get(job_id)
        if job is not None and job.epoch == epoch:
            job.unwanted = job.unwanted or reason
            if job.started:
                self._launcher.kill(job_id, reason=reason, grace_s=grace_s)

    def kill_all(self, reason: str) -> None:
        for job_id, job in self.live.items():
            self.kill(job_id, epoch=job.epoch, reason=reason)

    def settle(self, job_ids: Iterable[str]) -> None:
        settled = list(job_ids)
        self._journal.settle(settled)
        for job_id in settled:
            self.ended.pop(job_id, None)

    def collect(self) -> None:
        """Takes the ends that the launcher has seen."""
        for report in self._launcher.exits():
            self._end(report)

    # --- from acceptance to start -----------------------------------------------------------

    async def carry_out(self, job: LocalJob) -> None:
        """Never raises: whatever goes wrong is the job's end."""
        job_id = job.launch.job_id
        try:
            async with self._slots:
                plan = await self._prepare(job)
            await self._confirm(job)
            self._launcher.start(plan, until_s=self._lease.until_s)
            job.started = True
            if job.unwanted:
                self._launcher.kill(job_id, reason=job.unwanted)
            _log.info("job %s started (epoch %d)", job_id, job.epoch)
        except GenieError as error:
            self._fail(job, job.unwanted or f"not started: {error}")
        except OSError as error:
            self._fail(job, f"not started: {error}")
        except Exception:
            _log.exception("job %s could not be started", job_id)
            self._fail(job, "not started: internal error; the agent's log has the details")
        if job.started and job.launch.spec.kind is JobKind.SESSION:
            await self._announce(job)

    async def _prepare(self, job: LocalJob) -> LaunchPlan:
        launch, around = job.launch, self._around
        env = preparation.job_environment(
            launch, base=around.base_env, node=around.node(), directory=job.directory
        )
        if launch.spec.workdir is not None:
            await preparation.fetch_workdir(
                self._asking(job), launch.spec.workdir, job.directory, offload=around.offload
            )
        if launch.spec.kind is JobKind.SESSION:
            argv = await preparation.prepare_executor(
                self._asking(job),
                launch,
                directory=job.directory,
                ca_path=around.ca_path,
                listen_host=around.listen_host,
                memory_bytes_max=self._config.executor_memory_bytes_max,
                node=around.node(),
            )
        else:
            argv = preparation.command_of(launch)
        return LaunchPlan(
            job_id=launch.job_id,
            epoch=job.epoch,
            argv=argv,
            env=env,
            directory=job.directory,
            work_dir=job.directory / "work",
            log_bytes_max=self._config.log_bytes_max,
            log_files_max=self._config.log_files_max,
            grace_s=self._config.stop_grace_s,
            deadman_grace_s=self._lease.grace_s(self._config.stop_grace_s),
        )

    async def _confirm(self, job: LocalJob) -> None:
        # A heartbeat that was written before the acceptance must not be read after the confirmation:
        # the controller would find a running job that this node does not list.
        await self.reported.wait()
        order = ConfirmLaunch(
            job_id=job.launch.job_id, epoch=job.epoch, incarnation=self._journal.incarnation
        )
        await self._asking(job)(order)
        self._check_wanted(job)

    def _asking(self, job: LocalJob) -> preparation.Call:
        """Asks again while that can help and the job is still wanted."""
        deadline_s = self._clock.monotonic_s() + PREPARE_S_MAX

        async def ask(request: Request[_Reply]) -> _Reply:
            while True:
                self._check_wanted(job)
                try:
                    return await self._ask_once(request)
                except GenieError as error:
                    if not error.retryable or self._clock.monotonic_s() > deadline_s:
                        raise
                    _log.info("job %s: %s; asking again", job.launch.job_id, error)
                await self._clock.sleep(RETRY_S)

        return ask

    def _check_wanted(self, job: LocalJob) -> None:
        if not job.unwanted and not self._lease.is_good(self._clock.monotonic_s()):
            job.unwanted = CONTACT_LOST
        if job.unwanted:
            raise LaunchError(job.unwanted)

    # --- sessions ---------------------------------------------------------------------------

    async def _announce(self, job: LocalJob) -> None:
        """Waits for the executor to listen, then says where. Never raises, like its caller."""
        job_id = job.launch.job_id
        try:
            port = await self._wait_endpoint(job)
            if port is None:
                return
            job.note = ""
            job.endpoint = Endpoint(
                host=self._around.advertised_host, port=port, server_name=tls.executor_name(job_id)
            )
            self._changed()
            await self._asking(job)(ExecutorReady(job_id=job_id, epoch=job.epoch, endpoint=job.endpoint))
        except GenieError as error:
            if job.endpoint is None:
                self.kill(job_id, epoch=job.epoch, reason=f"ended by Genie: {error}")
            else:
                _log.info("job %s: %s; the heartbeats say where it listens, too", job_id, error)
        except Exception:
            _log.exception("the executor of %s could not be announced", job_id)
            self.kill(job_id, epoch=job.epoch, reason="ended by Genie: internal error")

    async def _wait_endpoint(self, job: LocalJob) -> int | None:
        """None when it ended first; why is in its end."""
        started_s = self._clock.monotonic_s()
        pause_s = 0.01
        while self.live.get(job.launch.job_id) is job:
            port = preparation.read_endpoint(job.directory)
            if port is not None:
                return port
            note = preparation.read_status(job.directory)[:REASON_CHARS_MAX]
            if note != job.note:
                job.note = note
                self._changed()
            limit_s = EXECUTOR_BUSY_S_MAX if note else EXECUTOR_START_S_MAX
            if self._clock.monotonic_s() > started_s + limit_s:
                raise LaunchError(f"the executor was not ready within {limit_s:g} s" + (note and f": {note}"))
            await self._clock.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)
        return None

    # --- ends -------------------------------------------------------------------------------

    def _fail(self, job: LocalJob, reason: str) -> None:
        reason = reason[:REASON_CHARS_MAX]
        _log.warning("job %s: %s", job.launch.job_id, reason)
        self._end(
            ExitReport(
                job_id=job.launch.job_id,
                epoch=job.epoch,
                exit_code=None,
                reason=reason,
                ended_at=self._clock.wall_s(),
                started=False,
                by_node=bool(job.unwanted),
            )
        )

    def _end(self, report: ExitReport) -> None:
        report = self._with_last_words(report)
        _log.info("job %s ended: %s", report.job_id, report.reason)
        try:
            if self._journal.exit_report(report.job_id) is None:
                self._journal.write_exit(report)
        except GenieError as error:
            # It can still be told while this life lasts; after that the job counts as lost.
            _log.error("the end of %s cannot be recorded: %s", report.job_id, error)
        preparation.forget_secrets(self._journal.job_dir(report.job_id))
        self.live.pop(report.job_id, None)
        self.ended[report.job_id] = report
        self._changed()

    def _with_last_words(self, report: ExitReport) -> ExitReport:
        """An executor that ended before it listened has said why, which its client should hear."""
        job = self.live.get(report.job_id)
        if job is None or job.launch.spec.kind is not JobKind.SESSION or job.endpoint or not report.exit_code:
            return report
        said = preparation.read_status(job.directory)
        reason = f"{report.reason}: {said}" if said else report.reason
        return msgspec.structs.replace(report, reason=reason[:REASON_CHARS_MAX])

    def prunable(self) -> Collection[Path]:
        return self._journal.prunable(kept=self._config.jobs_kept, live=self.live)
