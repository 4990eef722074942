"""Connections to real SSH servers: sharing, limits, host keys, faults."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    HostKeyChangedError,
    HostKeyUnknownError,
    LoginRefusedError,
    NodeRefusedError,
    UnreachableError,
    UsageError,
)
from genie.grid import backoff
from genie.grid.grid_file import GridFile, GridNode, parse_grid_file
from genie.grid.ssh import pool as ssh_pool
from genie.grid.ssh.pool import AsyncCallback, SshPool
from genie.grid.ssh.target import format_error
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.testbed import SshTestbed
from tests.needs import require_program
from tests.waiting import until, wait_until


async def test_concurrent_users_share_one_connection(pool: SshPool) -> None:
    async def connection() -> object:
        async with pool.connect("gpu1") as link:
            await asyncio.sleep(0)
            return link.connection

    assert len(set(await asyncio.gather(*(connection() for _ in range(20))))) == 1
    assert pool.nodes_with_open_connection == ["gpu1"]


async def test_command_returns_output_and_exit_code(pool: SshPool) -> None:
    async with pool.connect("gpu2") as link:
        done = await link.run_command("hostname; cat; echo no >&2; exit 3", stdin=b"in\n", timeout_s=10)
        assert (done.exit_code, done.stdout, done.stderr) == (3, b"gpu2\nin\n", b"no\n")
        assert (await link.run_command("kill -TERM $$", timeout_s=10)).exit_code == 128 + 15


async def test_command_timeout_raises_deadline_error(pool: SshPool) -> None:
    async with pool.connect("gpu2") as link:
        with pytest.raises(DeadlineError, match="gpu2"):
            await link.run_command("sleep 60", timeout_s=0.2)


async def test_helper_replies_and_rejects_invalid_requests(pool: SshPool) -> None:
    async with pool.connect("gpu3") as link:
        assert link.has_helper
        assert link.python_version.startswith("3.")
        with pytest.raises(NodeRefusedError, match="no such op") as caught:
            await link.call("core.nothing", timeout_s=10)
        assert caught.value.reason == "unknown"


async def test_helper_leaves_nothing_on_the_node(testbed: SshTestbed, grid_file: GridFile) -> None:
    before = testbed["gpu4"].run("find /root | sort")
    async with SshPool(grid_file, ssh_config=testbed.ssh_config) as pool, pool.connect("gpu4") as link:
        with pytest.raises(NodeRefusedError):
            await link.call("core.nothing", timeout_s=10)
        assert testbed["gpu4"].processes("python3 -ISc")
    await until(lambda: not testbed["gpu4"].processes("python3 -ISc"), what="the helper's end")
    assert testbed["gpu4"].run("find /root | sort") == before


async def test_output_of_the_login_shell_does_not_disturb_the_helper(
    testbed: SshTestbed, pool: SshPool
) -> None:
    (testbed["gpu5"].home / ".bashrc").write_text("echo welcome to this machine\n")
    try:
        async with pool.connect("gpu5") as link:
            assert link.has_helper
            with pytest.raises(NodeRefusedError, match="no such op"):
                await link.call("core.nothing", timeout_s=10)
    finally:
        (testbed["gpu5"].home / ".bashrc").unlink()


async def test_node_without_python_runs_plain_commands(testbed: SshTestbed, pool: SshPool) -> None:
    node = testbed["gpu6"]
    (node.bin / "python3").write_text("#!/bin/sh\nexit 127\n")
    (node.bin / "python3").chmod(0o755)
    try:
        async with pool.connect("gpu6") as link:
            assert not link.has_helper
            assert (await link.run_command("hostname", timeout_s=10)).stdout == b"gpu6\n"
    finally:
        (node.bin / "python3").unlink()


async def test_node_whose_python_exits_early_runs_plain_commands(
    testbed: SshTestbed, pool: SshPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = testbed["gpu6"]
    (node.bin / "python3").write_text("#!/bin/sh\nexit 127\n")
    (node.bin / "python3").chmod(0o755)

    def write(channel: object, data: bytes) -> None:
        raise BrokenPipeError("Channel not open for sending")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(asyncssh.SSHClientChannel, "write", write)
            async with pool.connect("gpu6") as link:
                assert not link.has_helper
    finally:
        (node.bin / "python3").unlink()


async def connect_once(testbed: SshTestbed, name: str) -> None:
    async with (
        SshPool(make_testbed_grid_file(testbed), ssh_config=testbed.ssh_config) as pool,
        pool.connect(name),
    ):
        pass


async def test_unknown_host_key_is_an_error_with_a_hint(own_testbed: SshTestbed) -> None:
    own_testbed.write_known_hosts(without=["gpu1"])
    with pytest.raises(HostKeyUnknownError, match="grid-cli nodes trust gpu1"):
        await connect_once(own_testbed, "gpu1")
    await connect_once(own_testbed, "gpu2")


async def test_changed_host_key_is_an_error(own_testbed: SshTestbed) -> None:
    own_testbed["gpu1"].write_host_key()
    own_testbed["gpu1"].restart()
    with pytest.raises(HostKeyChangedError, match="ssh-keygen -f"):
        await connect_once(own_testbed, "gpu1")


async def test_openssh_settings_cannot_disable_host_key_checking(own_testbed: SshTestbed) -> None:
    text = own_testbed.ssh_config.read_text()
    lax = "UserKnownHostsFile none\n  StrictHostKeyChecking no"
    own_testbed.ssh_config.write_text(text.replace(f"UserKnownHostsFile {own_testbed.known_hosts}", lax))
    with pytest.raises(HostKeyUnknownError):
        await connect_once(own_testbed, "gpu1")


async def test_rejected_key_raises_login_refused(own_testbed: SshTestbed) -> None:
    own_testbed.key.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    with pytest.raises(LoginRefusedError, match="gpu1"):
        await connect_once(own_testbed, "gpu1")


async def test_closed_port_raises_unreachable(own_testbed: SshTestbed) -> None:
    own_testbed["gpu1"].stop()
    with pytest.raises(
        UnreachableError, match=r"gpu1: could not reach \S+ port [0-9]+: Connection refused \("
    ):
        await connect_once(own_testbed, "gpu1")


def test_unreachable_addresses_have_readable_errors() -> None:
    call = (
        "[Errno 111] Connect call failed ('::1', 22, 0, 0), [Errno 111] Connect call failed ('127.0.0.1', 22)"
    )
    assert format_error(OSError(f"Multiple exceptions: {call}")) == "Connection refused"
    assert format_error(OSError(113, "Connect call failed ('10.0.0.1', 22)")) == "No route to host"
    assert format_error(socket.gaierror(-2, "Name or service not known")) == "Name or service not known"
    assert (
        format_error(FileNotFoundError(2, "No such file or directory", "key"))
        == "No such file or directory: key"
    )


async def test_lost_connection_fails_pending_requests_and_the_next_use_reconnects(
    testbed: SshTestbed, pool: SshPool
) -> None:
    async with pool.connect("gpu7") as link:
        waiting = asyncio.ensure_future(link.run_command("sleep 60", timeout_s=30))
        await until(lambda: bool(testbed["gpu7"].processes("sleep 60")), what="the command")
        testbed["gpu7"].kill_connections()
        with pytest.raises(ConnectionLostError, match="gpu7"):
            await waiting
    async with pool.connect("gpu7") as again:
        assert again is not link
        assert (await again.run_command("hostname", timeout_s=10)).stdout == b"gpu7\n"


async def test_hanging_node_does_not_delay_others(testbed: SshTestbed, pool: SshPool) -> None:
    with testbed["gpu8"].suspended():
        with pytest.raises(UnreachableError, match=r"gpu8: connecting timed out after 0\.5 s"):
            async with pool.connect("gpu8", timeout_s=0.5, retries=0):
                pass
        async with pool.connect("gpu9") as link:
            assert link.is_open


async def test_keepalive_detects_an_unresponsive_node(
    own_testbed: SshTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ssh_pool, "_KEEPALIVE_INTERVAL_S", 0.5
    )  # a busy node must respond within three times that
    async with (
        SshPool(make_testbed_grid_file(own_testbed), ssh_config=own_testbed.ssh_config) as pool,
        pool.connect("gpu1") as link,
    ):
        with own_testbed["gpu1"].suspended():
            await until(lambda: not link.is_open, what="the end of a connection that is silent")
        monkeypatch.undo()
        async with pool.connect("gpu1") as another:
            assert another is not link


async def test_retry_reaches_a_node_that_recovers(
    own_testbed: SshTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = []

    def note(attempt: int, **_: float) -> float:
        paused.append(attempt)
        if attempt == 1:
            own_testbed["gpu1"].restart()
        return 0.0

    monkeypatch.setattr(backoff, "backoff_s", note)
    own_testbed["gpu1"].stop()
    file = make_testbed_grid_file(own_testbed, more="ssh: {connect_timeout: 10, max_retries: 3}\n")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        async with pool.connect("gpu1") as link:
            assert link.is_open
        assert paused == [0, 1]
        own_testbed["gpu2"].stop()
        with pytest.raises(UnreachableError):
            async with pool.connect("gpu2", retries=1):
                pass
    assert paused == [0, 1, 0]


async def test_waiting_for_a_concurrent_attempt_counts_against_the_timeout(own_testbed: SshTestbed) -> None:
    async with SshPool(make_testbed_grid_file(own_testbed), ssh_config=own_testbed.ssh_config) as pool:

        async def use(timeout_s: float) -> None:
            async with pool.connect("gpu1", timeout_s=timeout_s, retries=0):
                pass

        with own_testbed["gpu1"].suspended():
            patient = asyncio.ensure_future(use(60))
            await asyncio.sleep(0)
            with pytest.raises(UnreachableError, match=r"gpu1: connecting timed out after 0\.3 s"):
                await asyncio.wait_for(use(0.3), 20)
            assert not patient.done()
        await patient


async def test_pool_size_limits_connections(testbed: SshTestbed, grid_file: GridFile) -> None:
    small = dataclasses.replace(grid_file, ssh=dataclasses.replace(grid_file.ssh, pool_size=2))
    most = 0

    async with SshPool(small, ssh_config=testbed.ssh_config) as pool:

        async def ask(name: str) -> bytes:
            nonlocal most
            async with pool.connect(name) as link:
                most = max(most, len(pool.nodes_with_open_connection))
                return (await link.run_command("hostname", timeout_s=10)).stdout.strip()

        names = [node.name for node in testbed.nodes[:6]]
        assert await asyncio.gather(*map(ask, names)) == [name.encode() for name in names]
    assert most == 2


async def test_a_hundred_concurrent_requests_succeed(pool: SshPool, testbed: SshTestbed) -> None:
    async def ask(name: str) -> bytes:
        async with pool.connect(name) as link:
            return (await link.run_command("hostname", timeout_s=30)).stdout.strip()

    names = [testbed.nodes[number % 10].name for number in range(100)]
    assert await asyncio.gather(*map(ask, names)) == [name.encode() for name in names]


async def test_a_hundred_concurrent_connections_succeed(testbed: SshTestbed, tmp_path: Path) -> None:
    nodes = {f"n{number}": testbed.nodes[number % 10] for number in range(100)}
    hosts = "".join(f"Host {n}\n  HostName {on.address}\n  Port {on.port}\n" for n, on in nodes.items())
    (tmp_path / "ssh_config").write_text(hosts + testbed.ssh_config.read_text())
    more = "ssh: {connect_timeout: 60, max_retries: 0, pool_size: 100}\n"
    file = parse_grid_file(testbed.grid_yaml(nodes=list(nodes), more=more), name="grid.yaml")
    async with SshPool(file, ssh_config=tmp_path / "ssh_config") as pool:

        async def ask(name: str) -> bytes:
            async with pool.connect(name, without_helper=True) as link:
                return (await link.run_command("hostname", timeout_s=60)).stdout.strip()

        assert await asyncio.gather(*map(ask, nodes)) == [on.name.encode() for on in nodes.values()]
        assert len(pool.nodes_with_open_connection) == 100


async def test_bare_connection_starts_the_helper_on_demand(testbed: SshTestbed, pool: SshPool) -> None:
    await until(lambda: not testbed["gpu10"].processes("python3 -ISc"), what="the end of earlier helpers")
    async with pool.connect("gpu10", without_helper=True) as link:
        assert not link.has_helper
        assert not testbed["gpu10"].processes("python3 -ISc")
        async with pool.connect("gpu10") as same:
            assert same is link
            assert link.has_helper


async def test_jump_host_of_ssh_config_is_used(own_testbed: SshTestbed) -> None:
    text = own_testbed.ssh_config.read_text()
    own_testbed.ssh_config.write_text(text.replace("Host gpu2\n", "Host gpu2\n  ProxyJump gpu1\n"))
    async with (
        SshPool(make_testbed_grid_file(own_testbed), ssh_config=own_testbed.ssh_config) as pool,
        pool.connect("gpu2") as link,
    ):
        assert (await link.run_command("hostname", timeout_s=10)).stdout == b"gpu2\n"
        assert own_testbed["gpu1"].processes("sshd: root")
    await until(
        lambda: not own_testbed["gpu1"].processes("sshd: root"), what="the jump's own connection to end"
    )


async def test_error_names_a_missing_key_of_a_jump_host(own_testbed: SshTestbed) -> None:
    text = own_testbed.ssh_config.read_text()
    text = text.replace("Host gpu2\n", "Host gpu2\n  ProxyJump gpu1\n")
    missing = own_testbed.folder / "no-such-key"
    own_testbed.ssh_config.write_text(f"Host gpu1\n  IdentityFile {missing}\n{text}")
    with pytest.raises(GenieError, match=f"node gpu2: could not reach .* through gpu1: .*{missing}"):
        await connect_once(own_testbed, "gpu2")


async def test_user_and_port_of_the_grid_file_override_ssh_config(own_testbed: SshTestbed) -> None:
    text = own_testbed.ssh_config.read_text()
    own_testbed.ssh_config.write_text(
        text.replace("User root", "User nobody-here").replace("  Port ", "  Port 1")
    )
    port = own_testbed.nodes[0].port
    file = parse_grid_file(f"nodes: ['root@gpu1:{port}']", name="f.yaml")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool, pool.connect("gpu1") as link:
        assert (await link.run_command("id -un", timeout_s=10)).stdout == b"root\n"


async def test_error_names_a_key_with_a_passphrase_that_is_not_in_the_agent(own_testbed: SshTestbed) -> None:
    require_program("ssh-keygen", package="openssh-client")
    lock = ["ssh-keygen", "-q", "-p", "-N", "secret", "-P", "", "-f", str(own_testbed.key)]
    await asyncio.to_thread(subprocess.run, lock, check=True, timeout=30)
    with pytest.raises(LoginRefusedError, match="ssh-add"):
        await connect_once(own_testbed, "gpu1")


@pytest.fixture
def key_in_agent(own_testbed: SshTestbed, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An agent has the testbed's key; the file has a passphrase."""
    require_program("ssh-agent", package="openssh-client")
    place = own_testbed.folder / "agent"
    monkeypatch.setenv("SSH_AUTH_SOCK", str(place))
    lock = ["ssh-keygen", "-q", "-p", "-N", "secret", "-P", "", "-f", str(own_testbed.key)]
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(place)], stdout=subprocess.DEVNULL) as agent:
        try:
            wait_until(lambda: _is_listening(place), what="the agent")
            for argv in (["ssh-add", "-q", str(own_testbed.key)], lock):
                subprocess.run(argv, check=True, timeout=30)
            yield
        finally:
            agent.terminate()


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return True
    return False


async def test_key_of_the_agent_is_used(own_testbed: SshTestbed, key_in_agent: None) -> None:
    await connect_once(own_testbed, "gpu1")


async def test_missing_identity_file_is_skipped(own_testbed: SshTestbed) -> None:
    text = own_testbed.ssh_config.read_text()
    own_testbed.ssh_config.write_text(f"Host *\n  IdentityFile {own_testbed.folder}/nothing\n{text}")
    await connect_once(own_testbed, "gpu1")


async def test_key_file_is_offered_in_addition_to_identity_files(own_testbed: SshTestbed) -> None:
    other = own_testbed.folder / "other"
    other.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    file = parse_grid_file(f"nodes: [gpu1]\nssh: {{key_file: {other}}}", name="f.yaml")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool, pool.connect("gpu1"):
        pass
    own_testbed.key.rename(other)
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool, pool.connect("gpu1"):
        pass


@pytest.mark.parametrize(("path", "what"), [("/no/key", "does not exist"), ("/etc", "is not a file")])
async def test_error_names_an_invalid_key_file(own_testbed: SshTestbed, path: str, what: str) -> None:
    file = parse_grid_file(f"nodes: [gpu1]\nssh: {{key_file: {path}}}", name="f.yaml")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        with pytest.raises(UsageError, match=rf"ssh\.key_file '{path}' {what}"):
            async with pool.connect("gpu1"):
                pass


async def test_hint_has_user_and_port_of_the_grid_file(own_testbed: SshTestbed) -> None:
    own_testbed["gpu1"].stop()
    file = parse_grid_file("nodes: ['alice@gpu1:2222']\nssh: {max_retries: 0}", name="f.yaml")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        with pytest.raises(UnreachableError, match="try 'ssh -p 2222 alice@gpu1'"):
            async with pool.connect("gpu1"):
                pass


async def test_failed_connection_releases_its_pool_slot(own_testbed: SshTestbed) -> None:
    file = make_testbed_grid_file(own_testbed, more="ssh: {pool_size: 1, max_retries: 0}\n")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:

        async def use(name: str, timeout_s: float) -> bool:
            async with pool.connect(name, timeout_s=timeout_s) as link:
                return link.has_helper

        own_testbed["gpu1"].write_host_key()
        own_testbed["gpu1"].restart()
        first, second = await asyncio.gather(use("gpu1", 20), use("gpu2", 20), return_exceptions=True)
    assert isinstance(first, HostKeyChangedError)
    assert second is True


async def test_hanging_host_takes_no_pool_slot(own_testbed: SshTestbed) -> None:
    file = make_testbed_grid_file(own_testbed, more="ssh: {pool_size: 1, max_retries: 0}\n")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:

        async def use(name: str) -> bool:
            async with pool.connect(name, timeout_s=600) as link:
                return link.has_helper

        with own_testbed["gpu1"].suspended():
            silent = asyncio.create_task(use("gpu1"))
            async with asyncio.timeout(60):
                assert await use("gpu2")
            assert not silent.done()
        async with asyncio.timeout(60):
            assert await silent


async def test_abandoned_attempt_leaves_nothing_behind(own_testbed: SshTestbed) -> None:
    file = make_testbed_grid_file(own_testbed, more="ssh: {max_retries: 0}\n")
    gc.collect()
    before = set(map(id, _list_live_connections()))
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        with (
            own_testbed["gpu1"].suspended(),
            contextlib.suppress(UnreachableError),
        ):  # which keeps no traceback
            async with pool.connect("gpu1", timeout_s=0.2):
                raise AssertionError
        await asyncio.sleep(0)
        gc.collect()
        assert [each for each in _list_live_connections() if id(each) not in before] == []


def _list_live_connections() -> list[object]:
    return [each for each in gc.get_objects() if type(each) is asyncssh.SSHClientConnection]


async def test_closing_the_pool_wakes_callers_that_wait_for_a_slot(testbed: SshTestbed) -> None:
    file = make_testbed_grid_file(testbed, more="ssh: {pool_size: 1, max_retries: 0}\n")

    async def use(name: str) -> None:
        async with pool.connect(name, timeout_s=600, without_helper=True):
            pass

    async with (
        asyncio.timeout(60),
        SshPool(file, ssh_config=testbed.ssh_config) as pool,
        pool.connect("gpu1", without_helper=True),
    ):
        waiting = asyncio.create_task(use("gpu2"))
        await until(lambda: pool._slot_freed._waiters, what="someone who waits")  # type: ignore[attr-defined]
        await pool.__aexit__(None, None, None)
        with pytest.raises(UsageError, match="is closed"):
            await waiting


async def test_connection_opened_while_the_pool_closes_is_closed(
    testbed: SshTestbed, grid_file: GridFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SshPool(grid_file, ssh_config=testbed.ssh_config)
    opened = []
    connect = pool._connect_by_ssh

    async def connect_late(node: GridNode, on_banner: AsyncCallback) -> asyncssh.SSHClientConnection:
        opened.append(await connect(node, on_banner))
        await pool.__aexit__(None, None, None)
        return opened[0]

    monkeypatch.setattr(pool, "_connect_by_ssh", connect_late)
    with pytest.raises(UsageError, match="is closed"):
        async with pool.connect("gpu1"):
            pass
    assert opened[0].is_closed() and pool.nodes_with_open_connection == []


async def test_cancelled_wait_before_login_returns_the_connection_to_the_pool(
    testbed: SshTestbed, grid_file: GridFile
) -> None:
    async with SshPool(grid_file, ssh_config=testbed.ssh_config) as pool:
        async with pool.connect("gpu1", without_helper=True) as link:
            pass
        asked = asyncio.Event()

        async def before_login() -> None:
            asked.set()
            await asyncio.Event().wait()

        async def use() -> None:
            async with pool.connect("gpu1", without_helper=True, before_login=before_login):
                pass

        waiting = asyncio.create_task(use())
        await asked.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert pool.nodes_with_open_connection == ["gpu1"]
    assert link.connection.is_closed()


async def test_connection_waiting_before_login_counts_and_can_be_evicted(testbed: SshTestbed) -> None:
    file = make_testbed_grid_file(testbed, more="ssh: {pool_size: 1}\n")
    asked, leave = asyncio.Event(), asyncio.Event()

    async def before_login() -> None:
        asked.set()
        await leave.wait()

    async with SshPool(file, ssh_config=testbed.ssh_config) as pool:

        async def use(name: str, before_login: AsyncCallback | None = None) -> None:
            async with pool.connect(
                name, timeout_s=60, without_helper=True, before_login=before_login
            ) as link:
                assert link.is_open
                assert pool.nodes_with_open_connection == [name]

        await use("gpu1")
        waiting = asyncio.create_task(use("gpu1", before_login))
        await asked.wait()
        await use("gpu2")
        leave.set()
        await waiting


@pytest.mark.parametrize("is_open", [False, True])
async def test_caller_is_not_delayed_by_one_that_waits_before_login(
    testbed: SshTestbed, grid_file: GridFile, is_open: bool
) -> None:
    asked = asyncio.Event()

    async def before_login() -> None:
        asked.set()
        await asyncio.Event().wait()

    async with SshPool(grid_file, ssh_config=testbed.ssh_config) as pool, asyncio.timeout(60):

        async def use(before_login: AsyncCallback | None = None) -> object:
            async with pool.connect(
                "gpu1", without_helper=True, retries=0, before_login=before_login
            ) as link:
                return link.connection

        opened = await use() if is_open else None
        patient = asyncio.create_task(use(before_login))
        await asked.wait()
        assert await use() is await patient
        assert not is_open or opened is await patient


async def test_connect_timeout_does_not_include_the_wait_before_login(
    own_testbed: SshTestbed,
) -> None:
    with own_testbed.ssh_config.open("a") as config:
        config.write("\nHost *\n  ConnectTimeout 2\n")
    file = make_testbed_grid_file(own_testbed, more="ssh: {max_retries: 0}\n")
    later = asyncio.Event()

    async def before_login() -> None:
        asyncio.get_running_loop().call_later(2.2, later.set)
        await later.wait()

    async with (
        SshPool(file, ssh_config=own_testbed.ssh_config) as pool,
        pool.connect("gpu1", timeout_s=60, before_login=before_login) as link,
    ):
        assert link.is_open


async def test_closed_channel_raises_connection_lost(testbed: SshTestbed, grid_file: GridFile) -> None:
    async with SshPool(grid_file, ssh_config=testbed.ssh_config) as pool, pool.connect("gpu6") as link:
        assert link._helper is not None
        link._helper._channel.close()  # connection_lost() is called in the next iteration of the loop
        with pytest.raises(ConnectionLostError, match="gpu6"):
            await link.call("core.nothing", timeout_s=10)


async def test_connection_lost_while_the_helper_starts_is_not_a_missing_python(
    own_testbed: SshTestbed,
) -> None:
    node = own_testbed["gpu1"]
    begun = node.folder / "begun"
    (node.bin / "python3").write_text(
        f'#!/bin/sh\n[ -e {begun} ] && exec /usr/bin/env -S PATH=/usr/bin:/bin python3 "$@"\n'
        f"touch {begun}; exec sleep 600\n"
    )
    (node.bin / "python3").chmod(0o755)
    async with SshPool(make_testbed_grid_file(own_testbed), ssh_config=own_testbed.ssh_config) as pool:

        async def has_helper() -> bool:
            async with pool.connect("gpu1") as link:
                return link.has_helper

        asked = asyncio.ensure_future(has_helper())
        await until(begun.exists, what="the helper's start")
        own_testbed["gpu1"].kill_connections()
        assert await asked


async def test_connection_lost_before_the_helper_starts_raises_connection_lost(
    own_testbed: SshTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(asyncssh.SSHClientConnection, "create_session", cut)
    async with SshPool(make_testbed_grid_file(own_testbed), ssh_config=own_testbed.ssh_config) as pool:
        with pytest.raises(ConnectionLostError, match="gpu1: connection lost: Broken pipe"):
            async with pool.connect("gpu1"):
                pass
