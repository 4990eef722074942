"""Plots a simulated run as SVG: utilization over time and the distribution of wait times.

SVG needs no plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from genie.sim.events import SimulationResult, UsageSample
from genie.sim.metrics import is_large_gang, percentile

_CHART_WIDTH, _CHART_HEIGHT = 800, 320
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 60, 20, 40, 50
_POINTS_PER_LINE = 400
_TEXT_STYLE = "font-family='sans-serif' font-size='12' fill='#333'"
_LINE_COLOURS = ("#1b6ca8", "#c8553d")
_TIME_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))

Points = Sequence[tuple[float, float]]


def plot_utilisation(run: SimulationResult) -> str:
    """Plot the fraction of GPUs in use and the number of pending jobs over time, in 400 steps."""
    used = _mean_per_time_step(
        run.usage_samples,
        [sample.used_gpu_milli / max(sample.available_gpu_milli, 1) for sample in run.usage_samples],
    )
    waiting = _mean_per_time_step(
        run.usage_samples, [float(sample.pending_jobs) for sample in run.usage_samples]
    )
    most = max((value for _, value in waiting), default=0.0)
    scaled = [(at, value / most if most else 0.0) for at, value in waiting]
    return _render_chart(
        "GPUs in use over time",
        [("GPUs in use", used), (f"pending jobs (100% = {most:.0f})", scaled)],
        x_ticks=_time_ticks(used[-1][0] if used else 0.0),
        y_ticks=[(share / 100, f"{share}%") for share in range(0, 101, 20)],
    )


def plot_wait_times(run: SimulationResult) -> str:
    """Plot the cumulative distribution of wait times, for all jobs and large gangs, on a log scale."""
    started = [it for it in run.job_results if it.first_started_s is not None]
    waits = [
        (it.job, max(it.first_started_s or 0.0, it.job.submitted_s) - it.job.submitted_s) for it in started
    ]
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
        (math.log10(1 + at_s) / top, _format_duration(at_s))
        for at_s in (10, 60, 600, 3600, 36_000, 86_400, 864_000)
        if math.log10(1 + at_s) <= top
    ]
    return _render_chart(
        "Cumulative distribution of wait times",
        lines,
        x_ticks=across,
        y_ticks=[(share / 100, f"{share}%") for share in range(0, 101, 20)],
    )


def _mean_per_time_step(usage: Sequence[UsageSample], values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the mean value of each time step."""
    if len(usage) < 2:
        return []
    first_s, span_s = usage[0].time_s, usage[-1].time_s - usage[0].time_s
    sums, step_s = [0.0] * _POINTS_PER_LINE, span_s / _POINTS_PER_LINE
    for number, value in enumerate(values[:-1]):
        begin, end = usage[number].time_s - first_s, usage[number + 1].time_s - first_s
        at = min(int(begin / step_s), _POINTS_PER_LINE - 1)
        while begin < end and at < _POINTS_PER_LINE:
            until = end if at == _POINTS_PER_LINE - 1 else min(end, (at + 1) * step_s)
            sums[at] += value * max(until - begin, 0.0)
            begin, at = until, at + 1
    return [((at + 0.5) / _POINTS_PER_LINE * span_s, total / step_s) for at, total in enumerate(sums)]


def _time_ticks(span_s: float) -> list[tuple[float, str]]:
    return [(span_s * part / 5, _format_duration(span_s * part / 5)) for part in range(6)]


def _format_duration(seconds: float) -> str:
    unit, unit_s = next(((unit, one) for unit, one in _TIME_UNITS if seconds >= one), ("s", 1.0))
    return f"{seconds / unit_s:.3g} {unit}"


def _render_chart(
    title: str,
    lines: Sequence[tuple[str, Points]],
    *,
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
) -> str:
    right = max([at for _, points in lines for at, _ in points] + [at for at, _ in x_ticks] + [1e-9])

    def x(at: float) -> str:
        return f"{_MARGIN_LEFT + at / right * (_CHART_WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT):.1f}"

    def y(value: float) -> str:
        return (
            f"{_CHART_HEIGHT - _MARGIN_BOTTOM - value * (_CHART_HEIGHT - _MARGIN_TOP - _MARGIN_BOTTOM):.1f}"
        )

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_CHART_WIDTH}' height='{_CHART_HEIGHT}' "
        f"viewBox='0 0 {_CHART_WIDTH} {_CHART_HEIGHT}'>",
        f"<rect width='{_CHART_WIDTH}' height='{_CHART_HEIGHT}' fill='#fff'/>",
        f"<text x='{_MARGIN_LEFT}' y='20' {_TEXT_STYLE} font-weight='bold'>{escape(title)}</text>",
    ]
    for value, text in y_ticks:
        parts.append(f"<path d='M{x(0)} {y(value)}H{_CHART_WIDTH - _MARGIN_RIGHT}' stroke='#ddd'/>")
        parts.append(
            f"<text x='{_MARGIN_LEFT - 8}' y='{y(value)}' text-anchor='end' "
            f"{_TEXT_STYLE}>{escape(text)}</text>"
        )
    for at, text in x_ticks:
        below = _CHART_HEIGHT - _MARGIN_BOTTOM + 18
        parts.append(
            f"<text x='{x(at)}' y='{below}' text-anchor='middle' {_TEXT_STYLE}>{escape(text)}</text>"
        )
    for number, (name, points) in enumerate(lines):
        colour = _LINE_COLOURS[number % len(_LINE_COLOURS)]
        path = "L".join(f"{x(at)} {y(value)}" for at, value in points)
        if path:
            parts.append(f"<path d='M{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>")
        at_x, at_y = _MARGIN_LEFT + 220 * number, _CHART_HEIGHT - 10
        parts.append(f"<rect x='{at_x}' y='{at_y - 9}' width='12' height='3' fill='{colour}'/>")
        parts.append(f"<text x='{at_x + 18}' y='{at_y - 3}' {_TEXT_STYLE}>{escape(name)}</text>")
    return "\n".join([*parts, "</svg>", ""])
