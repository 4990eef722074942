"""Who leads: one key on a lease. Its create-revision is the token that fences every write.

A leader stops by its own clock, counted from when it sent the last renewal that was answered;
a task of its own watches that time. That is a courtesy: what makes a replaced leader harmless is
that its writes and orders carry an older token. Not for: what a leader does (controller.py).
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from genie.controller.store import Compare, Delete, KeyValue, Put, Store
from genie.errors import LeaseLostError, NotLeaderError, StoreCorruptError, StoreError, StoreUnavailableError
from genie.runtime.clock import Clock

_log = logging.getLogger(__name__)

LEADER_KEY = "leader"
_RESIGN_TIMEOUT_S = 2.0


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the key: `name` is a controller's own for all its lives, `address` is host:port."""

    name: str
    address: str


class StoreHealth:
    """Whether the store did what it was last asked."""

    def __init__(self) -> None:
        self.ok = True
        self.reason = ""

    def good(self) -> None:
        if not self.ok:
            _log.info("the store works again")
        self.ok, self.reason = True, ""

    def bad(self, error: StoreError) -> None:
        if self.ok:
            _log.warning("the store fails: %s", error)
        self.ok, self.reason = False, str(error)


class Election:
    """One controller's part in it. `name` must not be used by two controllers that run at once."""

    def __init__(self, store: Store, *, clock: Clock, name: str, ttl_s: float, health: StoreHealth) -> None:
        self._store = store
        self._clock = clock
        self._name = name
        self._ttl_s = ttl_s
        self._health = health
        self._lease_id = 0
        self._token = 0
        self._deadline_s = 0.0
        self._over = asyncio.Event()
        self.leader: LeaderRecord | None = None
        """Who held the key when it was last looked at."""

    @property
    def is_leading(self) -> bool:
        return self._token > 0 and self._clock.monotonic_s() < self._deadline_s

    @property
    def token(self) -> int:
        """Of this term or, when none is on, of the last one; 0 before the first."""
        return self._token

    def require_token(self) -> int:
        """The token of this term; an error that says who decides instead when there is none."""
        if self.is_leading:
            return self._token
        if not self._health.ok:
            raise StoreUnavailableError(
                f"the cluster decides nothing now, because its store does not answer: {self._health.reason}",
                hint="running jobs go on; try again when the store is back",
            )
        where = self.leader.address if self.leader and self.leader.name != self._name else ""
        hint = f"ask {where}, which does" if where else "no controller leads yet; try again in a moment"
        raise NotLeaderError("this controller does not lead", hint=hint)

    async def try_win(self, address: str) -> bool:
        """Takes the key if nobody has it, or if it was left by an earlier life of this controller."""
        self._token = 0
        self._over.clear()
        try:
            standing = await self._store.get(LEADER_KEY)
            self._health.good()
            if standing is not None and not self._is_own(standing):
                return False
            won = await self._take(address, standing)
        except StoreError as error:
            self._health.bad(error)
            return False
        return won

    async def hold(self) -> None:
        """Renews until the term is over; returns then."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._renew()), group.create_task(self._watch_deadline())]
            await self._over.wait()
            for task in tasks:
                task.cancel()

    def step_down(self, reason: str) -> None:
        if self._deadline_s > 0:
            _log.warning("no longer leading: %s", reason)
        self._deadline_s = 0.0
        self._over.set()

    async def check(self) -> None:
        """Steps down if the key is no longer of this term."""
        standing = await self._store.get(LEADER_KEY)
        if standing is None or standing.create_revision != self._token:
            self.step_down("another controller has taken over")

    async def resign(self) -> None:
        """Gives the key back, so that another controller need not wait for the lease to end."""
        self._deadline_s = 0.0
        self._over.set()
        if not self._lease_id:
            return
        try:
            await self._store.revoke_lease(self._lease_id, timeout_s=_RESIGN_TIMEOUT_S)
        except StoreError as error:
            _log.info("could not resign: %s", error)
        self._lease_id = 0

    def _is_own(self, standing: KeyValue) -> bool:
        try:
            self.leader = msgspec.json.decode(standing.value, type=LeaderRecord)
        except msgspec.DecodeError as error:
            raise StoreCorruptError(f"store key {LEADER_KEY!r} cannot be read: {error}") from error
        return self.leader.name == self._name

    async def _take(self, address: str, standing: KeyValue | None) -> bool:
        sent_s = self._clock.monotonic_s()
        if standing is not None:
            await self._store.commit(
                [Compare(LEADER_KEY, standing.create_revision, field="create")], [Delete(LEADER_KEY)]
            )
        lease_id = await self._store.grant_lease(self._ttl_s)
        record = LeaderRecord(name=self._name, address=address)
        put = Put(LEADER_KEY, msgspec.json.encode(record), lease_id)
        try:
            result = await self._store.commit([Compare(LEADER_KEY, 0)], [put])
        except StoreError:
            # It may have been written all the same: then the next try finds a key of its own name.
            await self._drop(lease_id)
            raise
        if not result.succeeded:
            await self._drop(lease_id)
            return False
        self.leader, self._lease_id, self._token = record, lease_id, result.revision
        self._deadline_s = sent_s + self._ttl_s
        return True

    async def _drop(self, lease_id: int) -> None:
        try:
            await self._store.revoke_lease(lease_id, timeout_s=_RESIGN_TIMEOUT_S)
        except StoreError as error:
            _log.debug("a lease is left to run out: %s", error)

    async def _renew(self) -> None:
        every_s = self._ttl_s / 3
        while True:
            await self._clock.sleep(every_s)
            sent_s = self._clock.monotonic_s()
            try:
                await self._store.keep_alive(self._lease_id, timeout_s=every_s)
            except LeaseLostError:
                self.step_down("the lease has run out")
                return
            except StoreError as error:
                self._health.bad(error)
                continue
            if self._deadline_s > 0:
                self._health.good()
                self._deadline_s = sent_s + self._ttl_s

    async def _watch_deadline(self) -> None:
        while (left_s := self._deadline_s - self._clock.monotonic_s()) > 0:
            await self._clock.sleep(left_s)
        self.step_down("the lease could not be renewed in time")
