"""What is undone of a server join that was killed, and what is kept."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from genie import config
from genie.agent.journal import AGENT_LOCK_FILE
from genie.controller.etcd.local_member import LocalMember
from genie.errors import NodeError
from genie.model.tenant import TokenKind
from genie.processes import files
from genie.processes.process_identity import ProcessIdentity
from genie.supervisor.incomplete_join import IncompleteJoin, mark_join_complete, undo_incomplete_join
from genie.supervisor.local_cluster import Supervisor
from genie.tenancy.access import new_token
from tests.supervisor.leftover_jobs import run_job

MEMBER = LocalMember(
    name="s2", host="127.0.0.3", client_port=1, peer_port=2, bind="127.0.0.3", controller_port=3
)
INCOMPLETE = IncompleteJoin(etcd_endpoints=("127.0.0.2:1",), had_agents_before=False)


def ignore(_line: str) -> None:
    pass


def write_server(state_dir: Path) -> list[Path]:
    """Writes what a join writes. Returns the files."""
    written = [state_dir / name for name in ("controller/ca.key", "etcd/data/member/wal", "owner.token")]
    for path in written:
        files.write_private(path, b"x")
    return written


async def test_join_without_a_member_record_is_undone(tmp_path: Path) -> None:
    written = write_server(tmp_path)
    INCOMPLETE.write(tmp_path)
    assert await undo_incomplete_join(tmp_path, progress=ignore)
    assert not [path for path in written if path.exists()]
    assert IncompleteJoin.read(tmp_path) is None


@pytest.mark.parametrize("controller", ["127.0.0.1:1", ""])
async def test_owner_token_that_cannot_be_revoked_is_named(tmp_path: Path, controller: str) -> None:
    write_server(tmp_path)
    token = new_token(TokenKind.OWNER, token_id="abcd", secret=b"\x01" * 32, pin="a" * 43)
    files.write_private(tmp_path / "owner.token", str(token).encode())
    replace(INCOMPLETE, controller=controller).write(tmp_path)
    lines: list[str] = []
    assert await undo_incomplete_join(tmp_path, progress=lines.append)
    (warning,) = [
        line for line in lines if line.startswith("warning: the owner token of this join, abcd, is")
    ]
    assert warning.endswith("revoke it with 'genie token revoke abcd' on a server")
    assert not (tmp_path / "owner.token").exists()


async def test_data_of_a_member_that_may_vote_is_never_removed(tmp_path: Path) -> None:
    """Also if the record of a completed join is back after a power failure."""
    written = write_server(tmp_path)
    MEMBER.write(tmp_path)
    INCOMPLETE.write(tmp_path)
    assert not await undo_incomplete_join(tmp_path, progress=ignore)
    INCOMPLETE.remove_written_files(tmp_path)
    assert all(path.exists() for path in written)


async def test_join_is_undone_after_its_member_was_removed(tmp_path: Path) -> None:
    written = write_server(tmp_path)
    MEMBER.write(tmp_path)
    IncompleteJoin(
        etcd_endpoints=(), had_agents_before=False, peer_url=MEMBER.peer_url, is_member_removed=True
    ).write(tmp_path)
    assert await undo_incomplete_join(tmp_path, progress=ignore)
    assert not [path for path in written if path.exists()]


def test_completion_of_a_join_is_synced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    INCOMPLETE.write(tmp_path)
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    mark_join_complete(tmp_path)
    assert synced == [tmp_path]
    mark_join_complete(tmp_path)


async def test_continued_join_is_reported_before_the_wait_for_the_other_servers(tmp_path: Path) -> None:
    class ReportedError(Exception):
        pass

    def raise_line(line: str) -> None:
        raise ReportedError(line)

    INCOMPLETE.write(tmp_path)
    settings = config.load({"paths.state_dir": tmp_path})
    supervisor = Supervisor(settings, progress=raise_line, is_program=False)
    with pytest.raises(ReportedError, match="continuing the join of this machine"):
        await supervisor.wait_for_etcd_majority(MEMBER)


async def test_jobs_of_an_undone_join_are_ended(tmp_path: Path) -> None:
    INCOMPLETE.write(tmp_path)
    with run_job(tmp_path / "agents" / "s2") as process:
        assert await undo_incomplete_join(tmp_path, progress=ignore)
        assert process.wait(timeout=30) != 0
    assert not (tmp_path / "agents").exists()


async def test_records_of_jobs_that_cannot_be_ended_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    INCOMPLETE.write(tmp_path)
    with run_job(tmp_path / "agents" / "s2") as process:
        with monkeypatch.context() as patch:
            patch.setattr(ProcessIdentity, "send_signal", lambda _self, _number: False)
            with pytest.raises(NodeError, match=f"cannot kill process {process.pid}"):
                await undo_incomplete_join(tmp_path, progress=ignore)
        assert (tmp_path / "agents" / "s2" / "jobs" / "j-1").exists()
        lock = files.FileLock.try_acquire(tmp_path / "agents" / "s2" / AGENT_LOCK_FILE)
        assert lock is not None
        with pytest.raises(NodeError, match="an agent of that node may be running"):
            await undo_incomplete_join(tmp_path, progress=ignore)
        lock.release()
        assert await undo_incomplete_join(tmp_path, progress=ignore)
        assert process.wait(timeout=30) != 0
