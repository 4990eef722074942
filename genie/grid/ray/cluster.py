"""A Ray cluster on grid nodes: start, stop, status, and a tunnel to its dashboard.

Every cluster has its own token, created here, sent over the connection and stored in private files on the
nodes and on this machine. Starting is all or nothing. Stopping ends only the processes that the nodes have
recorded.

Does not choose options of a node (plan.py), run on the nodes (remote/ray_node.py) or handle jobs (jobs.py).
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
from genie.grid.grid_file import GridFile, ProgressCallback
from genie.grid.ray.plan import (
    NO_PYTHON_REASON,
    RayClusterView,
    RayFacts,
    RayRecordOfNode,
    RayStartPlan,
    build_ray_cluster_view,
    plan_start,
)
from genie.grid.ssh.login_shell import check_login_shell
from genie.grid.ssh.pool import NodeConnection, SshPool
from genie.processes import files
from genie.processes.tasks import run_all_concurrently

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

FETCH_FACTS_TIMEOUT_S = 90.0
RAY_START_TIMEOUT_S = 180.0
NODES_JOIN_TIMEOUT_S = 60.0
RAY_STOP_GRACE_S = 8.0
RAY_REQUEST_TIMEOUT_S = 30.0
_REPLY_TIMEOUT_MARGIN_S = 20.0
_UNDO_START_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.5
_RAY_TOKEN_BYTES = 32


@dataclass(frozen=True)
class RayStopReport:
    """Result of a stop on one node. `role` is the role that was stopped, '' if there was none.

    `exit_code` is that of the error, 0 without error.
    """

    node: str
    role: str
    ended: int = 0
    killed: int = 0
    error: str = ""
    exit_code: int = 0


@dataclass(frozen=True)
class DashboardTunnel:
    """`url` is the dashboard's address while the connection to the head is open."""

    url: str
    head: str
    link: NodeConnection

    async def wait_until_lost(self) -> None:
        await self.link.connection.wait_closed()


class RayCluster:
    """Ray on the nodes of one grid file. The token is stored below `state_dir` on this machine."""

    def __init__(self, pool: SshPool, file: GridFile, *, state_dir: Path) -> None:
        self._pool = pool
        self._grid_file = file
        self._local_files = LocalClusterFiles(state_dir, file)
        self._query_slots = asyncio.Semaphore(file.ssh.pool_size)

    @property
    def token_file(self) -> Path:
        """Local token file, mode 0600; it exists while a cluster that was started here is running."""
        return self._local_files.token_file

    async def start(
        self,
        *,
        nodes: Sequence[str] = (),
        head: str | None = None,
        allow_missing: bool = False,
        on_progress: ProgressCallback = lambda _node, _text: None,
    ) -> RayClusterView:
        """Start the head on the first node and workers on the others, and wait until all have joined.

        Raises RayError, or TransportError if a node is unreachable, after stopping all started nodes.
        `allow_missing` continues without workers that cannot join.
        """
        if head is not None:
            self._grid_file.node(head)  # raises an error that lists the nodes
        names = [self._grid_file.node(name).name for name in nodes] or [
            node.name for node in self._grid_file.nodes
        ]
        facts = await self._fetch_facts(names, allow_missing=allow_missing, on_progress=on_progress)
        if allow_missing and any(each.ray_program for each in facts):
            for each in facts:
                if not each.ray_program:
                    on_progress(each.node, "skipped: Ray is not installed")
            facts = [each for each in facts if each.ray_program]
        start_plans = plan_start(facts, self._grid_file.ray, head=head)
        cluster, token = secrets.token_hex(8), secrets.token_hex(_RAY_TOKEN_BYTES)
        started: list[str] = []
        try:
            missing = await self._start_nodes(
                start_plans,
                cluster,
                token,
                started=started,
                allow_missing=allow_missing,
                on_progress=on_progress,
            )
            self._local_files.write(cluster, token, head=start_plans[0].node)
            wanted = [start_plan.node for start_plan in start_plans if start_plan.node not in missing]
            await self._wait_until_joined(start_plans[0].node, wanted)
        except BaseException as error:
            await self._undo_start(cluster, started, on_progress=on_progress)
            self._local_files.remove(cluster)
            if isinstance(error, GenieError):
                raise _common_error_type([error])(
                    f"the Ray cluster was not started: {error.message}", hint=error.hint
                ) from error
            raise
        return await self.status()

    async def stop(self, *, on_progress: ProgressCallback = lambda _node, _text: None) -> list[RayStopReport]:
        """Stop Ray on every node of the file. A node's error is in its report, not raised."""

        async def stop_node(name: str) -> RayStopReport:
            report = await self._stop_node(name)
            if report.role or report.error:
                on_progress(name, report.error or f"stopped {report.ended} processes")
            return report

        records, _ = await self._fetch_ray_records()
        head = [name for name, record in records.items() if record is not None and record.role == "head"]
        names = [node.name for node in self._grid_file.nodes]
        # The head last, because workers deregister with it.
        reports = await run_all_concurrently(stop_node(name) for name in names if name not in head)
        reports += await run_all_concurrently(stop_node(name) for name in head)
        reports.sort(key=lambda report: names.index(report.node))
        if not any(report.error for report in reports):
            self._local_files.remove()
        return reports

    async def status(self) -> RayClusterView:
        """Return the state of the cluster. A node that cannot be queried has its error as message."""
        records, failed = await self._fetch_ray_records()
        head = next((name for name, rec in records.items() if rec is not None and rec.role == "head"), None)
        ray_nodes, version = None, ""
        if head is not None:
            with contextlib.suppress(GenieError):
                ray_nodes = await self._fetch_ray_nodes(head)
                version = str(
                    (await self.request_dashboard(head, "GET", "/api/version")).get("ray_version", "")
                )
        return build_ray_cluster_view(records, failed, ray_nodes, version=version)

    async def find_head(self) -> str:
        """Return the node of the head. Raises RayError if there is none, TransportError if it may be on an
        unreachable node."""
        return (await self._find_head_record())[0]

    async def _find_head_record(self) -> tuple[str, RayRecordOfNode]:
        last = self._local_files.read_head()
        if last is not None and any(node.name == last for node in self._grid_file.nodes):
            record = await self._fetch_ray_record(last)
            if record is not None and record.role == "head" and record.alive_count:
                return last, record
        records, failed = await self._fetch_ray_records()
        for name, record in records.items():
            if record is not None and record.role == "head" and record.alive_count:
                return name, record
        if failed:
            raise _common_error_type(failed.values())(
                f"no Ray cluster found on the reachable nodes; could not query {', '.join(failed)}",
                hint="show the errors: grid-cli cluster status",
            )
        raise RayError("no Ray cluster is running on these nodes", hint="start one: grid-cli cluster start")

    async def request_dashboard(
        self, head: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send one request to the dashboard, from the head with the token stored there."""
        blob = json.dumps(body).encode() if body is not None else b""
        args = {"method": method, "path": path, "timeout_s": RAY_REQUEST_TIMEOUT_S}
        answer, data = await self.call_ray_op(
            head, "request_dashboard", args, blob, timeout_s=RAY_REQUEST_TIMEOUT_S + _REPLY_TIMEOUT_MARGIN_S
        )
        status = int(answer["status"])
        text = data.decode("utf-8", "replace")
        if status >= 400:
            raise RayError(f"node {head}: Ray's dashboard returned {status}: {text.strip()[-2000:]}")
        try:
            parsed = json.loads(text) if text.startswith(("{", "[")) else {}
        except ValueError:
            raise RayError(f"node {head}: Ray's dashboard returned invalid JSON: {text[:200]!r}") from None
        return parsed if isinstance(parsed, dict) else {"list": parsed}

    async def call_ray_op(
        self,
        node: str,
        name: str,
        args: Mapping[str, Any] | None = None,
        blob: bytes = b"",
        *,
        timeout_s: float,
    ) -> tuple[Any, bytes]:
        """Call an op of remote/ray_node.py on a node, with remote_root of the grid file."""
        async with self._pool.connect(node) as link:
            await _check_has_helper(link)
            request = {"root": self._grid_file.remote_root, **(args or {})}
            return await link.call(f"ray_node.{name}", request, blob, timeout_s=timeout_s)

    @contextlib.asynccontextmanager
    async def open_dashboard_tunnel(self, *, local_port: int) -> AsyncIterator[DashboardTunnel]:
        """Forward a local port to the dashboard while the block runs. 0 uses any free port."""
        head, record = await self._find_head_record()
        async with self._pool.connect(head) as link:
            try:
                listener = await link.connection.forward_local_port(
                    "127.0.0.1", local_port, "127.0.0.1", record.dashboard_port
                )
            except OSError as error:
                raise RayError(
                    f"cannot listen on local port {local_port}: {error.strerror}",
                    hint="use another --port",
                ) from error
            async with listener:
                yield DashboardTunnel(f"http://127.0.0.1:{listener.get_port()}", head, link)

    # --- starting ---

    async def _fetch_facts(
        self, names: Sequence[str], *, allow_missing: bool, on_progress: ProgressCallback
    ) -> list[RayFacts]:
        async def fetch_facts(name: str) -> RayFacts:
            answer, _ = await self.call_ray_op(name, "facts", timeout_s=FETCH_FACTS_TIMEOUT_S)
            return RayFacts.from_reply(name, answer)

        found, failed = await self._query_nodes(names, fetch_facts)
        if failed and (not allow_missing or not found):
            lines = [failed[name].message for name in names if name in failed]
            raise _common_error_type(failed.values())(
                "the Ray cluster was not started; these nodes cannot join:\n" + "\n".join(lines),
                hint="continue without them: --allow-missing" if found else "check them: grid-cli health",
            )
        for name, error in failed.items():
            on_progress(name, error.message)
        return [found[name] for name in names if name in found]

    async def _start_nodes(
        self,
        start_plans: Sequence[RayStartPlan],
        cluster: str,
        token: str,
        *,
        started: list[str],
        allow_missing: bool,
        on_progress: ProgressCallback,
    ) -> set[str]:
        """Start the head, then the workers. Returns the workers that failed, with `allow_missing`."""

        async def start_node(start_plan: RayStartPlan) -> None:
            on_progress(start_plan.node, f"starting the {start_plan.role}")
            args = {
                **start_plan.to_request_args(self._grid_file.ray),
                "cluster": cluster,
                "timeout_s": RAY_START_TIMEOUT_S,
            }
            started.append(start_plan.node)
            await self.call_ray_op(
                start_plan.node,
                "start",
                args,
                token.encode(),
                timeout_s=RAY_START_TIMEOUT_S + _REPLY_TIMEOUT_MARGIN_S,
            )
            on_progress(start_plan.node, f"the {start_plan.role} is running")

        await start_node(start_plans[0])
        by_name = {start_plan.node: start_plan for start_plan in start_plans[1:]}
        _, failed = await self._query_nodes(list(by_name), lambda name: start_node(by_name[name]))
        if failed and not allow_missing:
            raise _common_error_type(failed.values())("\n".join(error.message for error in failed.values()))
        for name, error in failed.items():
            on_progress(name, f"skipped: {error.message}")
            await self._stop_node(name, cluster=cluster)
        return set(failed)

    async def _wait_until_joined(self, head: str, wanted: Sequence[str]) -> None:
        """Wait until Ray's head lists every node as alive. Raises RayError after NODES_JOIN_TIMEOUT_S."""
        missing = list(wanted)
        try:
            async with asyncio.timeout(NODES_JOIN_TIMEOUT_S):
                while missing:
                    with contextlib.suppress(NodeRefusedError, RayError):  # the dashboard may be starting
                        alive = {
                            str(each.get("node_name"))
                            for each in await self._fetch_ray_nodes(head)
                            if each.get("state") == "ALIVE"
                        }
                        missing = [name for name in wanted if name not in alive]
                    if missing:
                        await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            raise RayError(
                f"{', '.join(missing)} did not join Ray's head on {head} within {NODES_JOIN_TIMEOUT_S:g} s",
                hint=f"all nodes must reach {head} on ray.redis_port and each other on high ports",
            ) from None

    async def _fetch_ray_nodes(self, head: str) -> list[Mapping[str, Any]]:
        answer = await self.request_dashboard(head, "GET", "/api/v0/nodes?detail=true&limit=10000")
        try:
            found: list[Mapping[str, Any]] = answer["data"]["result"]["result"]
        except (KeyError, TypeError):
            raise RayError(f"node {head}: Ray's dashboard returned no list of nodes") from None
        return found

    async def _undo_start(
        self, cluster: str, started: Sequence[str], *, on_progress: ProgressCallback
    ) -> None:
        """Stop all started nodes, also on cancellation, within _UNDO_START_TIMEOUT_S."""

        async def stop_all() -> None:
            stop = functools.partial(self._stop_node, cluster=cluster)
            reports = [*await asyncio.gather(*map(stop, started[1:])), await stop(started[0])]
            for report in reports:
                if report.error:
                    on_progress(report.node, f"processes may still be running: {report.error}")

        if started:
            try:
                await asyncio.shield(asyncio.wait_for(stop_all(), _UNDO_START_TIMEOUT_S))
            except TimeoutError:
                on_progress(started[0], "processes may still be running; stop them: grid-cli cluster stop")

    # --- stopping and status ---

    async def _stop_node(self, name: str, *, cluster: str | None = None) -> RayStopReport:
        args = {"grace_s": RAY_STOP_GRACE_S, "cluster": cluster}
        try:
            async with self._query_slots:
                answer, _ = await self.call_ray_op(
                    name, "stop", args, timeout_s=RAY_STOP_GRACE_S + _REPLY_TIMEOUT_MARGIN_S
                )
        except GenieError as error:
            return RayStopReport(name, "", error=error.message, exit_code=error.exit_code)
        was = answer["was"]
        return RayStopReport(
            name, str(was["role"]) if was else "", ended=int(answer["ended"]), killed=int(answer["killed"])
        )

    async def _fetch_ray_record(self, name: str) -> RayRecordOfNode | None:
        answer, _ = await self.call_ray_op(name, "record", timeout_s=RAY_REQUEST_TIMEOUT_S)
        return RayRecordOfNode.from_reply(answer)

    async def _fetch_ray_records(self) -> tuple[dict[str, RayRecordOfNode | None], dict[str, GenieError]]:
        names = [node.name for node in self._grid_file.nodes]
        found, failed = await self._query_nodes(names, self._fetch_ray_record)
        return {name: found[name] for name in names if name in found}, {
            name: failed[name] for name in names if name in failed
        }

    async def _query_nodes(
        self, names: Sequence[str], query: Callable[[str], Awaitable[_T]]
    ) -> tuple[dict[str, _T], dict[str, GenieError]]:
        """Query nodes concurrently, at most pool_size at a time. Returns results and errors by name."""
        found: dict[str, _T] = {}
        failed: dict[str, GenieError] = {}

        async def query_node(name: str) -> None:
            try:
                async with self._query_slots:
                    found[name] = await query(name)
            except GenieError as error:
                _log.debug("starting Ray failed on a node", extra={"node": name, "why": error.message})
                failed[name] = error

        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(query_node(name))
        return found, failed


class LocalClusterFiles:
    """Local files of the cluster that this machine started: the node of the head and the token."""

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

    def read_head(self) -> str | None:
        stored = self._read_cluster_and_head()
        return stored[1] if stored else None

    def remove(self, cluster: str | None = None) -> None:
        """Remove the files; with `cluster`, only if they are of that cluster."""
        stored = self._read_cluster_and_head()
        if cluster is not None and (stored is None or stored[0] != cluster):
            return
        for name in ("cluster.json", "token"):
            (self._folder / name).unlink(missing_ok=True)

    def _read_cluster_and_head(self) -> tuple[str, str] | None:
        try:
            cluster, head = json.loads((self._folder / "cluster.json").read_text("utf-8"))
        except (OSError, ValueError, TypeError):
            return None
        return str(cluster), str(head)


def _common_error_type(errors: Iterable[GenieError]) -> type[GenieError]:
    """Return the error type that represents these: the one with their highest exit code."""
    kinds: dict[int, type[GenieError]] = {kind.exit_code: kind for kind in (UnreachableError, UsageError)}
    return kinds.get(max(each.exit_code for each in errors), RayError)


async def _check_has_helper(link: NodeConnection) -> None:
    if not link.has_helper:
        await check_login_shell(link, timeout_s=RAY_REQUEST_TIMEOUT_S)
        raise NodeRefusedError(
            f"node {link.name} has no usable python3, which Ray and the grid require",
            hint="install Python 3.9 or newer on the node",
            reason=NO_PYTHON_REASON,
        )
