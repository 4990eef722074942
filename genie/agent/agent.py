"""The agent: keeps this node known to the controller, and its jobs running for exactly as long as they may.

One TaskGroup: the link with its heartbeats, the ticking clock, the launcher's ends, the inventory,
the certificate's renewal, the wish to stop. Clock, network, chance and processes come in as
arguments, so that genie/sim runs this very code. Not for: processes (launcher.py) and
deciding anything that the controller decides.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

import genie
from genie.agent import jobfiles
from genie.agent.identity import ca_path, keep_controllers, renew_certificate
from genie.agent.jobs import CONTACT_LOST, Jobs, Surroundings
from genie.agent.journal import Journal
from genie.agent.launcher import Launcher
from genie.agent.lease import Lease
from genie.agent.link import Link
from genie.agent.logs import serve_log
from genie.agent.reconcile import reconcile
from genie.config import AgentConfig
from genie.errors import (
    FencedError,
    GenieError,
    HardwareError,
    JobNotFoundError,
    NotLeaderError,
    ProtocolError,
)
from genie.hardware import HostFacts, host_facts
from genie.model.job import RUNS_KEPT
from genie.model.messages import (
    Done,
    ExitReport,
    Heartbeat,
    Kill,
    Launch,
    Leave,
    Message,
    ReadLog,
    Register,
    Registered,
    Request,
)
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus
from genie.runtime import rpc, wire
from genie.runtime.clock import Clock
from genie.runtime.credentials import Access
from genie.runtime.network import Network
from genie.runtime.tasks import Offload, first_error, run_inline

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

CALL_S = 5.0
INVENTORY_S_MIN = 1.0
RENEWAL_LOOK_S = 600.0
RENEWAL_AGAIN_S = 30.0
EXITS_TOLD_BYTES_MAX = wire.FRAME_BYTES_MAX // 2
HEARTBEAT_SHARE = 0.2
"""Of the time to live, at most, between two heartbeats, whatever the setting says."""
END_BEYOND_GRACE_S = 5.0
LAST_WORDS_S = 2.0
_POLL_S = 0.02


class Accelerators(Protocol):
    """What genie.hardware.Inventory is."""

    async def read_async(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]: ...


class Agent:
    """`run` once; `stop` ends it in good order from the same event loop."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        node_dir: Path,
        access: Access,
        network: Network,
        clock: Clock,
        rng: random.Random,
        inventory: Accelerators,
        launcher: Launcher,
        base_env: Mapping[str, str] | None = None,
        listen_host: str = "127.0.0.1",
        offload: Offload = run_inline,
        facts: Callable[[], HostFacts] = host_facts,
    ) -> None:
        self._config = config
        self._clock = clock
        self._inventory = inventory
        self._launcher = launcher
        self._facts = facts
        self._offload = offload
        self._journal = Journal(node_dir)
        self._lease = Lease()
        self._link = Link(access, network=network, clock=clock, rng=rng, handler=self._handle)
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._prune_due = True
        advertised = config.host or listen_host
        self._node = NodeInfo(
            node_id=node_dir.name,
            hostname="",
            role=NodeRole.WORKER,
            host=advertised,
            version=genie.__version__,
            labels=dict(config.labels),
            rack=config.rack or "",
        )
        around = Surroundings(
            base_env=dict(base_env or {}),
            listen_host=listen_host,
            advertised_host=advertised,
            ca_path=None if access.tls is None else ca_path(node_dir),
            offload=self._offload,
            node=lambda: self._node,
        )
        self._jobs = Jobs(
            config,
            journal=self._journal,
            launcher=launcher,
            lease=self._lease,
            clock=clock,
            ask=self._ask,
            surroundings=around,
            changed=self._wake.set,
        )

    @property
    def node(self) -> NodeInfo:
        """This node as it was last read."""
        return self._node

    def stop(self) -> None:
        """Jobs get SIGTERM, then SIGKILL; the controller is told if it can be reached; `run` returns."""
        self._stopping.set()

    async def run(self) -> None:
        """Until stopped. Raises AgentRunningError, NodeError, and what Link.run raises."""
        self._journal.open()
        try:
            count = self._launcher.end_leftovers(self._journal.jobs_dir)
            if count:
                _log.warning("ended %d processes that an earlier agent left running", count)
            incarnation = self._journal.begin_incarnation()
            self._node = msgspec.structs.replace(self._node, incarnation=incarnation)
            self._jobs.load()
            await self._read_inventory()
            await self._run_tasks()
        finally:
            self._launcher.close()
            self._journal.close()

    async def _run_tasks(self) -> None:
        fatal: GenieError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for work in (
                    self._link.run(self._attend, self._nobody_leads),
                    self._tick(),
                    self._collect_ends(),
                    self._poll_inventory(),
                    self._renew_certificate(),
                    self._end_in_order(),
                ):
                    group.create_task(work)
        except* _StoppedError:
            pass
        except* GenieError as several:
            fatal = first_error(several)
        if fatal is not None:
            self._jobs.kill_all(f"ended by Genie: {fatal.message}")
            await self._wait(
                lambda: not self._launcher.running(), self._config.stop_grace_s + END_BEYOND_GRACE_S
            )
            raise fatal

    # --- the controller ---------------------------------------------------------------------

    async def _attend(self, peer: rpc.Peer) -> None:
        """One connection to a leader, until it says that it no longer leads."""
        register = Register(node=self._node, exits=self._exits_to_tell())
        self._take_registered(await peer.call(register, timeout_s=CALL_S))
        self._journal.note_registered(peer.name, at=self._clock.wall_s())
        _log.info(
            "registered with %s as %s, incarnation %d", peer.name, self._node.node_id, self._node.incarnation
        )
        while await self._beat(peer):
            await self._wake.wait()
            self._wake.clear()

    def _take_registered(self, told: Registered) -> None:
        try:
            self._journal.obey(told.leader_token, what="a registration")
        except FencedError as error:
            # Not final, unlike FencedError from the controller: another one leads, and will answer.
            raise NotLeaderError(error.message) from error
        self._lease.ttl_s = told.ttl_s
        self._link.timeout_s = max(0.15 * told.ttl_s, 0.2)
        self._link.backoff_s_max = max(0.1 * told.ttl_s, 0.05)
        self._link.endpoints = keep_controllers(
            self._journal.node_dir, told.controllers, now=self._link.endpoints[0]
        )
        self._link.was_taken = True

    async def _beat(self, peer: rpc.Peer) -> bool:
        """Whether the peer still leads."""
        sent_at_s = self._clock.monotonic_s()
        heartbeat = Heartbeat(
            node_id=self._node.node_id,
            incarnation=self._node.incarnation,
            node=self._node,
            running=self._jobs.running(),
            exits=self._exits_to_tell(),
        )
        self._jobs.reported.clear()
        try:
            timeout_s = max(0.2 * self._lease.ttl_s, 2 * self._config.heartbeat_s)
            ack = await peer.call(heartbeat, timeout_s=timeout_s)
        except FencedError as error:
            # Registering again tells for certain whether this life is over.
            _log.warning("%s refused a heartbeat: %s", peer.name, error)
            return False
        finally:
            self._jobs.reported.set()
        actions = reconcile(
            ack,
            live={job_id: job.epoch for job_id, job in self._jobs.live.items()},
            ended={job_id: report.epoch for job_id, report in self._jobs.ended.items()},
            leader_token_seen=self._journal.leader_token,
        )
        if not actions.heed:
            _log.info("%s is no longer heeded: %s", peer.name, actions.why)
            return False
        self._journal.obey(ack.leader_token, what="a heartbeat's answer")
        self._lease.acknowledged(sent_at_s=sent_at_s)
        self._launcher.refresh(self._lease.until_s)
        for order in actions.kill:
            self._jobs.kill(
                order.job_id,
                epoch=order.epoch,
                reason=f"ended by Genie: {order.reason or 'not held'}",
                grace_s=order.grace_s,
            )
        self._jobs.settle(actions.settle)
        self._prune_due |= bool(actions.settle)
        return True

    def _nobody_leads(self, asked_since_s: float) -> None:
        self._lease.nobody_leads(asked_since_s=asked_since_s)
        self._launcher.refresh(self._lease.until_s)

    async def _ask(self, request: Request[_Reply]) -> _Reply:
        return await self._link.call(request, timeout_s=CALL_S)

    async def _handle(self, peer: rpc.Peer, request: Message) -> Message:
        match request:
            case Launch():
                assert self._group is not None
                job = self._jobs.accept(request)
                self._group.create_task(self._jobs.carry_out(job))
                return Done()
            case Kill():
                self._journal.obey(request.leader_token, what=f"the end of {request.job_id}")
                self._jobs.kill(
                    request.job_id, epoch=request.epoch, reason=request.reason, grace_s=request.grace_s
                )
                return Done()
            case ReadLog():
                return await self._serve_log(request)
        raise ProtocolError(f"an agent does not answer {type(request).__name__}")

    async def _serve_log(self, request: ReadLog) -> Message:
        directory = self._journal.run_dir(request.job_id, request.epoch)
        if not directory.is_dir():
            raise JobNotFoundError(
                f"node {self._node.node_id} has no log of {request.job_id}",
                hint=f"logs of the last {self._config.jobs_kept} jobs are kept (GENIE_AGENT_JOBS_KEPT), "
                f"and of each those of its last {RUNS_KEPT + 1} runs",
            )

        def is_live() -> bool:
            job = self._jobs.live.get(request.job_id)
            return job is not None and request.epoch in (0, job.epoch)

        return await serve_log(request, directory, is_live=is_live, clock=self._clock)

    # --- the tasks beside the link ----------------------------------------------------------

    def _exits_to_tell(self) -> tuple[ExitReport, ...]:
        """As many as fit into one message beside the rest; the others follow when these are settled."""
        told: list[ExitReport] = []
        size_bytes = 0
        for report in self._jobs.ended.values():
            size_bytes += len(msgspec.msgpack.encode(report))
            if size_bytes > EXITS_TOLD_BYTES_MAX:
                break
            told.append(report)
        return tuple(told)

    def _heartbeat_s(self) -> float:
        if self._lease.ttl_s <= 0:
            return self._config.heartbeat_s
        return min(self._config.heartbeat_s, HEARTBEAT_SHARE * self._lease.ttl_s)

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(self._heartbeat_s())
            self._wake.set()
            if self._jobs.live and not self._lease.is_good(self._clock.monotonic_s()):
                self._jobs.kill_all(CONTACT_LOST)
            if self._prune_due or self._journal.has_rubbish:
                self._prune_due = False
                for directory in self._jobs.prunable():
                    await self._offload(partial(jobfiles.try_remove_tree, directory))

    async def _collect_ends(self) -> None:
        while True:
            await self._launcher.wait_exit()
            self._jobs.collect()

    async def _poll_inventory(self) -> None:
        while True:
            await self._clock.sleep(max(self._config.heartbeat_s, INVENTORY_S_MIN))
            await self._read_inventory()

    async def _read_inventory(self) -> None:
        try:
            gpus = await self._inventory.read_async(self._jobs.gpus_in_use())
        except HardwareError as error:
            _log.warning("the accelerators cannot be read: %s", error)
            gpus = tuple(
                msgspec.structs.replace(gpu, available=False, reason=error.message) for gpu in self._node.gpus
            )
        facts = self._facts()
        bad = [f"accelerator {gpu.gpu_id}: {gpu.reason}" for gpu in gpus if not gpu.available]
        self._node = msgspec.structs.replace(
            self._node,
            hostname=facts.hostname,
            cpus=facts.cpus,
            memory_total_bytes=facts.memory_total_bytes,
            memory_used_bytes=facts.memory_used_bytes,
            gpus=gpus,
            status=NodeStatus.DEGRADED if bad else NodeStatus.HEALTHY,
            status_reason="; ".join(bad)[:200],
            last_heartbeat=self._clock.wall_s(),
        )

    async def _renew_certificate(self) -> None:
        while self._link.access.tls is not None:
            try:
                wait_s = await renew_certificate(
                    self._journal.node_dir, self._link, now=self._clock.wall_s(), timeout_s=CALL_S
                )
            except GenieError as error:
                _log.warning("the node's certificate could not be renewed: %s", error)
                wait_s = RENEWAL_AGAIN_S
            await self._clock.sleep(min(max(wait_s, 0.05), RENEWAL_LOOK_S))

    async def _end_in_order(self) -> None:
        await self._stopping.wait()
        self._jobs.closed = "the agent is stopping"
        self._jobs.kill_all("ended by Genie: the agent was stopped")
        await self._wait(lambda: not self._jobs.live, self._config.stop_grace_s + END_BEYOND_GRACE_S)
        self._wake.set()
        await self._wait(lambda: not (self._jobs.ended and self._link.is_up), LAST_WORDS_S)
        await self._leave()
        raise _StoppedError

    async def _leave(self) -> None:
        """Says goodbye if someone listens; without it the node is listed as silent until it is removed."""
        if not self._link.is_up:
            return
        goodbye = Leave(node_id=self._node.node_id, incarnation=self._node.incarnation)
        try:
            await self._link.call(goodbye, timeout_s=LAST_WORDS_S)
        except GenieError as error:
            _log.warning("could not leave in good order: %s", error)

    async def _wait(self, true: Callable[[], bool], timeout_s: float) -> None:
        """Until it is so, or until the time is over."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while not true() and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(_POLL_S)


class _StoppedError(Exception):
    """Ends the TaskGroup; never leaves this file."""
