"""Leader election: one key on a lease. Its create revision fences every write.

The fencing token for agents contains the generation of the cluster as well (model/fencing.py).

A leader steps down by its own clock, one TTL after it sent the last renewal that succeeded. That is an
optimization: a replaced leader is harmless because its writes and orders carry an older token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from genie.controller.store import Compare, Delete, KeyValue, Put, Store
from genie.errors import (
    DuplicateControllerError,
    LeaseLostError,
    NotLeaderError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from genie.model.fencing import make_fencing_token, revision_of_token
from genie.model.record import Facts
from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

LEADER_KEY = "leader"
CONTROLLER_KEY_PREFIX = "controller/"
"""Prefix of the keys with the addresses of all controllers, by name."""
_REVOKE_LEASE_TIMEOUT_S = 2.0
DUPLICATE_DETECTION_TTLS = 2.0
"""After this number of TTLs, a key that still exists is being renewed by a running controller."""


class LeaderRecord(Facts, frozen=True, kw_only=True):
    """The holder of the key: `name` is the same in every start of a controller, `address` is HOST:PORT."""

    name: str
    address: str
    instance: str = ""
    """Machine, boot and directory of the controller; empty if unknown."""


class ControllerAddresses:
    """The addresses, HOST:PORT, of all controllers that may lead. `get_own` returns that of this one."""

    def __init__(self, store: Store, *, name: str, get_own: Callable[[], str]) -> None:
        self._store = store
        self._key = CONTROLLER_KEY_PREFIX + name
        self._get_own = get_own
        self._others: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        """This controller's address and those of the others as last read."""
        return (self._get_own(), *self._others)

    async def register(self) -> None:
        """Store this controller's address, and read the others. Agents must know every possible leader, so it
        is called before this controller may lead, and while it does."""
        stored = await self._store.get(self._key)
        if stored is None or stored.value != self._get_own().encode():
            await self.write_own()
        await self.refresh()

    async def write_own(self) -> int:
        """Store this controller's address; return the revision."""
        return (await self._store.commit([], [Put(self._key, self._get_own().encode())])).revision

    async def refresh(self) -> None:
        """Read the addresses of the others."""
        found = await self._store.range(CONTROLLER_KEY_PREFIX)
        self._others = tuple(sorted({item.value.decode() for item in found.items} - {self._get_own()}))


class StoreHealth:
    """Whether the last operation on the store succeeded."""

    def __init__(self) -> None:
        self.is_ok = True
        self.is_full = False
        """Whether the last operation failed because the store has no space."""
        self.failure_reason = ""
        self._logged_error_codes: set[str] = set()
        """Codes of the errors that were logged since the last success."""

    def record_success(self) -> None:
        if not self.is_ok:
            _log.info("the store is available again")
            self._logged_error_codes.clear()
        self.is_ok, self.is_full, self.failure_reason = True, False, ""

    def record_failure(self, error: StoreError) -> None:
        if error.code not in self._logged_error_codes:
            self._logged_error_codes.add(error.code)
            _log.warning("the store is unavailable, no decisions are made: %s", error)
        self.is_ok, self.is_full, self.failure_reason = False, isinstance(error, StoreFullError), str(error)


class Election:
    """One candidate. `name` must be unique among the controllers that run at the same time.

    `instance` differs between copies of a controller, which have the same name, but not between restarts.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        name: str,
        ttl_s: float,
        health: StoreHealth,
        instance: str = "",
    ) -> None:
        self._store = store
        self._clock = clock
        self._controller_name = name
        self._instance_id = instance
        self._duplicate_revision_and_first_seen_s: tuple[int, float] | None = None
        """Create revision of the key of another controller with this name, and when it was first seen."""
        self._lease_ttl_s = ttl_s
        self._store_health = health
        self._lease_id = 0
        self._fencing_token = 0
        self._lease_deadline_s = 0.0
        self._led_until_s = clock.monotonic_s()
        self._term_ended_event = asyncio.Event()
        self._blocks_of_term: set[asyncio.Timeout] = set()
        """Blocks that end with the term."""
        self.cluster_generation: int | None = None
        """As of the last attempt to win the election; None before."""
        self.leader: LeaderRecord | None = None
        """The leader when the key was last read."""

    @property
    def is_leading(self) -> bool:
        return self._fencing_token > 0 and self._clock.monotonic_s() < self._lease_deadline_s

    @property
    def since_leading_s(self) -> float:
        """Seconds since this controller last led, or since its start; 0 while it leads."""
        return max(self._clock.monotonic_s() - (self._lease_deadline_s or self._led_until_s), 0.0)

    @property
    def fencing_token(self) -> int:
        """Fencing token of the current or the last term; 0 before the first."""
        return self._fencing_token

    def is_leading_with_token(self, token: int) -> bool:
        """Whether this controller leads, with this fencing token."""
        return token == self._fencing_token > 0 and self._clock.monotonic_s() < self._lease_deadline_s

    def require_fencing_token(self) -> int:
        """Return the fencing token of this term; NotLeaderError or StoreUnavailableError when not leading."""
        if self._fencing_token > 0 and self._clock.monotonic_s() < self._lease_deadline_s:
            return self._fencing_token
        if not self._store_health.is_ok:
            raise StoreUnavailableError(
                f"the store is unavailable: {self._store_health.failure_reason}",
                hint="running jobs continue; try again when the store is available",
            )
        where = self.leader.address if self.leader and self.leader.name != self._controller_name else ""
        raise NotLeaderError.naming_leader("this controller does not lead", leader=where)

    @asynccontextmanager
    async def end_with_term(self) -> AsyncIterator[None]:
        """End the block with NotLeaderError as soon as the term ends, or at once without one. A store that
        does not respond must not delay the reply that this controller does not lead: agents could not
        distinguish that from their own isolation."""
        self.require_fencing_token()
        block = asyncio.timeout(None)
        try:
            async with block:
                self._blocks_of_term.add(block)
                yield
        except TimeoutError as error:
            if not block.expired():
                raise
            raise NotLeaderError("this controller no longer leads", hint="try again") from error
        finally:
            self._blocks_of_term.discard(block)

    async def has_duplicate_controller(self) -> bool:
        """Whether another controller with this name holds the key. Raise DuplicateControllerError if it is
        still running."""
        if not self._instance_id:
            return False
        found = await self._store.get(LEADER_KEY)
        if found is None or self._decode_leader_and_check_is_self(found):
            return False
        return self.leader is not None and self._is_duplicate(self.leader)

    async def try_win_election(self, address: str, *, generation: int = 0) -> bool:
        """Acquire the leader key if it is free, or if this controller acquired it before a restart.

        `generation` is that of the cluster: only a restore changes it, and only in an empty store. Raise
        StoreCorruptError if the key cannot be read; other errors of the store are recorded."""
        self.cluster_generation = generation
        self._fencing_token = 0
        self._term_ended_event.clear()
        try:
            found = await self._store.get(LEADER_KEY)
            self._store_health.record_success()
            if found is not None and not self._decode_leader_and_check_is_self(found):
                return False
            won = await self._try_acquire_leadership(address, found, generation=generation)
        except StoreCorruptError:
            raise
        except StoreError as error:
            self._store_health.record_failure(error)
            return False
        return won

    async def read_leader(self) -> None:
        """Set `leader` without trying to win the election."""
        found = await self._store.get(LEADER_KEY)
        self._store_health.record_success()
        if found is None:
            self.leader = None
        else:
            self._decode_leader_and_check_is_self(found)

    async def hold_leadership_until_term_ends(self) -> None:
        """Renew the lease until the term ends."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._renew_lease_forever()),
                group.create_task(self._step_down_at_deadline()),
            ]
            await self._term_ended_event.wait()
            for task in tasks:
                task.cancel()

    def step_down(self, reason: str) -> None:
        if self._lease_deadline_s > 0:
            _log.warning("no longer leading: %s", reason)
        self._end_term()

    def _end_term(self) -> None:
        if self._lease_deadline_s > 0:
            self._led_until_s = min(self._lease_deadline_s, self._clock.monotonic_s())
        self._lease_deadline_s = 0.0
        self._term_ended_event.set()
        blocks, self._blocks_of_term = self._blocks_of_term, set()
        for block in blocks:
            block.reschedule(asyncio.get_running_loop().time())

    async def step_down_if_replaced(self) -> None:
        """Step down if the key no longer belongs to this term."""
        found = await self._store.get(LEADER_KEY)
        if found is None or found.create_revision != revision_of_token(self._fencing_token):
            self.step_down("another controller has taken over")

    async def resign(self) -> None:
        """Revoke the lease, so that another controller need not wait until it expires."""
        self._end_term()
        if not self._lease_id:
            return
        try:
            await self._store.revoke_lease(self._lease_id, timeout_s=_REVOKE_LEASE_TIMEOUT_S)
        except StoreError as error:
            _log.info("could not resign leadership: %s", error)
        self._lease_id = 0

    def _decode_leader_and_check_is_self(self, leader_key: KeyValue) -> bool:
        try:
            self.leader = msgspec.json.decode(leader_key.value, type=LeaderRecord)
        except msgspec.DecodeError as error:
            raise StoreCorruptError(f"store key {LEADER_KEY!r} cannot be read: {error}") from error
        if self._is_duplicate(self.leader):
            self._check_duplicate_has_ended(leader_key, self.leader)
            return False
        return self.leader.name == self._controller_name

    def _is_duplicate(self, leader: LeaderRecord) -> bool:
        """Whether this is another controller with the same name."""
        is_other_instance = self._instance_id and leader.instance not in ("", self._instance_id)
        return leader.name == self._controller_name and bool(is_other_instance)

    def _check_duplicate_has_ended(self, leader_key: KeyValue, record: LeaderRecord) -> None:
        """Raise DuplicateControllerError if another controller with this name renews its lease.

        The key of one that has ended, such as before its directory was moved here, expires."""
        now_s = self._clock.monotonic_s()
        if (
            self._duplicate_revision_and_first_seen_s is None
            or self._duplicate_revision_and_first_seen_s[0] != leader_key.create_revision
        ):
            self._duplicate_revision_and_first_seen_s = (leader_key.create_revision, now_s)
        elif (
            now_s - self._duplicate_revision_and_first_seen_s[1]
            > DUPLICATE_DETECTION_TTLS * self._lease_ttl_s
        ):
            raise DuplicateControllerError(
                f"the controller at {record.address} is running with the name of this one: the state "
                "directory of one was copied from the other",
                hint="a further controller needs a state directory of its own, with only controller/ca.pem, "
                "controller/ca.key and owner.token copied to it; remove controller/name here",
            )

    async def _try_acquire_leadership(
        self, address: str, leader_key: KeyValue | None, *, generation: int
    ) -> bool:
        sent_s = self._clock.monotonic_s()
        if leader_key is not None:
            await self._store.commit(
                [Compare(LEADER_KEY, leader_key.create_revision, field="create")], [Delete(LEADER_KEY)]
            )
        lease_id = await self._store.grant_lease(self._lease_ttl_s)
        record = LeaderRecord(name=self._controller_name, address=address, instance=self._instance_id)
        put = Put(LEADER_KEY, msgspec.json.encode(record), lease_id)
        try:
            result = await self._store.commit([Compare(LEADER_KEY, 0)], [put])
        except StoreError:
            # The key may have been written: then the next attempt finds its own name.
            await self._revoke_lease(lease_id)
            raise
        if not result.succeeded:
            try:
                await self.read_leader()  # before anything else: requests can be forwarded to it
            finally:
                await self._revoke_lease(lease_id)
            return False
        self.leader, self._lease_id = record, lease_id
        self._fencing_token = _make_fencing_token(generation, result.revision)
        self._lease_deadline_s = sent_s + self._lease_ttl_s
        return True

    async def _revoke_lease(self, lease_id: int) -> None:
        try:
            await self._store.revoke_lease(lease_id, timeout_s=_REVOKE_LEASE_TIMEOUT_S)
        except StoreError as error:
            _log.debug("could not revoke a lease, it will expire: %s", error)

    async def _renew_lease_forever(self) -> None:
        interval_s = self._lease_ttl_s / 3
        while True:
            await self._clock.sleep(interval_s)
            sent_s = self._clock.monotonic_s()
            try:
                await self._store.keep_alive(self._lease_id, timeout_s=interval_s)
            except LeaseLostError:
                self.step_down("the lease has expired")
                return
            except StoreError as error:
                self._store_health.record_failure(error)
                continue
            if self._lease_deadline_s > 0:
                self._store_health.record_success()
                self._lease_deadline_s = sent_s + self._lease_ttl_s

    async def _step_down_at_deadline(self) -> None:
        while (left_s := self._lease_deadline_s - self._clock.monotonic_s()) > 0:
            await self._clock.sleep(left_s)
        self.step_down("the lease could not be renewed before it expired")


def _make_fencing_token(generation: int, revision: int) -> int:
    try:
        return make_fencing_token(generation=generation, revision=revision)
    except ValueError as error:
        raise StoreCorruptError(f"cannot lead: {error}", hint="restore a backup into a new store") from error
