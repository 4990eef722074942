"""The keys that a login offers, and what a key file is: a private key, one with a passphrase, something else.

Not for: the keys of hosts (host_trust.py).
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import asyncssh

from genie.errors import UsageError

_log = logging.getLogger(__name__)

_FILE_BYTES_MAX = 1 << 20
_SHOWN_MAX = 4
_HOME_KEYS = tuple(
    f"~/.ssh/{name}" for name in ("id_ed25519_sk", "id_ecdsa_sk", "id_ed25519", "id_ecdsa", "id_rsa")
)
_NO_IDENTITY = b""
"""Where only named keys of the agent may be used and there are none: with no name, all would be."""


def key_files(options: asyncssh.SSHClientConnectionOptions, *, own: str | None) -> tuple[Path, ...]:
    """Of the keys that a login offers, whether they are there or not: `own` and those that ~/.ssh/config
    names (`none` is none), else those of the home."""
    named = cast(Sequence[str] | None, options.config.get("IdentityFile"))
    if own is not None:
        named = [own, *(named or ())]
    return tuple(Path(each).expanduser() for each in (_HOME_KEYS if named is None else named))


def login_keys(options: asyncssh.SSHClientConnectionOptions, files: Sequence[Path]) -> dict[str, Any]:
    """Arguments with which asyncssh offers the keys of these files, and no others.

    As OpenSSH, it passes over what is not there, is no private key or has a passphrase: the agent may have
    it. The primes of an RSA key are not tested: that takes a third of a second for each host, and the key
    is the user's own.
    """
    beside = cast(Sequence[str], options.config.get("CertificateFile", ()))
    certificates = [each for path in beside for each in _certificates(Path(path).expanduser())]
    pairs = [pair for file in files for pair in _key_pairs(file, certificates)]
    identities = None
    if options.config.get("IdentitiesOnly"):
        known = [pair.public_data for pair in pairs] + [each for file in files for each in _public_data(file)]
        identities = list(dict.fromkeys(known)) or [_NO_IDENTITY]
    # An empty list would have asyncssh look for keys in the home.
    return {"client_keys": pairs or iter(()), "client_certs": [], "agent_identities": identities}


def _certificates(file: Path) -> Sequence[asyncssh.SSHCertificate]:
    """One that cannot be read costs no key: OpenSSH goes on without it, too."""
    try:
        return asyncssh.read_certificate_list(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _log.info("a certificate is passed over", extra={"file": str(file), "why": str(error)})
        return []


def _key_pairs(file: Path, certificates: Sequence[asyncssh.SSHCertificate]) -> Sequence[asyncssh.SSHKeyPair]:
    try:
        return asyncssh.load_keypairs(
            [str(file)], certlist=certificates, ignore_encrypted=True, unsafe_skip_rsa_key_validation=True
        )
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _log.info("a key is passed over", extra={"file": str(file), "why": str(error)})
        return []


def _public_data(file: Path) -> Iterator[bytes]:
    """Of what lies beside a private key, or under its name: by that, the agent knows its own."""
    with contextlib.suppress(OSError, ValueError):
        yield asyncssh.read_certificate(f"{file}-cert.pub").public_data
    for path in (f"{file}.pub", str(file)):
        with contextlib.suppress(OSError, ValueError):
            yield asyncssh.read_public_key(path).public_data


def check_key_file(named: str) -> None:
    """Raises UsageError for what is no private key. One with a passphrase is: the agent may have it."""
    path = Path(named).expanduser()
    if not path.is_file():
        fault = "is not a file" if path.exists() else "is not there"
        raise UsageError(f"ssh.key_file {named!r} {fault}", hint="name a private key, or none")
    try:
        fault = _fault(_read(path))
    except OSError as error:
        raise UsageError(f"ssh.key_file {named!r} cannot be read: {error.strerror}") from None
    if fault:
        way = f"name {named.removesuffix('.pub')!r}" if named.endswith(".pub") else "name a private key"
        raise UsageError(f"ssh.key_file {named!r} {fault}", hint=f"{way}, or none")


def passphrase_hint(files: Sequence[Path]) -> str:
    """What to do about those of the files that have a passphrase; in general where none of them has."""
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
        # Only to tell what it is: testing the primes of an RSA key takes a third of a second.
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
