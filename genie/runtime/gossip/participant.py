"""Takes part in gossip while the process runs: gets the settings from the cluster, starts the member, joins
the servers, follows key changes, and writes the files of files.py.

Nothing here ends the process or its jobs: a failure is logged once, and retried.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from genie.errors import AddressInUseError, GenieError, GossipError, ProtocolError
from genie.model.member import Member, MemberState
from genie.model.messages import GossipSettings, MembersReply
from genie.model.names import parse_endpoint
from genie.processes.clock import Clock
from genie.processes.tasks import Offload
from genie.runtime.gossip import files
from genie.runtime.gossip.protocol import KEY_BYTES, Gossip, GossipIdentity, GossipSupport

_log = logging.getLogger(__name__)

SETTINGS_INTERVAL_S = 10.0
"""How often the settings are read. Key changes take several intervals (controller/nodes/gossip.py)."""
FIRST_SETTINGS_INTERVAL_S = 1.0
"""The same until they were read once."""
_UNKNOWN_REQUEST_INTERVAL_S = 600.0
"""The same with a controller of an earlier release, which closes connections with many unknown requests."""
_TICK_S = 1.0
START_RETRY_S = 30.0
_JOIN_INTERVAL_S_MIN, _JOIN_INTERVAL_S_MAX = 2.0, 60.0
_MEMBERS_FILE_INTERVAL_S_MIN = 3.0
_MEMBERS_FILE_AGE_S_MAX = 30.0
"""The file is also written without a change: its age shows whether this process runs."""
_SEEDS_MAX = 16
_STOP_TIMEOUT_S = 3.0
_ALONE_WARNING_AFTER_S = 30.0


class GossipParticipant:
    """`identity` is asked for when gossip starts. `fetch_settings` may fail while the cluster has no leader;
    then the stored settings in `directory` are used. `members()` is always available."""

    def __init__(
        self,
        *,
        support: GossipSupport,
        identity: Callable[[], GossipIdentity],
        fetch_settings: Callable[[], Awaitable[GossipSettings]],
        directory: Path,
        clock: Clock,
        offload: Offload,
    ) -> None:
        self._make_gossip = support.make_gossip
        self._get_identity = identity
        self._fetch_settings = fetch_settings
        self._directory = directory
        self._clock = clock
        self._offload = offload
        self._gossip: Gossip | None = None
        self._settings: GossipSettings | None = None
        self._stored: files.StoredGossip | None = None
        self._listeners: list[Callable[[], None]] = []
        self._next_settings_s = self._next_start_s = self._next_join_s = float("-inf")
        self._join_interval_s = _JOIN_INTERVAL_S_MIN
        self._members_written_s = float("-inf")
        self._are_members_changed = False
        self._alone_since_s: float | None = None
        self._last_failure = ""
        self.off_reason = support.off_reason if support.make_gossip is None else "it has not started yet"
        """Why this process takes no part; empty if it does."""

    @property
    def settings(self) -> GossipSettings:
        """What other members need to take part: the last known settings."""
        return self._settings or GossipSettings()

    @property
    def address(self) -> str:
        """HOST:PORT of this member; empty if gossip is off."""
        return "" if self._gossip is None else self._gossip.address

    def members(self) -> tuple[Member, ...]:
        return () if self._gossip is None else self._gossip.members()

    def members_reply(self) -> MembersReply:
        return MembersReply(
            members=self.members(),
            observer=self._get_identity().name,
            observed_at=self._clock.wall_s(),
            off_reason=self.off_reason,
        )

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after a member was added or changed."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Runs until cancelled, and then leaves. Returns at once without support."""
        if self._make_gossip is None:
            _log.info("gossip is off: %s", self.off_reason)
            return
        self._stored = await self._offload(partial(files.try_read_stored_gossip, self._directory))
        if self._stored is not None:
            self._settings = self._stored.settings
        try:
            while True:
                try:
                    await self._run_due_steps()
                except GenieError as error:
                    self._log_failure_once(error)
                except Exception:  # a task boundary: gossip must not end the process
                    _log.exception("gossip failed")
                    await self._clock.sleep(START_RETRY_S)
                await self._clock.sleep(_TICK_S)
        finally:
            await self._stop_gossip()

    async def _run_due_steps(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_settings_s:
            await self._refresh_settings(now_s)
        settings = self._settings
        if settings is None:
            return
        if self._gossip is not None and not self._gossip.is_running:
            await self._stop_gossip()
        if not settings.is_enabled:
            self.off_reason = "it is disabled in this cluster (gossip.enabled of the servers)"
            await self._stop_gossip()
        elif self._gossip is None and now_s >= self._next_start_s:
            self._next_start_s = now_s + START_RETRY_S
            await self._start_gossip(settings)
        await self._join_if_due(settings)
        await self._write_members_if_due()

    # --- settings ---------------------------------------------------------------------------

    async def _refresh_settings(self, now_s: float) -> None:
        self._next_settings_s = now_s + FIRST_SETTINGS_INTERVAL_S
        try:
            settings = await self._fetch_settings()
        except ProtocolError as error:
            self._next_settings_s = now_s + _UNKNOWN_REQUEST_INTERVAL_S
            _log.info("gossip is not possible with this controller: %s", error)
            return
        except GossipError as error:  # the server itself takes no part
            self._next_settings_s = now_s + SETTINGS_INTERVAL_S
            _log.info("could not read the settings of gossip: %s", error)
            return
        except GenieError as error:  # such as no leader
            _log.debug("could not read the settings of gossip: %s", error)
            return
        self._next_settings_s = now_s + SETTINGS_INTERVAL_S
        if self._gossip is not None and settings.is_enabled and settings != self._settings:
            await self._gossip.use_keys(_decode_keys(settings))
        self._settings = settings
        await self._store_settings()

    async def _store_settings(self) -> None:
        port = parse_endpoint(self.address)[1] if self.address else self._stored.port if self._stored else 0
        stored = files.StoredGossip(settings=self.settings, port=port)
        if stored != self._stored:
            write = partial(files.write_stored_gossip, self._directory, stored)
            await self._offload(write, writes=True)
            self._stored = stored

    # --- the member -------------------------------------------------------------------------

    async def _start_gossip(self, settings: GossipSettings) -> None:
        keys = _decode_keys(settings)
        assert self._make_gossip is not None
        last_port = self._stored.port if self._stored is not None else 0
        gossip = self._make_gossip(self._get_identity(), last_port)
        try:
            await gossip.start(keys)
        except BaseException as error:
            self.off_reason = str(error)
            await _stop_within_timeout(gossip, leave=False)
            if isinstance(error, AddressInUseError) and self._stored is not None:
                self._stored = msgspec.structs.replace(self._stored, port=0)
            raise
        self._gossip, self.off_reason, self._last_failure = gossip, "", ""
        gossip.add_listener(self._on_members_changed)
        self._join_interval_s, self._next_join_s = _JOIN_INTERVAL_S_MIN, float("-inf")
        self._are_members_changed = True
        _log.info("gossip is listening on %s", gossip.address)
        await self._store_settings()

    async def _stop_gossip(self) -> None:
        gossip, self._gossip = self._gossip, None
        if gossip is not None:
            await _stop_within_timeout(gossip, leave=True)

    async def _join_if_due(self, settings: GossipSettings) -> None:
        """Joins seeds that are not known as alive: at the start, and after a partition."""
        gossip, now_s = self._gossip, self._clock.monotonic_s()
        if gossip is None:
            return
        alive = {member.address for member in gossip.members() if member.state is MemberState.ALIVE}
        missing = [seed for seed in settings.seeds[:_SEEDS_MAX] if seed not in alive]
        self._warn_if_alone(is_alone=len(alive) <= 1 and bool(missing), seeds=missing)
        if not missing or now_s < self._next_join_s:
            return
        responded = await gossip.join(missing)
        factor = 1 if responded and len(alive) <= 1 else 2
        self._join_interval_s = min(self._join_interval_s * factor, _JOIN_INTERVAL_S_MAX)
        self._next_join_s = now_s + self._join_interval_s

    def _warn_if_alone(self, *, is_alone: bool, seeds: list[str]) -> None:
        """Warns once if no server responds, such as behind a firewall."""
        now_s = self._clock.monotonic_s()
        if not is_alone:
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = now_s
        elif now_s - self._alone_since_s > _ALONE_WARNING_AFTER_S:
            self._log_failure_once(
                GossipError(
                    f"gossip reaches no other member at {', '.join(seeds)}",
                    hint="allow UDP and TCP on these ports; everything else works without gossip",
                )
            )

    def _on_members_changed(self) -> None:
        self._are_members_changed = True
        for listener in self._listeners:
            listener()

    async def _write_members_if_due(self) -> None:
        now_s = self._clock.monotonic_s()
        age_s = now_s - self._members_written_s
        interval_s = _MEMBERS_FILE_INTERVAL_S_MIN if self._are_members_changed else _MEMBERS_FILE_AGE_S_MAX
        if self._gossip is None or age_s < interval_s:
            return
        self._are_members_changed = False
        write = partial(files.try_write_members, self._directory, self.members_reply())
        await self._offload(write, writes=True)
        self._members_written_s = now_s

    def _log_failure_once(self, error: GenieError) -> None:
        """Logs each failure once, until gossip works again."""
        if str(error) != self._last_failure:
            self._last_failure = str(error)
            _log.warning("%s", error)


async def _stop_within_timeout(gossip: Gossip, *, leave: bool) -> None:
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await gossip.stop(leave=leave)
    except (GenieError, TimeoutError) as error:
        _log.info("gossip did not stop cleanly: %s", str(error) or f"timeout after {_STOP_TIMEOUT_S:g} s")


def _decode_keys(settings: GossipSettings) -> list[bytes]:
    try:
        keys = [base64.b64decode(text, validate=True) for text in settings.keys]
    except binascii.Error as error:
        raise GossipError("a key of gossip is not base64") from error
    if any(len(key) != KEY_BYTES for key in keys):
        raise GossipError(f"a key of gossip does not have {KEY_BYTES} bytes")
    return keys
