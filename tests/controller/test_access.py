"""Who gets in, and what they see: tokens, joining, tenants, and what garbage does to the server."""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest

from genie.errors import (
    AccessError,
    FencedError,
    FrameTooLargeError,
    GenieError,
    JobNotFoundError,
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
    Hello,
    Join,
    ListJobs,
    ListNodes,
    ListTokens,
    ReadLog,
    RenewCertificate,
    RevokeToken,
    SignExecutor,
)
from genie.model.tenant import TokenKind
from genie.runtime import rpc, tls, wire
from genie.runtime.credentials import greet
from genie.runtime.network import TcpNetwork
from genie.tenancy.access import parse_token
from tests.controller.standing import Standing, standing
from tests.fakes.agent import FakeAgent, node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def _stranger_asks(one: Standing, request: object) -> object:
    async with rpc.dial(TcpNetwork(), "127.0.0.1", one.port, tls=None, timeout_s=5) as peer:
        return await peer.call(request, timeout_s=5)  # type: ignore[arg-type]


# -- tokens ------------------------------------------------------------------------------------


async def test_the_owners_token_is_private_and_stays_the_same(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        path = one.state_dir / "owner.token"
        assert path.stat().st_mode & 0o777 == 0o600
        before = path.read_text()
        await one.restart()
        assert path.read_text() == before
        path.unlink()
        await one.restart()
        assert path.read_text() != before, "a lost one is replaced"
        async with one.client(), one.client(before):
            pass


async def test_nothing_is_answered_without_a_token_on_loopback_too(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        for request in (GetStatus(), ListJobs(), ListNodes(), CreateToken(kind=TokenKind.OWNER)):
            with pytest.raises(TokenMissingError):
                await _stranger_asks(one, request)


async def test_a_wrong_or_revoked_or_expired_token_opens_nothing(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as owner:
        good = parse_token(await one.token(TokenKind.USER, tenant="blue", ttl_s=60))
        wrong = str(replace(good, secret=good.secret[::-1]))
        unknown = str(replace(good, token_id="0123456789ab"))
        promoted = str(replace(good, kind=TokenKind.OWNER))
        for token in (wrong, unknown, promoted):
            with pytest.raises(TokenRefusedError, match="unknown here or its secret is wrong"):
                await _stranger_asks(one, Hello(token=token, version="0"))
        with pytest.raises(TokenRefusedError, match="not a Genie token"):
            await _stranger_asks(one, Hello(token="secret", version="0"))
        async with one.client(str(good)) as user:
            await user.status()
            await clock.advance(61.0)
            with pytest.raises(TokenRefusedError, match="has expired"):
                await user.status()
        with pytest.raises(TokenRefusedError, match="has expired"):
            await _stranger_asks(one, Hello(token=str(good), version="0"))
        short = parse_token(await one.token(TokenKind.USER))
        async with one.client(str(short)) as user:
            await owner.ask(RevokeToken(token_id=short.token_id))
            await until(lambda: user.peer.is_closed, what="its connections are closed")
        with pytest.raises(TokenRefusedError, match="was revoked"):
            await _stranger_asks(one, Hello(token=str(short), version="0"))


async def test_tokens_are_listed_without_their_hashes_and_the_last_owner_stays(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        await owner.ask(CreateToken(kind=TokenKind.USER, tenant="blue", name="ann"))
        tokens = (await owner.ask(ListTokens())).tokens
        assert {(token.kind, token.tenant, token.name) for token in tokens} == {
            (TokenKind.OWNER, "default", "owner"),
            (TokenKind.USER, "blue", "ann"),
        }
        assert {token.secret_sha256 for token in tokens} == {""}
        last = next(token for token in tokens if token.kind is TokenKind.OWNER)
        with pytest.raises(UsageError, match="last owner's token"):
            await owner.ask(RevokeToken(token_id=last.token_id))
        with pytest.raises(AccessError, match="no token"):
            await owner.ask(RevokeToken(token_id="nosuch"))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (CreateToken(kind=TokenKind.NODE), "when it joins"),
        (CreateToken(kind=TokenKind.USER, tenant="a/b"), "tenant"),
        (CreateToken(kind=TokenKind.USER, name="a b"), "token name"),
        (CreateToken(kind=TokenKind.USER, ttl_s=float("nan")), "ttl_s"),
        (CreateToken(kind=TokenKind.USER, ttl_s=-1), "ttl_s"),
        (CreateToken(kind=TokenKind.JOIN, ttl_s=7200), "ttl_s"),
    ],
)
async def test_a_token_that_makes_no_sense_is_refused(
    tmp_path: Path, request_: CreateToken, words: str
) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        with pytest.raises(UsageError, match=words):
            await owner.ask(request_)


async def test_each_kind_of_token_may_ask_only_its_own(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
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
        with pytest.raises(TokenRefusedError, match="only joins"):
            await _stranger_asks(one, Hello(token=join, version="0"))


async def test_spent_tokens_are_forgotten_after_a_day_and_good_ones_stay(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as owner:
        await one.token(TokenKind.JOIN)
        gone = parse_token(await one.token(TokenKind.USER))
        kept = parse_token(await one.token(TokenKind.USER))
        await owner.ask(RevokeToken(token_id=gone.token_id))
        assert len((await owner.ask(ListTokens())).tokens) == 4
        await clock.advance(90_010.0)

        async def forgotten() -> bool:
            await clock.advance(5.0)
            return len((await owner.ask(ListTokens())).tokens) == 2

        await until(forgotten)
        left = {token.token_id for token in (await owner.ask(ListTokens())).tokens}
        assert kept.token_id in left


async def test_the_owners_token_follows_a_change_of_tls(tmp_path: Path) -> None:
    async with standing(tmp_path, tls="off") as one:
        before = parse_token((one.state_dir / "owner.token").read_text())
        one.config = replace(one.config, tls="on")
        await one.restart()
        after = parse_token((one.state_dir / "owner.token").read_text())
        assert (after.secret, before.pin) == (before.secret, "-")
        async with one.client() as owner:
            assert (await owner.status()).leading


# -- joining -----------------------------------------------------------------------------------


async def test_a_join_token_admits_one_node_once_within_its_hour(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one:
        token = await one.token(TokenKind.JOIN)
        wish = Join(token=token, node_id_wish="gpu-box", csr_pem="")
        joined = await _stranger_asks(one, wish)
        assert joined.node_id == "gpu-box"  # type: ignore[attr-defined]
        with pytest.raises(TokenRefusedError, match="was used already"):
            await _stranger_asks(one, wish)
        late = await one.token(TokenKind.JOIN)
        await clock.advance(3601.0)
        with pytest.raises(TokenRefusedError, match="has expired"):
            await _stranger_asks(one, replace_token(wish, late))
        user = await one.token(TokenKind.USER)
        with pytest.raises(TokenRefusedError, match="does not admit a node"):
            await _stranger_asks(one, replace_token(wish, user))


def replace_token(wish: Join, token: str) -> Join:
    return Join(token=token, node_id_wish=wish.node_id_wish, csr_pem=wish.csr_pem)


async def test_two_joins_with_one_token_at_once_admit_one_node(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        wish = Join(token=await one.token(TokenKind.JOIN), node_id_wish="n", csr_pem="")
        answers = await asyncio.gather(*(_stranger_asks(one, wish) for _ in range(5)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, TokenRefusedError)]
        assert len(refused) == 4


async def test_a_node_id_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        ids = []
        for wish in ("box", "box", "box", "x" * 63, "x" * 63):
            token = await one.token(TokenKind.JOIN)
            joined = await _stranger_asks(one, Join(token=token, node_id_wish=wish, csr_pem=""))
            ids.append(joined.node_id)  # type: ignore[attr-defined]
        assert ids == ["box", "box-2", "box-3", "x" * 63, "x" * 61 + "-2"]
        with pytest.raises(GenieError, match="node id"):
            token = await one.token(TokenKind.JOIN)
            await _stranger_asks(one, Join(token=token, node_id_wish="No Good", csr_pem=""))


# -- TLS ---------------------------------------------------------------------------------------


async def test_with_tls_a_node_needs_its_own_certificate_beside_its_token(tmp_path: Path) -> None:
    async with standing(tmp_path, tls="on") as one:
        own, other = await one.join("n1"), await one.join("n2")
        async with FakeAgent(node_info("n1")).connected(one.network, own) as agent:
            await agent.register()
            assert (await agent.beat()).leading
        bare = await one.access(str(own.token))
        with pytest.raises(TlsError, match="does not show its certificate"):
            async with greet(one.network, bare, timeout_s=5, program="t"):
                pass
        with pytest.raises(TlsError, match="does not show its certificate"):
            async with greet(one.network, replace(own, tls=other.tls), timeout_s=5, program="t"):
                pass


async def test_a_bad_signing_request_does_not_use_the_join_token_up(tmp_path: Path) -> None:
    async with standing(tmp_path, tls="on") as one:
        token = await one.token(TokenKind.JOIN)
        access = await one.access(token)
        async with rpc.dial(one.network, "127.0.0.1", one.port, tls=access.tls, timeout_s=5) as peer:
            with pytest.raises(TlsError, match="signing request"):
                await peer.call(Join(token=token, node_id_wish="n1", csr_pem="nonsense"), timeout_s=5)
            _, csr_pem = tls.new_key_and_csr()
            joined = await peer.call(Join(token=token, node_id_wish="n1", csr_pem=csr_pem), timeout_s=5)
            assert joined.node_id == "n1"


async def test_certificates_are_renewed_and_signed_only_for_what_the_ledger_has(tmp_path: Path) -> None:
    async with standing(tmp_path, tls="on") as one, one.client() as owner, one.agent() as agent:
        assert agent.peer is not None
        _, csr_pem = tls.new_key_and_csr()
        renewed = await agent.peer.call(RenewCertificate(csr_pem=csr_pem), timeout_s=5)
        assert tls.validity(renewed.certificate_pem)[1] > one.clock.wall_s()
        job = await owner.submit(gpus=1)
        launch = await agent.next_launch()
        with pytest.raises(PermissionError_, match="not a session"):
            ask = SignExecutor(job_id=job.job_id, epoch=launch.placement.epoch, csr_pem=csr_pem)
            await agent.peer.call(ask, timeout_s=5)
        with pytest.raises(FencedError):
            ask = SignExecutor(job_id=job.job_id, epoch=launch.placement.epoch + 1, csr_pem=csr_pem)
            await agent.peer.call(ask, timeout_s=5)


async def test_a_controller_with_another_ca_than_the_clusters_does_not_lead(tmp_path: Path) -> None:
    async with standing(tmp_path, tls="on") as one:
        for name in ("ca.pem", "ca.key"):
            (one.state_dir / "controller" / name).unlink()
        with pytest.raises(TlsError, match="another CA than the cluster"):
            await one.restart()


async def test_the_controllers_own_certificate_is_replaced_at_half_of_its_life(tmp_path: Path) -> None:
    clock = FakeClock(wall_s=time.time() - 13.5 * 3600)  # what is issued last is good by the real clock, too
    async with standing(tmp_path, clock=clock, tls="on", certificate_days=1.0) as one:
        before = await _shown_certificate(one)
        await clock.advance(13 * 3600.0)

        async def replaced() -> bool:
            return await _shown_certificate(one) != before

        await until(replaced, what="new connections are shown a new one")
        async with one.client() as owner:
            assert (await owner.status()).leading


async def _shown_certificate(one: Standing) -> bytes:
    _, writer = await asyncio.open_connection("127.0.0.1", one.port, ssl=tls.unverified_context())
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return shown


# -- tenants -----------------------------------------------------------------------------------


async def test_a_user_sees_and_stops_its_own_tenants_jobs_only(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
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
            assert other.job_id != job.job_id, "request ids of two tenants do not meet"
            for key in (job.job_id, "secret-project"):
                for request in (GetJob(job_id=key), CancelJob(job_id=key), ReadLog(job_id=key)):
                    with pytest.raises(JobNotFoundError):
                        await bob.ask(request)
            assert [seen.job_id for seen in (await bob.ask(ListJobs())).jobs] == [other.job_id]
            assert len((await owner.ask(ListJobs())).jobs) == 2
            holds = (await bob.ask(ListNodes())).nodes[0].ledger.holds
            assert {(hold.job_id, hold.tenant) for hold in holds if hold.job_id != other.job_id} == {("", "")}
            assert (await owner.ask(CancelJob(job_id=job.job_id))).job.stop
            assert (await ann.job(job.job_id)).state is JobState.RUNNING


async def test_tenants_never_share_an_accelerator(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        blue, red = [await one.token(TokenKind.USER, tenant=name) for name in ("blue", "red")]
        async with one.client(blue) as ann, one.client(red) as bob, one.agent(gpus=1) as agent:
            await ann.submit(gpus=1, gpu_milli=200)
            await agent.start_next()
            waits = await bob.submit(gpus=1, gpu_milli=200)
            assert waits.state is JobState.QUEUED
            await ann.submit(gpus=1, gpu_milli=200)


# -- garbage -----------------------------------------------------------------------------------


def _frame(payload: bytes, *, length: int | None = None, kind: int = 1) -> bytes:
    return struct.pack(">IBI", len(payload) if length is None else length, kind, 1) + payload


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        wire.preface(version=99),
        wire.preface() + _frame(b"", length=0xFFFFFFFF),
        wire.preface() + _frame(b"x" * (wire.FRAME_BYTES_MAX_STRANGER + 1)),
        wire.preface() + _frame(b"half", length=1000),
        wire.preface() + _frame(b"", kind=77),
        wire.preface()[:3],
        wire.preface() + b"\x00",
    ],
    ids=["http", "tls", "version", "huge", "over", "truncated", "kind", "half-preface", "half-header"],
)
async def test_garbage_ends_its_own_connection_and_nobody_elses(tmp_path: Path, sent: bytes) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()
        await writer.wait_closed()
        assert (await owner.status()).leading


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80" * 9000, b"\x91" * 5000, b"\x81\xa4type\xa4Nope"])
async def test_a_frame_that_is_no_request_is_answered_with_an_error(tmp_path: Path, payload: bytes) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        network = TcpNetwork()
        channel = await network.connect("127.0.0.1", one.port, tls=None, timeout_s=5)
        await channel.send(_frame(payload))
        async with asyncio.timeout(5):
            frame = await channel.receive()
        assert frame.kind is wire.Kind.ERROR
        assert isinstance(wire.decode_error(frame.payload, peer="x"), ProtocolError)
        channel.close()
        assert (await owner.status()).leading


async def test_a_large_frame_is_taken_only_after_hello(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        big = "x" * 100_000
        assert (await owner.submit("true", big)).spec.command == ("true", big)
        with pytest.raises(TransportError):
            await _stranger_asks(one, Hello(token="x" * 100_000, version=""))
        with pytest.raises(FrameTooLargeError):
            await owner.submit("true", "x" * 2_000_000)


async def test_a_stranger_who_says_no_hello_is_dropped(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as owner:
        async with rpc.dial(TcpNetwork(), "127.0.0.1", one.port, tls=None, timeout_s=5) as silent:
            await until(lambda: one.controller is not None and len(one.controller._service._connections) == 2)
            await clock.advance(9.0)
            assert not silent.is_closed
            await clock.advance(1.5)
            await until(lambda: silent.is_closed)
        assert (await owner.status()).leading


async def test_a_stranger_has_few_guesses(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        async with rpc.dial(TcpNetwork(), "127.0.0.1", one.port, tls=None, timeout_s=5) as peer:
            guesses = 0
            with pytest.raises(TransportError):
                for guesses in range(100):  # noqa: B007
                    with pytest.raises(AccessError):
                        await peer.call(Hello(token="guess", version=""), timeout_s=5)
        assert guesses < 20
        assert (await owner.status()).leading


async def test_hello_is_said_once(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        user = await one.token(TokenKind.USER)
        with pytest.raises(ProtocolError, match="already"):
            await owner.ask(Hello(token=user, version=""))
