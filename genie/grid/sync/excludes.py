"""What is left out of a sync: the grid file's patterns, and .gitignore files as git reads them.

The grid file's patterns have the last word: no .gitignore brings back what they leave out. `Excludes`
decides about one path; it reads a .gitignore when it first meets the folder.

Not for: walking the tree.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from genie.errors import ConfigError, SyncError

_log = logging.getLogger(__name__)
_FILE_BYTES_MAX = 1 << 20
_FOLDERS_KEPT = 100_000
_STARS_PLAIN = 2
# As the library writes '*', '**' between folders, and that a line may fit in any folder.
_STAR, _FOLDERS, _ANYWHERE = "[^/]*", "(?:/.+)?/", "^(?:.+/)?"

_Chain = tuple[tuple[int, "Patterns"], ...]


class Patterns:
    """Lines of a .gitignore. The last one that fits decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Raises ValueError for a line that means nothing."""
        found = [each for each in GitIgnoreSpec.from_lines(list(lines)).patterns if each.include is not None]
        # Neighbours of one kind are one expression: a tree has many paths.
        self._runs = [
            (bool(included), _any_of(each.regex.pattern for each in run if each.regex is not None))
            for included, run in itertools.groupby(found, key=lambda each: each.include)
        ][::-1]

    def verdict(self, path: str) -> bool | None:
        """True: left out; False: brought back; None: not named. A folder's path ends with '/'."""
        for included, expression in self._runs:
            if expression.match(path):
                return included
        return None


class Excludes:
    """For one walk of one tree."""

    def __init__(self, root: Path, patterns: Sequence[str]) -> None:
        self._root = os.fsencode(root)
        try:
            self._always = Patterns(patterns)
        except ValueError as error:
            raise ConfigError(
                f"sync.exclude_patterns: {error}", hint="write patterns as in .gitignore"
            ) from None
        self._chains: dict[bytes, _Chain] = {}

    def is_left_out(self, path: bytes, is_folder: bool) -> bool:
        """A folder that is left out is not entered, so nothing in it is ever asked for."""
        # Expressions treat a line's end in a special way; a name may have one anywhere.
        text = os.fsdecode(path).replace("\n", "\0") + ("/" if is_folder else "")
        if self._always.verdict(text):
            return True
        for start, patterns in self._chain(path.rpartition(b"/")[0]):
            verdict = patterns.verdict(text[start:])
            if verdict is not None:
                return verdict
        return False

    def _chain(self, folder: bytes) -> _Chain:
        """The .gitignore files that count in a folder, the nearest first."""
        found = self._chains.get(folder)
        if found is None:
            above = self._chain(folder.rpartition(b"/")[0]) if folder else ()
            own = self._read(folder)
            start = len(os.fsdecode(folder)) + 1 if folder else 0
            found = ((start, own), *above) if own is not None else above
            if len(self._chains) >= _FOLDERS_KEPT:
                self._chains.clear()
            self._chains[folder] = found
        return found

    def _read(self, folder: bytes) -> Patterns | None:
        path = b"/".join(part for part in (self._root, folder, b".gitignore") if part)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                return None
            raise SyncError(f"{os.fsdecode(path)} cannot be read: {error.strerror}") from None
        try:
            with os.fdopen(fd, "rb") as file:
                text = file.read(_FILE_BYTES_MAX).decode("utf-8", "surrogateescape")
        except IsADirectoryError:
            return None
        return _lenient(text.splitlines(), os.fsdecode(path))


def rules_digest(patterns: Sequence[str], *, follow: bool) -> bytes:
    """Of what decides besides .gitignore files: decisions of a walk under other rules are not reused."""
    return hashlib.sha256(repr((tuple(patterns), follow)).encode("utf-8", "surrogateescape")).digest()


def _lenient(lines: list[str], name: str) -> Patterns:
    """git passes over lines that mean nothing, so a sync does."""
    try:
        return Patterns(lines)
    except ValueError:
        good = []
        for line in lines:
            try:
                Patterns([line])
                good.append(line)
            except ValueError:
                _log.info("a line that means nothing", extra={"file": name, "line": line[:80]})
        return Patterns(good)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    # The library's named group would stand there several times.
    return re.compile(
        "|".join(f"(?:{_bounded(each.replace('(?P<ps_d>', '(?:'))})" for each in patterns), re.DOTALL
    )


def _bounded(expression: str) -> str:
    """The same, for a line with many stars, in a form that is not tried in every possible way.

    What stands between two stars may be taken where it is first found, since the second star stands for
    anything that follows; so no earlier choice is ever made anew. The same goes for folders between '**'.
    """
    if expression.count(_STAR) + expression.count(_FOLDERS) <= _STARS_PLAIN:
        return expression
    first, *more = map(_once, expression.split(_FOLDERS))
    if not more:
        return first
    if first.startswith(_ANYWHERE):
        first = f"^(?>(?:.+?/)??{first.removeprefix(_ANYWHERE)}(?=/))"
    return first + "".join(f"(?>(?:/.+?)??/{each}(?=/))" for each in more[:-1]) + _FOLDERS + more[-1]


def _once(expression: str) -> str:
    """Of a part without '**'."""
    first, *more = expression.split(_STAR)
    if not more:
        return first
    return first + "".join(f"(?>[^/]*?{each})" for each in more[:-1] if each) + _STAR + more[-1]
