"""Ctrl-C as queue items, for commands that continue after the first one.

Other commands end at the first Ctrl-C (app.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def catch_interrupts() -> Iterator[asyncio.Queue[None]]:
    """Yield a queue that gets one item per Ctrl-C while the block runs."""
    interrupts: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupts.put_nowait, None)
    try:
        yield interrupts
    finally:
        loop.remove_signal_handler(signal.SIGINT)
