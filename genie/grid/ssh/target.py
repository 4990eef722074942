"""The SSH target of a node: its settings from ~/.ssh/config, overridden by the grid file.

Also translates connection errors. Connections are opened by pool.py, login keys are in keys.py, and
host_trust.py adds host keys.
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
from genie.grid.ssh.config import open_config_for_host
from genie.grid.ssh.keys import check_key_file, list_key_files, load_login_key_arguments, passphrase_hint

_DEFAULT_SSH_PORT = 22
_DEFAULT_KNOWN_HOSTS_FILE = "~/.ssh/known_hosts"


@dataclass(frozen=True)
class SshTarget:
    """The SSH settings of a node. `host` and `port` are those of its entry in known_hosts."""

    node: GridNode
    host: str
    port: int
    config_files: list[str]
    options: asyncssh.SSHClientConnectionOptions
    ciphers: list[str]
    known_hosts: asyncssh.SSHKnownHosts
    known_hosts_files: tuple[Path, ...]
    key_files: tuple[Path, ...]
    """Files of the keys to offer, existing or not."""
    login_key_arguments: Mapping[str, Any]
    """Connection arguments for the keys, which `options` does not contain."""

    @property
    def known_host_keys(self) -> list[asyncssh.SSHKey]:
        """The keys of the host in known_hosts, including those of its certificate authorities."""
        return self._find_host_keys_in(self.known_hosts)

    @property
    def known_hosts_name(self) -> str:
        """The name of the host in known_hosts: with its port, unless that is 22 or there is an alias."""
        plain = self.port == _DEFAULT_SSH_PORT or bool(self.options.host_key_alias)
        return self.host if plain else f"[{self.host}]:{self.port}"

    @property
    def changed_key_hint(self) -> str:
        """Hint for a changed host key, with commands that are quoted for the shell."""
        files = self.known_hosts_files
        file = next(
            (each for each in files if self._find_host_keys_in(KnownHostsCache().load([each]))), files[0]
        )
        words = shlex.join(["ssh-keygen", "-f", str(file), "-R", self.known_hosts_name])
        return (
            f"if the host was reinstalled, remove the old key: {words} "
            f"and then: grid-cli nodes trust {self.node.name}"
        )

    def _find_host_keys_in(self, known: asyncssh.SSHKnownHosts) -> list[asyncssh.SSHKey]:
        port = self.port if self.port != _DEFAULT_SSH_PORT else None
        keys, authorities, *_ = asyncssh.match_known_hosts(known, self.host, "", port)
        return [*keys, *authorities]


class KnownHostsCache:
    """A cache of parsed known_hosts files."""

    def __init__(self) -> None:
        self._parsed_by_files: dict[tuple[str, ...], asyncssh.SSHKnownHosts] = {}

    def load(self, files: Sequence[Path]) -> asyncssh.SSHKnownHosts:
        named = tuple(map(str, files))
        if named not in self._parsed_by_files:
            existing = [str(file) for file in files if file.is_file()]
            try:
                read = asyncssh.read_known_hosts(existing) if existing else asyncssh.import_known_hosts("")
            except (ValueError, OSError, UnicodeDecodeError) as error:
                raise UsageError(f"could not read {' or '.join(existing)}: {error}") from None
            self._parsed_by_files[named] = read
        return self._parsed_by_files[named]


async def resolve_ssh_target(
    node: GridNode, file: GridFile, ssh_config: Path, *, trusted: KnownHostsCache
) -> SshTarget:
    """Reads the settings of the node from ~/.ssh/config; the grid file overrides them. Raises UsageError."""
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
        options = await _make_connection_options(given, ssh_config)
    except (asyncssh.Error, OSError, ValueError) as error:
        raise UsageError(
            f"node {node.name}: could not use {ssh_config}: {format_error(error)}",
            hint=f"try '{format_ssh_command(node)}'",
        ) from error
    # With "UserKnownHostsFile none", asyncssh would trust any host; here it means that no host is known.
    named = options.known_hosts if isinstance(options.known_hosts, list) else None
    files = (
        [Path(_expand_user(str(each))) for each in named or [_DEFAULT_KNOWN_HOSTS_FILE]]
        if named is not None
        else []
    )
    offered = list_key_files(options, own=file.ssh.key_file)
    return SshTarget(
        node,
        host=options.host_key_alias or options.host,
        port=options.port or _DEFAULT_SSH_PORT,
        config_files=config,
        options=options,
        ciphers=_choose_ciphers(options),
        known_hosts=trusted.load(files),
        known_hosts_files=tuple(files),
        key_files=offered,
        login_key_arguments=await asyncio.to_thread(load_login_key_arguments, options, offered),
    )


def _choose_ciphers(options: asyncssh.SSHClientConnectionOptions) -> list[str]:
    """The ciphers of ~/.ssh/config in its order; by default AES-GCM first, which needs half the CPU time."""
    known = [each.decode() for each in options.encryption_algs]
    if list(options.encryption_algs) != get_default_encryption_algs():
        return known
    return sorted(known, key=lambda each: "gcm" not in each)


def _expand_user(path: str) -> str:
    return str(Path(path).expanduser())


def _is_file(path: Path) -> bool:
    return path.is_file()


async def _make_connection_options(
    given: dict[str, Any], ssh_config: Path
) -> asyncssh.SSHClientConnectionOptions:
    construct = asyncssh.SSHClientConnectionOptions.construct
    found: asyncssh.SSHClientConnectionOptions
    if given["config"]:
        with (
            open_config_for_host(given["host"], ssh_config) as short,
            contextlib.suppress(asyncssh.ConfigParseError),
        ):
            found = await construct(client_keys=None, **{**given, "config": [str(short)]})
            return found
    found = await construct(client_keys=None, **given)  # its errors name the original file
    return found


def format_ssh_command(node: GridNode) -> str:
    """Returns the ssh command that connects as the grid does."""
    port = f"-p {node.port} " if node.port is not None else ""
    return f"ssh {port}{node.user}@{node.name}" if node.user is not None else f"ssh {port}{node.name}"


def format_target_address(target: SshTarget) -> str:
    """Formats host, port and jump hosts for errors."""
    port = "" if target.port == _DEFAULT_SSH_PORT else f" port {target.port}"
    jump = target.options.tunnel
    return f"{target.host}{port}{f' through {jump}' if isinstance(jump, str) and jump else ''}"


def make_connect_error(target: SshTarget, error: Exception) -> GenieError:
    name, where = target.node.name, format_target_address(target)
    if isinstance(error, asyncssh.KeyExchangeFailed | asyncssh.HostKeyNotVerifiable):
        return _make_host_key_error(target, error, where=where)
    if isinstance(error, asyncssh.PermissionDenied):
        return LoginRefusedError(
            f"node {name}: {where} rejected the login of {target.options.username}",
            hint=f"try '{format_ssh_command(target.node)}'; {passphrase_hint(target.key_files)}, "
            "or select another key with ssh.key_file or IdentityFile",
        )
    if isinstance(error, asyncssh.KeyEncryptionError | asyncssh.KeyImportError):
        return LoginRefusedError(
            f"node {name}: could not use a private key: {error}", hint="add it with ssh-add"
        )
    return UnreachableError(
        f"node {name}: could not reach {where}: {format_error(error)}",
        hint=f"try '{format_ssh_command(target.node)}'",
    )


def _make_host_key_error(target: SshTarget, error: Exception, *, where: str) -> GenieError:
    name = target.node.name
    if target.known_host_keys:
        known = ", ".join(key.get_fingerprint() for key in target.known_host_keys[:4])
        return HostKeyChangedError(
            f"node {name}: the host key of {where} has changed; known_hosts has {known}; "
            "this may be a man-in-the-middle attack",
            hint=target.changed_key_hint,
        )
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return HostKeyUnknownError(
            f"node {name}: the host key of {where} is not in known_hosts",
            hint=f"'grid-cli nodes trust {name}' shows its fingerprint and adds it",
        )
    return UnreachableError(f"node {name}: key exchange with {where} failed: {format_error(error)}")


def format_error(error: BaseException | None) -> str:
    """Formats an error; for a failed connect without the call and arguments that asyncio adds."""
    refusals = re.findall(r"\[Errno ([0-9]{1,4})\] Connect call failed", str(error))
    if isinstance(error, OSError) and refusals:
        return ", ".join(dict.fromkeys(os.strerror(int(number)) for number in refusals))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__
