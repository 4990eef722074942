"""Opens the store that the `store` setting names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from genie.controller.store.protocol import Store
from genie.errors import ConfigError
from genie.processes.clock import Clock

if TYPE_CHECKING:
    from genie.controller.store.etcd_address import EtcdAddress

_URL_CHARS_SHOWN = 100
CONTROLLER_DIRECTORY = "controller"
"""Directory of a controller below the state directory."""
LOCAL_ETCD_STORE = "etcd"
"""The store setting for the etcd cluster that Genie starts and supervises."""
SQLITE_FILE_NAME = "store.sqlite3"


async def open_store(
    url: str, *, state_dir: Path, clock: Clock, local_etcd: EtcdAddress | None = None
) -> Store:
    """Opens `sqlite` (in `state_dir`), `sqlite:/PATH`, `etcd` (the cluster at `local_etcd`), `etcd://…` or
    `etcds://…`. The caller closes it.

    Raises ConfigError for any other URL, and what the `open` of the engine raises.
    """
    # Late imports: the embedded store needs no gRPC, and the etcd client no file locks.
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite":
        from genie.controller.store.sqlite import SqliteStore

        return await SqliteStore.open(_parse_sqlite_path(url, rest, state_dir), clock=clock)
    if _is_etcd_url(url):
        try:
            from genie.controller.store.etcd import EtcdStore
        except ImportError as error:
            raise ConfigError(
                f"store {url!r} requires the packages of the etcd extra: {error}",
                hint="pip install 'genie-gpu[etcd]'",
            ) from error

        if url == LOCAL_ETCD_STORE:
            if local_etcd is None:
                raise _no_local_member_error(state_dir)
            return await EtcdStore.open_address(local_etcd, clock=clock)
        return await EtcdStore.open(url, clock=clock)
    raise _invalid_url_error(url)


def check_store_url(url: str) -> None:
    """Raises ConfigError for a URL that names no kind of store."""
    if not _is_etcd_url(url) and sqlite_store_path(url, state_dir=Path()) is None:
        raise _invalid_url_error(url)


def _is_etcd_url(url: str) -> bool:
    return url == LOCAL_ETCD_STORE or url.startswith(("etcd://", "etcds://"))


def sqlite_store_path(url: str, *, state_dir: Path) -> Path | None:
    """The file of an embedded store; None for etcd. Raises ConfigError for an invalid URL."""
    scheme, _, rest = url.partition(":")
    return _parse_sqlite_path(url, rest, state_dir) if scheme == "sqlite" else None


def _parse_sqlite_path(url: str, path_text: str, state_dir: Path) -> Path:
    if url == "sqlite":
        return state_dir / SQLITE_FILE_NAME
    if not path_text.startswith("/") or path_text.startswith("//") or path_text.endswith("/"):
        raise _invalid_url_error(url)
    return Path(path_text)


def _no_local_member_error(state_dir: Path) -> ConfigError:
    return ConfigError(
        f"store 'etcd': there is no etcd member in {state_dir.parent}",
        hint="start the first server with 'genie up --store etcd', further ones with 'genie join --server'; "
        "for an external cluster, use etcd://HOST:PORT",
    )


def _invalid_url_error(url: str) -> ConfigError:
    return ConfigError(
        f"invalid store URL {url[:_URL_CHARS_SHOWN]!r}",
        hint="allowed: sqlite, sqlite:/PATH/TO/FILE, etcd, etcd://HOST:PORT[,HOST:PORT], "
        "etcds://HOST:PORT?ca=FILE",
    )
