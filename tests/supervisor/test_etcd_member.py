"""The etcd member that Genie starts: checks before the start, TLS roles, restart and stop."""

from __future__ import annotations

import os
import signal
from collections import namedtuple
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from genie import config
from genie.agent.identity import AGENTS_DIR
from genie.cluster.client import open_client
from genie.config import Settings
from genie.controller.etcd.local_member import (
    LocalMember,
    etcd_certificate_and_key_paths,
    etcd_data_directory,
)
from genie.controller.etcd.membership import open_etcd_cluster
from genie.controller.store.open import open_store
from genie.errors import (
    AddressInUseError,
    ConfigError,
    DeadlineError,
    StoreError,
    StoreFullError,
    StoreVersionError,
    TlsError,
)
from genie.processes.clock import SystemClock
from genie.processes.process_identity import ProcessIdentity
from genie.supervisor import etcd_member, local_cluster, process_records
from genie.supervisor.etcd_member import EtcdMemberProcess
from tests.needs import require_program
from tests.ports import free_ports
from tests.waiting import until

_DiskUsage = namedtuple("_DiskUsage", "total used free")


def load_settings(state_dir: Path, **more: object) -> Settings:
    client_port, peer_port = free_ports(2)
    given = {key.replace("__", "."): value for key, value in more.items()}
    return config.load(
        {
            "paths.state_dir": state_dir,
            "controller.port": 0,
            "controller.store": "etcd",
            "controller.etcd_client_port": client_port,
            "controller.etcd_peer_port": peer_port,
            "cluster.node_id": "n1",
        }
        | given
    )


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[local_cluster.Supervisor]:
    require_program("etcd", package="etcd-server")
    settings = load_settings(tmp_path / "state", controller__store_bytes_max=64 << 20)
    async with local_cluster.run_local_cluster(settings, progress=lambda _line: None) as running:
        yield running


def put_program_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, version: str) -> None:
    program = tmp_path / "bin" / "etcd"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_missing_etcd_program_names_the_debian_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError) as caught:
        etcd_member.find_etcd_program()
    assert "etcd-server" in (caught.value.hint or "")


@pytest.mark.parametrize("version", ["3.3.25", "3.4.21", "3.5.5", "unknown"])
def test_unsafe_etcd_version_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    put_program_on_path(tmp_path, monkeypatch, version=version)
    with pytest.raises(StoreVersionError, match=version):
        etcd_member.find_etcd_program()


@pytest.mark.parametrize("version", ["3.4.22", "3.5.6", "3.6.1"])
def test_safe_etcd_version_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    put_program_on_path(tmp_path, monkeypatch, version=version)
    assert etcd_member.find_etcd_program() == str(tmp_path / "bin" / "etcd")


async def test_etcd_that_never_answers_is_an_error_with_its_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program_on_path(tmp_path, monkeypatch, version="3.5.9")
    program = tmp_path / "bin" / "etcd"
    program.write_text(
        program.read_text() + "test $1 = --version || { echo still replaying; exec sleep 1000; }\n"
    )
    settings = load_settings(tmp_path / "state")
    client_port, peer_port = free_ports(2)
    member = LocalMember(
        name="one",
        host="127.0.0.1",
        client_port=client_port,
        peer_port=peer_port,
        bind="127.0.0.1",
        controller_port=0,
    )
    process = EtcdMemberProcess(
        settings.controller, state_dir=tmp_path / "state", progress=lambda _line: None
    )
    try:
        with pytest.raises(DeadlineError, match=r"within 0\.5 s; its last output:\n(.*\n)*  still replaying"):
            await process.start(member, timeout_s=0.5)
    finally:
        await process.child.stop(grace_s=10)


def test_full_disk_is_refused_and_small_or_slow_disk_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    free_bytes = 100 << 20
    monkeypatch.setattr(etcd_member.shutil, "disk_usage", lambda _path: _DiskUsage(0, 0, free_bytes))
    with pytest.raises(StoreFullError, match="100 MiB of free disk space"):
        etcd_member.check_disk_for_etcd(tmp_path, quota_bytes=1 << 30, progress=lines.append)
    free_bytes = 512 << 20
    monkeypatch.setattr(etcd_member, "measure_fsync_s", lambda _path: 0.05)
    etcd_member.check_disk_for_etcd(tmp_path, quota_bytes=1 << 30, progress=lines.append)
    assert [line for line in lines if "1024 MiB that the store may use" in line]
    assert [line for line in lines if "takes 50 ms to sync" in line]


def test_fsync_probe_leaves_no_file(tmp_path: Path) -> None:
    assert etcd_member.measure_fsync_s(tmp_path) > 0
    assert not list(tmp_path.iterdir())


def test_state_directory_with_a_sqlite_store_is_not_replaced_by_etcd(tmp_path: Path) -> None:
    (tmp_path / "controller").mkdir()
    (tmp_path / "controller" / "store.sqlite3").touch()
    with pytest.raises(ConfigError, match=r"store\.sqlite3"):
        etcd_member.with_settings_of_local_member(load_settings(tmp_path))


def test_server_keeps_its_store_and_address_without_options(tmp_path: Path) -> None:
    member = LocalMember(
        name="n1", host="127.0.0.2", client_port=1, peer_port=2, bind="127.0.0.2", controller_port=5701
    )
    member.write(tmp_path)
    filled = etcd_member.with_settings_of_local_member(config.load({"paths.state_dir": tmp_path})).controller
    assert (filled.store, filled.bind, filled.port) == ("etcd", "127.0.0.2", 5701)
    with pytest.raises(ConfigError, match="has an etcd member"):
        etcd_member.with_settings_of_local_member(
            config.load({"paths.state_dir": tmp_path, "controller.store": "sqlite:/tmp/other"})
        )


async def test_store_etcd_without_a_member_names_the_commands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no etcd member") as caught:
        await open_store("etcd", state_dir=tmp_path / "controller", clock=SystemClock())
    assert "genie up --store etcd" in (caught.value.hint or "")


async def test_port_in_use_is_refused_before_the_start(tmp_path: Path) -> None:
    require_program("etcd", package="etcd-server")
    settings = load_settings(tmp_path / "state")
    member = etcd_member.new_local_member(settings.controller, name="n1")
    process = etcd_member.EtcdMemberProcess(
        settings.controller, state_dir=tmp_path / "state", progress=lambda _line: None
    )
    await process.start(member)
    try:
        other = etcd_member.EtcdMemberProcess(
            settings.controller, state_dir=tmp_path / "other", progress=lambda _line: None
        )
        with pytest.raises(AddressInUseError, match=str(member.client_port)) as caught:
            await other.start(member)
        assert "GENIE_CONTROLLER_ETCD_CLIENT_PORT" in (caught.value.hint or "")
    finally:
        await process.child.stop(grace_s=10)


async def test_up_with_store_etcd_runs_and_restarts_a_private_member(
    cluster: local_cluster.Supervisor, tmp_path: Path
) -> None:
    state_dir = tmp_path / "state"
    assert set(cluster.pids) == {"etcd", "controller", "agent"}
    assert etcd_data_directory(state_dir).stat().st_mode & 0o777 == 0o700
    member = LocalMember.read(state_dir)
    assert member is not None
    async with open_etcd_cluster(member.address(state_dir)) as etcd:
        (status,) = await etcd.fetch_statuses()
    assert (status.info.name, status.is_leader, status.problem) == ("n1", True, "")
    command_line = psutil.Process(cluster.pids["etcd"]).cmdline()
    assert command_line[command_line.index("--quota-backend-bytes") + 1] == str(64 << 20)

    killed = cluster.pids["etcd"]
    os.kill(killed, signal.SIGKILL)
    await until(lambda: cluster.pids["etcd"] != killed, timeout_s=30, what="etcd restarts")
    assert cluster.cluster is not None
    access = local_cluster.make_owner_access(state_dir, cluster.cluster)
    settings = replace(config.load({"paths.state_dir": state_dir}), cluster=access)
    async with open_client(settings) as client:

        async def has_store() -> bool:
            reply = await client.status()
            return reply.leading and reply.store_ok and reply.store == "etcd"

        await until(has_store, timeout_s=30, what="the controller uses the store again")
    pid = cluster.pids["etcd"]
    await local_cluster.stop_running_cluster(state_dir)
    assert process_records.read_process_record(state_dir, "etcd") is None
    identity = ProcessIdentity.of_pid(pid)
    assert identity is None or not identity.is_alive


async def test_etcd_rejects_certificates_of_other_roles(
    cluster: local_cluster.Supervisor, tmp_path: Path
) -> None:
    state_dir = tmp_path / "state"
    member = LocalMember.read(state_dir)
    assert member is not None
    address = member.address(state_dir)
    assert address.certificate_file == etcd_certificate_and_key_paths(state_dir)[0]
    node_dir = state_dir / AGENTS_DIR / "n1"
    others = [
        (node_dir / "node.pem", node_dir / "node.key"),
        (state_dir / "controller" / "controller.pem", state_dir / "controller" / "controller.key"),
        (None, None),
    ]
    for certificate, key in others:
        assert certificate is None or certificate.exists()
        wrong = replace(address, certificate_file=certificate, key_file=key)
        async with open_etcd_cluster(wrong) as etcd:
            with pytest.raises((StoreError, TlsError)):
                await etcd.list_members(timeout_s=1.0)
