"""The master: puts the parts together and keeps them going.

One TaskGroup holds everything: the server, the ledger's writer, orders to agents, and the loop that
campaigns, leads a term, and campaigns again. While it leads, a pass over the queue runs at every
change and at every tick; at a tick it also reclaims, queues again and drops silent clients. Losing
the store ends the term: nothing is decided, reads are answered from memory, running work is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from genie.config import ControllerConfig
from genie.controller.admission import Admission, Certificates
from genie.controller.agents import Agents
from genie.controller.blobs import Blobs
from genie.controller.election import Election, StoreHealth
from genie.controller.explaining import Explaining
from genie.controller.jobs import Jobs
from genie.controller.ledger import ClusterRecord, Ledger, Transaction
from genie.controller.logs import Logs
from genie.controller.membership import Membership
from genie.controller.orders import Orders
from genie.controller.planning import Planner
from genie.controller.policy import make_policy
from genie.controller.quotas import QuotaRequests, QuotaTable
from genie.controller.service import Service
from genie.controller.sessions import Sessions
from genie.controller.store import Put, Store
from genie.controller.tokens import Tokens
from genie.controller.users import Cluster, Users
from genie.controller.views import Views
from genie.controller.waiting import Bell, wait_event
from genie.errors import GenieError, LeadershipError, StoreError, TlsError
from genie.model.job import Job, JobState, Stop
from genie.model.names import address_text
from genie.model.node import NodeStatus
from genie.runtime import files
from genie.runtime.clock import Clock
from genie.runtime.credentials import LocalCluster, keep_trust
from genie.runtime.network import Network
from genie.runtime.placers import placer_factory
from genie.runtime.tasks import Offload, first_error, run_inline
from genie.scheduler.scheduler import Preempt, Rules, Start

_log = logging.getLogger(__name__)

CONTROLLERS_PREFIX = "controller/"
DIRECTORY = "controller"
_TICK_S = 0.5
# Until an agent knows of a new controller, it cannot find it should this one fail.
_HOUSEKEEPING_S = 2.0
_RETRY_S = 1.0
_LOGGED_MAX = 8
_PLACEMENT = "supply"
# Addresses that mean all of this machine's, and how this machine itself gets there.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound to


class Controller:
    """One controller. `name` is its own across restarts; two that run at once must not share it.

    The caller opens and closes `store`. `offload` runs blocking file work, one at a time.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        state_dir: Path,
        store: Store,
        network: Network,
        clock: Clock,
        name: str,
        random_bytes: Callable[[int], bytes] = os.urandom,
        offload: Offload = run_inline,
    ) -> None:
        self._config = config
        self._state_dir = state_dir
        self._store = store
        self._network = network
        self._clock = clock
        self._name = name
        self._random_bytes = random_bytes
        self._directory = files.make_private_directory(state_dir / DIRECTORY)
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._tick_s = min(_TICK_S, config.node_suspect_s / 4)
        self._is_announced = False
        self._controllers: tuple[str, ...] = ()
        self._statuses: dict[str, NodeStatus] = {}
        self._next_tick_s = 0.0
        self._fault = ""
        self.port = 0
        self._build_deciders()
        self._build_doors(offload)

    def _build_deciders(self) -> None:
        config, clock, random_bytes, store = self._config, self._clock, self._random_bytes, self._store
        self._certificates = Certificates.open(self._directory, config, clock=clock)
        self._health = StoreHealth()
        self._election = Election(
            store, clock=clock, name=self._name, ttl_s=config.leader_ttl_s, health=self._health
        )
        self._ledger = ledger = Ledger(store, self._election, self._health)
        wake = self._wake.set
        self._jobs = jobs = Jobs(
            ledger, config=config, clock=clock, random_bytes=random_bytes, bell=Bell(clock), wake=wake
        )
        self._tokens = Tokens(
            ledger,
            store,
            config=config,
            clock=clock,
            random_bytes=random_bytes,
            pin=self._certificates.pin,
        )
        self._sessions = Sessions(ledger, jobs, clock=clock, random_bytes=random_bytes)
        self._membership = Membership(config)
        self._views = Views(ledger, self._membership, clock=clock)
        self._quotas = QuotaTable(ledger)
        self._policy = make_policy(config, clock=clock)
        self._planner = self._build_planner()
        jobs.starter = self._planner
        ledger.jobs.on_change.append(self._follow)
        self._placed: list[Job] = []
        """And not yet sent on their way; only while the loop turns once."""
        self._starting = 0
        """Workers that a pass has placed, while that is being written."""
        self._launched: list[Job] = []
        """Since the last tick, for the log."""
        self._orders = Orders()
        self._admission = Admission(ledger, self._tokens, self._certificates, jobs, clock=clock)
        self._agents = Agents(
            ledger=ledger,
            jobs=jobs,
            sessions=self._sessions,
            membership=self._membership,
            election=self._election,
            orders=self._orders,
            config=config,
            clock=clock,
            controllers=lambda: self._controllers,
            refresh_controllers=self._read_controllers,
            forget=self._admission.forget,
            wake=wake,
        )

    def _build_planner(self) -> Planner:
        self._make_placer, _ = placer_factory(build=False)
        return Planner(
            self._ledger,
            self._jobs,
            self._views,
            clock=self._clock,
            make_placer=lambda policy: self._make_placer(policy, 0, ()),
            policy=_PLACEMENT,
            rules=self._rules,
            workers_max=self._config.node_workers_max,
            room=lambda: self._launches_left,
        )

    def _rules(self) -> Rules:
        quotas, weights = self._quotas.rules()
        return Rules(quotas=quotas, weights=weights).under(self._policy)

    def _build_doors(self, offload: Offload) -> None:
        config, clock = self._config, self._clock
        self._cluster = Cluster(
            ledger=self._ledger,
            jobs=self._jobs,
            agents=self._agents,
            sessions=self._sessions,
            tokens=self._tokens,
            blobs=Blobs(self._directory / "blobs", bytes_max=config.blobs_bytes_max),
            views=self._views,
            planner=self._planner,
            election=self._election,
            health=self._health,
            clock=clock,
            offload=offload,
            store_name=config.store.partition(":")[0],
            policy_name=config.policy,
            started_at=clock.wall_s(),
        )
        self._service = Service(
            ledger=self._ledger,
            election=self._election,
            tokens=self._tokens,
            admission=self._admission,
            certificates=self._certificates,
            clock=clock,
            ready=self._ready,
            controllers=lambda: self._controllers,
        )
        self._service.add(self._agents.handlers())
        self._service.add(Users(self._cluster, hang_up=self._service.hang_up).handlers())
        self._service.add(Logs(self._cluster).handlers())
        self._service.add(Explaining(self._cluster, self._planner).handlers())
        quotas = QuotaRequests(self._quotas, check_readable=self._cluster.check_readable)
        self._service.add(quotas.handlers())

    @property
    def address(self) -> str:
        """host:port under which others reach this controller."""
        return address_text(self._advertised(), self.port)

    @property
    def is_leading(self) -> bool:
        return self._election.is_leading

    def use_compiled(self) -> bool:
        """The scheduler's library is there now, and decides from the next pass on; False when it is not."""
        make, kind = placer_factory(build=False)
        if kind != "native":
            return False
        self._make_placer = make
        self._planner.forget()
        self._wake.set()
        return True

    async def wait_ready(self) -> None:
        """Until it listens and knows whether it leads."""
        await self._ready.wait()

    async def run(self) -> None:
        """Serves until cancelled. A GenieError of any part comes out as it is."""
        try:
            async with asyncio.TaskGroup() as group:
                listening = asyncio.Event()
                group.create_task(self._serve(listening, group), name="serve")
                group.create_task(self._ledger.run(), name="ledger")
                group.create_task(self._orders.run(), name="orders")
                await listening.wait()
                group.create_task(self._lead_forever(), name="lead")
        except* GenieError as errors:
            raise first_error(errors) from None
        finally:
            await self._election.resign()

    async def _serve(self, listening: asyncio.Event, group: asyncio.TaskGroup) -> None:
        context = self._certificates.server_context(self._directory)
        if context is not None:
            fresh = self._certificates.keep_fresh(context, self._directory)
            group.create_task(fresh, name="certificate")

        def on_listening(port: int) -> None:
            self.port = port
            self._controllers = (self.address,)
            _log.info("listening on %s:%d, TLS %s", self._config.bind, port, self._config.tls)
            listening.set()

        await self._network.serve(
            self._config.bind,
            self._config.port,
            self._service.accept,
            tls=context,
            on_listening=on_listening,
        )

    # -- terms --------------------------------------------------------------------------------

    async def _lead_forever(self) -> None:
        while True:
            if await self._try_begin_term():
                self._announce()
                self._ready.set()
                await self._lead()
                continue
            other = self._election.leader
            if self._health.ok and other is not None and other.name != self._name:
                self._ledger.forget()
                self._announce()
            self._ready.set()
            await self._clock.sleep(min(_RETRY_S, self._config.leader_ttl_s / 4))

    async def _try_begin_term(self) -> bool:
        try:
            await self._check_ca()
            await self._register_controller()
            if not await self._election.try_win(self.address):
                return False
            await self._ledger.load()
            await self._check_cluster()
            await self._tokens.ensure_owner(self._state_dir)
            await self._agents.begin_term()
        except (StoreError, LeadershipError) as error:
            if isinstance(error, StoreError):
                self._health.bad(error)
            _log.warning("cannot lead: %s", error)
            await self._election.resign()
            return False
        _log.info("leading, token %d", self._election.token)
        return True

    async def _register_controller(self) -> None:
        """Before it may lead: agents must know every address at which a leader could be."""
        key, value = CONTROLLERS_PREFIX + self._name, self.address.encode()
        standing = await self._store.get(key)
        if standing is None or standing.value != value:
            await self._store.commit([], [Put(key, value)])
        await self._read_controllers()

    async def _read_controllers(self) -> None:
        found = await self._store.range(CONTROLLERS_PREFIX)
        others = sorted({item.value.decode() for item in found.items} - {self.address})
        self._controllers = (self.address, *others)

    async def _check_ca(self) -> None:
        """A controller with a CA of its own could never serve this cluster's nodes: it stops at once."""
        table = self._ledger.cluster
        standing = await self._store.get(table.prefix)
        record = table.decoded("", standing.value) if standing is not None else None
        if (
            record is not None
            and self._certificates.are_on
            and record.ca_pin not in (self._certificates.pin, "-")
        ):
            raise TlsError(
                "this controller has another CA than the cluster in its store",
                hint=f"copy controller/ca.pem and ca.key, and owner.token, of the first controller's state "
                f"directory to {self._state_dir}",
            )

    async def _check_cluster(self) -> None:
        """The cluster's own name, made once."""
        pin = self._certificates.pin
        record = self._ledger.cluster.get("")
        if record is None:
            record = ClusterRecord(cluster_id=self._random_bytes(8).hex(), ca_pin=pin)
        elif record.ca_pin == pin:
            return
        record = ClusterRecord(cluster_id=record.cluster_id, ca_pin=pin)

        def build(txn: Transaction) -> None:
            txn.put(self._ledger.cluster, "", record)

        await self._ledger.write(build)

    def _announce(self) -> None:
        """Lets commands on this machine find the cluster, once there is something to find."""
        if self._is_announced:
            return
        record = self._ledger.cluster.get("")
        host = _WILDCARDS.get(self._config.bind, self._config.bind)
        local = LocalCluster(host=host, port=self.port, cluster_id=record.cluster_id if record else "")
        if self._certificates.are_on:
            keep_trust(self._certificates.ca_pem, state_dir=self._state_dir)
        local.write(self._state_dir)
        self._is_announced = True

    async def _lead(self) -> None:
        self._next_tick_s = 0.0
        async with asyncio.TaskGroup() as group:
            passes = group.create_task(self._pass_forever(), name="passes")
            house = group.create_task(self._keep_house_forever(), name="house")
            await self._election.hold()
            passes.cancel()
            house.cancel()

    # -- passes -------------------------------------------------------------------------------

    async def _pass_forever(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._pass()
            except (StoreError, LeadershipError) as error:
                _log.warning("nothing is decided now: %s", error)
                await self._clock.sleep(self._tick_s)
            except Exception:  # a task boundary: one bad pass must not end the controller
                _log.exception("a pass failed")
                await self._clock.sleep(_RETRY_S)
            await wait_event(self._wake, clock=self._clock, timeout_s=self._tick_s)

    async def _pass(self) -> None:
        if self._clock.monotonic_s() >= self._next_tick_s:
            self._next_tick_s = self._clock.monotonic_s() + self._tick_s
            self._log_launched()
            await self._tick()
        await self._schedule()

    async def _tick(self) -> None:
        """What only time brings about, so that it need not be looked for at every change."""
        for node in self._views.current().values():
            self._note_status(node.node_id, node.info.status, node.info.status_reason)
        await self._agents.reclaim()
        await self._agents.requeue_unconfirmed()
        for job in await self._sessions.drop_silent():
            self._agents.kill(job)
        for job in filter(self._agents.hears_of, self._jobs.overdue(self._clock.wall_s())):
            await self._stop(job, Stop.LIMIT, f"its time limit of {job.spec.wishes.time_limit_s:g} s is over")

    async def _schedule(self) -> None:
        decisions = self._planner.decide()
        if self._planner.fault != self._fault:
            self._fault = self._planner.fault
            _log.error("%s", self._fault)
        starts: list[Start] = []
        # Each worker becomes an order; what has no room is decided again.
        room = self._launches_left - self._planner.pending
        for decision in decisions:
            if isinstance(decision, Start):
                room -= len(decision.places)
                starts += [decision] if room >= 0 else []
            elif not isinstance(decision, Preempt):
                self._jobs.explain(decision.job_id, decision.reason)
        try:
            await self._place(starts)
            for decision in decisions:
                if isinstance(decision, Preempt):
                    await self._preempt(decision)
        except Exception:
            self._planner.forget()  # what was decided and not done must not count
            raise
        finally:
            self._planner.settle(each.job_id for each in decisions if isinstance(each, Start))
        self._planner.refresh()

    async def _place(self, starts: list[Start]) -> None:
        placed: list[Job] = []
        self._starting = sum(len(start.places) for start in starts)
        try:
            await self._jobs.place(starts, placed=placed.append)
        finally:
            self._starting = 0
            self._placed += placed  # only now: meanwhile others may have been placed and launched
            self._launch()

    @property
    def _launches_left(self) -> int:
        """How many more workers may be placed now: those placed already, or about to be, go first."""
        return self._orders.room - self._starting - len(self._placed)

    def _follow(self, job_id: str, before: Job | None, after: Job | None) -> None:
        """One that was placed with its submission is launched when all of its transaction are known."""
        if before is None and after is not None and after.state is JobState.PLACING:
            if not self._placed:
                asyncio.get_running_loop().call_soon(self._launch)
            self._placed.append(after)

    def _launch(self) -> None:
        """Those that were placed, now that it is durable."""
        jobs, self._placed = self._placed, []
        self._agents.launch(jobs)
        self._launched.extend(jobs)

    def _log_launched(self) -> None:
        jobs, self._launched = self._launched, []
        if len(jobs) > _LOGGED_MAX:
            # A line for each of very many would cost more than the placing.
            _log.info("placed %d jobs", len(jobs))
            return
        for job in jobs:
            _log.info("job %s: %s", job.job_id, job.reason)

    async def _preempt(self, decision: Preempt) -> None:
        job = self._jobs.get(decision.job_id)
        if job is None:
            return
        _log.info("job %s %s", job.job_id, decision.reason)
        if job.state is JobState.PLACING:
            await self._jobs.requeue(job.job_id, epoch=job.epoch, reason=decision.reason)
        # Nothing when it waits again; but it may have been confirmed a moment before.
        await self._stop(job, Stop.PREEMPT, decision.reason)

    async def _stop(self, job: Job, stop: Stop, reason: str) -> None:
        stopped = await self._jobs.stop(job.job_id, epoch=job.epoch, stop=stop, reason=reason)
        if stopped is not None:
            self._agents.kill(stopped)

    async def _keep_house_forever(self) -> None:
        """Beside the passes: forgetting many old jobs must not keep new ones waiting."""
        while True:
            try:
                await self._keep_house()
            except (StoreError, LeadershipError) as error:
                _log.warning("housekeeping is put off: %s", error)
            except Exception:  # a task boundary: as in _pass_forever
                _log.exception("housekeeping failed")
            await self._clock.sleep(_HOUSEKEEPING_S)

    async def _keep_house(self) -> None:
        await self._jobs.drop_old()
        await self._tokens.drop_old()
        await self._read_controllers()
        self._agents.hang_up_uninformed()

    def _note_status(self, node_id: str, status: NodeStatus, reason: str) -> None:
        if self._statuses.get(node_id) != status:
            self._statuses[node_id] = status
            _log.info("node %s is %s%s", node_id, status, f": {reason}" if reason else "")

    def _advertised(self) -> str:
        if self._config.advertise:
            return self._config.advertise
        return socket.gethostname() if self._config.bind in _WILDCARDS else self._config.bind
