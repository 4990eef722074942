"""The working directory of a job: packs it into an archive on the client, unpacks it on the node.

The archive is a plain tar with sorted names and without times and owners, so that equal contents have an
equal digest. It is not compressed, so that the unpacked files can never be larger than the upload. Excludes
.git and what .gitignore lists. The upload is in cluster/, the storage in controller/.
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

_ALWAYS_EXCLUDED_NAME = ".git"
_COPY_CHUNK_BYTES = 1024 * 1024
_NAMES_IN_MESSAGE_MAX = 5
# Scan this many times the limit, to report where the files are without scanning a whole home directory.
_SCANNED_ENTRIES_PER_ALLOWED_FILE = 10
_GITIGNORE_BYTES_MAX = 1024 * 1024
# Limits of file systems, and of this format.
_NAME_BYTES_MAX = 4096
_PATH_COMPONENT_BYTES_MAX = 255
_FOLDER_DEPTH_MAX = 100
_QUOTED_NAME_CHARS_MAX = 80
_TAR_MEMBERS_MAX = 1_000_000
_EXTENDED_HEADER_BYTES_MAX = 64 * 1024
_PAX_LENGTH_DIGITS_MAX = 8

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes packed so far and the total."""


@dataclass(frozen=True)
class PackedWorkdir:
    """`file` is an open temporary file without a name; closing it removes it."""

    digest: str
    size_bytes: int
    file: IO[bytes]
    exclusion_notes: tuple[str, ...] = ()
    """Files that were excluded although .gitignore does not list them, with reasons."""

    @property
    def workdir(self) -> Workdir:
        return Workdir(digest=self.digest, size_bytes=self.size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.file.close()


def pack(
    directory: Path, *, bytes_max: int, files_max: int, progress: ProgressCallback | None = None
) -> PackedWorkdir:
    """Raises WorkdirError if the directory is too large, unreadable or contains unsupported files."""
    files_max = min(files_max, _TAR_MEMBERS_MAX)
    root = Path(os.path.abspath(directory))  # noqa: PTH100 - a link to a directory is followed, once
    if not root.is_dir():
        raise WorkdirError(f"{directory} is not a directory", hint="pass a directory to --workdir")
    found = _WorkdirScan(root.resolve(), entries_max=files_max * _SCANNED_ENTRIES_PER_ALLOWED_FILE)
    found.walk(found.root, "", [])
    found.exclude_indirect_links()
    _check_workdir_limits(found, bytes_max=bytes_max, files_max=files_max)
    file = tempfile.TemporaryFile(prefix="genie-workdir-")  # noqa: SIM115 - the caller closes it
    try:
        _write_tar(found, file, progress or _ignore_progress)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes = file.tell()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return PackedWorkdir(digest, size_bytes, file, tuple(found.exclusion_notes))


def unpack(file: Path, directory: Path) -> None:
    """Unpacks into an empty directory. Raises WorkdirError for anything that `pack` does not create.

    Never writes outside of `directory`; after an error, the files written so far remain.
    """
    name = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as archive:
            tree = _UnpackedTree(directory)
            for member in _read_members(archive):
                name = member.name
                tree.add(member, archive)
            tree.make_links()
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise WorkdirError(f"could not unpack the working directory: {str(error)[:200]}") from error
    except OSError as error:
        raise WorkdirError(
            f"could not write the working directory: "
            f"{_quote_shortened_name(name)}: {error.strerror or type(error).__name__}",
            hint="check the free disk space of the node",
        ) from error


# --- packing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PackedEntry:
    path: Path
    name: str
    mode: int
    size_bytes: int
    link: str = ""


@dataclass
class _WorkdirScan:
    root: Path
    entries_max: int
    entries: list[_PackedEntry] = field(default_factory=list)
    exclusion_notes: list[str] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return len(self.entries) > self.entries_max

    @property
    def formatted_count(self) -> str:
        return f"more than {self.entries_max}" if self.is_full else str(len(self.entries))

    def walk(self, folder: Path, prefix: str, ignores: list[tuple[str, GitIgnoreSpec]]) -> None:
        spec = _read_gitignore(folder)
        if spec is not None:
            ignores = [*ignores, (prefix, spec)]
        try:
            items = sorted(os.scandir(folder), key=lambda item: item.name)
        except OSError as error:
            raise WorkdirError(
                f"could not read {folder}: {error.strerror}", hint="fix it, or list it in .gitignore"
            ) from error
        for item in items:
            name = prefix + item.name
            is_folder = item.is_dir(follow_symlinks=False)
            if self.is_full:
                return
            if item.name != _ALWAYS_EXCLUDED_NAME and not _is_ignored(name, is_folder, ignores):
                self._add_entry(item, name, ignores)

    def _add_entry(self, item: os.DirEntry[str], name: str, ignores: list[tuple[str, GitIgnoreSpec]]) -> None:
        path = Path(item.path)
        _check_portable_name(name)
        status = item.stat(follow_symlinks=False)
        if item.is_symlink():
            self._add_link(path, name)
        elif stat.S_ISDIR(status.st_mode):
            self.entries.append(_PackedEntry(path, name, 0o755, 0))
            self.walk(path, f"{name}/", ignores)
        elif stat.S_ISREG(status.st_mode):
            mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
            self.entries.append(_PackedEntry(path, name, mode, status.st_size))
        else:
            raise WorkdirError(
                f"{path} is a device, pipe or socket and cannot be uploaded",
                hint="remove it or list it in .gitignore",
            )

    def _add_link(self, path: Path, name: str) -> None:
        target = os.readlink(path)  # noqa: PTH115 - the text unchanged
        real = os.path.realpath(path)
        if _resolve_link_within_workdir(name, target) is not None and (
            real == str(self.root) or real.startswith(f"{self.root}{os.sep}")
        ):
            self.entries.append(_PackedEntry(path, name, 0o777, 0, link=target))
        else:
            self.exclusion_notes.append(
                f"{name} was excluded: its target {target} is or may be outside of the directory"
            )

    def exclude_indirect_links(self) -> None:
        """Excludes links whose path leads through another link. Call it when all links are known."""
        links = {entry.name for entry in self.entries if entry.link}
        indirect = {
            entry.name for entry in self.entries if _passes_through_link(entry.name, entry.link, links)
        }
        self.entries = [entry for entry in self.entries if entry.name not in indirect]
        self.exclusion_notes += [
            f"{name} was excluded: its path leads through another link" for name in sorted(indirect)
        ]


def _read_gitignore(folder: Path) -> GitIgnoreSpec | None:
    path = folder / ".gitignore"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None  # reading a pipe would block, and a device may be endless
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            data = file.read(_GITIGNORE_BYTES_MAX + 1)
        if len(data) > _GITIGNORE_BYTES_MAX:
            raise WorkdirError(f"{path} is larger than {_GITIGNORE_BYTES_MAX} bytes")
        return GitIgnoreSpec.from_lines(data.decode("utf-8", "replace").splitlines())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise WorkdirError(f"could not read {path}: {error}") from error


def _is_ignored(name: str, is_folder: bool, ignores: list[tuple[str, GitIgnoreSpec]]) -> bool:
    """The innermost .gitignore with a matching pattern takes precedence."""
    for prefix, spec in reversed(ignores):
        ignored = spec.check_file(name[len(prefix) :] + ("/" if is_folder else "")).include
        if ignored is not None:
            return ignored
    return False


def _check_portable_name(name: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise WorkdirError(
            f"the file name {name!r} is not UTF-8 and cannot be uploaded",
            hint="rename it or list it in .gitignore",
        ) from None
    problem = _why_name_not_portable(name)
    if problem:
        raise WorkdirError(
            f"the file name {_quote_shortened_name(name)} {problem}",
            hint="rename it or list it in .gitignore",
        )


def _check_workdir_limits(found: _WorkdirScan, *, bytes_max: int, files_max: int) -> None:
    total = sum(entry.size_bytes for entry in found.entries)
    if total > bytes_max:
        largest = sorted(found.entries, key=lambda entry: -entry.size_bytes)[:_NAMES_IN_MESSAGE_MAX]
        shown = ", ".join(f"{entry.name} ({entry.size_bytes} bytes)" for entry in largest)
        raise WorkdirError(
            f"{found.root} has {total} bytes; the limit is {bytes_max}; the largest files are {shown}",
            hint="list unneeded files in .gitignore, or raise GENIE_WORKDIR_BYTES_MAX",
        )
    if len(found.entries) > files_max:
        shown = ", ".join(f"{name} ({count} files)" for name, count in _folders_with_most_files(found))
        raise WorkdirError(
            f"{found.root} has {found.formatted_count} files; the limit is {files_max}; most are in {shown}",
            hint="list unneeded files in .gitignore, or raise GENIE_WORKDIR_FILES_MAX",
        )


def _folders_with_most_files(found: _WorkdirScan) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for entry in found.entries:
        top = entry.name.split("/")[0] if "/" in entry.name else "."
        counts[top] = counts.get(top, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])[:_NAMES_IN_MESSAGE_MAX]


def _write_tar(found: _WorkdirScan, file: IO[bytes], progress: ProgressCallback) -> None:
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


def _add_file(archive: tarfile.TarFile, info: tarfile.TarInfo, entry: _PackedEntry) -> None:
    info.size = entry.size_bytes
    try:
        # Non-blocking, because the file may have been replaced by a pipe.
        fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as content:
            # Only up to the size in the header, because the file may have grown.
            archive.addfile(info, content)
    except OSError as error:
        raise WorkdirError(
            f"could not read {entry.path}, or it was truncated during the upload: {error.strerror or error}",
            hint="fix it, or list it in .gitignore",
        ) from error


def _ignore_progress(done_bytes: int, total_bytes: int) -> None:
    """The default progress callback."""


# --- names and links: the rules of pack and unpack ------------------------------------------------


def _why_name_not_portable(name: str) -> str:
    """Why the name of a member is invalid; empty if it is valid. Only normalized names are valid."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\x00" in name:
        return "could be outside of the directory"
    size_bytes = len(name.encode("utf-8", "surrogateescape"))
    longest = max(len(part.encode("utf-8", "surrogateescape")) for part in parts)
    if size_bytes > _NAME_BYTES_MAX or longest > _PATH_COMPONENT_BYTES_MAX or len(parts) > _FOLDER_DEPTH_MAX:
        return (
            f"is too long or too deep: {_NAME_BYTES_MAX} bytes, {_PATH_COMPONENT_BYTES_MAX} in each part, "
            f"{_FOLDER_DEPTH_MAX} parts are allowed"
        )
    return ""


def _resolve_link_within_workdir(name: str, target: str) -> PurePosixPath | None:
    """The target of a link at `name`, relative to the root; None if it is or may be outside.

    '..' is only allowed at the start: after a normal part its meaning would depend on that part.
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


def _passes_through_link(name: str, target: str, links: Collection[str]) -> bool:
    """Whether the path to the target contains another link. A link to a link is allowed."""
    resolved = _resolve_link_within_workdir(name, target)
    return resolved is not None and any(str(parent) in links for parent in resolved.parents)


def _quote_shortened_name(name: str) -> str:
    return repr(name[:_QUOTED_NAME_CHARS_MAX]) + ("..." if len(name) > _QUOTED_NAME_CHARS_MAX else "")


# --- unpacking --------------------------------------------------------------------------------


def _read_members(archive: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Yields the members; `archive` is then positioned at the content of the member.

    Does not use tarfile.TarFile, which reads headers of any size, and whose positions could differ from the
    checked ones.
    """
    content_end = 0
    for _ in range(_TAR_MEMBERS_MAX):
        archive.seek(content_end)
        extended: dict[str, str] = {}
        member = _read_header(archive)
        if member is not None and member.type == tarfile.XHDTYPE:
            extended = _read_extended_header(archive, member)
            member = _read_header(archive)
            if member is None:
                raise tarfile.HeaderError("pax header without a member")
        if member is None:
            return
        member.name = extended.get("path", member.name)
        if member.type == tarfile.DIRTYPE:
            member.name = member.name.removesuffix("/")  # frombuf does this for short names
        member.linkname = extended.get("linkpath", member.linkname)
        member.size = int(extended.get("size", member.size))
        if member.size < 0:
            raise tarfile.HeaderError("member with a negative size")
        content_end = archive.tell() + _padded_to_tar_block(member.size)
        yield member
    raise WorkdirError(f"the archive has more than {_TAR_MEMBERS_MAX} members")


def _read_header(archive: IO[bytes]) -> tarfile.TarInfo | None:
    """The next header; None at the end of the archive."""
    block = archive.read(tarfile.BLOCKSIZE)
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        if block == tarfile.NUL * tarfile.BLOCKSIZE:
            return None
        raise


def _read_extended_header(archive: IO[bytes], header: tarfile.TarInfo) -> dict[str, str]:
    """The fields of a pax header: a sequence of `LENGTH KEY=VALUE\\n`."""
    if not 0 < header.size <= _EXTENDED_HEADER_BYTES_MAX:
        raise tarfile.HeaderError(f"pax header of {header.size} bytes")
    data = archive.read(_padded_to_tar_block(header.size))[: header.size]
    fields: dict[str, str] = {}
    while data:
        length = int(data.split(b" ", 1)[0][:_PAX_LENGTH_DIGITS_MAX])
        line, data = data[:length], data[length:]
        key, equals, value = line.partition(b" ")[2].partition(b"=")
        if len(line) != length or not equals or not value.endswith(b"\n"):
            raise tarfile.HeaderError("incomplete pax header")
        if key not in (b"path", b"linkpath", b"size"):
            raise tarfile.HeaderError(f"unsupported field {key[:_QUOTED_NAME_CHARS_MAX]!r} in a pax header")
        fields[key.decode()] = value[:-1].decode("utf-8", "surrogateescape")
    return fields


def _padded_to_tar_block(size_bytes: int) -> int:
    return -(-size_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


class _UnpackedTree:
    """The unpacked tree. Links are created last, so that nothing can be written through them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders = {"."}
        self._files: set[str] = set()
        self._links: dict[str, str] = {}

    def add(self, member: tarfile.TarInfo, archive: IO[bytes]) -> None:
        name = member.name
        self._check_path(name)
        if member.type == tarfile.DIRTYPE:
            self._folders.add(name)
            (self._root / name).mkdir(mode=0o755)
        elif member.type == tarfile.REGTYPE:
            self._files.add(name)
            self._write_file(member, archive)
        elif member.type == tarfile.SYMTYPE:
            if _resolve_link_within_workdir(name, member.linkname) is None:
                raise WorkdirError(
                    f"the link {_quote_shortened_name(name)} of the archive leads out of the directory"
                )
            self._links[name] = member.linkname
        else:
            raise WorkdirError(
                f"{_quote_shortened_name(name)} of the archive is neither a file, a directory nor a link"
            )

    def make_links(self) -> None:
        for name, target in self._links.items():
            if _passes_through_link(name, target, self._links):
                raise WorkdirError(
                    f"the link {_quote_shortened_name(name)} of the archive leads through another link"
                )
        for name, target in self._links.items():
            (self._root / name).symlink_to(target)

    def _check_path(self, name: str) -> None:
        problem = _why_name_not_portable(name)
        if problem:
            raise WorkdirError(f"the archive contains {_quote_shortened_name(name)}, which {problem}")
        if name in self._folders or name in self._files or name in self._links:
            raise WorkdirError(f"the archive contains {_quote_shortened_name(name)} twice")
        path = PurePosixPath(name)
        if any(str(parent) in self._links for parent in path.parents):
            raise WorkdirError(
                f"{_quote_shortened_name(name)} of the archive would be written through a link"
            )
        if str(path.parent) not in self._folders:
            raise WorkdirError(f"the directory of {_quote_shortened_name(name)} is not in the archive")

    def _write_file(self, member: tarfile.TarInfo, archive: IO[bytes]) -> None:
        mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
        fd = os.open(self._root / member.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            remaining = member.size
            while remaining:
                data = archive.read(min(remaining, _COPY_CHUNK_BYTES))
                if not data:
                    raise tarfile.ReadError("unexpected end of data")
                remaining -= file.write(data)
