"""The simulated world between actors: clocks that drift, hosts that stop, links that break.

One `World` per run; every choice comes from its seeded random source. Actors get a `SimClock`
and a `SimNetwork` for their host; faults are set on the world (pause, cut, crash). What TCP
would do is kept: frames on one connection stay in order, a cut link stalls them and they go on
after it heals, a crashed process's connections break, a dead host's just fall silent.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable

from genie.errors import AddressInUseError, ConnectionLostError, DeadlineError, NothingListensError
from genie.runtime import wire
from genie.runtime.clock import Timer
from genie.runtime.network import Accept, ClientTls

EPOCH_S = 1_700_000_000.0
_STEP_S = 0.01


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.delay_s = 0.005
        self._rates: dict[str, tuple[float, float, float]] = {}
        """By host: the clock's rate, since when, and what it showed then."""
        self._frozen_until: dict[str, float] = {}
        self._paused_until: dict[str, float] = {}
        self._cut: set[frozenset[str]] = set()
        self.listeners: dict[tuple[str, int], _Listener] = {}
        self.channels: set[_Channel] = set()

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def pause(self, host: str, seconds: float) -> None:
        """Like SIGSTOP: the host's code does not run, but time goes on. One that lasts longer already is not
        cut short: some of the host's code would go on, and some would not."""
        self._paused_until[host] = max(self._paused_until.get(host, 0.0), self.now_s + seconds)

    def freeze(self, host: str, seconds: float) -> None:
        """Like a paused virtual machine: not even the host's other processes run."""
        self.pause(host, seconds)
        self._frozen_until[host] = max(self._frozen_until.get(host, 0.0), self.now_s + seconds)

    def is_frozen(self, host: str) -> bool:
        return self.now_s < self._frozen_until.get(host, 0.0)

    def set_rate(self, host: str, rate: float) -> None:
        """From now on the host's clock runs this much faster. It goes on from where it is."""
        self._rates[host] = (rate, self.now_s, self.host_s(host))

    def host_s(self, host: str) -> float:
        rate, since_s, shown_s = self._rates.get(host, (1.0, 0.0, 0.0))
        return shown_s + (self.now_s - since_s) * rate

    def rate(self, host: str) -> float:
        return self._rates.get(host, (1.0, 0.0, 0.0))[0]

    def is_paused(self, host: str) -> bool:
        return self.now_s < self._paused_until.get(host, 0.0)

    async def wait_unpaused(self, host: str) -> None:
        while (left_s := self.paused_for_s(host)) > 0:
            await asyncio.sleep(left_s)

    def paused_for_s(self, host: str) -> float:
        """How much longer; 0 or less when it is not."""
        return self._paused_until.get(host, 0.0) - self.now_s

    def cut(self, one: str, other: str) -> None:
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        self._cut.discard(frozenset((one, other)))

    def heal_all(self) -> None:
        """Links and clocks. Pauses end by themselves."""
        self._cut.clear()
        for host in list(self._rates):
            self.set_rate(host, 1.0)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cut

    def crash(self, host: str, *, silent: bool) -> None:
        """Ends the host's connections and listeners. `silent` is a power cut: peers hear nothing."""
        for address in [key for key in self.listeners if key[0] == host]:
            del self.listeners[address]
        for channel in [one for one in self.channels if host in (one.host, one.other_host)]:
            if channel.host == host or not silent:
                channel.break_now()

    async def transit(self) -> None:
        """One frame's way through the network: short, sometimes long."""
        slow = self.random.random() < 0.02
        await asyncio.sleep(self.random.expovariate(1 / self.delay_s) * (50 if slow else 1))


class SimClock:
    """A host's clock: it drifts with the host's rate and does not return from sleep while paused."""

    def __init__(self, world: World, host: str) -> None:
        self._world = world
        self._host = host

    def monotonic_s(self) -> float:
        return self._world.host_s(self._host)

    def wall_s(self) -> float:
        return EPOCH_S + self._world.now_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._world.rate(self._host))
        await self._world.wait_unpaused(self._host)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return _SimTimer(self._world, self._host, seconds / self._world.rate(self._host), callback)


class _SimTimer:
    """Does not go off while its host is paused."""

    def __init__(self, world: World, host: str, seconds: float, callback: Callable[[], None]) -> None:
        self._world = world
        self._host = host
        self._callback = callback
        self._handle = asyncio.get_running_loop().call_later(seconds, self._go_off)

    def cancel(self) -> None:
        self._handle.cancel()

    def _go_off(self) -> None:
        if (left_s := self._world.paused_for_s(self._host)) > 0:
            self._handle = asyncio.get_running_loop().call_later(left_s, self._go_off)
        else:
            self._callback()


class _Listener:
    def __init__(self, accept: Accept, connections: asyncio.TaskGroup) -> None:
        self.accept = accept
        self.connections = connections


class _Channel:
    """One end of a simulated connection."""

    certificate_name = ""

    def __init__(self, world: World, host: str, other_host: str, *, cap_bytes: int) -> None:
        self._world = world
        self.host = host
        self.other_host = other_host
        self.peer = f"{other_host}:0"
        self.cap_bytes = cap_bytes
        self.other: _Channel | None = None
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1000)
        self._closed = asyncio.Event()
        world.channels.add(self)

    async def send(self, frame: bytes) -> None:
        await self._world.wait_unpaused(self.host)
        if self._closed.is_set():
            raise ConnectionLostError(f"the connection to {self.peer} was lost")
        await self._outbox.put(frame)

    def try_send_nowait(self, frame: bytes) -> bool:
        return False

    async def receive(self) -> wire.Frame:
        data = await self._inbox.get()
        await self._world.wait_unpaused(self.host)
        if data is None:
            self._inbox.put_nowait(None)
            raise ConnectionLostError(f"{self.peer} closed the connection")
        header, payload = data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :]
        _, kind, call_id = wire.unpack_header(header, cap_bytes=self.cap_bytes, peer=self.peer)
        return wire.Frame(kind, call_id, payload)

    def try_receive_nowait(self) -> wire.Frame | None:
        return None

    async def carry(self) -> None:
        """Moves frames to the other end, in order, through whatever the network does."""
        while not self._closed.is_set():
            try:
                async with asyncio.timeout(1.0):
                    frame = await self._outbox.get()
            except TimeoutError:
                continue
            await self._world.transit()
            while self._world.is_cut(self.host, self.other_host) and not self._closed.is_set():
                await asyncio.sleep(_STEP_S * 10)
            if self.other is not None and not self._closed.is_set():
                self.other._inbox.put_nowait(frame)

    def close(self) -> None:
        if not self._closed.is_set():
            self.break_now()
            if self.other is not None and not self._world.is_cut(self.host, self.other_host):
                self.other.break_now()

    def break_now(self) -> None:
        self._world.channels.discard(self)
        self._closed.set()
        self._inbox.put_nowait(None)


class SimNetwork:
    """The network as one host sees it."""

    def __init__(self, world: World, host: str) -> None:
        self._world = world
        self._host = host

    async def connect(self, host: str, port: int, *, tls: ClientTls | None, timeout_s: float) -> _Channel:
        assert tls is None, "there is no TLS in the simulation"
        world = self._world
        await world.wait_unpaused(self._host)
        await world.transit()
        if world.is_cut(self._host, host) or world.is_paused(host):
            await asyncio.sleep(timeout_s)
            raise DeadlineError(f"{host}:{port} did not answer within {timeout_s:g} s")
        listener = world.listeners.get((host, port))
        if listener is None:
            raise NothingListensError(f"{host}:{port} refused the connection: nothing listens there")
        near = _Channel(world, self._host, host, cap_bytes=wire.FRAME_BYTES_MAX)
        far = _Channel(world, host, self._host, cap_bytes=wire.FRAME_BYTES_MAX_STRANGER)
        near.other, far.other = far, near
        for work in (near.carry(), far.carry(), _accepted(listener.accept, far)):
            listener.connections.create_task(work)
        return near

    async def serve(
        self,
        host: str,
        port: int,
        accept: Accept,
        *,
        tls: ssl.SSLContext | None,
        on_listening: Callable[[int], None],
    ) -> None:
        assert tls is None, "there is no TLS in the simulation"
        address = (self._host, port)
        if address in self._world.listeners:
            raise AddressInUseError(f"port {port} on {host} is in use")
        async with asyncio.TaskGroup() as connections:
            self._world.listeners[address] = _Listener(accept, connections)
            try:
                on_listening(port)
                await asyncio.Event().wait()
            finally:
                self._world.listeners.pop(address, None)


async def _accepted(accept: Accept, channel: _Channel) -> None:
    try:
        await accept(channel)
    except ConnectionLostError:
        pass
    finally:
        channel.close()
