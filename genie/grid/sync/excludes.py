"""Which files a sync excludes: the patterns of the grid file, and .gitignore files with git's semantics.

The patterns of the grid file take precedence: no .gitignore can re-include what they exclude.
`ExclusionRules` decides for one path; it reads the .gitignore of a folder when needed.
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
_GITIGNORE_BYTES_MAX = 1 << 20
_CACHED_FOLDERS_MAX = 100_000
_STARS_UNBOUNDED_MAX = 2
# Regular expressions of pathspec for '*', for '**' between folders, and for a match in any folder.
_STAR_EXPRESSION, _FOLDERS_EXPRESSION, _ANYWHERE_EXPRESSION = "[^/]*", "(?:/.+)?/", "^(?:.+/)?"

_GitignoreChain = tuple[tuple[int, "IgnorePatterns"], ...]


class IgnorePatterns:
    """Lines of a .gitignore. The last match decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Raises ValueError for an invalid line."""
        found = [each for each in GitIgnoreSpec.from_lines(list(lines)).patterns if each.include is not None]
        # Adjacent patterns of one kind are joined into one expression, for speed.
        self._pattern_groups = [
            (
                bool(included),
                _join_into_one_regex(each.regex.pattern for each in run if each.regex is not None),
            )
            for included, run in itertools.groupby(found, key=lambda each: each.include)
        ][::-1]

    def find_exclusion(self, path: str) -> bool | None:
        """True: excluded; False: re-included; None: no match. The path of a folder ends with '/'."""
        for included, expression in self._pattern_groups:
            if expression.match(path):
                return included
        return None


class ExclusionRules:
    """The exclusion rules for one walk of one tree."""

    def __init__(self, root: Path, patterns: Sequence[str]) -> None:
        self._root = os.fsencode(root)
        try:
            self._configured_patterns = IgnorePatterns(patterns)
        except ValueError as error:
            raise ConfigError(
                f"sync.exclude_patterns: {error}", hint="write patterns as in .gitignore"
            ) from None
        self._chain_by_folder: dict[bytes, _GitignoreChain] = {}

    def is_excluded(self, path: bytes, is_folder: bool) -> bool:
        """True if the path is excluded. Excluded folders are not entered."""
        # Newlines are special in regular expressions, and valid in file names.
        text = os.fsdecode(path).replace("\n", "\0") + ("/" if is_folder else "")
        if self._configured_patterns.find_exclusion(text):
            return True
        for start, patterns in self._find_gitignore_chain(path.rpartition(b"/")[0]):
            match = patterns.find_exclusion(text[start:])
            if match is not None:
                return match
        return False

    def _find_gitignore_chain(self, folder: bytes) -> _GitignoreChain:
        """Returns the .gitignore files that apply to a folder, the nearest first."""
        found = self._chain_by_folder.get(folder)
        if found is None:
            above = self._find_gitignore_chain(folder.rpartition(b"/")[0]) if folder else ()
            own = self._read_gitignore(folder)
            start = len(os.fsdecode(folder)) + 1 if folder else 0
            found = ((start, own), *above) if own is not None else above
            if len(self._chain_by_folder) >= _CACHED_FOLDERS_MAX:
                self._chain_by_folder.clear()
            self._chain_by_folder[folder] = found
        return found

    def _read_gitignore(self, folder: bytes) -> IgnorePatterns | None:
        path = b"/".join(part for part in (self._root, folder, b".gitignore") if part)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                return None
            raise SyncError(f"could not read {os.fsdecode(path)}: {error.strerror}") from None
        try:
            with os.fdopen(fd, "rb") as file:
                text = file.read(_GITIGNORE_BYTES_MAX).decode("utf-8", "surrogateescape")
        except IsADirectoryError:
            return None
        return _parse_ignore_lines_skipping_invalid(text.splitlines(), os.fsdecode(path))


def compute_rules_digest(patterns: Sequence[str], *, follow: bool) -> bytes:
    """Digest of the rules besides .gitignore files: cached decisions are valid only for the same rules."""
    return hashlib.sha256(repr((tuple(patterns), follow)).encode("utf-8", "surrogateescape")).digest()


def _parse_ignore_lines_skipping_invalid(lines: list[str], name: str) -> IgnorePatterns:
    """Parses the lines; skips invalid ones, as git does."""
    try:
        return IgnorePatterns(lines)
    except ValueError:
        good = []
        for line in lines:
            try:
                IgnorePatterns([line])
                good.append(line)
            except ValueError:
                _log.info("skipping an invalid line of a .gitignore", extra={"file": name, "line": line[:80]})
        return IgnorePatterns(good)


def _join_into_one_regex(patterns: Iterable[str]) -> re.Pattern[str]:
    # pathspec's named group must not occur several times.
    return re.compile(
        "|".join(f"(?:{_bound_backtracking(each.replace('(?P<ps_d>', '(?:'))})" for each in patterns),
        re.DOTALL,
    )


def _bound_backtracking(expression: str) -> str:
    """Returns an equivalent expression that does not backtrack exponentially for many stars.

    The text between two stars can be matched at its first occurrence, because the second star matches
    anything that follows; so atomic groups are equivalent. The same holds for folders between '**'.
    """
    if expression.count(_STAR_EXPRESSION) + expression.count(_FOLDERS_EXPRESSION) <= _STARS_UNBOUNDED_MAX:
        return expression
    first, *more = map(_bound_star_backtracking, expression.split(_FOLDERS_EXPRESSION))
    if not more:
        return first
    if first.startswith(_ANYWHERE_EXPRESSION):
        first = f"^(?>(?:.+?/)??{first.removeprefix(_ANYWHERE_EXPRESSION)}(?=/))"
    return (
        first + "".join(f"(?>(?:/.+?)??/{each}(?=/))" for each in more[:-1]) + _FOLDERS_EXPRESSION + more[-1]
    )


def _bound_star_backtracking(expression: str) -> str:
    """As `_bound_backtracking`, for a part without '**'."""
    first, *more = expression.split(_STAR_EXPRESSION)
    if not more:
        return first
    return first + "".join(f"(?>[^/]*?{each})" for each in more[:-1] if each) + _STAR_EXPRESSION + more[-1]
