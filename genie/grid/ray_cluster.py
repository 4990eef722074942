"""A Ray cluster on the grid's nodes: `start`, `stop`, `status`, and the way to its dashboard.

Every cluster has a token of its own, made here, sent over the connection and kept in files that only
the user can read, on the nodes and here. Starting is all or nothing. Stopping ends what the nodes have
written down, and nothing else.

Not for: which options a node gets (ray_plan.py), what runs on the nodes (remote/ray_node.py), or jobs
(ray_jobs.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from genie.errors import GenieError, NodeRefusedError, RayError, UnreachableError, UsageError
from genie.grid.grid_file import GridFile, Say
from genie.grid.login_shell import check_login_shell
from genie.grid.ray_plan import NO_PYTHON, ClusterView, RayFacts, RayRecord, StartOrder, plan, view
from genie.grid.ssh_pool import Link, SshPool
from genie.runtime import files
from genie.runtime.tasks import all_of

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

FACTS_S = 90.0
START_S = 180.0
JOIN_S = 60.0
GRACE_S = 8.0
ASK_S = 30.0
_MARGIN_S = 20.0
_UNDO_S = 60.0
_POLL_S = 0.5
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class StopReport:
    """One node after a stop. `was` is the role that was ended, '' where there was nothing.

    `exit_code` is that of the error, 0 where there is none.
    """

    node: str
    was: str
    ended: int = 0
    killed: int = 0
    error: str = ""
    exit_code: int = 0


@dataclass(frozen=True)
class Tunnel:
    """`url` leads to the dashboard for as long as the connection to the head holds."""

    url: str
    head: str
    link: Link

    async def wait_lost(self) -> None:
        await self.link.connection.wait_closed()


class RayCluster:
    """Ray on the nodes of one grid's file. `state_dir` is where this machine keeps the token."""

    def __init__(self, pool: SshPool, file: GridFile, *, state_dir: Path) -> None:
        self._pool = pool
        self._file = file
        self._kept = KeptCluster(state_dir, file)
        self._places = asyncio.Semaphore(file.ssh.pool_size)

    @property
    def token_file(self) -> Path:
        """Here, mode 0600, while there is a cluster that was started from here."""
        return self._kept.token_file

    async def start(
        self,
        *,
        nodes: Sequence[str] = (),
        head: str | None = None,
        allow_missing: bool = False,
        say: Say = lambda _node, _text: None,
    ) -> ClusterView:
        """Brings up the head on the first node and the others as workers, and waits until all are in.

        Raises RayError, or TransportError where a node cannot be reached; by then nothing that was started
        here is left. `allow_missing` goes on without the nodes that cannot take part, except the head.
        """
        names = [self._file.node(name).name for name in nodes] or [node.name for node in self._file.nodes]
        facts = await self._facts(names, allow_missing=allow_missing, say=say)
        if allow_missing and any(each.ray for each in facts):
            for each in facts:
                if not each.ray:
                    say(each.node, "left out: there is no Ray on it")
            facts = [each for each in facts if each.ray]
        orders = plan(facts, self._file.ray, head=head)
        cluster, token = secrets.token_hex(8), secrets.token_hex(_TOKEN_BYTES)
        begun: list[str] = []
        try:
            missing = await self._start_all(
                orders, cluster, token, begun=begun, allow_missing=allow_missing, say=say
            )
            self._kept.write(cluster, token, head=orders[0].node)
            wanted = [order.node for order in orders if order.node not in missing]
            await self._wait_joined(orders[0].node, wanted)
        except BaseException as error:
            await self._undo(cluster, begun, say=say)
            self._kept.remove(cluster)
            if isinstance(error, GenieError):
                raise _kind([error])(
                    f"the Ray cluster was not started: {error.message}", hint=error.hint
                ) from error
            raise
        return await self.status()

    async def stop(self, *, say: Say = lambda _node, _text: None) -> list[StopReport]:
        """Asks every node of the file. Raises nothing for a node; its report says what went wrong."""

        async def one(name: str) -> StopReport:
            report = await self._stop_one(name)
            if report.was or report.error:
                say(name, report.error or f"ended {report.ended} processes")
            return report

        records, _ = await self._records()
        head = [name for name, record in records.items() if record is not None and record.role == "head"]
        names = [node.name for node in self._file.nodes]
        # Workers sign off with the head, so it goes last.
        reports = await all_of(one(name) for name in names if name not in head)
        reports += await all_of(one(name) for name in head)
        reports.sort(key=lambda report: names.index(report.node))
        if not any(report.error for report in reports):
            self._kept.remove()
        return reports

    async def status(self) -> ClusterView:
        """A node that tells nothing is shown with the reason; what it does is not known."""
        records, failed = await self._records()
        head = next((name for name, rec in records.items() if rec is not None and rec.role == "head"), None)
        told, version = None, ""
        if head is not None:
            with contextlib.suppress(GenieError):
                told = await self._told(head)
                version = str((await self.ask(head, "GET", "/api/version")).get("ray_version", ""))
        return view(records, failed, told, version=version)

    async def find_head(self) -> str:
        """The node on which the head runs. Raises RayError where there is none, TransportError where it may
        be on a node that cannot be reached."""
        return (await self._head())[0]

    async def _head(self) -> tuple[str, RayRecord]:
        kept = self._kept.head()
        if kept is not None and any(node.name == kept for node in self._file.nodes):
            record = await self._record(kept)
            if record is not None and record.role == "head" and record.alive:
                return kept, record
        records, failed = await self._records()
        for name, record in records.items():
            if record is not None and record.role == "head" and record.alive:
                return name, record
        if failed:
            raise _kind(failed.values())(
                f"no Ray cluster runs on the nodes that answer; nothing is known of {', '.join(failed)}",
                hint="'grid-cli cluster status' says why",
            )
        raise RayError("no Ray cluster runs on these nodes", hint="start one: grid-cli cluster start")

    async def ask(
        self, head: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """One request to the dashboard, made on the head with the token that is kept there."""
        blob = json.dumps(body).encode() if body is not None else b""
        args = {"method": method, "path": path, "timeout_s": ASK_S}
        answer, data = await self.call(head, "ask", args, blob, timeout_s=ASK_S + _MARGIN_S)
        status = int(answer["status"])
        text = data.decode("utf-8", "replace")
        if status >= 400:
            raise RayError(f"node {head}: Ray's dashboard answered {status}: {text.strip()[-2000:]}")
        try:
            parsed = json.loads(text) if text.startswith(("{", "[")) else {}
        except ValueError:
            raise RayError(f"node {head}: Ray's dashboard sent no JSON: {text[:200]!r}") from None
        return parsed if isinstance(parsed, dict) else {"list": parsed}

    async def call(
        self,
        node: str,
        name: str,
        args: Mapping[str, Any] | None = None,
        blob: bytes = b"",
        *,
        timeout_s: float,
    ) -> tuple[Any, bytes]:
        """An op of remote/ray_node.py on a node, with the root of the grid's file."""
        async with self._pool.use(node) as link:
            await _check_helper(link)
            whole = {"root": self._file.remote_root, **(args or {})}
            return await link.call(f"ray_node.{name}", whole, blob, timeout_s=timeout_s)

    @contextlib.asynccontextmanager
    async def tunnel(self, *, local_port: int) -> AsyncIterator[Tunnel]:
        """The dashboard under an address of this machine while the block runs. 0 takes any free port."""
        head, record = await self._head()
        async with self._pool.use(head) as link:
            try:
                listener = await link.connection.forward_local_port(
                    "127.0.0.1", local_port, "127.0.0.1", record.dashboard_port
                )
            except OSError as error:
                raise RayError(
                    f"port {local_port} of this machine cannot be had: {error.strerror}",
                    hint="give another one with --port",
                ) from error
            async with listener:
                yield Tunnel(f"http://127.0.0.1:{listener.get_port()}", head, link)

    # --- starting ---

    async def _facts(self, names: Sequence[str], *, allow_missing: bool, say: Say) -> list[RayFacts]:
        async def one(name: str) -> RayFacts:
            answer, _ = await self.call(name, "facts", timeout_s=FACTS_S)
            return RayFacts.of(name, answer)

        found, failed = await self._on_all(names, one)
        if failed and (not allow_missing or not found):
            lines = [failed[name].message for name in names if name in failed]
            raise _kind(failed.values())(
                "the Ray cluster was not started; these nodes cannot take part:\n" + "\n".join(lines),
                hint="--allow-missing goes on without them" if found else "'grid-cli health' shows them",
            )
        for name, error in failed.items():
            say(name, error.message)
        return [found[name] for name in names if name in found]

    async def _start_all(
        self,
        orders: Sequence[StartOrder],
        cluster: str,
        token: str,
        *,
        begun: list[str],
        allow_missing: bool,
        say: Say,
    ) -> set[str]:
        """Gives the workers that did not start and may be missing."""

        async def one(order: StartOrder) -> None:
            say(order.node, f"starting the {order.role}")
            args = {**order.args(self._file.ray), "cluster": cluster, "timeout_s": START_S}
            begun.append(order.node)
            await self.call(order.node, "start", args, token.encode(), timeout_s=START_S + _MARGIN_S)
            say(order.node, f"the {order.role} runs")

        await one(orders[0])
        by_name = {order.node: order for order in orders[1:]}
        _, failed = await self._on_all(list(by_name), lambda name: one(by_name[name]))
        if failed and not allow_missing:
            raise _kind(failed.values())("\n".join(error.message for error in failed.values()))
        for name, error in failed.items():
            say(name, f"left out: {error.message}")
            await self._stop_one(name, cluster=cluster)
        return set(failed)

    async def _wait_joined(self, head: str, wanted: Sequence[str]) -> None:
        """Ray's own word that every node is in."""
        missing = list(wanted)
        try:
            async with asyncio.timeout(JOIN_S):
                while missing:
                    with contextlib.suppress(NodeRefusedError, RayError):  # the dashboard may be on its way
                        alive = {
                            str(each.get("node_name")) for each in await self._told(head) if _lives(each)
                        }
                        missing = [name for name in wanted if name not in alive]
                    if missing:
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise RayError(
                f"Ray's head on {head} did not see {', '.join(missing)} within {JOIN_S:g} s",
                hint=f"all nodes must reach {head} on ray.redis_port and each other on high ports",
            ) from None

    async def _told(self, head: str) -> list[Mapping[str, Any]]:
        answer = await self.ask(head, "GET", "/api/v0/nodes?detail=true&limit=10000")
        try:
            found: list[Mapping[str, Any]] = answer["data"]["result"]["result"]
        except (KeyError, TypeError):
            raise RayError(f"node {head}: Ray's dashboard does not list its nodes") from None
        return found

    async def _undo(self, cluster: str, begun: Sequence[str], *, say: Say) -> None:
        """Takes back a start, also one that is being cancelled; bounded."""

        async def all_of_them() -> None:
            stop = functools.partial(self._stop_one, cluster=cluster)
            reports = [*await asyncio.gather(*map(stop, begun[1:])), await stop(begun[0])]
            for report in reports:
                if report.error:
                    say(report.node, f"something may be left: {report.error}")

        if begun:
            try:
                await asyncio.shield(asyncio.wait_for(all_of_them(), _UNDO_S))
            except TimeoutError:
                say(begun[0], "something may be left: 'grid-cli cluster stop' ends it")

    # --- stopping and looking ---

    async def _stop_one(self, name: str, *, cluster: str | None = None) -> StopReport:
        args = {"grace_s": GRACE_S, "cluster": cluster}
        try:
            async with self._places:
                answer, _ = await self.call(name, "stop", args, timeout_s=GRACE_S + _MARGIN_S)
        except GenieError as error:
            return StopReport(name, "", error=error.message, exit_code=error.exit_code)
        was = answer["was"]
        return StopReport(
            name, str(was["role"]) if was else "", ended=int(answer["ended"]), killed=int(answer["killed"])
        )

    async def _record(self, name: str) -> RayRecord | None:
        answer, _ = await self.call(name, "record", timeout_s=ASK_S)
        return RayRecord.of(answer)

    async def _records(self) -> tuple[dict[str, RayRecord | None], dict[str, GenieError]]:
        names = [node.name for node in self._file.nodes]
        found, failed = await self._on_all(names, self._record)
        return {name: found[name] for name in names if name in found}, {
            name: failed[name] for name in names if name in failed
        }

    async def _on_all(
        self, names: Sequence[str], ask: Callable[[str], Awaitable[_T]]
    ) -> tuple[dict[str, _T], dict[str, GenieError]]:
        """Side by side, as many as the pool may hold; what failed is told apart from what was found."""
        found: dict[str, _T] = {}
        failed: dict[str, GenieError] = {}

        async def one(name: str) -> None:
            try:
                async with self._places:
                    found[name] = await ask(name)
            except GenieError as error:
                _log.debug("a node failed", extra={"node": name, "why": error.message})
                failed[name] = error

        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(one(name))
        return found, failed


class KeptCluster:
    """What this machine keeps of the cluster it started: where the head is, and the token."""

    def __init__(self, state_dir: Path, file: GridFile) -> None:
        where = str(file.path.expanduser().resolve()) if file.path is not None else ""
        self._folder = (
            state_dir.expanduser() / "grid" / f"ray-{hashlib.sha256(where.encode()).hexdigest()[:12]}"
        )

    @property
    def token_file(self) -> Path:
        return self._folder / "token"

    def write(self, cluster: str, token: str, *, head: str) -> None:
        files.write_private(self.token_file, token.encode())
        files.write_private(self._folder / "cluster.json", json.dumps([cluster, head]).encode())

    def head(self) -> str | None:
        kept = self._read()
        return kept[1] if kept else None

    def remove(self, cluster: str | None = None) -> None:
        """Of that cluster only, if one is named."""
        kept = self._read()
        if cluster is not None and (kept is None or kept[0] != cluster):
            return
        for name in ("cluster.json", "token"):
            (self._folder / name).unlink(missing_ok=True)

    def _read(self) -> tuple[str, str] | None:
        try:
            cluster, head = json.loads((self._folder / "cluster.json").read_text("utf-8"))
        except (OSError, ValueError, TypeError):
            return None
        return str(cluster), str(head)


def _kind(errors: Iterable[GenieError]) -> type[GenieError]:
    """Of the error that stands for these: it has the highest of their exit codes."""
    kinds: dict[int, type[GenieError]] = {kind.exit_code: kind for kind in (UnreachableError, UsageError)}
    return kinds.get(max(each.exit_code for each in errors), RayError)


def _lives(told: Mapping[str, Any]) -> bool:
    return told.get("state") == "ALIVE"


async def _check_helper(link: Link) -> None:
    if not link.has_helper:
        await check_login_shell(link, timeout_s=ASK_S)
        raise NodeRefusedError(
            f"node {link.name} has no usable python3, which Ray and the grid need there",
            hint="install Python 3.9 or newer on it",
            reason=NO_PYTHON,
        )
