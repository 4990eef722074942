"""Syncs a folder to several nodes: scans it once, compares with each node, and sends the differences.

The local scan and the checks of the nodes run concurrently; a node that is up to date costs one request. A
small change is one more request, a large one a stream; nodes that need the same files share reading. An
interrupted transfer is resumed. Nodes without Python use sync_without_python.py.
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
from genie.grid.remote.sync import PLAN_BYTES_MAX, REPLY_BLOB_BYTES_MAX
from genie.grid.ssh.node_helper import MALFORMED_REPLY_ERRORS
from genie.grid.ssh.pool import NodeConnection, SshPool
from genie.grid.sync import sync_without_python
from genie.grid.sync.delta import (
    TreeDelta,
    compute_delta,
    count_content_bytes,
    encode_plan,
    paths_at_offsets,
    split_deleted_and_kept_paths,
)
from genie.grid.sync.local_tree import (
    LocalTree,
    TreeSnapshot,
    load_local_engine,
    read_engine_library,
    resolve_local_root,
)
from genie.grid.sync.pack import (
    FileChunk,
    FileChunks,
    FileVanishedError,
    count_bytes_to_send,
    hash_files,
    make_plan_frames,
    pack_files,
)
from genie.grid.sync.stream import SyncStream
from genie.processes.tasks import run_all_concurrently, unwrapped_task_group

_log = logging.getLogger(__name__)
_CHECK_TREE_TIMEOUT_S = 600.0
_APPLY_CHANGE_TIMEOUT_S = 600.0
_TRANSFER_STALL_TIMEOUT_S = 30.0
_TREE_LOCK_WAIT_S = 20.0
_SYNC_ATTEMPTS = 3
_OTHER_CHECKS_WAIT_S_MIN = 1.0
_SINGLE_REQUEST_BYTES_MAX = 1 << 20
_PATHS_REPORTED_MAX = 100


class SyncMetrics(Protocol):
    def record_sync(self, duration_s: float) -> None: ...


@dataclass(frozen=True)
class SyncProgress:
    """Progress of the transfer to one node."""

    node: str
    sent_files: int
    files_total: int
    sent_bytes: int
    bytes_total: int


OnProgress = Callable[[SyncProgress], None]
OnReport = Callable[["SyncReport"], None]


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """Result for one node. With `error`, the tree on the node is either unchanged or complete."""

    node: str
    sent_files: int = 0
    sent_bytes: int = 0
    deleted: int = 0
    kept: tuple[str, ...] = ()
    """Paths deleted here that stay on the node, because they were modified there."""
    overwritten: tuple[str, ...] = ()
    """Paths of files created on the node that were replaced."""
    restored: int = 0
    """Number of synced files that were modified or deleted on the node, and restored."""
    seconds: float = 0.0
    unchanged: bool = False
    note: str = ""
    paths: tuple[str, ...] = ()
    """Dry run: files and links that would be sent."""
    paths_to_delete: tuple[str, ...] = ()
    """Dry run: paths that would be deleted."""
    error: GenieError | None = None


@dataclass
class _NodeSync:
    """State of the sync to one node."""

    link: NodeConnection
    started_at_s: float
    tree_digest_on_node: str = ""
    drift: bytes = b""
    digests_on_node: frozenset[bytes] = frozenset()
    delta: TreeDelta = dataclasses.field(default_factory=TreeDelta)
    stream: SyncStream | None = None
    sent_files: int = 0
    sent_bytes: int = 0

    @property
    def name(self) -> str:
        return self.link.name

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


_CheckedNode = tuple[str, _NodeSync | GenieError, float]
"""A node's name, the result of its check, and the start time."""


class Syncer:
    """Syncs folders over the connections of a pool that the caller keeps open."""

    def __init__(
        self,
        pool: SshPool,
        file: GridFile,
        *,
        state_dir: Path | None = None,
        metrics: SyncMetrics | None = None,
        engine: tree.PlainEngine | None = None,
    ) -> None:
        self._pool = pool
        self._grid_file = file
        self._settings = file.sync
        self._metrics = metrics
        self._engine = engine
        folder = state_dir if state_dir is not None else config.load().paths.state_dir.expanduser()
        self._index_folder = folder / "grid" / "sync"

    async def sync(
        self,
        local: Path,
        nodes: Sequence[str],
        *,
        progress: OnProgress | None = None,
        on_report: OnReport | None = None,
        dry_run: bool = False,
    ) -> list[SyncReport]:
        """Returns one report per node, in the given order; errors of a node are in its report.

        `on_report` is called with each report as soon as that node is finished.
        Raises UsageError, ConfigError and SyncError for errors on this machine.
        """
        for name in nodes:
            self._grid_file.node(name)
        root = resolve_local_root(local)
        engine = self._engine if self._engine is not None else await asyncio.to_thread(load_local_engine)
        job = _SyncCall(
            self._pool,
            self._grid_file,
            LocalTree(root, self._settings, cache=self._index_folder, engine=engine),
            on_progress=progress or (lambda _: None),
            on_report=on_report or (lambda _: None),
            dry_run=dry_run,
        )
        reports = await job.run(list(dict.fromkeys(nodes)))
        for report in reports:
            if self._metrics is not None and report.error is None and not dry_run:
                self._metrics.record_sync(report.seconds)
        return reports


class _SyncCall:
    """One call of sync()."""

    def __init__(
        self,
        pool: SshPool,
        file: GridFile,
        local: LocalTree,
        *,
        on_progress: OnProgress,
        on_report: OnReport,
        dry_run: bool,
    ) -> None:
        self._pool = pool
        self._grid_file = file
        self._local_tree = local
        self._engine = local.engine
        self._on_progress = on_progress
        self._on_report = on_report
        self._dry_run = dry_run
        self._request_args = {
            "root": file.remote_root,
            "tree": tree_name_on_nodes(local.root),
            "key": "",
            "wait_s": _TREE_LOCK_WAIT_S,
        }
        self._report_by_node: dict[str, SyncReport] = {}
        self._scan_future: asyncio.Future[TreeSnapshot] | None = None

    async def run(self, nodes: list[str]) -> list[SyncReport]:
        todo = nodes
        self._request_args["key"] = (await asyncio.to_thread(read_engine_library))[0]
        for attempt in range(_SYNC_ATTEMPTS):
            is_last_attempt = attempt + 1 == _SYNC_ATTEMPTS
            todo = await self._sync_once_and_list_to_retry(todo, is_last_attempt=is_last_attempt)
            if not todo:
                break
        return [self._report_by_node[name] for name in nodes]

    async def _sync_once_and_list_to_retry(self, nodes: list[str], *, is_last_attempt: bool) -> list[str]:
        """Syncs the nodes once. Returns those that should be retried."""
        to_retry: list[str] = []
        self._scan_future = None
        checks = _NodeChecks(
            nodes, width=min(self._grid_file.sync.max_parallel_transfers, self._grid_file.ssh.pool_size)
        )
        try:
            async with unwrapped_task_group() as group:
                while checks.start_more_and_check_running(group, self._try_check_node):
                    to_retry += await self._sync_next_checked(checks, is_last_attempt=is_last_attempt)
        finally:
            await checks.close()
        return to_retry

    async def _sync_next_checked(self, checks: _NodeChecks, *, is_last_attempt: bool) -> list[str]:
        await asyncio.sleep(0)  # requests to the nodes first: they check while we scan
        if self._scan_future is None:
            self._scan_future = asyncio.get_running_loop().run_in_executor(None, self._local_tree.scan)
        async with checks.next_finished_checks() as found:
            return await self._sync_checked(found, await self._scan_future, is_last_attempt=is_last_attempt)

    async def _sync_checked(
        self, found: list[_CheckedNode], snapshot: TreeSnapshot, *, is_last_attempt: bool
    ) -> list[str]:
        to_retry: list[str] = []
        for name, each, started in found:
            if isinstance(each, GenieError):
                to_retry += self._retry_or_fail(name, each, started, is_last_attempt=is_last_attempt)
        tasks = [each for _, each, _ in found if isinstance(each, _NodeSync)]
        return (
            to_retry + await self._sync_nodes(tasks, snapshot, is_last_attempt=is_last_attempt)
            if tasks
            else to_retry
        )

    async def _try_check_node(self, name: str, links: contextlib.AsyncExitStack) -> _CheckedNode:
        started = time.monotonic()
        try:
            return name, await self._connect_and_check_node(name, links, started), started
        except GenieError as error:
            return name, error, started

    async def _connect_and_check_node(
        self, name: str, links: contextlib.AsyncExitStack, started: float
    ) -> _NodeSync:
        """Acquires the connection and checks the tree on the node."""
        link = await links.enter_async_context(self._pool.connect(name))
        task = _NodeSync(link, started)
        links.callback(task.close)
        if link.has_helper:
            with _validating_reply(name):
                await self._fetch_tree_state_of_node(task)
        return task

    async def _fetch_tree_state_of_node(self, task: _NodeSync) -> None:
        reply, drift = await task.link.call("sync.check", self._request_args, timeout_s=_CHECK_TREE_TIMEOUT_S)
        if not reply["has_library"] and not self._dry_run:
            await self._install_engine_library(task, reply["machine"])
        while len(drift) < _validate_records_size(reply["drift"]):
            args = {**self._request_args, "offset": len(drift)}
            _, piece = await task.link.call("sync.drift", args, timeout_s=_CHECK_TREE_TIMEOUT_S)
            if not piece:
                raise NodeRefusedError(
                    f"node {task.name}: the tree on the node was changed by another sync", reason="moved"
                )
            drift += piece
        task.tree_digest_on_node, task.drift = str(reply["digest"]), drift
        if reply["objects"]:
            _, shas = await task.link.call(
                "sync.objects", self._request_args, timeout_s=_CHECK_TREE_TIMEOUT_S
            )
            task.digests_on_node = frozenset(shas[at : at + 32] for at in range(0, len(shas), 32))

    async def _install_engine_library(self, task: _NodeSync, machine: str) -> None:
        key, binary, source = read_engine_library()
        ours = f"{'linux' if os.uname().sysname == 'Linux' else os.uname().sysname}-{os.uname().machine}"
        binary = binary if machine == ours else b""
        args = {**self._request_args, "key": key, "binary": len(binary), "machine": ours}
        reply, _ = await task.link.call(
            "sync.library", args, binary + source, timeout_s=_CHECK_TREE_TIMEOUT_S
        )
        _log.info("installed the tree engine on a node", extra={"node": task.name, "how": reply["how"]})

    async def _sync_nodes(
        self, tasks: list[_NodeSync], snapshot: TreeSnapshot, *, is_last_attempt: bool
    ) -> list[str]:
        plain = [task for task in tasks if not task.link.has_helper]
        tasks = [task for task in tasks if task.link.has_helper]
        # On a first sync, files are hashed while they are sent.
        is_first = all(not task.tree_digest_on_node and not task.digests_on_node for task in tasks)
        try:
            if not snapshot.digest and (
                not snapshot.unhashed_offsets or not is_first or self._dry_run or not tasks
            ):
                await asyncio.to_thread(self._hash_unhashed_files, snapshot)
            to_retry = await self._compare_and_send(tasks, snapshot, is_last_attempt=is_last_attempt)
            if not snapshot.is_unchanged:
                await asyncio.to_thread(self._local_tree.write_index_if_changed, snapshot)
        except FileVanishedError:
            if is_last_attempt:
                raise SyncError(
                    f"could not read {snapshot.root}: files disappear during the sync",
                    hint="sync again when nothing writes to the folder",
                ) from None
            return [task.name for task in (*tasks, *plain)]
        await run_all_concurrently(self._sync_by_tar(task, snapshot) for task in plain)
        return to_retry

    def _hash_unhashed_files(self, snapshot: TreeSnapshot) -> None:
        hash_files(self._engine, snapshot, snapshot.unhashed_offsets)
        self._local_tree.set_snapshot_digest(snapshot)

    async def _compare_and_send(
        self, tasks: list[_NodeSync], snapshot: TreeSnapshot, *, is_last_attempt: bool
    ) -> list[str]:
        to_retry: list[str] = []
        groups: dict[tuple[object, ...], list[_NodeSync]] = {}
        for task in tasks:
            try:
                task.delta = await self._compute_delta(task, snapshot)
            except GenieError as error:
                to_retry += self._retry_or_fail(
                    task.name, error, task.started_at_s, is_last_attempt=is_last_attempt
                )
                continue
            if not task.delta:
                self._report_success(task, unchanged=True)
            elif self._dry_run:
                await self._report_dry_run(task, snapshot)
            else:
                need = (tuple(task.delta.content_offsets), task.digests_on_node)
                groups.setdefault(need, []).append(task)
        for group in groups.values():
            to_retry += await self._send_to_group(group, snapshot, is_last_attempt=is_last_attempt)
        return to_retry

    async def _compute_delta(self, task: _NodeSync, snapshot: TreeSnapshot) -> TreeDelta:
        if task.tree_digest_on_node and task.tree_digest_on_node == snapshot.digest and not task.drift:
            return TreeDelta()
        ours = bytes(snapshot.records)
        if not task.tree_digest_on_node:
            theirs = b""
        elif task.tree_digest_on_node == snapshot.digest:
            theirs = ours
        elif task.tree_digest_on_node == snapshot.old_digest:
            theirs = snapshot.old_records
        else:
            with _validating_reply(task.name):
                theirs = await self._fetch_node_records(task)
        checksums = self._grid_file.sync.use_checksums
        with _validating_reply(task.name):
            return compute_delta(
                self._engine, theirs=theirs, drift=task.drift, ours=ours, checksums=checksums
            )

    async def _fetch_node_records(self, task: _NodeSync) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            args = {**self._request_args, "offset": size}
            reply, piece = await task.link.call("sync.records", args, timeout_s=_CHECK_TREE_TIMEOUT_S)
            parts.append(piece)
            size += len(piece)
            if reply["digest"] != task.tree_digest_on_node:
                raise NodeRefusedError(
                    f"node {task.name}: the tree on the node was changed by another sync", reason="moved"
                )
            if size >= _validate_records_size(reply["size"]) or len(piece) < REPLY_BLOB_BYTES_MAX:
                return b"".join(parts)

    async def _send_to_group(
        self, group: list[_NodeSync], snapshot: TreeSnapshot, *, is_last_attempt: bool
    ) -> list[str]:
        """Sends to nodes that need the same contents; reads them once."""
        ours = bytes(snapshot.records)
        on_node = set(group[0].digests_on_node)
        offsets = group[0].delta.content_offsets
        data = await asyncio.to_thread(count_bytes_to_send, self._engine, snapshot, offsets, on_node=on_node)
        transfer = _GroupTransfer(
            group, files_total=len(offsets), bytes_total=data, on_progress=self._on_progress
        )
        chunks = pack_files(self._engine, snapshot, offsets, on_node=on_node)
        # File sizes, not data sizes: a hole may have been filled since, and all of it is held in memory.
        total = count_content_bytes(ours, offsets, without=on_node)
        if (
            not snapshot.unhashed_offsets
            and total + sum(map(len, group[0].delta.deletion_records)) <= _SINGLE_REQUEST_BYTES_MAX
        ):
            await self._send_in_one_request(transfer, chunks, snapshot)
        else:
            await self._send_as_streams(transfer, chunks, snapshot)
        to_retry: list[str] = []
        for name, error in transfer.error_by_node.items():
            to_retry += self._retry_or_fail(
                name, error, group[0].started_at_s, is_last_attempt=is_last_attempt
            )
        return to_retry

    async def _send_in_one_request(
        self, transfer: _GroupTransfer, chunks: FileChunks, snapshot: TreeSnapshot
    ) -> None:
        packed = await asyncio.to_thread(list, chunks)
        if not snapshot.digest:  # a file has changed since it was hashed
            await asyncio.to_thread(self._local_tree.set_snapshot_digest, snapshot)
        frames = b"".join(chunk.data for chunk in packed)

        async def send_to_node(task: _NodeSync) -> None:
            plan = self._encode_plan(task, snapshot)
            blob = frames + b"".join(make_plan_frames(plan))
            if len(blob) > REPLY_BLOB_BYTES_MAX:
                task.stream = await SyncStream.open(
                    task.link, self._request_args, stall_s=_TRANSFER_STALL_TIMEOUT_S
                )
                await task.stream.send(blob)
                reply = await task.stream.read_reply(timeout_s=_APPLY_CHANGE_TIMEOUT_S)
            else:
                reply, _ = await task.link.call(
                    "sync.apply", self._request_args, blob, timeout_s=_APPLY_CHANGE_TIMEOUT_S
                )
            for chunk in packed:
                transfer.report_progress(task, chunk)
            self._report_success(task, reply)

        await transfer.run_for_each_node(send_to_node)

    async def _send_as_streams(
        self, transfer: _GroupTransfer, chunks: FileChunks, snapshot: TreeSnapshot
    ) -> None:
        async def open_stream(task: _NodeSync) -> None:
            task.stream = await SyncStream.open(
                task.link, self._request_args, stall_s=_TRANSFER_STALL_TIMEOUT_S
            )

        await transfer.run_for_each_node(open_stream)
        loop = asyncio.get_running_loop()
        next_chunk = loop.run_in_executor(None, next, chunks, None)
        try:
            while (chunk := await next_chunk) is not None and transfer.remaining_nodes:
                # Read ahead while this chunk is sent.
                next_chunk = loop.run_in_executor(None, next, chunks, None)
                await transfer.send_chunk(chunk)
        finally:
            await asyncio.wait([next_chunk])
            next_chunk.exception()  # raised above, unless all nodes have failed: then it is irrelevant
            chunks.close()
        if not transfer.remaining_nodes:
            return
        await asyncio.to_thread(self._local_tree.set_snapshot_digest, snapshot)

        async def finish_stream(task: _NodeSync) -> None:
            assert task.stream is not None
            for frame in make_plan_frames(self._encode_plan(task, snapshot)):
                await task.stream.send(frame)
            self._report_success(task, await task.stream.read_reply(timeout_s=_APPLY_CHANGE_TIMEOUT_S))

        await transfer.run_for_each_node(finish_stream)

    def _encode_plan(self, task: _NodeSync, snapshot: TreeSnapshot) -> bytes:
        return encode_plan(
            task.delta, bytes(snapshot.records), base=task.tree_digest_on_node, digest=snapshot.digest
        )

    async def _sync_by_tar(self, task: _NodeSync, snapshot: TreeSnapshot) -> None:
        if self._dry_run:
            task.delta = TreeDelta(added_offsets=snapshot.file_offsets)
            await self._report_dry_run(task, snapshot)
            return
        try:
            files, size = await sync_without_python.send_by_tar_and_count_files_and_bytes(
                task.link,
                snapshot,
                root=self._grid_file.remote_root,
                stall_s=_TRANSFER_STALL_TIMEOUT_S,
                apply_s=_APPLY_CHANGE_TIMEOUT_S,
            )
        except GenieError as error:
            self._report_failure(task.name, error, task.started_at_s)
            return
        task.sent_files, task.sent_bytes = files, size
        self._report_success(task, note=sync_without_python.NO_PYTHON_NOTE)

    def _report_success(
        self, task: _NodeSync, reply: Any = None, *, unchanged: bool = False, note: str = ""
    ) -> None:
        fields = reply or {}
        with _validating_reply(task.name):
            deleted = int(fields.get("deleted", 0))
            kept = tuple(map(str, fields.get("kept", ())))
            overwritten = tuple(map(str, fields.get("overwritten", ())))
        report = SyncReport(
            node=task.name,
            sent_files=task.sent_files,
            sent_bytes=task.sent_bytes,
            deleted=deleted,
            kept=kept,
            overwritten=overwritten,
            restored=task.delta.restored_count,
            seconds=time.monotonic() - task.started_at_s,
            unchanged=unchanged,
            note=note,
        )
        self._publish_report(report)

    async def _report_dry_run(self, task: _NodeSync, snapshot: TreeSnapshot) -> None:
        ours = bytes(snapshot.records)
        offsets = task.delta.content_offsets
        if task.link.has_helper:
            data = await asyncio.to_thread(
                count_bytes_to_send, self._engine, snapshot, offsets, on_node=task.digests_on_node
            )
        else:
            data = count_content_bytes(ours, offsets)  # a tar archive contains holes as zeros
        gone, kept = split_deleted_and_kept_paths(task.delta, drift=task.drift)
        report = SyncReport(
            node=task.name,
            sent_files=len(offsets),
            sent_bytes=data,
            deleted=len(gone),
            kept=_printable_paths(kept),
            restored=task.delta.restored_count,
            seconds=time.monotonic() - task.started_at_s,
            note="nothing was changed",
            paths=_printable_paths(paths_at_offsets(ours, sorted(offsets + task.delta.link_offsets))),
            paths_to_delete=_printable_paths(gone),
        )
        self._publish_report(report)

    def _retry_or_fail(
        self, name: str, error: GenieError, started: float, *, is_last_attempt: bool
    ) -> list[str]:
        """Retries after a lost connection, a stall or a concurrent sync: data that has arrived is kept."""
        is_retryable = isinstance(error, ConnectionLostError | DeadlineError) or (
            isinstance(error, NodeRefusedError) and error.reason == "moved"
        )
        if is_retryable and not is_last_attempt:
            _log.info("retrying a sync", extra={"node": name, "why": error.message})
            return [name]
        self._report_failure(name, error, started)
        return []

    def _report_failure(self, name: str, error: GenieError, started: float) -> None:
        seconds = time.monotonic() - started
        self._publish_report(SyncReport(node=name, seconds=seconds, error=_add_sync_hint(error)))

    def _publish_report(self, report: SyncReport) -> None:
        self._report_by_node[report.node] = report
        self._on_report(report)


class _NodeChecks:
    """Concurrent checks of at most `width` nodes, each with its connection.

    A node that is synced or has failed frees its slot for the next one; one that hangs occupies only its own.
    """

    def __init__(self, nodes: Sequence[str], *, width: int) -> None:
        self._pending_nodes = list(nodes)[::-1]
        self._concurrency = width
        self._connections_by_check: dict[asyncio.Task[_CheckedNode], contextlib.AsyncExitStack] = {}
        self._slow_checks: set[asyncio.Task[_CheckedNode]] = set()

    def start_more_and_check_running(
        self,
        group: asyncio.TaskGroup,
        check: Callable[[str, contextlib.AsyncExitStack], Coroutine[Any, Any, _CheckedNode]],
    ) -> bool:
        """Starts checks in free slots. False when none is pending."""
        while self._pending_nodes and len(self._connections_by_check) < self._concurrency:
            links = contextlib.AsyncExitStack()
            self._connections_by_check[group.create_task(check(self._pending_nodes.pop(), links))] = links
        return bool(self._connections_by_check)

    @contextlib.asynccontextmanager
    async def next_finished_checks(self) -> AsyncIterator[list[_CheckedNode]]:
        """Yields finished checks. Waits briefly for those of other nodes, because one reading of the local
        files then serves all of them; a slow check delays the others once."""
        began = time.monotonic()
        await asyncio.wait(self._connections_by_check, return_when=asyncio.FIRST_COMPLETED)
        if awaited := self._connections_by_check.keys() - self._slow_checks:
            await asyncio.wait(awaited, timeout=max(_OTHER_CHECKS_WAIT_S_MIN, time.monotonic() - began))
        ready = [task for task in self._connections_by_check if task.done()]
        self._slow_checks = self._connections_by_check.keys() - set(ready)
        yield [task.result() for task in ready]
        for task in ready:
            await self._connections_by_check.pop(task).aclose()

    async def close(self) -> None:
        """Releases the connections of unfinished nodes."""
        while self._connections_by_check:
            await self._connections_by_check.popitem()[1].aclose()


class _GroupTransfer:
    """Sends the same bytes to several nodes. A node that fails is dropped; the others continue."""

    def __init__(
        self, tasks: list[_NodeSync], *, files_total: int, bytes_total: int, on_progress: OnProgress
    ) -> None:
        self.remaining_nodes = list(tasks)
        self.error_by_node: dict[str, GenieError] = {}
        self._files_total = files_total
        self._bytes_total = bytes_total
        self._on_progress = on_progress

    async def run_for_each_node(self, work: Callable[[_NodeSync], Any]) -> None:
        async def run_or_drop(task: _NodeSync) -> None:
            try:
                await work(task)
            except GenieError as error:
                self.error_by_node[task.name] = error
                self.remaining_nodes.remove(task)

        await run_all_concurrently(map(run_or_drop, list(self.remaining_nodes)))

    async def send_chunk(self, chunk: FileChunk) -> None:
        async def one(task: _NodeSync) -> None:
            assert task.stream is not None
            if chunk.data:
                await task.stream.send(chunk.data)
            self.report_progress(task, chunk)

        await self.run_for_each_node(one)

    def report_progress(self, task: _NodeSync, chunk: FileChunk) -> None:
        task.sent_files += chunk.files
        task.sent_bytes += chunk.size
        if chunk.files or chunk.size:
            total = max(self._bytes_total, task.sent_bytes)
            self._on_progress(
                SyncProgress(task.name, task.sent_files, self._files_total, task.sent_bytes, total)
            )


@contextlib.contextmanager
def _validating_reply(name: str) -> Iterator[None]:
    """Raises ProtocolError for an invalid reply: replies are not trusted, and fail only that node."""
    try:
        yield
    except (*MALFORMED_REPLY_ERRORS, OSError) as error:  # OSError: invalid records
        raise ProtocolError(f"node {name}: invalid reply to a sync request: {error!r}") from None


def _validate_records_size(size: Any) -> int:
    if not 0 <= int(size) <= PLAN_BYTES_MAX:
        raise ValueError(f"invalid size of the records: {size} bytes")
    return int(size)


def tree_name_on_nodes(root: Path) -> str:
    """Returns the ID of the folder on nodes: folders of the same name are the same project."""
    digest = hashlib.sha256(os.fsencode(root.name)).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_-]', '_', root.name)[:64]}-{digest}"


def _printable_paths(paths: list[bytes]) -> tuple[str, ...]:
    return tuple(path.decode("utf-8", "backslashreplace") for path in paths[:_PATHS_REPORTED_MAX])


def _add_sync_hint(error: GenieError) -> GenieError:
    """Adds a hint to an error that a node returned."""
    if not isinstance(error, NodeRefusedError) or isinstance(error, TransportError):
        return error
    hints = {
        "no_space": "the disk of the node is full; its tree is unchanged",
        "read_only": "remote_root is on a read-only file system",
        "denied": "remote_root must belong to the user who logs in",
        "conflict": "move it away on the node, or exclude it with sync.exclude_patterns",
        "busy": "wait for the other sync to finish",
        "moved": "another sync changed the same folder; sync again",
    }
    hint = hints.get(error.reason, "")
    return SyncError(error.message, hint=hint) if hint else error
