"""Sync for nodes without Python: sends the complete tree as a tar archive, and deletes nothing.

A shell unpacks it into a staging folder and moves the files into place one by one: no file is partial.
Links on the node are never followed: a folder that is a link there is an error.
"""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import asyncssh

from genie.errors import ConnectionLostError, DeadlineError, NodeRefusedError, SyncError
from genie.grid.remote import tree
from genie.grid.remote.own_folder import rejected_link_message
from genie.grid.ssh.login_shell import check_login_shell
from genie.grid.ssh.pool import NodeConnection
from genie.grid.ssh.shell_words import CHECK_GRID_FOLDER_LINK_SCRIPT, make_login_shell_command, quote_path
from genie.grid.ssh.target import format_error
from genie.grid.sync.local_tree import TreeSnapshot
from genie.grid.sync.stream import read_all_and_keep_tail

NO_PYTHON_NOTE = "no Python on the node: all files are sent each time, and none is deleted"
_READ_CHUNK_BYTES = 1 << 20
_STDERR_CHARS_SHOWN_MAX = 4096
_REJECTED_LINK_TEXT = rejected_link_message("", "\n").partition("\n")[0]
"""The part of the error for a link that does not depend on the paths."""
_OUTPUT_START_MARK = "@grid-tar"
"""Output before it is from startup files of the shell."""
_RECEIVE_SCRIPT = r"""
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
    echo "$each is not a folder on the node, and not from a sync" >&2; exit 1
  fi
  [ -d "$to" ] || mkdir -- "$to"
done' sh {} +
find . ! -type d -exec sh -c '
for each; do
  to="$ROOT/$each"
  if [ -L "$to" ]; then rm -f -- "$to"; fi
  if [ -d "$to" ]; then echo "$each is a folder on the node" >&2; exit 1; fi
  mv -f -- "$each" "$to" || exit 1
done' sh {} +
""".replace("@MARK@", _OUTPUT_START_MARK)


async def send_by_tar_and_count_files_and_bytes(
    link: NodeConnection, snapshot: TreeSnapshot, *, root: str, stall_s: float, apply_s: float
) -> tuple[int, int]:
    """Returns the number of files and their bytes. `apply_s` limits the time after sending."""
    records = [one for one in tree.iter_records(bytes(snapshot.records)) if one.kind != tree.EXCLUDED]
    command = make_login_shell_command(
        f"root={quote_path(root)}\n{CHECK_GRID_FOLDER_LINK_SCRIPT}{_RECEIVE_SCRIPT}"
    )
    try:
        async with asyncio.timeout(stall_s):
            process = await link.connection.create_process(command, encoding=None, stdout=asyncssh.DEVNULL)
        try:
            await _send_tar_stream(process, snapshot.root, records, stall_s=stall_s)
            async with asyncio.timeout(apply_s):
                stderr = await read_all_and_keep_tail(process.stderr)
                await process.wait_closed()
        finally:
            process.close()
    except TimeoutError:
        raise DeadlineError(f"node {link.name}: the transfer stalled") from None
    except (asyncssh.Error, OSError) as error:
        raise ConnectionLostError(f"node {link.name}: connection lost: {format_error(error)}") from error
    if process.exit_status is None or process.exit_status < 0:
        raise ConnectionLostError(f"node {link.name}: connection lost during a transfer")
    if process.exit_status != 0:
        await check_login_shell(link, timeout_s=stall_s)
        ours = stderr.decode(errors="replace").rpartition(f"{_OUTPUT_START_MARK}\n")[2]
        text = ours.strip()[-_STDERR_CHARS_SHOWN_MAX:] or f"tar exited with {process.exit_status}"
        raise NodeRefusedError(f"node {link.name}: {text}", reason=_reason_from_tar_error(text))
    files = [one for one in records if one.kind == tree.FILE]
    return len(files), sum(one.size for one in files)


async def _send_tar_stream(
    process: asyncssh.SSHClientProcess[bytes], root: Path, records: list[tree.TreeRecord], *, stall_s: float
) -> None:
    pieces = _make_tar_stream(root, records)
    try:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            async with asyncio.timeout(stall_s):
                process.stdin.write(piece)
                await process.stdin.drain()
        process.stdin.write_eof()
    except (BrokenPipeError, ConnectionResetError):
        pass  # its stderr has the reason


def _make_tar_stream(root: Path, records: list[tree.TreeRecord]) -> Iterator[bytes]:
    """Yields a tar stream. Names are bytes and are stored unchanged."""
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
            yield from _read_file_padded_for_tar(root / os.fsdecode(one.path), one.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _read_file_padded_for_tar(path: Path, size: int) -> Iterator[bytes]:
    remaining = size
    try:
        with path.open("rb") as file:
            while remaining:
                data = file.read(min(remaining, _READ_CHUNK_BYTES))
                if not data:
                    raise SyncError(f"{path} was truncated while it was read", hint="sync again")
                remaining -= len(data)
                yield data
    except OSError as error:
        raise SyncError(f"could not read {path}: {error.strerror}") from None
    yield bytes(-size % tarfile.BLOCKSIZE)


def _reason_from_tar_error(text: str) -> str:
    if "No space left" in text:
        return "no_space"
    if _REJECTED_LINK_TEXT in text:
        return "link"
    return "conflict" if "is not a folder on the node" in text or "is a folder on the node" in text else "os"
