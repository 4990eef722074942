"""Waiting: queue and explain. Reads only.

Not for: why a job waits (scheduler/explain.py); here that is only shown.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import AsJson, Invocation, app, command
from genie.cli.quantities import count_text, duration_text, parse_whole
from genie.cli.wishes import asked_text, places_text

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.model.job import Job
    from genie.model.messages import ExplainReply, NodesRuledOut, QueuedJob, QueueReply

_QUEUE_COLUMNS = ("#", "job", "name", "tenant", "asks for", "priority", "waits", "expected", "reason")
_QUEUE_SPARE = ("priority", "waits", "name")
_TENANT = _QUEUE_COLUMNS.index("tenant")
_RULED_OUT_COLUMNS = ("nodes", "names", "for", "because")
_HISTORY_COLUMNS = ("when", "state", "reason")
_LIMIT_MAX = 1000
_NAMES_SHOWN = 3


@command(app, "queue", example="genie queue --limit 20")
def queue(
    invocation: Invocation,
    *,
    limit: Annotated[str, typer.Option(metavar="N", help="First jobs to show.")] = "100",
    as_json: AsJson = False,
) -> None:
    """List jobs that wait, in the order in which they are considered, and what each waits for."""
    most = parse_whole(limit, what="--limit", low=1, high=_LIMIT_MAX)
    reply, is_owner = asyncio.run(_fetch_queue(invocation.load_settings(), limit=most))
    if as_json:
        output.write_json(output.as_object(reply))
        return
    if not reply.jobs:
        output.say("nothing waits" if not reply.waiting else "nothing of yours waits")
        return
    now = time.time()
    rows = [_queue_row(job, now=now) for job in reply.jobs]
    columns: tuple[str, ...] = _QUEUE_COLUMNS
    if not is_owner:
        columns, rows = _without_tenant(columns), [_without_tenant(row) for row in rows]
    output.write_table(columns, rows, spare=_QUEUE_SPARE)
    if reply.more:
        output.say(f"later ones are left out; {reply.waiting} wait in all")


@command(app, "explain", example="genie explain j-7k2m4xab")
def explain(
    invocation: Invocation,
    *,
    job_id: Annotated[
        str, typer.Argument(metavar="JOB", help="Id of the job, or its name where only one has it.")
    ],
    as_json: AsJson = False,
) -> None:
    """Say what a job waits for, what rules out which nodes, and when it would start if nothing changed.

    Of one that runs or is over: where, since when, and how it came there.
    """
    reply = asyncio.run(_fetch_explanation(invocation.load_settings(), job_id))
    if as_json:
        output.write_json(output.as_object(reply))
        return
    now = time.time()
    output.write_facts([*_facts(reply.job, now=now), *_waiting_facts(reply, now=now)])
    if reply.ruled_out:
        output.write_line("")
        output.write_table(_RULED_OUT_COLUMNS, [_ruled_out_row(each) for each in reply.ruled_out])
        if reply.ruled_out_more:
            output.say(f"{count_text(reply.ruled_out_more, 'node')} more for further reasons")
    output.write_line("")
    steps = [(_at(step.at), step.state.value, step.reason) for step in reply.job.history]
    output.write_table(_HISTORY_COLUMNS, steps)


async def _fetch_queue(settings: Settings, *, limit: int) -> tuple[QueueReply, bool]:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return await client.queue(limit=limit), client.is_owner


async def _fetch_explanation(settings: Settings, job_id: str) -> ExplainReply:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return await client.explain(job_id)


def _queue_row(job: QueuedJob, *, now: float) -> tuple[str, ...]:
    return (
        str(job.position),
        job.job_id,
        job.name,
        job.tenant,
        asked_text(job.resources, job.wishes),
        str(job.wishes.priority),
        duration_text(now - job.submitted_at),
        "-" if job.starts_at is None else _in_text(job.starts_at - now),
        job.reason,
    )


def _without_tenant(cells: tuple[str, ...]) -> tuple[str, ...]:
    return cells[:_TENANT] + cells[_TENANT + 1 :]


def _facts(job: Job, *, now: float) -> list[tuple[str, str]]:
    facts = [
        ("job", f"{job.job_id} ({job.spec.name})"),
        ("state", f"{job.state}{_since_text(job, now=now)}"),
        ("asks for", asked_text(job.spec.resources, job.spec.wishes)),
    ]
    if job.placements:
        facts.append(("where", places_text(job.placements)))
        if why := _why_there(job):
            facts.append(("why there", why))
    return facts


def _waiting_facts(reply: ExplainReply, *, now: float) -> list[tuple[str, str]]:
    from genie.model.job import JobState

    job = reply.job
    if job.state is not JobState.QUEUED:
        return [("reason", job.reason)]
    facts = [("waits for", job.reason)]
    if reply.ahead is None:
        return facts
    return [*facts, ("ahead", count_text(reply.ahead, "job")), ("starts", _starts_text(reply, now=now))]


def _starts_text(reply: ExplainReply, *, now: float) -> str:
    why = reply.starts_why
    if reply.starts_at is None:
        return f"nobody can say{f': {why}' if why else ''}"
    when = f"{_in_text(reply.starts_at - now, about=True)} ({_at(reply.starts_at)})"
    return f"{when}: {why}" if why else f"at the latest {when}, if jobs run to their limits"


def _since_text(job: Job, *, now: float) -> str:
    if job.ended_at is not None:
        return f", {duration_text(now - job.ended_at)} ago"
    since = job.history[-1].at if job.history else job.submitted_at
    return f" for {duration_text(now - since)}"


def _why_there(job: Job) -> str:
    """What the decision said that put it there."""
    from genie.model.job import JobState

    steps = [step.reason for step in job.history if step.state is JobState.PLACING]
    return steps[-1] if steps else ""


def _ruled_out_row(several: NodesRuledOut) -> tuple[str, ...]:
    more = several.count - _NAMES_SHOWN
    names = ", ".join(several.nodes[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return (str(several.count), names, "good" if several.ever else "now", several.reason)


def _in_text(seconds: float, *, about: bool = False) -> str:
    return f"in {'about ' if about else ''}{duration_text(seconds)}" if seconds >= 1 else "now"


def _at(moment: float) -> str:
    """By the local clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
