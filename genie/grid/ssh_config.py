"""~/.ssh/config without what it says about other hosts, which asyncssh would split letter by letter.

A block `Host a b` of plain names changes nothing for a host that has none of them, so the text without it
means the same; lines keep their numbers. Whatever is not that plain (patterns, quotes, Match) stays.

Not for: reading the settings (asyncssh), or files that an Include names, which are read as they are.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_HEAD = re.compile(r"(?:host|match)[ \t]", re.IGNORECASE | re.ASCII)
_NAMES = re.compile(r"host((?:[ \t]+[a-z0-9._-]+)+)", re.IGNORECASE | re.ASCII)
# A comment, or a keyword and words without a quote or a backslash: nothing that could be an error.
_PLAIN = re.compile(r"#.*|[a-z][a-z0-9]*[ \t][\t -!#-&(-\[\]-~]+", re.IGNORECASE | re.ASCII)
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@contextlib.contextmanager
def config_about(host: str, path: Path) -> Iterator[Path]:
    """A file that says about `host` what `path` says; it is there within the block only."""
    with contextlib.ExitStack() as kept:
        try:
            about = _written(host, path, kept)
        except (OSError, ValueError):  # what is wrong with the file itself, asyncssh says
            about = path
        yield about


def _written(host: str, path: Path, kept: contextlib.ExitStack) -> Path:
    whole = path.read_text()
    short = without_others(whole, host)
    if short == whole:
        return path
    folder = kept.enter_context(tempfile.TemporaryDirectory(prefix="genie-ssh-config-"))
    made = Path(folder) / path.name
    made.write_text(short)
    return made


def without_others(text: str, host: str) -> str:
    """The text, with empty lines in place of blocks that are for other hosts."""
    wanted = host.lower()
    return "".join(
        block if names is None or wanted in names else "\n" * block.count("\n")
        for names, block in _blocks(text)
    )


@lru_cache(maxsize=4)
def _blocks(text: str) -> tuple[tuple[frozenset[str] | None, str], ...]:
    """Blocks with the names that they are for; None: to be kept for all. Joined, they are the text."""
    names: list[frozenset[str] | None] = [None]
    blocks: list[list[str]] = [[]]
    for line in _LINE.findall(text):
        said = line.strip()
        if _HEAD.match(said):
            plain = _NAMES.fullmatch(said)
            names.append(frozenset(plain[1].lower().split()) if plain else None)
            blocks.append([])
        elif said and not _PLAIN.fullmatch(said):
            names[-1] = None
        blocks[-1].append(line)
    return tuple(zip(names, map("".join, blocks), strict=True))
