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
from collections.abc import Callable, Collection, Iterator
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
_IGNORE_BYTES_MAX = 1024 * 1024
# What file systems take, and what neither side has to fear.
_NAME_BYTES_MAX = 4096
_PART_BYTES_MAX = 255
_DEPTH_MAX = 100
_NAME_CHARS_SHOWN = 80
_MEMBERS_MAX = 1_000_000
_LONG_FIELDS_BYTES_MAX = 64 * 1024
_LENGTH_DIGITS_MAX = 8

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
    files_max = min(files_max, _MEMBERS_MAX)
    root = Path(os.path.abspath(directory))  # noqa: PTH100 - a link to a directory is followed, once
    if not root.is_dir():
        raise WorkdirError(f"{directory} is not a directory", hint="give --workdir a directory")
    found = _Scan(root.resolve(), entries_max=files_max * _LOOK_BEYOND)
    found.walk(found.root, "", [])
    found.leave_out_detours()
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
    name = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as archive:
            tree = _Tree(directory)
            for member in _members(archive):
                name = member.name
                tree.add(member, archive)
            tree.make_links()
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise WorkdirError(
            f"the directory that was sent along cannot be unpacked: {str(error)[:200]}"
        ) from error
    except OSError as error:
        raise WorkdirError(
            f"the directory that was sent along cannot be written: "
            f"{_shown(name)}: {error.strerror or type(error).__name__}",
            hint="check free space there",
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
        if _target_of(name, target) is not None and (
            real == str(self.root) or real.startswith(f"{self.root}{os.sep}")
        ):
            self.entries.append(_Entry(path, name, 0o777, 0, link=target))
        else:
            self.notes.append(f"{name} was left out: it links to {target}, which is or may be outside")

    def leave_out_detours(self) -> None:
        """Once all links are known."""
        links = {entry.name for entry in self.entries if entry.link}
        detours = {entry.name for entry in self.entries if _passes_through(entry.name, entry.link, links)}
        self.entries = [entry for entry in self.entries if entry.name not in detours]
        self.notes += [f"{name} was left out: it leads through another link" for name in sorted(detours)]


def _read_ignore(folder: Path) -> GitIgnoreSpec | None:
    path = folder / ".gitignore"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None  # a pipe would keep us, and a device may never end
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            data = file.read(_IGNORE_BYTES_MAX + 1)
        if len(data) > _IGNORE_BYTES_MAX:
            raise WorkdirError(f"{path} has more than {_IGNORE_BYTES_MAX} bytes")
        return GitIgnoreSpec.from_lines(data.decode("utf-8", "replace").splitlines())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise WorkdirError(f"{path} cannot be used: {error}") from error


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
    fault = _fault_of(name)
    if fault:
        raise WorkdirError(f"the file name {_shown(name)} {fault}", hint="rename it or list it in .gitignore")


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
        # Without waiting: what was a file a moment ago may be a pipe now.
        fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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


# --- names and links, the same rules on both sides ------------------------------------------------


def _fault_of(name: str) -> str:
    """Why a member must not have this name; empty for a good one. Only one spelling of each is good."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\x00" in name:
        return "could lead out of the directory"
    size_bytes = len(name.encode("utf-8", "surrogateescape"))
    longest = max(len(part.encode("utf-8", "surrogateescape")) for part in parts)
    if size_bytes > _NAME_BYTES_MAX or longest > _PART_BYTES_MAX or len(parts) > _DEPTH_MAX:
        return (
            f"is too long or too deep: {_NAME_BYTES_MAX} bytes, {_PART_BYTES_MAX} in each part, "
            f"{_DEPTH_MAX} parts are allowed"
        )
    return ""


def _target_of(name: str, target: str) -> PurePosixPath | None:
    """Where a link at `name` leads, from the top of the tree; None when that is or may be outside.

    Steps up come first or not at all: after a normal part they would depend on what that part is.
    """
    if not target or target.startswith("/") or "\\" in target or "\x00" in target:
        return None
    if len(target.encode("utf-8", "surrogateescape")) > _NAME_BYTES_MAX:
        return None
    here = list(PurePosixPath(name).parts[:-1])
    went_down = False
    for part in target.split("/"):
        if part in ("", "."):
            continue
        if part != "..":
            went_down = True
            here.append(part)
        elif went_down or not here:
            return None
        else:
            here.pop()
    return PurePosixPath(*here)


def _passes_through(name: str, target: str, links: Collection[str]) -> bool:
    """Whether the way to the target leads over another link. A link to a link is fine."""
    leads_to = _target_of(name, target)
    return leads_to is not None and any(str(parent) in links for parent in leads_to.parents)


def _shown(name: str) -> str:
    return repr(name[:_NAME_CHARS_SHOWN]) + ("..." if len(name) > _NAME_CHARS_SHOWN else "")


# --- unpacking --------------------------------------------------------------------------------


def _members(archive: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Header by header; `archive` is left where the member's content starts. Takes no more than it must.

    Not with tarfile.TarFile: it reads long headers of any size, and its idea of what stands where must
    not differ from the one that was checked.
    """
    content_end = 0
    for _ in range(_MEMBERS_MAX):
        archive.seek(content_end)
        long: dict[str, str] = {}
        member = _header(archive)
        if member is not None and member.type == tarfile.XHDTYPE:
            long = _long_fields(archive, member)
            member = _header(archive)
            if member is None:
                raise tarfile.HeaderError("a long name without a member")
        if member is None:
            return
        member.name = long.get("path", member.name)
        if member.type == tarfile.DIRTYPE:
            member.name = member.name.removesuffix("/")  # frombuf has done this for short ones
        member.linkname = long.get("linkpath", member.linkname)
        member.size = int(long.get("size", member.size))
        if member.size < 0:
            raise tarfile.HeaderError("a member of less than no bytes")
        content_end = archive.tell() + _padded(member.size)
        yield member
    raise WorkdirError(f"the archive has more than {_MEMBERS_MAX} members")


def _header(archive: IO[bytes]) -> tarfile.TarInfo | None:
    """None at the end of the archive."""
    block = archive.read(tarfile.BLOCKSIZE)
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        if block == tarfile.NUL * tarfile.BLOCKSIZE:
            return None
        raise


def _long_fields(archive: IO[bytes], header: tarfile.TarInfo) -> dict[str, str]:
    """What did not fit into a plain header: `LENGTH KEY=VALUE\\n`, again and again."""
    if not 0 < header.size <= _LONG_FIELDS_BYTES_MAX:
        raise tarfile.HeaderError(f"a long name of {header.size} bytes")
    data = archive.read(_padded(header.size))[: header.size]
    fields: dict[str, str] = {}
    while data:
        length = int(data.split(b" ", 1)[0][:_LENGTH_DIGITS_MAX])
        line, data = data[:length], data[length:]
        key, equals, value = line.partition(b" ")[2].partition(b"=")
        if len(line) != length or not equals or not value.endswith(b"\n"):
            raise tarfile.HeaderError("a long name that is not whole")
        if key not in (b"path", b"linkpath", b"size"):
            raise tarfile.HeaderError(f"a field {key[:_NAME_CHARS_SHOWN]!r} in a header")
        fields[key.decode()] = value[:-1].decode("utf-8", "surrogateescape")
    return fields


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


class _Tree:
    """What has been unpacked so far. Links are made last, so that nothing can be written through one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders = {"."}
        self._files: set[str] = set()
        self._links: dict[str, str] = {}

    def add(self, member: tarfile.TarInfo, archive: IO[bytes]) -> None:
        name = member.name
        self._check_place(name)
        if member.type == tarfile.DIRTYPE:
            self._folders.add(name)
            (self._root / name).mkdir(mode=0o755)
        elif member.type == tarfile.REGTYPE:
            self._files.add(name)
            self._write(member, archive)
        elif member.type == tarfile.SYMTYPE:
            if _target_of(name, member.linkname) is None:
                raise WorkdirError(f"the archive's link {_shown(name)} leads out of the directory")
            self._links[name] = member.linkname
        else:
            raise WorkdirError(f"the archive's {_shown(name)} is neither a file, a directory nor a link")

    def make_links(self) -> None:
        for name, target in self._links.items():
            if _passes_through(name, target, self._links):
                raise WorkdirError(f"the archive's link {_shown(name)} leads through another link")
        for name, target in self._links.items():
            (self._root / name).symlink_to(target)

    def _check_place(self, name: str) -> None:
        fault = _fault_of(name)
        if fault:
            raise WorkdirError(f"the archive names {_shown(name)}, which {fault}")
        if name in self._folders or name in self._files or name in self._links:
            raise WorkdirError(f"the archive names {_shown(name)} twice")
        path = PurePosixPath(name)
        if any(str(parent) in self._links for parent in path.parents):
            raise WorkdirError(f"the archive's {_shown(name)} would be written through a link")
        if str(path.parent) not in self._folders:
            raise WorkdirError(f"the archive's {_shown(name)} is in no directory of the archive")

    def _write(self, member: tarfile.TarInfo, archive: IO[bytes]) -> None:
        mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
        fd = os.open(self._root / member.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            left = member.size
            while left:
                data = archive.read(min(left, _COPY_BYTES))
                if not data:
                    raise tarfile.ReadError("unexpected end of data")
                left -= file.write(data)
