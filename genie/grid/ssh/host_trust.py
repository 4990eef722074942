"""Fetches unknown host keys for the user to compare, and adds them to known_hosts.

Connects as the pool does (~/.ssh/config, including jump hosts). A host that presents a different key than
the known one is always an error. The user is prompted by the CLI.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from genie.errors import HostKeyChangedError, UnreachableError, UsageError
from genie.grid.grid_file import GridFile, GridNode
from genie.grid.ssh.target import (
    KnownHostsCache,
    SshTarget,
    format_error,
    format_ssh_command,
    format_target_address,
    resolve_ssh_target,
)

_log = logging.getLogger(__name__)

_DEFAULT_SSH_PORT = 22


@dataclass(frozen=True)
class HostKey:
    """The key that a host presented. `host` is its name in known_hosts; `is_known`: the key is there."""

    node: str
    host: str
    kind: str
    fingerprint: str
    known_hosts_line: str
    is_known: bool
    known_hosts_file: Path


async def fetch_host_key(node: GridNode, file: GridFile, ssh_config: Path, *, timeout_s: float) -> HostKey:
    """Fetches the host key without logging in.

    Raises HostKeyChangedError, UnreachableError, or UsageError if there is no known_hosts file.
    """
    target = await resolve_ssh_target(node, file, _expand_user(ssh_config), trusted=KnownHostsCache())
    if not target.known_hosts_files:
        raise UsageError(
            f"node {node.name}: {ssh_config} disables the known_hosts file",
            hint="remove 'UserKnownHostsFile none' from it",
        )
    keys, authorities, revoked = _known_host_ca_and_revoked_keys(target)
    key = await _fetch_key_of_known_type(target, keys, timeout_s=timeout_s)
    where = target.known_hosts_name
    fingerprint = key.get_fingerprint()
    if key in revoked:
        raise HostKeyChangedError(f"node {node.name}: {where} presented a revoked host key ({fingerprint})")
    if keys and key not in keys:
        raise _host_key_changed_error(target, fingerprint, keys)
    kind, _, body = key.export_public_key("openssh").decode().strip().partition(" ")
    return HostKey(
        node=node.name,
        host=where,
        kind=kind,
        fingerprint=fingerprint,
        known_hosts_line=f"{where} {kind} {body.split()[0]}",
        is_known=key in keys or bool(authorities),
        known_hosts_file=target.known_hosts_files[0],
    )


def add_host_key_to_known_hosts(key: HostKey) -> None:
    """Appends the line of the key atomically. Raises UsageError if the file cannot be written."""
    path = key.known_hosts_file
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "rb+", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            whole = size == 0 or os.pread(file.fileno(), 1, size - 1) == b"\n"
            line = f"{'' if whole else chr(10)}{key.known_hosts_line}\n".encode()
            if os.write(file.fileno(), line) < len(line):
                os.ftruncate(file.fileno(), size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise UsageError(f"could not write {path}: {error.strerror}") from error


async def _fetch_key_of_known_type(
    target: SshTarget, keys: list[asyncssh.SSHKey], *, timeout_s: float
) -> asyncssh.SSHKey:
    """Requests a key of a known type if there is one: a key of another type could not be compared."""
    name = target.node.name
    kinds = list(dict.fromkeys(kind.decode() for key in keys for kind in key.sig_algorithms))
    try:
        async with asyncio.timeout(timeout_s):
            key = await _fetch_key_of_types(target, kinds)
    except (asyncssh.Error, OSError, ValueError) as error:
        why = format_error(error) if str(error) else f"no response within {timeout_s:g} s"
        raise UnreachableError(
            f"node {name}: could not reach {format_target_address(target)}: {why}",
            hint=f"try '{format_ssh_command(target.node)}'",
        ) from error
    if key is None:
        raise UnreachableError(f"node {name}: {target.host} presented no host key")
    return key


async def _fetch_key_of_types(target: SshTarget, kinds: list[str]) -> asyncssh.SSHKey | None:
    """Requests a key of these types; if the host disconnects because it has none, requests any."""
    name, config, options = target.node.name, target.config_files, target.options
    if kinds:
        try:
            return await asyncssh.get_server_host_key(
                name, config=config, options=options, server_host_key_algs=kinds
            )
        except (asyncssh.DisconnectError, OSError) as error:
            _log.info("the host offered no host key of a known type", extra={"node": name, "why": str(error)})
    return await asyncssh.get_server_host_key(name, config=config, options=options)


def _expand_user(path: Path) -> Path:
    return path.expanduser()


def _known_host_ca_and_revoked_keys(
    target: SshTarget,
) -> tuple[list[asyncssh.SSHKey], list[asyncssh.SSHKey], list[asyncssh.SSHKey]]:
    port = target.port if target.port != _DEFAULT_SSH_PORT else None
    keys, authorities, revoked, *_ = asyncssh.match_known_hosts(target.known_hosts, target.host, "", port)
    # If a host and port have only revoked keys, asyncssh falls back to the host without the port.
    spelled = f"[{target.host}]:{target.port}"
    _, _, also_revoked, *_ = asyncssh.match_known_hosts(target.known_hosts, spelled, "", None)
    return list(keys), list(authorities), [*revoked, *also_revoked]


def _host_key_changed_error(
    target: SshTarget, fingerprint: str, keys: list[asyncssh.SSHKey]
) -> HostKeyChangedError:
    known = ", ".join(key.get_fingerprint() for key in keys[:4])
    return HostKeyChangedError(
        f"node {target.node.name}: the host key of {target.known_hosts_name} has changed: it presented "
        f"{fingerprint}, known_hosts has {known}; this may be a man-in-the-middle attack",
        hint=target.changed_key_hint,
    )
