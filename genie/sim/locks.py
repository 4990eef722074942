"""Simulated clients that use locks, and the invariants of locks.

The clients run the real lease (genie/cluster/locking/) on hosts with clocks and faults of their own: pauses,
cut links, and clocks that are up to 10% slow or fast. The controllers are those of the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from genie.cluster.locking.lock_lease import LockLease
from genie.controller.store import Delete, Put
from genie.errors import DeadlineError, GenieError, LockLostError, NotLeaderError
from genie.model.lock import LockRecord
from genie.model.messages import Message, Request
from genie.runtime.credentials import connect_authenticated
from genie.sim.cluster import SimCluster
from genie.sim.world import SimClock, SimNetwork

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

_LOCK_NAMES = ("a", "b")
_LOCK_KEY_PREFIX = "lock/"
_CLIENT_HOST_PREFIX = "127.0.11."
_CLOCK_RATES = (0.9, 1.0, 1.1)
_TTLS_S = (3.0, 12.0)
"""Shorter and longer than a change of leaders."""
_HOLD_S_MAX = 3.0
_PAUSE_BETWEEN_S_MAX = 0.5
_FAULT_SHARE = 0.15
_FAULT_S_MAX = 10.0
_ABANDONED_SHARE = 0.25
_CALL_TIMEOUT_S = 5.0
_RETRY_INTERVAL_S = 0.5
_LAST_ACQUISITION_S_MAX = 90.0
"""Each client waits for the others, of which one may have abandoned the lock."""


class LockInvariantChecker:
    """Checks each change of a lock in the store: tokens only grow, and no client gets a lock while another
    client may use it by its own clock."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._last_token_by_row: dict[str, int] = {}
        self.leases: set[LockLease] = set()
        """Those of all acquisitions that have not ended."""
        cluster.store.add_commit_listener(self._on_store_commit)

    def _on_store_commit(self, operations: Sequence[Put | Delete]) -> None:
        for operation in operations:
            if not operation.key.startswith(_LOCK_KEY_PREFIX):
                continue
            name = operation.key.rpartition("/")[2]
            token = 0
            if isinstance(operation, Put):
                token = msgspec.json.decode(operation.value, type=LockRecord).fencing_token
                self._check_token_grows(name, token)
            self._check_not_held_by_others(name, token)

    def _check_token_grows(self, name: str, token: int) -> None:
        last = self._last_token_by_row.get(name, 0)
        if token <= last:
            self._report_violation(f"lock {name} was granted with token {token} after token {last}")
        self._last_token_by_row[name] = max(token, last)

    def _check_not_held_by_others(self, name: str, token: int) -> None:
        """`token`: of the new holder; 0 if there is none."""
        for lease in self.leases:
            if lease.name == name and lease.is_held and lease.fencing_token != token:
                self._report_violation(
                    f"lock {name} was taken from a client whose lease with token {lease.fencing_token} has "
                    "not expired"
                )

    def _report_violation(self, description: str) -> None:
        self._cluster.machines.report_violation(description)


class SimLockClient:
    """Acquires, holds and releases locks until it is stopped, with faults of its own host."""

    def __init__(self, cluster: SimCluster, checker: LockInvariantChecker, *, number: int) -> None:
        self._cluster = cluster
        self._checker = checker
        self._host = f"{_CLIENT_HOST_PREFIX}{number + 1}"
        self._random = random.Random(f"{cluster.seed}/{self._host}")
        self._clock = SimClock(cluster.world, self._host)
        self._sender = _SimLockSender(cluster, self._host)
        self._is_stopping = False

    async def run(self) -> None:
        """Use the locks until `stop`; then acquire each of them once, which must succeed."""
        self._cluster.world.set_clock_rate(self._host, self._random.choice(_CLOCK_RATES))
        async with asyncio.TaskGroup() as group:
            faults = group.create_task(self._inject_faults())
            while not self._is_stopping:
                await self._acquire_and_end(self._random.choice(_LOCK_NAMES))
                await self._clock.sleep(self._random.uniform(0.0, _PAUSE_BETWEEN_S_MAX))
            faults.cancel()
        for name in _LOCK_NAMES:
            lease = self._make_lease(name, ttl_s=max(_TTLS_S))
            if not await self._try_acquire(lease, timeout_s=_LAST_ACQUISITION_S_MAX):
                self._cluster.machines.report_violation(
                    f"lock {name} was not acquired within {_LAST_ACQUISITION_S_MAX:g} s after the faults"
                )
            await self._hold(lease, seconds=0.0, is_abandoned=False)

    def stop(self) -> None:
        self._is_stopping = True

    async def _inject_faults(self) -> None:
        """Pause the host, or cut its link to a controller, now and then."""
        world = self._cluster.world
        while True:
            await asyncio.sleep(1.0)
            if self._random.random() > _FAULT_SHARE:
                continue
            seconds = self._random.uniform(0.2, _FAULT_S_MAX)
            if self._random.random() < 0.5:
                world.pause_host(self._host, seconds)
                await asyncio.sleep(seconds)
                continue
            ends = [self._host, self._random.choice(self._cluster.controller_hosts)]
            self._random.shuffle(ends)
            both = self._random.random() < 0.5
            world.cut_link(*ends, both_directions=both)
            try:
                await asyncio.sleep(seconds)
            finally:
                world.heal_link(*ends, both_directions=both)

    async def _acquire_and_end(self, name: str) -> None:
        lease = self._make_lease(name, ttl_s=self._random.choice(_TTLS_S))
        if not await self._try_acquire(lease, timeout_s=self._random.choice((0.0, 3.0, 30.0))):
            return
        seconds = self._random.uniform(0.0, _HOLD_S_MAX)
        await self._hold(lease, seconds=seconds, is_abandoned=self._random.random() < _ABANDONED_SHARE)

    def _make_lease(self, name: str, *, ttl_s: float) -> LockLease:
        return LockLease(
            name,
            ttl_s=ttl_s,
            holder=self._host,
            sender=self._sender,
            clock=self._clock,
            random_bytes=self._random.randbytes,
        )

    async def _try_acquire(self, lease: LockLease, *, timeout_s: float) -> bool:
        self._checker.leases.add(lease)
        try:
            if await lease.acquire(timeout_s=timeout_s):
                return True
        except GenieError as error:
            _log.info("%s could not acquire lock %s: %s", self._host, lease.name, error)
        self._checker.leases.discard(lease)
        return False

    async def _hold(self, lease: LockLease, *, seconds: float, is_abandoned: bool) -> None:
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(lease.keep_until_ended())
            await self._clock.sleep(seconds)
            keeping.cancel()
        if is_abandoned:
            while lease.is_held:  # it may be used until then
                await asyncio.sleep(_RETRY_INTERVAL_S)
        elif lease.is_held:
            try:
                await lease.release(timeout_s=_CALL_TIMEOUT_S)
            except LockLostError as error:
                _log.info("%s: %s", self._host, error)
        self._checker.leases.discard(lease)


class _SimLockSender:
    """Sends each request to the leader over a connection of its own."""

    def __init__(self, cluster: SimCluster, host: str) -> None:
        self._cluster = cluster
        self._network = SimNetwork(cluster.world, host)

    async def call(self, request: Request[_Reply], *, timeout_s: float, idempotent: bool = True) -> _Reply:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for host in self._cluster.controller_hosts:
                        try:
                            return await self._call_controller(host, request)
                        except GenieError as error:
                            if not error.retryable:
                                raise
                    await asyncio.sleep(_RETRY_INTERVAL_S)
        except TimeoutError:
            raise DeadlineError(f"no reply to {type(request).__name__} within {timeout_s:g} s") from None

    async def _call_controller(self, host: str, request: Request[_Reply]) -> _Reply:
        wait_s = float(getattr(request, "wait_s", 0.0))
        async with connect_authenticated(
            self._network, self._cluster.make_access(host), timeout_s=_CALL_TIMEOUT_S, program="sim"
        ) as (peer, welcome):
            if not welcome.leading:
                raise NotLeaderError(f"{host} does not lead")
            return await peer.call(request, timeout_s=wait_s + _CALL_TIMEOUT_S)
