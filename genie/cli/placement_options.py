"""The resource and placement options of `genie submit`, and how requests and placements are printed.

`PlacementOptions` holds the options as text; `parse_resources` and `parse_constraints` parse them. Errors
name the option. The meaning of the constraints is in model/job.py and docs/SCHEDULING.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from genie.cli.quantities import (
    format_count,
    format_size,
    parse_duration,
    parse_future_time,
    parse_integer,
    parse_labels,
    parse_number,
    parse_size,
)
from genie.errors import UsageError
from genie.model.limits import (
    CPUS_MAX,
    GRACE_S_MAX,
    JOB_LIST_ENTRIES_MAX,
    PRIORITY_MAX,
    TEXT_CHARS_MAX,
    WORKERS_MAX,
)

if TYPE_CHECKING:
    from genie.model.job import Placement, PlacementConstraints, Resources

_Value = TypeVar("_Value")

_GPU_SHARE_MIN = 0.01
_COMPUTE_CAPABILITY_PATTERN = re.compile(r"([0-9]{1,2})(?:\.([0-9]{1,2}))?")

_WORKERS_PANEL = "Workers"
_GPUS_PANEL = "GPUs"
_NODES_PANEL = "Nodes"
_SCHEDULING_PANEL = "Scheduling"


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Option values as text; None means the default of a job."""

    workers: Annotated[
        str,
        typer.Option(
            metavar="N", help="Number of workers; all start together.", rich_help_panel=_WORKERS_PANEL
        ),
    ] = "1"
    workers_min: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Minimum number of workers to start (default: all).",
            rich_help_panel=_WORKERS_PANEL,
        ),
    ] = None
    within: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Place all workers in one island, node or rack, or anywhere.",
            rich_help_panel=_WORKERS_PANEL,
        ),
    ] = "anywhere"
    spread: Annotated[
        bool,
        typer.Option(
            "--spread", help="Place each worker on a different node.", rich_help_panel=_WORKERS_PANEL
        ),
    ] = False
    gpu_share: Annotated[
        str | None,
        typer.Option(
            metavar="X",
            help="Fraction of each GPU, from 0.01 to 1 (default: 1).",
            rich_help_panel=_GPUS_PANEL,
        ),
    ] = None
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="GPU memory to allocate on each GPU, such as 8GiB.",
            rich_help_panel=_GPUS_PANEL,
        ),
    ] = None
    gpu_model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Allowed GPU model; repeatable.", rich_help_panel=_GPUS_PANEL),
    ] = None
    gpu_vendor: Annotated[
        str | None,
        typer.Option(
            metavar="VENDOR", help="GPU vendor, such as nvidia, amd or intel.", rich_help_panel=_GPUS_PANEL
        ),
    ] = None
    gpu_memory_min: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Minimum total memory per GPU, such as 40GiB.", rich_help_panel=_GPUS_PANEL
        ),
    ] = None
    capability: Annotated[
        str | None,
        typer.Option(
            metavar="X.Y", help="Minimum compute capability, such as 8.0.", rich_help_panel=_GPUS_PANEL
        ),
    ] = None
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Required node label; repeatable.", rich_help_panel=_NODES_PANEL),
    ] = None
    node: Annotated[
        str | None, typer.Option(metavar="NODE", help="Required node.", rich_help_panel=_NODES_PANEL)
    ] = None
    near: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOBNAME",
            help="Use only nodes that run a job of this name; repeatable: any of them.",
            rich_help_panel=_NODES_PANEL,
        ),
    ] = None
    apart: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOBNAME",
            help="Avoid nodes that run a job of this name; repeatable.",
            rich_help_panel=_NODES_PANEL,
        ),
    ] = None
    priority: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Priority, from -1000 to 1000; higher starts first.",
            rich_help_panel=_SCHEDULING_PANEL,
        ),
    ] = "0"
    preemptible: Annotated[
        bool,
        typer.Option(
            "--preemptible",
            help="Allow preemption. A preempted job is queued again, and a command also if its node is lost.",
            rich_help_panel=_SCHEDULING_PANEL,
        ),
    ] = False
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Grace period on preemption (default: 30s).",
            rich_help_panel=_SCHEDULING_PANEL,
        ),
    ] = None
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Maximum run time, such as 90s, 15m or 2h; short jobs can be backfilled (default: none).",
            rich_help_panel=_SCHEDULING_PANEL,
        ),
    ] = None
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION|TIME",
            help="Finish within 2h, or by 2030-01-31T18:00.",
            rich_help_panel=_SCHEDULING_PANEL,
        ),
    ] = None


def parse_resources(options: PlacementOptions, *, gpus: str, cpus: str, memory: str | None) -> Resources:
    """Parse the resources per worker. Raises UsageError that names the invalid option."""
    from genie.model.job import Resources
    from genie.scheduler.placement.protocol import NODE_GPUS_MAX

    share = 1.0
    if options.gpu_share is not None:
        share = parse_number(options.gpu_share, what="--gpu-share", low=_GPU_SHARE_MIN, high=1)
    return Resources(
        gpus=parse_integer(gpus, what="--gpus", low=0, high=NODE_GPUS_MAX),
        gpu_milli=round(share * 1000),
        gpu_memory_bytes=_parse_optional_size(options.gpu_memory, what="--gpu-memory"),
        cpus=parse_number(cpus, what="--cpus", high=CPUS_MAX),
        memory_bytes=_parse_optional_size(memory, what="--memory"),
    )


def parse_constraints(options: PlacementOptions, *, gpus: int, now: float) -> PlacementConstraints:
    """Parse the other options. Raises UsageError that names the invalid option.

    `gpus` is the number per worker; a deadline is relative to `now`.
    """
    from genie.model.job import PlacementConstraints, Spread, Within

    workers = parse_integer(options.workers, what="--workers", low=1, high=WORKERS_MAX)
    workers_min, limit, deadline = options.workers_min, options.time_limit, options.deadline
    constraints = PlacementConstraints(
        workers=workers,
        workers_min=0 if workers_min is None else _parse_workers_min(workers_min, workers),
        within=Within(_parse_choice(options.within, what="--within", allowed=list(Within))),
        spread=Spread.SPREAD if options.spread else Spread.PACK,
        near=_parse_job_names(options.near, what="--near"),
        apart=_parse_job_names(options.apart, what="--apart"),
        gpu_models=_parse_gpu_models(options.gpu_model),
        vendor=_parse_vendor(options.gpu_vendor),
        gpu_memory_min_bytes=_parse_optional_size(options.gpu_memory_min, what="--gpu-memory-min"),
        capability_min=_parse_compute_capability(options.capability),
        labels=parse_labels(options.label),
        priority=parse_integer(options.priority, what="--priority", low=-PRIORITY_MAX, high=PRIORITY_MAX),
        preemptible=options.preemptible,
        grace_s=_parse_grace_s(options.grace),
        time_limit_s=None if limit is None else parse_duration(limit, what="--time-limit"),
        deadline_at=None if deadline is None else parse_future_time(deadline, what="--deadline", now=now),
    )
    _check_option_combinations(options, constraints, gpus=gpus)
    return constraints


def format_request(resources: Resources, constraints: PlacementConstraints) -> str:
    """Format a resource request: `4 workers of 8 GPUs, 2 CPUs`."""
    parts = []
    if resources.gpus:
        share = "" if resources.gpu_milli == 1000 else f" at {resources.gpu_milli / 1000:g}"
        size = f" with {format_size(resources.gpu_memory_bytes)}" if resources.gpu_memory_bytes else ""
        parts.append(f"{format_count(resources.gpus, 'GPU')}{share}{size}")
    if resources.cpus:
        parts.append(f"{resources.cpus:g} CPU{'' if resources.cpus == 1 else 's'}")
    if resources.memory_bytes:
        parts.append(format_size(resources.memory_bytes))
    each = ", ".join(parts)
    if constraints.workers == 1:
        return each or "-"
    least = constraints.workers_min or constraints.workers
    few = "" if least == constraints.workers else f"{least} to "
    return f"{few}{format_count(constraints.workers, 'worker')}{f' of {each}' if each else ''}"


def format_placements(placements: Sequence[Placement]) -> str:
    """Format placements: `n1: 0-7, n2: 0-3` with GPUs, `n1, n2 (2 workers)` without."""
    nodes: dict[str, list[Placement]] = {}
    for placement in placements:
        nodes.setdefault(placement.node_id, []).append(placement)
    return ", ".join(
        f"{node_id}{_format_gpus_or_workers_on_node(on_node)}" for node_id, on_node in nodes.items()
    )


def _format_gpus_or_workers_on_node(on_node: Sequence[Placement]) -> str:
    if gpu_ids := sorted({gpu_id for placement in on_node for gpu_id in placement.gpu_ids}):
        return f": {_format_number_ranges(gpu_ids)}"
    return f" ({len(on_node)} workers)" if len(on_node) > 1 else ""


def _format_number_ranges(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2, 3 and 6 as `0-3 6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def format_gpu_count(resources: Resources, constraints: PlacementConstraints) -> str:
    """Format the number of GPUs: 2, 0.5 or 4x8."""
    each = f"{resources.gpus * resources.gpu_milli / 1000:g}"
    return each if constraints.workers == 1 else f"{constraints.workers}x{each}"


def _check_option_combinations(
    options: PlacementOptions, constraints: PlacementConstraints, *, gpus: int
) -> None:
    from genie.model.job import Within

    if not gpus:
        of_gpus = {
            "--gpu-share": options.gpu_share,
            "--gpu-memory": options.gpu_memory,
            "--gpu-model": options.gpu_model,
            "--gpu-vendor": options.gpu_vendor,
            "--gpu-memory-min": options.gpu_memory_min,
            "--capability": options.capability,
            "--within island": constraints.within is Within.ISLAND,
        }
        if gpu_option := next((option for option, given in of_gpus.items() if given), None):
            raise UsageError(f"{gpu_option} requires GPUs", hint="request some: --gpus 1")
    if options.grace is not None and not constraints.preemptible:
        raise UsageError(
            "--grace requires --preemptible: other jobs are never preempted",
            hint="add --preemptible, or remove --grace",
        )
    if options.spread and constraints.workers > 1 and constraints.within in (Within.NODE, Within.ISLAND):
        raise UsageError(
            f"--spread and --within {constraints.within} are mutually exclusive", hint="remove one of them"
        )


def _parse_workers_min(text: str, workers: int) -> int:
    return parse_integer(text, what="--workers-min", low=1, high=workers)


def _parse_grace_s(text: str | None) -> float:
    from genie.model.job import PlacementConstraints

    if text is None:
        return PlacementConstraints().grace_s
    return parse_duration(text, what="--grace", zero_allowed=True, high_s=GRACE_S_MAX)


def _parse_optional_size(text: str | None, *, what: str) -> int:
    return 0 if text is None else parse_size(text, what=what)


def _parse_choice(text: str, *, what: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        raise UsageError(f"{what} {text[:80]!r} is invalid", hint=f"allowed: {', '.join(allowed)}")
    return text


def _parse_vendor(text: str | None) -> str:
    from genie.model.node import Vendor

    return "" if text is None else _parse_choice(text.lower(), what="--gpu-vendor", allowed=list(Vendor))


def _parse_job_names(given: list[str] | None, *, what: str) -> tuple[str, ...]:
    from genie.model.names import validate_name

    return tuple(_parse_repeated_option(given, lambda name: validate_name(name, what=what), what=what))


def _parse_gpu_models(given: list[str] | None) -> tuple[str, ...]:
    return tuple(_parse_repeated_option(given, _validate_gpu_model, what="--gpu-model"))


def _validate_gpu_model(name: str) -> str:
    if not name.strip() or not name.isprintable() or len(name) > TEXT_CHARS_MAX:
        raise UsageError(
            f"--gpu-model {name[:80]!r} is not a GPU model", hint="use a name listed by 'genie nodes'"
        )
    return name


def _parse_compute_capability(text: str | None) -> tuple[int, int]:
    if text is None:
        return (0, 0)
    found = _COMPUTE_CAPABILITY_PATTERN.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--capability {text[:80]!r} is not a compute capability",
            hint="give a version such as 8.0 or 9.0",
        )
    return int(found[1]), int(found[2] or 0)


def _parse_repeated_option(
    given: list[str] | None, read: Callable[[str], _Value], *, what: str
) -> list[_Value]:
    if given is not None and len(given) > JOB_LIST_ENTRIES_MAX:
        raise UsageError(f"{what} is given {len(given)} times", hint=f"at most {JOB_LIST_ENTRIES_MAX} times")
    return [read(text) for text in given or ()]
