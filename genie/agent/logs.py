"""Reads a job's log by offset, across rotated files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from genie.agent import job_files
from genie.errors import UsageError
from genie.model.messages import CHUNK_BYTES_MAX, LOG_OFFSET_MAX, WAIT_S_MAX, LogChunk, ReadLog
from genie.processes.clock import Clock
from genie.processes.tasks import Offload

LOG_POLL_INTERVAL_S = 0.1
_LOG_FILE_PATTERN = re.compile(r"[0-9]{1,20}\.log")


async def wait_for_log_chunk(
    request: ReadLog, directory: Path, *, is_live: Callable[[], bool], clock: Clock, offload: Offload
) -> LogChunk:
    """Returns the next chunk; waits up to `request.wait_s` for output while the job runs."""
    if not 0 <= request.offset <= LOG_OFFSET_MAX or request.bytes_max < 1:
        raise UsageError(
            f"cannot read {request.bytes_max} bytes of a log from {request.offset}",
            hint=f"the offset must be from 0 to {LOG_OFFSET_MAX} and the size at least 1",
        )
    deadline = clock.monotonic_s() + min(max(request.wait_s, 0.0), WAIT_S_MAX)
    while True:
        live = is_live()  # checked before reading: the log of an ended job is complete
        bytes_max = min(request.bytes_max, CHUNK_BYTES_MAX)
        read = partial(read_log_chunk, directory, offset=request.offset, bytes_max=bytes_max, is_live=live)
        chunk = await offload(read)
        remaining_s = deadline - clock.monotonic_s()
        if chunk.data or chunk.eof or remaining_s <= 0:
            return chunk
        await clock.sleep(min(LOG_POLL_INTERVAL_S, remaining_s))


def read_log_chunk(directory: Path, *, offset: int, bytes_max: int, is_live: bool) -> LogChunk:
    """Reads from `offset`, or from the oldest byte kept if rotation has removed that. Blocks."""
    data, start = b"", offset
    found = list(log_files_with_offsets(directory))
    if found and offset < found[0][0]:
        start = found[0][0]
    for first, path in found:
        position = start + len(data)
        if position < first:
            break  # a file was removed meanwhile; the next request starts after the gap
        try:
            with job_files.open_regular_file(path) as file:
                file.seek(position - first)
                data += file.read(bytes_max - len(data))
        except OSError:
            continue  # removed meanwhile, or replaced by the job
        if len(data) >= bytes_max:
            break
    # The end is reported without data, on the next request.
    return LogChunk(
        data=data, start_offset=start, next_offset=start + len(data), eof=not is_live and not data
    )


def log_files_with_offsets(directory: Path) -> Iterator[tuple[int, Path]]:
    """Yields the log files of a job, oldest first, with the offset of their first byte."""
    for path in sorted((directory / "log").glob("*.log")):
        if _LOG_FILE_PATTERN.fullmatch(path.name):
            yield int(path.stem), path
