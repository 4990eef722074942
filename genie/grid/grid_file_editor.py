"""Adds and removes a node in the text of the grid file, preserving its comments and layout.

Only the lines of that node change. The result is parsed again and must differ by that node alone; otherwise
the edit is rejected. `add_node_to_text` and `remove_node_from_text` are pure; `edit_grid_file` replaces the
file atomically, one process at a time. The format of the file is defined in grid_file.py.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from genie.errors import ConfigError, UsageError
from genie.grid.grid_file import GRID_FILE_BYTES_MAX, GridFile, GridNode, parse_grid_file

_EDIT_LOCK_TIMEOUT_S = 10.0
_EDIT_LOCK_RETRY_INTERVAL_S = 0.01
_NEW_GRID_FILE_TEXT = """\
# The nodes of the grid and their settings. Names are hosts or aliases of ~/.ssh/config, which also defines
# users, ports, keys and jump hosts. 'grid-cli config show' lists every key with its default.
nodes:
"""


def add_node_to_text(text: str, node: GridNode, *, name: str) -> str:
    """Returns the text with `node` appended. `name` is the name of the file in errors. Raises UsageError."""
    before = _parse_unless_empty(text, name) if text.strip() else None
    if before is not None and any(each.name == node.name for each in before.nodes):
        raise UsageError(
            f"{name} already has a node {node.name!r}", hint="'grid-cli nodes list' shows all nodes"
        )
    edited = _GridFileText(text or _NEW_GRID_FILE_TEXT).insert_node(_format_node(node))
    nodes = (*(before.nodes if before else ()), node)
    _verify_edit(edited, before, nodes, name=name)
    return edited


def remove_node_from_text(text: str, node: str, *, name: str) -> str:
    """Returns the text without that node and its lines. Raises NoNodeError or UsageError."""
    before = parse_grid_file(text, name=name)
    before.node(node)
    remaining = tuple(each for each in before.nodes if each.name != node)
    if not remaining:
        raise UsageError(
            f"{node!r} is the only node in {name}", hint="add another node first, or delete the file"
        )
    place = [each.name for each in before.nodes].index(node)
    edited = _GridFileText(text).remove_node(place)
    _verify_edit(edited, before, remaining, name=name)
    return edited


def read_grid_file_text(path: Path) -> str:
    """Reads the file; '' if it does not exist. Raises ConfigError."""
    try:
        raw = path.expanduser().read_bytes()
        if len(raw) > GRID_FILE_BYTES_MAX:
            raise ConfigError(f"the grid file {path} is larger than {GRID_FILE_BYTES_MAX} bytes")
        return raw.decode("utf-8")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"could not read the grid file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the grid file {path} is not valid UTF-8") from None


def edit_grid_file(path: Path, change: Callable[[str], str]) -> None:
    """Reads the file, applies `change` to its text and writes it, under a lock.

    Raises ConfigError, and what `change` raises.
    """
    path = path.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.resolve().parent, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"could not write the grid file {path}: {error.strerror}") from error
    try:
        _lock_grid_file_directory(descriptor, path)
        write_grid_file(path, change(read_grid_file_text(path)))
    finally:
        os.close(descriptor)


def _lock_grid_file_directory(descriptor: int, path: Path) -> None:
    """Locks the directory: the file itself is replaced, and a lock file would remain."""
    import fcntl  # late: not every system has it

    deadline = time.monotonic() + _EDIT_LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(f"the grid file {path} is locked by another process") from None
            time.sleep(_EDIT_LOCK_RETRY_INTERVAL_S)
        except OSError:  # a file system without locks
            return


def write_grid_file(path: Path, text: str) -> None:
    """Replaces the file, or the target of the link, and keeps its mode. Raises ConfigError."""
    try:
        path = path.resolve()
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            temporary.write_bytes(text.encode())
            temporary.chmod(mode)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"could not write the grid file {path}: {error.strerror}") from error


def _parse_unless_empty(text: str, name: str) -> GridFile | None:
    """Parses the file; None if it has no nodes yet."""
    root = _compose_yaml(text, name)
    if isinstance(root, yaml.MappingNode) and _is_empty_or_null(_find_nodes_value(root)):
        return None
    return parse_grid_file(text, name=name) if root is not None else None


def _compose_yaml(text: str, name: str) -> yaml.Node | None:
    try:
        found: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        parse_grid_file(text, name=name)  # raises an error with the position
        raise ConfigError(f"{name}: invalid YAML") from None
    return found


def _find_nodes_value(root: yaml.MappingNode) -> yaml.Node | None:
    return next((value for key, value in root.value if key.value == "nodes"), None)


def _is_empty_or_null(node: yaml.Node | None) -> bool:
    if isinstance(node, yaml.SequenceNode):
        return not node.value
    return node is None or node.tag == "tag:yaml.org,2002:null"


def _verify_edit(edited: str, before: GridFile | None, nodes: tuple[GridNode, ...], *, name: str) -> None:
    after = parse_grid_file(edited, name=name)
    wanted = dataclasses.replace(before, nodes=nodes) if before else dataclasses.replace(after, nodes=nodes)
    if after != wanted:
        raise UsageError(f"could not edit the nodes in {name}: unsupported layout; edit it by hand")


def _format_node(node: GridNode) -> str:
    """Formats the node as one line of YAML that is valid in block and in flow style."""
    if node == GridNode(name=node.name, user=node.user, port=node.port):
        user = f"{node.user}@" if node.user else ""
        return f"{user}{node.name}" + (f":{node.port}" if node.port else "")
    given = {key: value for key, value in dataclasses.asdict(node).items() if value}
    if node.weight == 1:
        given.pop("weight")
    text: str = yaml.safe_dump(given, default_flow_style=True, sort_keys=False, width=1 << 20)
    return text.strip()


class _GridFileText:
    """The text of a grid file and the positions of its nodes."""

    def __init__(self, text: str) -> None:
        self._newline = "\r\n" if "\r\n" in text else "\n"
        if text and not text.endswith("\n"):
            text += self._newline
        self._text = text
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        self._root_mapping = root if isinstance(root, yaml.MappingNode) else None
        self._nodes_value = _find_nodes_value(self._root_mapping) if self._root_mapping is not None else None

    def insert_node(self, entry: str) -> str:
        nodes = self._nodes_value
        if nodes is None:
            return f"{self._text}nodes:{self._newline}  - {entry}{self._newline}"
        if isinstance(nodes, yaml.SequenceNode) and nodes.flow_style:
            if not nodes.value:
                return self._replace_range(nodes.start_mark.index + 1, nodes.end_mark.index - 1, entry)
            end = nodes.value[-1].end_mark.index
            return self._replace_range(end, end, f", {entry}")
        if isinstance(nodes, yaml.SequenceNode):
            line = _last_content_line_number(nodes.value[-1]) + 1
            return self._insert_line(line, f"{self._dash_indent(nodes.value[0])}- {entry}")
        # 'nodes:' without a value: insert after that line.
        return self._insert_line(self._nodes_key_line_number() + 1, f"  - {entry}")

    def remove_node(self, place: int) -> str:
        nodes = self._nodes_value
        assert isinstance(nodes, yaml.SequenceNode)
        entry = nodes.value[place]
        if nodes.flow_style:
            if place:
                return self._replace_range(nodes.value[place - 1].end_mark.index, entry.end_mark.index, "")
            return self._replace_range(entry.start_mark.index, nodes.value[1].start_mark.index, "")
        lines = self._text.splitlines(keepends=True)
        del lines[self._dash_line_number(entry) : _last_content_line_number(entry) + 1]
        return "".join(lines)

    def _replace_range(self, start: int, end: int, text: str) -> str:
        return self._text[:start] + text + self._text[end:]

    def _insert_line(self, line: int, text: str) -> str:
        lines = self._text.splitlines(keepends=True)
        return "".join([*lines[:line], text + self._newline, *lines[line:]])

    def _nodes_key_line_number(self) -> int:
        assert self._root_mapping is not None
        return next(int(key.start_mark.line) for key, _ in self._root_mapping.value if key.value == "nodes")

    def _dash_line_number(self, entry: yaml.Node) -> int:
        """Returns the line of the dash; the entry itself may start on a later line."""
        lines = self._text.splitlines()
        line = int(entry.start_mark.line)
        while line > 0 and not lines[line].lstrip().startswith("-"):
            line -= 1
        return line

    def _dash_indent(self, entry: yaml.Node) -> str:
        line = self._text.splitlines()[self._dash_line_number(entry)]
        return line[: len(line) - len(line.lstrip())]


def _last_content_line_number(node: yaml.Node) -> int:
    """Returns the last line of the node's own content: YAML ends a block where the next one starts."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return max(_last_content_line_number(each) for pair in node.value for each in pair)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return max(_last_content_line_number(each) for each in node.value)
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        return int(node.end_mark.line) - 1
    return int(node.end_mark.line)
