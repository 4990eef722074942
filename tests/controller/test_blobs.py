"""Directories that are sent along: chunks, digests, space, and who may fetch them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from genie.controller.blobs import Blobs, blob_name
from genie.errors import PermissionError_, StoreFullError, UsageError, WorkdirError
from genie.model.job import JobSpec, Workdir
from genie.model.messages import BlobStatus, GetBlob, PutBlob, StatBlob
from genie.model.tenant import TokenKind
from tests.controller.standing import standing

NOBODY: frozenset[str] = frozenset()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _put(blobs: Blobs, data: bytes, *, tenant: str = "t", needed: frozenset[str] = NOBODY) -> None:
    status = blobs.put(_digest(data), tenant=tenant, offset=0, data=data, last=True, needed=needed)
    assert status.complete


def test_chunks_make_a_blob_that_reads_back(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs", bytes_max=1 << 20)
    data = os.urandom(1000)
    digest = _digest(data)
    for offset in (0, 400, 800):
        part = data[offset : offset + 400]
        blobs.put(digest, tenant="t", offset=offset, data=part, last=offset == 800, needed=NOBODY)
    assert blobs.stat(digest, tenant="t").complete
    assert blobs.read(digest, 100, tenant="t").data == data[100:]
    assert blobs.read(digest, 1000, tenant="t").data == b""
    assert (tmp_path / "blobs" / blob_name(digest, "t")).stat().st_mode & 0o777 == 0o600


def test_an_upload_goes_on_where_it_stood_in_a_later_life_too(tmp_path: Path) -> None:
    data = os.urandom(1000)
    digest = _digest(data)
    blobs = Blobs(tmp_path / "blobs", bytes_max=1 << 20)
    blobs.put(digest, tenant="t", offset=0, data=data[:300], last=False, needed=NOBODY)
    later = Blobs(tmp_path / "blobs", bytes_max=1 << 20)
    assert later.stat(digest, tenant="t").received_bytes == 300
    wrong_place = later.put(digest, tenant="t", offset=0, data=data, last=True, needed=NOBODY)
    assert (wrong_place.complete, wrong_place.received_bytes) == (False, 300)
    assert later.put(digest, tenant="t", offset=300, data=data[300:], last=True, needed=NOBODY).complete
    assert later.read(digest, 0, tenant="t").data == data


def test_bytes_with_another_digest_are_refused_and_thrown_away(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs", bytes_max=1 << 20)
    digest = _digest(b"good")
    with pytest.raises(WorkdirError, match="is not"):
        blobs.put(digest, tenant="t", offset=0, data=b"evil", last=True, needed=NOBODY)
    assert blobs.stat(digest, tenant="t").received_bytes == 0
    _put(blobs, b"good")


def test_one_tenants_wrong_bytes_do_not_spoil_anothers_upload(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs", bytes_max=1 << 20)
    digest = _digest(b"good")
    blobs.put(digest, tenant="evil", offset=0, data=b"go", last=False, needed=NOBODY)
    assert blobs.stat(digest, tenant="t").received_bytes == 0
    _put(blobs, b"good")


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n", "g" * 64])
def test_a_digest_is_64_hexadecimal_digits(tmp_path: Path, digest: str) -> None:
    blobs = Blobs(tmp_path / "blobs", bytes_max=1 << 20)
    for ask in (
        lambda: blobs.stat(digest, tenant="t"),
        lambda: blobs.read(digest, 0, tenant="t"),
        lambda: blobs.put(digest, tenant="t", offset=0, data=b"", last=True, needed=NOBODY),
    ):
        with pytest.raises(UsageError, match="64 lower-case hexadecimal digits"):
            ask()
    assert list((tmp_path / "blobs").iterdir()) == []


def test_the_longest_unused_goes_first_and_what_is_needed_stays(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs", bytes_max=300)
    first, second, third = b"1" * 100, b"2" * 100, b"3" * 100
    for data in (first, second, third):
        _put(blobs, data)
    blobs.read(_digest(first), 0, tenant="t")
    _put(blobs, b"4" * 100, needed=frozenset({blob_name(_digest(second), "t")}))
    assert blobs.stat(_digest(second), tenant="t").complete, "needed, though unused for longest"
    assert not blobs.stat(_digest(third), tenant="t").complete
    assert blobs.stat(_digest(first), tenant="t").complete, "just used"
    everything = frozenset(blob_name(_digest(data), "t") for data in (first, second, b"4" * 100))
    with pytest.raises(StoreFullError, match="blobs_bytes_max"):
        _put(blobs, b"5" * 100, needed=everything)


def test_a_full_disk_is_said_and_the_upload_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = Blobs(tmp_path / "blobs", bytes_max=1 << 20)
    digest = _digest(b"onetwo")
    blobs.put(digest, tenant="t", offset=0, data=b"one", last=False, needed=NOBODY)
    with monkeypatch.context() as patch:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr("os.open", full)
        with pytest.raises(StoreFullError, match="No space left"):
            blobs.put(digest, tenant="t", offset=3, data=b"two", last=True, needed=NOBODY)
    assert blobs.stat(digest, tenant="t").received_bytes == 3
    assert blobs.put(digest, tenant="t", offset=3, data=b"two", last=True, needed=NOBODY).complete


async def test_a_job_needs_its_directory_here_and_only_its_node_may_fetch_it(tmp_path: Path) -> None:
    data = os.urandom(5000)
    digest = _digest(data)
    spec = JobSpec(name="j", command=("true",), workdir=Workdir(digest=digest, size_bytes=len(data)))
    async with standing(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        with pytest.raises(WorkdirError, match="is not here"):
            await owner.submit_spec(spec)
        await owner.ask(PutBlob(digest=digest, offset=0, data=data, last=True))
        assert (await owner.ask(StatBlob(digest=digest))).complete
        assert agent.peer is not None
        with pytest.raises(PermissionError_, match="no job on node n1 needs"):
            await agent.peer.call(GetBlob(digest=digest, offset=0), timeout_s=5)
        await owner.submit_spec(spec)
        launch = await agent.next_launch()
        chunk = await agent.peer.call(GetBlob(digest=digest, offset=4000), timeout_s=5)
        assert (chunk.data, chunk.size_bytes) == (data[4000:], 5000)
        agent.end(launch)
        await agent.beat()
        with pytest.raises(PermissionError_):
            await agent.peer.call(GetBlob(digest=digest, offset=0), timeout_s=5)
        user = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(user) as other:
            with pytest.raises(PermissionError_):
                await other.ask(GetBlob(digest=digest, offset=0))


def test_another_tenant_neither_finds_nor_reads_a_blob_by_its_digest(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs", bytes_max=1000)
    _put(blobs, b"secret")
    assert blobs.stat(_digest(b"secret"), tenant="t").complete
    assert blobs.stat(_digest(b"secret"), tenant="other") == BlobStatus(complete=False, received_bytes=0)
    with pytest.raises(WorkdirError, match="is not here"):
        blobs.read(_digest(b"secret"), 0, tenant="other")
