"""The etcd member of this machine: checks before its start, its command line, start and membership.

The process runs with mutual TLS: clients and peers must have a certificate of the role `etcd` from the CA of
the cluster, which only servers can issue; certificates of nodes and executors are rejected. The record of the
member is in controller/etcd/local_member.py.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from genie.config import ControllerConfig, Settings
from genie.controller.etcd.local_member import (
    LocalMember,
    ca_path,
    etcd_certificate_and_key_paths,
    etcd_data_directory,
    etcd_member_directory,
)
from genie.controller.etcd.replacement import finish_replacement, is_replacement_committed
from genie.controller.nodes.admission import Certificates, advertised_host
from genie.controller.store.open import CONTROLLER_DIRECTORY, LOCAL_ETCD_STORE, SQLITE_FILE_NAME
from genie.errors import (
    AgentRunningError,
    ConfigError,
    DeadlineError,
    StoreAccessError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
)
from genie.model.names import address_text
from genie.processes import files
from genie.processes.clock import SystemClock
from genie.runtime import tls
from genie.runtime.credentials import is_wildcard
from genie.supervisor import process_records, this_machine
from genie.supervisor.child import Child, python_module_command

ETCD = process_records.ETCD
DEFAULT_ETCD_QUOTA_BYTES = 2 * 1024**3
ETCD_FREE_DISK_BYTES_MIN = 256 * 1024**2
SLOW_FSYNC_WARNING_THRESHOLD_S = 0.02
_FSYNC_PROBE_COUNT = 10
_FSYNC_PROBE_BYTES = 2048
ETCD_START_TIMEOUT_S = 60.0
_ETCD_VERSION_TIMEOUT_S = 10.0
_ETCD_READY_POLL_S = 0.05
_ETCD_READY_PROBE_TIMEOUT_S = 1.0
_MIB = 1024 * 1024


def uses_local_etcd(settings: Settings) -> bool:
    return settings.controller.store == LOCAL_ETCD_STORE


def remember_and_get_runs_agent(state_dir: Path, agent: bool | None) -> bool:
    """Whether this machine runs an agent: as given, or as a server remembers it; stores the answer there."""
    member = LocalMember.read(state_dir)
    if member is None:
        return agent is not False
    if agent is not None and member.runs_agent != agent:
        replace(member, runs_agent=agent).write(state_dir)
    return member.runs_agent if agent is None else agent


def with_settings_of_local_member(settings: Settings) -> Settings:
    """Fills in the store and the address of a machine that is already a server, where they are not set.

    Raises ConfigError if another store is set: a second store would split the cluster.
    """
    state_dir, config, sources = settings.paths.state_dir, settings.controller, settings.sources
    finish_interrupted_replacement(state_dir)
    member = LocalMember.read(state_dir)
    if member is None:
        if uses_local_etcd(settings):
            _check_no_sqlite_store(state_dir)
        return settings
    if sources["controller.store"] == "default":
        config = replace(config, store=LOCAL_ETCD_STORE)
    if config.store != LOCAL_ETCD_STORE:
        raise ConfigError(
            f"controller.store is {config.store!r}, but {state_dir} has an etcd member of a cluster",
            hint="leave the store unset, or choose another GENIE_STATE_DIR",
        )
    if sources["controller.bind"] == "default":
        config = replace(config, bind=member.bind)
    if sources["controller.port"] == "default" and member.controller_port:
        config = replace(config, port=member.controller_port)
    return replace(settings, controller=config)


def _check_no_sqlite_store(state_dir: Path) -> None:
    path = state_dir / CONTROLLER_DIRECTORY / SQLITE_FILE_NAME
    if path.exists():
        raise ConfigError(
            f"this machine has a cluster in the SQLite store {path}, which --store etcd would not contain",
            hint="to move that cluster to etcd: 'genie down --keep-jobs', then 'genie store migrate --to "
            "etcd --bind ADDRESS'; to keep it in SQLite, start it without --store",
        )


def finish_interrupted_replacement(state_dir: Path) -> list[Path]:
    """Finishes a committed replacement of the store that was interrupted. Returns the names under which the
    previous store is kept. Raises AgentRunningError if another process is using the state directory."""
    if not is_replacement_committed(state_dir):
        return []
    lock = files.FileLock.try_acquire(process_records.supervisor_lock_path(state_dir))
    if lock is None:
        raise AgentRunningError(
            f"another process is replacing the store in {state_dir}", hint="wait until it has finished"
        )
    try:
        return finish_replacement(state_dir)
    finally:
        lock.release()


def find_etcd_program() -> str:
    """Path of a usable etcd. Raises ConfigError if there is none, StoreVersionError for an unsafe version."""
    path = shutil.which("etcd")
    if path is None:
        raise ConfigError(
            "store 'etcd' requires the program etcd, which is not on PATH",
            hint="install etcd 3.4.22 or later of 3.4, or 3.5.6 or later (Debian: apt install etcd-server)",
        )
    try:
        from genie.controller.store.etcd_errors import check_etcd_version
    except ImportError as error:
        raise ConfigError(
            f"store 'etcd' requires the packages of the etcd extra: {error}",
            hint="pip install 'genie-gpu[etcd]'",
        ) from error
    try:
        output = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_ETCD_VERSION_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StoreVersionError(f"could not run {path} --version: {error}") from error
    first_line = output.partition("\n")[0]
    check_etcd_version(first_line.rpartition(" ")[2], endpoint=path)
    return path


def check_disk_for_etcd(directory: Path, *, quota_bytes: int, progress: Callable[[str], None]) -> None:
    """Raises StoreFullError if there is no space for etcd; reports a disk that is small or slow to sync."""
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < ETCD_FREE_DISK_BYTES_MIN:
        raise StoreFullError(
            f"{directory} has {free_bytes / _MIB:.0f} MiB of free disk space; etcd needs at least "
            f"{ETCD_FREE_DISK_BYTES_MIN / _MIB:.0f} MiB",
            hint="free some space, or set GENIE_STATE_DIR to a directory on another disk",
        )
    if free_bytes < quota_bytes:
        progress(
            f"warning: {directory} has {free_bytes / _MIB:.0f} MiB of free disk space, less than the "
            f"{quota_bytes / _MIB:.0f} MiB that the store may use"
        )
    sync_s = measure_fsync_s(directory)
    if sync_s > SLOW_FSYNC_WARNING_THRESHOLD_S:
        progress(
            f"warning: the disk of {directory} takes {sync_s * 1000:.0f} ms to sync a write; above "
            f"{SLOW_FSYNC_WARNING_THRESHOLD_S * 1000:.0f} ms, etcd may lose its leader under load"
        )


def measure_fsync_s(directory: Path) -> float:
    """Median duration of a small write with fdatasync, as etcd does for every change. Blocks."""
    path = directory / "fsync-probe"
    durations_s = []
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        for _ in range(_FSYNC_PROBE_COUNT):
            began_s = time.monotonic()
            os.write(descriptor, bytes(_FSYNC_PROBE_BYTES))
            os.fdatasync(descriptor)
            durations_s.append(time.monotonic() - began_s)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    return statistics.median(durations_s)


def new_local_member(config: ControllerConfig, *, name: str) -> LocalMember:
    """The member that this machine would be. May block on a name lookup."""
    return LocalMember(
        name=name,
        host=_find_ip_for_other_servers(config),
        client_port=config.etcd_client_port,
        peer_port=config.etcd_peer_port,
        bind=config.bind,
        controller_port=config.port,
    )


def _find_ip_for_other_servers(config: ControllerConfig) -> str:
    """The IP address for other servers: a certificate of the cluster's CA cannot contain a host name."""
    own = this_machine.list_own_addresses()
    if is_wildcard(config.bind) and not config.advertise and own:
        return own[0]
    name = advertised_host(config)
    found = [address for address in this_machine.resolve_host(name) if not is_wildcard(address)]
    if not found:
        raise ConfigError(
            f"could not find the IP address of {name}, under which other servers reach this one",
            hint="set --bind or controller.advertise to an IP address of this machine",
        )
    return found[0]


def write_etcd_member_certificate(config: ControllerConfig, member: LocalMember, *, state_dir: Path) -> None:
    """Issues the certificate of the member, for every address that its connections may come from."""
    directory = files.make_private_directory(state_dir / CONTROLLER_DIRECTORY)
    certificates = Certificates.open(directory, config, clock=SystemClock())
    files.make_private_directory(etcd_member_directory(state_dir))
    addresses = {member.host, "127.0.0.1", "::1", *this_machine.list_own_addresses()}
    certificate, key = etcd_certificate_and_key_paths(state_dir)
    certificates.write_etcd_certificate(certificate, key, addresses=sorted(addresses))


def format_initial_cluster(members: Iterable[tuple[str, str]]) -> str:
    """`members` are names and peer URLs."""
    return ",".join(f"{name}={peer_url}" for name, peer_url in members)


def etcd_arguments(
    member: LocalMember,
    *,
    state_dir: Path,
    data_directory: Path,
    quota_bytes: int,
    initial_cluster: str,
    is_new_cluster: bool,
) -> list[str]:
    """etcd ignores the initial cluster and its token once it has data."""
    certificate, key = etcd_certificate_and_key_paths(state_dir)
    ca = ca_path(state_dir)
    return [
        *("--name", member.name, "--data-dir", str(data_directory)),
        *("--listen-client-urls", f"https://{address_text(member.bind, member.client_port)}"),
        *("--advertise-client-urls", member.client_url),
        *("--listen-peer-urls", f"https://{address_text(member.bind, member.peer_port)}"),
        *("--initial-advertise-peer-urls", member.peer_url),
        *("--initial-cluster", initial_cluster),
        *("--initial-cluster-state", "new" if is_new_cluster else "existing"),
        # Random: members of a cluster that was replaced after a restore must not take this one for their own.
        *("--initial-cluster-token", f"genie-{secrets.token_hex(8)}"),
        *("--cert-file", str(certificate), "--key-file", str(key)),
        *("--trusted-ca-file", str(ca), "--client-cert-auth"),
        *("--client-cert-allowed-hostname", tls.ETCD_NAME),
        *("--peer-cert-file", str(certificate), "--peer-key-file", str(key)),
        *("--peer-trusted-ca-file", str(ca), "--peer-client-cert-auth"),
        *("--peer-cert-allowed-hostname", tls.ETCD_NAME),
        *("--quota-backend-bytes", str(quota_bytes)),
        *("--auto-compaction-retention", "0"),  # the leading controller compacts
        # The default from 3.5 on. Without it, the term of a member that is cut off rises, and its return
        # deposes the leader of etcd: the members elect again, and the new leader extends every lease.
        "--pre-vote",
        "--enable-grpc-gateway=false",
        *("--logger", "zap", "--log-outputs", "stderr"),
    ]


class EtcdMemberProcess:
    """Starts the member and waits until it answers. `child` restarts and stops it."""

    def __init__(
        self,
        config: ControllerConfig,
        *,
        state_dir: Path,
        progress: Callable[[str], None],
        ends_with_this_process: bool = False,
    ) -> None:
        """`ends_with_this_process`: etcd must not survive this process."""
        self._config = config
        self._state_dir = state_dir
        self._progress = progress
        # With an empty environment: etcd rejects ETCD_* variables that repeat its arguments, and would use a
        # proxy. HOME identifies the process in `ps e`.
        command = ["env", "-i", f"HOME={etcd_member_directory(state_dir)}"]
        if ends_with_this_process:
            command = [*python_module_command("genie.processes.with_parent"), str(os.getpid()), *command]
        self.child = Child(ETCD, command=command, state_dir=state_dir)

    @property
    def quota_bytes(self) -> int:
        return self._config.store_bytes_max or DEFAULT_ETCD_QUOTA_BYTES

    async def start(
        self,
        member: LocalMember,
        *,
        initial_cluster: str = "",
        is_new_cluster: bool = True,
        data_directory: Path | None = None,
        timeout_s: float = ETCD_START_TIMEOUT_S,
    ) -> None:
        """Launches etcd and waits until it serves requests, which needs a majority.

        Raises DeadlineError after `timeout_s`."""
        await self.launch(
            member,
            initial_cluster=initial_cluster,
            is_new_cluster=is_new_cluster,
            data_directory=data_directory,
        )
        await self._wait_until_member_responds(member, timeout_s=timeout_s)

    async def launch(
        self,
        member: LocalMember,
        *,
        initial_cluster: str = "",
        is_new_cluster: bool = True,
        data_directory: Path | None = None,
    ) -> None:
        """Checks program, disk and ports, issues the certificate and starts etcd. An empty `initial_cluster`
        is a cluster of this member only."""
        data_directory = data_directory or etcd_data_directory(self._state_dir)
        program = await asyncio.to_thread(self._check_and_find_etcd_program, member, data_directory)
        files.make_private_directory(data_directory)
        # The certificate is written at every start, because addresses of this machine may have changed.
        await asyncio.to_thread(
            write_etcd_member_certificate, self._config, member, state_dir=self._state_dir
        )
        self._progress(f"starting etcd member {member.name} on {member.endpoint}")
        arguments = etcd_arguments(
            member,
            state_dir=self._state_dir,
            data_directory=data_directory,
            quota_bytes=self.quota_bytes,
            initial_cluster=initial_cluster or format_initial_cluster([(member.name, member.peer_url)]),
            is_new_cluster=is_new_cluster,
        )
        self.child.start([program, *arguments])

    async def check_can_start(self, member: LocalMember) -> None:
        """Checks program, disk and ports. Starts no process and leaves no files."""
        await asyncio.to_thread(
            self._check_and_find_etcd_program, member, etcd_data_directory(self._state_dir)
        )

    def _check_and_find_etcd_program(self, member: LocalMember, data_directory: Path) -> str:
        """Returns the path of etcd."""
        program = find_etcd_program()
        directory = next(path for path in (data_directory, *data_directory.parents) if path.is_dir())
        check_disk_for_etcd(directory, quota_bytes=self.quota_bytes, progress=self._progress)
        for port, variable in (
            (member.client_port, "GENIE_CONTROLLER_ETCD_CLIENT_PORT"),
            (member.peer_port, "GENIE_CONTROLLER_ETCD_PEER_PORT"),
        ):
            hint = "stop the program that uses it (the etcd service: systemctl disable --now etcd)"
            this_machine.check_port_free(member.bind, port, hint=f"{hint}, or set {variable}")
        return program

    async def _wait_until_member_responds(self, member: LocalMember, *, timeout_s: float) -> None:
        """A new learner answers, too."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while not await self._is_responding(member):
            self.child.check_not_exited()
            if loop.time() >= deadline_s:
                raise self._start_timeout_error(member, timeout_s)
            await asyncio.sleep(_ETCD_READY_POLL_S)

    async def _is_responding(self, member: LocalMember) -> bool:
        from genie.controller.store.etcd_channels import EtcdChannels

        address = replace(member, endpoints=()).address(self._state_dir)
        channels = EtcdChannels(address, clock=SystemClock())
        try:
            await channels.get_ready_member(asyncio.get_running_loop().time() + _ETCD_READY_PROBE_TIMEOUT_S)
            return True
        except (StoreUnavailableError, StoreAccessError):
            return False
        finally:
            await channels.close()

    def _start_timeout_error(self, member: LocalMember, timeout_s: float) -> DeadlineError:
        lines = self.child.last_log_lines()
        output = "; its last output:\n  " + "\n  ".join(lines) if lines else " and has written no output"
        return DeadlineError(
            f"etcd member {member.name} did not respond on {member.endpoint} within {timeout_s:g} s{output}",
            hint=f"see the log {self.child.log_path}",
        )
