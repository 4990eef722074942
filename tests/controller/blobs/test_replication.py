"""Copies of blobs on other controllers: before the acknowledgement, later, and back to a new leader."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from genie.controller.blobs.replication import _COPY_CHECK_INTERVAL_S, BlobReplication, _PeerController
from genie.controller.blobs.storage import BlobStorage, blob_name
from genie.errors import GenieError, PermissionError_, StoreFullError, TlsError, WorkdirError
from genie.model.job import Job, JobSpec, JobState, Workdir
from genie.model.messages import CHUNK_BYTES_MAX, GetBlob, GetReplica, PutBlob, PutReplica, StatReplica
from genie.model.messages.handshake import ServerHello
from genie.model.tenant import TokenKind
from genie.processes.clock import SystemClock
from genie.processes.tasks import run_inline
from genie.runtime import rpc, tls
from genie.runtime.network import ClientTls, TcpNetwork
from genie.sim.store import MemoryStore
from genie.version import __version__
from tests.controller.running_controller import Client, RunningController, running_controller
from tests.fakes.clock import FakeClock
from tests.waiting import until

DATA = os.urandom(2 * CHUNK_BYTES_MAX + 1000)
DIGEST = hashlib.sha256(DATA).hexdigest()
SPEC = JobSpec(name="job", command=("true",), workdir=Workdir(digest=DIGEST, size_bytes=len(DATA)))


@asynccontextmanager
async def run_two_controllers(
    folder: Path, **standby_settings: object
) -> AsyncIterator[tuple[RunningController, RunningController]]:
    """A leader and a standby with the same CA and store."""
    memory = await MemoryStore.open(clock=SystemClock())
    try:
        async with running_controller(
            folder / "1", store=memory.connect(), tls="on", leader_ttl_s=2.0, name="one"
        ) as one:
            _copy_identity(one.state_dir, folder / "2" / "state")
            async with running_controller(
                folder / "2",
                store=memory.connect(),
                tls="on",
                leader_ttl_s=2.0,
                name="two",
                **standby_settings,
            ) as two:
                yield one, two
    finally:
        await memory.close()


def _copy_identity(source: Path, target: Path) -> None:
    (target / "controller").mkdir(parents=True, mode=0o700)
    for name in ("controller/ca.pem", "controller/ca.key", "owner.token"):
        (target / name).write_bytes((source / name).read_bytes())
        (target / name).chmod(0o600)


def blob_path(one: RunningController, *, tenant: str = "default") -> Path:
    return one.state_dir / "controller" / "blobs" / blob_name(DIGEST, tenant)


async def upload(client: Client) -> None:
    for offset in range(0, len(DATA), CHUNK_BYTES_MAX):
        data = DATA[offset : offset + CHUNK_BYTES_MAX]
        is_last = offset + len(data) == len(DATA)
        await client.ask(PutBlob(digest=DIGEST, offset=offset, data=data, is_last=is_last))


async def upload_and_submit(client: Client) -> Job:
    await upload(client)
    return await client.submit_spec(SPEC)


async def until_known(one: RunningController, two: RunningController) -> None:
    """Waits until the leader has read the address of the standby."""
    assert one.controller is not None and two.controller is not None
    replication = one.controller._blob_replication
    await until(lambda: two.controller.address in replication._peers, timeout_s=20)  # type: ignore[union-attr]


async def test_submission_is_acknowledged_after_the_blob_was_copied(tmp_path: Path) -> None:
    async with run_two_controllers(tmp_path) as (one, two):
        await until_known(one, two)
        async with one.client(await one.token(TokenKind.USER, tenant="blue")) as client:
            await upload_and_submit(client)
        assert blob_path(two, tenant="blue").read_bytes() == DATA
        assert not blob_path(two).exists(), "a copy belongs to its tenant"


async def test_blob_without_a_copy_is_reported_and_copied_later(tmp_path: Path) -> None:
    async with run_two_controllers(tmp_path) as (one, two):
        await until_known(one, two)
        port = two.port
        await two.stop()
        async with one.client() as client:
            await upload_and_submit(client)

            async def alarms() -> list[str]:
                return [text for text in (await client.status()).alarms if "working directories" in text]

            (text,) = await until(alarms, timeout_s=20, what="the owner is informed")
            assert text.startswith("1 working directories are only on the leading controller: ")
            two.config = replace(two.config, port=port)
            await two.start()
            await until(blob_path(two).exists, timeout_s=20, what="the blob is copied")

            async def is_ok() -> bool:
                return not await alarms()

            await until(is_ok, timeout_s=20)


async def test_copy_counts_towards_the_limits_of_the_controller_that_has_it(tmp_path: Path) -> None:
    async with run_two_controllers(tmp_path, blobs_tenant_bytes_max=CHUNK_BYTES_MAX) as (one, two):
        await until_known(one, two)
        async with one.client() as client:
            await upload_and_submit(client)
            (text,) = [text for text in (await client.status()).alarms if "working directories" in text]
            assert "bytes" in text
        assert not blob_path(two).exists()


async def test_missing_blob_is_fetched_from_another_controller(tmp_path: Path) -> None:
    async with run_two_controllers(tmp_path) as (one, two):
        await until_known(one, two)
        async with one.client() as client:
            job = await upload_and_submit(client)
        await one.stop()
        blob_path(one).unlink()
        await until(lambda: two.controller is not None and two.controller.is_leading, timeout_s=20)
        await two.stop()  # it resigns
        await one.start()
        await two.start()
        await until(lambda: one.controller is not None and one.controller.is_leading, timeout_s=20)
        await until_known(one, two)
        async with one.client() as client, one.agent() as agent:
            launch = await agent.next_launch()
            assert launch.job_id == job.job_id
            received = b""
            while len(received) < len(DATA):
                received += await _get_chunk(agent.peer, len(received))
            assert received == DATA
            await agent.confirm(launch)
            await client.until_state(job.job_id, JobState.RUNNING)
        assert blob_path(one).exists()


async def _get_chunk(peer: rpc.Peer | None, offset: int) -> bytes:
    """As an agent: retries while the blob is being fetched."""
    assert peer is not None

    async def try_get() -> bytes | None:
        try:
            return (await peer.call(GetBlob(digest=DIGEST, offset=offset), timeout_s=10)).data
        except GenieError as error:
            if not error.retryable:
                raise
            return None

    return await until(try_get, timeout_s=20)


async def test_blob_that_no_controller_has_is_an_error(tmp_path: Path) -> None:
    async with run_two_controllers(tmp_path) as (one, two):
        await until_known(one, two)
        async with one.client() as client:
            with pytest.raises(WorkdirError, match="has not been uploaded"):
                await client.submit_spec(SPEC)


@asynccontextmanager
async def dial_as_server(one: RunningController, *, certificate_of: str) -> AsyncIterator[rpc.Peer]:
    """Connects with the certificate of a controller, of a node, or with none."""
    directory = one.state_dir / "controller"
    ca_pem = (directory / "ca.pem").read_text()
    context = tls.client_context(ca_pem)
    if certificate_of == "controller":
        context = tls.client_context(
            ca_pem, certificate=directory / "controller.pem", key=directory / "controller.key"
        )
    if certificate_of == "node":
        access = await one.join("n1")
        assert access.tls is not None
        context = access.tls.context
    trusted = ClientTls(context, tls.CONTROLLER_NAME)
    async with rpc.dial(one.network, "127.0.0.1", one.port, tls=trusted, timeout_s=5) as peer:
        yield peer


@pytest.mark.parametrize("certificate_of", ["node", "nobody"])
async def test_only_a_controller_authenticates_as_one(tmp_path: Path, certificate_of: str) -> None:
    async with (
        running_controller(tmp_path, tls="on") as one,
        dial_as_server(one, certificate_of=certificate_of) as peer,
    ):
        with pytest.raises(TlsError, match="certificate of a controller"):
            await peer.call(ServerHello(name="two", version=__version__), timeout_s=5)
        with pytest.raises(GenieError, match="not authenticated"):
            await peer.call(GetReplica(digest=DIGEST, tenant="default", offset=0), timeout_s=5)


async def test_tokens_give_no_access_to_replicas(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        with pytest.raises(PermissionError_, match="owner tokens cannot read replicas"):
            await owner.ask(StatReplica(digest=DIGEST, tenant="default"))


async def test_received_copy_is_verified(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path, tls="on", blobs_tenant_bytes_max=2048) as one,
        dial_as_server(one, certificate_of="controller") as peer,
    ):
        await peer.call(ServerHello(name="two", version=__version__), timeout_s=5)

        async def put(data: bytes, tenant: str = "default") -> None:
            request = PutReplica(digest=DIGEST, tenant=tenant, offset=0, data=data, is_last=True)
            await peer.call(request, timeout_s=5)

        with pytest.raises(WorkdirError, match="has the digest"):
            await put(b"other")
        with pytest.raises(StoreFullError):
            await put(bytes(4096))
        with pytest.raises(GenieError, match="tenant"):
            await put(b"other", tenant="../x")
        assert list(blob_path(one).parent.iterdir()) == []


async def test_uploaded_blob_that_no_job_needs_is_not_checked_again(tmp_path: Path) -> None:
    """Each check marks it as used, which would protect it from eviction forever."""
    clock = FakeClock()
    needed = {"needed+t"}
    replication = BlobReplication(
        BlobStorage(tmp_path / "blobs", bytes_max=1024, tenant_bytes_max=1024, clock=clock),
        name="one",
        network=TcpNetwork(),
        clock=clock,
        offload=run_inline,
        own_address=lambda: "a:1",
        controllers=lambda: ("a:1", "b:1"),
        needed=lambda: needed,
        client_tls=None,
    )
    peer = _PeerController()
    replication.request_copy_or_fetch("uploaded+t")
    assert replication._blobs_due_for_check(peer) == ["uploaded+t", "needed+t"]
    peer.last_checked_s_by_blob = dict.fromkeys(["uploaded+t", "needed+t"], clock.monotonic_s())
    assert replication._blobs_due_for_check(peer) == []
    await clock.advance(_COPY_CHECK_INTERVAL_S)
    assert replication._blobs_due_for_check(peer) == ["needed+t"]
