"""The grid file, config/cluster_config.yaml: the nodes of a grid and their settings.

Every key is declared here once, with the settings engine (genie/config/schema.py). An error names the line,
the allowed values and the nearest known key. How to reach a host (user, port, key, jump host) is configured
in ~/.ssh/config; the grid file contains no secrets.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from genie.config.labels import LABELS
from genie.config.schema import (
    REQUIRED,
    ValidationRule,
    base_type,
    check_key,
    convert,
    default_value,
    setting,
    setting_fields,
    suggest_similar,
)
from genie.errors import ConfigError, NoNodeError

NODES_MAX = 4096
GRID_FILE_BYTES_MAX = 1 << 20
_YAML_DEPTH_MAX = 5
# A host or user name. It cannot begin with '-', because programs would read it as an option.
_NODE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_NODE_ENTRY_PATTERN = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<name>[^@:]*)(?::(?P<port>[0-9]{1,5}))?")
_REMOTE_ROOT_PATTERN = re.compile(r"(~/|/)[^\0\n]{1,1023}")
ProgressCallback = Callable[[str, str], None]
"""Progress callback: called with the node and what happens there."""


def _is_node_name(text: str) -> bool:
    return _NODE_NAME_PATTERN.fullmatch(text) is not None and ".." not in text


def _is_remote_root(path: str) -> bool:
    return _REMOTE_ROOT_PATTERN.fullmatch(path) is not None and ".." not in path.split("/")


_NODE_NAME_RULE = ValidationRule(
    "1 to 253 letters, digits, '.', '_' or '-', not beginning with '.' or '-', without '..'", _is_node_name
)
_REMOTE_ROOT_RULE = ValidationRule("a path that begins with '/' or '~/', without '..'", _is_remote_root)


@dataclass(frozen=True, kw_only=True)
class GridNode:
    """One entry of `nodes`. How to reach the host is configured in ~/.ssh/config."""

    name: str = setting(REQUIRED, "Host name, or alias of ~/.ssh/config.", rule=_NODE_NAME_RULE)
    user: str | None = setting(None, "Login name (default: that of ~/.ssh/config).", rule=_NODE_NAME_RULE)
    port: int | None = setting(None, "Port of the SSH server.", low=1, high=65535)
    weight: float = setting(
        1.0, "Divides the score: nodes with a higher weight are preferred.", low=0.01, high=100
    )
    labels: Mapping[str, str] = setting({}, "Labels, to select nodes by.", rule=LABELS)


@dataclass(frozen=True, kw_only=True)
class SshSettings:
    timeout: float = setting(10, "Timeout of one request to a node in seconds.", low=0.1, high=3600)
    connect_timeout: float = setting(5, "Timeout of one attempt to connect in seconds.", low=0.1, high=600)
    max_retries: int = setting(3, "Further attempts to connect, with exponential backoff.", low=0, high=20)
    pool_size: int = setting(10, "Maximum number of open connections; one for each node.", low=1, high=1024)
    key_file: str | None = setting(None, "Private key, in addition to those of ~/.ssh/config and ssh-agent.")


@dataclass(frozen=True, kw_only=True)
class HealthSettings:
    timeout: float = setting(3, "Timeout of the readings of one node in seconds.", low=0.1, high=600)
    max_workers: int = setting(20, "Maximum number of nodes to check in parallel.", low=1, high=1024)
    cpu_weight: float = setting(1.0, "Weight of the CPU load in the score.", low=0, high=1000)
    gpu_weight: float = setting(3.0, "Weight of the GPU memory in use in the score.", low=0, high=1000)
    refresh_interval: float = setting(
        60, "Seconds for which readings are cached; 0 disables the cache.", low=0, high=86400
    )


_DEFAULT_EXCLUDES = (".git", "__pycache__", ".env", "*.pyc", "node_modules", ".next")


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    exclude_patterns: tuple[str, ...] = setting(_DEFAULT_EXCLUDES, "Files to exclude, as in .gitignore.")
    use_checksums: bool = setting(
        True, "Compare contents where size or time differ; false sends those files without comparing."
    )
    follow_symlinks: bool = setting(False, "Send the targets of links within the folder.")
    max_parallel_transfers: int = setting(5, "Maximum number of nodes to sync in parallel.", low=1, high=256)


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    dashboard_port: int = setting(
        8265,
        "Port of the dashboard, on the head and on this machine.",
        low=1,
        high=65535,
    )
    redis_port: int = setting(6379, "Port of the head, to which workers connect.", low=1, high=65535)
    head_bind_all: bool | None = setting(
        None,
        "True: the dashboard listens on all addresses. False: loopback only, for one node. "
        "Null: the head is reachable by the other nodes, the dashboard only on loopback.",
    )
    namespace: str = setting("default", "Ray namespace of programs that name none in ray.init().")
    log_level: str = setting("info", "Log level of Ray.", allowed=("debug", "info", "warning", "error"))


@dataclass(frozen=True, kw_only=True)
class GridFile:
    """A validated grid file. `path` is the file that it was read from."""

    nodes: tuple[GridNode, ...]
    remote_root: str = setting("~/grid_workspace", "Workspace on the nodes.", rule=_REMOTE_ROOT_RULE)
    ssh: SshSettings = SshSettings()
    health_check: HealthSettings = HealthSettings()
    sync: SyncSettings = SyncSettings()
    ray: RaySettings = RaySettings()
    path: Path | None = None

    def node(self, name: str) -> GridNode:
        """Returns the node named `name`. Raises NoNodeError if there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        known = [node.name for node in self.nodes]
        raise NoNodeError(
            f"no node is named {name!r}",
            hint=suggest_similar(name, known) or f"nodes: {', '.join(known[:10])}",
        )


_SECTION_TYPES: dict[str, type[Any]] = {
    "ssh": SshSettings,
    "health_check": HealthSettings,
    "sync": SyncSettings,
    "ray": RaySettings,
}
_TOP_LEVEL_KEYS = ("nodes", "remote_root", *_SECTION_TYPES)


def read_grid_file(path: Path) -> GridFile:
    """Raises ConfigError, which names the file and the line."""
    try:
        with path.expanduser().open("rb") as file:
            raw = file.read(GRID_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"the grid file {path} does not exist",
            hint="create it with 'grid-cli config init' or 'grid-cli nodes add NAME', "
            "or select another file with --config",
        ) from None
    except OSError as error:
        raise ConfigError(f"could not read the grid file {path}: {error.strerror}") from None
    if len(raw) > GRID_FILE_BYTES_MAX:
        raise ConfigError(f"the grid file {path} is larger than {GRID_FILE_BYTES_MAX} bytes")
    return dataclasses.replace(parse_grid_file(raw, name=str(path)), path=path)


def read_sample_grid_file_text() -> str:
    """The commented file that `grid-cli config init` writes: all keys with defaults, and three nodes."""
    return (resources.files("genie.grid") / "config" / "cluster_config.yaml").read_text("utf-8")


def parse_grid_file(text: bytes | str, *, name: str) -> GridFile:
    """Parses and validates a grid file. `name` precedes the line number in errors."""
    return _GridFileParser(name).parse(text)


def parse_node(text: str) -> GridNode:
    """Parses [USER@]NAME[:PORT]. Raises ConfigError."""
    return _GridFileParser("").node_from_text(text, None)


class _GridFileParser:
    """Walks the YAML nodes, which have line numbers. Never constructs objects from tags."""

    def __init__(self, name: str) -> None:
        self._file_name = name

    def parse(self, text: bytes | str) -> GridFile:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self._file_name}:{mark.line + 1}" if mark else self._file_name
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise ConfigError(f"{where}: invalid YAML: {problem}", hint=_yaml_hint(problem)) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self._file_name}: invalid YAML: {error}") from None
        if root is None:
            raise ConfigError(
                f"{self._file_name} is empty", hint="list the names of your SSH hosts under 'nodes:'"
            )
        self._check_yaml_tags_and_depth(root, seen=set())
        entries = self._require_mapping(root, "the file", known=_TOP_LEVEL_KEYS)
        if "nodes" not in entries:
            raise ConfigError(
                f"{self._file_name} has no 'nodes'", hint="list the names of your SSH hosts under 'nodes:'"
            )
        found: dict[str, Any] = {"nodes": self._parse_nodes(entries["nodes"])}
        if "remote_root" in entries:
            found["remote_root"] = self._parse_remote_root(entries["remote_root"])
        for section, cls in _SECTION_TYPES.items():
            if section in entries and not _is_null(entries[section]):
                given = self._require_mapping(entries[section], section, known=list(setting_fields(cls)))
                found[section] = cls(**self._convert_settings(given, section, cls))
        return GridFile(**found)

    def _parse_nodes(self, node: yaml.Node) -> tuple[GridNode, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise self._make_error(node, "nodes", "must be a list", hint="write one node per line: '- gpu1'")
        if not node.value:
            raise self._make_error(node, "nodes", "is empty", hint="list at least one SSH host")
        if len(node.value) > NODES_MAX:
            raise self._make_error(
                node, "nodes", f"has {len(node.value)} entries; at most {NODES_MAX} are allowed"
            )
        seen: dict[str, int] = {}
        found = []
        for entry in node.value:
            one = self._parse_node(entry)
            line = entry.start_mark.line + 1
            if one.name in seen:
                raise self._make_error(
                    entry, f"node {one.name!r}", f"is already defined in line {seen[one.name]}"
                )
            seen[one.name] = line
            found.append(one)
        return tuple(found)

    def _parse_node(self, entry: yaml.Node) -> GridNode:
        if isinstance(entry, yaml.ScalarNode):
            return self.node_from_text(entry.value, entry)
        entries = self._require_mapping(entry, "a node", known=list(setting_fields(GridNode)))
        if "name" not in entries:
            raise self._make_error(entry, "a node", "has no 'name'", hint="for example '- name: gpu1'")
        node = self.node_from_text(self._require_text(entries.pop("name"), "name"), entry)
        given = self._convert_settings(entries, "node", GridNode)
        return dataclasses.replace(
            node, **{name: value for name, value in given.items() if value is not None}
        )

    def node_from_text(self, text: str, at: yaml.Node | None) -> GridNode:
        """A node from [USER@]NAME[:PORT]."""
        parts = _NODE_ENTRY_PATTERN.fullmatch(text)
        if parts is None:
            raise self._make_error(
                at, f"node {text!r}", "is not allowed", hint="write NAME, USER@NAME or USER@NAME:PORT"
            )
        source = self._format_position(at)
        given: dict[str, Any] = {
            name: convert(GridNode, name, value, key=f"node.{name}", source=source)
            for name, value in parts.groupdict().items()
            if value is not None
        }
        return GridNode(**given)

    def _parse_remote_root(self, node: yaml.Node) -> object:
        path = self._require_text(node, "remote_root").rstrip("/")
        return convert(GridFile, "remote_root", path, key="remote_root", source=self._format_position(node))

    def _convert_settings(
        self, entries: Mapping[str, yaml.Node], section: str, cls: type[Any]
    ) -> dict[str, Any]:
        return {name: self._convert_setting(value, section, cls, name) for name, value in entries.items()}

    def _convert_setting(self, node: yaml.Node, section: str, cls: type[Any], name: str) -> object:
        key = f"{section}.{name}"
        kind = base_type(cls, name)
        if _is_null(node):
            return default_value(setting_fields(cls)[name])
        raw: object
        pairs: dict[str, str]
        if kind is Mapping:
            raw = pairs = {}
            for label, value in self._require_mapping(node, key, known=None).items():
                pairs[label] = self._require_text(value, f"{key}.{label}")
                # Each pair on its own, so that an error has the line of the pair.
                convert(cls, name, {label: pairs[label]}, key=key, source=self._format_position(value))
        elif isinstance(node, yaml.SequenceNode):
            raw = [self._require_text(each, key) for each in node.value]
        elif isinstance(node, yaml.ScalarNode):
            raw = node.value if kind is str else _scalar_to_python(node)
        else:
            raw = {}  # a mapping, which no other type accepts
        return convert(cls, name, raw, key=key, source=self._format_position(node))

    def _require_text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or _is_null(node) or not node.value or "\0" in node.value:
            raise self._make_error(node, what, "must be a string")
        text: str = node.value
        return text

    def _require_mapping(
        self, node: yaml.Node, what: str, *, known: typing.Sequence[str] | None
    ) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            raise self._make_error(node, what, "must be a mapping", hint="write 'name: value' on each line")
        found: dict[str, yaml.Node] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise self._make_error(name, what, "has a key that is not a string")
            if known is not None:
                check_key(name.value, known, of=what, source=self._format_position(name))
            if name.value in found:
                raise self._make_error(name, f"{name.value!r}", f"is defined twice in {what}")
            found[name.value] = value
        return found

    def _check_yaml_tags_and_depth(
        self, node: yaml.Node, *, seen: set[tuple[int, int]], depth: int = 0
    ) -> None:
        """Raises ConfigError for tags that are not plain YAML and for nesting that is too deep.

        Checks each node once per depth: with aliases, a small file can expand to an unbounded tree.
        """
        if (id(node), depth) in seen:
            return
        seen.add((id(node), depth))
        if not node.tag.startswith("tag:yaml.org,2002:") or "/" in node.tag:
            raise self._make_error(node, f"the tag {node.tag!r}", "is not allowed")
        if depth > _YAML_DEPTH_MAX:
            raise self._make_error(node, "this value", "is nested too deeply")
        for child in node.value if isinstance(node, yaml.CollectionNode) else ():
            for each in child if isinstance(child, tuple) else (child,):
                self._check_yaml_tags_and_depth(each, seen=seen, depth=depth + 1)

    def _make_error(self, node: yaml.Node | None, what: str, problem: str, *, hint: str = "") -> ConfigError:
        source = self._format_position(node)
        where = f"{source}: " if source else ""
        return ConfigError(f"{where}{what} {problem}", hint=hint)

    def _format_position(self, node: yaml.Node | None) -> str:
        """FILE:LINE, or '' for text of the command line."""
        return f"{self._file_name}:{node.start_mark.line + 1}" if node is not None and self._file_name else ""


def _yaml_hint(problem: str) -> str:
    """A hint about the likely cause; the messages of the YAML library are about its grammar."""
    if r"'\t'" in problem:
        return "indent with spaces: YAML does not allow tabs there"
    if any(each in problem for each in ("cannot start any token", "expected alphabetic", "undefined alias")):
        return "put text that begins with a special character in quotes, as in '*.pyc'"
    return (
        "check this line and the one before: entries of one level begin in the same column, "
        "': ' follows a key, and quotes and brackets are closed"
    )


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _scalar_to_python(node: yaml.ScalarNode) -> object:
    """Booleans and decimal integers as such, everything else as text; the settings engine parses text."""
    text: str = node.value
    if node.tag == "tag:yaml.org,2002:bool":
        return text.lower() in ("true", "yes", "on")
    if node.tag == "tag:yaml.org,2002:int" and re.fullmatch(r"[+-]?[0-9]{1,15}", text):
        return int(text)
    return text
