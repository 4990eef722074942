"""One round of faults: cluster, workload, one fault after the other, and the checks at the end."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from genie.cluster.client import open_client
from genie.errors import GenieError, StoreError
from genie.model.job import JobState
from genie.model.node import NodeStatus
from tests.faults.checks import (
    FaultWindow,
    JobEvent,
    Records,
    find_violations,
    last_jobs,
    read_job_events,
)
from tests.faults.faults import Fault, FaultTargets, Injection, wait_etcd_leader
from tests.faults.machines import FaultCluster, Machine
from tests.faults.namespaces import MachineNetwork
from tests.faults.store_history import (
    Revision,
    fetch_member_statuses,
    fetch_revision,
    find_etcd_problem,
    read_revisions,
)
from tests.faults.workload import Workload, encode_history
from tests.linearizability.checker import SearchLimitExceededError, check_linearizable
from tests.linearizability.models import JOBS

SETTLE_TIMEOUT_S = 90.0
ACCEPT_TIMEOUT_S = 60.0
NODE_LOSS_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 120.0
_POLL_S = 0.25
_STATUS_TIMEOUT_S = 5.0


@dataclass
class FaultResult:
    """Times in seconds since the injection; since the end of the fault if no server could accept before."""

    fault: str
    leader: str = ""
    had_etcd_leader: bool = False
    """Whether the fault has stopped the leader of etcd."""
    accepted_s: dict[str, float] = field(default_factory=dict)
    """Until the first submission through each other server was accepted."""
    is_outage: bool = False
    """Whether no server could accept one during the fault: the times include the start of the processes."""
    node_lost_s: float | None = None
    settled_s: float | None = None
    """From the end of the fault until every process was healthy."""
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class RoundResult:
    faults: list[FaultResult]
    violations: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> RoundResult:
        return cls([FaultResult(**each) for each in body["faults"]], list(body["violations"]))


def run_round(
    folder: Path,
    faults: Sequence[Fault],
    *,
    nodes: int,
    rng: random.Random,
    on_result: Callable[[FaultResult], None],
    results_directory: Path | None,
) -> RoundResult:
    """Runs in a sandbox only. Copies logs and histories to `results_directory`, if there is one."""
    cluster = FaultCluster(folder, MachineNetwork.create(), nodes=nodes)
    run = FaultRound(cluster, rng=rng, on_result=on_result)
    try:
        return asyncio.run(run.run(faults))
    finally:
        cluster.stop()
        if results_directory is not None:
            run.write_results(results_directory)


class FaultRound:
    """Used once."""

    def __init__(
        self, cluster: FaultCluster, *, rng: random.Random, on_result: Callable[[FaultResult], None]
    ) -> None:
        self._cluster = cluster
        self._rng = rng
        self._on_result = on_result
        self._workload = Workload(cluster, cluster.folder / "events")
        self._windows: list[FaultWindow] = []
        self._leader_tokens: dict[str, list[int]] = {machine.name: [] for machine in cluster.machines}
        self._results: list[FaultResult] = []
        self._violations: list[str] = []

    async def run(self, faults: Sequence[Fault]) -> RoundResult:
        began_s = time.monotonic()
        await self._cluster.start()
        await self._workload.prepare()
        await self._wait_settled()
        print(f"the cluster is ready after {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
        async with asyncio.TaskGroup() as group:
            submitting = group.create_task(self._workload.run())
            for fault in self._rng.sample(faults, len(faults)):
                if not await self._try_inject(fault):
                    break
            submitting.cancel()
        await self._end_all_jobs()
        await self._check()
        return RoundResult(self._results, self._violations)

    async def _try_inject(self, fault: Fault) -> bool:
        """Injects one fault. False if the cluster is not healthy afterwards: others would prove nothing."""
        result = FaultResult(fault.name)
        try:
            await self._inject(fault, result)
        except Exception as error:  # a task boundary: the checks must run
            result.problem = f"{type(error).__name__}: {error}"
            self._violations.append(f"{fault.name}: {result.problem}")
            traceback.print_exc()
        self._sample_leader_tokens()
        self._results.append(result)
        self._on_result(result)
        return not result.problem

    async def _inject(self, fault: Fault, result: FaultResult) -> None:
        leader = await self._cluster.find_leader()
        etcd_leader = await wait_etcd_leader(self._cluster)
        result.leader = leader.name
        first_revision = await fetch_revision(leader)
        targets = FaultTargets(
            self._cluster, self._workload, leader, etcd_leader, self._rng, self._wait_settled
        )
        injection = Injection()
        try:
            async with fault.inject(targets) as injection:
                result.had_etcd_leader = etcd_leader in injection.without_etcd
                result.is_outage = len(injection.silent) == len(self._cluster.servers)
                async with asyncio.timeout(max(ACCEPT_TIMEOUT_S, NODE_LOSS_TIMEOUT_S)):
                    await self._measure_during(fault, injection, result)
            healed_s = time.monotonic()
            if result.is_outage:
                await self._measure_acceptance(self._cluster.servers, result, since_s=healed_s)
            await self._wait_settled()
            result.settled_s = round(time.monotonic() - healed_s, 2)
            await self._workload.replace_ended_long_jobs()
        finally:
            self._record_window(fault, injection, first_revision)

    async def _measure_during(self, fault: Fault, injection: Injection, result: FaultResult) -> None:
        """Measures while the fault lasts, which is at least its `hold_s`."""
        others = [server for server in self._cluster.servers if server not in injection.silent]
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(injection.at_s + fault.hold_s - time.monotonic()))
            group.create_task(self._measure_acceptance(others, result, since_s=injection.at_s))
            if injection.lost is not None:
                group.create_task(self._measure_node_loss(injection, others, result))

    async def _measure_acceptance(
        self, servers: Sequence[Machine], result: FaultResult, *, since_s: float
    ) -> None:
        async def measure(server: Machine) -> None:
            accepted_s = await self._workload.measure_acceptance_s(server, since_s=since_s)
            result.accepted_s[server.name] = round(accepted_s, 2)

        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(measure(server))

    async def _measure_node_loss(
        self, injection: Injection, servers: Sequence[Machine], result: FaultResult
    ) -> None:
        lost = injection.lost
        assert lost is not None
        while True:
            with suppress(GenieError, TimeoutError):
                if await self._fetch_node_status(servers[0], lost) is NodeStatus.DISCONNECTED:
                    result.node_lost_s = round(time.monotonic() - injection.at_s, 2)
                    return
            await asyncio.sleep(_POLL_S)

    async def _fetch_node_status(self, server: Machine, machine: Machine) -> NodeStatus | None:
        settings = self._cluster.client_settings(server)
        async with asyncio.timeout(_STATUS_TIMEOUT_S), open_client(settings, timeout_s=3.0) as client:
            found = {view.info.node_id: view.info.status for view in await client.nodes()}
        return found.get(machine.name)

    def _record_window(self, fault: Fault, injection: Injection, first_revision: int) -> None:
        """A window lasts until the next one begins."""
        if self._windows:
            last = self._windows.pop()
            self._windows.append(
                FaultWindow(
                    last.name, last.first_revision, first_revision, last.ended_nodes, last.isolated_nodes
                )
            )
        self._windows.append(
            FaultWindow(
                fault.name,
                first_revision,
                sys.maxsize,
                frozenset(machine.name for machine in injection.ended),
                frozenset(machine.name for machine in injection.isolated),
            )
        )

    # --- healthy again ---------------------------------------------------------------------------

    async def _wait_settled(self) -> None:
        """Raises an error that names what is not healthy after SETTLE_TIMEOUT_S."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while problem := await self._why_not_settled():
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"not healthy {SETTLE_TIMEOUT_S:g} s after the fault: {problem}; last error of a client: "
                    f"{list(self._workload.errors)[-1:] or 'none'}"
                )
            await asyncio.sleep(_POLL_S)
        self._sample_leader_tokens()

    async def _why_not_settled(self) -> str:
        for machine in self._cluster.machines:
            if not machine.is_supervised:
                return f"the supervisor of {machine.name} has ended: {machine.read_supervisor_log()[-500:]}"
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                statuses = [await self._cluster.fetch_status(server) for server in self._cluster.servers]
                leaders = {status.leader for status in statuses}
                if len(leaders) != 1 or not all(status.store_ok for status in statuses):
                    return f"the servers name the leaders {sorted(leaders)}"
                settings = self._cluster.client_settings(self._cluster.servers[0])
                async with open_client(settings, timeout_s=3.0) as client:
                    nodes = {view.info.node_id: view.info for view in await client.nodes()}
        except (GenieError, TimeoutError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        for machine in self._cluster.machines:
            node = nodes.get(machine.name)
            if node is None or node.status is not NodeStatus.HEALTHY or node.closed:
                return f"node {machine.name} is {node and (node.status, node.status_reason, node.closed)}"
        members = await fetch_member_statuses(self._cluster.servers)
        problem = find_etcd_problem(members, members=len(self._cluster.servers))
        return f"etcd: {problem}" if problem else ""

    def _sample_leader_tokens(self) -> None:
        for machine in self._cluster.machines:
            self._leader_tokens[machine.name].append(machine.read_leader_token())

    # --- the end ---------------------------------------------------------------------------------

    async def _end_all_jobs(self) -> None:
        """Lets all jobs end, so that each accepted one must have a final state. Only the leader counts."""
        self._workload.stop_long_jobs()
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with suppress(GenieError, TimeoutError, OSError):
                status = await self._cluster.fetch_status(await self._cluster.find_leader())
                unfinished = sum(status.jobs.get(state, 0) for state in JobState if not state.is_final)
                if status.leading and not unfinished:
                    return
            await asyncio.sleep(_POLL_S)

    async def _check(self) -> None:
        self._sample_leader_tokens()
        events = read_job_events(self._cluster.folder / "events")
        revisions: list[Revision] = []
        try:
            revisions = await read_revisions(self._cluster.servers[0])
        except StoreError as error:
            self._violations.append(f"the history of the store was not checked: {error}")
        else:
            self._check_records(revisions, events)
        try:
            counterexample = check_linearizable(JOBS, self._workload.history)
        except SearchLimitExceededError as error:
            self._violations.append(f"the history of the clients was not checked: {error}")
        else:
            self._violations += [] if counterexample is None else [counterexample.describe()]
        print(
            f"checked {len(revisions)} revisions, {len(last_jobs(revisions))} jobs, {len(events)} events of "
            f"processes, {len(self._workload.history)} requests",
            file=sys.stderr,
            flush=True,
        )

    def _check_records(self, revisions: list[Revision], events: list[JobEvent]) -> None:
        records = Records(
            revisions,
            events,
            self._workload.accepted,
            frozenset(self._workload.unaccepted),
            self._windows,
            self._leader_tokens,
        )
        self._violations += find_violations(records)

    def write_results(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        lines = encode_history(self._workload.history)
        (directory / "requests.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        (directory / "errors.log").write_text("".join(f"{line}\n" for line in self._workload.errors))
        events = self._cluster.folder / "events" / "events.jsonl"
        if events.exists():
            shutil.copy2(events, directory)
        for machine in self._cluster.machines:
            logs = machine.state_dir / "logs"
            if logs.exists():
                shutil.copytree(logs, directory / machine.name, dirs_exist_ok=True)
            with suppress(OSError):
                shutil.copy2(machine.folder / "supervisor.log", directory / machine.name)
