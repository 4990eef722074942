"""Gossip on simulated time: members in one process, exact and deterministic, which can also report lies.

It passes the same contract tests as the real one (tests/runtime/gossip/test_contract.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from genie.errors import AddressInUseError, ConfigError
from genie.model.member import Member, MemberState
from genie.model.names import address_text, is_loopback, parse_endpoint
from genie.processes.clock import Clock
from genie.runtime.gossip.member_table import MemberTable
from genie.runtime.gossip.protocol import GossipIdentity

SUSPECT_AFTER_S = 1.0
DEAD_AFTER_S = 3.0
_FIRST_FREE_PORT = 40_000


class GossipMedium:
    """Connects the members of one simulation. `suspect_after_s` and `dead_after_s` count from a crash."""

    def __init__(
        self, *, suspect_after_s: float = SUSPECT_AFTER_S, dead_after_s: float = DEAD_AFTER_S
    ) -> None:
        self.suspect_after_s = suspect_after_s
        self.dead_after_s = dead_after_s
        self._member_by_address: dict[str, SimGossip] = {}
        self._next_free_port = _FIRST_FREE_PORT

    def running_members(self) -> list[SimGossip]:
        return list(self._member_by_address.values())

    def try_get_member(self, address: str) -> SimGossip | None:
        return self._member_by_address.get(address)

    def add_member(self, member: SimGossip, *, host: str, port: int) -> str:
        """Return its address."""
        if port == 0:
            self._next_free_port += 1
            port = self._next_free_port
        address = address_text(host, port)
        if address in self._member_by_address:
            raise AddressInUseError(f"gossip cannot listen on {address}: the port is in use")
        self._member_by_address[address] = member
        return address

    def remove_member(self, address: str) -> None:
        self._member_by_address.pop(address, None)

    def crash_members_of_host(self, host: str) -> None:
        """Stop the members with this host without notifying the others."""
        for member in self.running_members():
            if parse_endpoint(member.address)[0] == host:
                member.crash()

    def report_to_all(self, report: Member) -> None:
        """Let every running member believe this report about a member, true or not."""
        for member in self.running_members():
            member.receive_report(report)


class SimGossip:
    """Implements Gossip. Members that have joined each other form a group that shares every change."""

    def __init__(
        self, medium: GossipMedium, identity: GossipIdentity, *, host: str, port: int, clock: Clock
    ) -> None:
        self._medium = medium
        self._identity = identity
        self._host = host
        self._port = port
        self._clock = clock
        self._table = MemberTable()
        self._listeners: list[Callable[[], None]] = []
        self._keys: list[bytes] = []
        self._group: list[SimGossip] = [self]
        self.is_running = False
        self.address = ""

    @property
    def keys(self) -> list[bytes]:
        return self._keys

    @property
    def group(self) -> list[SimGossip]:
        return self._group

    async def start(self, keys: Sequence[bytes]) -> None:
        if not keys and not is_loopback(self._host):
            raise ConfigError(f"gossip on {self._host} requires a key")
        self.address = self._medium.add_member(self, host=self._host, port=self._port)
        self._keys, self.is_running = list(keys), True
        self.receive_report(self.describe_as(MemberState.ALIVE))

    async def stop(self, *, leave: bool) -> None:
        if not leave:
            self.crash()
        elif self.is_running:
            _send_report(self._leave_group(), self.describe_as(MemberState.LEFT))

    def crash(self) -> None:
        """Stop without notifying the others, which detect it later."""
        if self.is_running:
            others = self._leave_group()
            self._report_later(others, self._medium.suspect_after_s, MemberState.SUSPECT)
            self._report_later(others, self._medium.dead_after_s, MemberState.DEAD)

    async def join(self, seeds: Sequence[str]) -> int:
        found = [
            member
            for seed in seeds
            if (member := self._medium.try_get_member(seed)) is not None
            if not self._keys or (member.keys and self._keys[0] in member.keys)
        ]
        group = list(self._group)
        for member in found:
            group += [each for each in member.group if each not in group]
        for member in group:
            member.set_group(group)
            _send_report(group, member.describe_as(MemberState.ALIVE))
        return len(found)

    async def use_keys(self, keys: Sequence[bytes]) -> None:
        self._keys = list(keys)

    def members(self) -> tuple[Member, ...]:
        return self._table.sorted_members()

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    # --- between members --------------------------------------------------------------------

    def set_group(self, group: list[SimGossip]) -> None:
        self._group = group

    def describe_as(self, state: MemberState) -> Member:
        return Member(
            name=self._identity.name,
            role=self._identity.role,
            address=self.address,
            state=state,
            since=0.0,
            release=self._identity.release,
            controller_address=self._identity.controller_address,
            machine_name=self._identity.machine_name,
        )

    def receive_report(self, report: Member) -> None:
        """Update the table. A member never believes that it does not respond itself."""
        if report.key == (self._identity.role, self._identity.name):
            report = msgspec.structs.replace(report, state=MemberState.ALIVE)
        if self._table.update([report], now=self._clock.wall_s()):
            for listener in self._listeners:
                listener()

    def _leave_group(self) -> list[SimGossip]:
        """Close the port and return the other members of the group."""
        self.is_running = False
        self._medium.remove_member(self.address)
        others = [member for member in self._group if member is not self]
        for member in others:
            member.set_group(others)
        return others

    def _report_later(self, others: list[SimGossip], seconds: float, state: MemberState) -> None:
        """Report the crash of this member to the others, unless it runs again by then."""
        report = self.describe_as(state)

        def send() -> None:
            if self._medium.try_get_member(self.address) is None:
                _send_report(others, report)

        self._clock.call_later(seconds, send)


def _send_report(members: list[SimGossip], report: Member) -> None:
    for member in members:
        member.receive_report(report)
