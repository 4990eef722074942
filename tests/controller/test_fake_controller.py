"""Contract of the controller for clients: the fake controller answers like the real one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from genie.errors import ProtocolError, TokenMissingError, TokenRefusedError
from genie.model.messages import Done, GetStatus, ListNodes, SessionEnd, SessionHeartbeat
from genie.model.messages.handshake import FetchTrust, Hello
from genie.model.tenant import TokenKind
from genie.runtime import rpc
from genie.runtime.network import TcpNetwork
from genie.tenancy.access import NO_PIN, new_token
from genie.version import __version__
from tests.controller.running_controller import running_controller
from tests.fakes.agent import make_node_info
from tests.fakes.controller import HOST, OWNER_TOKEN, FakeController

pytestmark = pytest.mark.parametrize("kind", ["real", "fake"])
CALL_S = 10.0


@asynccontextmanager
async def connect_unauthenticated(kind: str, folder: Path) -> AsyncIterator[tuple[rpc.Peer, str]]:
    """A connection that is not authenticated yet, and the owner token."""
    if kind == "fake":
        fake = FakeController(only_token=OWNER_TOKEN, nodes=(make_node_info("n1"),))
        async with (
            fake.listening(),
            rpc.dial(TcpNetwork(), HOST, fake.port, tls=None, timeout_s=CALL_S) as peer,
        ):
            yield peer, str(OWNER_TOKEN)
        return
    async with (
        running_controller(folder) as one,
        one.agent("n1"),
        rpc.dial(one.network, HOST, one.port, tls=None, timeout_s=CALL_S) as peer,
    ):
        yield peer, (one.state_dir / "owner.token").read_text()


def hello(token: str) -> Hello:
    return Hello(token=token, program="test", version=__version__)


async def test_request_before_hello_is_rejected(kind: str, tmp_path: Path) -> None:
    async with connect_unauthenticated(kind, tmp_path) as (peer, _):
        assert (await peer.call(FetchTrust(), timeout_s=CALL_S)).ca_pem == ""
        with pytest.raises(TokenMissingError):
            await peer.call(ListNodes(), timeout_s=CALL_S)


async def test_hello_with_an_unknown_token_is_rejected(kind: str, tmp_path: Path) -> None:
    unknown = new_token(TokenKind.OWNER, token_id="unknown", secret=b"\x02" * 32, pin=NO_PIN)
    async with connect_unauthenticated(kind, tmp_path) as (peer, _):
        for token in (str(unknown), "not a token"):
            with pytest.raises(TokenRefusedError):
                await peer.call(hello(token), timeout_s=CALL_S)


async def test_second_hello_is_rejected(kind: str, tmp_path: Path) -> None:
    async with connect_unauthenticated(kind, tmp_path) as (peer, token):
        welcome = await peer.call(hello(token), timeout_s=CALL_S)
        assert (welcome.kind, welcome.tenant, welcome.leading) == (TokenKind.OWNER, "default", True)
        with pytest.raises(ProtocolError):
            await peer.call(hello(token), timeout_s=CALL_S)


async def test_client_requests_are_answered(kind: str, tmp_path: Path) -> None:
    async with connect_unauthenticated(kind, tmp_path) as (peer, token):
        welcome = await peer.call(hello(token), timeout_s=CALL_S)
        nodes = (await peer.call(ListNodes(), timeout_s=CALL_S)).nodes
        beat = SessionHeartbeat(node=make_node_info("laptop"), interval_s=1.0)
        assert [view.info.node_id for view in nodes] == ["n1"]
        assert [view.node_holds.holds for view in (await peer.call(beat, timeout_s=CALL_S)).nodes] == [()]
        status = await peer.call(GetStatus(), timeout_s=CALL_S)
        assert (status.cluster_id, status.version) == (welcome.cluster_id, welcome.version)
        assert (status.leading, status.store_ok) == (True, True)
        assert isinstance(await peer.call(SessionEnd(node_id="laptop"), timeout_s=CALL_S), Done)
