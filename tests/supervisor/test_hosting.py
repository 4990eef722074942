"""Processes that the session roles server and worker start."""

from __future__ import annotations

import io
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import genie
from genie import config
from genie.controller.nodes.admission import local_host
from genie.errors import AgentRunningError, ConfigError, TokenMissingError
from genie.model.tenant import TokenKind
from genie.processes.files import write_private
from genie.runtime.credentials import LocalCluster
from genie.runtime.logins import store_login
from genie.supervisor import hosting, local_cluster, process_records
from genie.telemetry import log
from genie.tenancy.access import NO_PIN, new_token, parse_token

OWN_PIN, OTHER_PIN = "a" * 43, "b" * 43


def make_token(kind: TokenKind, pin: str) -> str:
    return str(new_token(kind, token_id="abcd", secret=b"\x01" * 32, pin=pin))


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """The state directory of a machine with a running agent, for which this process stands in."""
    process_records.record_process(tmp_path, local_cluster.AGENT, os.getpid(), node_id="n1")
    return tmp_path


def record_joined_node(state_dir: Path, *, pin: str, controllers: str = '["10.0.0.1:5555"]') -> None:
    write_private(state_dir / "agents" / "n1" / "node.token", make_token(TokenKind.NODE, pin).encode())
    write_private(state_dir / "agents" / "n1" / "controllers.json", controllers.encode())


async def start_and_stop_worker_agent(state_dir: Path, *, pin: str, host: str = "10.0.0.1") -> None:
    settings = config.load({"paths.state_dir": state_dir})
    access = config.ClusterConfig(master_addr=host, token=make_token(TokenKind.OWNER, pin))
    async with AsyncExitStack() as stack:
        await hosting.start_worker_agent(settings, access, stack, timeout_s=5)


async def test_worker_does_not_start_a_second_agent(state_dir: Path) -> None:
    record_joined_node(state_dir, pin=OWN_PIN)
    await start_and_stop_worker_agent(state_dir, pin=OWN_PIN)


async def test_worker_rejects_a_machine_of_another_cluster(state_dir: Path) -> None:
    record_joined_node(state_dir, pin=OTHER_PIN)
    with pytest.raises(
        AgentRunningError, match=r"cannot join 10\.0\.0\.1:5555: .* another cluster .*genie down"
    ):
        await start_and_stop_worker_agent(state_dir, pin=OWN_PIN)


async def test_clusters_without_tls_are_compared_by_address(state_dir: Path) -> None:
    record_joined_node(state_dir, pin=NO_PIN, controllers='["127.0.0.1:5555"]')
    await start_and_stop_worker_agent(state_dir, pin=NO_PIN, host="localhost")
    with pytest.raises(AgentRunningError, match="another cluster"):
        await start_and_stop_worker_agent(state_dir, pin=NO_PIN, host="127.0.0.1:5556")


# --- the address that a server listens on -------------------------------------------------------


def patch_name_resolution(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.fixture
def patched_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses of a machine with every kind of address."""
    listed = ("127.0.0.1", "fe80::7%eth0", "2001:db8::7", "10.0.0.7")
    found = {"eth0": [SimpleNamespace(address=address) for address in listed]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.parametrize(
    ("host", "bind"),
    [
        ("localhost", "127.0.0.1"),
        ("Localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("::1%lo", "::1"),
        ("0:0::1", "::1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("192.0.2.1", None),
    ],
)
def test_server_binds_loopback_but_no_address_of_another_machine(host: str, bind: str | None) -> None:
    assert hosting._find_bind_address(host) == bind


async def test_server_logs_that_it_joins_an_address_of_another_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = config.load({"paths.state_dir": tmp_path, "cluster.master_addr": "192.0.2.1"})
    async with AsyncExitStack() as stack:
        assert await hosting.start_or_find_cluster(settings, stack, timeout_s=5) == (settings, False)
    assert "192.0.2.1 is not an address of this machine" in caplog.text


async def test_server_without_address_does_not_join_the_cluster_of_a_login() -> None:
    """Another program, or a cluster of another user, listens on the default port."""
    store_login(config.load().paths.state_dir, "box", 5555, parse_token(make_token(TokenKind.USER, OWN_PIN)))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = f"no token for 127.0.0.1:{port}: the port is in use by another program.*master_port"
        with pytest.raises(TokenMissingError, match=message):
            await genie.init(node_role="server", master_port=port)
        with pytest.raises(TokenMissingError, match=message):
            await genie.init(node_role="server", master_addr="127.0.0.1", master_port=port)


async def test_server_without_address_uses_the_cluster_of_this_machine(tmp_path: Path) -> None:
    LocalCluster(host="10.0.0.7", port=6000, cluster_id="c1").write(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = config.load({"paths.state_dir": tmp_path, "cluster.master_port": port})
        async with AsyncExitStack() as stack:
            assert await hosting.start_or_find_cluster(settings, stack, timeout_s=5) == (settings, False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "0x0", "0.0", "::0", "::ffff:0.0.0.0"])
def test_server_rejects_an_unreachable_address(host: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is not an address that other machines can connect to \(pass an address"
    ):
        hosting._find_bind_address(host)


def test_server_rejects_a_name_that_resolves_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the /etc/hosts of Debian."""
    patch_name_resolution(monkeypatch, "127.0.1.1")
    with pytest.raises(ConfigError, match=r"'gpu-box' resolves to 127\.0\.1\.1 here.*or localhost"):
        hosting._find_bind_address("gpu-box")


@pytest.mark.parametrize(
    ("resolved", "bind"),
    [
        (["2001:db8::7", "10.0.0.7"], "10.0.0.7"),
        (["10.0.0.99", "10.0.0.7"], "10.0.0.7"),
        (["fe80::7", "2001:db8::7"], "2001:db8::7"),
        (["127.0.1.1", "10.0.0.7"], "10.0.0.7"),
        (["::ffff:10.0.0.7"], "10.0.0.7"),
    ],
    ids=["IPv4 first", "another machine's", "link-local", "loopback", "IPv4-mapped"],
)
def test_server_binds_the_address_of_this_machine_among_several(
    resolved: list[str], bind: str, patched_interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_name_resolution(monkeypatch, *resolved)
    assert hosting._find_bind_address("gpu-box") == bind


@pytest.mark.parametrize("resolved", [["fe80::7"], ["127.0.1.1", "10.0.0.99"]])
def test_server_rejects_a_name_without_reachable_address(
    resolved: list[str], patched_interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_name_resolution(monkeypatch, *resolved)
    with pytest.raises(ConfigError, match=r"pass an address of this machine \(10\.0\.0\.7, 2001:db8::7\)"):
        hosting._find_bind_address("gpu-box")


def test_connection_guide_contains_the_commands_for_other_machines() -> None:
    guide = "\n".join(hosting.format_connection_guide("gpu-box", 6000))
    for command in (
        "genie token create --join > join.token",
        "genie join gpu-box:6000 --token-file join.token",
        "genie login gpu-box:6000",
    ):
        assert command in guide
    (local_only,) = hosting.format_connection_guide("127.0.0.1", 5555)
    assert "only this machine can connect" in local_only and "master_addr" in local_only
    (bound,) = hosting.format_connection_guide("127.0.0.1", 5555, is_bind_set=True)
    assert "GENIE_CONTROLLER_BIND" in bound and "master_addr" not in bound


async def test_connection_guide_mentions_a_configured_loopback_bind(
    patched_interfaces: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await run_server_without_processes(monkeypatch, bind="127.0.0.1", host="10.0.0.7")
    assert "set controller.bind (GENIE_CONTROLLER_BIND) to an address" in capsys.readouterr().err


async def run_server_without_processes(
    monkeypatch: pytest.MonkeyPatch, *, bind: str = "127.0.0.1", host: str | None = None
) -> None:

    @asynccontextmanager
    async def up(settings: config.Settings, **_: object) -> AsyncIterator[SimpleNamespace]:
        host = local_host(settings.controller)
        yield SimpleNamespace(cluster=LocalCluster(host=host, port=6000, cluster_id="c1"))

    async def listens(_host: str, _port: int) -> bool:
        return False

    monkeypatch.setattr(local_cluster, "run_local_cluster", up)
    monkeypatch.setattr(hosting, "_is_listening", listens)
    settings = config.load(
        {
            "controller.bind": bind,
            "cluster.master_addr": host,
            "cluster.token": make_token(TokenKind.OWNER, OWN_PIN),
        }
    )
    write_private(settings.paths.state_dir / "owner.token", make_token(TokenKind.OWNER, OWN_PIN).encode())
    async with AsyncExitStack() as stack:
        _, is_hosted = await hosting.start_or_find_cluster(settings, stack, timeout_s=5)
    assert is_hosted


@pytest.mark.parametrize(
    ("bind", "host", "named"),
    [
        ("0.0.0.0", "10.0.0.7", "10.0.0.7:6000: other machines"),
        ("::", "10.0.0.7", "10.0.0.7:6000: other machines"),
        ("0.0.0.0", None, "gpu-box:6000: other machines"),
        ("::0", None, "gpu-box:6000: other machines"),
        ("0:0:0:0:0:0:0:0", None, "gpu-box:6000: other machines"),
        ("0", None, "gpu-box:6000: other machines"),
        ("10.0.0.7", "10.0.0.7", "10.0.0.7:6000: other machines"),
        ("10.0.0.7", None, "10.0.0.7:6000: other machines"),
        ("127.0.0.1", "10.0.0.7", "127.0.0.1:6000: only this machine"),
    ],
)
async def test_connection_guide_contains_the_reachable_address_of_a_configured_bind(
    bind: str,
    host: str | None,
    named: str,
    patched_interfaces: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box")
    await run_server_without_processes(monkeypatch, bind=bind, host=host)
    assert f"the cluster listens on {named} can connect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bind", "host"),
    [("0.0.0.0", "127.0.0.1"), ("0", "127.0.0.1"), ("::", "::1"), ("::0", "::1"), ("10.0.0.7", "10.0.0.7")],
)
def test_owner_access_uses_loopback_for_a_wildcard_bind(bind: str, host: str) -> None:
    assert local_host(config.ControllerConfig(bind=bind)) == host


@pytest.mark.parametrize("level", ["warning", "info", None], ids=["warning", "info", "program's own"])
async def test_connection_guide_is_printed_once_at_any_log_level(
    level: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger().handlers[:] = []
    if level is None:
        logging.basicConfig()
    else:
        monkeypatch.setenv("GENIE_LOG_LEVEL", level)
    log.configure_session(config.load().log, requested=level is not None)
    await run_server_without_processes(monkeypatch)
    assert capsys.readouterr().err.count("the cluster listens on 127.0.0.1:6000") == 1


async def test_closed_stderr_does_not_end_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    await run_server_without_processes(monkeypatch)


async def test_connection_guide_is_not_written_to_stdout_without_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    await run_server_without_processes(monkeypatch)
    assert capsys.readouterr().out == ""


# --- tokens of a worker -------------------------------------------------------------------------


def test_worker_joins_with_the_join_token_and_connects_with_the_login(tmp_path: Path) -> None:
    given = make_token(TokenKind.JOIN, OWN_PIN)
    settings = config.load(
        {"paths.state_dir": tmp_path, "cluster.master_addr": "box", "cluster.token": given}
    )
    with pytest.raises(TokenMissingError, match="genie login box:5555"):
        hosting.split_join_token(settings)
    store_login(tmp_path, "box", 5555, parse_token(make_token(TokenKind.USER, OWN_PIN)))
    connecting, joining = hosting.split_join_token(settings)
    assert (connecting.cluster.token, joining) == (None, given)
