"""Names and ids: which characters are allowed, and the error that says so. Pure."""

from __future__ import annotations

import re

from genie.errors import NameInvalidError

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_NODE_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")

NAME_RULE = "1 to 63 letters, digits, '.', '_' or '-', with a letter or digit at both ends"
NODE_ID_RULE = "1 to 63 lower-case letters, digits or '-', with a letter or digit at both ends"
ENV_KEY_RULE = "letters, digits and '_', not starting with a digit, at most 128"


def checked_name(value: str, *, what: str) -> str:
    """`value` if it may name a job, a token or a tenant; NameInvalidError that names `what` otherwise."""
    return _checked(_NAME, value, what=what, rule=NAME_RULE)


def checked_node_id(value: str, *, what: str = "node id") -> str:
    """`value` if it may name a node: it becomes part of a certificate's host name."""
    return _checked(_NODE_ID, value, what=what, rule=NODE_ID_RULE)


def checked_env_key(value: str, *, what: str = "environment variable") -> str:
    return _checked(_ENV_KEY, value, what=what, rule=ENV_KEY_RULE)


def node_id_from(text: str) -> str:
    """The nearest allowed node id to a host name; 'node' when nothing of it is left."""
    kept = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].strip("-")
    return kept or "node"


def _checked(pattern: re.Pattern[str], value: str, *, what: str, rule: str) -> str:
    if not pattern.fullmatch(value):
        shown = value if len(value) <= 80 else value[:77] + "..."
        raise NameInvalidError(f"{what} {shown!r} is not allowed", hint=f"use {rule}")
    return value
