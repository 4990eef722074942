"""Gossip with kinship: what is specific to the library. The contract is in test_contract.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from genie.config import GossipConfig
from genie.errors import GossipError
from genie.model.member import MemberRole
from genie.processes.clock import SystemClock
from genie.runtime.gossip.kinship_gossip import KinshipGossip, find_kinship_support
from genie.runtime.gossip.protocol import GossipIdentity
from tests.waiting import until

KEY = b"k" * 32
IDENTITY = GossipIdentity(name="n1", role=MemberRole.NODE, release="1.0")
EXIT_SCRIPT = """
import asyncio
from genie.model.member import MemberRole
from genie.processes.clock import SystemClock
from genie.runtime.gossip.kinship_gossip import KinshipGossip
from genie.runtime.gossip.protocol import GossipIdentity

async def main() -> None:
    members = []
    for name in ("n1", "n2", "n3"):
        identity = GossipIdentity(name=name, role=MemberRole.NODE, release="1.0")
        members.append(KinshipGossip(identity, host="127.0.0.1", port=0, clock=SystemClock()))
        await members[-1].start([b"k" * 32])
        await members[-1].join([members[0].address])
    await members[2].stop(leave=False)
    for member in members:
        await member.stop(leave=True)

asyncio.run(main())
"""


def new_gossip(host: str = "127.0.0.1", **options: object) -> KinshipGossip:
    return KinshipGossip(IDENTITY, host=host, port=0, clock=SystemClock(), **options)  # type: ignore[arg-type]


def test_process_exits_normally_after_gossip() -> None:
    """The asyncio interface of kinship 0.4.0 aborts some processes at exit."""
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", EXIT_SCRIPT], capture_output=True, text=True, timeout=60, env=os.environ
        )
        assert done.returncode == 0, done.stderr


async def test_members_that_genie_did_not_start_are_ignored() -> None:
    import kinship
    import kinship.blocking

    gossip = new_gossip()
    await gossip.start([KEY])
    settings = kinship.Config.lan(
        name="no node/ID!", bind="127.0.0.1:0", keys=[KEY], cluster="genie", seeds=[gossip.address]
    )
    stranger = kinship.blocking.Cluster(settings).start()
    other = KinshipGossip(
        GossipIdentity(
            name="n2",
            role=MemberRole.NODE,
            release="not a release! " * 9,
            controller_address="?",
            machine_name="no name!",
        ),
        host="127.0.0.1",
        port=0,
        clock=SystemClock(),
    )
    await other.start([KEY])
    try:
        await other.join([gossip.address])
        await until(lambda: len(gossip.members()) == 2)
        found = gossip.members()[1]
        assert (found.name, found.release, found.controller_address) == ("n2", "", "")
        assert found.machine_name == ""
    finally:
        stranger.close(timeout=0.1)
        await other.stop(leave=False)
        await gossip.stop(leave=False)


async def test_advertised_address_is_that_of_other_members() -> None:
    gossip = new_gossip("0.0.0.0", advertised_host="localhost")
    await gossip.start([KEY])
    try:
        assert gossip.address.startswith("127.0.0.1:") and not gossip.address.endswith(":0")
        assert gossip.members()[0].address == gossip.address
    finally:
        await gossip.stop(leave=False)


@pytest.mark.parametrize("host", ["name.invalid", "10.99.0.1"])
async def test_address_that_cannot_be_used_is_an_error(host: str) -> None:
    gossip = new_gossip(host)
    with pytest.raises(GossipError, match=host):
        await gossip.start([KEY])
    assert not gossip.is_running
    await gossip.stop(leave=True)
    assert await _try_join(gossip) == "gossip is not running"


async def _try_join(gossip: KinshipGossip) -> str:
    try:
        await gossip.join(["127.0.0.1:1"])
    except GossipError as error:
        return error.message
    return ""


def test_without_the_package_gossip_is_off_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(enabled: str) -> tuple[bool, str, bool]:
        support = find_kinship_support(
            GossipConfig(enabled=enabled), host="127.0.0.1", port=0, advertised_host="", clock=SystemClock()
        )
        return support.make_gossip is not None, support.off_reason, support.is_disabled

    assert find("auto") == find("on") == (True, "", False)
    assert find("off") == (False, "it is disabled on this machine (gossip.enabled = off)", True)
    monkeypatch.setitem(sys.modules, "kinship.blocking", None)
    is_possible, reason, is_disabled = find("auto")
    assert not is_possible and not is_disabled and "pip install 'genie-gpu[gossip]'" in reason
