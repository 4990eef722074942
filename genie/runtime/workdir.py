"""A directory that goes along with a job: packed into one file here, unpacked there.

The packed form is a plain tar with sorted names and nothing that differs between machines (times,
owners), so that equal contents give an equal digest. Plain on purpose: what is unpacked can never
be larger than what was sent. Files that .gitignore names stay at home, as does .git.
Not for: sending it (cluster/) and keeping it (controller/).
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Self

from pathspec import GitIgnoreSpec

from genie.errors import WorkdirError
from genie.model.job import Workdir

_ALWAYS_LEFT_OUT = ".git"
_COPY_BYTES = 1024 * 1024
_OFFENDERS_SHOWN = 5
# A home directory given by mistake: enough is looked at to say where the many files are, not all.
_LOOK_BEYOND = 10

Progress = Callable[[int, int], None]
"""Told the bytes packed so far and the bytes in all."""


@dataclass(frozen=True)
class PackedWorkdir:
    """`file` is open, at its start and has no name on disk: closing it removes it."""

    digest: str
    size_bytes: int
    file: IO[bytes]
    notes: tuple[str, ...] = ()
    """What was left out although .gitignore does not say so, and why."""

    @property
    def workdir(self) -> Workdir:
        return Workdir(digest=self.digest, size_bytes=self.size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.file.close()


def pack(
    directory: Path, *, bytes_max: int, files_max: int, progress: Progress | None = None
) -> PackedWorkdir:
    """WorkdirError for a directory that is too large, cannot be read, or holds what cannot be sent."""
    root = Path(os.path.abspath(directory))  # noqa: PTH100 - a link to a directory is followed, once
    if not root.is_dir():
        raise WorkdirError(f"{directory} is not a directory", hint="give --workdir a directory")
    found = _Scan(root.resolve(), entries_max=files_max * _LOOK_BEYOND)
    found.walk(found.root, "", [])
    _check_caps(found, bytes_max=bytes_max, files_max=files_max)
    file = tempfile.TemporaryFile(prefix="genie-workdir-")  # noqa: SIM115 - the caller closes it
    try:
        _write_tar(found, file, progress or _silent)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes = file.tell()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return PackedWorkdir(digest, size_bytes, file, tuple(found.notes))


def unpack(file: Path, directory: Path) -> None:
    """Into an empty directory. WorkdirError for anything that `pack` would not have made.

    Nothing is ever written outside of `directory`; on an error what was written so far stays.
    """
    try:
        with tarfile.open(file, mode="r:", errorlevel=1) as archive:
            seen: dict[str, bool] = {}
            for member in archive:
                _check_member(member, seen)
                seen[member.name] = member.issym()
                archive.extract(member, directory, filter=_exact)
    except tarfile.TarError as error:
        raise WorkdirError(f"the directory that was sent along cannot be unpacked: {error}") from error
    except OSError as error:
        raise WorkdirError(
            f"the directory that was sent along cannot be written: {error}", hint="check free space there"
        ) from error


# --- packing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    path: Path
    name: str
    mode: int
    size_bytes: int
    link: str = ""


@dataclass
class _Scan:
    root: Path
    entries_max: int
    entries: list[_Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return len(self.entries) > self.entries_max

    @property
    def count_words(self) -> str:
        return f"more than {self.entries_max}" if self.is_full else str(len(self.entries))

    def walk(self, folder: Path, prefix: str, ignores: list[tuple[str, GitIgnoreSpec]]) -> None:
        spec = _read_ignore(folder)
        if spec is not None:
            ignores = [*ignores, (prefix, spec)]
        try:
            listed = sorted(os.scandir(folder), key=lambda item: item.name)
        except OSError as error:
            raise WorkdirError(
                f"{folder} cannot be read: {error.strerror}", hint="or list it in .gitignore"
            ) from error
        for item in listed:
            name = prefix + item.name
            is_folder = item.is_dir(follow_symlinks=False)
            if self.is_full:
                return
            if item.name != _ALWAYS_LEFT_OUT and not _is_ignored(name, is_folder, ignores):
                self._take(item, name, ignores)

    def _take(self, item: os.DirEntry[str], name: str, ignores: list[tuple[str, GitIgnoreSpec]]) -> None:
        path = Path(item.path)
        _check_name(name)
        facts = item.stat(follow_symlinks=False)
        if item.is_symlink():
            self._take_link(path, name)
        elif stat.S_ISDIR(facts.st_mode):
            self.entries.append(_Entry(path, name, 0o755, 0))
            self.walk(path, f"{name}/", ignores)
        elif stat.S_ISREG(facts.st_mode):
            mode = 0o755 if facts.st_mode & stat.S_IXUSR else 0o644
            self.entries.append(_Entry(path, name, mode, facts.st_size))
        else:
            raise WorkdirError(
                f"{path} is a device, pipe or socket and cannot be sent",
                hint="remove it or list it in .gitignore",
            )

    def _take_link(self, path: Path, name: str) -> None:
        target = os.readlink(path)  # noqa: PTH115 - the text as it stands
        real = os.path.realpath(path)
        if _stays_inside(name, target) and (
            real == str(self.root) or real.startswith(f"{self.root}{os.sep}")
        ):
            self.entries.append(_Entry(path, name, 0o777, 0, link=target))
        else:
            self.notes.append(f"{name} was left out: it links to {target}, outside of the directory")


def _read_ignore(folder: Path) -> GitIgnoreSpec | None:
    try:
        return GitIgnoreSpec.from_lines((folder / ".gitignore").read_text("utf-8", "replace").splitlines())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise WorkdirError(f"{folder / '.gitignore'} cannot be used: {error}") from error


def _is_ignored(name: str, is_folder: bool, ignores: list[tuple[str, GitIgnoreSpec]]) -> bool:
    """The innermost .gitignore that says anything about it decides."""
    for prefix, spec in reversed(ignores):
        verdict = spec.check_file(name[len(prefix) :] + ("/" if is_folder else "")).include
        if verdict is not None:
            return verdict
    return False


def _check_name(name: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise WorkdirError(
            f"the file name {name!r} is not UTF-8 and cannot be sent",
            hint="rename it or list it in .gitignore",
        ) from None


def _check_caps(found: _Scan, *, bytes_max: int, files_max: int) -> None:
    total = sum(entry.size_bytes for entry in found.entries)
    if total > bytes_max:
        largest = sorted(found.entries, key=lambda entry: -entry.size_bytes)[:_OFFENDERS_SHOWN]
        shown = ", ".join(f"{entry.name} ({entry.size_bytes} bytes)" for entry in largest)
        raise WorkdirError(
            f"{found.root} holds {total} bytes, and {bytes_max} may be sent; the largest are {shown}",
            hint="list what is not needed in .gitignore, or raise GENIE_WORKDIR_BYTES_MAX",
        )
    if len(found.entries) > files_max:
        shown = ", ".join(f"{name} ({count} files)" for name, count in _fullest_folders(found))
        raise WorkdirError(
            f"{found.root} holds {found.count_words} files, and {files_max} may be sent; most are in {shown}",
            hint="list what is not needed in .gitignore, or raise GENIE_WORKDIR_FILES_MAX",
        )


def _fullest_folders(found: _Scan) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for entry in found.entries:
        top = entry.name.split("/")[0] if "/" in entry.name else "."
        counts[top] = counts.get(top, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])[:_OFFENDERS_SHOWN]


def _write_tar(found: _Scan, file: IO[bytes], progress: Progress) -> None:
    total = sum(entry.size_bytes for entry in found.entries)
    done = 0
    with tarfile.open(fileobj=file, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for entry in sorted(found.entries, key=lambda entry: entry.name.encode()):
            info = tarfile.TarInfo(entry.name)
            info.mode = entry.mode
            if entry.link:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
                archive.addfile(info)
            elif entry.path.is_dir():
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                _add_file(archive, info, entry)
                done += entry.size_bytes
                progress(done, total)


def _add_file(archive: tarfile.TarFile, info: tarfile.TarInfo, entry: _Entry) -> None:
    info.size = entry.size_bytes
    try:
        fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as content:
            # Cut at the size seen before, so that a file that grows cannot spoil the archive.
            archive.addfile(info, content)
    except OSError as error:
        raise WorkdirError(
            f"{entry.path} cannot be read, or shrank while it was read: {error.strerror or error}",
            hint="or list it in .gitignore",
        ) from error


def _silent(done_bytes: int, total_bytes: int) -> None:
    """Nobody asked."""


# --- unpacking --------------------------------------------------------------------------------


def _check_member(member: tarfile.TarInfo, seen: dict[str, bool]) -> None:
    name = member.name
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\x00" in name:
        raise WorkdirError(f"the archive names {name!r}, which could lead out of the directory")
    if name in seen:
        raise WorkdirError(f"the archive names {name!r} twice")
    if any(seen.get(str(parent), False) for parent in PurePosixPath(name).parents):
        raise WorkdirError(f"the archive's {name!r} would be written through a link")
    if member.issym():
        if not _stays_inside(name, member.linkname):
            raise WorkdirError(f"the archive's link {name!r} leads out of the directory")
    elif not (member.isdir() or member.type == tarfile.REGTYPE) or member.issparse():
        raise WorkdirError(f"the archive's {name!r} is neither a file, a directory nor a link")


def _exact(member: tarfile.TarInfo, directory: str) -> tarfile.TarInfo:
    """Python's own filter as the second lock: it also sees links that earlier members have made."""
    return tarfile.data_filter(member, directory)


def _stays_inside(name: str, target: str) -> bool:
    """Whether a link at `name`, read step by step without following others, stays in the tree."""
    if not target or target.startswith("/") or "\\" in target:
        return False
    depth = len(PurePosixPath(name).parts) - 1
    for part in _steps(target):
        depth += -1 if part == ".." else 1
        if depth < 0:
            return False
    return True


def _steps(target: str) -> Iterator[str]:
    for part in target.split("/"):
        if part not in ("", "."):
            yield part
