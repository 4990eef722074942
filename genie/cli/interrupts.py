"""Ctrl-C as something to be waited for, by commands that do more than end at it.

Not for: commands that end at the first one (app.py sees to that).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def caught_interrupts() -> Iterator[asyncio.Queue[None]]:
    """Each Ctrl-C as an item, for as long as the block lasts."""
    presses: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, presses.put_nowait, None)
    try:
        yield presses
    finally:
        loop.remove_signal_handler(signal.SIGINT)
