# ruff: noqa: ASYNC240 - a test may block its own loop
"""The `store` setting: allowed URLs and their engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.controller.store import Put
from genie.controller.store.etcd import EtcdStore
from genie.controller.store.open import open_store
from genie.controller.store.sqlite import SqliteStore
from genie.errors import ConfigError
from tests.fakes.clock import FakeClock


@pytest.mark.parametrize("where", ["state", "path"])
async def test_sqlite_uses_the_state_directory_or_the_given_path(where: str, tmp_path: Path) -> None:
    expected = tmp_path / "state" / "store.sqlite3" if where == "state" else tmp_path / "else where.db"
    url = "sqlite" if where == "state" else f"sqlite:{expected}"
    store = await open_store(url, state_dir=tmp_path / "state", clock=FakeClock())
    assert isinstance(store, SqliteStore)
    assert store.path == expected
    await store.commit([], [Put("a", b"")])
    await store.close()


async def test_etcd_url_opens_that_server(etcd_url: str, tmp_path: Path) -> None:
    store = await open_store(etcd_url, state_dir=tmp_path, clock=FakeClock())
    assert isinstance(store, EtcdStore)
    assert await store.get("a") is None
    await store.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "sqlit",
        "SQLITE",
        "sqlite:",
        "sqlite:store.db",
        "sqlite://x/y",
        "sqlite:/x/",
        "etcd:host",
        "redis://x",
    ],
)
async def test_other_urls_are_rejected_with_the_allowed_ones(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"allowed: sqlite, sqlite:/PATH"):
        await open_store(url, state_dir=tmp_path, clock=FakeClock())
    assert list(tmp_path.iterdir()) == []
