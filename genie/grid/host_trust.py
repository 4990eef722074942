"""Host keys that are not known yet: fetched for a person to compare, and added to known_hosts.

The way to the host is that of the pool (~/.ssh/config, jump hosts included). A host that shows another
key than the known one is a hard error here as everywhere. Not for: asking the person (cli).
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
from genie.grid.ssh_target import KnownHosts, Target, place_text, resolve, told

_log = logging.getLogger(__name__)

_SSH_PORT = 22


@dataclass(frozen=True)
class HostKey:
    """What a host showed. `host` is how known_hosts names it; `known` says that its key is there already."""

    node: str
    host: str
    kind: str
    fingerprint: str
    line: str
    known: bool
    known_hosts: Path


async def fetch_host_key(node: GridNode, file: GridFile, ssh_config: Path, *, timeout_s: float) -> HostKey:
    """Connects as far as the key, without logging in.

    Raises HostKeyChangedError, UnreachableError, or UsageError where no file could take the key.
    """
    target = await resolve(node, file, _expanded(ssh_config), trusted=KnownHosts())
    if not target.known_hosts_files:
        raise UsageError(
            f"node {node.name}: {ssh_config} gives no file for known hosts",
            hint="take 'UserKnownHostsFile none' out of it",
        )
    keys, authorities, revoked = _known(target)
    key = await _fetch(target, keys, timeout_s=timeout_s)
    where = target.entry
    shown = key.get_fingerprint()
    if key in revoked:
        raise HostKeyChangedError(f"node {node.name}: {where} shows a key that is revoked ({shown})")
    if keys and key not in keys:
        raise _changed(target, shown, keys)
    kind, _, body = key.export_public_key("openssh").decode().strip().partition(" ")
    return HostKey(
        node=node.name,
        host=where,
        kind=kind,
        fingerprint=shown,
        line=f"{where} {kind} {body.split()[0]}",
        known=key in keys or bool(authorities),
        known_hosts=target.known_hosts_files[0],
    )


def add_host_key(key: HostKey) -> None:
    """Appends its line, whole or not at all. Raises UsageError when the file cannot be written."""
    path = key.known_hosts
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "rb+", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            whole = size == 0 or os.pread(file.fileno(), 1, size - 1) == b"\n"
            line = f"{'' if whole else chr(10)}{key.line}\n".encode()
            if os.write(file.fileno(), line) < len(line):
                os.ftruncate(file.fileno(), size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


async def _fetch(target: Target, keys: list[asyncssh.SSHKey], *, timeout_s: float) -> asyncssh.SSHKey:
    """Asks for a key of a kind that is known, if any is: another kind would prove nothing."""
    name = target.node.name
    kinds = list(dict.fromkeys(kind.decode() for key in keys for kind in key.sig_algorithms))
    try:
        async with asyncio.timeout(timeout_s):
            key = await _shown(target, kinds)
    except (asyncssh.Error, OSError, ValueError) as error:
        why = told(error) if str(error) else f"no answer within {timeout_s:g} s"
        raise UnreachableError(
            f"node {name}: {place_text(target)} cannot be reached: {why}", hint=f"try 'ssh {name}'"
        ) from error
    if key is None:
        raise UnreachableError(f"node {name}: {target.host} showed no host key")
    return key


async def _shown(target: Target, kinds: list[str]) -> asyncssh.SSHKey | None:
    """A host that has no key of these kinds hangs up; it is asked for any."""
    name, config, options = target.node.name, target.config, target.options
    if kinds:
        try:
            return await asyncssh.get_server_host_key(
                name, config=config, options=options, server_host_key_algs=kinds
            )
        except (asyncssh.DisconnectError, OSError) as error:
            _log.info("no host key of the known kinds", extra={"node": name, "why": str(error)})
    return await asyncssh.get_server_host_key(name, config=config, options=options)


def _expanded(path: Path) -> Path:
    return path.expanduser()


def _known(target: Target) -> tuple[list[asyncssh.SSHKey], list[asyncssh.SSHKey], list[asyncssh.SSHKey]]:
    port = target.port if target.port != _SSH_PORT else None
    keys, authorities, revoked, *_ = asyncssh.match_known_hosts(target.known_hosts, target.host, "", port)
    # Where a host and port have revoked keys alone, the library goes on to the host without the port.
    spelled = f"[{target.host}]:{target.port}"
    _, _, also_revoked, *_ = asyncssh.match_known_hosts(target.known_hosts, spelled, "", None)
    return list(keys), list(authorities), [*revoked, *also_revoked]


def _changed(target: Target, shown: str, keys: list[asyncssh.SSHKey]) -> HostKeyChangedError:
    known = ", ".join(key.get_fingerprint() for key in keys[:4])
    return HostKeyChangedError(
        f"node {target.node.name}: {target.entry} shows another host key ({shown}) "
        f"than known_hosts has ({known}); someone may be listening in",
        hint=target.way_out_of_a_changed_key,
    )
