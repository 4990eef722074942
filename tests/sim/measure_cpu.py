"""Measures the constants of the CPU model in scenario.py: `python -m tests.sim.measure_cpu`.

Prints the CPU time of one small request and of one byte of a list, of client and controller together, which
share this process. The controller is real, on loopback, with SQLite.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from genie.model.job import JobSpec
from genie.model.messages import GetJob, ListJobs
from tests.controller.running_controller import running_controller
from tests.sim.run import temporary_directory

_REQUESTS, _LISTS, _JOBS = 2000, 100, 4
_ENV_BYTES = 120_000
"""As in genie/sim/faults/hostile.py."""


async def _measure_request_costs() -> None:
    with temporary_directory() as directory:
        async with running_controller(directory) as one, one.client() as owner:
            small = await owner.submit()
            small_s = await _cpu_s_per_call(lambda: owner.ask(GetJob(job_id=small.job_id)), _REQUESTS)
            print(f"small request: {1e6 * small_s:.0f} us")
            spec = JobSpec(name="large", command=("true",), env={"X": "x" * _ENV_BYTES})
            for _ in range(_JOBS):
                await owner.submit_spec(spec)
            list_s = await _cpu_s_per_call(lambda: owner.ask(ListJobs(limit=1000)), _LISTS)
            per_byte_s = (list_s - small_s) / (_JOBS * _ENV_BYTES)
            print(
                f"list of {_JOBS * _ENV_BYTES} bytes: {1e3 * list_s:.2f} ms, {1e9 * per_byte_s:.2f} ns/byte"
            )


async def _cpu_s_per_call(send: Callable[[], Awaitable[object]], count: int) -> float:
    """CPU seconds of one call."""
    start_s = time.process_time()
    for _ in range(count):
        await send()
    return (time.process_time() - start_s) / count


if __name__ == "__main__":
    asyncio.run(_measure_request_costs())
