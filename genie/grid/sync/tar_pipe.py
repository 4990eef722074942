"""For nodes without Python: the whole tree as a tar archive, each time, and nothing is deleted there.

A shell unpacks it beside the tree, then moves file by file into place, so a file is whole or not there.
Links of the node are never followed: a folder that is a link there is an error. Not for: nodes with Python.
"""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import asyncssh

from genie.errors import ConnectionLostError, DeadlineError, NodeRefusedError, SyncError
from genie.grid.login_shell import check_login_shell
from genie.grid.remote import tree
from genie.grid.shell_words import OWN_FOLDER, path_word, through_login_shell
from genie.grid.ssh_pool import Link
from genie.grid.ssh_target import told
from genie.grid.sync.local_tree import Snapshot
from genie.grid.sync.stream import last_words

NOTE = "no Python there: all of it is sent every time, and nothing is deleted"
_CHUNK_BYTES = 1 << 20
_SAID_CHARS_MAX = 4096
_MARK = "@grid-tar"
"""What comes before it is the startup files'."""
_SCRIPT = r"""
set -eu
echo @MARK@ >&2
mkdir -p -- "$root"
if why=$(_grid_refused_link); then echo "$why" >&2; exit 1; fi
cd -- "$root"
ROOT=$(pwd)
export ROOT
mkdir -p .grid/sync
stage=.grid/sync/tar.$$
rm -rf "$stage"
trap 'rm -rf "$ROOT/$stage"' EXIT
mkdir "$stage"
tar -xpf - -C "$stage"
cd "$stage"
find . -type d -exec sh -c '
for each; do
  to="$ROOT/$each"
  if [ -L "$to" ] || { [ -e "$to" ] && [ ! -d "$to" ]; }; then
    echo "$each is no folder here, and no sync put it there" >&2; exit 1
  fi
  [ -d "$to" ] || mkdir -- "$to"
done' sh {} +
find . ! -type d -exec sh -c '
for each; do
  to="$ROOT/$each"
  if [ -L "$to" ]; then rm -f -- "$to"; fi
  if [ -d "$to" ]; then echo "$each is a folder here" >&2; exit 1; fi
  mv -f -- "$each" "$to" || exit 1
done' sh {} +
""".replace("@MARK@", _MARK)


async def send(
    link: Link, snapshot: Snapshot, *, root: str, stall_s: float, apply_s: float
) -> tuple[int, int]:
    """The number of files, and of their bytes. Every wait ends: `apply_s` is for what comes after sending."""
    records = [one for one in tree.records_of(bytes(snapshot.records)) if one.kind != tree.LEFT_OUT]
    command = through_login_shell(f"root={path_word(root)}\n{OWN_FOLDER}{_SCRIPT}")
    try:
        async with asyncio.timeout(stall_s):
            process = await link.connection.create_process(command, encoding=None, stdout=asyncssh.DEVNULL)
        try:
            await _feed(process, snapshot.root, records, stall_s=stall_s)
            async with asyncio.timeout(apply_s):
                words = await last_words(process.stderr)
                await process.wait_closed()
        finally:
            process.close()
    except TimeoutError:
        raise DeadlineError(f"node {link.name}: a transfer came to a stop") from None
    except (asyncssh.Error, OSError) as error:
        raise ConnectionLostError(f"node {link.name}: the connection broke: {told(error)}") from error
    if process.exit_status is None or process.exit_status < 0:
        raise ConnectionLostError(f"node {link.name}: the connection broke in the middle of a transfer")
    if process.exit_status != 0:
        await check_login_shell(link, timeout_s=stall_s)
        ours = words.decode(errors="replace").rpartition(f"{_MARK}\n")[2]
        text = ours.strip()[-_SAID_CHARS_MAX:] or f"tar ended with {process.exit_status}"
        raise NodeRefusedError(f"node {link.name}: {text}", reason=_reason(text))
    files = [one for one in records if one.kind == tree.FILE]
    return len(files), sum(one.size for one in files)


async def _feed(
    process: asyncssh.SSHClientProcess[bytes], root: Path, records: list[tree.Record], *, stall_s: float
) -> None:
    pieces = _archive(root, records)
    try:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            async with asyncio.timeout(stall_s):
                process.stdin.write(piece)
                await process.stdin.drain()
        process.stdin.write_eof()
    except (BrokenPipeError, ConnectionResetError):
        pass  # what it says tells why


def _archive(root: Path, records: list[tree.Record]) -> Iterator[bytes]:
    """A tar stream. Names are bytes; the archive carries them as they are."""
    for one in records:
        info = tarfile.TarInfo(os.fsdecode(one.path))
        info.mode, info.mtime = one.mode, one.mtime_ns // 10**9
        if one.kind == tree.FOLDER:
            info.type = tarfile.DIRTYPE
        elif one.kind == tree.LINK:
            info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(one.link)
        else:
            info.size = one.size
        yield info.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape")
        if one.kind == tree.FILE:
            yield from _contents(root / os.fsdecode(one.path), one.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _contents(path: Path, size: int) -> Iterator[bytes]:
    left = size
    try:
        with path.open("rb") as file:
            while left:
                data = file.read(min(left, _CHUNK_BYTES))
                if not data:
                    raise SyncError(f"{path} became shorter while it was read", hint="sync again")
                left -= len(data)
                yield data
    except OSError as error:
        raise SyncError(f"{path} cannot be read: {error.strerror}") from None
    yield bytes(-size % tarfile.BLOCKSIZE)


def _reason(text: str) -> str:
    if "No space left" in text:
        return "no_space"
    if "is a link that leads out" in text:
        return "link"
    return "conflict" if "no sync put it there" in text or "is a folder here" in text else "os"
