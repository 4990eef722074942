"""Plots a simulated run as SVG: utilization over time and the distribution of wait times.

SVG needs no plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from genie.sim.events import SimulatedRun, UsageSample
from genie.sim.metrics import is_large_gang, percentile

_WIDTH, _HEIGHT = 800, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 40, 50
_POINTS = 400
_STYLE = "font-family='sans-serif' font-size='12' fill='#333'"
_COLOURS = ("#1b6ca8", "#c8553d")
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))

Points = Sequence[tuple[float, float]]


def utilisation_svg(run: SimulatedRun) -> str:
    """Plot the fraction of GPUs in use and the number of pending jobs over time, in 400 steps."""
    used = _steps(run.usage, [sample.used_milli / max(sample.available_milli, 1) for sample in run.usage])
    waiting = _steps(run.usage, [float(sample.waiting) for sample in run.usage])
    most = max((value for _, value in waiting), default=0.0)
    scaled = [(at, value / most if most else 0.0) for at, value in waiting]
    return _chart(
        "GPUs in use over time",
        [("GPUs in use", used), (f"pending jobs (100% = {most:.0f})", scaled)],
        across=_time_ticks(used[-1][0] if used else 0.0),
        up=[(share / 100, f"{share}%") for share in range(0, 101, 20)],
    )


def waiting_svg(run: SimulatedRun) -> str:
    """Plot the cumulative distribution of wait times, for all jobs and large gangs, on a log scale."""
    started = [it for it in run.records if it.started_s is not None]
    waits = [(it.job, max(it.started_s or 0.0, it.job.submitted_s) - it.job.submitted_s) for it in started]
    top = math.log10(1 + max((wait for _, wait in waits), default=1.0)) or 1.0
    lines = []
    for name, values in (
        ("all jobs", [wait for _, wait in waits]),
        ("large gangs", [wait for job, wait in waits if is_large_gang(job)]),
    ):
        ordered = sorted(values)
        shares = [step / 200 for step in range(201)] if ordered else []
        lines.append((name, [(math.log10(1 + percentile(ordered, share)) / top, share) for share in shares]))
    across = [(0.0, "0 s")] + [
        (math.log10(1 + at_s) / top, _duration(at_s))
        for at_s in (10, 60, 600, 3600, 36_000, 86_400, 864_000)
        if math.log10(1 + at_s) <= top
    ]
    return _chart(
        "Cumulative distribution of wait times",
        lines,
        across=across,
        up=[(share / 100, f"{share}%") for share in range(0, 101, 20)],
    )


def _steps(usage: Sequence[UsageSample], values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the mean value of each time step."""
    if len(usage) < 2:
        return []
    first_s, span_s = usage[0].at_s, usage[-1].at_s - usage[0].at_s
    sums, step_s = [0.0] * _POINTS, span_s / _POINTS
    for number, value in enumerate(values[:-1]):
        begin, end = usage[number].at_s - first_s, usage[number + 1].at_s - first_s
        at = min(int(begin / step_s), _POINTS - 1)
        while begin < end and at < _POINTS:
            until = end if at == _POINTS - 1 else min(end, (at + 1) * step_s)
            sums[at] += value * max(until - begin, 0.0)
            begin, at = until, at + 1
    return [((at + 0.5) / _POINTS * span_s, total / step_s) for at, total in enumerate(sums)]


def _time_ticks(span_s: float) -> list[tuple[float, str]]:
    return [(span_s * part / 5, _duration(span_s * part / 5)) for part in range(6)]


def _duration(seconds: float) -> str:
    unit, unit_s = next(((unit, one) for unit, one in _UNITS if seconds >= one), ("s", 1.0))
    return f"{seconds / unit_s:.3g} {unit}"


def _chart(
    title: str,
    lines: Sequence[tuple[str, Points]],
    *,
    across: Sequence[tuple[float, str]],
    up: Sequence[tuple[float, str]],
) -> str:
    right = max([at for _, points in lines for at, _ in points] + [at for at, _ in across] + [1e-9])

    def x(at: float) -> str:
        return f"{_LEFT + at / right * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def y(value: float) -> str:
        return f"{_HEIGHT - _BOTTOM - value * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{_HEIGHT}' "
        f"viewBox='0 0 {_WIDTH} {_HEIGHT}'>",
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='#fff'/>",
        f"<text x='{_LEFT}' y='20' {_STYLE} font-weight='bold'>{escape(title)}</text>",
    ]
    for value, text in up:
        parts.append(f"<path d='M{x(0)} {y(value)}H{_WIDTH - _RIGHT}' stroke='#ddd'/>")
        parts.append(f"<text x='{_LEFT - 8}' y='{y(value)}' text-anchor='end' {_STYLE}>{escape(text)}</text>")
    for at, text in across:
        below = _HEIGHT - _BOTTOM + 18
        parts.append(f"<text x='{x(at)}' y='{below}' text-anchor='middle' {_STYLE}>{escape(text)}</text>")
    for number, (name, points) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = "L".join(f"{x(at)} {y(value)}" for at, value in points)
        if path:
            parts.append(f"<path d='M{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>")
        at_x, at_y = _LEFT + 220 * number, _HEIGHT - 10
        parts.append(f"<rect x='{at_x}' y='{at_y - 9}' width='12' height='3' fill='{colour}'/>")
        parts.append(f"<text x='{at_x + 18}' y='{at_y - 3}' {_STYLE}>{escape(name)}</text>")
    return "\n".join([*parts, "</svg>", ""])
