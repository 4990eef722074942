"""Access: tokens, joining, TLS, tenants, and invalid input."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest

from genie.controller import tokens
from genie.errors import (
    AccessError,
    FencedError,
    FrameTooLargeError,
    GenieError,
    JobNotFoundError,
    NodeRemovedError,
    PermissionError_,
    ProtocolError,
    TlsError,
    TokenMissingError,
    TokenRefusedError,
    TransportError,
    UsageError,
)
from genie.model.job import JobState
from genie.model.messages import (
    CancelJob,
    CreateToken,
    GetJob,
    GetStatus,
    ListJobs,
    ListNodes,
    ListTokens,
    ReadLog,
    RemoveNode,
    RevokeToken,
)
from genie.model.messages.handshake import Hello, Join, RenewCertificate, SignExecutor
from genie.model.release import ProtocolVersions
from genie.model.tenant import TokenKind
from genie.runtime import rpc, tls, wire
from genie.runtime.credentials import connect_authenticated
from genie.runtime.network import TcpNetwork
from genie.tenancy.access import parse_token
from genie.version import __version__
from tests.controller.running_controller import RunningController, running_controller
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def _request_unauthenticated(one: RunningController, request: object) -> object:
    async with rpc.dial(TcpNetwork(), "127.0.0.1", one.port, tls=None, timeout_s=5) as peer:
        return await peer.call(request, timeout_s=5)  # type: ignore[arg-type]


# -- tokens -----------------------------------------------------------------------------------------


async def test_owner_token_file_is_private_and_unchanged_by_restarts(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        path = one.state_dir / "owner.token"
        assert path.stat().st_mode & 0o777 == 0o600
        before = path.read_text()
        await one.restart()
        assert path.read_text() == before
        path.unlink()
        await one.restart()
        assert path.read_text() != before, "a lost token is replaced"
        async with one.client(), one.client(before):
            pass


async def test_requests_without_a_token_are_rejected_on_loopback_too(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        for request in (GetStatus(), ListJobs(), ListNodes(), CreateToken(kind=TokenKind.OWNER)):
            with pytest.raises(TokenMissingError):
                await _request_unauthenticated(one, request)


async def test_wrong_revoked_or_expired_token_is_rejected(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        good = parse_token(await one.token(TokenKind.USER, tenant="blue", ttl_s=60))
        wrong = str(replace(good, secret=good.secret[::-1]))
        unknown = str(replace(good, token_id="0123456789ab"))
        promoted = str(replace(good, kind=TokenKind.OWNER))
        for token in (wrong, unknown, promoted):
            with pytest.raises(TokenRefusedError, match="unknown here or its secret is wrong"):
                await _request_unauthenticated(one, Hello(token=token, version=__version__))
        with pytest.raises(TokenRefusedError, match="not a Genie token"):
            await _request_unauthenticated(one, Hello(token="secret", version=__version__))
        async with one.client(str(good)) as user:
            await user.status()
            await clock.advance(61.0)
            with pytest.raises(TokenRefusedError, match="has expired"):
                await user.status()
        with pytest.raises(TokenRefusedError, match="has expired"):
            await _request_unauthenticated(one, Hello(token=str(good), version=__version__))
        short = parse_token(await one.token(TokenKind.USER))
        async with one.client(str(short)) as user:
            await owner.ask(RevokeToken(token_id=short.token_id))
            await until(lambda: user.peer.is_closed, what="its connections are closed")
        with pytest.raises(TokenRefusedError, match="was revoked"):
            await _request_unauthenticated(one, Hello(token=str(short), version=__version__))


async def test_tokens_are_listed_without_hashes_and_the_last_owner_token_stays(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        await owner.ask(CreateToken(kind=TokenKind.USER, tenant="blue", name="ann"))
        tokens = (await owner.ask(ListTokens())).tokens
        assert {(token.kind, token.tenant, token.name) for token in tokens} == {
            (TokenKind.OWNER, "default", "owner"),
            (TokenKind.USER, "blue", "ann"),
        }
        assert {token.secret_sha256 for token in tokens} == {""}
        last = next(token for token in tokens if token.kind is TokenKind.OWNER)
        with pytest.raises(UsageError, match="last owner token"):
            await owner.ask(RevokeToken(token_id=last.token_id))
        with pytest.raises(AccessError, match="no token"):
            await owner.ask(RevokeToken(token_id="nosuch"))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (CreateToken(kind=TokenKind.NODE), "when a node joins"),
        (CreateToken(kind=TokenKind.USER, tenant="a/b"), "tenant"),
        (CreateToken(kind=TokenKind.USER, name="a b"), "token name"),
        (CreateToken(kind=TokenKind.USER, ttl_s=float("nan")), "ttl_s"),
        (CreateToken(kind=TokenKind.USER, ttl_s=-1), "ttl_s"),
        (CreateToken(kind=TokenKind.JOIN, ttl_s=7200), "ttl_s"),
    ],
)
async def test_invalid_token_request_is_rejected(tmp_path: Path, request_: CreateToken, words: str) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        with pytest.raises(UsageError, match=words):
            await owner.ask(request_)


async def test_each_kind_of_token_allows_only_its_own_requests(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        user = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(user) as client:
            for request in (ListTokens(), CreateToken(kind=TokenKind.OWNER), RevokeToken(token_id="x")):
                with pytest.raises(PermissionError_):
                    await client.ask(request)
        async with one.agent() as agent:
            assert agent.peer is not None
            with pytest.raises(PermissionError_):
                await agent.peer.call(ListJobs(), timeout_s=5)
        async with one.client() as owner:
            with pytest.raises(PermissionError_):
                await owner.ask(RenewCertificate(csr_pem=""))
        join = await one.token(TokenKind.JOIN)
        with pytest.raises(TokenRefusedError, match="only admits"):
            await _request_unauthenticated(one, Hello(token=join, version=__version__))


# With the usual interval between two ticks, a simulated day would have hundreds of thousands of them.
RARE_TICKS = {"node_suspect_s": 120.0, "node_ttl_s": 300.0}


@pytest.fixture
def rare_controller_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genie.controller.terms.leader_work._TICK_INTERVAL_S_MAX", 30.0)


@pytest.mark.usefixtures("rare_controller_ticks")
async def test_expired_and_revoked_tokens_are_deleted_after_a_day(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock, **RARE_TICKS) as one, one.client() as owner:
        await one.token(TokenKind.JOIN)
        gone = parse_token(await one.token(TokenKind.USER))
        kept = parse_token(await one.token(TokenKind.USER))
        await owner.ask(RevokeToken(token_id=gone.token_id))
        assert len((await owner.ask(ListTokens())).tokens) == 4
        await clock.advance(90_010.0)

        async def is_deleted() -> bool:
            await clock.advance(5.0)
            return len((await owner.ask(ListTokens())).tokens) == 2

        await until(is_deleted)
        left = {token.token_id for token in (await owner.ask(ListTokens())).tokens}
        assert kept.token_id in left


async def test_unreadable_owner_token_is_replaced(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        (one.state_dir / "owner.token").unlink()
        os.mkfifo(one.state_dir / "owner.token")
        await one.restart()
        async with one.client() as owner:
            assert (await owner.status()).leading


async def test_owner_token_is_updated_when_tls_changes(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="off") as one:
        before = parse_token((one.state_dir / "owner.token").read_text())
        one.config = replace(one.config, tls="on")
        await one.restart()
        after = parse_token((one.state_dir / "owner.token").read_text())
        assert (after.secret, before.pin) == (before.secret, "-")
        async with one.client() as owner:
            assert (await owner.status()).leading


# -- joining ----------------------------------------------------------------------------------------


async def test_join_token_admits_one_node_within_an_hour(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        token = await one.token(TokenKind.JOIN)
        wish = Join(token=token, requested_node_id="gpu-box", csr_pem="")
        joined = await _request_unauthenticated(one, wish)
        assert joined.node_id == "gpu-box"  # type: ignore[attr-defined]
        with pytest.raises(TokenRefusedError, match="was used already"):
            await _request_unauthenticated(one, wish)
        late = await one.token(TokenKind.JOIN)
        await clock.advance(3601.0)
        with pytest.raises(TokenRefusedError, match="has expired"):
            await _request_unauthenticated(one, replace_token(wish, late))
        user = await one.token(TokenKind.USER)
        with pytest.raises(TokenRefusedError, match="does not admit a node"):
            await _request_unauthenticated(one, replace_token(wish, user))


def replace_token(wish: Join, token: str) -> Join:
    return Join(token=token, requested_node_id=wish.requested_node_id, csr_pem=wish.csr_pem)


async def test_concurrent_joins_with_one_token_admit_one_node(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        wish = Join(token=await one.token(TokenKind.JOIN), requested_node_id="n", csr_pem="")
        answers = await asyncio.gather(
            *(_request_unauthenticated(one, wish) for _ in range(5)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, TokenRefusedError)]
        assert len(refused) == 4


async def test_taken_node_id_gets_a_number(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        ids = []
        for wish in ("box", "box", "box", "x" * 63, "x" * 63):
            token = await one.token(TokenKind.JOIN)
            joined = await _request_unauthenticated(
                one, Join(token=token, requested_node_id=wish, csr_pem="")
            )
            ids.append(joined.node_id)  # type: ignore[attr-defined]
        assert ids == ["box", "box-2", "box-3", "x" * 63, "x" * 61 + "-2"]
        with pytest.raises(GenieError, match="node ID"):
            token = await one.token(TokenKind.JOIN)
            await _request_unauthenticated(one, Join(token=token, requested_node_id="No Good", csr_pem=""))


async def test_nodes_and_used_join_tokens_do_not_count_towards_the_token_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "NON_NODE_TOKENS_MAX", 3)
    monkeypatch.setattr(tokens, "NODE_TOKENS_MAX", 5)
    async with running_controller(tmp_path) as one:
        for number in range(5):
            await one.join(f"n{number}")
        with pytest.raises(UsageError, match="maximum of 5 nodes"):
            await one.join("n5")
        await one.restart()
        with pytest.raises(UsageError, match="maximum of 5 nodes"):
            await one.join("n5")
        with pytest.raises(UsageError, match="maximum of 3 tokens"):
            await one.token(TokenKind.USER)


async def test_join_tokens_are_deleted_an_hour_after_their_use(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        await one.join("n1")
        assert one.controller is not None
        rows = one.controller._ledger.tokens
        [used] = [row.token_id for row in rows.values() if row.kind is TokenKind.JOIN]

        async def deleted() -> bool:
            await clock.advance(120.0)
            return used not in rows

        await clock.advance(3000.0)
        await one.controller._tokens.delete_old_tokens()
        assert used in rows
        await until(deleted)


async def test_removed_node_is_rejected_as_removed_after_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its agent ends its jobs. Only the oldest of very many removed nodes are forgotten."""
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        first, second = await one.join("n1"), await one.join("n2")
        assert one.controller is not None
        registry = one.controller._tokens
        async with one.client() as owner:
            await owner.ask(RemoveNode(node_id="n1"))
            await clock.advance(1.0)
            await owner.ask(RemoveNode(node_id="n2"))
        clock.step_wall(400 * 86400.0)
        await registry.delete_old_tokens()
        for access in (first, second):
            with pytest.raises(NodeRemovedError):
                await registry.authenticate_token(str(access.token))
        monkeypatch.setattr(tokens, "REVOKED_NODE_TOKENS_KEPT", 1)
        await registry.delete_old_tokens()
        with pytest.raises(TokenRefusedError, match="is unknown here"):
            await registry.authenticate_token(str(first.token))
        with pytest.raises(NodeRemovedError):
            await registry.authenticate_token(str(second.token))


async def test_recently_removed_nodes_are_never_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "REVOKED_NODE_TOKENS_KEPT", 0)
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        removed = await one.join("n1")
        async with one.client() as owner:
            await owner.ask(RemoveNode(node_id="n1"))
        clock.step_wall(29 * 86400.0)
        assert one.controller is not None
        await one.controller._tokens.delete_old_tokens()
        with pytest.raises(NodeRemovedError):
            await one.controller._tokens.authenticate_token(str(removed.token))


async def test_two_thousand_nodes_join(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        assert one.controller is not None
        admission, made = one.controller._admission, one.controller._tokens

        async def join() -> str:
            token, _ = await made.create_token(TokenKind.JOIN, tenant="", name="", ttl_s=None)
            request = Join(token=str(token), requested_node_id="gpu", csr_pem="")
            return (await admission.admit_node(request)).node_id

        joined: set[str] = set()
        for _ in range(20):
            joined.update(await asyncio.gather(*(join() for _ in range(105))))
        assert len(joined) == 2100


# -- TLS --------------------------------------------------------------------------------------------


async def test_node_needs_its_certificate_and_its_token_with_tls(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one:
        own, other = await one.join("n1"), await one.join("n2")
        async with FakeAgent(make_node_info("n1")).connected(one.network, own) as agent:
            await agent.register()
            assert (await agent.beat()).leading
        bare = await one.access(str(own.token))
        with pytest.raises(TlsError, match="does not use its certificate"):
            async with connect_authenticated(one.network, bare, timeout_s=5, program="t"):
                pass
        with pytest.raises(TlsError, match="does not use its certificate"):
            async with connect_authenticated(
                one.network, replace(own, tls=other.tls), timeout_s=5, program="t"
            ):
                pass


async def test_invalid_signing_request_does_not_consume_the_join_token(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one:
        token = await one.token(TokenKind.JOIN)
        access = await one.access(token)
        async with rpc.dial(one.network, "127.0.0.1", one.port, tls=access.tls, timeout_s=5) as peer:
            with pytest.raises(TlsError, match="signing request"):
                await peer.call(Join(token=token, requested_node_id="n1", csr_pem="nonsense"), timeout_s=5)
            _, csr_pem = tls.new_key_and_csr()
            joined = await peer.call(Join(token=token, requested_node_id="n1", csr_pem=csr_pem), timeout_s=5)
            assert joined.node_id == "n1"


async def test_certificates_are_signed_only_for_nodes_and_sessions_in_the_ledger(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one, one.client() as owner, one.agent() as agent:
        assert agent.peer is not None
        _, csr_pem = tls.new_key_and_csr()
        renewed = await agent.peer.call(RenewCertificate(csr_pem=csr_pem), timeout_s=5)
        assert tls.validity_period(renewed.certificate_pem)[1] > one.clock.wall_s()
        job = await owner.submit(gpus=1)
        launch = await agent.next_launch()
        with pytest.raises(PermissionError_, match="not a session"):
            ask = SignExecutor(job_id=job.job_id, epoch=launch.placement.epoch, csr_pem=csr_pem)
            await agent.peer.call(ask, timeout_s=5)
        with pytest.raises(FencedError):
            ask = SignExecutor(job_id=job.job_id, epoch=launch.placement.epoch + 1, csr_pem=csr_pem)
            await agent.peer.call(ask, timeout_s=5)


async def test_controller_with_another_ca_does_not_lead(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one:
        for name in ("ca.pem", "ca.key"):
            (one.state_dir / "controller" / name).unlink()
        with pytest.raises(TlsError, match="CA of this controller differs"):
            await one.restart()


@pytest.mark.usefixtures("rare_controller_ticks")
async def test_controller_certificate_is_renewed_at_half_of_its_lifetime(tmp_path: Path) -> None:
    clock = FakeClock(
        wall_s=time.time() - 13.5 * 3600
    )  # the last certificate is also valid by the real clock
    async with running_controller(tmp_path, clock=clock, tls="on", certificate_days=1.0, **RARE_TICKS) as one:
        before = await _server_certificate(one)
        await clock.advance(13 * 3600.0)

        async def replaced() -> bool:
            return await _server_certificate(one) != before

        await until(replaced, what="new connections get a new certificate")
        async with one.client() as owner:
            assert (await owner.status()).leading


@pytest.mark.usefixtures("rare_controller_ticks")
async def test_controller_certificate_is_renewed_after_a_suspend(tmp_path: Path) -> None:
    """The wall clock advances during a suspend; the monotonic clock, by which tasks sleep, does not."""
    clock = FakeClock(wall_s=time.time() - 13 * 3600)
    async with running_controller(tmp_path, clock=clock, tls="on", certificate_days=1.0, **RARE_TICKS) as one:
        before = await _server_certificate(one)
        clock.step_wall(13 * 3600.0)
        await clock.advance(61.0)

        async def replaced() -> bool:
            return await _server_certificate(one) != before

        await until(replaced, what="new connections get a new certificate")


async def _server_certificate(one: RunningController) -> bytes:
    _, writer = await asyncio.open_connection("127.0.0.1", one.port, ssl=tls.unverified_context())
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return shown


# -- tenants ----------------------------------------------------------------------------------------


async def test_user_sees_and_cancels_only_jobs_of_its_tenant(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        blue, red = [await one.token(TokenKind.USER, tenant=name) for name in ("blue", "red")]
        async with (
            one.client() as owner,
            one.client(blue) as ann,
            one.client(red) as bob,
            one.agent(gpus=2) as agent,
        ):
            job = await ann.submit(gpus=1, name="secret-project", request_id="r")
            await agent.start_next()
            other = await bob.submit(gpus=1, request_id="r")
            assert other.job_id != job.job_id, "request IDs are per tenant"
            for key in (job.job_id, "secret-project"):
                for request in (GetJob(job_id=key), CancelJob(job_id=key), ReadLog(job_id=key)):
                    with pytest.raises(JobNotFoundError):
                        await bob.ask(request)
            assert [seen.job_id for seen in (await bob.ask(ListJobs())).jobs] == [other.job_id]
            assert len((await owner.ask(ListJobs())).jobs) == 2
            holds = (await bob.ask(ListNodes())).nodes[0].node_holds.holds
            assert {(hold.job_id, hold.tenant) for hold in holds if hold.job_id != other.job_id} == {("", "")}
            assert (await owner.ask(CancelJob(job_id=job.job_id))).job.stop
            assert (await ann.job(job.job_id)).state is JobState.RUNNING


async def test_tenants_never_share_an_accelerator(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        blue, red = [await one.token(TokenKind.USER, tenant=name) for name in ("blue", "red")]
        async with one.client(blue) as ann, one.client(red) as bob, one.agent(gpus=1) as agent:
            await ann.submit(gpus=1, gpu_milli=200)
            await agent.start_next()
            waits = await bob.submit(gpus=1, gpu_milli=200)
            assert waits.state is JobState.QUEUED
            await ann.submit(gpus=1, gpu_milli=200)


# -- invalid input ----------------------------------------------------------------------------------


def _pack_frame(payload: bytes, *, length: int | None = None, kind: int = 1) -> bytes:
    return struct.pack(">IBI", len(payload) if length is None else length, kind, 1) + payload


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        wire.make_preface(ProtocolVersions(lowest=99, highest=99)),
        wire.make_preface() + _pack_frame(b"", length=0xFFFFFFFF),
        wire.make_preface() + _pack_frame(b"x" * (wire.UNAUTHENTICATED_FRAME_BYTES_MAX + 1)),
        wire.make_preface() + _pack_frame(b"half", length=1000),
        wire.make_preface() + _pack_frame(b"", kind=77),
        wire.make_preface()[:3],
        wire.make_preface() + b"\x00",
    ],
    ids=["http", "tls", "version", "huge", "over", "truncated", "kind", "half-preface", "half-header"],
)
async def test_garbage_closes_only_its_own_connection(tmp_path: Path, sent: bytes) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(20):
            await reader.read()
        writer.close()
        await writer.wait_closed()
        assert (await owner.status()).leading


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80" * 9000, b"\x91" * 5000, b"\x81\xa4type\xa4Nope"])
async def test_frame_that_is_not_a_request_gets_an_error(tmp_path: Path, payload: bytes) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        network = TcpNetwork()
        channel = await network.connect("127.0.0.1", one.port, tls=None, timeout_s=5)
        await channel.send(_pack_frame(payload))
        async with asyncio.timeout(20):
            frame = await channel.receive()
        assert frame.kind is wire.FrameKind.ERROR
        assert isinstance(wire.decode_error(frame.payload, peer="x"), ProtocolError)
        channel.close()
        assert (await owner.status()).leading


async def test_large_frames_are_accepted_only_after_hello(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        big = "x" * 100_000
        assert (await owner.submit("true", big)).spec.command == ("true", big)
        with pytest.raises(TransportError):
            await _request_unauthenticated(one, Hello(token="x" * 100_000, version=__version__))
        with pytest.raises(FrameTooLargeError):
            await owner.submit("true", "x" * 2_000_000)


async def test_connection_without_hello_is_closed(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        async with rpc.dial(TcpNetwork(), "127.0.0.1", one.port, tls=None, timeout_s=5) as silent:
            await until(lambda: one.controller is not None and len(one.controller._connections) == 2)
            await clock.advance(9.0)
            assert not silent.is_closed
            await clock.advance(1.5)
            await until(lambda: silent.is_closed)
        assert (await owner.status()).leading


async def test_number_of_requests_before_hello_is_limited(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        async with rpc.dial(TcpNetwork(), "127.0.0.1", one.port, tls=None, timeout_s=5) as peer:
            guesses = 0
            with pytest.raises(TransportError):
                for guesses in range(100):  # noqa: B007
                    with pytest.raises(AccessError):
                        await peer.call(Hello(token="guess", version=__version__), timeout_s=5)
        assert guesses < 20
        assert (await owner.status()).leading


async def test_hello_is_accepted_once(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        user = await one.token(TokenKind.USER)
        with pytest.raises(ProtocolError, match="already"):
            await owner.ask(Hello(token=user, version=__version__))
