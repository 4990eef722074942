"""A process to be killed: commits pairs of keys for ever and prints each acknowledged pair.

Run by test_kill.py as `python -m tests.controller.store.commit_pairs FILE`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from genie.controller.store import Put
from genie.controller.store.sqlite import SqliteStore

WRITERS = 8


def make_key_pair_puts(writer: int, number: int) -> list[Put]:
    # Some span several pages, so that a kill can occur between them.
    value = b"%d.%d " % (writer, number) * (1 + number % 7 * 300)
    return [Put(f"pair/{writer}/{number:06}/{half}", value) for half in "ab"]


async def main(path: Path) -> None:
    store = await SqliteStore.open(path)

    async def write(writer: int) -> None:
        number = 0
        while True:
            await store.commit([], make_key_pair_puts(writer, number))
            os.write(1, b"%d %d\n" % (writer, number))
            number += 1

    async with asyncio.TaskGroup() as group:
        for writer in range(WRITERS):
            group.create_task(write(writer))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
