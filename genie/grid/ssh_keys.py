"""What a key file is: a private key, one with a passphrase, or something else under that name.

Not for: loading the keys of a login (ssh_pool.py), or the keys of hosts (host_trust.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import asyncssh

from genie.errors import UsageError

_FILE_BYTES_MAX = 1 << 20
_SHOWN_MAX = 4
_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


def check_key_file(path: Path, *, named: str) -> None:
    """Raises UsageError for what is no private key. One with a passphrase is: the agent may have it."""
    try:
        fault = _fault(_read(path))
    except OSError as error:
        raise UsageError(f"ssh.key_file {named!r} cannot be read: {error.strerror}") from None
    if fault:
        way = f"name {named.removesuffix('.pub')!r}" if named.endswith(".pub") else "name a private key"
        raise UsageError(f"ssh.key_file {named!r} {fault}", hint=f"{way}, or none")


def passphrase_hint(paths: Sequence[str]) -> str:
    """What to do about those of the files that have a passphrase; in general where none of them has."""
    files = [Path(path).expanduser() for path in paths or _DEFAULT_KEYS]
    locked = [str(file) for file in dict.fromkeys(files) if _has_passphrase(file)][:_SHOWN_MAX]
    if not locked:
        return "a key with a passphrase must be in the agent (ssh-add)"
    has = "has a passphrase and is" if len(locked) == 1 else "have a passphrase and are"
    return f"{', '.join(locked)} {has} of use only in the agent (ssh-add {shlex.join(locked)})"


def _fault(data: bytes) -> str:
    """'' for a private key."""
    if not data.strip():
        return "is empty"
    error = _import_error(data)
    if error is None or _is_about_passphrase(error):
        return ""
    if _is(asyncssh.import_public_key, data):
        return "is a public key"
    if _is(asyncssh.import_certificate, data):
        return "is a certificate"
    return f"is no private key: {error}"


def _has_passphrase(path: Path) -> bool:
    try:
        error = _import_error(_read(path))
    except OSError:
        return False
    return error is not None and _is_about_passphrase(error)


def _import_error(data: bytes) -> ValueError | None:
    try:
        # Only to tell what it is: whether the primes of a key of RSA are some takes a third of a second.
        asyncssh.import_private_key(data, unsafe_skip_rsa_key_validation=True)
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        return error
    return None


def _is_about_passphrase(error: ValueError) -> bool:
    return str(error).startswith("Passphrase")  # as asyncssh tells it itself: it has no type for it


def _is(kind: Callable[[bytes], object], data: bytes) -> bool:
    try:
        kind(data)
    except asyncssh.KeyImportError:
        return False
    return True


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_FILE_BYTES_MAX)
