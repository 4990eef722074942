"""A folder to several nodes: looked at once, compared with each, sent to all that need the same at once.

Here and on the nodes everything is looked at in the same moment; a node that has it all costs one request.
A small change is one more request, a large one a stream; nodes that need the same files share the reading.
A transfer that breaks off is taken up where it was.

Not for: nodes without Python (tar_pipe.py), and what is shown to people (cli/).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from genie import config
from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    NodeRefusedError,
    ProtocolError,
    SyncError,
    TransportError,
)
from genie.grid.grid_file import GridFile
from genie.grid.remote import tree
from genie.grid.remote.sync import ANSWER_BYTES, PLAN_BYTES_MAX
from genie.grid.run import MALFORMED
from genie.grid.ssh_pool import Link, SshPool
from genie.grid.sync import tar_pipe
from genie.grid.sync.delta import Delta, bytes_of, delta_of, gone_of, paths_of, plan_of
from genie.grid.sync.local_tree import LocalTree, Snapshot, library, local_engine, local_root
from genie.grid.sync.pack import (
    Chunk,
    Chunks,
    VanishedError,
    bytes_to_send,
    hash_files,
    pack_files,
    plan_frames,
)
from genie.grid.sync.stream import Stream
from genie.runtime.tasks import all_of

_log = logging.getLogger(__name__)
_CHECK_S = 600.0
_APPLY_S = 600.0
_STALL_S = 30.0
_LOCK_WAIT_S = 20.0
_TRIES = 3
_TOGETHER_S = 1.0
_INLINE_BYTES_MAX = 1 << 20
_NAMES_SHOWN = 100


class SyncMetrics(Protocol):
    def sync_finished(self, duration_s: float) -> None: ...


@dataclass(frozen=True)
class Progress:
    """How far one node is."""

    node: str
    files: int
    files_total: int
    bytes: int
    bytes_total: int


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What became of one node. With `error` the visible tree there is as it was, or as it should be."""

    node: str
    sent_files: int = 0
    sent_bytes: int = 0
    deleted: int = 0
    kept: tuple[str, ...] = ()
    """Names that we no longer have and that stay, because they were changed on the node."""
    overwritten: tuple[str, ...] = ()
    """Names of the node's own files that ours have replaced."""
    restored: int = 0
    """Of ours, changed or deleted on the node since the last sync, and put back."""
    seconds: float = 0.0
    unchanged: bool = False
    note: str = ""
    paths: tuple[str, ...] = ()
    """Of a dry run: files and links that would be sent."""
    gone: tuple[str, ...] = ()
    """Of a dry run: what would be deleted."""
    error: GenieError | None = None


@dataclass
class _Task:
    """One node on the way."""

    link: Link
    started: float
    digest: str = ""
    drift: bytes = b""
    there: frozenset[bytes] = frozenset()
    delta: Delta = dataclasses.field(default_factory=Delta)
    stream: Stream | None = None
    sent_files: int = 0
    sent_bytes: int = 0

    @property
    def name(self) -> str:
        return self.link.name

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


_Found = tuple[str, _Task | GenieError, float]
"""A node's name, what came of looking at it, and when that began."""


class Syncer:
    """Use it inside the pool's context."""

    def __init__(
        self,
        pool: SshPool,
        file: GridFile,
        *,
        state_dir: Path | None = None,
        metrics: SyncMetrics | None = None,
        engine: tree.Plain | None = None,
    ) -> None:
        self._pool = pool
        self._file = file
        self._keys = file.sync
        self._metrics = metrics
        self._engine = engine
        folder = state_dir if state_dir is not None else config.load().paths.state_dir.expanduser()
        self._cache = folder / "grid" / "sync"

    async def sync(
        self,
        local: Path,
        nodes: Sequence[str],
        *,
        progress: OnProgress | None = None,
        dry_run: bool = False,
    ) -> list[SyncReport]:
        """One report for each node, in the order given; a node's own trouble is in its report.

        Raises UsageError, ConfigError and SyncError for what is wrong here.
        """
        for name in nodes:
            self._file.node(name)
        root = local_root(local)
        engine = self._engine if self._engine is not None else await asyncio.to_thread(local_engine)
        job = _Job(
            self._pool,
            self._file,
            LocalTree(root, self._keys, cache=self._cache, engine=engine),
            on_progress=progress or (lambda _: None),
            dry_run=dry_run,
        )
        reports = await job.run(list(dict.fromkeys(nodes)))
        for report in reports:
            if self._metrics is not None and report.error is None and not dry_run:
                self._metrics.sync_finished(report.seconds)
        return reports


class _Job:
    """One call of sync()."""

    def __init__(
        self, pool: SshPool, file: GridFile, local: LocalTree, *, on_progress: OnProgress, dry_run: bool
    ) -> None:
        self._pool = pool
        self._file = file
        self._local = local
        self._engine = local.engine
        self._on_progress = on_progress
        self._dry_run = dry_run
        self._args = {
            "root": file.remote_root,
            "tree": tree_name(local.root),
            "key": "",
            "wait_s": _LOCK_WAIT_S,
        }
        self._reports: dict[str, SyncReport] = {}
        self._scan: asyncio.Future[Snapshot] | None = None

    async def run(self, nodes: list[str]) -> list[SyncReport]:
        todo = nodes
        self._args["key"] = (await asyncio.to_thread(library))[0]
        for attempt in range(_TRIES):
            final = attempt + 1 == _TRIES
            todo = await self._round(todo, final=final)
            if not todo:
                break
        return [self._reports[name] for name in nodes]

    async def _round(self, nodes: list[str], *, final: bool) -> list[str]:
        """Brings the nodes up to date. Gives those that are worth another round."""
        again: list[str] = []
        failure: Exception | None = None
        self._scan = None
        looks = _Looks(nodes, width=min(self._file.sync.max_parallel_transfers, self._file.ssh.pool_size))
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    while looks.go_on(group, self._try_enter):
                        again += await self._bring_next(looks, final=final)
                except Exception as error:  # raised outside of the group, which would wrap it
                    failure = error
                    looks.cancel()
        finally:
            await looks.close()
        if failure is not None:
            raise failure
        return again

    async def _bring_next(self, looks: _Looks, *, final: bool) -> list[str]:
        await asyncio.sleep(0)  # the nodes are asked first: they look while we do
        if self._scan is None:
            self._scan = asyncio.get_running_loop().run_in_executor(None, self._local.scan)
        async with looks.next_ready() as found:
            return await self._bring_found(found, await self._scan, final=final)

    async def _bring_found(self, found: list[_Found], snapshot: Snapshot, *, final: bool) -> list[str]:
        again: list[str] = []
        for name, each, started in found:
            if isinstance(each, GenieError):
                again += self._retry_or_fail(name, each, started, final=final)
        tasks = [each for _, each, _ in found if isinstance(each, _Task)]
        return again + await self._bring(tasks, snapshot, final=final) if tasks else again

    async def _try_enter(self, name: str, links: contextlib.AsyncExitStack) -> _Found:
        started = time.monotonic()
        try:
            return name, await self._enter(name, links, started), started
        except GenieError as error:
            return name, error, started

    async def _enter(self, name: str, links: contextlib.AsyncExitStack, started: float) -> _Task:
        """Takes the link and looks at what is there."""
        link = await links.enter_async_context(self._pool.use(name))
        task = _Task(link, started)
        links.callback(task.close)
        if link.has_helper:
            with _understood(name):
                await self._look(task)
        return task

    async def _look(self, task: _Task) -> None:
        answer, drift = await task.link.call("sync.check", self._args, timeout_s=_CHECK_S)
        if not answer["has_library"] and not self._dry_run:
            await self._offer_library(task, answer["machine"])
        while len(drift) < _bounded(answer["drift"]):
            args = {**self._args, "offset": len(drift)}
            _, piece = await task.link.call("sync.drift", args, timeout_s=_CHECK_S)
            if not piece:
                raise NodeRefusedError(f"node {task.name}: another sync is under way", reason="moved")
            drift += piece
        task.digest, task.drift = str(answer["digest"]), drift
        if answer["objects"]:
            _, shas = await task.link.call("sync.objects", self._args, timeout_s=_CHECK_S)
            task.there = frozenset(shas[at : at + 32] for at in range(0, len(shas), 32))

    async def _offer_library(self, task: _Task, machine: str) -> None:
        key, binary, source = library()
        ours = f"{'linux' if os.uname().sysname == 'Linux' else os.uname().sysname}-{os.uname().machine}"
        binary = binary if machine == ours else b""
        args = {**self._args, "key": key, "binary": len(binary), "machine": ours}
        answer, _ = await task.link.call("sync.library", args, binary + source, timeout_s=_CHECK_S)
        _log.info("a node's engine for trees", extra={"node": task.name, "how": answer["how"]})

    async def _bring(self, tasks: list[_Task], snapshot: Snapshot, *, final: bool) -> list[str]:
        plain = [task for task in tasks if not task.link.has_helper]
        tasks = [task for task in tasks if task.link.has_helper]
        # Where nothing of ours is yet, contents are hashed while they are sent.
        is_first = all(not task.digest and not task.there for task in tasks)
        try:
            if not snapshot.digest and (not snapshot.dirty or not is_first or self._dry_run or not tasks):
                await asyncio.to_thread(self._read_dirty, snapshot)
            again = await self._compare_and_send(tasks, snapshot, final=final)
            if not snapshot.is_same:
                await asyncio.to_thread(self._local.save, snapshot)
        except VanishedError:
            if final:
                raise SyncError(
                    f"{snapshot.root}: files disappear while they are read",
                    hint="sync again when nothing writes to the folder",
                ) from None
            return [task.name for task in (*tasks, *plain)]
        await all_of(self._tar(task, snapshot) for task in plain)
        return again

    def _read_dirty(self, snapshot: Snapshot) -> None:
        hash_files(self._engine, snapshot, snapshot.dirty)
        self._local.settle(snapshot)

    async def _compare_and_send(self, tasks: list[_Task], snapshot: Snapshot, *, final: bool) -> list[str]:
        again: list[str] = []
        groups: dict[tuple[object, ...], list[_Task]] = {}
        for task in tasks:
            try:
                task.delta = await self._delta(task, snapshot)
            except GenieError as error:
                again += self._retry_or_fail(task.name, error, task.started, final=final)
                continue
            if not task.delta:
                self._done(task, unchanged=True)
            elif self._dry_run:
                await self._would(task, snapshot)
            else:
                need = (tuple(task.delta.contents), task.there)
                groups.setdefault(need, []).append(task)
        for group in groups.values():
            again += await self._send(group, snapshot, final=final)
        return again

    async def _delta(self, task: _Task, snapshot: Snapshot) -> Delta:
        if task.digest and task.digest == snapshot.digest and not task.drift:
            return Delta()
        ours = bytes(snapshot.records)
        if not task.digest:
            theirs = b""
        elif task.digest == snapshot.digest:
            theirs = ours
        elif task.digest == snapshot.old_digest:
            theirs = snapshot.old_records
        else:
            with _understood(task.name):
                theirs = await self._fetch_records(task)
        checksums = self._file.sync.use_checksums
        with _understood(task.name):
            return delta_of(self._engine, theirs=theirs, drift=task.drift, ours=ours, checksums=checksums)

    async def _fetch_records(self, task: _Task) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            args = {**self._args, "offset": size}
            answer, piece = await task.link.call("sync.records", args, timeout_s=_CHECK_S)
            parts.append(piece)
            size += len(piece)
            if answer["digest"] != task.digest:
                raise NodeRefusedError(f"node {task.name}: another sync is under way", reason="moved")
            if size >= _bounded(answer["size"]) or len(piece) < ANSWER_BYTES:
                return b"".join(parts)

    async def _send(self, group: list[_Task], snapshot: Snapshot, *, final: bool) -> list[str]:
        """To nodes that need the same contents: read once, sent to all."""
        ours = bytes(snapshot.records)
        there = set(group[0].there)
        places = group[0].delta.contents
        data = await asyncio.to_thread(bytes_to_send, self._engine, snapshot, places, there=there)
        transfer = _Transfer(group, files_total=len(places), bytes_total=data, on_progress=self._on_progress)
        chunks = pack_files(self._engine, snapshot, places, there=there)
        # By their sizes, not by their data: a hole may have been filled since, and this is held in memory.
        total = bytes_of(ours, places, without=there)
        if not snapshot.dirty and total + sum(map(len, group[0].delta.gone)) <= _INLINE_BYTES_MAX:
            await self._send_inline(transfer, chunks, snapshot)
        else:
            await self._send_streams(transfer, chunks, snapshot)
        again: list[str] = []
        for name, error in transfer.failed.items():
            again += self._retry_or_fail(name, error, group[0].started, final=final)
        return again

    async def _send_inline(self, transfer: _Transfer, chunks: Chunks, snapshot: Snapshot) -> None:
        packed = await asyncio.to_thread(list, chunks)
        if not snapshot.digest:  # a file is not as it was when it was hashed
            await asyncio.to_thread(self._local.settle, snapshot)
        frames = b"".join(chunk.data for chunk in packed)

        async def one(task: _Task) -> None:
            plan = self._plan(task, snapshot)
            blob = frames + b"".join(plan_frames(plan))
            if len(blob) > ANSWER_BYTES:
                task.stream = await Stream.open(task.link, self._args, stall_s=_STALL_S)
                await task.stream.send(blob)
                answer = await task.stream.answer(timeout_s=_APPLY_S)
            else:
                answer, _ = await task.link.call("sync.apply", self._args, blob, timeout_s=_APPLY_S)
            for chunk in packed:
                transfer.count(task, chunk)
            self._done(task, answer)

        await transfer.each(one)

    async def _send_streams(self, transfer: _Transfer, chunks: Chunks, snapshot: Snapshot) -> None:
        async def begin(task: _Task) -> None:
            task.stream = await Stream.open(task.link, self._args, stall_s=_STALL_S)

        await transfer.each(begin)
        loop = asyncio.get_running_loop()
        coming = loop.run_in_executor(None, next, chunks, None)
        try:
            while (chunk := await coming) is not None and transfer.alive:
                coming = loop.run_in_executor(None, next, chunks, None)  # reads on while this one is sent
                await transfer.send(chunk)
        finally:
            await asyncio.wait([coming])
            coming.exception()  # told above, unless all nodes are gone: then it is of no interest
            chunks.close()
        if not transfer.alive:
            return
        await asyncio.to_thread(self._local.settle, snapshot)

        async def end(task: _Task) -> None:
            assert task.stream is not None
            for frame in plan_frames(self._plan(task, snapshot)):
                await task.stream.send(frame)
            self._done(task, await task.stream.answer(timeout_s=_APPLY_S))

        await transfer.each(end)

    def _plan(self, task: _Task, snapshot: Snapshot) -> bytes:
        return plan_of(task.delta, bytes(snapshot.records), base=task.digest, digest=snapshot.digest)

    async def _tar(self, task: _Task, snapshot: Snapshot) -> None:
        if self._dry_run:
            task.delta = Delta(added=snapshot.files)
            await self._would(task, snapshot)
            return
        try:
            files, size = await tar_pipe.send(
                task.link, snapshot, root=self._file.remote_root, stall_s=_STALL_S, apply_s=_APPLY_S
            )
        except GenieError as error:
            self._fail(task.name, error, task.started)
            return
        task.sent_files, task.sent_bytes = files, size
        self._done(task, note=tar_pipe.NOTE)

    def _done(self, task: _Task, answer: Any = None, *, unchanged: bool = False, note: str = "") -> None:
        told = answer or {}
        with _understood(task.name):
            deleted = int(told.get("deleted", 0))
            kept = tuple(map(str, told.get("kept", ())))
            overwritten = tuple(map(str, told.get("overwritten", ())))
        self._reports[task.name] = SyncReport(
            node=task.name,
            sent_files=task.sent_files,
            sent_bytes=task.sent_bytes,
            deleted=deleted,
            kept=kept,
            overwritten=overwritten,
            restored=task.delta.restored,
            seconds=time.monotonic() - task.started,
            unchanged=unchanged,
            note=note,
        )

    async def _would(self, task: _Task, snapshot: Snapshot) -> None:
        ours = bytes(snapshot.records)
        places = task.delta.contents
        if task.link.has_helper:
            data = await asyncio.to_thread(bytes_to_send, self._engine, snapshot, places, there=task.there)
        else:
            data = bytes_of(ours, places)  # a tar archive has the zeros of holes too
        gone, kept = gone_of(task.delta, drift=task.drift)
        self._reports[task.name] = SyncReport(
            node=task.name,
            sent_files=len(places),
            sent_bytes=data,
            deleted=len(gone),
            kept=_names(kept),
            restored=task.delta.restored,
            seconds=time.monotonic() - task.started,
            note="nothing was changed",
            paths=_names(paths_of(ours, sorted(places + task.delta.links))),
            gone=_names(gone),
        )

    def _retry_or_fail(self, name: str, error: GenieError, started: float, *, final: bool) -> list[str]:
        """A cut, a stall and another sync are worth another round: what has arrived is not sent again."""
        is_worth_it = isinstance(error, ConnectionLostError | DeadlineError) or (
            isinstance(error, NodeRefusedError) and error.reason == "moved"
        )
        if is_worth_it and not final:
            _log.info("syncing again", extra={"node": name, "why": error.message})
            return [name]
        self._fail(name, error, started)
        return []

    def _fail(self, name: str, error: GenieError, started: float) -> None:
        seconds = time.monotonic() - started
        self._reports[name] = SyncReport(node=name, seconds=seconds, error=_sync_error(error))


class _Looks:
    """Nodes that are being looked at, at most `width` of them, each with the link that it holds.

    A node that has been brought up to date, or has failed, makes room for the next one; one that hangs
    keeps its own place and no other.
    """

    def __init__(self, nodes: Sequence[str], *, width: int) -> None:
        self._waiting = list(nodes)[::-1]
        self._width = width
        self._links: dict[asyncio.Task[_Found], contextlib.AsyncExitStack] = {}
        self._late: set[asyncio.Task[_Found]] = set()

    def go_on(
        self,
        group: asyncio.TaskGroup,
        look: Callable[[str, contextlib.AsyncExitStack], Coroutine[Any, Any, _Found]],
    ) -> bool:
        """Fills the places that are free. False when there is nothing left to wait for."""
        while self._waiting and len(self._links) < self._width:
            links = contextlib.AsyncExitStack()
            self._links[group.create_task(look(self._waiting.pop(), links))] = links
        return bool(self._links)

    @contextlib.asynccontextmanager
    async def next_ready(self) -> AsyncIterator[list[_Found]]:
        """Those who are ready together share what is read; who hangs holds them up once, and not for long."""
        began = time.monotonic()
        await asyncio.wait(self._links, return_when=asyncio.FIRST_COMPLETED)
        if awaited := self._links.keys() - self._late:
            await asyncio.wait(awaited, timeout=max(_TOGETHER_S, time.monotonic() - began))
        ready = [task for task in self._links if task.done()]
        self._late = self._links.keys() - set(ready)
        yield [task.result() for task in ready]
        for task in ready:
            await self._links.pop(task).aclose()

    def cancel(self) -> None:
        for task in self._links:
            task.cancel()

    async def close(self) -> None:
        """Gives back the links of those that were not brought to an end."""
        while self._links:
            await self._links.popitem()[1].aclose()


class _Transfer:
    """The same bytes to several nodes. One that fails leaves; the others go on."""

    def __init__(
        self, tasks: list[_Task], *, files_total: int, bytes_total: int, on_progress: OnProgress
    ) -> None:
        self.alive = list(tasks)
        self.failed: dict[str, GenieError] = {}
        self._files_total = files_total
        self._bytes_total = bytes_total
        self._on_progress = on_progress

    async def each(self, work: Callable[[_Task], Any]) -> None:
        async def guarded(task: _Task) -> None:
            try:
                await work(task)
            except GenieError as error:
                self.failed[task.name] = error
                self.alive.remove(task)

        await all_of(map(guarded, list(self.alive)))

    async def send(self, chunk: Chunk) -> None:
        async def one(task: _Task) -> None:
            assert task.stream is not None
            if chunk.data:
                await task.stream.send(chunk.data)
            self.count(task, chunk)

        await self.each(one)

    def count(self, task: _Task, chunk: Chunk) -> None:
        task.sent_files += chunk.files
        task.sent_bytes += chunk.size
        if chunk.files or chunk.size:
            total = max(self._bytes_total, task.sent_bytes)
            self._on_progress(Progress(task.name, task.sent_files, self._files_total, task.sent_bytes, total))


@contextlib.contextmanager
def _understood(name: str) -> Iterator[None]:
    """A node's answers are not trusted: one of another shape is that node's failure, and no other's."""
    try:
        yield
    except (*MALFORMED, OSError) as error:  # OSError: records that are none
        raise ProtocolError(f"node {name}: a tree is told in a way that we do not know: {error!r}") from None


def _bounded(size: Any) -> int:
    if not 0 <= int(size) <= PLAN_BYTES_MAX:
        raise ValueError(f"{size} bytes of records")
    return int(size)


def tree_name(root: Path) -> str:
    """Of the folder on nodes: two folders of the same name are the same project, from wherever."""
    digest = hashlib.sha256(os.fsencode(root.name)).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_-]', '_', root.name)[:64]}-{digest}"


def _names(paths: list[bytes]) -> tuple[str, ...]:
    return tuple(path.decode("utf-8", "backslashreplace") for path in paths[:_NAMES_SHOWN])


def _sync_error(error: GenieError) -> GenieError:
    """What a node said, in words that tell what to do."""
    if not isinstance(error, NodeRefusedError) or isinstance(error, TransportError):
        return error
    hints = {
        "no_space": "the disk there is full; what was there before is untouched",
        "read_only": "remote_root is on a file system that cannot be written",
        "denied": "remote_root must belong to the user who logs in",
        "conflict": "move it away on the node, or leave it out with sync.exclude_patterns",
        "busy": "wait for the other sync to end",
        "moved": "another sync of the same folder was faster; sync again",
    }
    hint = hints.get(error.reason, "")
    return SyncError(error.message, hint=hint) if hint else error
