"""How a process finds its cluster: address, token, trusted CA, Hello; and the errors."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from genie.config import ClusterConfig
from genie.errors import (
    ConfigError,
    StoreFullError,
    TlsError,
    TokenMissingError,
    TokenRefusedError,
    UsageError,
)
from genie.model.messages import GetStatus
from genie.model.tenant import TokenKind
from genie.processes import files
from genie.runtime import tls
from genie.runtime.credentials import (
    Access,
    LocalCluster,
    TokenSource,
    connect_authenticated,
    find_access,
    find_address,
    make_pinned_client_tls,
    store_trusted_ca,
)
from genie.runtime.logins import remove_login, store_login
from genie.runtime.network import Channel, ClientTls, TcpNetwork
from genie.tenancy.access import NO_PIN, Token, new_token, parse_token
from tests.controller.running_controller import running_controller as standing

NETWORK = TcpNetwork()


async def test_access_is_found_on_the_machine_of_the_cluster(tmp_path: Path) -> None:
    async with standing(tmp_path, tls="on") as one:
        access = await find_access(ClusterConfig(), state_dir=one.state_dir, network=NETWORK, timeout_s=5)
        assert (access.host, access.port) == ("127.0.0.1", one.port)
        async with connect_authenticated(NETWORK, access, timeout_s=5, program="test") as (peer, welcome):
            assert welcome.leading
            assert (await peer.call(GetStatus(), timeout_s=5)).cluster_id == welcome.cluster_id


async def test_remote_client_needs_only_a_token_and_fetches_the_ca_once(tmp_path: Path) -> None:
    async with standing(tmp_path, tls="on") as one:
        token = (one.state_dir / "owner.token").read_text()
        config = ClusterConfig(master_addr="127.0.0.1", master_port=one.port, token=token)
        away = tmp_path / "laptop"
        access = await find_access(config, state_dir=away, network=NETWORK, timeout_s=5)
        (kept,) = (away / "trust").iterdir()
        assert tls.fingerprint(kept.read_text()) == access.token.pin
        before = kept.stat().st_mtime_ns
        await find_access(config, state_dir=away, network=NETWORK, timeout_s=5)
        assert kept.stat().st_mtime_ns == before
        for spoilt in (b"spoiled", b"\xff\xfe\x80"):
            kept.write_bytes(spoilt)
            await find_access(config, state_dir=away, network=NETWORK, timeout_s=5)
            assert tls.fingerprint(kept.read_text()) == access.token.pin


async def test_token_is_never_sent_to_another_cluster(tmp_path: Path) -> None:
    async with standing(tmp_path / "a", tls="on") as one, standing(tmp_path / "b", tls="on") as other:
        token = (other.state_dir / "owner.token").read_text()
        config = ClusterConfig(master_addr="127.0.0.1", master_port=one.port, token=token)
        with pytest.raises(TlsError, match="is not the cluster that this token is for"):
            await find_access(config, state_dir=tmp_path / "away", network=NETWORK, timeout_s=5)
        with pytest.raises(TlsError, match="of another cluster"):
            access = await find_access(config, state_dir=other.state_dir, network=NETWORK, timeout_s=5)
            async with connect_authenticated(NETWORK, access, timeout_s=5, program="test"):
                pass


async def test_error_names_the_missing_address_or_token(tmp_path: Path) -> None:
    async def find(**settings: object) -> None:
        config = ClusterConfig(**settings)  # type: ignore[arg-type]
        await find_access(config, state_dir=tmp_path, network=NETWORK, timeout_s=5)

    with pytest.raises(ConfigError, match="master_addr is not given, and this machine hosts none"):
        await find()
    with pytest.raises(TokenMissingError) as missing:
        await find(master_addr="box")
    assert str(missing.value) == (
        "no token for box:5555 "
        "(run 'genie token create' on box, then 'genie login box' here and paste the token)"
    )
    with pytest.raises(TokenMissingError, match="'genie login box:6000' here"):
        await find(master_addr="box", master_port=6000)
    store_login(tmp_path, "box", 6001, make_user_token(1))
    with pytest.raises(TokenMissingError) as missing:
        await find(master_addr="Box")
    assert missing.value.hint == (
        "use master_addr='box:6001' for the stored login, "
        "or run 'genie token create' on Box, then 'genie login Box' here and paste the token"
    )
    with pytest.raises(
        TokenRefusedError, match=r"the given token is not a Genie token.*GENIE_TOKEN"
    ) as refused:
        await find(master_addr="box", token="sesame")
    assert "sesame" not in str(refused.value)
    with pytest.raises(UsageError, match="master_addr: this is a token, not an address"):
        await find(master_addr=f"{make_user_token(1)}:5555")
    (tmp_path / "owner.token").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(TokenMissingError, match=r"owner\.token cannot be read"):
        await find(master_addr="box")
    (tmp_path / "local.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"local\.json cannot be read"):
        await find()


# --- stored logins ------------------------------------------------------------------------------


def make_user_token(number: int) -> Token:
    return new_token(TokenKind.USER, token_id=f"user{number}", secret=bytes([number]) * 32, pin=NO_PIN)


async def test_token_precedence_is_given_then_login_then_owner(tmp_path: Path) -> None:
    given, stored, owners = map(make_user_token, (1, 2, 3))

    async def find(**settings: object) -> Access:
        config = ClusterConfig(master_addr="127.0.0.1", **settings)  # type: ignore[arg-type]
        return await find_access(config, state_dir=tmp_path, network=NETWORK, timeout_s=5)

    files.write_private(tmp_path / "owner.token", str(owners).encode())
    assert (await find()).token == owners
    store_login(tmp_path, "127.0.0.1", 5555, stored)
    assert ((await find()).token, (await find()).source) == (stored, TokenSource.LOGIN)
    assert (await find(master_port=6000)).token == owners, "a login is for one address"
    found = await find(token=str(given))
    assert (found.token, found.source) == (given, TokenSource.CONFIGURED)
    remove_login(tmp_path, "127.0.0.1", 5555)
    assert (await find()).token == owners


async def test_login_of_a_replaced_cluster_error_explains_how_to_remove_it(tmp_path: Path) -> None:
    """Another cluster listens at its address: a recreated one, or an impostor."""
    async with standing(tmp_path / "a", tls="on") as one, standing(tmp_path / "b", tls="on") as other:
        token = parse_token((one.state_dir / "owner.token").read_text())
        config = ClusterConfig(master_addr="127.0.0.1", master_port=other.port)
        for state_dir in (one.state_dir, other.state_dir):  # with its CA, and without
            store_login(state_dir, "127.0.0.1", other.port, token)
            with pytest.raises(
                TlsError, match=r"stored login to .* failed: .*(is not the|of another) cluster"
            ) as caught:
                access = await find_access(config, state_dir=state_dir, network=NETWORK, timeout_s=5)
                async with connect_authenticated(NETWORK, access, timeout_s=5, program="test"):
                    pass
            assert f"'genie logout 127.0.0.1:{other.port}' removes the login" in caught.value.hint
            assert token.secret not in str(caught.value)


def test_address_precedence_is_given_then_local_then_last_login(tmp_path: Path) -> None:
    store_login(tmp_path, "gpu-box", 6000, make_user_token(1))
    assert find_address(ClusterConfig(), tmp_path) == ("gpu-box", 6000)
    LocalCluster(host="127.0.0.1", port=7000, cluster_id="c1").write(tmp_path)
    assert find_address(ClusterConfig(), tmp_path) == ("127.0.0.1", 7000)
    assert find_address(ClusterConfig(master_addr="other"), tmp_path) == ("other", 5555)


@pytest.mark.parametrize("method", ["address", "local"])
def test_last_login_is_used_only_with_automatic_discovery(tmp_path: Path, method: str) -> None:
    store_login(tmp_path, "gpu-box", 6000, make_user_token(1))
    with pytest.raises(ConfigError, match=r"genie login ADDRESS.*stored logins: gpu-box:6000"):
        find_address(ClusterConfig(discovery_method=method), tmp_path)


async def test_local_owner_token_is_not_used_for_another_cluster(
    tmp_path: Path,
) -> None:
    """The address of the other cluster is a name, so that it does not count as local."""
    async with standing(tmp_path / "a", tls="on") as here, standing(tmp_path / "b", tls="on") as other:
        network = FakeResolverNetwork({"gpu-box": "127.0.0.1"})

        async def find(port: int) -> Access:
            config = ClusterConfig(master_addr="gpu-box", master_port=port)
            return await find_access(config, state_dir=here.state_dir, network=network, timeout_s=5)

        with pytest.raises(TokenMissingError, match=rf"no token for gpu-box:{other.port} \(run 'genie token"):
            await find(other.port)
        assert (await find(here.port)).token.kind is TokenKind.OWNER, "another name of the cluster here"


async def test_local_owner_token_is_not_used_for_another_cluster_on_loopback(tmp_path: Path) -> None:
    """A cluster of another user, or a tunnel to another machine. The CA of the owner token is stored."""
    async with standing(tmp_path / "a", tls="on") as here, standing(tmp_path / "b", tls="on") as other:
        config = ClusterConfig(master_addr="127.0.0.1", master_port=other.port)
        access = await find_access(config, state_dir=here.state_dir, network=NETWORK, timeout_s=5)
        assert access.source is TokenSource.OWNER_FILE
        expected = rf"no token for 127\.0\.0\.1:{other.port} \(.*'genie login 127\.0\.0\.1:{other.port}' here"
        with pytest.raises(TokenMissingError, match=expected) as caught:
            async with connect_authenticated(NETWORK, access, timeout_s=5, program="test"):
                pass
        assert access.token.secret not in str(caught.value)


async def test_program_without_tls_is_not_reported_as_a_missing_token(tmp_path: Path) -> None:
    async with (
        standing(tmp_path, tls="on") as here,
        await asyncio.start_server(_reply_with_http_error, "127.0.0.1", 0) as server,
    ):
        port = server.sockets[0].getsockname()[1]
        config = ClusterConfig(master_addr="127.0.0.1", master_port=port)
        access = await find_access(config, state_dir=here.state_dir, network=NETWORK, timeout_s=5)
        with pytest.raises(TlsError, match="another program may listen there"):
            async with connect_authenticated(NETWORK, access, timeout_s=5, program="test"):
                pass


async def _reply_with_http_error(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


class FakeResolverNetwork(TcpNetwork):
    """Resolves names that the resolver of the system does not know."""

    def __init__(self, hosts: dict[str, str]) -> None:
        super().__init__()
        self._hosts = hosts

    async def connect(self, host: str, port: int, *, tls: ClientTls | None, timeout_s: float) -> Channel:
        return await super().connect(self._hosts[host], port, tls=tls, timeout_s=timeout_s)


async def test_token_without_tls_works_only_on_loopback(tmp_path: Path) -> None:
    assert (
        await make_pinned_client_tls(NETWORK, "127.0.0.1", 1, pin="-", state_dir=tmp_path, timeout_s=1)
        is None
    )
    with pytest.raises(TlsError, match="is not this machine"):
        await make_pinned_client_tls(NETWORK, "gpu-box", 1, pin="-", state_dir=tmp_path, timeout_s=1)


def test_local_cluster_is_written_and_read(tmp_path: Path) -> None:
    assert LocalCluster.read(tmp_path) is None
    written = LocalCluster("127.0.0.1", 5555, "abc")
    written.write(tmp_path)
    assert LocalCluster.read(tmp_path) == written
    assert json.loads((tmp_path / "local.json").read_text())["port"] == 5555


def make_huge_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(200 << 30)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "large": make_huge_sparse_file,
    "nested": lambda path: path.write_text("[" * 60_000),
    "text": lambda path: path.write_text("spoiled"),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x80"),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damaged_files_of_the_local_cluster_raise_named_errors_without_blocking(
    tmp_path: Path, damage: str
) -> None:
    DAMAGE[damage](tmp_path / "local.json")
    with pytest.raises(ConfigError, match=r"local\.json cannot be read: .*run 'genie up' again, or remove"):
        LocalCluster.read(tmp_path)
    DAMAGE[damage](tmp_path / "owner.token")
    config = ClusterConfig(master_addr="127.0.0.1", discovery_method="address")
    with pytest.raises(TokenMissingError, match=r"owner\.token cannot be read: .*remove it and run"):
        await find_access(config, state_dir=tmp_path, network=NETWORK, timeout_s=5)


@pytest.mark.parametrize(
    "body",
    [
        {"port": 1e999},
        {"port": 99999999},
        {"port": 0},
        {"port": None},
        {"host": "a\0b"},
        {"host": "a b"},
        {"host": ""},
        {"host": "\ud800"},
    ],
    ids=repr,
)
def test_local_cluster_with_an_invalid_address_is_rejected(tmp_path: Path, body: dict[str, object]) -> None:
    valid = {"host": "127.0.0.1", "port": 5555, "cluster_id": "c"}
    (tmp_path / "local.json").write_text(json.dumps(valid | body))
    with pytest.raises(ConfigError, match=r"local\.json cannot be read: "):
        LocalCluster.read(tmp_path)


@pytest.mark.parametrize("damage", [one for one in DAMAGE if one != "directory"])
async def test_damaged_ca_certificate_is_fetched_again(tmp_path: Path, damage: str) -> None:
    async with standing(tmp_path / "controller", tls="on") as controller:
        token = (controller.state_dir / "owner.token").read_text()
        kept = tmp_path / "trust" / f"{parse_token(token).pin}.pem"
        kept.parent.mkdir()
        DAMAGE[damage](kept)
        config = ClusterConfig(master_addr="127.0.0.1", master_port=controller.port, token=token)
        await find_access(config, state_dir=tmp_path, network=NETWORK, timeout_s=5)
        assert tls.fingerprint(kept.read_text()) == parse_token(token).pin


def test_private_files_have_mode_0600_and_are_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    files.write_private(path, b"one")
    files.write_private(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path], "nothing is left beside it"
    with pytest.raises(StoreFullError, match="cannot write"):
        files.write_private(tmp_path / "deep", b"a directory is there")
    assert (tmp_path / "deep").is_dir()
    with pytest.raises(UsageError, match="GENIE_STATE_DIR"):
        files.make_private_directory(path / "below-a-file")


def test_trusted_ca_is_stored_under_its_fingerprint(tmp_path: Path) -> None:
    authority = tls.CertificateAuthority.create(now=1_700_000_000.0)
    store_trusted_ca(authority.ca_pem, state_dir=tmp_path)
    assert (tmp_path / "trust" / f"{authority.fingerprint}.pem").read_text() == authority.ca_pem
