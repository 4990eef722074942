"""Host keys: fetched as connections are made, added to known_hosts, never replaced."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import asyncssh
import pytest

from genie.errors import HostKeyChangedError, UnreachableError, UsageError
from genie.grid.grid_file import GridFile, parse_grid_file
from genie.grid.ssh.host_trust import HostKey, add_host_key_to_known_hosts, fetch_host_key
from genie.grid.ssh.pool import SshPool
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.testbed import SshTestbed
from tests.needs import require_program


async def fetch_node_key(
    testbed: SshTestbed, name: str = "gpu1", file: GridFile | None = None, timeout_s: float = 20
) -> HostKey:
    file = file or make_testbed_grid_file(testbed)
    return await fetch_host_key(file.node(name), file, testbed.ssh_config, timeout_s=timeout_s)


async def connect_once(testbed: SshTestbed, name: str) -> None:
    async with (
        SshPool(make_testbed_grid_file(testbed), ssh_config=testbed.ssh_config) as pool,
        pool.connect(name),
    ):
        pass


def run_in_shell(line: str) -> None:
    require_program("ssh-keygen", package="openssh-client")
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def get_host_fingerprint(testbed: SshTestbed, name: str) -> str:
    return str(asyncssh.import_public_key(testbed[name].public_key).get_fingerprint())


async def test_unknown_host_key_can_be_added(own_testbed: SshTestbed) -> None:
    own_testbed.write_known_hosts(without=["gpu1"])
    others = own_testbed.known_hosts.read_text().rstrip("\n")
    own_testbed.known_hosts.write_text(others)  # no newline at the end
    key = await fetch_node_key(own_testbed)
    node = own_testbed["gpu1"]
    assert (key.is_known, key.fingerprint) == (False, get_host_fingerprint(own_testbed, "gpu1"))
    assert (key.kind, key.host) == ("ssh-ed25519", f"[{node.address}]:{node.port}")
    add_host_key_to_known_hosts(key)
    kind, body = node.public_key.split()[:2]
    assert own_testbed.known_hosts.read_text() == f"{others}\n[{node.address}]:{node.port} {kind} {body}\n"
    await connect_once(own_testbed, "gpu1")
    await connect_once(own_testbed, "gpu2")
    assert (await fetch_node_key(own_testbed)).is_known


async def test_new_known_hosts_file_is_private(own_testbed: SshTestbed, tmp_path: Path) -> None:
    own_testbed.known_hosts = tmp_path / "ssh" / "known"
    own_testbed.write_ssh_config()
    add_host_key_to_known_hosts(await fetch_node_key(own_testbed))
    assert own_testbed.known_hosts.stat().st_mode & 0o777 == 0o600
    assert own_testbed.known_hosts.parent.stat().st_mode & 0o777 == 0o700
    await connect_once(own_testbed, "gpu1")


async def test_changed_host_key_is_an_error_when_fetching(own_testbed: SshTestbed) -> None:
    before = own_testbed.known_hosts.read_text()
    own_testbed["gpu1"].write_host_key()
    own_testbed["gpu1"].restart()
    with pytest.raises(HostKeyChangedError, match="ssh-keygen -f"):
        await fetch_node_key(own_testbed)
    assert own_testbed.known_hosts.read_text() == before


@pytest.mark.parametrize("alias", ["", "  HostKeyAlias one-name\n"])
async def test_hint_for_a_changed_key_is_a_valid_command(own_testbed: SshTestbed, alias: str) -> None:
    own_testbed.write_ssh_config(more=alias)
    node = own_testbed["gpu1"]
    own_testbed.known_hosts.write_text("")
    add_host_key_to_known_hosts(await fetch_node_key(own_testbed))
    node.write_host_key()
    node.restart()
    hints = []
    for look in (fetch_node_key(own_testbed), connect_once(own_testbed, "gpu1")):
        with pytest.raises(HostKeyChangedError) as caught:
            await look
        hints.append(caught.value.hint)
    assert len(set(hints)) == 1
    run_in_shell(hints[0].split(": ", 1)[1].split(" and then: ")[0])
    assert not (await fetch_node_key(own_testbed)).is_known


async def test_host_without_a_key_of_the_known_type_has_changed(own_testbed: SshTestbed) -> None:
    node = own_testbed["gpu1"]
    other = asyncssh.generate_private_key("ecdsa-sha2-nistp256").export_public_key().decode().strip()
    own_testbed.known_hosts.write_text(f"[{node.address}]:{node.port} {other}\n")
    with pytest.raises(HostKeyChangedError):
        await fetch_node_key(own_testbed)


async def test_revoked_key_is_never_trusted(own_testbed: SshTestbed) -> None:
    node = own_testbed["gpu1"]
    own_testbed.known_hosts.write_text(f"@revoked [{node.address}]:{node.port} {node.public_key}\n")
    with pytest.raises(HostKeyChangedError, match="revoked"):
        await fetch_node_key(own_testbed)


async def test_host_key_is_fetched_through_a_jump_host(own_testbed: SshTestbed) -> None:
    own_testbed.write_known_hosts(without=["gpu1"])
    text = own_testbed.ssh_config.read_text().replace("Host gpu1\n", "Host gpu1\n  ProxyJump gpu2\n")
    own_testbed.ssh_config.write_text(text)
    key = await fetch_node_key(own_testbed)
    assert key.fingerprint == get_host_fingerprint(own_testbed, "gpu1")
    own_testbed["gpu2"].stop()
    with pytest.raises(UnreachableError):
        await fetch_node_key(own_testbed)


async def test_host_key_alias_is_written_without_a_port(own_testbed: SshTestbed) -> None:
    own_testbed.write_known_hosts(without=["gpu1"])
    text = own_testbed.ssh_config.read_text().replace("Host gpu1\n", "Host gpu1\n  HostKeyAlias box\n")
    own_testbed.ssh_config.write_text(text)
    key = await fetch_node_key(own_testbed)
    assert key.known_hosts_line.startswith("box ssh-ed25519 ")
    add_host_key_to_known_hosts(key)
    await connect_once(own_testbed, "gpu1")


async def test_hint_has_the_port_of_the_grid_file(own_testbed: SshTestbed, unused_tcp_port: int) -> None:
    file = parse_grid_file(f"nodes:\n  - name: 127.0.0.1\n    port: {unused_tcp_port}\n", name="grid")
    with pytest.raises(UnreachableError, match=f"try 'ssh -p {unused_tcp_port} 127.0.0.1'"):
        await fetch_node_key(own_testbed, "127.0.0.1", file)


async def test_down_or_hanging_host_is_unreachable(own_testbed: SshTestbed) -> None:
    with own_testbed["gpu2"].suspended(), pytest.raises(UnreachableError, match=r"within 0\.5 s"):
        await fetch_node_key(own_testbed, "gpu2", timeout_s=0.5)
    own_testbed["gpu1"].stop()
    with pytest.raises(
        UnreachableError, match=r"gpu1: could not reach \S+ port [0-9]+: Connection refused \("
    ):
        await fetch_node_key(own_testbed)


async def test_no_host_can_be_trusted_without_a_known_hosts_file(own_testbed: SshTestbed) -> None:
    text = own_testbed.ssh_config.read_text()
    own_testbed.ssh_config.write_text(
        text.replace(f"UserKnownHostsFile {own_testbed.known_hosts}", "UserKnownHostsFile none")
    )
    with pytest.raises(UsageError, match="UserKnownHostsFile"):
        await fetch_node_key(own_testbed)


async def test_unwritable_known_hosts_file_is_an_error(own_testbed: SshTestbed, tmp_path: Path) -> None:
    own_testbed.known_hosts = tmp_path
    own_testbed.write_ssh_config()
    with pytest.raises(UsageError, match="could not write"):
        add_host_key_to_known_hosts(await fetch_node_key(own_testbed))


async def test_partial_line_is_removed_when_the_disk_is_full(own_testbed: SshTestbed) -> None:
    own_testbed.write_known_hosts(without=["gpu1"])
    key = await fetch_node_key(own_testbed)
    before = own_testbed.known_hosts.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(UsageError, match="could not write"):
            add_host_key_to_known_hosts(key)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert own_testbed.known_hosts.read_bytes() == before
