"""Host keys: fetched the way that connections go, added to known_hosts, never replaced."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import asyncssh
import pytest

from genie.errors import HostKeyChangedError, UnreachableError, UsageError
from genie.grid.grid_file import GridFile
from genie.grid.host_trust import HostKey, add_host_key, fetch_host_key
from genie.grid.ssh_pool import SshPool
from tests.grid.bed import Bed
from tests.grid.conftest import grid_file_of


async def fetch(bed: Bed, name: str = "gpu1", file: GridFile | None = None, timeout_s: float = 20) -> HostKey:
    file = file or grid_file_of(bed)
    return await fetch_host_key(file.node(name), file, bed.ssh_config, timeout_s=timeout_s)


async def login(bed: Bed, name: str) -> None:
    async with SshPool(grid_file_of(bed), ssh_config=bed.ssh_config) as pool, pool.use(name):
        pass


def type_in_a_shell(line: str) -> None:
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def fingerprint(bed: Bed, name: str) -> str:
    return str(asyncssh.import_public_key(bed[name].public_key).get_fingerprint())


async def test_an_unknown_key_is_shown_and_added_and_then_the_login_works(own_bed: Bed) -> None:
    own_bed.write_known_hosts(without=["gpu1"])
    others = own_bed.known_hosts.read_text().rstrip("\n")
    own_bed.known_hosts.write_text(others)  # no newline at the end
    key = await fetch(own_bed)
    node = own_bed["gpu1"]
    assert (key.known, key.fingerprint) == (False, fingerprint(own_bed, "gpu1"))
    assert (key.kind, key.host) == ("ssh-ed25519", f"[{node.address}]:{node.port}")
    add_host_key(key)
    kind, body = node.public_key.split()[:2]
    assert own_bed.known_hosts.read_text() == f"{others}\n[{node.address}]:{node.port} {kind} {body}\n"
    await login(own_bed, "gpu1")
    await login(own_bed, "gpu2")
    assert (await fetch(own_bed)).known


async def test_a_file_that_is_not_there_is_made_private(own_bed: Bed, tmp_path: Path) -> None:
    own_bed.known_hosts = tmp_path / "ssh" / "known"
    own_bed.write_ssh_config()
    add_host_key(await fetch(own_bed))
    assert own_bed.known_hosts.stat().st_mode & 0o777 == 0o600
    assert own_bed.known_hosts.parent.stat().st_mode & 0o777 == 0o700
    await login(own_bed, "gpu1")


async def test_a_changed_key_is_a_hard_error_here_too(own_bed: Bed) -> None:
    before = own_bed.known_hosts.read_text()
    own_bed["gpu1"].write_host_key()
    own_bed["gpu1"].restart()
    with pytest.raises(HostKeyChangedError, match="ssh-keygen -f"):
        await fetch(own_bed)
    assert own_bed.known_hosts.read_text() == before


@pytest.mark.parametrize("alias", ["", "  HostKeyAlias one-name\n"])
async def test_the_hint_for_a_changed_key_works_as_it_is_typed(own_bed: Bed, alias: str) -> None:
    own_bed.write_ssh_config(more=alias)
    node = own_bed["gpu1"]
    own_bed.known_hosts.write_text("")
    add_host_key(await fetch(own_bed))
    node.write_host_key()
    node.restart()
    hints = []
    for look in (fetch(own_bed), login(own_bed, "gpu1")):
        with pytest.raises(HostKeyChangedError) as caught:
            await look
        hints.append(caught.value.hint)
    assert len(set(hints)) == 1
    type_in_a_shell(hints[0].split(": ", 1)[1].split(" and then: ")[0])
    assert not (await fetch(own_bed)).known


async def test_a_host_that_no_longer_has_a_key_of_the_known_kind_has_changed(own_bed: Bed) -> None:
    node = own_bed["gpu1"]
    other = asyncssh.generate_private_key("ecdsa-sha2-nistp256").export_public_key().decode().strip()
    own_bed.known_hosts.write_text(f"[{node.address}]:{node.port} {other}\n")
    with pytest.raises(HostKeyChangedError):
        await fetch(own_bed)


async def test_a_revoked_key_is_never_trusted(own_bed: Bed) -> None:
    node = own_bed["gpu1"]
    own_bed.known_hosts.write_text(f"@revoked [{node.address}]:{node.port} {node.public_key}\n")
    with pytest.raises(HostKeyChangedError, match="revoked"):
        await fetch(own_bed)


async def test_the_key_comes_through_a_jump_host(own_bed: Bed) -> None:
    own_bed.write_known_hosts(without=["gpu1"])
    text = own_bed.ssh_config.read_text().replace("Host gpu1\n", "Host gpu1\n  ProxyJump gpu2\n")
    own_bed.ssh_config.write_text(text)
    key = await fetch(own_bed)
    assert key.fingerprint == fingerprint(own_bed, "gpu1")
    own_bed["gpu2"].stop()
    with pytest.raises(UnreachableError):
        await fetch(own_bed)


async def test_an_alias_for_the_key_is_written_without_a_port(own_bed: Bed) -> None:
    own_bed.write_known_hosts(without=["gpu1"])
    text = own_bed.ssh_config.read_text().replace("Host gpu1\n", "Host gpu1\n  HostKeyAlias box\n")
    own_bed.ssh_config.write_text(text)
    key = await fetch(own_bed)
    assert key.line.startswith("box ssh-ed25519 ")
    add_host_key(key)
    await login(own_bed, "gpu1")


async def test_a_host_that_is_away_or_hangs_is_unreachable(own_bed: Bed) -> None:
    with own_bed["gpu2"].hanging(), pytest.raises(UnreachableError, match=r"within 0\.5 s"):
        await fetch(own_bed, "gpu2", timeout_s=0.5)
    own_bed["gpu1"].stop()
    with pytest.raises(
        UnreachableError, match=r"gpu1: \S+ port [0-9]+ cannot be reached: Connection refused \("
    ):
        await fetch(own_bed)


async def test_without_a_file_for_known_hosts_nothing_can_be_trusted(own_bed: Bed) -> None:
    text = own_bed.ssh_config.read_text()
    own_bed.ssh_config.write_text(
        text.replace(f"UserKnownHostsFile {own_bed.known_hosts}", "UserKnownHostsFile none")
    )
    with pytest.raises(UsageError, match="UserKnownHostsFile"):
        await fetch(own_bed)


async def test_a_file_that_cannot_be_written_is_said(own_bed: Bed, tmp_path: Path) -> None:
    own_bed.known_hosts = tmp_path
    own_bed.write_ssh_config()
    with pytest.raises(UsageError, match="cannot be written"):
        add_host_key(await fetch(own_bed))


async def test_a_line_for_which_there_is_no_room_is_taken_back(own_bed: Bed) -> None:
    own_bed.write_known_hosts(without=["gpu1"])
    key = await fetch(own_bed)
    before = own_bed.known_hosts.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(UsageError, match="cannot be written"):
            add_host_key(key)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert own_bed.known_hosts.read_bytes() == before
