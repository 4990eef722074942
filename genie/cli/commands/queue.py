"""Commands for pending jobs: queue and explain. Read-only.

Pending reasons are computed by scheduler/explain.py.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.placement_options import format_placements, format_request
from genie.cli.quantities import format_count, format_duration, parse_integer
from genie.cli.reply_age import open_client_and_report_age
from genie.model.limits import LIST_MAX

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.model.job import Job
    from genie.model.messages import ExplainReply, NodesRuledOut, QueuedJob, QueueReply

_QUEUE_COLUMNS = (
    "#",
    "job",
    "name",
    "tenant",
    "request",
    "priority",
    "age",
    "expected start",
    "pending reason",
)
_QUEUE_COLUMNS_DROPPED_IF_NARROW = ("priority", "age", "name")
_BLOCKED_NODES_COLUMNS = ("node count", "nodes", "blocked", "reason")
_STATE_TRANSITION_COLUMNS = ("time", "state", "reason")
_NODE_NAMES_SHOWN_MAX = 3


@command(app, "queue", example="genie queue --limit 20")
def queue(
    invocation: Invocation,
    *,
    limit: Annotated[str, typer.Option(metavar="N", help="Maximum number of jobs.")] = "100",
    as_json: JsonOption = False,
) -> None:
    """List pending jobs in scheduling order, with the pending reason of each."""
    most = parse_integer(limit, what="--limit", low=1, high=LIST_MAX)
    reply, is_owner = asyncio.run(_fetch_queue_and_is_owner(invocation.load_settings(), limit=most))
    if as_json:
        output.write_json(output.struct_to_json(reply))
        return
    if not reply.jobs:
        output.print_message("no pending jobs" if not reply.waiting else "no pending jobs in your tenant")
        return
    now = time.time()
    rows = [_queue_row(job, now=now) for job in reply.jobs]
    output.write_table(
        _QUEUE_COLUMNS,
        rows,
        droppable=_QUEUE_COLUMNS_DROPPED_IF_NARROW,
        omitted=() if is_owner else ("tenant",),
    )
    if reply.more:
        output.print_message(f"showing the first {len(reply.jobs)}; {reply.waiting} jobs are pending")


@command(app, "explain", example="genie explain j-7k2m4xab")
def explain(
    invocation: Invocation,
    *,
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Job ID or unique job name.")],
    as_json: JsonOption = False,
) -> None:
    """Show why a job is pending, which nodes are blocked and why, and the expected start.

    For a running or finished job, shows its placement and history.
    """
    reply = asyncio.run(_fetch_explanation(invocation.load_settings(), job_id))
    if as_json:
        output.write_json(output.struct_to_json(reply))
        return
    now = time.time()
    output.write_fields([*_job_fields(reply.job, now=now), *_reason_and_start_fields(reply, now=now)])
    if reply.ruled_out:
        output.write_line("")
        output.write_table(_BLOCKED_NODES_COLUMNS, [_blocked_nodes_row(each) for each in reply.ruled_out])
        if reply.ruled_out_more:
            output.print_message(
                f"{format_count(reply.ruled_out_more, 'node')} more are blocked for other reasons"
            )
    output.write_line("")
    steps = [(_local_time_text(step.at), step.state.value, step.reason) for step in reply.job.history]
    output.write_table(_STATE_TRANSITION_COLUMNS, steps)


async def _fetch_queue_and_is_owner(settings: Settings, *, limit: int) -> tuple[QueueReply, bool]:
    async with open_client_and_report_age(settings) as client:
        return await client.queue(limit=limit), client.is_owner


async def _fetch_explanation(settings: Settings, job_id: str) -> ExplainReply:
    async with open_client_and_report_age(settings) as client:
        return await client.explain(job_id)


def _queue_row(job: QueuedJob, *, now: float) -> tuple[str, ...]:
    return (
        str(job.position),
        job.job_id,
        job.name,
        job.tenant,
        format_request(job.resources, job.constraints),
        str(job.constraints.priority),
        format_duration(now - job.submitted_at),
        "-" if job.starts_at is None else _time_until_text(job.starts_at - now),
        job.reason,
    )


def _job_fields(job: Job, *, now: float) -> list[tuple[str, str]]:
    facts = [
        ("job", f"{job.job_id} ({job.spec.name})"),
        ("state", f"{job.state}{_time_in_state_suffix(job, now=now)}"),
        ("request", format_request(job.spec.resources, job.spec.constraints)),
    ]
    if job.placements:
        facts.append(("placement", format_placements(job.placements)))
        if why := _latest_placement_reason(job):
            facts.append(("placement reason", why))
    return facts


def _reason_and_start_fields(reply: ExplainReply, *, now: float) -> list[tuple[str, str]]:
    from genie.model.job import JobState

    job = reply.job
    if job.state is not JobState.QUEUED:
        return [("reason", job.reason)]
    facts = [("pending reason", job.reason)]
    if reply.ahead is None:
        return facts
    return [
        *facts,
        ("jobs ahead", str(reply.ahead)),
        ("expected start", _expected_start_text(reply, now=now)),
    ]


def _expected_start_text(reply: ExplainReply, *, now: float) -> str:
    why = reply.starts_why
    if reply.starts_at is None:
        return f"unknown{f': {why}' if why else ''}"
    when = f"{_time_until_text(reply.starts_at - now, about=True)} ({_local_time_text(reply.starts_at)})"
    return f"{when}: {why}" if why else f"at the latest {when}, if running jobs use their full time limit"


def _time_in_state_suffix(job: Job, *, now: float) -> str:
    if job.ended_at is not None:
        return f", {format_duration(now - job.ended_at)} ago"
    since = job.history[-1].at if job.history else job.submitted_at
    return f" for {format_duration(now - since)}"


def _latest_placement_reason(job: Job) -> str:
    """Return the reason of the latest placement."""
    from genie.model.job import JobState

    steps = [step.reason for step in job.history if step.state is JobState.PLACING]
    return steps[-1] if steps else ""


def _blocked_nodes_row(blocked: NodesRuledOut) -> tuple[str, ...]:
    more = blocked.count - _NODE_NAMES_SHOWN_MAX
    names = ", ".join(blocked.nodes[:_NODE_NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
    return (
        str(blocked.count),
        names,
        "permanently" if blocked.is_permanent else "temporarily",
        blocked.reason,
    )


def _time_until_text(seconds: float, *, about: bool = False) -> str:
    return f"in {'about ' if about else ''}{format_duration(seconds)}" if seconds >= 1 else "now"


def _local_time_text(moment: float) -> str:
    """Format a time in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
