"""Joining: whom the token is shown to, what is written, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.agent.identity import (
    find_node_dir,
    read_identity,
    renew_certificate,
    write_identity,
)
from genie.agent.joining import join
from genie.errors import (
    NameInvalidError,
    NothingListensError,
    TlsError,
    TokenMissingError,
    TokenRefusedError,
    UsageError,
)
from genie.model.names import parse_endpoint
from genie.model.tenant import TokenKind
from genie.runtime import files, tls
from genie.runtime.network import TcpNetwork
from tests.fakes.controller import HOST, FakeController


async def try_join(fake: FakeController, state_dir: Path, *, token: str, wish: str = "n1") -> Path:
    return await join(HOST, fake.port, token, state_dir=state_dir, node_id_wish=wish, network=TcpNetwork())


async def test_a_node_gets_an_identity_of_its_own(tmp_path: Path) -> None:
    async with FakeController(tmp_path / "c", use_tls=True).listening() as fake:
        node_dir = await try_join(fake, tmp_path / "s", token=str(fake.token(TokenKind.JOIN)))
        access = read_identity(node_dir)
    assert node_dir == tmp_path / "s" / "agents" / "n1"
    assert (access.host, access.port, access.token.kind) == (HOST, fake.port, TokenKind.NODE)
    assert access.tls is not None
    assert {path.stat().st_mode & 0o777 for path in node_dir.iterdir()} == {0o600}


async def test_the_token_is_not_shown_to_a_server_of_another_cluster(tmp_path: Path) -> None:
    async with FakeController(tmp_path / "c", use_tls=True).listening() as fake:
        other = FakeController(tmp_path / "other", use_tls=True)
        with pytest.raises(TlsError, match="another fingerprint"):
            await try_join(fake, tmp_path / "s", token=str(other.token(TokenKind.JOIN)))
        assert fake.joins == []
    assert not (tmp_path / "s" / "agents").exists()


async def test_a_token_that_has_expired_leaves_nothing_behind(tmp_path: Path) -> None:
    fake = FakeController(tmp_path / "c", use_tls=True, join_error=TokenRefusedError("token x has expired"))
    async with fake.listening():
        with pytest.raises(TokenRefusedError, match="has expired"):
            await try_join(fake, tmp_path / "s", token=str(fake.token(TokenKind.JOIN)))
    assert not (tmp_path / "s" / "agents").exists()


@pytest.mark.parametrize("kind", [TokenKind.OWNER, TokenKind.USER, TokenKind.NODE])
async def test_only_a_join_token_joins(tmp_path: Path, controller: FakeController, kind: TokenKind) -> None:
    with pytest.raises(TokenRefusedError, match=f"a {kind} token cannot be used to join"):
        await try_join(controller, tmp_path / "s", token=str(controller.token(kind)))


async def test_a_wish_with_odd_characters_is_refused_before_anything_is_sent(
    tmp_path: Path, controller: FakeController
) -> None:
    with pytest.raises(NameInvalidError):
        await try_join(controller, tmp_path / "s", token=str(controller.token(TokenKind.JOIN)), wish="../x")
    assert controller.joins == []


async def test_nothing_listens(tmp_path: Path, controller: FakeController) -> None:
    token = str(controller.token(TokenKind.JOIN))
    with pytest.raises(NothingListensError):
        await join(HOST, 1, token, state_dir=tmp_path, node_id_wish="n1", network=TcpNetwork())


def test_a_directory_without_a_token_is_not_a_node(tmp_path: Path) -> None:
    with pytest.raises(TokenMissingError, match="has no node's token"):
        read_identity(tmp_path)


def test_a_node_without_tls_only_speaks_to_its_own_machine(tmp_path: Path) -> None:
    fake = FakeController(tmp_path / "c")
    write_identity(
        tmp_path / "n1",
        token=str(fake.token(TokenKind.NODE)),
        certificate_pem="",
        key_pem=b"",
        ca_pem="",
        controller=("10.0.0.1", 5555),
    )
    with pytest.raises(TlsError, match="is not this machine"):
        read_identity(tmp_path / "n1")
    assert read_identity(tmp_path / "n1", controller=("127.0.0.1", 1)).port == 1


def test_the_node_of_this_machine_is_the_only_one_or_the_named_one(tmp_path: Path) -> None:
    with pytest.raises(TokenMissingError, match="no node of a cluster"):
        find_node_dir(tmp_path, None)
    files.write_private(tmp_path / "agents" / "a" / "node.token", b"")
    assert find_node_dir(tmp_path, None).name == "a"
    files.write_private(tmp_path / "agents" / "b" / "node.token", b"")
    with pytest.raises(UsageError, match="several nodes: a, b"):
        find_node_dir(tmp_path, None)
    assert find_node_dir(tmp_path, "b").name == "b"


async def test_a_renewal_that_was_cut_short_is_finished_at_the_next_start(tmp_path: Path) -> None:
    async with FakeController(tmp_path / "c", use_tls=True).listening() as fake:
        node_dir = await try_join(fake, tmp_path / "s", token=str(fake.token(TokenKind.JOIN)))
        key, csr = tls.new_key_and_csr()
        files.write_private(node_dir / "node.key.next", key)
        read_identity(node_dir)  # the certificate has not changed yet: the old key is the right one
        assert not (node_dir / "node.key.next").exists()
        files.write_private(node_dir / "node.key.next", key)
        signed = fake.authority.issue(csr, name=tls.node_name("n1"), days=1, now=0)
        files.write_private(node_dir / "node.pem", signed.encode())
        read_identity(node_dir)  # it has: the new key is
        assert (node_dir / "node.key").read_bytes() == key


async def test_a_fresh_certificate_is_not_renewed(tmp_path: Path) -> None:
    async with FakeController(tmp_path / "c", use_tls=True).listening() as fake:
        node_dir = await try_join(fake, tmp_path / "s", token=str(fake.token(TokenKind.JOIN)))
    due = tls.renew_at((node_dir / "node.pem").read_text())
    assert await renew_certificate(node_dir, None, now=due - 5, timeout_s=1) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("gpu-box:5556", ("gpu-box", 5556)),
        ("gpu-box", ("gpu-box", 5555)),
        ("[::1]:9", ("::1", 9)),
        ("::1", ("::1", 5555)),
        ("[::1]", ("::1", 5555)),
    ],
)
def test_an_address_is_read(text: str, address: tuple[str, int]) -> None:
    assert parse_endpoint(text, port=5555) == address


@pytest.mark.parametrize("text", ["", ":1", "a:0", "a:65536", "a:b", "1.2.3.4:1:1"])
def test_what_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="address"):
        parse_endpoint(text, port=5555)
