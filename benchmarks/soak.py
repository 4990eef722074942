"""Runs the operations of bench_leaks.py for hours, reports every few minutes, and ends with a verdict.

    make soak HOURS=72
    python benchmarks/soak.py --hours 72 [--json]

A line on standard error shows the operations so far, the memory of every process and the slopes. The figures
at the end are those of bench_leaks.py, and the exit code is 1 if one misses its goal. A failed operation ends
the run. The figures are from the second half of the time: the first half fills caches.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time

import report
from operation_mix import OperationMix, ProcessSamples, running_mix, warm_up_figures

READINGS = 400
"""Of each process, over the whole time: the slope takes the square of that."""
REPORT_S = 180.0
REPORTS_MIN = 5


async def soak(seconds: float) -> list[report.Figure]:
    first_half, second_half = ProcessSamples(), ProcessSamples()
    async with running_mix() as mix:
        await run_until(mix, first_half, seconds=seconds / 2)
        await run_until(mix, second_half, seconds=seconds / 2)
    print(f"{mix.operations} operations in {seconds / 3600:g} hours", file=sys.stderr)
    return [*second_half.figures(), *warm_up_figures(first_half)]


async def run_until(mix: OperationMix, samples: ProcessSamples, *, seconds: float) -> None:
    """Runs at least three rounds and reads the processes at regular intervals."""
    began_s = reported_s = time.monotonic()
    samples.add(mix.operations, mix.pids)
    read_s, rounds = began_s, 0
    report_s = min(REPORT_S, seconds / REPORTS_MIN)
    while (now_s := time.monotonic()) < began_s + seconds or rounds < 3:
        await mix.run_round()
        rounds += 1
        if now_s >= read_s + 2 * seconds / READINGS or rounds < 3:
            samples.add(mix.operations, mix.pids)
            read_s = now_s
        if now_s >= reported_s + report_s:
            print(progress_line(mix, samples), file=sys.stderr, flush=True)
            reported_s = now_s


def progress_line(mix: OperationMix, samples: ProcessSamples) -> str:
    slopes = ", ".join(f"{name} {samples.rss_slope(name):.2f}" for name in samples.readings)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{now} {mix.operations} operations: {samples.rss_line()}; bytes per operation: {slopes}"


def positive_hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of hours")
    return hours


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=positive_hours, default=72.0, help="duration (default: 72)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    with report.use_temporary_state():
        figures = asyncio.run(soak(given.hours * 3600))
    status = report.print_figures(figures, as_json=given.json)
    print("soak: passed" if status == 0 else "soak: FAILED, a goal was missed", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
