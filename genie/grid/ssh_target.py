"""Where a node is and how it is reached: what ~/.ssh/config says of it, under what the grid's file says.

Also what it means when a connection there fails. Not for: connecting (ssh_pool.py), which keys are offered
(ssh_keys.py), and trusting a host (host_trust.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh
from asyncssh.encryption import get_default_encryption_algs

from genie.errors import (
    GenieError,
    HostKeyChangedError,
    HostKeyUnknownError,
    LoginRefusedError,
    UnreachableError,
    UsageError,
)
from genie.grid.grid_file import GridFile, GridNode
from genie.grid.ssh_config import config_about
from genie.grid.ssh_keys import check_key_file, key_files, login_keys, passphrase_hint

_SSH_PORT = 22
_KNOWN_HOSTS = "~/.ssh/known_hosts"


@dataclass(frozen=True)
class Target:
    """Where ~/.ssh/config leads for a node. `host` and `port` are what known_hosts names it by."""

    node: GridNode
    host: str
    port: int
    config: list[str]
    options: asyncssh.SSHClientConnectionOptions
    ciphers: list[str]
    known_hosts: asyncssh.SSHKnownHosts
    known_hosts_files: tuple[Path, ...]
    key_files: tuple[Path, ...]
    """Of the keys that are offered, whether they are there or not."""
    keys: Mapping[str, Any]
    """What a connection must be given beside `options`, which has no keys."""

    @property
    def known_keys(self) -> list[asyncssh.SSHKey]:
        """The host's keys in known_hosts, certificates of its authorities included."""
        return self._keys_in(self.known_hosts)

    @property
    def entry(self) -> str:
        """How known_hosts names the host: with its port, unless that is 22 or an alias stands for both."""
        plain = self.port == _SSH_PORT or bool(self.options.host_key_alias)
        return self.host if plain else f"[{self.host}]:{self.port}"

    @property
    def way_out_of_a_changed_key(self) -> str:
        """The commands, to be typed as they are: a file of its own and a port in brackets need care."""
        files = self.known_hosts_files
        file = next((each for each in files if self._keys_in(KnownHosts().of([each]))), files[0])
        words = shlex.join(["ssh-keygen", "-f", str(file), "-R", self.entry])
        return (
            f"when you know that the host was installed anew, remove the old key: {words} "
            f"and then: grid-cli nodes trust {self.node.name}"
        )

    def _keys_in(self, known: asyncssh.SSHKnownHosts) -> list[asyncssh.SSHKey]:
        port = self.port if self.port != _SSH_PORT else None
        keys, authorities, *_ = asyncssh.match_known_hosts(known, self.host, "", port)
        return [*keys, *authorities]


class KnownHosts:
    """known_hosts files, each set of them read once."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, ...], asyncssh.SSHKnownHosts] = {}

    def of(self, files: Sequence[Path]) -> asyncssh.SSHKnownHosts:
        named = tuple(map(str, files))
        if named not in self._read:
            there = [str(file) for file in files if file.is_file()]
            try:
                read = asyncssh.read_known_hosts(there) if there else asyncssh.import_known_hosts("")
            except (ValueError, OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{' or '.join(there)} cannot be read: {error}") from None
            self._read[named] = read
        return self._read[named]


async def resolve(node: GridNode, file: GridFile, ssh_config: Path, *, trusted: KnownHosts) -> Target:
    """What ~/.ssh/config says about the host, under what the grid's file says. Raises UsageError."""
    given: dict[str, Any] = {}
    if node.user is not None:
        given["username"] = node.user
    if node.port is not None:
        given["port"] = node.port
    config = [str(ssh_config)] if _is_file(ssh_config) else []
    given |= {"config": config, "host": node.name}
    if file.ssh.key_file is not None:
        check_key_file(file.ssh.key_file)
    try:
        options = await _options(given, ssh_config)
    except (asyncssh.Error, OSError, ValueError) as error:
        raise UsageError(
            f"node {node.name}: {ssh_config} cannot be used: {told(error)}",
            hint=f"try '{ssh_line(node)}'",
        ) from error
    # With "UserKnownHostsFile none" the library would trust any host; here that means that none is known.
    named = options.known_hosts if isinstance(options.known_hosts, list) else None
    files = [Path(_expanded(str(each))) for each in named or [_KNOWN_HOSTS]] if named is not None else []
    offered = key_files(options, own=file.ssh.key_file)
    return Target(
        node,
        host=options.host_key_alias or options.host,
        port=options.port or _SSH_PORT,
        config=config,
        options=options,
        ciphers=_ciphers(options),
        known_hosts=trusted.of(files),
        known_hosts_files=tuple(files),
        key_files=offered,
        keys=await asyncio.to_thread(login_keys, options, offered),
    )


def _ciphers(options: asyncssh.SSHClientConnectionOptions) -> list[str]:
    """Those of ~/.ssh/config in its order; without any, AES-GCM first, which costs us half as much here."""
    known = [each.decode() for each in options.encryption_algs]
    if list(options.encryption_algs) != get_default_encryption_algs():
        return known
    return sorted(known, key=lambda each: "gcm" not in each)


def _expanded(path: str) -> str:
    return str(Path(path).expanduser())


def _is_file(path: Path) -> bool:
    return path.is_file()


async def _options(given: dict[str, Any], ssh_config: Path) -> asyncssh.SSHClientConnectionOptions:
    construct = asyncssh.SSHClientConnectionOptions.construct
    found: asyncssh.SSHClientConnectionOptions
    if given["config"]:
        with config_about(given["host"], ssh_config) as short, contextlib.suppress(asyncssh.ConfigParseError):
            found = await construct(client_keys=None, **{**given, "config": [str(short)]})
            return found
    found = await construct(client_keys=None, **given)  # its errors name the file itself
    return found


def ssh_line(node: GridNode) -> str:
    """What to type to get there as the grid does."""
    port = f"-p {node.port} " if node.port is not None else ""
    return f"ssh {port}{node.user}@{node.name}" if node.user is not None else f"ssh {port}{node.name}"


def place_text(target: Target) -> str:
    """Host, port and jump hosts, as an error names them."""
    port = "" if target.port == _SSH_PORT else f" port {target.port}"
    jump = target.options.tunnel
    return f"{target.host}{port}{f' through {jump}' if isinstance(jump, str) and jump else ''}"


def connect_error(target: Target, error: Exception) -> GenieError:
    name, where = target.node.name, place_text(target)
    if isinstance(error, asyncssh.KeyExchangeFailed | asyncssh.HostKeyNotVerifiable):
        return _host_key_error(target, error, where=where)
    if isinstance(error, asyncssh.PermissionDenied):
        return LoginRefusedError(
            f"node {name}: {where} refused the login of {target.options.username}",
            hint=f"try '{ssh_line(target.node)}'; {passphrase_hint(target.key_files)}, "
            "and ssh.key_file or IdentityFile names another one",
        )
    if isinstance(error, asyncssh.KeyEncryptionError | asyncssh.KeyImportError):
        return LoginRefusedError(f"node {name}: a private key cannot be used: {error}", hint="ssh-add it")
    return UnreachableError(
        f"node {name}: {where} cannot be reached: {told(error)}", hint=f"try '{ssh_line(target.node)}'"
    )


def _host_key_error(target: Target, error: Exception, *, where: str) -> GenieError:
    name = target.node.name
    if target.known_keys:
        known = ", ".join(key.get_fingerprint() for key in target.known_keys[:4])
        return HostKeyChangedError(
            f"node {name}: {where} shows another host key than known_hosts has ({known}); "
            "someone may be listening in",
            hint=target.way_out_of_a_changed_key,
        )
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return HostKeyUnknownError(
            f"node {name}: the host key of {where} is in no known_hosts file",
            hint=f"'grid-cli nodes trust {name}' shows its fingerprint and asks",
        )
    return UnreachableError(f"node {name}: {where} and we have no way of encrypting in common: {told(error)}")


def told(error: BaseException | None) -> str:
    """In words for people: of an address that does not answer, asyncio tells the call and its arguments."""
    refusals = re.findall(r"\[Errno ([0-9]{1,4})\] Connect call failed", str(error))
    if isinstance(error, OSError) and refusals:
        return ", ".join(dict.fromkeys(os.strerror(int(number)) for number in refusals))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__
