"""Copies of blobs on other controllers, so that working directories survive the loss of the leader.

While it leads, a controller pushes each blob that an unfinished job needs to every other controller, and
fetches those that it lacks from any of them. A submission waits until one copy exists, within a limit; where
no other controller can be reached, the blob is reported as under-replicated and copied later. Copies are
verified by digest, and count towards the limits of the controller that has them: there, the leader's regular
checks keep needed blobs from being evicted as unused. Controllers authenticate by their certificates, so
without TLS nothing is copied.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from genie.controller.blobs.storage import BlobStorage, split_blob_name
from genie.controller.change_notifier import ChangeNotifier, wait_event
from genie.errors import AccessError, GenieError, LeadershipError, TransportError, WorkdirError
from genie.model.messages import GetReplica, PutReplica, StatReplica
from genie.model.messages.handshake import ServerHello
from genie.model.names import parse_endpoint
from genie.processes.clock import Clock
from genie.processes.tasks import Offload
from genie.runtime import rpc
from genie.runtime.network import ClientTls, Network
from genie.version import __version__

_log = logging.getLogger(__name__)

FIRST_COPY_WAIT_S_MAX = 5.0
"""How long a submission waits for the first copy."""
BLOB_FETCH_WAIT_S_MAX = 3.0
"""How long a request waits for a blob from another controller; less than the timeout of agents."""
_REQUESTED_BLOBS_MAX = 1000
_COPY_CHECK_INTERVAL_S = 60.0
"""How often the copies of needed blobs are checked. Shorter than the time after which unused blobs are
evicted for other tenants."""
_NEEDED_BLOBS_POLL_INTERVAL_S = 5.0
_CONTROLLER_LIST_POLL_INTERVAL_S = 1.0
_PEER_RETRY_INTERVAL_S = 2.0
_PEER_CONNECT_TIMEOUT_S = 3.0
_CHUNK_TRANSFER_TIMEOUT_S = 20.0
_UNREACHABLE_PEER_SEARCH_S_MAX = 30.0
"""How long a blob is expected from a controller that cannot be reached."""


class BlobFetchOutcome(enum.Enum):
    FOUND = enum.auto()
    SEARCHING = enum.auto()
    MISSING = enum.auto()
    """No other controller has it."""


@dataclass(slots=True)
class _PeerController:
    """Another controller, as known in this term."""

    wake_event: asyncio.Event = field(default_factory=asyncio.Event)
    last_checked_s_by_blob: dict[str, float] = field(default_factory=dict)
    """By blob: when it was last compared."""
    copied_blobs: set[str] = field(default_factory=set)
    blobs_missing_on_both: set[str] = field(default_factory=set)
    """Blobs that neither that controller nor this one has."""
    copy_error_by_blob: dict[str, str] = field(default_factory=dict)
    """By blob: why it could not be copied, such as no space."""
    connection_error: GenieError | None = None
    """Why it cannot be reached."""
    unreachable_since_s: float = 0.0

    def forget_blob(self, name: str) -> None:
        self.last_checked_s_by_blob.pop(name, None)
        self.copied_blobs.discard(name)
        self.blobs_missing_on_both.discard(name)
        self.copy_error_by_blob.pop(name, None)


class BlobReplication:
    """`controllers` returns the addresses of all controllers, this one included (`own_address`). `needed`
    returns the names of the blobs that unfinished jobs need. `client_tls` blocks; None when TLS is off. Blobs
    are named as in storage.py."""

    def __init__(
        self,
        blobs: BlobStorage,
        *,
        name: str,
        network: Network,
        clock: Clock,
        offload: Offload,
        own_address: Callable[[], str],
        controllers: Callable[[], tuple[str, ...]],
        needed: Callable[[], Collection[str]],
        client_tls: Callable[[], ClientTls] | None,
    ) -> None:
        self._blobs = blobs
        self._controller_name = name
        self._network = network
        self._clock = clock
        self._offload = offload
        self._get_own_address = own_address
        self._get_controller_addresses = controllers
        self._get_needed_blobs = needed
        self._make_client_tls = client_tls
        self._notifier = ChangeNotifier(clock)
        self._peers: dict[str, _PeerController] = {}
        self._requested_at_s_by_blob: OrderedDict[str, float] = OrderedDict()
        """By blob that a job is about to need: since when. Older ones are ignored: each check marks a blob as
        used, and those that no job needs must remain evictable."""
        self._fetched_blobs: set[str] = set()
        self._blobs_being_fetched: set[str] = set()
        self._peer_list_wake_event = asyncio.Event()

    async def run(self) -> None:
        """Copy blobs until cancelled, at the end of the term."""
        if self._make_client_tls is None:
            return
        self._requested_at_s_by_blob.clear()
        try:
            async with asyncio.TaskGroup() as group:
                tasks: dict[str, asyncio.Task[None]] = {}
                while True:
                    self._peer_list_wake_event.clear()
                    others = self._other_controller_addresses()
                    for address in others - tasks.keys():
                        self._peers[address] = _PeerController()
                        tasks[address] = group.create_task(self._replicate_with_peer_forever(address))
                    for address in tasks.keys() - others:
                        tasks.pop(address).cancel()
                        del self._peers[address]
                    await wait_event(
                        self._peer_list_wake_event,
                        clock=self._clock,
                        timeout_s=_CONTROLLER_LIST_POLL_INTERVAL_S,
                    )
        finally:
            self._peers.clear()
            self._notifier.notify_all()

    def request_copy_or_fetch(self, name: str) -> None:
        """Copy a blob, or fetch it, as soon as possible."""
        self._requested_at_s_by_blob[name] = self._clock.monotonic_s()
        self._requested_at_s_by_blob.move_to_end(name)
        while len(self._requested_at_s_by_blob) > _REQUESTED_BLOBS_MAX:
            self._requested_at_s_by_blob.popitem(last=False)
        self._peer_list_wake_event.set()
        for peer in self._peers.values():
            peer.wake_event.set()

    async def wait_for_first_copy(self, name: str, *, timeout_s: float = FIRST_COPY_WAIT_S_MAX) -> None:
        """Wait until another controller has a copy, no other one can be reached, or the timeout expires."""
        if any(name in peer.copied_blobs for peer in self._peers.values()):
            return
        self.request_copy_or_fetch(name)

        def is_pending() -> bool:
            peers = self._peers.values()
            is_copied = any(name in peer.copied_blobs for peer in peers)
            can_copy = any(
                peer.connection_error is None and name not in peer.copy_error_by_blob for peer in peers
            )
            is_new = not self._other_controller_addresses() <= self._peers.keys()
            return (can_copy or is_new) and not is_copied

        await self._notifier.wait_while(name, is_pending, timeout_s=timeout_s)

    async def fetch_from_other_controllers(self, name: str, *, timeout_s: float) -> BlobFetchOutcome:
        """Fetch a blob that this controller lacks; wait until it is there, no other controller has it, or the
        timeout expires."""
        if name not in self._blobs_being_fetched:
            self._fetched_blobs.discard(name)
            for peer in self._peers.values():
                peer.forget_blob(name)
        self.request_copy_or_fetch(name)

        def is_pending() -> bool:
            return name not in self._fetched_blobs and not self._is_search_over(name)

        await self._notifier.wait_while(name, is_pending, timeout_s=timeout_s)
        if name in self._fetched_blobs:
            return BlobFetchOutcome.FOUND
        return BlobFetchOutcome.MISSING if self._is_search_over(name) else BlobFetchOutcome.SEARCHING

    def alarms(self) -> list[str]:
        """What the owner should know about blobs without a copy."""
        if not self._peers:
            return []
        peers = list(self._peers.values())
        names = [
            name for name in self._get_needed_blobs() if not any(name in peer.copied_blobs for peer in peers)
        ]
        reasons = [peer.connection_error.message for peer in peers if peer.connection_error is not None]
        reasons += [
            peer.copy_error_by_blob[name]
            for peer in peers
            for name in names
            if name in peer.copy_error_by_blob
        ]
        if not names or not reasons:  # otherwise they are being copied
            return []
        return [f"{len(names)} working directories are only on the leading controller: {reasons[0]}"]

    def _other_controller_addresses(self) -> set[str]:
        """Their addresses; empty without TLS."""
        if self._make_client_tls is None:
            return set()
        return set(self._get_controller_addresses()) - {self._get_own_address()}

    def _is_search_over(self, name: str) -> bool:
        if not self._other_controller_addresses() <= self._peers.keys():
            return False
        given_up_s = self._clock.monotonic_s() - _UNREACHABLE_PEER_SEARCH_S_MAX
        return all(
            name in peer.blobs_missing_on_both
            or (peer.connection_error is not None and peer.unreachable_since_s <= given_up_s)
            for peer in self._peers.values()
        )

    # -- one task per controller ------------------------------------------------------------

    async def _replicate_with_peer_forever(self, address: str) -> None:
        peer = self._peers[address]
        while True:
            peer.wake_event.clear()
            try:
                if names := self._blobs_due_for_check(peer):
                    await self._push_or_pull_blobs(address, peer, names)
            except GenieError as error:
                self._record_peer_failure(address, peer, error)
                await self._clock.sleep(_PEER_RETRY_INTERVAL_S)
                continue
            except Exception:  # a task boundary: replication must not end the term
                _log.exception("copying blobs to controller %s failed", address)
                await self._clock.sleep(_PEER_RETRY_INTERVAL_S)
                continue
            await wait_event(peer.wake_event, clock=self._clock, timeout_s=_NEEDED_BLOBS_POLL_INTERVAL_S)

    def _blobs_due_for_check(self, peer: _PeerController) -> list[str]:
        """Requested blobs first, then needed ones, that were not compared recently."""
        due_s = self._clock.monotonic_s() - _COPY_CHECK_INTERVAL_S
        while self._requested_at_s_by_blob and next(iter(self._requested_at_s_by_blob.values())) <= due_s:
            self._requested_at_s_by_blob.popitem(last=False)
        wanted = dict.fromkeys((*reversed(self._requested_at_s_by_blob), *self._get_needed_blobs()))
        for name in peer.last_checked_s_by_blob.keys() - wanted.keys():
            peer.forget_blob(name)
        return [name for name in wanted if peer.last_checked_s_by_blob.get(name, due_s) <= due_s]

    async def _push_or_pull_blobs(self, address: str, peer: _PeerController, names: list[str]) -> None:
        assert self._make_client_tls is not None, "without TLS no task is started"
        client_tls = await self._offload(self._make_client_tls)
        host, port = parse_endpoint(address)
        async with rpc.dial(
            self._network, host, port, tls=client_tls, timeout_s=_PEER_CONNECT_TIMEOUT_S
        ) as connection:
            hello = ServerHello(name=self._controller_name, version=__version__)
            await connection.call(hello, timeout_s=_PEER_CONNECT_TIMEOUT_S)
            peer.connection_error = None
            for name in names:
                try:
                    await self._push_or_pull_blob(connection, peer, name)
                except (TransportError, AccessError, LeadershipError):
                    raise
                except GenieError as error:  # of this blob, such as no space: others may be possible
                    _log.warning("could not copy blob %s to or from controller %s: %s", name, address, error)
                    peer.copied_blobs.discard(name)
                    peer.copy_error_by_blob[name] = error.message
                else:
                    peer.copy_error_by_blob.pop(name, None)
                peer.last_checked_s_by_blob[name] = self._clock.monotonic_s()
                self._notifier.notify(name)

    async def _push_or_pull_blob(self, connection: rpc.Peer, peer: _PeerController, name: str) -> None:
        digest, tenant = split_blob_name(name)
        own = await self._offload(partial(self._blobs.get_status, digest, tenant=tenant))
        theirs = await connection.call(
            StatReplica(digest=digest, tenant=tenant), timeout_s=_CHUNK_TRANSFER_TIMEOUT_S
        )
        if own.complete:
            await self._push_blob(connection, name, offset=theirs.received_bytes, is_complete=theirs.complete)
        elif theirs.complete:
            await self._pull_blob(connection, name, offset=own.received_bytes)
        else:
            peer.blobs_missing_on_both.add(name)
            return
        peer.copied_blobs.add(name)
        peer.blobs_missing_on_both.discard(name)

    async def _push_blob(self, connection: rpc.Peer, name: str, *, offset: int, is_complete: bool) -> None:
        digest, tenant = split_blob_name(name)
        while not is_complete:
            chunk = await self._offload(partial(self._blobs.read_chunk, digest, offset, tenant=tenant))
            request = PutReplica(
                digest=digest,
                tenant=tenant,
                offset=offset,
                data=chunk.data,
                is_last=offset + len(chunk.data) >= chunk.size_bytes,
            )
            status = await connection.call(request, timeout_s=_CHUNK_TRANSFER_TIMEOUT_S)
            if not status.complete and status.received_bytes <= offset:
                raise WorkdirError(
                    f"copying blob {digest[:12]} between controllers made no progress after "
                    f"{status.received_bytes} bytes"
                )
            offset, is_complete = status.received_bytes, status.complete

    async def _pull_blob(self, connection: rpc.Peer, name: str, *, offset: int) -> None:
        if name in self._blobs_being_fetched:
            return
        self._blobs_being_fetched.add(name)
        try:
            digest, tenant = split_blob_name(name)
            is_complete = False
            while not is_complete:
                request = GetReplica(digest=digest, tenant=tenant, offset=offset)
                chunk = await connection.call(request, timeout_s=_CHUNK_TRANSFER_TIMEOUT_S)
                append = partial(
                    self._blobs.append_chunk,
                    digest,
                    tenant=tenant,
                    offset=offset,
                    data=chunk.data,
                    is_last=offset + len(chunk.data) >= chunk.size_bytes,
                    is_needed=lambda other: other in self._get_needed_blobs(),
                )
                status = await self._offload(append, writes=True)
                if not status.complete and status.received_bytes <= offset:
                    raise WorkdirError(
                        f"copying blob {digest[:12]} between controllers made no progress after "
                        f"{status.received_bytes} bytes"
                    )
                offset, is_complete = status.received_bytes, status.complete
            self._fetched_blobs.add(name)
            _log.info("fetched blob %s from another controller", name)
        finally:
            self._blobs_being_fetched.discard(name)

    def _record_peer_failure(self, address: str, peer: _PeerController, error: GenieError) -> None:
        if peer.connection_error is None:
            peer.unreachable_since_s = self._clock.monotonic_s()
            _log.warning("cannot copy blobs to controller %s: %s", address, error)
        peer.connection_error = error
        self._notifier.notify_all()
