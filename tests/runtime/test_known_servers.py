"""The stored addresses of the controllers: which file, what it may contain, and who uses it."""

from __future__ import annotations

import asyncio
import re
import stat
from pathlib import Path

import pytest

from genie import config
from genie.cluster.client import open_client
from genie.config import Settings
from genie.errors import GenieError, NotLeaderError, OutdatedLeaderError, UnreachableError
from genie.model.tenant import TokenKind
from genie.runtime import logins
from genie.runtime.known_servers import (
    SERVERS_MAX,
    ServerList,
    read_generation,
    read_known_servers,
    store_generation,
    store_known_servers,
)
from genie.tenancy.access import NO_PIN
from tests.fakes.controller import HOST, FakeController

PIN = "p" * 43


def test_addresses_are_stored_privately_and_read_again(tmp_path: Path) -> None:
    servers = (("10.0.0.5", 5555), ("fd00::7", 5555))
    store_known_servers(tmp_path, PIN, servers)
    (path,) = (tmp_path / "servers").iterdir()
    assert read_known_servers(tmp_path, PIN) == servers
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.stat().st_ino
    store_known_servers(tmp_path, PIN, servers)
    assert path.stat().st_ino == before, "unchanged addresses are not written again"
    store_known_servers(tmp_path, PIN, servers[:1])
    assert read_known_servers(tmp_path, PIN) == servers[:1]


def test_number_of_stored_addresses_is_bounded(tmp_path: Path) -> None:
    store_known_servers(tmp_path, PIN, tuple((f"h{number}", 1) for number in range(100)))
    assert len(read_known_servers(tmp_path, PIN)) == SERVERS_MAX


def test_single_controller_and_cluster_without_tls_are_not_stored(tmp_path: Path) -> None:
    store_known_servers(tmp_path, PIN, (("h", 1),))
    store_known_servers(tmp_path, NO_PIN, (("h", 1), ("i", 1)))
    assert not (tmp_path / "servers").exists()
    assert read_known_servers(tmp_path, NO_PIN) == ()


@pytest.mark.parametrize("body", ["", "{", "7", '["no port"]', '[["a"]]', '{"a": 1}'])
def test_damaged_file_counts_as_none(tmp_path: Path, body: str) -> None:
    store_known_servers(tmp_path, PIN, (("h", 1), ("i", 1)))
    (tmp_path / "servers" / f"{PIN}.json").write_text(body)
    assert read_known_servers(tmp_path, PIN) == ()


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (
            NotLeaderError("it does not lead"),
            "no leader of the cluster was found",
            "'genie status --address HOST:PORT' of a server shows why",
        ),
        (UnreachableError("no reply"), "no controller of the cluster accepted", "check the network"),
    ],
)
def test_error_says_whether_a_leader_or_the_network_is_missing(
    error: GenieError, message: str, hint: str
) -> None:
    servers = ServerList(("10.0.0.5", 5555), [("10.0.0.6", 5555)], has_tls=True)
    for address in (("10.0.0.5", 5555), ("10.0.0.6", 5555)):
        servers.record_failure(address, error, now_s=0.0)
    found = servers.error_naming_all_failed_servers(error)
    assert type(found) is type(error)
    assert message in found.message and hint in found.hint


async def test_command_finds_another_controller_when_that_of_its_login_is_down(tmp_path: Path) -> None:
    one = FakeController(tmp_path / "ca", use_tls=True)
    two = FakeController(tmp_path / "ca", use_tls=True)
    state_dir = tmp_path / "client"
    async with asyncio.timeout(30), two.listening():
        one.more_controllers = (two.address,)
        async with one.listening():
            logins.store_login(state_dir, HOST, one.port, one.token(TokenKind.USER))
            async with open_client(_load(state_dir)) as client:
                assert client.where == one.address
        async with open_client(_load(state_dir)) as client:
            assert client.where == two.address
        with pytest.raises(UnreachableError, match=one.address) as error:
            async with open_client(_load(state_dir, address=one.address)):
                pass
        assert two.address not in str(error.value), "an address that was passed is never replaced"
    with pytest.raises(UnreachableError, match=f"{one.address} refused.*{two.address} refused"):
        async with open_client(_load(state_dir)):
            pass


def test_only_a_higher_generation_is_stored(tmp_path: Path) -> None:
    assert read_generation(tmp_path, PIN) == 0
    for generation in (5, 3):
        store_generation(tmp_path, PIN, generation)
        assert read_generation(tmp_path, PIN) == 5
    store_generation(tmp_path, NO_PIN, 7)
    assert read_generation(tmp_path, NO_PIN) == 0
    (tmp_path / "servers" / f"{PIN}.generation").write_text("damaged")
    assert read_generation(tmp_path, PIN) == 0


async def test_a_client_that_has_seen_a_generation_does_not_follow_a_server_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    old = FakeController(tmp_path / "ca", use_tls=True, generation=2)
    restored = FakeController(tmp_path / "ca", use_tls=True, generation=3)
    state_dir = tmp_path / "client"
    async with asyncio.timeout(30), old.listening(), restored.listening():
        for controller in (old, restored):
            logins.store_login(state_dir, HOST, controller.port, controller.token(TokenKind.USER))
        async with open_client(_load(state_dir, address=old.address)) as client:
            assert client.where == old.address, "no other one is known"
        async with open_client(_load(state_dir, address=restored.address)):
            pass
        with pytest.raises(
            OutdatedLeaderError, match=f"{old.address} has generation 2 .* generation 3 exists"
        ) as outdated:
            async with open_client(_load(state_dir, address=old.address)):
                pass
        found = re.search(r"remove (\S+) on this machine", outdated.value.hint)
        assert found is not None
        await asyncio.to_thread(Path(found[1]).unlink)
        async with open_client(_load(state_dir, address=old.address)):
            pass
        async with open_client(_load(state_dir, address=restored.address)):
            pass
        old.generation = None  # a server that has not read its store yet
        async with open_client(_load(state_dir, address=old.address)):
            pass


def _load(state_dir: Path, *, address: str | None = None) -> Settings:
    return config.load({"paths.state_dir": state_dir, "cluster.master_addr": address}, environ={})
