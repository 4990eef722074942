"""Elections of etcd members that Genie starts: a member that was cut off does not disturb the others."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from genie.config import ControllerConfig
from genie.controller.etcd.local_member import LocalMember
from genie.controller.etcd.membership import open_etcd_cluster
from genie.controller.store import Put
from genie.controller.store.etcd import EtcdStore
from genie.supervisor.etcd_member import EtcdMemberProcess, format_initial_cluster, new_local_member
from tests.needs import require_program
from tests.ports import free_ports
from tests.waiting import until

_NEW_ELECTION = re.compile(r"is starting a new election at term (\d+)")


@dataclass
class ManagedMember:
    member: LocalMember
    state_dir: Path
    process: EtcdMemberProcess

    @classmethod
    def create(cls, state_dir: Path, *, name: str) -> ManagedMember:
        client_port, peer_port = free_ports(2)
        config = ControllerConfig(etcd_client_port=client_port, etcd_peer_port=peer_port, store="etcd")
        process = EtcdMemberProcess(config, state_dir=state_dir, progress=lambda _line: None)
        return cls(new_local_member(config, name=name), state_dir, process)

    async def join(self, other: ManagedMember) -> None:
        """Join the cluster of `other` as a voting member."""
        shutil.copytree(other.state_dir / "controller", self.state_dir / "controller")
        async with open_etcd_cluster(other.member.address(other.state_dir)) as cluster:
            added, _members = await cluster.add_learner(self.member.peer_url, timeout_s=30.0)
            peers = [(each.member.name, each.member.peer_url) for each in (other, self)]
            await self.process.start(
                self.member, initial_cluster=format_initial_cluster(peers), is_new_cluster=False
            )
            await cluster.promote_learner(added.member_id, timeout_s=30.0)

    def read_terms_of_elections(self) -> list[int]:
        """The term in which each election began that this member has tried to start."""
        text = self.process.child.log_path.read_text("utf-8")
        return [int(found) for found in _NEW_ELECTION.findall(text)]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[ManagedMember, ManagedMember]]:
    """Two voting members."""
    require_program("etcd", package="etcd-server")
    first = ManagedMember.create(tmp_path / "first", name="first")
    second = ManagedMember.create(tmp_path / "second", name="second")
    try:
        await first.process.start(first.member)
        await second.join(first)
        yield first, second
    finally:
        for each in (second, first):
            await each.process.child.stop(grace_s=10)


async def test_member_without_a_majority_keeps_its_term(pair: tuple[ManagedMember, ManagedMember]) -> None:
    """With a higher term than the others, it would depose the leader of etcd when it returns, and every
    lease would be extended."""
    first, second = pair
    await first.process.child.stop(grace_s=10)
    previous = len(second.read_terms_of_elections())

    def read_new_terms() -> list[int]:
        return second.read_terms_of_elections()[previous:]

    await until(lambda: len(read_new_terms()) >= 2, what="the member that is left tries two elections")
    assert len(set(read_new_terms())) == 1
    await first.process.start(first.member)
    store = await EtcdStore.open_address(first.member.address(first.state_dir))
    try:
        assert (await store.commit([], [Put("key", b"value")])).succeeded
    finally:
        await store.close()
