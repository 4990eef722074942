"""A node that was off until its certificate had expired, with a real controller."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from genie.agent.agent import Agent
from genie.agent.identity import find_node_dir, read_identity, renew_certificate_if_due_and_get_wait_s
from genie.agent.joining import join_cluster
from genie.agent.launcher import ShimLauncher
from genie.errors import CertificateExpiredError, ConnectionLostError, GenieError, TlsError, TokenRefusedError
from genie.model.messages import ListNodes, RevokeToken
from genie.model.messages.handshake import RecoverCertificate
from genie.model.tenant import TokenKind
from genie.processes.clock import SystemClock
from genie.processes.tasks import run_inline
from genie.runtime import rpc, tls
from genie.runtime.credentials import connect_authenticated
from genie.runtime.network import TcpNetwork
from genie.tenancy.access import parse_token
from tests.agent.conftest import FAST, TwoGpuInventory
from tests.controller.running_controller import RunningController, running_controller
from tests.waiting import until


async def _join_with_expired_certificate(
    one: RunningController, state_dir: Path, *, expired_days: float
) -> Path:
    """A node whose certificate expired this many days ago."""
    token = await one.token(TokenKind.JOIN)
    node_dir = await join_cluster(
        "127.0.0.1", one.port, token, state_dir=state_dir, requested_node_id="n1", network=TcpNetwork()
    )
    csr_pem = tls.new_csr((node_dir / "node.key").read_bytes())
    (node_dir / "node.pem").write_text(
        _issue_node_certificate(one, csr_pem, now=time.time() - (expired_days + 7) * 86400)
    )
    return node_dir


def _issue_node_certificate(one: RunningController, csr_pem: str, *, now: float, node_id: str = "n1") -> str:
    assert one.controller is not None
    authority = one.controller._certificates._authority
    assert authority is not None
    return authority.issue(csr_pem, name=tls.node_certificate_name(node_id), days=7, now=now)


def _make_agent(state_dir: Path) -> Agent:
    node_dir = find_node_dir(state_dir, "n1")
    return Agent(
        FAST,
        node_dir=node_dir,
        access=read_identity(node_dir),
        network=TcpNetwork(),
        clock=SystemClock(),
        rng=random.Random(1),
        inventory=TwoGpuInventory(),
        launcher=ShimLauncher(),
    )


async def test_node_with_an_expired_certificate_returns_within_the_grace_period(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one, one.client() as owner:
        node_dir = await _join_with_expired_certificate(one, tmp_path / "node", expired_days=30)
        agent = _make_agent(tmp_path / "node")
        async with asyncio.TaskGroup() as group:
            group.create_task(agent.run())

            async def is_registered() -> bool:
                return [view.info.node_id for view in (await owner.ask(ListNodes())).nodes] == ["n1"]

            await until(is_registered)
            agent.stop()
        assert tls.validity_period((node_dir / "node.pem").read_text())[1] > time.time()


async def test_running_agent_renews_an_expired_certificate(tmp_path: Path) -> None:
    """As after a suspend of the machine: the process is the same."""
    async with running_controller(tmp_path, tls="on") as one, one.client() as owner:
        node_dir = await _join_with_expired_certificate(one, tmp_path / "node", expired_days=30)
        expired_pem = (node_dir / "node.pem").read_text()
        connection = _make_agent(tmp_path / "node")._connection
        await renew_certificate_if_due_and_get_wait_s(
            node_dir, connection, now=time.time(), timeout_s=5, offload=run_inline
        )
        assert (node_dir / "node.pem").read_text() != expired_pem
        async with connect_authenticated(TcpNetwork(), connection.access, timeout_s=5, program="agent") as (
            _,
            welcome,
        ):
            assert welcome.kind is TokenKind.NODE
        assert (await owner.status()).leading


async def test_node_whose_certificate_expired_beyond_the_grace_period_must_join_again(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on", node_grace_days=20.0) as one:
        await _join_with_expired_certificate(one, tmp_path / "node", expired_days=30)
        with pytest.raises(
            CertificateExpiredError, match="expired 30 days ago; the grace period is 20 days"
        ) as caught:
            await _make_agent(tmp_path / "node").run()
        assert "genie forget n1" in str(caught.value.hint)


async def _error_of_recovery(one: RunningController, request: RecoverCertificate) -> GenieError:
    trusted = (await one.access()).tls
    async with rpc.dial(TcpNetwork(), "127.0.0.1", one.port, tls=trusted, timeout_s=5) as peer:
        with pytest.raises(GenieError) as caught:
            await peer.call(request, timeout_s=5)
    return caught.value


async def test_expired_certificate_is_renewed_only_for_its_key_its_node_and_its_token(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one, one.client() as owner:
        node_dir = await _join_with_expired_certificate(one, tmp_path / "node", expired_days=30)
        csr_pem = tls.new_csr((node_dir / "node.key").read_bytes())
        own = RecoverCertificate(
            token=(node_dir / "node.token").read_text(),
            certificate_pem=(node_dir / "node.pem").read_text(),
            csr_pem=csr_pem,
        )
        stolen = replace(own, csr_pem=tls.new_key_and_csr()[1])
        assert isinstance(await _error_of_recovery(one, stolen), TlsError), "without the key"
        other_pem = _issue_node_certificate(one, csr_pem, now=time.time() - 30 * 86400, node_id="n2")
        assert isinstance(await _error_of_recovery(one, replace(own, certificate_pem=other_pem)), TlsError)
        foreign = tls.CertificateAuthority.create(now=time.time() - 30 * 86400)
        foreign_pem = foreign.issue(
            csr_pem, name=tls.node_certificate_name("n1"), days=7, now=time.time() - 30 * 86400
        )
        assert isinstance(await _error_of_recovery(one, replace(own, certificate_pem=foreign_pem)), TlsError)
        assert isinstance(await _error_of_recovery(one, replace(own, certificate_pem="x")), TlsError)
        user = replace(own, token=await one.token(TokenKind.USER))
        assert isinstance(await _error_of_recovery(one, user), TokenRefusedError)
        await owner.ask(RevokeToken(token_id=parse_token(own.token).token_id))
        assert isinstance(await _error_of_recovery(one, own), TokenRefusedError)


async def test_rejected_certificate_is_not_reported_as_another_program(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one:
        await _join_with_expired_certificate(one, tmp_path / "node", expired_days=30)
        access = read_identity(find_node_dir(tmp_path / "node", "n1"))
        with pytest.raises(ConnectionLostError) as caught:
            async with connect_authenticated(TcpNetwork(), access, timeout_s=5, program="agent"):
                pass
        assert caught.value.retryable
        assert "not Genie" not in str(caught.value)
