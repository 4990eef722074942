"""A standby's copy of the ledger, kept current by a watch on the store, and its age.

The copy contains every change up to a revision. It is current as of the moment before a linearizable read of
the store whose revision the watch has reached. The age is the time since then, so it grows while the store
does not respond. Not responsible for replies (copy_reads.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

from genie.controller.change_notifier import ChangeNotifier
from genie.controller.election import LEADER_KEY
from genie.controller.ledger import TABLES_AGE_S_MAX, LedgerTables
from genie.controller.store import Store, WatchEvent
from genie.errors import CompactedError, NotLeaderError, StoreCorruptError, StoreError, StoreVersionError
from genie.processes.clock import Clock
from genie.processes.tasks import unwrapped_task_group

_log = logging.getLogger(__name__)

AGE_CHECK_INTERVAL_S = 0.5
_STORE_READ_TIMEOUT_S = 2.0
_WATCH_LAG_S_MAX = 1.0
"""How long one check waits for the watch."""
_MARK_INTERVAL_S = 5.0
_RETRY_INTERVAL_S = 1.0
_RETRY_INTERVAL_S_MAX = 30.0
"""While the store has data that this release cannot read, loading the tables cannot succeed."""
_REVISION_KEY = "revision"


class LedgerCopy:
    """`write_mark` writes a key that the watch reports, and returns the revision. It is needed only if other
    programs use the same etcd: their changes raise its revision, but are not in the watch. `on_leader_lost`
    is called when the leader key is deleted, or has been when the copy is loaded."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        write_mark: Callable[[], Awaitable[int]],
        on_leader_lost: Callable[[], None],
    ) -> None:
        self.tables = LedgerTables(store, clock=clock)
        self.is_loaded = False
        self.has_leader_key = False
        """Whether a controller led at the revision of the copy."""
        self._store = store
        self._clock = clock
        self._write_mark = write_mark
        self._on_leader_lost = on_leader_lost
        self._notifier = ChangeNotifier(clock)
        self._applied_revision = 0
        self._confirmed_at_s = -math.inf
        self._last_mark_at_s = -math.inf
        self._logged_error_codes: set[str] = set()
        """Codes of the errors that were logged since the copy was last confirmed."""
        self._retry_interval_s = _RETRY_INTERVAL_S
        self._ended_term: tuple[LedgerTables, float] | None = None

    @property
    def age_s(self) -> float:
        """Changes of this many seconds may be missing."""
        return self._clock.monotonic_s() - self._confirmed_at_s

    @property
    def is_usable(self) -> bool:
        return self.is_loaded and self.age_s <= TABLES_AGE_S_MAX

    def check_usable(self) -> None:
        """Raise NotLeaderError unless the copy is loaded and not too old."""
        if not self.is_loaded:
            raise NotLeaderError(
                "this controller does not lead, cannot reach the leader and has no copy of its data yet",
                hint="try again in a moment, or use another controller",
            )
        if self.age_s > TABLES_AGE_S_MAX:
            raise NotLeaderError(
                f"this controller does not lead and its copy of the leader's data is {self.age_s:.0f} s old; "
                f"the limit is {TABLES_AGE_S_MAX:.0f} s",
                hint="check its connection to the store, or use another controller",
            )

    def start_from_ended_term(self, ledger: LedgerTables, *, ended_at_s: float) -> None:
        """Load the tables of this controller's last term, which ended at this monotonic time, instead of
        those of the store, which may not respond."""
        self._ended_term = ledger, ended_at_s

    async def follow(self) -> None:
        """Load the tables and apply every change until cancelled."""
        while True:
            try:
                if not self.is_loaded:
                    await self._load()
                await self._watch()
            except CompactedError:
                self.is_loaded = False
                continue
            except StoreError as error:
                self._log_error_once("the copy of the ledger is not kept current", error)
                await self._clock.sleep(self._next_retry_interval_s(error))
            except Exception:  # a task boundary: the copy must not end the controller
                _log.exception("copying the ledger failed")
                self.is_loaded = False
                await self._clock.sleep(_RETRY_INTERVAL_S)

    def _log_error_once(self, problem: str, error: StoreError) -> None:
        if error.code not in self._logged_error_codes:
            self._logged_error_codes.add(error.code)
            _log.warning("%s: %s", problem, error)

    def _next_retry_interval_s(self, error: StoreError) -> float:
        """Doubled after each failure that another attempt does not repair."""
        interval_s = self._retry_interval_s
        if isinstance(error, (StoreCorruptError, StoreVersionError)):
            self._retry_interval_s = min(interval_s * 2, _RETRY_INTERVAL_S_MAX)
        else:
            self._retry_interval_s = interval_s = _RETRY_INTERVAL_S
        return interval_s

    def _mark_confirmed(self, at_s: float) -> None:
        """Record that the copy has every change before this monotonic time."""
        self._confirmed_at_s = at_s
        self._logged_error_codes.clear()
        self._retry_interval_s = _RETRY_INTERVAL_S

    async def _load(self) -> None:
        if self._ended_term is not None:
            (ledger, ended_at_s), self._ended_term = self._ended_term, None
            self._applied_revision = await self.tables.copy_all_tables(ledger)
            self._confirmed_at_s = ended_at_s
            self.is_loaded = True
            return
        # The tables are read later, at higher revisions. The watch replays the changes in between; the copy
        # is confirmed only after that.
        self._applied_revision = await self._fetch_revision()
        self._confirmed_at_s = -math.inf
        self._set_has_leader_key(await self._store.get(LEADER_KEY) is not None)
        await self.tables.read_all_tables()
        self.is_loaded = True

    async def _watch(self) -> None:
        # One revision early: the changes of one transaction may have been applied in part.
        after = max(self._applied_revision - 1, 0)
        lost: StoreError | None = None
        async with self._store.watch("", after_revision=after) as events, unwrapped_task_group() as group:
            checks = group.create_task(self._check_age_forever())
            try:
                async for event in events:
                    self._apply(event)
            except StoreError as error:
                # Raised after the group has ended: until Python 3.13, a group with an error drops a
                # cancellation that arrives while it waits for its tasks.
                lost = error
            finally:
                checks.cancel()
        if lost is not None:
            raise lost

    def _apply(self, event: WatchEvent) -> None:
        if event.key == LEADER_KEY:
            self._set_has_leader_key(event.value is not None)
        else:
            self.tables.apply_stored_change(event)
        if event.revision > self._applied_revision:
            self._applied_revision = event.revision
            self._notifier.notify(_REVISION_KEY)

    def _set_has_leader_key(self, has_leader_key: bool) -> None:
        self.has_leader_key = has_leader_key
        if not has_leader_key:
            self._on_leader_lost()

    async def _check_age_forever(self) -> None:
        while True:
            try:
                await self._confirm_if_current()
            except StoreError as error:
                self._log_error_once("the age of the copy of the ledger cannot be checked", error)
            await self._clock.sleep(AGE_CHECK_INTERVAL_S)

    async def _confirm_if_current(self) -> None:
        sent_s = self._clock.monotonic_s()
        if await self._wait_until_applied(await self._fetch_revision()):
            self._mark_confirmed(sent_s)
            return
        sent_s = self._clock.monotonic_s()
        if sent_s - self._last_mark_at_s < _MARK_INTERVAL_S:
            return
        self._last_mark_at_s = sent_s
        if await self._wait_until_applied(await self._write_mark()):
            self._mark_confirmed(sent_s)

    async def _fetch_revision(self) -> int:
        found = await self._store.range(LEADER_KEY, limit=1, timeout_s=_STORE_READ_TIMEOUT_S)
        return found.revision

    async def _wait_until_applied(self, revision: int) -> bool:
        await self._notifier.wait_while(
            _REVISION_KEY, lambda: self._applied_revision < revision, timeout_s=_WATCH_LAG_S_MAX
        )
        return self._applied_revision >= revision
