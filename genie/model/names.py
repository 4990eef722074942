"""Names, ids and addresses: what is allowed, and the error that says so. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from genie.config import LABEL, LABEL_RULE, LABELS_MAX
from genie.errors import NameInvalidError, UsageError

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_NODE_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")

NAME_RULE = "1 to 63 letters, digits, '.', '_' or '-', with a letter or digit at both ends"
NODE_ID_RULE = "1 to 63 lower-case letters, digits or '-', with a letter or digit at both ends"
_HOST = re.compile(r"([A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?)\](?::([0-9]{1,5}))?")

ENV_KEY_RULE = "letters, digits and '_', not starting with a digit, at most 128"


def checked_name(value: str, *, what: str) -> str:
    """`value` if it may name a job, a token or a tenant; NameInvalidError that names `what` otherwise."""
    return _checked(_NAME, value, what=what, rule=NAME_RULE)


def checked_node_id(value: str, *, what: str = "node id") -> str:
    """`value` if it may name a node: it becomes part of a certificate's host name."""
    return _checked(_NODE_ID, value, what=what, rule=NODE_ID_RULE)


def checked_env_key(value: str, *, what: str = "environment variable") -> str:
    return _checked(_ENV_KEY, value, what=what, rule=ENV_KEY_RULE)


def checked_label(value: str, *, what: str) -> str:
    """`value` if it may be a label's key, its value, or the name of a rack."""
    return _checked(LABEL, value, what=what, rule=LABEL_RULE)


def checked_labels(labels: Mapping[str, str], *, what: str = "label") -> Mapping[str, str]:
    """A node's labels, or those that a job asks for."""
    if len(labels) > LABELS_MAX:
        raise UsageError(f"{what}: there are {len(labels)}", hint=f"the most is {LABELS_MAX}")
    for key, value in labels.items():
        checked_label(key, what=f"the name of {what}")
        checked_label(value, what=f"the value of {what} {key}")
    return labels


def node_id_from(text: str) -> str:
    """The nearest allowed node id to a host name; 'node' when nothing of it is left."""
    kept = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].strip("-")
    return kept or "node"


def parse_address(text: str, *, what: str = "the address") -> tuple[str, int | None]:
    """Host and port of HOST, HOST:PORT, [IPV6]:PORT or a bare IPV6; the port is None where none is given."""
    if _is_ipv6(text):
        return text, None
    match = _HOST.fullmatch(text) or _BRACKETED.fullmatch(text)
    if match is None or (":" in match[1] and not _is_ipv6(match[1])):
        raise UsageError(f"{what} {_shown(text)} cannot be read", hint="write HOST, HOST:PORT or [IPV6]:PORT")
    port = None if match[2] is None else int(match[2])
    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"{what} {_shown(text)}: there is no port {port}", hint="ports go from 1 to 65535")
    return match[1], port


def parse_endpoint(text: str, *, what: str = "the address", port: int | None = None) -> tuple[str, int]:
    """Like parse_address, with `port` where the text has none; UsageError without either."""
    host, given = parse_address(text, what=what)
    found = port if given is None else given
    if found is None:
        raise UsageError(f"{what} {_shown(text)} has no port", hint="write HOST:PORT or [IPV6]:PORT")
    return host, found


def address_text(host: str, port: int) -> str:
    """What parse_endpoint reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _checked(pattern: re.Pattern[str], value: str, *, what: str, rule: str) -> str:
    if not pattern.fullmatch(value):
        raise NameInvalidError(f"{what} {_shown(value)} is not allowed", hint=f"use {rule}")
    return value


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
