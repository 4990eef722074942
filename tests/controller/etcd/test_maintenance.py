"""Maintenance of the etcd member of this machine: certificate, endpoints, defragmentation, with real etcd."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from genie.config import ControllerConfig
from genie.controller.etcd import maintenance
from genie.controller.etcd.local_member import LocalMember, etcd_certificate_and_key_paths
from genie.controller.etcd.member_alarms import EtcdMemberAlarms
from genie.controller.etcd.membership import MemberStatus, open_etcd_cluster
from genie.controller.nodes.admission import Certificates
from genie.controller.store import Delete, Put
from genie.controller.store.etcd import EtcdStore
from genie.processes.clock import SystemClock
from genie.runtime import tls
from genie.supervisor.etcd_member import EtcdMemberProcess, new_local_member
from tests.fakes.clock import FakeClock
from tests.needs import require_program
from tests.ports import free_ports
from tests.waiting import until


@dataclass
class RunningMember:
    member: LocalMember
    config: ControllerConfig
    state_dir: Path
    store: EtcdStore
    member_alarms: EtcdMemberAlarms = field(default_factory=EtcdMemberAlarms)

    def certificates(self, clock: SystemClock | FakeClock) -> Certificates:
        return Certificates.open(self.state_dir / "controller", self.config, clock=clock)

    def make_maintenance(self) -> maintenance.EtcdMaintenance:
        clock = SystemClock()
        return maintenance.EtcdMaintenance(
            self.store,
            self.certificates(clock),
            state_dir=self.state_dir,
            clock=clock,
            is_leading=lambda: True,
            member_alarms=self.member_alarms,
        )


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningMember]:
    require_program("etcd", package="etcd-server")
    client_port, peer_port = free_ports(2)
    config = ControllerConfig(etcd_client_port=client_port, etcd_peer_port=peer_port, store="etcd")
    member = new_local_member(config, name="one")
    process = EtcdMemberProcess(config, state_dir=tmp_path, progress=lambda _line: None)
    await process.start(member)
    try:
        member.write(tmp_path)
        store = await EtcdStore.open_address(member.address(tmp_path))
        yield RunningMember(member, config, tmp_path, store)
        await store.close()
    finally:
        await process.child.stop(grace_s=10)


async def test_certificate_is_renewed_at_half_of_its_lifetime(running: RunningMember) -> None:
    certificate, key = etcd_certificate_and_key_paths(running.state_dir)
    addresses = tls.certificate_addresses(certificate.read_text())
    old_clock = FakeClock(wall_s=time.time() - 4 * 86400)
    running.certificates(old_clock).write_etcd_certificate(certificate, key, addresses=addresses)
    old_pem, key_pem = certificate.read_text(), key.read_bytes()
    await running.make_maintenance().run_maintenance_once()
    renewed = certificate.read_text()
    assert renewed != old_pem
    assert tls.renewal_due_in_s(renewed, now=time.time()) > 3 * 86400
    assert tls.certificate_addresses(renewed) == addresses
    assert key.read_bytes() == key_pem
    assert (await running.store.commit([], [Put("a", b"1")])).succeeded
    await running.make_maintenance().run_maintenance_once()
    assert certificate.read_text() == renewed


async def test_endpoints_follow_the_member_list(running: RunningMember) -> None:
    stale = replace(running.member, endpoints=("127.0.0.1:1",))
    stale.write(running.state_dir)
    await running.store.replace_address(stale.address(running.state_dir))
    await running.make_maintenance().run_maintenance_once()
    assert LocalMember.read(running.state_dir) == running.member
    assert running.store.address.endpoints == (running.member.endpoint,)
    assert (await running.store.commit([], [Put("a", b"1")])).succeeded


async def test_member_that_does_not_respond_is_an_alarm_until_it_was_removed(running: RunningMember) -> None:
    maintenance = running.make_maintenance()
    (port,) = free_ports(1)
    async with open_etcd_cluster(running.member.address(running.state_dir)) as cluster:
        added, _ = await cluster.add_learner(f"https://127.0.0.1:{port}", timeout_s=10)
        await maintenance.run_maintenance_once()
        assert running.member_alarms.alarms() == [], "one failed check is not an alarm"
        await maintenance.run_maintenance_once()
        (alarm,) = running.member_alarms.alarms()
        assert alarm.startswith(f"etcd member {added.member_id:x} has not responded since ")
        assert "1 of 2 respond" in alarm and f"'genie etcd remove {added.member_id:x}'" in alarm
        await cluster.remove_member(added.member_id)
        await maintenance.run_maintenance_once()
        assert running.member_alarms.alarms() == []


async def test_watch_continues_after_the_endpoints_have_changed(running: RunningMember) -> None:
    before = (await running.store.commit([], [Put("a", b"1")])).revision
    async with running.store.watch("a", after_revision=before) as events:
        await running.store.replace_address(running.member.address(running.state_dir))
        await running.store.commit([], [Put("a", b"2")])
        assert (await anext(events)).value == b"2"


async def test_fragmented_member_is_defragmented(
    running: RunningMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "FRAGMENTED_BYTES_MIN", 1024 * 1024)
    keys = [f"row{number}" for number in range(40)]
    for key in keys:
        await running.store.commit([], [Put(key, bytes(200_000))])
    revision = (await running.store.commit([], [Delete(key) for key in keys])).revision
    await running.store.compact(revision)
    async with open_etcd_cluster(running.member.address(running.state_dir)) as cluster:

        async def fragmented() -> MemberStatus | None:
            # etcd compacts in the background, and counts freed pages as used until the next change.
            await running.store.commit([], [Put("a", b"1")])
            (status,) = await cluster.fetch_statuses()
            return status if maintenance.is_fragmented(status) else None

        before = await until(fragmented, timeout_s=30, what="etcd has compacted")
        assert before is not None
        chosen = await maintenance.defragment_most_fragmented_member(cluster)
        assert chosen is not None
        (after,) = await cluster.fetch_statuses()
        assert after.size_bytes < before.size_bytes / 4
        assert await maintenance.defragment_most_fragmented_member(cluster) is None
