"""Reading a job's log by offset, across the files that rotation makes. Nothing else about jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from genie.agent import jobfiles
from genie.agent.launcher import log_files
from genie.errors import UsageError
from genie.model.messages import CHUNK_BYTES_MAX, WAIT_S_MAX, LogChunk, ReadLog
from genie.runtime.clock import Clock

POLL_S = 0.1


async def serve_log(
    request: ReadLog, directory: Path, *, is_live: Callable[[], bool], clock: Clock
) -> LogChunk:
    """Waits up to `wait_s` for something to send while the job lives."""
    if request.offset < 0 or request.bytes_max < 1:
        raise UsageError(
            f"cannot read {request.bytes_max} bytes of a log from {request.offset}",
            hint="the offset is 0 or more, and at least one byte is asked for",
        )
    deadline = clock.monotonic_s() + min(max(request.wait_s, 0.0), WAIT_S_MAX)
    while True:
        live = is_live()  # before reading: what a dead job wrote is all there
        chunk = read_chunk(
            directory, offset=request.offset, bytes_max=min(request.bytes_max, CHUNK_BYTES_MAX), live=live
        )
        left_s = deadline - clock.monotonic_s()
        if chunk.data or chunk.eof or left_s <= 0:
            return chunk
        await clock.sleep(min(POLL_S, left_s))


def read_chunk(directory: Path, *, offset: int, bytes_max: int, live: bool) -> LogChunk:
    """What is there from `offset` on, or from the oldest byte kept when rotation has eaten it."""
    data, start = b"", offset
    found = list(log_files(directory))
    if found and offset < found[0][0]:
        start = found[0][0]
    for first, path in found:
        position = start + len(data)
        if position < first:
            break  # a file was dropped while we looked; the next request starts after the gap
        try:
            with jobfiles.open_plain(path) as file:
                file.seek(position - first)
                data += file.read(bytes_max - len(data))
        except OSError:
            continue  # dropped meanwhile, or the job has put something else there
        if len(data) >= bytes_max:
            break
    # Never at the same time data and the end: whoever reads asks once more and then knows.
    return LogChunk(data=data, start=start, next_offset=start + len(data), eof=not live and not data)
