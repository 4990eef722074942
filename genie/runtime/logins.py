"""Stored logins: one token per cluster address, and the cluster that commands use by default.

    STATE/logins/HOST:PORT.token    mode 0600
    STATE/logins/default            address of the last login

Each file is replaced atomically, so concurrent logins do not overwrite each other. Does not verify tokens
(credentials.py).
"""

from __future__ import annotations

import errno
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from genie.errors import GenieError, StoreFullError, TokenMissingError
from genie.model.names import address_text, parse_endpoint
from genie.processes import files
from genie.tenancy.access import Token, parse_token

_LOGINS_FOLDER = "logins"
_DEFAULT_LOGIN_FILE = "default"
_TOKEN_FILE_SUFFIX = ".token"

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Login:
    """`token` is None if its file cannot be read."""

    address: str
    token: Token | None
    is_default: bool


def login_name(host: str, port: int) -> str:
    """The address under which a login is stored, normalized."""
    try:
        host = str(ipaddress.ip_address(host))
    except ValueError:
        host = host.lower()
    return address_text(host, port)


def store_login(state_dir: Path, host: str, port: int, token: Token) -> None:
    """Stores the token for this address and makes it the default cluster."""
    name = login_name(host, port)
    files.write_private(_login_path(state_dir, name), f"{token}\n".encode())
    files.write_private(state_dir / _LOGINS_FOLDER / _DEFAULT_LOGIN_FILE, f"{name}\n".encode())


def remove_login(state_dir: Path, host: str, port: int) -> bool:
    """Removes a login, and temporary files of an interrupted store_login(). False if there was no login.

    A cluster without a login is no longer the default. Raises StoreFullError if a file cannot be removed.
    """
    name = login_name(host, port)
    path = _login_path(state_dir, name)
    try:
        if _read_default_login_name(state_dir) == name:
            (state_dir / _LOGINS_FOLDER / _DEFAULT_LOGIN_FILE).unlink(missing_ok=True)
        files.remove_unfinished_writes(path)
        path.unlink()
    except OSError as error:
        if _is_file_missing_error(error):
            return False
        raise StoreFullError(f"cannot remove {path}: {error.strerror}", hint="check permissions") from error
    return True


def read_login(state_dir: Path, host: str, port: int) -> Token | None:
    """The token that is stored for this address, or None. Raises TokenMissingError if it cannot be read."""
    name = login_name(host, port)
    path = _login_path(state_dir, name)
    try:
        return parse_token(files.read_small_file(path))
    except (OSError, UnicodeDecodeError, GenieError) as error:
        if isinstance(error, OSError) and _is_file_missing_error(error):
            return None
        raise TokenMissingError(
            f"the stored login {path} cannot be read: {error}", hint=f"run 'genie login {name}' again"
        ) from error


def default_login(state_dir: Path) -> Address | None:
    """The address of the last login; None if there is none, or after logout."""
    try:
        host, port = parse_endpoint(_read_default_login_name(state_dir))
        return (host, port) if _login_path(state_dir, login_name(host, port)).exists() else None
    except (OSError, GenieError):
        return None


def find_login_on_other_port(state_dir: Path, host: str, port: int) -> str | None:
    """The address of a login to another port of this host, preferably the last login; None without one."""
    same_host = login_name(host, port).removesuffix(f":{port}")
    found = [
        login
        for login in list_logins(state_dir)
        if login.token and login.address.rpartition(":")[0] == same_host
    ]
    found.sort(key=lambda login: not login.is_default)
    return found[0].address if found else None


def list_logins(state_dir: Path) -> list[Login]:
    """Sorted by address."""
    default = _read_default_login_name(state_dir)
    names = sorted(
        path.name.removesuffix(_TOKEN_FILE_SUFFIX)
        for path in (state_dir / _LOGINS_FOLDER).glob(f"*{_TOKEN_FILE_SUFFIX}")
    )
    return [Login(name, _try_read_token(_login_path(state_dir, name)), name == default) for name in names]


def _try_read_token(path: Path) -> Token | None:
    try:
        return parse_token(files.read_small_file(path))
    except (OSError, UnicodeDecodeError, GenieError):
        return None


def _read_default_login_name(state_dir: Path) -> str:
    try:
        return files.read_small_file(state_dir / _LOGINS_FOLDER / _DEFAULT_LOGIN_FILE).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _is_file_missing_error(error: OSError) -> bool:
    """Whether the file does not exist; a file with a name that is too long cannot exist."""
    return error.errno in (errno.ENOENT, errno.ENAMETOOLONG)


def _login_path(state_dir: Path, name: str) -> Path:
    return state_dir / _LOGINS_FOLDER / f"{name}{_TOKEN_FILE_SUFFIX}"
