"""Removes the blocks of other hosts from ~/.ssh/config, because asyncssh tokenizes them slowly.

A block `Host a b` of plain names has no effect on other hosts, so the text without it is equivalent; line
numbers are preserved. Blocks with patterns, quotes or Match are kept. The settings are parsed by asyncssh;
included files are not changed.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_BLOCK_START_PATTERN = re.compile(r"(?:host|match)[ \t]", re.IGNORECASE | re.ASCII)
_HOST_NAMES_PATTERN = re.compile(r"host((?:[ \t]+[a-z0-9._-]+)+)", re.IGNORECASE | re.ASCII)
# A comment, or a keyword and words without a quote or a backslash: cannot be a syntax error.
_SIMPLE_LINE_PATTERN = re.compile(r"#.*|[a-z][a-z0-9]*[ \t][\t -!#-&(-\[\]-~]+", re.IGNORECASE | re.ASCII)
_LINE_PATTERN = re.compile(r"[^\n]*\n|[^\n]+")


@contextlib.contextmanager
def open_config_for_host(host: str, path: Path) -> Iterator[Path]:
    """Yields a file that is equivalent to `path` for `host`; it exists only within the block."""
    with contextlib.ExitStack() as kept:
        try:
            about = _write_short_config(host, path, kept)
        except (OSError, ValueError):  # asyncssh reports errors of the file itself
            about = path
        yield about


def _write_short_config(host: str, path: Path, kept: contextlib.ExitStack) -> Path:
    whole = path.read_text()
    short = strip_other_hosts(whole, host)
    if short == whole:
        return path
    folder = kept.enter_context(tempfile.TemporaryDirectory(prefix="genie-ssh-config-"))
    short_path = Path(folder) / path.name
    short_path.write_text(short)
    return short_path


def strip_other_hosts(text: str, host: str) -> str:
    """Returns the text with the blocks of other hosts replaced by empty lines."""
    wanted = host.lower()
    return "".join(
        block if names is None or wanted in names else "\n" * block.count("\n")
        for names, block in _split_into_blocks(text)
    )


@lru_cache(maxsize=4)
def _split_into_blocks(text: str) -> tuple[tuple[frozenset[str] | None, str], ...]:
    """Splits the text into blocks with their host names; None: applies to all hosts."""
    names: list[frozenset[str] | None] = [None]
    blocks: list[list[str]] = [[]]
    for line in _LINE_PATTERN.findall(text):
        stripped = line.strip()
        if _BLOCK_START_PATTERN.match(stripped):
            plain = _HOST_NAMES_PATTERN.fullmatch(stripped)
            names.append(frozenset(plain[1].lower().split()) if plain else None)
            blocks.append([])
        elif stripped and not _SIMPLE_LINE_PATTERN.fullmatch(stripped):
            names[-1] = None
        blocks[-1].append(line)
    return tuple(zip(names, map("".join, blocks), strict=True))
