"""The keys that are offered at login, and checks of key files. Host keys are in host_trust.py."""

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

_KEY_FILE_BYTES_MAX = 1 << 20
_KEY_FILES_SHOWN_MAX = 4
_DEFAULT_KEY_FILES = tuple(
    f"~/.ssh/{name}" for name in ("id_ed25519_sk", "id_ecdsa_sk", "id_ed25519", "id_ecdsa", "id_rsa")
)
_NO_IDENTITY_DATA = b""
"""Matches no key of the agent, for IdentitiesOnly without identities: an empty list would allow all."""


def list_key_files(options: asyncssh.SSHClientConnectionOptions, *, own: str | None) -> tuple[Path, ...]:
    """Returns the files of the keys to offer, existing or not: `own` and the IdentityFile entries of
    ~/.ssh/config (`none`: no keys), else the default keys in ~/.ssh."""
    named = cast(Sequence[str] | None, options.config.get("IdentityFile"))
    if own is not None:
        named = [own, *(named or ())]
    return tuple(Path(each).expanduser() for each in (_DEFAULT_KEY_FILES if named is None else named))


def load_login_key_arguments(
    options: asyncssh.SSHClientConnectionOptions, files: Sequence[Path]
) -> dict[str, Any]:
    """Returns the arguments with which asyncssh offers the keys of these files only.

    Like OpenSSH, skips files that are missing, not a private key, or have a passphrase: the agent may have
    that key. Skips the validation of RSA primes, which takes a third of a second per host.
    """
    certificate_files = cast(Sequence[str], options.config.get("CertificateFile", ()))
    certificates = [
        each for path in certificate_files for each in _read_certificates(Path(path).expanduser())
    ]
    pairs = [pair for file in files for pair in _load_key_pairs(file, certificates)]
    identities = None
    if options.config.get("IdentitiesOnly"):
        known = [pair.public_data for pair in pairs] + [
            each for file in files for each in _read_public_keys(file)
        ]
        identities = list(dict.fromkeys(known)) or [_NO_IDENTITY_DATA]
    # With an empty list, asyncssh would use the default keys in ~/.ssh.
    return {"client_keys": pairs or iter(()), "client_certs": [], "agent_identities": identities}


def _read_certificates(file: Path) -> Sequence[asyncssh.SSHCertificate]:
    """Reads certificates; skips an unreadable file, as OpenSSH does."""
    try:
        return asyncssh.read_certificate_list(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _log.info("skipping an unusable SSH certificate", extra={"file": str(file), "why": str(error)})
        return []


def _load_key_pairs(
    file: Path, certificates: Sequence[asyncssh.SSHCertificate]
) -> Sequence[asyncssh.SSHKeyPair]:
    try:
        return asyncssh.load_keypairs(
            [str(file)], certlist=certificates, ignore_encrypted=True, unsafe_skip_rsa_key_validation=True
        )
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _log.info("skipping an unusable SSH key", extra={"file": str(file), "why": str(error)})
        return []


def _read_public_keys(file: Path) -> Iterator[bytes]:
    """Yields the public keys that belong to a private key file, to match keys of the agent."""
    with contextlib.suppress(OSError, ValueError):
        yield asyncssh.read_certificate(f"{file}-cert.pub").public_data
    for path in (f"{file}.pub", str(file)):
        with contextlib.suppress(OSError, ValueError):
            yield asyncssh.read_public_key(path).public_data


def check_key_file(named: str) -> None:
    """Raises UsageError unless it is a private key; a passphrase is allowed: the agent may have the key."""
    path = Path(named).expanduser()
    if not path.is_file():
        fault = "is not a file" if path.exists() else "does not exist"
        raise UsageError(f"ssh.key_file {named!r} {fault}", hint="set it to a private key, or remove it")
    try:
        fault = _why_not_private_key(_read_file_limited(path))
    except OSError as error:
        raise UsageError(f"could not read ssh.key_file {named!r}: {error.strerror}") from None
    if fault:
        wanted = repr(named.removesuffix(".pub")) if named.endswith(".pub") else "a private key"
        raise UsageError(f"ssh.key_file {named!r} {fault}", hint=f"set it to {wanted}, or remove it")


def passphrase_hint(files: Sequence[Path]) -> str:
    """Returns a hint about the files that have a passphrase; a general one if none has."""
    locked = [str(file) for file in dict.fromkeys(files) if _has_passphrase(file)][:_KEY_FILES_SHOWN_MAX]
    if not locked:
        return "a key with a passphrase must be added to ssh-agent (ssh-add)"
    has = "has a passphrase and is" if len(locked) == 1 else "have a passphrase and are"
    return f"{', '.join(locked)} {has} usable only through ssh-agent (ssh-add {shlex.join(locked)})"


def _why_not_private_key(data: bytes) -> str:
    """Returns what is wrong with a key file; '' for a private key."""
    if not data.strip():
        return "is empty"
    error = _find_private_key_import_error(data)
    if error is None or _is_about_passphrase(error):
        return ""
    if _can_import_as(asyncssh.import_public_key, data):
        return "is a public key"
    if _can_import_as(asyncssh.import_certificate, data):
        return "is a certificate"
    return f"is not a private key: {error}"


def _has_passphrase(path: Path) -> bool:
    try:
        error = _find_private_key_import_error(_read_file_limited(path))
    except OSError:
        return False
    return error is not None and _is_about_passphrase(error)


def _find_private_key_import_error(data: bytes) -> ValueError | None:
    try:
        # Validating RSA primes takes a third of a second and is not needed here.
        asyncssh.import_private_key(data, unsafe_skip_rsa_key_validation=True)
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        return error
    return None


def _is_about_passphrase(error: ValueError) -> bool:
    return str(error).startswith("Passphrase")  # asyncssh has no type for this error


def _can_import_as(kind: Callable[[bytes], object], data: bytes) -> bool:
    try:
        kind(data)
    except asyncssh.KeyImportError:
        return False
    return True


def _read_file_limited(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_KEY_FILE_BYTES_MAX)
