"""Validation of names, IDs and addresses. Pure. The rule for labels is in config/labels.py."""

from __future__ import annotations

import ipaddress
import re

from genie.errors import NameInvalidError, UsageError
from genie.model.limits import NAME_CHARS_MAX

_NAME_INNER_CHARS_MAX = NAME_CHARS_MAX - 2
_NAME = re.compile(rf"[A-Za-z0-9](?:[A-Za-z0-9._-]{{0,{_NAME_INNER_CHARS_MAX}}}[A-Za-z0-9])?")
_NODE_ID = re.compile(rf"[a-z0-9](?:[a-z0-9-]{{0,{_NAME_INNER_CHARS_MAX}}}[a-z0-9])?")
_JOB_ID = re.compile(r"j-[a-z2-7]{8}(?:\.[0-9]+)?")
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")

NAME_RULE = f"1 to {NAME_CHARS_MAX} letters, digits, '.', '_' or '-', with a letter or digit at both ends"
NODE_ID_RULE = f"1 to {NAME_CHARS_MAX} lower-case letters, digits or '-', with a letter or digit at both ends"
_HOST = re.compile(r"([A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?")
_BRACKETED_IPV6 = re.compile(rf"\[({_IPV6.pattern})\](?::([0-9]{{1,5}}))?")
_HOST_CHARS_MAX = 253
# Case-insensitive, as DNS is. The secret has 43 characters; the pin is optional.
_TOKEN = re.compile(r"(?i)genie\.(?:owner|user|join|node|server-join)\.[a-z0-9]+\.[a-z0-9_-]{43}")

ENV_KEY_RULE = "letters, digits and '_', not starting with a digit, at most 128"


def validate_name(value: str, *, what: str) -> str:
    """Returns `value` if it is a valid name of a job, token or tenant; else raises NameInvalidError."""
    return _check_pattern(_NAME, value, what=what, rule=NAME_RULE)


def validate_job_name(value: str) -> str:
    """Returns `value` if it is a valid name of a job, and not one that could be confused with a job ID."""
    if _JOB_ID.fullmatch(validate_name(value, what="job name")):
        raise NameInvalidError(f"job name {value!r} has the form of a job ID", hint="choose another name")
    return value


def validate_node_id(value: str, *, what: str = "node ID") -> str:
    """Returns `value` if it is a valid node ID, which is part of the host name in a certificate."""
    return _check_pattern(_NODE_ID, value, what=what, rule=NODE_ID_RULE)


def validate_env_key(value: str, *, what: str = "environment variable") -> str:
    return _check_pattern(_ENV_KEY, value, what=what, rule=ENV_KEY_RULE)


def node_id_from(text: str) -> str:
    """A valid node ID that is derived from a host name; 'node' if no character is usable."""
    kept = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:NAME_CHARS_MAX].strip("-")
    return kept or "node"


def parse_address(text: str, *, what: str = "the address") -> tuple[str, int | None]:
    """Parses HOST, HOST:PORT, [IPV6]:PORT or IPV6; the port is None if it is not given.

    Raises UsageError. A token is rejected and not repeated in the error: it has the form of a host name and
    would be sent to DNS servers.
    """
    if _TOKEN.search(text):
        raise UsageError(
            f"{what}: this is a token, not an address; your shell may have saved it in its history",
            hint="revoke it, and enter another one with 'genie login HOST[:PORT]', which prompts for it",
        )
    if _is_ipv6(text):
        return text, None
    match = _HOST.fullmatch(text) or _BRACKETED_IPV6.fullmatch(text)
    if match is None or (":" in match[1] and not _is_ipv6(match[1])):
        raise UsageError(
            f"{what} {_quote(text)} is not an address", hint="write HOST, HOST:PORT or [IPV6]:PORT"
        )
    if len(match[1]) > _HOST_CHARS_MAX:
        raise UsageError(
            f"{what} {_quote(text)} is too long", hint=f"host names have at most {_HOST_CHARS_MAX} characters"
        )
    port = None if match[2] is None else int(match[2])
    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"{what} {_quote(text)}: port {port} is not allowed", hint="allowed: 1 to 65535")
    return match[1], port


def parse_endpoint(text: str, *, what: str = "the address", port: int | None = None) -> tuple[str, int]:
    """Like parse_address, with `port` as the default; raises UsageError without a port."""
    host, given = parse_address(text, what=what)
    found = port if given is None else given
    if found is None:
        raise UsageError(f"{what} {_quote(text)} has no port", hint="write HOST:PORT or [IPV6]:PORT")
    return host, found


def address_text(host: str, port: int) -> str:
    """HOST:PORT or [IPV6]:PORT, the inverse of parse_endpoint."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address or 'localhost'."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _check_pattern(pattern: re.Pattern[str], value: str, *, what: str, rule: str) -> str:
    if not pattern.fullmatch(value):
        raise NameInvalidError(f"{what} {_quote(value)} is not allowed", hint=f"use {rule}")
    return value


def _is_ipv6(text: str) -> bool:
    """Uses the pattern, too, because `ipaddress` accepts any characters in a zone."""
    try:
        return _IPV6.fullmatch(text) is not None and ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _quote(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
