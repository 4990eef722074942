"""`python -m genie.controller`: run one controller until SIGTERM or SIGINT.

Logs to standard error and writes nothing to standard output. A GenieError ends it with one line and the
error's exit code. supervisor/local_cluster.py starts it in the background.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from genie import config
from genie.controller.controller import Controller
from genie.controller.controller_directory import (
    check_directory_not_copied,
    controller_instance_id,
    lock_controller_directory,
    read_or_create_controller_name,
)
from genie.controller.etcd.local_member import LocalMember
from genie.controller.etcd.member_alarms import EtcdMemberAlarms
from genie.controller.nodes.admission import Certificates, check_bind_address, check_failure_timeouts
from genie.controller.placement.placers import why_scheduler_not_compiled
from genie.controller.store import Store
from genie.controller.store.open import CONTROLLER_DIRECTORY, LOCAL_ETCD_STORE, open_store, sqlite_store_path
from genie.errors import GenieError, StoreError
from genie.model.names import is_loopback, node_id_from
from genie.native.prebuild import prebuild_command, try_build_in_background
from genie.processes import files
from genie.processes.clock import Clock, SystemClock
from genie.processes.file_limit import raise_open_file_limit
from genie.processes.tasks import (
    file_io_threads,
    loop_factory,
    reduce_garbage_collection,
    unwrapped_task_group,
)
from genie.runtime.connection_limits import CONNECTIONS_MAX, open_file_limit_for
from genie.runtime.gossip.kinship_gossip import find_kinship_support
from genie.runtime.gossip.protocol import GossipSupport
from genie.runtime.network import TcpNetwork
from genie.telemetry import log

_log = logging.getLogger("genie.controller")

_FREE_DISK_BYTES_MIN = 1024 * 1024
_FULL_DISK_RETRY_INTERVAL_S = 1.0
_FULL_DISK_LOG_INTERVAL_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    """Run a controller and return the exit code."""
    try:
        settings = config.load(_parse_arguments(arguments))
        log.configure(settings.log)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run_controller_retrying_on_full_disk(settings))
    except GenieError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


async def _run_controller_retrying_on_full_disk(settings: config.Settings) -> None:
    raise_open_file_limit(open_file_limit_for(CONNECTIONS_MAX))
    check_bind_address(settings.controller)
    check_failure_timeouts(settings.controller)
    clock = SystemClock()
    log_at_s = 0.0
    while True:
        try:
            await _run_controller(settings, clock)
            return
        except StoreError as error:
            if _has_free_disk_space(settings.paths.state_dir):
                raise
            if clock.monotonic_s() >= log_at_s:
                log_at_s = clock.monotonic_s() + _FULL_DISK_LOG_INTERVAL_S
                _log.error("waiting for disk space: %s", error)
        await clock.sleep(_FULL_DISK_RETRY_INTERVAL_S)


def _has_free_disk_space(directory: Path) -> bool:
    try:
        return shutil.disk_usage(directory).free >= _FREE_DISK_BYTES_MIN
    except OSError:
        return True


async def _run_controller(settings: config.Settings, clock: Clock) -> None:
    directory = files.make_private_directory(settings.paths.state_dir / CONTROLLER_DIRECTORY)
    with lock_controller_directory(directory), file_io_threads("genie-blobs") as offload:
        if sqlite_store_path(settings.controller.store, state_dir=directory) is not None:
            check_directory_not_copied(directory)
        member = LocalMember.read(settings.paths.state_dir)
        store = await open_store(
            settings.controller.store,
            state_dir=directory,
            clock=clock,
            local_etcd=None if member is None else member.address(settings.paths.state_dir),
        )
        member_alarms = EtcdMemberAlarms()
        try:
            controller = Controller(
                settings.controller,
                state_dir=settings.paths.state_dir,
                store=store,
                network=TcpNetwork(),
                clock=clock,
                name=read_or_create_controller_name(directory),
                instance=controller_instance_id(directory),
                offload=offload,
                etcd_endpoints=lambda: _managed_etcd_endpoints(settings, store),
                etcd_member=_managed_etcd_member_name(settings, member),
                etcd_alarms=member_alarms.alarms,
                gossip=replace(
                    _find_gossip_support(settings, clock), machine_name=_machine_name(settings, member)
                ),
                gossip_port=settings.gossip.server_port,
            )
            etcd_maintenance = _make_etcd_maintenance(settings, store, controller, clock, member_alarms)
            await _run_until_signal(
                controller, compile_ahead=settings.controller.compile_ahead, etcd_maintenance=etcd_maintenance
            )
        finally:
            await store.close()


def _find_gossip_support(settings: config.Settings, clock: Clock) -> GossipSupport:
    controller, gossip = settings.controller, settings.gossip
    if gossip.enabled == "auto" and is_loopback(controller.bind):
        return GossipSupport(
            off_reason="only this machine can reach the servers (gossip.enabled = auto)", is_disabled=True
        )
    return find_kinship_support(
        gossip,
        host=controller.bind,
        port=gossip.server_port,
        advertised_host=controller.advertise or "",
        clock=clock,
    )


def _managed_etcd_endpoints(settings: config.Settings, store: Store) -> tuple[str, ...]:
    """The members of an etcd cluster that Genie runs; empty for another store."""
    if settings.controller.store != LOCAL_ETCD_STORE:
        return ()
    from genie.controller.store.etcd import EtcdStore  # late: needs gRPC

    assert isinstance(store, EtcdStore)
    return store.address.endpoints


def _managed_etcd_member_name(settings: config.Settings, member: LocalMember | None) -> str:
    """The name of this machine's member of an etcd cluster that Genie runs; empty for another store."""
    return "" if member is None or settings.controller.store != LOCAL_ETCD_STORE else member.name


def _machine_name(settings: config.Settings, member: LocalMember | None) -> str:
    """The name of this machine's etcd member, or else the node ID that it would have."""
    name = _managed_etcd_member_name(settings, member) or settings.cluster.node_id
    return name or node_id_from(socket.gethostname())


def _make_etcd_maintenance(
    settings: config.Settings,
    store: Store,
    controller: Controller,
    clock: Clock,
    member_alarms: EtcdMemberAlarms,
) -> Callable[[], Coroutine[Any, Any, None]] | None:
    """Maintenance of this machine's etcd member; None with another store."""
    if settings.controller.store != LOCAL_ETCD_STORE:
        return None
    from genie.controller.etcd.maintenance import EtcdMaintenance  # late: needs gRPC
    from genie.controller.store.etcd import EtcdStore

    assert isinstance(store, EtcdStore)
    state_dir = settings.paths.state_dir
    return EtcdMaintenance(
        store,
        Certificates.open(state_dir / CONTROLLER_DIRECTORY, settings.controller, clock=clock),
        state_dir=state_dir,
        clock=clock,
        is_leading=lambda: controller.is_leading,
        member_alarms=member_alarms,
    ).run


async def _run_until_signal(
    controller: Controller,
    *,
    compile_ahead: bool,
    etcd_maintenance: Callable[[], Coroutine[Any, Any, None]] | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reduce_garbage_collection()
    async with unwrapped_task_group() as group:
        serving = group.create_task(controller.run())
        compiling = group.create_task(compile_scheduler_in_background(controller, is_enabled=compile_ahead))
        others = (
            [compiling] if etcd_maintenance is None else [compiling, group.create_task(etcd_maintenance())]
        )
        await stop.wait()
        _log.info("stopping the controller")
        serving.cancel()
        for task in others:
            task.cancel()


async def compile_scheduler_in_background(
    controller: Controller, *, is_enabled: bool, command: Sequence[str] = prebuild_command("genie_scheduler")
) -> None:
    """Compile the scheduler's library if it is not built; plain Python is used meanwhile."""
    if not (reason := why_scheduler_not_compiled()):
        return
    _log.warning("scheduling uses the slow Python placer: %s", reason)
    if not is_enabled:
        _log.info(
            "to compile the scheduler library, run: %s",
            shlex.join(("python", *prebuild_command("genie_scheduler")[1:])),
        )
    elif await try_build_in_background(
        command, what="the scheduler's library", consequence="scheduling continues in plain Python"
    ):
        controller.try_use_compiled_scheduler()


def _parse_arguments(arguments: list[str] | None) -> dict[str, object]:
    parser = argparse.ArgumentParser(
        prog="python -m genie.controller", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--bind", help="Address to listen on.")
    parser.add_argument("--port", help="Port to listen on; 0 selects a free port.")
    parser.add_argument("--store", help="Store: sqlite, sqlite:/PATH, etcd, etcd://... or etcds://...")
    parser.add_argument("--state-dir", help="Directory of keys, tokens and the embedded store.")
    parser.add_argument("--tls", choices=("on", "off"), help="TLS; off is allowed on loopback only.")
    given = vars(parser.parse_args(arguments))
    state_dir = given.pop("state_dir")
    return {f"controller.{key}": value for key, value in given.items()} | {"paths.state_dir": state_dir}


if __name__ == "__main__":
    sys.exit(main())
