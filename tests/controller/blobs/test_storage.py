"""Blobs: chunks, digests, eviction, and access."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from genie.controller.blobs.storage import BLOB_PINNED_AFTER_USE_S, BlobStorage, blob_name
from genie.errors import PermissionError_, StoreFullError, UsageError, WorkdirError
from genie.model.job import JobSpec, Workdir
from genie.model.messages import BlobStatus, GetBlob, PutBlob, StatBlob
from genie.model.tenant import TokenKind
from tests.controller.running_controller import running_controller
from tests.fakes.clock import FakeClock

NOBODY: frozenset[str] = frozenset()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _make_blobs(
    directory: Path,
    bytes_max: int = 1 << 20,
    *,
    tenant_bytes_max: int = 1 << 30,
    clock: FakeClock | None = None,
) -> BlobStorage:
    return BlobStorage(
        directory, bytes_max=bytes_max, tenant_bytes_max=tenant_bytes_max, clock=clock or FakeClock()
    )


def _upload(blobs: BlobStorage, data: bytes, *, tenant: str = "t", needed: frozenset[str] = NOBODY) -> None:
    status = blobs.append_chunk(
        _sha256(data), tenant=tenant, offset=0, data=data, is_last=True, is_needed=needed.__contains__
    )
    assert status.complete


def test_blob_of_several_chunks_reads_back(tmp_path: Path) -> None:
    blobs = _make_blobs(tmp_path / "blobs", 1 << 20)
    data = os.urandom(1000)
    digest = _sha256(data)
    for offset in (0, 400, 800):
        part = data[offset : offset + 400]
        blobs.append_chunk(
            digest, tenant="t", offset=offset, data=part, is_last=offset == 800, is_needed=NOBODY.__contains__
        )
    assert blobs.get_status(digest, tenant="t").complete
    assert blobs.read_chunk(digest, 100, tenant="t").data == data[100:]
    assert blobs.read_chunk(digest, 1000, tenant="t").data == b""
    assert (tmp_path / "blobs" / blob_name(digest, "t")).stat().st_mode & 0o777 == 0o600


def test_upload_resumes_after_a_restart(tmp_path: Path) -> None:
    data = os.urandom(1000)
    digest = _sha256(data)
    blobs = _make_blobs(tmp_path / "blobs", 1 << 20)
    blobs.append_chunk(
        digest, tenant="t", offset=0, data=data[:300], is_last=False, is_needed=NOBODY.__contains__
    )
    later = _make_blobs(tmp_path / "blobs", 1 << 20)
    assert later.get_status(digest, tenant="t").received_bytes == 300
    wrong_place = later.append_chunk(
        digest, tenant="t", offset=0, data=data, is_last=True, is_needed=NOBODY.__contains__
    )
    assert (wrong_place.complete, wrong_place.received_bytes) == (False, 300)
    assert later.append_chunk(
        digest, tenant="t", offset=300, data=data[300:], is_last=True, is_needed=NOBODY.__contains__
    ).complete
    assert later.read_chunk(digest, 0, tenant="t").data == data


def test_upload_with_another_digest_is_rejected_and_deleted(tmp_path: Path) -> None:
    blobs = _make_blobs(tmp_path / "blobs", 1 << 20)
    digest = _sha256(b"good")
    with pytest.raises(WorkdirError, match="has the digest"):
        blobs.append_chunk(
            digest, tenant="t", offset=0, data=b"evil", is_last=True, is_needed=NOBODY.__contains__
        )
    assert blobs.get_status(digest, tenant="t").received_bytes == 0
    _upload(blobs, b"good")


def test_failed_upload_of_one_tenant_does_not_affect_another(tmp_path: Path) -> None:
    blobs = _make_blobs(tmp_path / "blobs", 1 << 20)
    digest = _sha256(b"good")
    blobs.append_chunk(
        digest, tenant="evil", offset=0, data=b"go", is_last=False, is_needed=NOBODY.__contains__
    )
    assert blobs.get_status(digest, tenant="t").received_bytes == 0
    _upload(blobs, b"good")


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n", "g" * 64])
def test_invalid_digest_is_rejected(tmp_path: Path, digest: str) -> None:
    blobs = _make_blobs(tmp_path / "blobs", 1 << 20)
    for ask in (
        lambda: blobs.get_status(digest, tenant="t"),
        lambda: blobs.read_chunk(digest, 0, tenant="t"),
        lambda: blobs.append_chunk(
            digest, tenant="t", offset=0, data=b"", is_last=True, is_needed=NOBODY.__contains__
        ),
    ):
        with pytest.raises(UsageError, match="64 lower-case hexadecimal digits"):
            ask()
    assert list((tmp_path / "blobs").iterdir()) == []


def test_least_recently_used_blob_is_evicted_unless_it_is_needed(tmp_path: Path) -> None:
    blobs = _make_blobs(tmp_path / "blobs", 300)
    first, second, third = b"1" * 100, b"2" * 100, b"3" * 100
    for data in (first, second, third):
        _upload(blobs, data)
    blobs.read_chunk(_sha256(first), 0, tenant="t")
    _upload(blobs, b"4" * 100, needed=frozenset({blob_name(_sha256(second), "t")}))
    assert blobs.get_status(_sha256(second), tenant="t").complete, "needed, although least recently used"
    assert not blobs.get_status(_sha256(third), tenant="t").complete
    assert blobs.get_status(_sha256(first), tenant="t").complete, "recently used"
    everything = frozenset(blob_name(_sha256(data), "t") for data in (first, second, b"4" * 100))
    with pytest.raises(StoreFullError, match="blobs_tenant_bytes_max"):
        _upload(blobs, b"5" * 100, needed=everything)


def test_upload_resumes_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = _make_blobs(tmp_path / "blobs", 1 << 20)
    digest = _sha256(b"onetwo")
    blobs.append_chunk(
        digest, tenant="t", offset=0, data=b"one", is_last=False, is_needed=NOBODY.__contains__
    )
    with monkeypatch.context() as patch:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr("os.open", full)
        with pytest.raises(StoreFullError, match="No space left"):
            blobs.append_chunk(
                digest, tenant="t", offset=3, data=b"two", is_last=True, is_needed=NOBODY.__contains__
            )
    assert blobs.get_status(digest, tenant="t").received_bytes == 3
    assert blobs.append_chunk(
        digest, tenant="t", offset=3, data=b"two", is_last=True, is_needed=NOBODY.__contains__
    ).complete


async def test_job_needs_an_uploaded_workdir_that_only_its_node_may_read(tmp_path: Path) -> None:
    data = os.urandom(5000)
    digest = _sha256(data)
    spec = JobSpec(name="j", command=("true",), workdir=Workdir(digest=digest, size_bytes=len(data)))
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        with pytest.raises(WorkdirError, match="has not been uploaded"):
            await owner.submit_spec(spec)
        await owner.ask(PutBlob(digest=digest, offset=0, data=data, is_last=True))
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


def test_blob_is_not_accessible_to_another_tenant(tmp_path: Path) -> None:
    blobs = _make_blobs(tmp_path / "blobs", 1000)
    _upload(blobs, b"secret")
    assert blobs.get_status(_sha256(b"secret"), tenant="t").complete
    assert blobs.get_status(_sha256(b"secret"), tenant="other") == BlobStatus(
        complete=False, received_bytes=0
    )
    with pytest.raises(WorkdirError, match="is not on the controller"):
        blobs.read_chunk(_sha256(b"secret"), 0, tenant="other")


def test_tenant_evicts_no_recent_upload_of_another(tmp_path: Path) -> None:
    clock = FakeClock()
    blobs = _make_blobs(tmp_path / "blobs", 500, tenant_bytes_max=300, clock=clock)
    blue = b"b" * 200
    _upload(blobs, blue, tenant="blue")
    for number in range(10):
        _upload(blobs, b"%d" % number * 100, tenant="red")
    assert blobs.get_status(_sha256(blue), tenant="blue").complete, "red evicts its own blobs"
    assert blobs.get_status(_sha256(b"9" * 100), tenant="red").complete
    everything = frozenset(blob_name(_sha256(b"%d" % number * 100), "red") for number in range(10))
    with pytest.raises(StoreFullError, match="of tenant red use all of its 300 bytes"):
        _upload(blobs, b"x" * 100, tenant="red", needed=everything)
    with pytest.raises(StoreFullError, match="recent uploads use all of the 500 bytes"):
        _upload(blobs, b"g" * 100, tenant="green")
    _upload(blobs, b"c" * 200, tenant="blue")
    assert not blobs.get_status(_sha256(blue), tenant="blue").complete, "its own, at any time"


def test_other_tenants_evict_blobs_that_were_not_used_for_some_time(tmp_path: Path) -> None:
    clock = FakeClock()
    blobs = _make_blobs(tmp_path / "blobs", 300, tenant_bytes_max=300, clock=clock)
    _upload(blobs, b"b" * 100, tenant="blue")
    _upload(blobs, b"c" * 100, tenant="blue")
    asyncio.run(clock.advance(BLOB_PINNED_AFTER_USE_S / 2))
    assert blobs.get_status(_sha256(b"b" * 100), tenant="blue").complete, "its client will submit a job"
    asyncio.run(clock.advance(BLOB_PINNED_AFTER_USE_S / 2))
    _upload(blobs, b"r" * 200, tenant="red")
    assert blobs.get_status(_sha256(b"b" * 100), tenant="blue").complete
    assert not blobs.get_status(_sha256(b"c" * 100), tenant="blue").complete
