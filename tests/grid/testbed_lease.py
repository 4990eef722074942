"""A testbed that tests may break, one after the other; it is restored after each of them.

Starting servers for each test takes longer than most of the tests. After a test, all processes on the nodes
are killed, home directories are emptied and all files of the testbed are restored; a server that the test has
stopped, restarted or remounted is started again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.grid.testbed import SshNode, SshTestbed
from tests.waiting import wait_until

_IGNORED = ("sshd.log", "sshd.pid")


class SshTestbedLease:
    """`testbed` is started and unmodified. `on_start` is called with the PID of each restarted server."""

    def __init__(self, testbed: SshTestbed, *, on_start: Callable[[int], None]) -> None:
        self._bed = testbed
        self._on_start = on_start
        self._files = dict(_read_files(testbed))
        self._attributes = [(part, dict(vars(part))) for part in (testbed, *testbed.nodes)]
        self._mounts = {node.name: _read_mounts(node) for node in testbed.nodes}

    @contextlib.contextmanager
    def take(self) -> Iterator[SshTestbed]:
        try:
            yield self._bed
        finally:
            self._restore()

    def _restore(self) -> None:
        before = {node.name: self._process_of(node) for node in self._bed.nodes}
        for node in self._bed.nodes:
            if (
                node._process is not before[node.name]
                or not _is_server_running(node)
                or _read_mounts(node) != self._mounts[node.name]
            ):
                node.stop()
            else:
                _kill_session_processes(node)
        for part, attributes in self._attributes:
            running = part._process if isinstance(part, SshNode) else None
            vars(part).clear()
            vars(part).update(attributes)
            if isinstance(part, SshNode):
                part._process = running
        self._restore_files()
        self._restart()

    def _process_of(self, node: SshNode) -> object:
        return next(attributes["_process"] for part, attributes in self._attributes if part is node)

    def _restart(self) -> None:
        stopped = [node for node in self._bed.nodes if node._process is None]
        for node in stopped:
            node.start()
            assert node._process is not None
            self._on_start(node._process.pid)
        for node in stopped:
            node.wait_ready()
            self._mounts[node.name] = _read_mounts(node)
            next(values for part, values in self._attributes if part is node)["_process"] = node._process

    def _restore_files(self) -> None:
        for node in self._bed.nodes:
            for entry in os.scandir(os.fsencode(node.home)):
                _remove_file_or_folder(entry.path, is_folder=entry.is_dir(follow_symlinks=False))
        found = dict(_read_files(self._bed))
        for path in sorted(found.keys() - self._files.keys()):
            if os.path.lexists(path):
                _remove_file_or_folder(os.fsencode(path), is_folder=found[path][0] == "folder")
        for path, known in sorted(self._files.items()):
            if found.get(path) != known:
                _restore_file(path, *known)


def _read_files(testbed: SshTestbed) -> Iterator[tuple[Path, tuple[str, int, bytes]]]:
    """Return kind, mode and content of all files of the testbed, except those in home directories."""
    homes = {node.home for node in testbed.nodes}
    folders = [testbed.folder]
    while folders:
        for path in folders.pop().iterdir():
            mode = path.lstat().st_mode & 0o7777
            if path.is_symlink():
                yield path, ("link", 0, os.fsencode(path.readlink()))
            elif path.is_dir():
                yield path, ("folder", mode, b"")
                if path not in homes:
                    folders.append(path)
            elif path.name not in _IGNORED:
                yield path, ("file", mode, path.read_bytes() if path.is_file() else b"\0not a file")


def _restore_file(path: Path, kind: str, mode: int, content: bytes) -> None:
    if os.path.lexists(path) and (path.is_symlink() or kind == "link" or path.is_dir() != (kind == "folder")):
        _remove_file_or_folder(os.fsencode(path), is_folder=path.is_dir() and not path.is_symlink())
    if kind == "link":
        path.symlink_to(os.fsdecode(content))
        return
    if kind == "folder":
        path.mkdir(exist_ok=True)
    else:
        path.write_bytes(content)
    path.chmod(mode)


def _remove_file_or_folder(path: bytes, *, is_folder: bool) -> None:
    if is_folder:
        shutil.rmtree(path)
    else:
        os.unlink(path)  # noqa: PTH108 - names that are not valid text


def _is_server_running(node: SshNode) -> bool:
    return node._process is not None and node._process.poll() is None


def _read_mounts(node: SshNode) -> str:
    assert node._process is not None
    return Path(f"/proc/{node._process.pid}/mountinfo").read_text()


def _kill_session_processes(node: SshNode) -> None:
    """Kill all processes but the server, including those started meanwhile."""
    assert node._process is not None
    server = node._process.pid

    def have_ended() -> bool:
        others = [pid for pid in node._pids(server) if pid != server]
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        return not others

    wait_until(have_ended, what=f"the end of all processes on {node.name}")
