"""What `genie submit` takes beside the command: how, where and when a job is to run, and how that is shown.

`WishOptions` is the options as they were typed; `resources_of` and `wishes_of` read them, and an error names
the option. Not for: what wishes mean (model/job.py, docs/SCHEDULING.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from genie.cli.quantities import (
    count_text,
    parse_amount,
    parse_duration,
    parse_moment,
    parse_size,
    parse_whole,
    size_text,
)
from genie.errors import UsageError

if TYPE_CHECKING:
    from genie.model.job import Placement, Resources, Wishes

_Value = TypeVar("_Value")

_GPUS_MAX = 1024
_CPUS_MAX = 1_000_000
_WORKERS_MAX = 1024
_PRIORITY_MAX = 1000
_GRACE_S_MAX = 86400.0
_NAMED_MAX = 64
_SHARE_MIN = 0.01
_CAPABILITY = re.compile(r"([0-9]{1,2})(?:\.([0-9]{1,2}))?")
_LABEL_KEY = re.compile(r"[A-Za-z0-9._/-]{1,63}")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9._/-]{0,63}")
_MODEL_CHARACTERS_MAX = 1024

_WORKERS = "Workers"
_GPUS = "Which GPUs, and how much of them"
_NODES = "Which nodes"
_TIMES = "When it runs"


@dataclass(frozen=True, kw_only=True)
class WishOptions:
    """As typed. What was not given stays at what a job has without it."""

    workers: Annotated[
        str, typer.Option(metavar="N", help="Workers, started all at once.", rich_help_panel=_WORKERS)
    ] = "1"
    workers_min: Annotated[
        str | None,
        typer.Option(metavar="N", help="Start with so many at least.", rich_help_panel=_WORKERS),
    ] = None
    within: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="All in one node, rack or island, or anywhere.",
            rich_help_panel=_WORKERS,
        ),
    ] = "anywhere"
    spread: Annotated[
        bool, typer.Option("--spread", help="A node for each worker.", rich_help_panel=_WORKERS)
    ] = False
    gpu_share: Annotated[
        str | None,
        typer.Option(metavar="X", help="Part of each GPU, from 0.01 to 1.", rich_help_panel=_GPUS),
    ] = None
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of each GPU to hold.", rich_help_panel=_GPUS),
    ] = None
    gpu_model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="One of these models; may be repeated.", rich_help_panel=_GPUS),
    ] = None
    gpu_vendor: Annotated[
        str | None,
        typer.Option(metavar="VENDOR", help="Such as nvidia, amd or intel.", rich_help_panel=_GPUS),
    ] = None
    gpu_memory_min: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="GPUs that have so much memory in all.", rich_help_panel=_GPUS),
    ] = None
    capability: Annotated[
        str | None,
        typer.Option(metavar="X.Y", help="Compute capability, such as 8.0, or above.", rich_help_panel=_GPUS),
    ] = None
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Nodes with this label; may be repeated.", rich_help_panel=_NODES),
    ] = None
    node: Annotated[
        str | None, typer.Option(metavar="NODE", help="This node only.", rich_help_panel=_NODES)
    ] = None
    near: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOBNAME",
            help="Only where this job runs; may be repeated.",
            rich_help_panel=_NODES,
        ),
    ] = None
    apart: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOBNAME",
            help="Not where this job runs; may be repeated.",
            rich_help_panel=_NODES,
        ),
    ] = None
    priority: Annotated[
        str,
        typer.Option(metavar="N", help="From -1000 to 1000; the higher first.", rich_help_panel=_TIMES),
    ] = "0"
    preemptible: Annotated[
        bool,
        typer.Option(
            "--preemptible", help="May be stopped for others; starts again.", rich_help_panel=_TIMES
        ),
    ] = False
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="From SIGTERM to SIGKILL then; 30s without it.", rich_help_panel=_TIMES
        ),
    ] = None
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="End it after so long; short ones fill gaps.",
            rich_help_panel=_TIMES,
        ),
    ] = None
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="Be over in 2h, or by 2030-01-31T18:00.",
            rich_help_panel=_TIMES,
        ),
    ] = None


def resources_of(options: WishOptions, *, gpus: str, cpus: str, memory: str | None) -> Resources:
    """What each worker holds, or a UsageError that names the option that is wrong."""
    from genie.model.job import Resources

    share = 1.0
    if options.gpu_share is not None:
        share = parse_amount(options.gpu_share, what="--gpu-share", low=_SHARE_MIN, high=1)
    return Resources(
        gpus=parse_whole(gpus, what="--gpus", low=0, high=_GPUS_MAX),
        gpu_milli=round(share * 1000),
        gpu_memory_bytes=_size(options.gpu_memory, what="--gpu-memory"),
        cpus=parse_amount(cpus, what="--cpus", high=_CPUS_MAX),
        memory_bytes=_size(memory, what="--memory"),
    )


def wishes_of(options: WishOptions, *, gpus: int, now: float) -> Wishes:
    """The rest of the options, or a UsageError that names the one that is wrong.

    `gpus` is what each worker holds, `now` what a deadline counts from.
    """
    from genie.model.job import Spread, Wishes, Within

    workers = parse_whole(options.workers, what="--workers", low=1, high=_WORKERS_MAX)
    workers_min, limit, deadline = options.workers_min, options.time_limit, options.deadline
    wishes = Wishes(
        workers=workers,
        workers_min=0 if workers_min is None else _workers_min(workers_min, workers),
        within=Within(_choice(options.within, what="--within", allowed=list(Within))),
        spread=Spread.SPREAD if options.spread else Spread.PACK,
        near=_names(options.near, what="--near"),
        apart=_names(options.apart, what="--apart"),
        gpu_models=_models(options.gpu_model),
        vendor=_vendor(options.gpu_vendor),
        gpu_memory_min_bytes=_size(options.gpu_memory_min, what="--gpu-memory-min"),
        capability_min=_capability(options.capability),
        labels=_labels(options.label),
        priority=parse_whole(options.priority, what="--priority", low=-_PRIORITY_MAX, high=_PRIORITY_MAX),
        preemptible=options.preemptible,
        grace_s=_grace_s(options.grace),
        time_limit_s=None if limit is None else parse_duration(limit, what="--time-limit"),
        deadline_at=None if deadline is None else parse_moment(deadline, what="--deadline", now=now),
    )
    _check_together(options, wishes, gpus=gpus)
    return wishes


def asked_text(resources: Resources, wishes: Wishes) -> str:
    """What a job holds while it runs: `4 workers of 8 GPUs, 2 CPUs`."""
    parts = []
    if resources.gpus:
        share = "" if resources.gpu_milli == 1000 else f" at {resources.gpu_milli / 1000:g}"
        size = f" with {size_text(resources.gpu_memory_bytes)}" if resources.gpu_memory_bytes else ""
        parts.append(f"{count_text(resources.gpus, 'GPU')}{share}{size}")
    if resources.cpus:
        parts.append(f"{resources.cpus:g} CPU{'' if resources.cpus == 1 else 's'}")
    if resources.memory_bytes:
        parts.append(size_text(resources.memory_bytes))
    each = ", ".join(parts)
    if wishes.workers == 1:
        return each or "-"
    least = wishes.workers_min or wishes.workers
    few = "" if least == wishes.workers else f"{least} to "
    return f"{few}{count_text(wishes.workers, 'worker')}{f' of {each}' if each else ''}"


def places_text(placements: Sequence[Placement]) -> str:
    """Where all workers are: `n1: 0-7, n2: 0-3` with accelerators, and `n1, n2 (2 workers)` without."""
    nodes: dict[str, list[Placement]] = {}
    for placement in placements:
        nodes.setdefault(placement.node_id, []).append(placement)
    return ", ".join(f"{node_id}{_on_node_text(there)}" for node_id, there in nodes.items())


def _on_node_text(there: Sequence[Placement]) -> str:
    if gpu_ids := sorted({gpu_id for placement in there for gpu_id in placement.gpu_ids}):
        return f": {_ranges_text(gpu_ids)}"
    return f" ({len(there)} workers)" if len(there) > 1 else ""


def _ranges_text(numbers: Sequence[int]) -> str:
    """`0-3 6` for 0, 1, 2, 3 and 6."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def gpus_text(resources: Resources, wishes: Wishes) -> str:
    """The number of GPUs, for a narrow column: 2, 0.5 or 4x8."""
    each = f"{resources.gpus * resources.gpu_milli / 1000:g}"
    return each if wishes.workers == 1 else f"{wishes.workers}x{each}"


def _check_together(options: WishOptions, wishes: Wishes, *, gpus: int) -> None:
    from genie.model.job import Within

    if not gpus:
        of_gpus = {
            "--gpu-share": options.gpu_share,
            "--gpu-memory": options.gpu_memory,
            "--gpu-model": options.gpu_model,
            "--gpu-vendor": options.gpu_vendor,
            "--gpu-memory-min": options.gpu_memory_min,
            "--capability": options.capability,
            "--within island": wishes.within is Within.ISLAND,
        }
        if useless := next((option for option, given in of_gpus.items() if given), None):
            raise UsageError(f"{useless} without GPUs", hint="say how many: --gpus 1")
    if options.grace is not None and not wishes.preemptible:
        raise UsageError(
            "--grace without --preemptible: nobody stops this job for others",
            hint="give --preemptible too, or leave --grace out",
        )
    if options.spread and wishes.workers > 1 and wishes.within in (Within.NODE, Within.ISLAND):
        raise UsageError(
            f"--spread and --within {wishes.within} exclude each other", hint="leave one of them out"
        )


def _workers_min(text: str, workers: int) -> int:
    return parse_whole(text, what="--workers-min", low=1, high=workers)


def _grace_s(text: str | None) -> float:
    from genie.model.job import Wishes

    if text is None:
        return Wishes().grace_s
    return parse_duration(text, what="--grace", none_too=True, high_s=_GRACE_S_MAX)


def _size(text: str | None, *, what: str) -> int:
    return 0 if text is None else parse_size(text, what=what)


def _choice(text: str, *, what: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        raise UsageError(f"{what} {text[:80]!r} is not known", hint=f"allowed: {', '.join(allowed)}")
    return text


def _vendor(text: str | None) -> str:
    from genie.model.node import Vendor

    return "" if text is None else _choice(text.lower(), what="--gpu-vendor", allowed=list(Vendor))


def _names(given: list[str] | None, *, what: str) -> tuple[str, ...]:
    from genie.model.names import checked_name

    return tuple(_each(given, lambda name: checked_name(name, what=what), what=what))


def _models(given: list[str] | None) -> tuple[str, ...]:
    return tuple(_each(given, _model, what="--gpu-model"))


def _model(name: str) -> str:
    if not name.strip() or not name.isprintable() or len(name) > _MODEL_CHARACTERS_MAX:
        raise UsageError(
            f"--gpu-model {name[:80]!r} is not a name of GPUs", hint="write it as 'genie nodes' shows it"
        )
    return name


def _labels(given: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in _each(given, _label, what="--label"):
        if found.setdefault(key, value) != value:
            raise UsageError(
                f"--label {key}={found[key]} and --label {key}={value} exclude each other",
                hint="leave one of them out: a node has one value for each label",
            )
    return found


def _label(pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals or not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
        raise UsageError(
            f"--label {pair[:80]!r} is not a label",
            hint="write KEY=VALUE, each of at most 63 letters, digits, '.', '_', '-' or '/'",
        )
    return key, value


def _capability(text: str | None) -> tuple[int, int]:
    if text is None:
        return (0, 0)
    found = _CAPABILITY.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--capability {text[:80]!r} is not a compute capability", hint="write one such as 8.0 or 9.0"
        )
    return int(found[1]), int(found[2] or 0)


def _each(given: list[str] | None, read: Callable[[str], _Value], *, what: str) -> list[_Value]:
    if given is not None and len(given) > _NAMED_MAX:
        raise UsageError(f"{what} is given {len(given)} times", hint=f"at most {_NAMED_MAX} times")
    return [read(text) for text in given or ()]
