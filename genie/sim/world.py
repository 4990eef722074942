"""The simulated environment: network, clocks and hosts, with faults.

One `World` per run; all randomness comes from its seed. Controllers and agents get a `SimClock` and a
`SimNetwork` for their host; faults are set on the world (pause, cut, crash). Connections behave like TCP:
frames arrive in order, a cut link delays them until it heals, connections of a crashed process are reset,
those of a host without power time out. `duplicated_frame_share` and `reordered_frame_share` break these
rules, as a faulty proxy would. A host with a `CpuCost` does one thing at a time: each frame occupies it.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from genie.errors import (
    AddressInUseError,
    ConnectionLostError,
    DeadlineError,
    NothingListensError,
    OverloadedError,
)
from genie.model.names import address_text
from genie.processes.clock import Timer
from genie.runtime import wire
from genie.runtime.connection_limits import ConnectionLimiter, ConnectionLimits, OpenConnection
from genie.runtime.network import AcceptCallback, ClientTls
from genie.sim.next_release import change_frame_to_next_release

START_WALL_TIME_S = 1_700_000_000.0
_CUT_LINK_POLL_INTERVAL_S = 0.1
_SIM_OPEN_FILES_LIMIT = 1 << 20
_OVERLOADED_RETRY_AFTER_S = 0.5
_FRAME_KIND_OFFSET = 4
"""Of the kind in the header of a frame."""


@dataclass(frozen=True)
class CpuCost:
    """How long the CPU of a host is busy with each frame that arrives, and each byte that is sent."""

    cpu_s_per_received_frame: float
    cpu_s_per_sent_byte: float


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mean_frame_delay_s = 0.005
        self.duplicated_frame_share = 0.0
        """Share of frames that arrive twice."""
        self.reordered_frame_share = 0.0
        """Share of frames that the next frame overtakes, if there is one."""
        self.requests_sent_by_host: Counter[str] = Counter()
        """By host."""
        self._cpu_cost_by_host: dict[str, CpuCost] = {}
        self._cpu_busy_until_s: dict[str, float] = {}
        self._wall_clock_offsets_s: dict[str, float] = {}
        self._clock_rate_and_change_by_host: dict[str, tuple[float, float, float]] = {}
        """Clock rate by host, the time of its last change, and the clock value at that time."""
        self._frozen_until_s: dict[str, float] = {}
        self._paused_until_s: dict[str, float] = {}
        self._power_lost_s_by_host: dict[str, float] = {}
        self.hosts_of_next_release: set[str] = set()
        """Hosts that send frames as a later release of Genie does (next_release.py)."""
        self._cut_counts_by_direction: Counter[tuple[str, str]] = Counter()
        """Number of cuts by sender and receiver: faults may overlap."""
        self.listeners: dict[tuple[str, int], _Listener] = {}
        self.channels: dict[_Channel, None] = {}
        """In the order of their creation."""

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def pause_host(self, host: str, seconds: float) -> None:
        """Stop the code of a host, as SIGSTOP does. Does not shorten a longer pause, which would resume only
        part of the code."""
        self._paused_until_s[host] = max(self._paused_until_s.get(host, 0.0), self.now_s + seconds)

    def freeze_host(self, host: str, seconds: float) -> None:
        """Stop a host with all its processes, as a paused virtual machine."""
        self.pause_host(host, seconds)
        self._frozen_until_s[host] = max(self._frozen_until_s.get(host, 0.0), self.now_s + seconds)

    def is_frozen(self, host: str) -> bool:
        return self.now_s < self._frozen_until_s.get(host, 0.0)

    def set_clock_rate(self, host: str, rate: float) -> None:
        """Set the clock rate of a host; the clock continues from its current value."""
        self._clock_rate_and_change_by_host[host] = (rate, self.now_s, self.monotonic_s_of_host(host))

    def monotonic_s_of_host(self, host: str) -> float:
        rate, since_s, shown_s = self._clock_rate_and_change_by_host.get(host, (1.0, 0.0, 0.0))
        return shown_s + (self.now_s - since_s) * rate

    def clock_rate(self, host: str) -> float:
        return self._clock_rate_and_change_by_host.get(host, (1.0, 0.0, 0.0))[0]

    def is_paused(self, host: str) -> bool:
        return self.now_s < self._paused_until_s.get(host, 0.0)

    async def wait_unpaused(self, host: str) -> None:
        while (left_s := self.remaining_pause_s(host)) > 0:
            await asyncio.sleep(left_s)

    def remaining_pause_s(self, host: str) -> float:
        """Return the remaining pause in seconds; 0 or less if the host is not paused."""
        return self._paused_until_s.get(host, 0.0) - self.now_s

    def set_cpu_cost(self, host: str, cpu_cost: CpuCost) -> None:
        self._cpu_cost_by_host[host] = cpu_cost

    def occupy_cpu(self, host: str, *, frames: int = 0, sent_bytes: int = 0) -> float:
        """Add work to the host's CPU, after all earlier work; return the time when it is done."""
        cpu = self._cpu_cost_by_host.get(host)
        if cpu is None:
            return self.now_s
        work_s = frames * cpu.cpu_s_per_received_frame + sent_bytes * cpu.cpu_s_per_sent_byte
        done_s = max(self.now_s, self._cpu_busy_until_s.get(host, 0.0)) + work_s
        self._cpu_busy_until_s[host] = done_s
        return done_s

    def wall_s_of_host(self, host: str) -> float:
        return START_WALL_TIME_S + self.now_s + self._wall_clock_offsets_s.get(host, 0.0)

    def step_wall_clock(self, host: str, seconds: float) -> None:
        """Set the wall clock of a host forward or back. Its monotonic clock is not affected."""
        self._wall_clock_offsets_s[host] = self._wall_clock_offsets_s.get(host, 0.0) + seconds

    def cut_link(self, sender: str, receiver: str, *, both_directions: bool = True) -> None:
        """Cut the link; without `both_directions`, only from sender to receiver."""
        self._cut_counts_by_direction.update(
            _link_directions(sender, receiver, both_directions=both_directions)
        )

    def heal_link(self, sender: str, receiver: str, *, both_directions: bool = True) -> None:
        """Undo one `cut_link` with the same arguments."""
        self._cut_counts_by_direction.subtract(
            _link_directions(sender, receiver, both_directions=both_directions)
        )

    def heal_links_and_clocks(self) -> None:
        """Heal all links and clocks. Pauses end by themselves."""
        self._cut_counts_by_direction.clear()
        self.duplicated_frame_share = self.reordered_frame_share = 0.0
        for host in list(self._clock_rate_and_change_by_host):
            self.set_clock_rate(host, 1.0)

    def is_without_power(self, host: str) -> bool:
        return host in self._power_lost_s_by_host

    def power_lost_s(self, host: str) -> float | None:
        """When this host has lost its power; None if it has power."""
        return self._power_lost_s_by_host.get(host)

    def is_link_cut(self, sender: str, receiver: str) -> bool:
        return self._cut_counts_by_direction[sender, receiver] > 0

    def set_power(self, host: str, *, is_on: bool) -> None:
        """Connections to a host without power time out; they are not refused."""
        if is_on:
            self._power_lost_s_by_host.pop(host, None)
        else:
            self._power_lost_s_by_host.setdefault(host, self.now_s)

    def disconnect_host(self, host: str, *, silent: bool) -> None:
        """Close connections and listeners of a host. With `silent` (power outage), peers are not notified."""
        for address in [key for key in self.listeners if key[0] == host]:
            del self.listeners[address]
        for channel in [one for one in self.channels if host in (one.host, one.other_host)]:
            if channel.host == host or not silent:
                channel.disconnect()

    async def simulate_frame_latency(self) -> None:
        """Simulate the latency of one frame: 2% are 50 times slower."""
        slow = self.random.random() < 0.02
        await asyncio.sleep(self.random.expovariate(1 / self.mean_frame_delay_s) * (50 if slow else 1))


def _link_directions(sender: str, receiver: str, *, both_directions: bool) -> list[tuple[str, str]]:
    return [(sender, receiver), (receiver, sender)] if both_directions else [(sender, receiver)]


class SimClock:
    """Clock of a host: drifts with its rate; sleeps do not return while the host is paused."""

    def __init__(self, world: World, host: str) -> None:
        self._world = world
        self._host = host

    def monotonic_s(self) -> float:
        return self._world.monotonic_s_of_host(self._host)

    def wall_s(self) -> float:
        return self._world.wall_s_of_host(self._host)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._world.clock_rate(self._host))
        await self._world.wait_unpaused(self._host)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return _SimTimer(self._world, self._host, seconds / self._world.clock_rate(self._host), callback)


class _SimTimer:
    """A timer that does not fire while its host is paused."""

    def __init__(self, world: World, host: str, seconds: float, callback: Callable[[], None]) -> None:
        self._world = world
        self._host = host
        self._callback = callback
        self._handle = asyncio.get_running_loop().call_later(seconds, self._fire_when_unpaused)

    def cancel(self) -> None:
        self._handle.cancel()

    def _fire_when_unpaused(self) -> None:
        if (left_s := self._world.remaining_pause_s(self._host)) > 0:
            self._handle = asyncio.get_running_loop().call_later(left_s, self._fire_when_unpaused)
        else:
            self._callback()


class _Listener:
    def __init__(
        self, accept: AcceptCallback, connections: asyncio.TaskGroup, limiter: ConnectionLimiter
    ) -> None:
        self.accept = accept
        self.connections = connections
        self.limiter = limiter


class _Channel:
    """One end of a simulated connection."""

    certificate_name = ""
    protocol_version = wire.SUPPORTED_VERSIONS.highest

    def __init__(self, world: World, host: str, other_host: str, *, frame_bytes_max: int) -> None:
        self._world = world
        self.host = host
        self.other_host = other_host
        self.peer = f"{other_host}:0"
        self._frame_bytes_max = frame_bytes_max
        self.other_end: _Channel | None = None
        self._inbox: asyncio.Queue[tuple[bytes, float] | None] = asyncio.Queue()
        """Frames, and when the CPU of this host has time for them."""
        self._has_sent_frame = False
        """Whether a frame was sent."""
        self.on_authenticated: Callable[[], None] = lambda: None
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1000)
        """Frames to deliver; None wakes `deliver_frames` when the connection ends."""
        self._closed_event = asyncio.Event()
        world.channels[self] = None

    def set_frame_limit(self, size_bytes: int) -> None:
        self._frame_bytes_max = size_bytes

    def set_authenticated(self) -> None:
        self.on_authenticated()

    async def send(self, frame: bytes) -> None:
        await self._world.wait_unpaused(self.host)
        if self._closed_event.is_set():
            raise ConnectionLostError(f"the connection to {self.peer} was lost")
        if frame[_FRAME_KIND_OFFSET] == wire.FrameKind.REQUEST:
            self._world.requests_sent_by_host[self.host] += 1
        if self.host in self._world.hosts_of_next_release:
            frame = change_frame_to_next_release(frame)
        await _sleep_until(self._world.occupy_cpu(self.host, sent_bytes=len(frame)))
        await self._outbox.put(frame)

    def try_send_nowait(self, frame: bytes) -> bool:
        return False

    async def receive(self) -> wire.Frame:
        arrived = await self._inbox.get()
        await self._world.wait_unpaused(self.host)
        if arrived is None:
            self._inbox.put_nowait(None)
            raise ConnectionLostError(f"{self.peer} closed the connection")
        data, ready_s = arrived
        await _sleep_until(ready_s)
        header, payload = data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :]
        _, kind, call_id = wire.unpack_header(header, frame_bytes_max=self._frame_bytes_max, peer=self.peer)
        return wire.Frame(kind, call_id, payload)

    def try_receive_nowait(self) -> wire.Frame | None:
        return None

    async def deliver_frames(self) -> None:
        """Deliver frames to the other end, in order, with latency and link faults."""
        while (frame := await self._outbox.get()) is not None and not self._closed_event.is_set():
            await self._world.simulate_frame_latency()
            while self._world.is_link_cut(self.host, self.other_host) and not self._closed_event.is_set():
                await asyncio.sleep(_CUT_LINK_POLL_INTERVAL_S)
            for each in self._apply_link_faults(frame):
                if self.other_end is not None and not self._closed_event.is_set():
                    ready_s = self._world.occupy_cpu(self.other_host, frames=1)
                    self.other_end._inbox.put_nowait((each, ready_s))

    def _apply_link_faults(self, frame: bytes) -> list[bytes]:
        """The frames that arrive now: usually this one. The first one, a handshake, is not disturbed."""
        world, frames = self._world, [frame]
        if not self._has_sent_frame:
            self._has_sent_frame = True
            return frames
        if (
            world.reordered_frame_share
            and not self._outbox.empty()
            and world.random.random() < world.reordered_frame_share
        ):
            overtaking = self._outbox.get_nowait()
            if overtaking is None:
                self._outbox.put_nowait(None)
            else:
                frames.insert(0, overtaking)
        if world.duplicated_frame_share and world.random.random() < world.duplicated_frame_share:
            frames.append(frame)
        return frames

    def close(self) -> None:
        if not self._closed_event.is_set():
            self.disconnect()
            if self.other_end is not None and not self._world.is_link_cut(self.host, self.other_host):
                self.other_end.disconnect()

    def disconnect(self) -> None:
        self._world.channels.pop(self, None)
        self._closed_event.set()
        self._inbox.put_nowait(None)
        if not self._outbox.full():  # otherwise `deliver_frames` is not waiting
            self._outbox.put_nowait(None)


class SimNetwork:
    """Network interface of one host. `limits`: those of each server; by default those of a large machine."""

    def __init__(self, world: World, host: str, limits: ConnectionLimits | None = None) -> None:
        self._world = world
        self._host = host
        self.connection_limits = limits or ConnectionLimits.for_open_file_limit(_SIM_OPEN_FILES_LIMIT)

    async def connect(self, host: str, port: int, *, tls: ClientTls | None, timeout_s: float) -> _Channel:
        assert tls is None, "the simulation does not support TLS"
        world, where = self._world, address_text(host, port)
        await world.wait_unpaused(self._host)
        await world.simulate_frame_latency()
        if (
            world.is_link_cut(self._host, host)
            or world.is_link_cut(host, self._host)
            or world.is_paused(host)
            or world.is_without_power(host)
        ):
            await asyncio.sleep(timeout_s)
            raise DeadlineError(f"{where} did not respond within {timeout_s:g} s")
        listener = world.listeners.get((host, port))
        if listener is None:
            raise NothingListensError(f"{where} refused the connection: nothing listens there")
        near = _Channel(world, self._host, host, frame_bytes_max=wire.FRAME_BYTES_MAX)
        far = _Channel(world, host, self._host, frame_bytes_max=wire.UNAUTHENTICATED_FRAME_BYTES_MAX)
        opened = listener.limiter.accept(self._host, now_s=world.now_s, close=far.close)
        if isinstance(opened, str):
            del world.channels[near], world.channels[far]
            raise OverloadedError(
                f"{where} rejected the connection: {opened}", retry_after_s=_OVERLOADED_RETRY_AFTER_S
            )
        far.on_authenticated = opened.set_authenticated
        near.other_end, far.other_end = far, near
        serving = _serve_connection(listener.accept, far, opened)
        for work in (near.deliver_frames(), far.deliver_frames(), serving):
            listener.connections.create_task(work)
        return near

    async def serve(
        self,
        host: str,
        port: int,
        accept: AcceptCallback,
        *,
        tls: ssl.SSLContext | None,
        on_listening: Callable[[int], None],
    ) -> None:
        assert tls is None, "the simulation does not support TLS"
        address = (self._host, port)
        if address in self._world.listeners:
            raise AddressInUseError(f"port {port} on {host} is in use")
        async with asyncio.TaskGroup() as connections:
            limiter = ConnectionLimiter(self.connection_limits)
            self._world.listeners[address] = _Listener(accept, connections, limiter)
            try:
                on_listening(port)
                await asyncio.Event().wait()
            finally:
                self._world.listeners.pop(address, None)


async def _serve_connection(accept: AcceptCallback, channel: _Channel, opened: OpenConnection) -> None:
    try:
        await accept(channel)
    except ConnectionLostError:
        pass
    finally:
        opened.release()
        channel.close()


async def _sleep_until(time_s: float) -> None:
    left_s = time_s - asyncio.get_running_loop().time()
    if left_s > 0:
        await asyncio.sleep(left_s)
