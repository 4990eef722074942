"""config/cluster_config.yaml: the nodes of a grid and how they are used.

Every key and default of the file is declared here once. A key or value that is not allowed is an
error with its line, what is allowed there, and the nearest known key. `read_grid_file()` reads,
`GridFile` is what the rest of the grid gets. How a host is reached (user, port, key, jump host) stands
in ~/.ssh/config; no secret belongs in this file.

Not for: settings of this machine (genie/config.py), or connecting (ssh_pool.py).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from genie.config import LABEL, LABEL_RULE, LABELS_MAX
from genie.errors import ConfigError, NoNodeError

NODES_MAX = 4096
FILE_BYTES_MAX = 1 << 20
_DEPTH_MAX = 5
_NEAREST_MAX = 3
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
"""A host or a user. Neither can begin with '-', and so become an option of some program."""
NAME_RULE = "1 to 253 letters, digits, '.', '_' or '-', not beginning with '.' or '-'"
_SPELLED = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<name>[^@:]*)(?::(?P<port>[^@:]*))?")
_REMOTE_ROOT = re.compile(r"(~/|/)[^\0\n]{1,1023}")
_REMOTE_ROOT_RULE = "a path that begins with '/' or '~/', without '..'"
Say = Callable[[str, str], None]
"""Told (node, what happens there) as it happens."""


def key(
    default: object,
    help_text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    allowed: tuple[str, ...] = (),
) -> Any:  # Any: dataclasses.field() is typed as the field's own type
    """Declares one key of the file."""
    meta = {"help": help_text, "low": low, "high": high, "allowed": allowed}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class GridNode:
    """One entry of `nodes`. `name` is a host name or an alias of ~/.ssh/config, which also has the rest."""

    name: str
    user: str | None = key(None, "Who logs in; without it, what ~/.ssh/config says.")
    port: int | None = key(None, "Port of its SSH server.", low=1, high=65535)
    weight: float = key(
        1.0, "The score is divided by this: a node of weight 2 is chosen sooner.", low=0.01, high=100
    )
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SshKeys:
    timeout: float = key(10, "Seconds for one command of the grid's own on a node.", low=0.1, high=3600)
    connect_timeout: float = key(5, "Seconds until a node must have let us in.", low=0.1, high=600)
    max_retries: int = key(3, "Further attempts to connect, after a growing pause.", low=0, high=20)
    pool_size: int = key(10, "Most connections at a time; one node needs one.", low=1, high=1024)
    key_file: str | None = key(None, "A private key, beside those that ~/.ssh/config and the agent have.")


@dataclass(frozen=True, kw_only=True)
class HealthKeys:
    timeout: float = key(3, "Seconds for the readings of one node.", low=0.1, high=600)
    max_workers: int = key(20, "Nodes that are asked at the same time.", low=1, high=1024)
    cpu_weight: float = key(1.0, "Weight of the CPU's load in the score.", low=0, high=1000)
    gpu_weight: float = key(3.0, "Weight of the GPUs' memory in use in the score.", low=0, high=1000)
    refresh_interval: float = key(
        60, "Seconds that readings are good for; 0 asks every time.", low=0, high=86400
    )


_EXCLUDED = (".git", "__pycache__", ".env", "*.pyc", "node_modules", ".next")


@dataclass(frozen=True, kw_only=True)
class SyncKeys:
    exclude_patterns: tuple[str, ...] = key(_EXCLUDED, "What is left out, as .gitignore would write it.")
    use_checksums: bool = key(
        True, "Compare contents where size or time differ; without it, take those files as changed."
    )
    follow_symlinks: bool = key(False, "Send what links within the tree point to, instead of the links.")
    max_parallel_transfers: int = key(5, "Nodes that are sent to at the same time.", low=1, high=256)


@dataclass(frozen=True, kw_only=True)
class RayKeys:
    dashboard_port: int = key(
        8265, "Port of the dashboard, on the head's loopback and here.", low=1, high=65535
    )
    redis_port: int = key(6379, "Port of the head, which workers connect to.", low=1, high=65535)
    head_bind_all: bool = key(
        True, "Ray listens on all addresses, guarded by its token; without it one node, on loopback."
    )
    namespace: str = key("default", "Ray's namespace.")
    log_level: str = key("info", "Ray's log level.", allowed=("debug", "info", "warning", "error"))


@dataclass(frozen=True, kw_only=True)
class GridFile:
    """The whole file, checked. `path` is where it was read from."""

    nodes: tuple[GridNode, ...]
    remote_root: str = "~/grid_workspace"
    ssh: SshKeys = SshKeys()
    health_check: HealthKeys = HealthKeys()
    sync: SyncKeys = SyncKeys()
    ray: RayKeys = RayKeys()
    path: Path | None = None

    def node(self, name: str) -> GridNode:
        """Raises NoNodeError for a name that is not in the file."""
        for node in self.nodes:
            if node.name == name:
                return node
        known = [node.name for node in self.nodes]
        raise NoNodeError(
            f"no node is named {name!r}",
            hint=_nearest_text(name, known) or f"there are {', '.join(known[:10])}",
        )


_SECTIONS: dict[str, type[Any]] = {
    "ssh": SshKeys,
    "health_check": HealthKeys,
    "sync": SyncKeys,
    "ray": RayKeys,
}
_TOP = ("nodes", "remote_root", *_SECTIONS)


def read_grid_file(path: Path) -> GridFile:
    """Raises ConfigError that names the file and the line."""
    try:
        with path.expanduser().open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"the grid's file {path} is not there",
            hint="write one with the names of your SSH hosts under 'nodes:', run 'grid-cli nodes add NAME', "
            "or name another file with --config",
        ) from None
    except OSError as error:
        raise ConfigError(f"the grid's file {path} cannot be read: {error.strerror}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"the grid's file {path} is larger than {FILE_BYTES_MAX} bytes")
    return dataclasses.replace(parse_grid_file(raw, name=str(path)), path=path)


def parse_grid_file(text: bytes | str, *, name: str) -> GridFile:
    """`name` stands in front of the line in errors."""
    return _Parser(name).parse(text)


def parse_node(text: str) -> GridNode:
    """[USER@]NAME[:PORT], as the command line and the file write it. Raises ConfigError."""
    return _Parser("")._spelled_node(text, None)


class _Parser:
    """Walks the YAML tree, which knows its lines; nothing in it is ever made into an object of its choice."""

    def __init__(self, name: str) -> None:
        self._name = name

    def parse(self, text: bytes | str) -> GridFile:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self._name}:{mark.line + 1}" if mark else self._name
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise ConfigError(f"{where}: this is not YAML: {problem}", hint=_yaml_hint(problem)) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self._name}: this is not YAML: {error}") from None
        if root is None:
            raise ConfigError(
                f"{self._name} is empty", hint="it needs 'nodes:' with the names of your SSH hosts"
            )
        self._check_tags(root, seen=set())
        entries = self._mapping(root, "the file", known=_TOP)
        if "nodes" not in entries:
            raise ConfigError(
                f"{self._name} has no 'nodes'", hint="list the names of your SSH hosts under 'nodes:'"
            )
        found: dict[str, Any] = {"nodes": self._nodes(entries["nodes"])}
        if "remote_root" in entries:
            found["remote_root"] = self._remote_root(entries["remote_root"])
        for section, cls in _SECTIONS.items():
            if section in entries and not _is_null(entries[section]):
                found[section] = cls(**self._fields(entries[section], section, cls))
        return GridFile(**found)

    def _nodes(self, node: yaml.Node) -> tuple[GridNode, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(
                node, "nodes", "must be a list", hint="write each node on a line of its own: '- gpu1'"
            )
        if not node.value:
            raise self._error(node, "nodes", "is empty", hint="name at least one SSH host")
        if len(node.value) > NODES_MAX:
            raise self._error(
                node, "nodes", f"has {len(node.value)} entries; at most {NODES_MAX} are allowed"
            )
        seen: dict[str, int] = {}
        found = []
        for entry in node.value:
            one = self._node(entry)
            line = entry.start_mark.line + 1
            if one.name in seen:
                raise self._error(entry, f"node {one.name!r}", f"is already in line {seen[one.name]}")
            seen[one.name] = line
            found.append(one)
        return tuple(found)

    def _node(self, entry: yaml.Node) -> GridNode:
        if isinstance(entry, yaml.ScalarNode):
            return self._spelled_node(entry.value, entry)
        names = ("name", *(each.name for each in dataclasses.fields(GridNode) if each.name != "name"))
        entries = self._mapping(entry, "a node", known=names)
        if "name" not in entries:
            raise self._error(entry, "a node", "has no 'name'", hint="for example '- name: gpu1'")
        spelled = self._spelled_node(self._text(entries.pop("name"), "name"), entry)
        labels = entries.pop("labels", None)
        given = self._values(entries, "node", GridNode)
        if labels is not None:
            given["labels"] = self._labels(labels)
        if given.get("user") is not None:
            self._check_name(given["user"], "user", entries["user"])
        return dataclasses.replace(
            spelled, **{name: value for name, value in given.items() if value is not None}
        )

    def _spelled_node(self, text: str, at: yaml.Node | None) -> GridNode:
        parts = _SPELLED.fullmatch(text)
        if parts is None:
            raise self._error(
                at, f"node {text!r}", "is not allowed", hint="write NAME, USER@NAME or USER@NAME:PORT"
            )
        self._check_name(parts["name"], "node", at)
        if parts["user"] is not None:
            self._check_name(parts["user"], "user", at)
        port = None
        if parts["port"] is not None:
            port = int(parts["port"]) if re.fullmatch(r"[0-9]{1,5}", parts["port"]) else 0
            if not 1 <= port <= 65535:
                raise self._error(at, f"port {parts['port']!r}", "must be 1 to 65535")
        return GridNode(name=parts["name"], user=parts["user"], port=port)

    def _check_name(self, text: str, what: str, at: yaml.Node | None) -> None:
        if not NAME.fullmatch(text) or ".." in text:
            raise self._error(at, f"{what} {text[:80]!r}", "is not allowed", hint=f"use {NAME_RULE}")

    def _labels(self, node: yaml.Node) -> dict[str, str]:
        entries = self._mapping(node, "labels", known=None)
        if len(entries) > LABELS_MAX:
            raise self._error(node, "labels", f"has {len(entries)} entries; at most {LABELS_MAX} are allowed")
        found = {}
        for name, value in entries.items():
            text = self._text(value, f"labels.{name}")
            for part in (name, text):
                if not LABEL.fullmatch(part):
                    raise self._error(
                        value, f"label {part[:80]!r}", "is not allowed", hint=f"use {LABEL_RULE}"
                    )
            found[name] = text
        return found

    def _remote_root(self, node: yaml.Node) -> str:
        text = self._text(node, "remote_root").rstrip("/")
        if not _REMOTE_ROOT.fullmatch(text) or ".." in text.split("/"):
            raise self._error(
                node, f"remote_root {text[:80]!r}", "is not allowed", hint=f"give {_REMOTE_ROOT_RULE}"
            )
        return text

    def _fields(self, node: yaml.Node, section: str, cls: type[Any]) -> dict[str, Any]:
        known = [each.name for each in dataclasses.fields(cls)]
        return self._values(self._mapping(node, section, known=known), section, cls)

    def _values(self, entries: Mapping[str, yaml.Node], section: str, cls: type[Any]) -> dict[str, Any]:
        hints = typing.get_type_hints(cls)
        fields = {each.name: each for each in dataclasses.fields(cls)}
        return {
            name: self._value(value, f"{section}.{name}", hints[name], fields[name])
            for name, value in entries.items()
        }

    def _value(self, node: yaml.Node, what: str, hint: Any, declared: dataclasses.Field[Any]) -> object:
        optional = isinstance(hint, types.UnionType)
        kind = next(each for each in typing.get_args(hint) if each is not type(None)) if optional else hint
        if _is_null(node):
            if optional:
                return None
            return declared.default
        if typing.get_origin(kind) is tuple:
            return self._texts(node, what)
        read = _SCALARS[kind]
        value = read(node.value, node.tag) if isinstance(node, yaml.ScalarNode) else None
        meta = declared.metadata
        wrong = value is None or (meta["allowed"] and value not in meta["allowed"])
        if not wrong and kind in (int, float):
            wrong = not meta["low"] <= value <= meta["high"]
        if wrong:
            given = repr(node.value[:80]) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            raise self._error(
                node, f"{what} = {given}", f"is not allowed; allowed is {_allowed_text(kind, meta)}"
            )
        return value

    def _texts(self, node: yaml.Node, what: str) -> tuple[str, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, what, "must be a list")
        return tuple(self._text(each, what) for each in node.value)

    def _text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or _is_null(node) or not node.value or "\0" in node.value:
            raise self._error(node, what, "must be text")
        text: str = node.value
        return text

    def _mapping(
        self, node: yaml.Node, what: str, *, known: typing.Sequence[str] | None
    ) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            raise self._error(
                node, what, "must be names with values", hint="write 'name: value' on each line"
            )
        found: dict[str, yaml.Node] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise self._error(name, what, "has a name that is not text")
            if known is not None and name.value not in known:
                nearest = _nearest_text(name.value, known)
                raise self._error(
                    name,
                    f"{name.value[:80]!r}",
                    f"is not a key of {what}",
                    hint=nearest or f"allowed: {', '.join(known)}",
                )
            if name.value in found:
                raise self._error(name, f"{name.value!r}", f"stands twice in {what}")
            found[name.value] = value
        return found

    def _check_tags(self, node: yaml.Node, *, seen: set[tuple[int, int]], depth: int = 0) -> None:
        """Nothing in this file is more than text, a number, a list or a mapping, two levels below a node.

        What aliases repeat is looked at once for each depth: written out, it could be without end.
        """
        if (id(node), depth) in seen:
            return
        seen.add((id(node), depth))
        if not node.tag.startswith("tag:yaml.org,2002:") or "/" in node.tag:
            raise self._error(node, f"the tag {node.tag!r}", "is not allowed")
        if depth > _DEPTH_MAX:
            raise self._error(node, "this", "is nested too deeply")
        for child in node.value if isinstance(node, yaml.CollectionNode) else ():
            for each in child if isinstance(child, tuple) else (child,):
                self._check_tags(each, seen=seen, depth=depth + 1)

    def _error(self, node: yaml.Node | None, what: str, problem: str, *, hint: str = "") -> ConfigError:
        where = f"{self._name}:{node.start_mark.line + 1}: " if node is not None and self._name else ""
        return ConfigError(f"{where}{what} {problem}", hint=hint)


def _yaml_hint(problem: str) -> str:
    """The library's words are about its own grammar; these are about what people type."""
    if r"'\t'" in problem:
        return "begin the line with spaces: YAML takes no tabs there"
    if any(each in problem for each in ("cannot start any token", "expected alphabetic", "undefined alias")):
        return "put what begins with a sign in quotes, as in '*.pyc'"
    return (
        "look at this line and the one before: what belongs together begins in the same column, "
        "a key has ': ' behind it, and quotes and brackets are closed"
    )


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _bool(text: str, tag: str) -> bool | None:
    if tag != "tag:yaml.org,2002:bool":
        return None
    return text.lower() in ("true", "yes", "on")


def _int(text: str, tag: str) -> int | None:
    return int(text) if tag == "tag:yaml.org,2002:int" and re.fullmatch(r"[+-]?[0-9]{1,15}", text) else None


def _float(text: str, tag: str) -> float | None:
    if not re.fullmatch(r"[+-]?([0-9]{1,15}(\.[0-9]{0,15})?|\.[0-9]{1,15})([eE][+-]?[0-9]{1,2})?", text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def _str(text: str, tag: str) -> str | None:
    return text or None


_SCALARS: dict[Any, Callable[[str, str], object]] = {bool: _bool, int: _int, float: _float, str: _str}


def _allowed_text(kind: type, meta: Mapping[str, Any]) -> str:
    if meta["allowed"]:
        return " or ".join(meta["allowed"])
    if kind in (int, float):
        noun = "a whole number" if kind is int else "a number"
        return f"{noun} from {meta['low']:g} to {meta['high']:g}"
    return "true or false" if kind is bool else "text"


def _nearest_text(word: str, known: typing.Sequence[str]) -> str:
    """'' where nothing is near, or where so many are that none was meant before the others."""
    near = difflib.get_close_matches(word, known, n=_NEAREST_MAX + 1)
    likeness = [difflib.SequenceMatcher(None, each, word).ratio() for each in near]
    best = [each for each, like in zip(near, likeness, strict=True) if like == likeness[0]]
    if not best or len(best) > _NEAREST_MAX:
        return ""
    return f"do you mean {' or '.join(map(repr, sorted(best, key=known.index)))}?"
