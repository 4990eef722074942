"""Jobs of two tenants, submitted all the time through every server, and the history of these requests.

Each request is repeated with the same idempotency key, through one server after the other, until its outcome
is known. The history is that of tests/linearizability: what the clients called, when, and what they got.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from genie.cluster.client import open_client
from genie.config import Settings
from genie.errors import GenieError, JobNotFoundError, NotLeaderError
from genie.model.job import Job, JobSpec, PlacementConstraints, Resources, Workdir
from genie.model.messages import CancelJob, GetJob, GetStatus, SubmitJob
from genie.model.tenant import TokenKind
from genie.runtime.controller_connection import ControllerConnection
from genie.runtime.network import TcpNetwork
from genie.supervisor.connection import open_connection
from tests.faults import job_wrapper
from tests.faults.machines import FaultCluster, Machine
from tests.linearizability.checker import Operation
from tests.linearizability.models import Cancel, ReadJob, Submit

TENANTS = ("red", "blue")
SUBMIT_INTERVAL_S = 1.0
RESTARTABLE_PER_TENANT = 2
"""Long restartable jobs of each tenant that run on any node."""
FAILING_EXIT_CODE = 3
WORKDIR_TEXT = "input of a fault run"
_CONNECT_TIMEOUT_S = 5.0
_CALL_TIMEOUT_S = 10.0
_RETRY_INTERVAL_S = 0.1
_ERRORS_KEPT = 500
_SETUP_TIMEOUT_S = 60.0
_UNTIL_STOPPED = 0.0
_SHORT_S = 0.6

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class AcceptedJob:
    """A submission that the cluster has accepted."""

    tenant: str
    request_id: str
    job_id: str


@dataclass
class Tenant:
    name: str
    settings: dict[str, Settings] = field(default_factory=dict)
    """By server."""
    workdir: Workdir | None = None


class Workload:
    """Create it when the cluster runs; `run` submits until it is cancelled."""

    def __init__(self, cluster: FaultCluster, events_directory: Path) -> None:
        self.history: list[Operation] = []
        self.accepted: list[AcceptedJob] = []
        self.unaccepted: set[str] = set()
        """Idempotency keys whose outcome is not known yet."""
        self.errors: deque[str] = deque(maxlen=_ERRORS_KEPT)
        """Of requests that were repeated; for reports."""
        self._cluster = cluster
        self._events = events_directory
        self._tenants = [Tenant(name) for name in TENANTS]
        self._numbers = itertools.count(1)
        self._pinned: dict[str, str] = {}
        """Long job that cannot be restarted, by node."""

    async def prepare(self) -> None:
        """Creates tokens and working directories, and submits the long jobs."""
        self._events.mkdir(exist_ok=True)
        first = self._cluster.servers[0]
        async with open_client(self._cluster.client_settings(first)) as owner:
            for tenant in self._tenants:
                token = (await owner.create_token(TokenKind.USER, tenant=tenant.name)).token
                for server in self._cluster.servers:
                    tenant.settings[server.name] = self._cluster.client_settings(server, token=token)
        folder = self._events / "workdir"
        folder.mkdir(exist_ok=True)
        (folder / "input").write_text(WORKDIR_TEXT)
        for tenant in self._tenants:
            async with open_client(tenant.settings[first.name]) as client:
                job = await client.submit(self._make_spec(_SHORT_S, with_input=True), workdir=folder)
                tenant.workdir = job.spec.workdir
                self.accepted.append(AcceptedJob(tenant.name, job.request_id, job.job_id))
            for _ in range(RESTARTABLE_PER_TENANT):
                await self.submit(tenant, self._make_spec(_UNTIL_STOPPED, restartable=True))
        await self.replace_ended_long_jobs()

    async def replace_ended_long_jobs(self) -> None:
        """Submits a long job that cannot be restarted for each node that has none."""
        async with asyncio.timeout(_SETUP_TIMEOUT_S):
            for number, machine in enumerate(self._cluster.machines):
                tenant = self._tenants[number % len(self._tenants)]
                job_id = self._pinned.get(machine.name)
                if job_id is not None:
                    job = await self._call_until_known(tenant, partial(_get_job, job_id=job_id))
                    if not job.state.is_final:
                        continue
                spec = self._make_spec(_UNTIL_STOPPED, node_id=machine.name)
                self._pinned[machine.name] = (await self.submit(tenant, spec)).job_id

    async def run(self) -> None:
        """Submits, reads and cancels jobs of all tenants until cancelled."""
        async with asyncio.TaskGroup() as group:
            for tenant in self._tenants:
                group.create_task(self._submit_repeatedly(tenant))

    def stop_long_jobs(self) -> None:
        """Lets the jobs that run until they are stopped end with exit code 0."""
        (self._events / "stop").touch()

    async def submit(self, tenant: Tenant, spec: JobSpec) -> AcceptedJob:
        """Submits one job, and repeats the request until it is accepted."""
        request = SubmitJob(spec=spec, request_id=secrets.token_hex(8))

        def call_until_accepted() -> Awaitable[Job]:
            return self._call_until_known(tenant, lambda one: _fetch_job(one, request))

        return await self._submit_and_record(tenant, request, tenant.name, call_until_accepted)

    async def submit_burst(self, count: int) -> None:
        """Submits this number of short jobs at the same time."""
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                tenant = self._tenants[number % len(self._tenants)]
                group.create_task(self.submit(tenant, self._make_spec(_SHORT_S)))

    async def measure_acceptance_s(self, server: Machine, *, since_s: float) -> float:
        """Submits a job through this server alone until it is accepted; returns the time since `since_s` (of
        time.monotonic)."""
        tenant = self._tenants[0]
        request = SubmitJob(spec=self._make_spec(_SHORT_S), request_id=secrets.token_hex(8))

        async def call_until_accepted() -> Job:
            while True:
                try:
                    return await self._call_through(tenant, server, lambda one: _fetch_job(one, request))
                except (GenieError, TimeoutError) as error:
                    self._record_error(server, error)
                await asyncio.sleep(_RETRY_INTERVAL_S)

        await self._submit_and_record(tenant, request, f"probe-{server.name}", call_until_accepted)
        return time.monotonic() - since_s

    # --- one tenant ------------------------------------------------------------------------------

    async def _submit_repeatedly(self, tenant: Tenant) -> None:
        """Each request has its own task, so that an outage does not end the stream of submissions."""
        shapes: list[Callable[[], JobSpec]] = [
            lambda: self._make_spec(_SHORT_S),
            lambda: self._make_spec(_SHORT_S, restartable=True),
            lambda: self._make_spec(_SHORT_S, exit_code=FAILING_EXIT_CODE),
            lambda: self._make_spec(_SHORT_S, workdir=tenant.workdir, with_input=True),
            lambda: self._make_spec(_UNTIL_STOPPED),
        ]
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                is_cancelled = number % len(shapes) == len(shapes) - 1
                spec = shapes[number % len(shapes)]()
                group.create_task(self._submit_and_follow_up(tenant, spec, cancels=is_cancelled))
                await asyncio.sleep(SUBMIT_INTERVAL_S)

    async def _submit_and_follow_up(self, tenant: Tenant, spec: JobSpec, *, cancels: bool) -> None:
        job = await self.submit(tenant, spec)
        await asyncio.sleep(SUBMIT_INTERVAL_S)
        followed_by: Hashable = Cancel(job.request_id) if cancels else ReadJob(job.request_id)
        request = CancelJob(job_id=job.job_id) if cancels else GetJob(job_id=job.job_id)

        async def call(connection: ControllerConnection) -> Job | None:
            return await _fetch_job_from_leader(connection, request)

        await self._record_call(
            tenant.name,
            followed_by,
            lambda: self._call_until_known(tenant, call),
            to_output=lambda found: None if found is None else (found.job_id, found.state),
        )

    async def _submit_and_record(
        self, tenant: Tenant, request: SubmitJob, client: str, call: Callable[[], Awaitable[Job]]
    ) -> AcceptedJob:
        self.unaccepted.add(request.request_id)
        job = await self._record_call(
            client, Submit(request.request_id), call, to_output=lambda accepted: accepted.job_id
        )
        accepted = AcceptedJob(tenant.name, request.request_id, job.job_id)
        self.unaccepted.discard(request.request_id)
        self.accepted.append(accepted)
        return accepted

    async def _record_call(
        self,
        client: str,
        operation: Hashable,
        call: Callable[[], Awaitable[_Result]],
        *,
        to_output: Callable[[_Result], Any],  # Any: each operation has its own output
    ) -> _Result:
        """A call that is cancelled has an unknown outcome."""
        called_s, returned_s, output = time.monotonic(), math.inf, None
        try:
            result = await call()
            returned_s, output = time.monotonic(), to_output(result)
            return result
        finally:
            self.history.append(Operation(client, operation, output, called_s, returned_s))

    async def _call_until_known(
        self, tenant: Tenant, call: Callable[[ControllerConnection], Awaitable[_Result]]
    ) -> _Result:
        """Repeats the call, each time through the next server."""
        servers = self._cluster.servers
        while True:
            server = servers[next(self._numbers) % len(servers)]
            try:
                return await self._call_through(tenant, server, call)
            except (GenieError, TimeoutError) as error:
                self._record_error(server, error)
            await asyncio.sleep(_RETRY_INTERVAL_S)

    async def _call_through(
        self,
        tenant: Tenant,
        server: Machine,
        call: Callable[[ControllerConnection], Awaitable[_Result]],
    ) -> _Result:
        settings = tenant.settings[server.name]
        async with open_connection(
            settings, network=TcpNetwork(), timeout_s=_CONNECT_TIMEOUT_S, program="faults"
        ) as connection:
            return await call(connection)

    def _record_error(self, server: Machine, error: Exception) -> None:
        self.errors.append(f"{time.monotonic():.2f} {server.name}: {type(error).__name__}: {error}")

    def _make_spec(
        self,
        seconds: float,
        *,
        exit_code: int = 0,
        restartable: bool = False,
        node_id: str = "",
        workdir: Workdir | None = None,
        with_input: bool = False,
    ) -> JobSpec:
        wrapper = (sys.executable, "-I", "-S", job_wrapper.__file__)
        return JobSpec(
            name=f"job-{next(self._numbers)}",
            command=(*wrapper, str(self._events), str(seconds), str(exit_code)),
            resources=Resources(gpus=1),
            env={"FAULTS_INPUT": WORKDIR_TEXT} if with_input else {},
            workdir=workdir,
            node_id=node_id,
            constraints=PlacementConstraints(preemptible=restartable, grace_s=1.0),
        )


async def _fetch_job(connection: ControllerConnection, request: SubmitJob | GetJob | CancelJob) -> Job:
    return (await connection.call(request, timeout_s=_CALL_TIMEOUT_S)).job


async def _fetch_job_from_leader(connection: ControllerConnection, request: GetJob | CancelJob) -> Job | None:
    """None if there is no such job. Raises NotLeaderError if the reply may be that of a server that does not
    lead, which may be old."""
    where, reconnects = connection.where, connection.reconnects
    try:
        job = await _fetch_job(connection, request)
    except JobNotFoundError:
        job = None
    status = await connection.call(GetStatus(), timeout_s=_CALL_TIMEOUT_S)
    if not status.leading or (where, reconnects) != (connection.where, connection.reconnects):
        raise NotLeaderError(f"the reply of {where} may be old")
    return job


async def _get_job(connection: ControllerConnection, job_id: str) -> Job:
    return await _fetch_job(connection, GetJob(job_id=job_id))


def encode_history(history: list[Operation]) -> list[bytes]:
    """One JSON object per operation."""
    return [
        msgspec.json.encode(
            {
                "client": operation.client,
                "operation": type(operation.input).__name__,
                "request_id": getattr(operation.input, "request_id", ""),
                "output": operation.output,
                "called_s": operation.called_s,
                "returned_s": None if operation.is_pending else operation.returned_s,
            }
        )
        for operation in history
    ]
