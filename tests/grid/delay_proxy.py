"""Simulates network latency: a TCP proxy in a separate process that delays all data.

    python -m tests.grid.delay_proxy DELAY_MS PORT TARGET_PORT ADDRESS...

listens on PORT of each address and forwards to TARGET_PORT; each direction takes DELAY_MS, so a round trip
takes twice that. Data stays in order. Does not simulate packet loss or limited bandwidth.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

_CHUNK_BYTES = 1 << 16
_QUEUE_MAX = 4096


@contextlib.contextmanager
def run_delay_proxy(
    addresses: Sequence[str], *, port: int, target_port: int, delay_ms: float
) -> Iterator[None]:
    """Run the proxy during the block."""
    command = [sys.executable, "-m", "tests.grid.delay_proxy", str(delay_ms), str(port), str(target_port)]
    process = subprocess.Popen([*command, *addresses], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


async def _forward_delayed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE_MAX)

    async def read() -> None:
        while True:
            data = await reader.read(_CHUNK_BYTES)
            await queue.put((loop.time() + delay_s, data))
            if not data:
                return

    async def write() -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    with contextlib.suppress(ConnectionError):
        await asyncio.gather(read(), write())
    writer.close()


async def _serve_proxies(delay_ms: float, port: int, target_port: int, addresses: Sequence[str]) -> None:
    async def serve(address: str) -> asyncio.Server:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                target = await asyncio.open_connection(address, target_port)
            except OSError:
                writer.close()
                return
            delay_s = delay_ms / 1000
            await asyncio.gather(
                _forward_delayed(reader, target[1], delay_s), _forward_delayed(target[0], writer, delay_s)
            )

        return await asyncio.start_server(connected, address, port, backlog=512)

    servers = [await serve(address) for address in addresses]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_proxies(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
