"""Alternates two functions and measures both, so that other load on the machine slows both."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence

import report


def time_alternately(
    rounds: int, ours: Callable[[], object], theirs: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """Runs both once to warm up, then `rounds` times in alternation; returns the seconds of each call."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for work, times in zip((ours, theirs), taken, strict=True):
            start = time.perf_counter()
            work()
            if number:
                times.append(time.perf_counter() - start)
    return taken


async def time_alternately_async(
    rounds: int, ours: Callable[[], Awaitable[None]], theirs: Callable[[], Awaitable[None]]
) -> tuple[list[float], list[float]]:
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for work, times in zip((ours, theirs), taken, strict=True):
            start = time.perf_counter()
            await work()
            if number:
                times.append(time.perf_counter() - start)
    return taken


def ratio_figure(
    name: str, ours_s: Sequence[float], theirs_s: Sequence[float], *, goal: report.Goal | None = None
) -> report.Figure:
    """Figure with the medians in milliseconds; `theirs_s` is the baseline."""
    samples = [each * 1000 for each in ours_s]
    return report.make_figure(
        name,
        statistics.median(samples),
        samples=samples,
        baseline=statistics.median(theirs_s) * 1000,
        goal=goal,
    )


def run_in_parallel(commands: Sequence[Sequence[str]], *, environ: dict[str, str] | None = None) -> None:
    """Runs the commands in parallel; each must succeed."""
    running = [
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ
        )
        for command in commands
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
