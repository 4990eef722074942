"""The jobs of this node, from the launch request to the confirmed exit report.

A launch is accepted, prepared, confirmed by the controller, then started; a failure on the way becomes the
job's exit report. A job is in `live` from acceptance to exit, then in `ended` until the controller has stored
the report; every heartbeat lists it in exactly one of them. Connections and the lease are agent.py's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from genie.agent import job_files, preparation
from genie.agent.disk import JournalWriteQueue, is_caused_by_full_disk, is_caused_by_node
from genie.agent.heartbeats import NodeLease
from genie.agent.job_files import RunDirectorySize
from genie.agent.journal import EXIT_REASON_CHARS_MAX, JobRecord, Journal
from genie.agent.launcher import JobLauncher, LaunchPlan, encode_plan, try_decode_plan
from genie.agent.leftovers import AdoptedJob
from genie.config import AgentConfig
from genie.errors import (
    FencedError,
    GenieError,
    LaunchError,
    NameInvalidError,
    NodeUnfitError,
    WorkersMissingError,
)
from genie.model.allocation import FULL_MILLI
from genie.model.job import CLIENT_LOST_EXIT_CODE, JobKind, Workdir
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
from genie.processes.clock import Clock
from genie.processes.tasks import Offload
from genie.runtime import tls

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

LIVE_JOBS_MAX = 1024
PREPARING_JOBS_MAX = 8
LEADER_CALL_RETRY_TIMEOUT_S = 900.0
EXECUTOR_START_TIMEOUT_S = 90.0
EXECUTOR_START_TIMEOUT_IF_STATUS_REPORTED_S = 1200.0
"""For an executor that reports a status: it may be compiling its library."""
EXECUTOR_STATUS_READ_TIMEOUT_S = 1.0
LEADER_CALL_BACKOFF_S_MIN, LEADER_CALL_BACKOFF_S_MAX = 0.2, 2.0
LEASE_POLL_INTERVAL_S = 0.1
CONFIRM_WAIT_FOR_WORKERS_S = 3.0
"""How long a confirmation waits at the controller for the other workers of the job; then it is repeated."""
WORKDIR_DISK_BYTES_PER_ARCHIVE_BYTE_MIN = 2
"""Space for a working directory in relation to its archive: for the archive and, at least, for its files."""
WORKDIR_DISK_BYTES_PER_ARCHIVE_BYTE_MAX = 8
"""The same if all files are small: each takes 1 KiB of the archive, and a block of the file system."""
SILENT_SHIM_NOTE = "its shim does not respond; the state of the job is unknown"
CONTACT_LOST_REASON = "ended by Genie: the node lost contact with the controller"


class CallLeaderOnce(Protocol):
    """Sends one request to the leader, without retries."""

    async def __call__(self, request: Request[_Reply]) -> _Reply: ...


@dataclass
class LocalJob:
    record: JobRecord
    directory: Path
    started_s: float | None = None
    """Monotonic time of its start; None before, and for an adopted job."""
    adopted: AdoptedJob | None = None
    """Set if an earlier agent has started it."""
    kill_reason: str = ""
    """Why it must not start or must end; empty if neither."""
    endpoint: Endpoint | None = None
    executor_start_status: str = ""
    """Status of an executor that does not listen yet."""
    needed_disk_bytes: int = 0
    """Free disk space that its working directory needs, if the node has less."""

    @property
    def job_id(self) -> str:
        return self.record.job_id

    @property
    def epoch(self) -> int:
        return self.record.epoch

    @property
    def gpu_ids(self) -> tuple[int, ...]:
        return self.record.gpu_ids or ()

    @property
    def is_session(self) -> bool:
        return self.record.kind is JobKind.SESSION

    @property
    def has_started(self) -> bool:
        return self.started_s is not None or self.adopted is not None

    def elapsed_s(self, now_s: float) -> float:
        """Since its start; 0 before, and while that is unknown."""
        started_s = self.started_s if self.adopted is None else self.adopted.started_s
        return 0.0 if started_s is None else now_s - started_s

    @property
    def status_note(self) -> str:
        """For users; empty if there is nothing to report."""
        if self.adopted is not None and not self.adopted.is_responding:
            return SILENT_SHIM_NOTE
        return self.executor_start_status

    @property
    def ends_with_lease(self) -> bool:
        """Whether it must end when the lease of the node expires: it may be started elsewhere then."""
        return self.record.has_deadman_timer


@dataclass(frozen=True, kw_only=True)
class JobLaunchContext:
    """What this node provides for its jobs. Executors get certificates if `ca_path` is set.

    `offload` is for the files of jobs, which may be large; the journal has its own.
    """

    base_env: dict[str, str]
    listen_host: str
    advertised_host: str
    ca_path: Path | None
    offload: Offload
    get_node_info: Callable[[], NodeInfo]
    boot_id: str


class NodeJobs:
    def __init__(
        self,
        config: AgentConfig,
        *,
        journal: Journal,
        launcher: JobLauncher,
        lease: NodeLease,
        writes: JournalWriteQueue,
        clock: Clock,
        call_leader: CallLeaderOnce,
        launch_context: JobLaunchContext,
        request_heartbeat: Callable[[], None],
    ) -> None:
        self.live_jobs: dict[str, LocalJob] = {}
        self.unsettled_exits: dict[str, ExitReport] = {}
        self._config = config
        self._journal = journal
        self._launcher = launcher
        self._lease = lease
        self._journal_writes = writes
        self._clock = clock
        self._call_leader = call_leader
        self._launch_context = launch_context
        self._request_heartbeat = request_heartbeat
        self._unkillable_earlier_jobs: dict[str, JobRecord | None] = {}
        """Jobs of an earlier agent with processes that cannot be killed."""
        self._interrupted_launches: dict[str, LaunchPlan] = {}
        """Of jobs that an earlier agent prepared and did not start."""
        self._launch_rejection_reason = ""
        """Why launches are rejected; empty while they are accepted."""
        self._no_heartbeat_in_flight = asyncio.Event()
        self._no_heartbeat_in_flight.set()
        self._preparation_slots = asyncio.Semaphore(PREPARING_JOBS_MAX)
        self._finished_run_sizes: dict[Path, RunDirectorySize] = {}
        """Of the directories of finished jobs."""

    async def adopt_jobs_and_kill_leftovers(self) -> int:
        """Takes over the jobs that an earlier agent has left running; kills all of its other processes and
        returns their number.

        Their dead-man timers are not extended before a leader has acknowledged a heartbeat.
        """
        adopted, killed_count = await self._launcher.adopt_jobs_and_kill_leftovers(
            self._journal.jobs_dir, may_adopt=self._is_last_launch
        )
        for each in adopted:
            job_id = each.record.job_id
            self.live_jobs[job_id] = LocalJob(
                each.record,
                self._journal.job_dir(job_id),
                adopted=each,
                kill_reason=each.kill_reason,
            )
            _log.info("adopted job %s (epoch %d) of an earlier agent", job_id, each.record.epoch)
        return killed_count

    def _is_last_launch(self, record: JobRecord) -> bool:
        """Whether this is the last launch of the job on this node. The job may have damaged its record."""
        try:
            accepted = self._journal.read_job_record(record.job_id)
        except NameInvalidError:
            return False
        return accepted is None or accepted.epoch <= record.epoch

    def load_journal(self) -> None:
        """Reads what an earlier agent has left, after the adoption: unconfirmed exits, launches that it has
        not started, and jobs that cannot be killed. Blocks."""
        self.unsettled_exits = {
            job_id: report
            for job_id, report in self._journal.unsettled_exits().items()
            if job_id not in self.live_jobs
        }
        running = self._launcher.running_jobs_and_kill_errors()
        self._unkillable_earlier_jobs = {
            job_id: self._journal.read_job_record(job_id)
            for job_id in running
            if job_id not in self.live_jobs
        }
        for record, body in self._journal.take_prepared_launches(boot_id=self._launch_context.boot_id):
            plan = None if record.job_id in running else try_decode_plan(body)
            if plan is not None:
                self.live_jobs[record.job_id] = LocalJob(record, plan.directory)
                self._interrupted_launches[record.job_id] = plan
            elif record.job_id in running:
                self._try_discard_prepared_launch(record)
            else:
                self._report_unreadable_launch(record)

    def _report_unreadable_launch(self, record: JobRecord) -> None:
        """Reports a launch that cannot be continued as ended, so that the controller does not wait for it."""
        report = ExitReport(
            job_id=record.job_id,
            epoch=record.epoch,
            exit_code=None,
            reason="not started: this release of the agent cannot read what the earlier one had prepared",
            ended_at=self._clock.wall_s(),
            started=False,
            is_caused_by_node=True,
        )
        _log.warning("job %s (epoch %d) is %s", record.job_id, record.epoch, report.reason)
        self.unsettled_exits[record.job_id] = report
        self._try_discard_prepared_launch(record)
        try:
            self._write_exit_to_journal(report)
        except (GenieError, OSError) as error:
            _log.error("could not record the exit of %s: %s", record.job_id, error)

    def _try_discard_prepared_launch(self, record: JobRecord) -> None:
        try:
            self._journal.discard_prepared_launch(record.job_id, record.epoch)
        except OSError as error:
            _log.error("could not remove the prepared launch of %s: %s", record.job_id, error)

    async def continue_job_of_earlier_agent(self, job: LocalJob) -> None:
        """Starts a job whose launch was interrupted, and reports the endpoint of a session. Never raises."""
        plan = self._interrupted_launches.pop(job.job_id, None)
        if plan is not None:
            while not job.kill_reason and not self._lease.is_valid(self._clock.monotonic_s()):
                await self._clock.sleep(LEASE_POLL_INTERVAL_S)
            await self._start_job(job, partial(_return_plan, plan))
        elif job.is_session:
            await self._report_executor_endpoint(job)

    def running_jobs(self) -> tuple[RunningJob, ...]:
        stuck = self._launcher.running_jobs_and_kill_errors()
        now_s = self._clock.monotonic_s()
        return tuple(
            RunningJob(
                job_id=job_id,
                epoch=job.epoch,
                endpoint=job.endpoint,
                status_note=(stuck.get(job_id) or job.status_note)[:EXIT_REASON_CHARS_MAX],
                elapsed_s=job.elapsed_s(now_s),
            )
            for job_id, job in self.live_jobs.items()
        )

    @contextmanager
    def delay_launch_confirmations(self) -> Iterator[None]:
        """Delays launch confirmations while a heartbeat is sent that may not list the accepted job yet."""
        self._no_heartbeat_in_flight.clear()
        try:
            yield
        finally:
            self._no_heartbeat_in_flight.set()

    def stop_accepting_launches(self, reason: str) -> None:
        """Rejects all further launches with this reason."""
        self._launch_rejection_reason = reason

    def gpu_ids_in_use(self) -> frozenset[int]:
        """IDs of the accelerators that may have a process of a job."""
        return frozenset(
            gpu_id for job in self.live_jobs.values() for gpu_id in job.gpu_ids if job.has_started
        )

    def describe_unkillable_processes_on_gpu(self, gpu_id: int) -> str:
        """Which processes on this accelerator cannot be killed; empty if none.

        For a job of an earlier agent whose record cannot be read, all accelerators may have a process.
        """
        for job_id, stuck in self._launcher.running_jobs_and_kill_errors().items():
            if stuck:
                gpu_ids = self._gpu_ids_of_job(job_id)
                if gpu_ids is None or gpu_id in gpu_ids:
                    return f"{stuck} of job {job_id}"
        return ""

    def _gpu_ids_of_job(self, job_id: str) -> tuple[int, ...] | None:
        if job_id in self.live_jobs:
            return self.live_jobs[job_id].gpu_ids
        record = self._unkillable_earlier_jobs.get(job_id)
        return None if record is None else record.gpu_ids

    # --- launch and kill --------------------------------------------------------------------

    def accept_leader_token(self, leader_token: int, *, message_name: str) -> None:
        """Raises FencedError for a token lower than the highest one seen."""
        if self._journal.accept_leader_token_and_check_new(leader_token, message_name=message_name):
            self._journal_writes.add_work(self._journal.store_leader_token, action="store the leader token")

    async def accept_launch(self, launch: Launch) -> LocalJob:
        """Records the launch durably; call `prepare_and_start_job` next.

        Raises LaunchError or FencedError.
        """
        self._check_launch_acceptable(launch)
        record = JobRecord(
            job_id=launch.job_id,
            epoch=launch.placement.epoch,
            incarnation=launch.placement.incarnation,
            accepted_at=self._clock.wall_s(),
            gpu_ids=launch.placement.gpu_ids,
            tenant=launch.tenant,
            gpu_milli=launch.spec.resources.gpu_milli,
            kind=launch.spec.kind,
            has_deadman_timer=launch.has_deadman_timer,
            boot_id=self._launch_context.boot_id,
        )
        earlier = self.unsettled_exits.pop(launch.job_id, None)
        # Listed before it is recorded: meanwhile its accelerators are in use.
        job = self.live_jobs[launch.job_id] = LocalJob(record, self._journal.job_dir(launch.job_id))
        try:
            await self._journal_writes.run_work(partial(self._journal.record_launch, record))
        except BaseException as error:
            del self.live_jobs[launch.job_id]
            if earlier is not None:
                self.unsettled_exits[launch.job_id] = earlier
            if is_caused_by_node(error) or isinstance(error, OSError):
                raise NodeUnfitError(f"the launch of {launch.job_id} is rejected: {error}") from error
            raise
        return job

    def _check_launch_acceptable(self, launch: Launch) -> None:
        launch_text, place = f"the launch of {launch.job_id}", launch.placement
        self.accept_leader_token(launch.leader_token, message_name=launch_text)
        node_id = self._launch_context.get_node_info().node_id
        if place.node_id != node_id:
            raise LaunchError(f"{launch_text} is for node {place.node_id}, but this is node {node_id}")
        if place.incarnation != self._journal.incarnation:
            raise FencedError(
                f"{launch_text} is for incarnation {place.incarnation} of this node, "
                f"which is now at {self._journal.incarnation}"
            )
        if launch.job_id in self.live_jobs or self._has_unkillable_processes(launch.job_id):
            raise NodeUnfitError(f"{launch_text} is rejected: an earlier run has not ended on this node yet")
        if self._launch_rejection_reason:
            raise NodeUnfitError(f"{launch_text} is rejected: {self._launch_rejection_reason}")
        if blocked_reason := self._launch_context.get_node_info().closed:
            raise NodeUnfitError(f"{launch_text} is rejected: {blocked_reason}")
        if not self._lease.is_valid(self._clock.monotonic_s()):
            raise NodeUnfitError(f"{launch_text} is rejected: the lease of this node has expired")
        if conflict := self._why_accelerators_not_free(launch):
            raise NodeUnfitError(f"{launch_text} is rejected: {conflict}")
        if len(self.live_jobs) >= LIVE_JOBS_MAX:
            raise NodeUnfitError(f"{launch_text} is rejected: this node already has {LIVE_JOBS_MAX} jobs")

    def _has_unkillable_processes(self, job_id: str) -> bool:
        return (
            job_id in self._unkillable_earlier_jobs
            and job_id in self._launcher.running_jobs_and_kill_errors()
        )

    def _why_accelerators_not_free(self, launch: Launch) -> str:
        """Why the accelerators of the launch are not free yet; empty if they are.

        The ledger may list them as free while a process of a reclaimed job has not ended here, for example
        after the whole machine was suspended.
        """
        requested = launch.spec.resources.gpu_milli
        for gpu_id in launch.placement.gpu_ids:
            if stuck := self.describe_unkillable_processes_on_gpu(gpu_id):
                return f"accelerator {gpu_id}: {stuck}"
            others = [job.record for job in self.live_jobs.values() if gpu_id in job.gpu_ids]
            if any(other.tenant != launch.tenant for other in others):
                return f"a job of another tenant has not ended on accelerator {gpu_id} yet"
            if sum(other.gpu_milli for other in others) + requested > FULL_MILLI:
                return f"{others[0].job_id} has not ended on accelerator {gpu_id} yet"
        return ""

    def kill_job(self, job_id: str, *, epoch: int, reason: str, grace_s: float | None = None) -> None:
        """Takes effect immediately or, for a job in preparation, at its next step."""
        job = self.live_jobs.get(job_id)
        if job is not None and job.epoch == epoch:
            job.kill_reason = job.kill_reason or reason
            self._launcher.kill_job(job_id, reason=reason, grace_s=grace_s)

    def kill_all_jobs(self, reason: str) -> None:
        for job_id, job in self.live_jobs.items():
            self.kill_job(job_id, epoch=job.epoch, reason=reason)

    def kill_jobs_that_end_with_lease(self) -> None:
        """Kills the jobs that the controller may start elsewhere when the lease of the node has expired.

        Their shims do the same; a stopped one is killed before the controller reclaims the accelerators."""
        grace_s = self._lease.grace_after_lease_expiry_s(self._config.stop_grace_s)
        for job_id, job in self.live_jobs.items():
            if job.ends_with_lease:
                self.kill_job(job_id, epoch=job.epoch, reason=CONTACT_LOST_REASON, grace_s=grace_s)

    def settle_exits(self, job_ids: Collection[str]) -> None:
        for job_id in job_ids:
            self.unsettled_exits.pop(job_id, None)
        if job_ids:
            work = partial(self._journal.mark_exits_settled, job_ids)
            self._journal_writes.add_work(work, action="mark exits as settled", writes=False)

    async def collect_exits(self) -> None:
        """Records the exits that the launcher has seen."""
        for report in sorted(self._launcher.take_exit_reports(), key=self._needs_executor_status):
            self._record_exit(await self._add_executor_status(report))

    # --- from acceptance to start -----------------------------------------------------------

    async def prepare_and_start_job(self, job: LocalJob, launch: Launch) -> None:
        """Prepares, confirms and starts the job. Never raises: an error becomes the job's exit report."""

        async def prepare() -> LaunchPlan:
            async with self._preparation_slots:
                plan = await self._prepare_launch(job, launch)
            # From the confirmation on, only this node can start the job: so must the next agent.
            store = partial(self._journal.store_prepared_launch, job.record, encode_plan(plan))
            await self._launch_context.offload(store, writes=True)
            return plan

        await self._start_job(job, prepare)

    async def _start_job(self, job: LocalJob, prepare: Callable[[], Awaitable[LaunchPlan]]) -> None:
        job_id = job.job_id
        try:
            plan = await prepare()
            await self._confirm_launch(job)
            await self._launcher.start_job(plan, deadman_expiry_s=self._lease.expires_at_s)
            job.started_s = self._clock.monotonic_s()
            if job.kill_reason:
                self._launcher.kill_job(job_id, reason=job.kill_reason)
            _log.info("job %s started (epoch %d)", job_id, job.epoch)
        except (GenieError, OSError) as error:
            by_node = bool(job.kill_reason) or is_caused_by_node(error)
            self._record_failed_launch(
                job, job.kill_reason or f"not started: {error}", is_caused_by_node=by_node
            )
        except Exception:
            _log.exception("could not start job %s", job_id)
            self._record_failed_launch(job, "not started: internal error (see the log of the agent)")
        if job.has_started and job.is_session:
            await self._report_executor_endpoint(job)

    async def _prepare_launch(self, job: LocalJob, launch: Launch) -> LaunchPlan:
        context = self._launch_context
        env = preparation.job_environment(
            launch, base=context.base_env, node=context.get_node_info(), directory=job.directory
        )
        if launch.spec.workdir is not None:
            await self._fetch_and_unpack_workdir(job, launch.spec.workdir)
        if job.is_session:
            argv = await preparation.prepare_executor(
                self._make_retrying_leader_call(job),
                launch,
                directory=job.directory,
                ca_path=context.ca_path,
                listen_host=context.listen_host,
                memory_bytes_max=self._config.executor_memory_bytes_max,
                op_libraries=self._config.executor_op_libraries,
                node=context.get_node_info(),
                offload=context.offload,
            )
        else:
            argv = preparation.job_command(launch)
        return LaunchPlan(
            job_id=launch.job_id,
            epoch=job.epoch,
            argv=argv,
            env=env,
            directory=job.directory,
            work_dir=job.directory / "work",
            log_file_bytes_max=self._config.log_bytes_max,
            log_files_max=self._config.log_files_max,
            grace_s=self._config.stop_grace_s,
            deadman_grace_s=self._lease.grace_after_lease_expiry_s(self._config.stop_grace_s),
            has_deadman_timer=launch.has_deadman_timer,
            record=job.record,
            socket_path=self._journal.shim_socket_path(launch.job_id, job.epoch),
            prepared_path=self._journal.prepared_launch_path(launch.job_id, job.epoch),
        )

    async def _fetch_and_unpack_workdir(self, job: LocalJob, workdir: Workdir) -> None:
        """Raises NodeUnfitError if the disk has too little space. How much the files need depends on the
        blocks of the file system; that is known only if the disk was filled."""
        node = self._launch_context.get_node_info()
        needed_bytes = workdir.size_bytes * WORKDIR_DISK_BYTES_PER_ARCHIVE_BYTE_MIN
        if node.disk_total_bytes and node.disk_free_bytes < needed_bytes:
            job.needed_disk_bytes = needed_bytes
            raise NodeUnfitError(
                f"the working directory needs {needed_bytes} bytes of free disk space, packed and unpacked; "
                f"{node.disk_free_bytes} are free"
            )
        try:
            await preparation.fetch_and_unpack_workdir(
                self._make_retrying_leader_call(job),
                workdir,
                job.directory,
                offload=self._launch_context.offload,
            )
        except (GenieError, OSError) as error:
            most_bytes = workdir.size_bytes * WORKDIR_DISK_BYTES_PER_ARCHIVE_BYTE_MAX
            if is_caused_by_full_disk(error) and node.disk_total_bytes and node.disk_free_bytes < most_bytes:
                job.needed_disk_bytes = most_bytes
            raise

    async def _confirm_launch(self, job: LocalJob) -> None:
        # A heartbeat from before the acceptance must not arrive after the confirmation: the controller
        # would miss a running job in it.
        await self._no_heartbeat_in_flight.wait()
        confirmation = ConfirmLaunch(
            job_id=job.job_id,
            epoch=job.epoch,
            incarnation=job.record.incarnation,
            wait_s=CONFIRM_WAIT_FOR_WORKERS_S,
        )
        # If the reply was lost, a job without a dead-man timer counts as running until the node returns. So
        # the agent does not give up before a leader has replied; a void launch is fenced then.
        timeout_s = LEADER_CALL_RETRY_TIMEOUT_S if job.ends_with_lease else math.inf
        await self._make_retrying_leader_call(job, timeout_s=timeout_s)(confirmation)
        self._check_not_killed(job)

    def _make_retrying_leader_call(
        self, job: LocalJob, *, timeout_s: float = LEADER_CALL_RETRY_TIMEOUT_S
    ) -> preparation.CallLeaderWithRetries:
        """Retries retryable errors, with backoff, until the timeout or until the job is killed."""
        deadline_s = self._clock.monotonic_s() + timeout_s

        async def call(request: Request[_Reply]) -> _Reply:
            backoff_s = LEADER_CALL_BACKOFF_S_MIN
            while True:
                self._check_not_killed(job)
                try:
                    return await self._call_leader(request)
                except GenieError as error:
                    if not error.retryable or self._clock.monotonic_s() > deadline_s:
                        raise
                    _log.info("retrying a request to the controller for job %s: %s", job.job_id, error)
                    has_waited = isinstance(error, WorkersMissingError)  # at the controller
                    backoff_s = LEADER_CALL_BACKOFF_S_MIN if has_waited else backoff_s
                    wait_s = max(backoff_s, error.retry_after_s)
                await self._clock.sleep(wait_s)
                backoff_s = min(2 * backoff_s, LEADER_CALL_BACKOFF_S_MAX)

        return call

    def _check_not_killed(self, job: LocalJob) -> None:
        has_expired = job.ends_with_lease and not self._lease.is_valid(self._clock.monotonic_s())
        if not job.kill_reason and has_expired:
            job.kill_reason = CONTACT_LOST_REASON
        if job.kill_reason:
            raise LaunchError(job.kill_reason)

    # --- sessions ---------------------------------------------------------------------------

    async def _report_executor_endpoint(self, job: LocalJob) -> None:
        """Waits until the executor listens, then reports its address to the controller. Never raises."""
        job_id = job.job_id
        try:
            port = await self._wait_for_executor_port(job)
            if port is None:
                return
            job.executor_start_status = ""
            job.endpoint = Endpoint(
                host=self._launch_context.advertised_host,
                port=port,
                server_name=tls.executor_certificate_name(job_id),
            )
            self._request_heartbeat()
            await self._make_retrying_leader_call(job)(
                ExecutorReady(job_id=job_id, epoch=job.epoch, endpoint=job.endpoint)
            )
        except GenieError as error:
            if job.endpoint is None:
                self.kill_job(job_id, epoch=job.epoch, reason=f"ended by Genie: {error}")
            else:
                _log.info(
                    "could not report the endpoint of %s: %s; the next heartbeat reports it", job_id, error
                )
        except Exception:
            _log.exception("ending executor %s: could not report its endpoint to the controller", job_id)
            self.kill_job(job_id, epoch=job.epoch, reason="ended by Genie: internal error")

    async def _wait_for_executor_port(self, job: LocalJob) -> int | None:
        """Returns the executor's port; None if it ended first."""
        started_s = self._clock.monotonic_s()
        pause_s = 0.01
        while self.live_jobs.get(job.job_id) is job:
            port = await self._launch_context.offload(partial(preparation.read_executor_port, job.directory))
            if port is not None:
                return port
            status = await self._launch_context.offload(
                partial(preparation.read_executor_status, job.directory)
            )
            start_status = status[:EXIT_REASON_CHARS_MAX]
            if start_status != job.executor_start_status:
                job.executor_start_status = start_status
                self._request_heartbeat()
            limit_s = (
                EXECUTOR_START_TIMEOUT_IF_STATUS_REPORTED_S if start_status else EXECUTOR_START_TIMEOUT_S
            )
            if self._clock.monotonic_s() > started_s + limit_s:
                raise LaunchError(
                    f"the executor was not ready within {limit_s:g} s"
                    + (start_status and f": {start_status}")
                )
            await self._clock.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)
        return None

    # --- exits ------------------------------------------------------------------------------

    def _record_failed_launch(self, job: LocalJob, reason: str, *, is_caused_by_node: bool = False) -> None:
        reason = reason[:EXIT_REASON_CHARS_MAX]
        _log.warning("job %s failed: %s", job.job_id, reason)
        self._record_exit(
            ExitReport(
                job_id=job.job_id,
                epoch=job.epoch,
                exit_code=None,
                reason=reason,
                ended_at=self._clock.wall_s(),
                started=False,
                is_caused_by_node=is_caused_by_node,
                needed_disk_bytes=job.needed_disk_bytes,
            )
        )

    def _record_exit(self, exit_report: ExitReport) -> None:
        """Reports the exit at once. If the agent is killed before it is stored, the shim's own record counts,
        and without one the job counts as lost."""
        _log.info("job %s ended: %s", exit_report.job_id, exit_report.reason)
        self.live_jobs.pop(exit_report.job_id, None)
        self.unsettled_exits[exit_report.job_id] = exit_report
        self._journal_writes.add_work(
            partial(self._write_exit_to_journal, exit_report),
            action=f"record the exit of {exit_report.job_id}",
        )
        self._request_heartbeat()

    def _write_exit_to_journal(self, report: ExitReport) -> None:
        self._journal.discard_prepared_launch(report.job_id, report.epoch)
        preparation.remove_executor_secrets(self._journal.job_dir(report.job_id))
        self._journal.discard_temporary_files(report.job_id)
        if self._journal.read_exit_report(report.job_id) is None:
            self._journal.write_exit_record(report)

    def _needs_executor_status(self, report: ExitReport) -> bool:
        job = self.live_jobs.get(report.job_id)
        if job is None or not job.is_session or not report.exit_code:
            return False
        return job.endpoint is None or report.exit_code == CLIENT_LOST_EXIT_CODE

    async def _add_executor_status(self, report: ExitReport) -> ExitReport:
        """Adds the status of an executor that failed before it listened, or that lost its client."""
        if not self._needs_executor_status(report):
            return report
        read = partial(preparation.read_executor_status, self._journal.job_dir(report.job_id))
        try:
            async with asyncio.timeout(EXECUTOR_STATUS_READ_TIMEOUT_S):
                status = await self._launch_context.offload(read)
        except TimeoutError:
            status = ""
        reason = f"{report.reason}: {status}" if status else report.reason
        return msgspec.structs.replace(report, reason=reason[:EXIT_REASON_CHARS_MAX])

    async def discard_old_runs_and_list_discarded(self, *, bytes_to_free: int) -> Collection[Path]:
        """Returns the directories that are to be removed: they no longer belong to a job."""
        live = frozenset(self.live_jobs) | frozenset(self._launcher.running_jobs_and_kill_errors())
        self._finished_run_sizes = await self._launch_context.offload(
            partial(self._measure_finished_runs, live)
        )
        discard = partial(
            self._journal.discard_old_runs_and_list_discarded,
            kept_count=self._config.jobs_kept,
            live_job_ids=frozenset(self.live_jobs) | live,
            sizes=self._finished_run_sizes,
            bytes_max=self._config.jobs_bytes_max,
            bytes_to_free=bytes_to_free,
        )
        return await self._journal_writes.run_work(discard, writes=False)

    def _measure_finished_runs(self, live_job_ids: Collection[str]) -> dict[Path, RunDirectorySize]:
        known = self._finished_run_sizes
        finished = self._journal.finished_run_directories(live_job_ids)
        sizes = {path: job_files.try_measure_run_directory(path, known.get(path)) for path in finished}
        return {path: size for path, size in sizes.items() if size is not None}


async def _return_plan(plan: LaunchPlan) -> LaunchPlan:
    return plan
