"""Stored logins with a real cluster: use, expiry and revocation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import genie
from genie.cluster.client import ClusterClient
from genie.errors import TlsError, TokenRefusedError
from genie.model.messages import TokenCreated
from genie.model.messages.handshake import Welcome
from genie.model.tenant import TokenKind
from genie.runtime.credentials import log_in
from genie.runtime.logins import list_logins
from genie.runtime.network import TcpNetwork
from genie.tenancy.access import parse_token
from tests.integration.running_cluster import RunningCluster
from tests.waiting import until

QUIET_SETTINGS = {"enable_gpu_monitoring": False, "enable_health_checks": False}


@pytest.fixture(autouse=True)
def laptop_state_dir(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The state directory of a machine without a token."""
    monkeypatch.delenv("GENIE_TOKEN")
    monkeypatch.setenv("GENIE_STATE_DIR", str(tmp_path / "laptop"))
    yield tmp_path / "laptop"
    assert not genie.is_initialized()


async def store_login(cluster: RunningCluster, laptop: Path, text: str) -> Welcome:
    network = TcpNetwork()
    return await log_in(cluster.host, cluster.port, text, state_dir=laptop, network=network, timeout_s=20)


async def create_user_token(client: ClusterClient, *, ttl_s: float | None = None) -> TokenCreated:
    return await client.create_token(TokenKind.USER, tenant="team-a", name="laptop", ttl_s=ttl_s)


async def test_init_uses_a_stored_login_until_its_token_is_revoked(
    client: ClusterClient, cluster: RunningCluster, laptop_state_dir: Path
) -> None:
    created = await create_user_token(client)
    welcome = await store_login(cluster, laptop_state_dir, created.token)
    assert (welcome.kind, welcome.tenant) == (TokenKind.USER, "team-a")
    state = await genie.init(master_addr=cluster.host, master_port=cluster.port, **QUIET_SETTINGS)
    assert state.tenant == "team-a"
    await genie.shutdown()
    await client.revoke_token(created.record.token_id)
    expected = (
        rf"stored login to {cluster.host}:{cluster.port} was refused: token .* was revoked.*genie login"
    )
    with pytest.raises(TokenRefusedError, match=expected):
        await genie.init(**QUIET_SETTINGS)


async def test_expired_login_is_reported(
    client: ClusterClient, cluster: RunningCluster, laptop_state_dir: Path
) -> None:
    await store_login(cluster, laptop_state_dir, (await create_user_token(client, ttl_s=5.0)).token)

    async def login_error() -> str:
        try:
            await genie.init(**QUIET_SETTINGS)
        except TokenRefusedError as error:
            return str(error)
        await genie.shutdown()
        return ""

    message = await until(login_error, timeout_s=30)
    assert "has expired" in message and "genie login" in message


async def test_rejected_token_is_not_stored(
    client: ClusterClient, cluster: RunningCluster, laptop_state_dir: Path
) -> None:
    good = parse_token((await create_user_token(client)).token)
    revoked = await create_user_token(client)
    await client.revoke_token(revoked.record.token_id)
    join = await client.create_token(TokenKind.JOIN)
    for text, kind, words in (
        (str(good).replace(good.secret, good.secret[::-1]), TokenRefusedError, "secret is wrong"),
        (str(good).replace(good.pin, good.pin[::-1]), TlsError, "is not the cluster that this token is for"),
        (revoked.token, TokenRefusedError, "was revoked"),
        (join.token, TokenRefusedError, "a join token"),
    ):
        with pytest.raises(kind, match=words) as caught:
            await store_login(cluster, laptop_state_dir, text)
        assert parse_token(text).secret not in str(caught.value)
    assert list_logins(laptop_state_dir) == []
