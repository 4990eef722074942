"""Builds a new etcd cluster of one member on this machine, which replaces the store that it has.

    async with build_replacement(settings, ca_pin=..., sqlite_file=None, progress=print) as build:
        ...  # fill build.store
    build.kept  # the names of the previous store

The member runs on a data directory of its own, with the ports that the member of this machine has. When the
block has ended without an error, it is stopped, and its data becomes the store
(controller/etcd/replacement.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from genie.agent.identity import list_node_dirs
from genie.config import Settings
from genie.controller.etcd.local_member import LocalMember, ca_path
from genie.controller.etcd.replacement import (
    Replacement,
    commit_replacement,
    finish_replacement,
    new_data_directory,
    remove_unfinished_data,
)
from genie.controller.store import Store
from genie.errors import AgentRunningError, ConfigError, StoreNotEmptyError
from genie.runtime import tls
from genie.supervisor.etcd_majority import find_connect_problem
from genie.supervisor.etcd_member import EtcdMemberProcess, new_local_member
from genie.supervisor.local_cluster import (
    ProgressPrinter,
    find_running_cluster,
    hold_supervisor_lock,
)
from genie.supervisor.local_node import local_node_id
from genie.supervisor.machine_role import missing_bind_error
from genie.tenancy.access import NO_PIN

_ETCD_STOP_GRACE_S = 30.0


@dataclass
class ReplacementBuild:
    """`store` is empty at first. `kept` has the names of the previous store once it was replaced."""

    store: Store
    kept: list[Path] = field(default_factory=list)


def choose_new_member(settings: Settings) -> LocalMember:
    """The member that a new cluster on this machine would have: that of the previous cluster, with another
    address if --bind was given. May block on a name lookup."""
    state_dir, config = settings.paths.state_dir, settings.controller
    before, is_bind_given = LocalMember.read(state_dir), settings.sources["controller.bind"] != "default"
    if before is not None and not is_bind_given:
        is_port_given = settings.sources["controller.port"] != "default"
        port = config.port if is_port_given else before.controller_port
        return replace(before, endpoints=(), controller_port=port, etcd_cluster_id="")
    if not is_bind_given:
        raise missing_bind_error(config.bind)
    name = before.name if before is not None else _find_node_id_of_machine(settings)
    return new_local_member(config, name=name)


@asynccontextmanager
async def build_replacement(
    settings: Settings,
    *,
    ca_pin: str,
    sqlite_file: Path | None,
    progress: ProgressPrinter,
) -> AsyncIterator[ReplacementBuild]:
    """Runs a new etcd cluster of one member for the block, and makes it the store of this machine at the end.
    An error or a cancellation leaves the previous store in use, unchanged.

    `ca_pin` is that of the cluster, whose CA must be on this machine. `sqlite_file` is the embedded store
    that is renamed at the end; the block must have closed it.
    """
    from genie.controller.store.etcd import EtcdStore  # late: needs gRPC

    state_dir = settings.paths.state_dir
    member = choose_new_member(settings)
    check_authority_is_of_cluster(state_dir, ca_pin=ca_pin)
    async with hold_stopped_server(state_dir, progress=progress):
        remove_unfinished_data(state_dir)
        process = EtcdMemberProcess(
            settings.controller, state_dir=state_dir, progress=progress, ends_with_this_process=True
        )
        try:
            await process.start(member, data_directory=new_data_directory(state_dir))
            store = await EtcdStore.open_address(member.address(state_dir))
            build = ReplacementBuild(store)
            try:
                yield build
            finally:
                await store.close()
        except BaseException:
            await process.child.stop(grace_s=_ETCD_STOP_GRACE_S)
            remove_unfinished_data(state_dir)
            raise
        await process.child.stop(grace_s=_ETCD_STOP_GRACE_S)
        commit_replacement(state_dir, Replacement.create(member, sqlite_file=sqlite_file))
        build.kept = finish_replacement(state_dir)


@asynccontextmanager
async def hold_stopped_server(state_dir: Path, *, progress: ProgressPrinter) -> AsyncIterator[None]:
    """Keeps others from starting a cluster on this machine. Raises AgentRunningError if one is running, and
    StoreNotEmptyError if another member of its etcd cluster is running: its controller would lead on."""
    with hold_supervisor_lock(state_dir):
        if (running := find_running_cluster(state_dir)) is not None:
            raise AgentRunningError(
                f"cannot replace the store: this machine runs a cluster {running}",
                hint="stop it with 'genie down --keep-jobs'",
            )
        await _check_other_members_stopped(state_dir, progress)
        yield


def check_authority_is_of_cluster(state_dir: Path, *, ca_pin: str) -> None:
    """Raises ConfigError unless this machine has the CA of the cluster: etcd requires a certificate of it."""
    if ca_pin == NO_PIN:
        raise ConfigError(
            "the cluster was started with --tls off; etcd members that Genie runs require TLS",
            hint="use SQLite or an etcd cluster of your own: etcd://HOST:PORT",
        )
    path = ca_path(state_dir)
    own_pin = ""
    with suppress(OSError):
        own_pin = tls.fingerprint(path.read_text("utf-8"))
    if own_pin != ca_pin or not path.with_suffix(".key").exists():
        raise ConfigError(
            f"{path.parent} does not have the certificate authority of the cluster",
            hint=f"copy controller/ca.pem and controller/ca.key of a server of that cluster to {path.parent}",
        )


async def _check_other_members_stopped(state_dir: Path, progress: ProgressPrinter) -> None:
    before = LocalMember.read(state_dir)
    if before is None or not before.endpoints:
        return
    progress(f"checking that no other etcd member is running: {', '.join(before.endpoints)}")
    problems = await asyncio.gather(*map(find_connect_problem, before.endpoints))
    # A member without a majority serves no request, but has a majority again as soon as this one starts.
    running = [endpoint for endpoint, problem in zip(before.endpoints, problems, strict=True) if not problem]
    if running:
        raise StoreNotEmptyError(
            f"the cluster that would be replaced has etcd members that are running: {', '.join(running)}",
            hint="if a majority of the servers is left, run 'genie up' here instead; to return to the backup "
            "all the same, stop those servers with 'genie down --keep-jobs'",
        )


def _find_node_id_of_machine(settings: Settings) -> str:
    """The node ID of this machine's agent, so that member and node have the same name."""
    found = list_node_dirs(settings.paths.state_dir)
    is_configured = settings.sources["cluster.node_id"] != "default"
    return found[0].name if len(found) == 1 and not is_configured else local_node_id(settings)
