"""The figures over HTTP, for Prometheus to fetch, with the nodes' health read in the background.

GET /metrics and nothing else; one answer for each connection, and a bounded number of them. The figures
name your nodes, so it listens on loopback unless told otherwise. Not for: the figures (metrics.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from genie.errors import UsageError
from genie.grid.health_check import HealthChecker
from genie.grid.metrics import GridMetrics

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CONNECTIONS_MAX = 64
REQUEST_BYTES_MAX = 8192
REQUEST_S = 5.0
REFRESH_S_MIN = 1.0


@contextlib.asynccontextmanager
async def serving(metrics: GridMetrics, *, bind: str, port: int) -> AsyncIterator[tuple[str, int]]:
    """Serves until the block ends; gives the address that it listens on. Raises UsageError."""
    answers = _Answers(metrics)
    try:
        server = await asyncio.start_server(answers.handle, bind, port, limit=REQUEST_BYTES_MAX)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {bind} port {port}: {error.strerror}", hint="give another --port or --bind"
        ) from error
    try:
        host, number = server.sockets[0].getsockname()[:2]
        yield str(host), int(number)
    finally:
        server.close()
        await answers.drained()


async def refresh_forever(checker: HealthChecker, metrics: GridMetrics, *, interval_s: float) -> None:
    """Reads all nodes, records their scores, and waits; until it is cancelled."""
    while True:
        await refresh(checker, metrics, fresh=True)
        await asyncio.sleep(max(REFRESH_S_MIN, interval_s))


async def refresh(checker: HealthChecker, metrics: GridMetrics, *, fresh: bool = False) -> None:
    nodes = await checker.check_all(fresh=fresh)
    await asyncio.to_thread(metrics.node_scores, {node.name: node.rank for node in nodes})


class _Answers:
    def __init__(self, metrics: GridMetrics) -> None:
        self._metrics = metrics
        self._open: set[asyncio.StreamWriter] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            _log.debug("a request for figures failed", extra={"why": str(error)})
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def drained(self) -> None:
        """Cuts what is still open, and lets its handlers see that."""
        while self._open:
            for writer in list(self._open):
                writer.transport.abort()
            await asyncio.sleep(0)

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET\n", more="Allow: GET, HEAD\r\n")
        if path != b"/metrics":
            return _response("404 Not Found", "the figures are under /metrics\n")
        text = await asyncio.to_thread(self._metrics.text)
        return _response("200 OK", text, with_body=method == b"GET")


def _response(status: str, text: str, *, more: str = "", with_body: bool = True) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n{more}\r\n"
    )
    return head.encode() + (body if with_body else b"")
