"""Serves the metrics over HTTP for Prometheus, with node health refreshed in the background.

Only GET and HEAD /metrics; one response per connection and a bounded number of connections. Metrics contain
node names, so the default bind address is loopback. Does not count anything (metrics.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

from genie.errors import UsageError
from genie.grid.grid_file import GridFile
from genie.grid.health.check import HealthState, NodeHealthChecker
from genie.grid.metrics import GridMetrics
from genie.grid.runs.launch import reconcile_active_runs
from genie.grid.runs.run_client import Runner

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CONNECTIONS_MAX = 64
REQUEST_BYTES_MAX = 8192
REQUEST_TIMEOUT_S = 5.0
REFRESH_INTERVAL_S_MIN = 1.0


@contextlib.asynccontextmanager
async def serve_metrics(metrics: GridMetrics, *, bind: str, port: int) -> AsyncIterator[tuple[str, int]]:
    """Serve until the block ends; yields host and port. Raises UsageError if the port cannot be bound."""
    handler = _RequestHandler(metrics)
    try:
        server = await asyncio.start_server(handler.handle_connection, bind, port, limit=REQUEST_BYTES_MAX)
    except OSError as error:
        # The text of asyncio repeats the address; for a name lookup the errno has no text.
        has_text = error.errno is not None and not isinstance(error, socket.gaierror)
        reason = os.strerror(error.errno or 0) if has_text else error.strerror
        raise UsageError(
            f"cannot listen on {bind} port {port}: {reason}", hint="use another --port or --bind"
        ) from error
    try:
        host, number = server.sockets[0].getsockname()[:2]
        yield str(host), int(number)
    finally:
        server.close()
        await handler.close()


async def refresh_metrics_forever(
    checker: NodeHealthChecker, runner: Runner, file: GridFile, metrics: GridMetrics
) -> None:
    """Refresh every health_check.refresh_interval seconds until cancelled."""
    while True:
        await refresh_metrics(checker, runner, file, metrics, fresh=True)
        await asyncio.sleep(max(REFRESH_INTERVAL_S_MIN, file.health_check.refresh_interval))


async def refresh_metrics(
    checker: NodeHealthChecker, runner: Runner, file: GridFile, metrics: GridMetrics, *, fresh: bool = False
) -> None:
    """Record the scores of all nodes and the ends of active runs."""
    nodes = await checker.check_all_in_file_order(fresh=fresh)
    await asyncio.to_thread(metrics.record_node_scores, {node.name: node.effective_score for node in nodes})
    reached = [node.name for node in nodes if node.state is not HealthState.UNREACHABLE]
    await reconcile_active_runs(runner, file, metrics, nodes=reached)


class _RequestHandler:
    def __init__(self, metrics: GridMetrics) -> None:
        self._metrics = metrics
        self._open_writers: set[asyncio.StreamWriter] = set()

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open_writers) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._open_writers.add(writer)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._make_response(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            _log.debug("could not serve a metrics request", extra={"why": str(error)})
        finally:
            self._open_writers.discard(writer)
            writer.transport.abort()

    async def close(self) -> None:
        """Abort all open connections and wait until their handlers have returned."""
        while self._open_writers:
            for writer in list(self._open_writers):
                writer.transport.abort()
            await asyncio.sleep(0)

    async def _make_response(self, head: bytes) -> bytes:
        method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _encode_response("405 Method Not Allowed", "only GET\n", headers="Allow: GET, HEAD\r\n")
        if path != b"/metrics":
            return _encode_response("404 Not Found", "metrics are at /metrics\n")
        text = await asyncio.to_thread(self._metrics.text)
        return _encode_response("200 OK", text, with_body=method == b"GET")


def _encode_response(status: str, text: str, *, headers: str = "", with_body: bool = True) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n{headers}\r\n"
    )
    return head.encode() + (body if with_body else b"")
