"""Taking part in gossip: with and without a leader, after failures, and with new keys."""

from __future__ import annotations

import asyncio
import base64
import logging
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from genie.errors import AddressInUseError, ConnectionLostError, GossipError, ProtocolError, StoreFullError
from genie.model.member import Member, MemberRole, MemberState
from genie.model.messages import GossipSettings
from genie.processes.clock import SystemClock
from genie.processes.tasks import run_inline
from genie.runtime.gossip.files import find_latest_members
from genie.runtime.gossip.participant import SETTINGS_INTERVAL_S, START_RETRY_S, GossipParticipant
from genie.runtime.gossip.protocol import Gossip, GossipIdentity, GossipSupport
from genie.sim.gossip import GossipMedium, SimGossip
from tests.fakes.clock import FakeClock
from tests.waiting import until

KEYS = [base64.b64encode(bytes([number]) * 32).decode() for number in range(3)]


def make_settings(*seeds: str, keys: Sequence[str] = KEYS[:1]) -> GossipSettings:
    return GossipSettings(is_enabled=True, keys=tuple(keys), seeds=seeds)


@dataclass
class ParticipantInputs:
    """Everything around one participant. `settings` is None while there is no leader."""

    directory: Path
    settings: GossipSettings | None
    medium: GossipMedium = field(default_factory=GossipMedium)
    clock: FakeClock = field(default_factory=FakeClock)
    created: list[SimGossip] = field(default_factory=list)
    is_port_in_use: bool = False
    is_request_unknown: bool = False
    does_server_take_part: bool = True
    fetch_count: int = 0
    last_ports: list[int] = field(default_factory=list)

    async def fetch_settings(self) -> GossipSettings:
        self.fetch_count += 1
        if self.is_request_unknown:
            raise ProtocolError("unknown request")
        if not self.does_server_take_part:
            raise GossipError("server s takes no part in gossip: the port is in use")
        if self.settings is None:
            raise ConnectionLostError("no connection to the controller")
        return self.settings

    def make_gossip(self, identity: GossipIdentity, last_port: int) -> Gossip:
        self.last_ports.append(last_port)
        if self.is_port_in_use:
            raise AddressInUseError("gossip cannot listen on 127.0.0.1:5557: the port is in use")
        gossip = SimGossip(self.medium, identity, host="127.0.0.1", port=last_port, clock=self.clock)
        self.created.append(gossip)
        return gossip

    @asynccontextmanager
    async def running(self, support: GossipSupport | None = None) -> AsyncIterator[GossipParticipant]:
        participant = GossipParticipant(
            support=support or GossipSupport(self.make_gossip, ""),
            identity=lambda: GossipIdentity(name="n1", role=MemberRole.NODE, release="1.0"),
            fetch_settings=self.fetch_settings,
            directory=self.directory,
            clock=self.clock,
            offload=run_inline,
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(participant.run())
            await self.clock.advance(0.0)
            try:
                yield participant
            finally:
                task.cancel()


@pytest.fixture
def inputs(tmp_path: Path) -> ParticipantInputs:
    return ParticipantInputs(tmp_path, make_settings())


@asynccontextmanager
async def running_server(inputs: ParticipantInputs) -> AsyncIterator[SimGossip]:
    identity = GossipIdentity(name="s", role=MemberRole.SERVER, release="1.0")
    server = SimGossip(inputs.medium, identity, host="127.0.0.1", port=0, clock=SystemClock())
    await server.start([base64.b64decode(KEYS[0])])
    yield server
    await server.stop(leave=True)


async def test_member_joins_the_servers_and_leaves_at_the_end(inputs: ParticipantInputs) -> None:
    async with running_server(inputs) as server:
        inputs.settings = make_settings(server.address)
        changes: list[int] = []
        async with inputs.running() as participant:
            participant.add_listener(lambda: changes.append(1))
            await until(lambda: len(participant.members()) == 2)
            assert participant.off_reason == "" and participant.address == inputs.created[0].address
            assert participant.members_reply().observer == "n1"
            stranger = Member(
                name="n2", role=MemberRole.NODE, address="127.0.0.1:1", state=MemberState.ALIVE, since=0.0
            )
            inputs.medium.report_to_all(stranger)
            assert changes == [1]
        assert next(each for each in server.members() if each.name == "n1").state is MemberState.LEFT


async def test_member_starts_without_a_leader_at_its_last_address(inputs: ParticipantInputs) -> None:
    async with running_server(inputs) as server:
        inputs.settings = make_settings(server.address)
        async with inputs.running() as participant:
            address = participant.address
        inputs.settings = None
        async with inputs.running() as participant:
            await until(lambda: len(participant.members()) == 2)
            assert participant.address == address
    assert stat.S_IMODE((inputs.directory / "gossip.json").stat().st_mode) == 0o600, "it contains the keys"


async def test_without_settings_gossip_does_not_start(inputs: ParticipantInputs) -> None:
    inputs.settings = None
    async with inputs.running() as participant:
        await inputs.clock.advance(30.0)
        assert inputs.created == [] and participant.off_reason
        inputs.settings = make_settings()
        await inputs.clock.advance(2.0)
        assert participant.address


async def test_controller_of_an_earlier_release_gets_few_requests(inputs: ParticipantInputs) -> None:
    inputs.is_request_unknown = True
    async with inputs.running() as participant:
        await inputs.clock.advance(300.0)
        assert inputs.fetch_count == 1 and inputs.created == []
        inputs.is_request_unknown = False
        await inputs.clock.advance(301.0)
        assert participant.address


async def test_settings_that_could_not_be_stored_are_stored_later(
    inputs: ParticipantInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path, stored: object) -> None:
        raise StoreFullError("cannot write gossip.json: no space")

    with monkeypatch.context() as patch:
        patch.setattr("genie.runtime.gossip.files.write_stored_gossip", fail)
        async with inputs.running() as participant:
            await inputs.clock.advance(35.0)
            assert participant.address, "a full disk does not keep gossip from starting"
            patch.undo()
            await inputs.clock.advance(SETTINGS_INTERVAL_S + 1)
            assert (inputs.directory / "gossip.json").exists()


async def test_disabled_gossip_stops(inputs: ParticipantInputs) -> None:
    async with inputs.running() as participant:
        assert participant.address
        inputs.settings = GossipSettings()
        await inputs.clock.advance(SETTINGS_INTERVAL_S + 1)
        assert participant.address == "" and "disabled" in participant.off_reason
        assert not inputs.medium.running_members()


async def test_member_follows_changes_between_leaders_with_and_without_gossip(
    inputs: ParticipantInputs,
) -> None:
    enabled = inputs.settings
    async with inputs.running() as participant:
        for settings in (GossipSettings(), enabled, GossipSettings(), enabled):
            inputs.settings = settings
            await inputs.clock.advance(SETTINGS_INTERVAL_S + START_RETRY_S + 1)
            assert bool(participant.address) == (settings is enabled)
            assert len(inputs.medium.running_members()) == (settings is enabled)


async def test_member_stays_off_after_a_restart_without_a_leader(inputs: ParticipantInputs) -> None:
    async with inputs.running():
        inputs.settings = GossipSettings()
        await inputs.clock.advance(SETTINGS_INTERVAL_S + 1)
    inputs.settings = None
    async with inputs.running() as participant:
        await inputs.clock.advance(SETTINGS_INTERVAL_S + 1)
        assert participant.address == "" and "disabled in this cluster" in participant.off_reason
        assert not inputs.medium.running_members()


async def test_member_that_is_disabled_on_its_machine_takes_no_part_in_an_enabled_cluster(
    inputs: ParticipantInputs,
) -> None:
    support = GossipSupport(off_reason="it is disabled on this machine", is_disabled=True)
    async with inputs.running(support) as participant:
        await inputs.clock.advance(2 * SETTINGS_INTERVAL_S)
        assert participant.address == "" and participant.off_reason == "it is disabled on this machine"
        assert inputs.fetch_count == 0 and not inputs.medium.running_members()


async def test_member_keeps_its_settings_while_the_leader_takes_no_part(inputs: ParticipantInputs) -> None:
    async with inputs.running() as participant:
        await inputs.clock.advance(SETTINGS_INTERVAL_S + 1)
        address, settings, count = participant.address, participant.settings, inputs.fetch_count
        stored = (inputs.directory / "gossip.json").read_bytes()
        inputs.does_server_take_part = False
        await inputs.clock.advance(5 * SETTINGS_INTERVAL_S)
        assert participant.address == address and participant.settings == settings
        assert (inputs.directory / "gossip.json").read_bytes() == stored
        assert 4 <= inputs.fetch_count - count <= 6, "no additional requests"


async def test_new_keys_are_used(inputs: ParticipantInputs) -> None:
    async with inputs.running():
        inputs.settings = make_settings(keys=[KEYS[1], KEYS[0]])
        await inputs.clock.advance(SETTINGS_INTERVAL_S + 1)
        assert inputs.created[0].keys == [base64.b64decode(KEYS[1]), base64.b64decode(KEYS[0])]
        assert len(inputs.created) == 1, "it was not restarted"


async def test_failed_start_is_logged_once_and_retried(
    inputs: ParticipantInputs, caplog: pytest.LogCaptureFixture
) -> None:
    inputs.is_port_in_use = True
    async with inputs.running() as participant:
        await inputs.clock.advance(100.0)
        assert len(inputs.last_ports) >= 3
        assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
        assert participant.members() == ()
        inputs.is_port_in_use = False
        await inputs.clock.advance(31.0)
        assert participant.address and participant.off_reason == ""


async def test_failed_member_is_restarted(inputs: ParticipantInputs) -> None:
    async with inputs.running() as participant:
        inputs.created[0].is_running = False
        inputs.medium.remove_member(inputs.created[0].address)
        await inputs.clock.advance(35.0)
        assert len(inputs.created) == 2 and participant.members()


async def test_unreachable_servers_are_logged_once(
    inputs: ParticipantInputs, caplog: pytest.LogCaptureFixture
) -> None:
    inputs.settings = make_settings("10.99.0.1:5556")
    async with inputs.running() as participant:
        await inputs.clock.advance(200.0)
        assert participant.address
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "10.99.0.1:5556" in warnings[0].message and "UDP and TCP" in warnings[0].message


async def test_failed_start_ends_even_if_stopping_does_not(
    inputs: ParticipantInputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class HangingGossip(SimGossip):
        async def start(self, keys: Sequence[bytes]) -> None:
            raise AddressInUseError("gossip cannot listen on 127.0.0.1:5557: the port is in use")

        async def stop(self, *, leave: bool) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("genie.runtime.gossip.participant._STOP_TIMEOUT_S", 0.01)
    identity = GossipIdentity(name="n1", role=MemberRole.NODE, release="1.0")
    support = GossipSupport(
        lambda _identity, port: HangingGossip(
            inputs.medium, identity, host="127.0.0.1", port=port, clock=inputs.clock
        ),
        "",
    )
    async with inputs.running(support):
        await until(lambda: "port is in use" in caplog.text, what="the failed start is reported")


async def test_invalid_keys_start_nothing(
    inputs: ParticipantInputs, caplog: pytest.LogCaptureFixture
) -> None:
    for keys in (["not base64!"], [base64.b64encode(b"short").decode()]):
        inputs.settings = make_settings(keys=keys)
        async with inputs.running():
            assert inputs.created == []
    assert "key" in caplog.text and "short" not in caplog.text


async def test_without_support_it_says_why_and_ends(
    inputs: ParticipantInputs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with inputs.running(GossipSupport(off_reason="kinship is missing; pip install it")) as participant:
        assert participant.off_reason == participant.members_reply().off_reason
    assert "kinship is missing" in caplog.text


async def test_members_are_stored_for_commands_on_this_machine(inputs: ParticipantInputs) -> None:
    async with running_server(inputs) as server:
        inputs.settings = make_settings(server.address)
        async with inputs.running():
            await inputs.clock.advance(5.0)
            stored = find_latest_members([inputs.directory / "nothing", inputs.directory])
            assert stored is not None and [member.name for member in stored.members] == ["s", "n1"]
            first_at = stored.observed_at
            await inputs.clock.advance(31.0)
            stored = find_latest_members([inputs.directory])
            assert stored is not None and stored.observed_at > first_at, "its age shows that the agent runs"


def test_damaged_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "members.json").write_text("{")
    assert find_latest_members([tmp_path]) is None
