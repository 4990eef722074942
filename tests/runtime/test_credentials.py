"""How a process finds its cluster: address, token, trust, Hello; and what it says when one is missing."""

from __future__ import annotations

import json
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
from genie.runtime import files, tls
from genie.runtime.credentials import (
    LocalCluster,
    find_access,
    greet,
    is_loopback,
    keep_trust,
    trust,
)
from genie.runtime.network import TcpNetwork
from tests.controller.standing import standing

NETWORK = TcpNetwork()


async def test_on_the_clusters_own_machine_everything_is_found(tmp_path: Path) -> None:
    async with standing(tmp_path, tls="on") as one:
        access = await find_access(ClusterConfig(), state_dir=one.state_dir, network=NETWORK, timeout_s=5)
        assert (access.host, access.port) == ("127.0.0.1", one.port)
        async with greet(NETWORK, access, timeout_s=5, program="test") as (peer, welcome):
            assert welcome.leading
            assert (await peer.call(GetStatus(), timeout_s=5)).cluster_id == welcome.cluster_id


async def test_elsewhere_the_token_is_enough_and_the_ca_is_fetched_once(tmp_path: Path) -> None:
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


async def test_a_token_of_another_cluster_is_never_sent(tmp_path: Path) -> None:
    async with standing(tmp_path / "a", tls="on") as one, standing(tmp_path / "b", tls="on") as other:
        token = (other.state_dir / "owner.token").read_text()
        config = ClusterConfig(master_addr="127.0.0.1", master_port=one.port, token=token)
        with pytest.raises(TlsError, match="is not the cluster that this token is for"):
            await find_access(config, state_dir=tmp_path / "away", network=NETWORK, timeout_s=5)
        with pytest.raises(TlsError, match="not of this cluster"):
            access = await find_access(config, state_dir=other.state_dir, network=NETWORK, timeout_s=5)
            async with greet(NETWORK, access, timeout_s=5, program="test"):
                pass


async def test_what_is_missing_is_named(tmp_path: Path) -> None:
    async def find(**settings: object) -> None:
        config = ClusterConfig(**settings)  # type: ignore[arg-type]
        await find_access(config, state_dir=tmp_path, network=NETWORK, timeout_s=5)

    with pytest.raises(ConfigError, match="master_addr is not given, and this machine hosts none"):
        await find()
    with pytest.raises(TokenMissingError, match=r"no token for box:5555.*owner\.token is not there"):
        await find(master_addr="box")
    with pytest.raises(TokenRefusedError, match="not a Genie token"):
        await find(master_addr="box", token="sesame")
    (tmp_path / "owner.token").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(TokenMissingError, match=r"owner\.token cannot be read"):
        await find(master_addr="box")
    (tmp_path / "local.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"local\.json cannot be read"):
        await find()


async def test_without_tls_only_this_machine_is_talked_to(tmp_path: Path) -> None:
    assert await trust(NETWORK, "127.0.0.1", 1, pin="-", state_dir=tmp_path, timeout_s=1) is None
    with pytest.raises(TlsError, match="is not this machine"):
        await trust(NETWORK, "gpu-box", 1, pin="-", state_dir=tmp_path, timeout_s=1)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_loopback_is_only_what_can_only_be_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_local_cluster_is_written_and_read(tmp_path: Path) -> None:
    assert LocalCluster.read(tmp_path) is None
    written = LocalCluster("127.0.0.1", 5555, "abc")
    written.write(tmp_path)
    assert LocalCluster.read(tmp_path) == written
    assert json.loads((tmp_path / "local.json").read_text())["port"] == 5555


def test_private_files_are_private_whole_and_replaced_at_once(tmp_path: Path) -> None:
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


def test_trust_is_kept_under_its_own_fingerprint(tmp_path: Path) -> None:
    authority = tls.CertificateAuthority.create(now=1_700_000_000.0)
    keep_trust(authority.ca_pem, state_dir=tmp_path)
    assert (tmp_path / "trust" / f"{authority.fingerprint}.pem").read_text() == authority.ca_pem
