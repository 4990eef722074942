"""Jobs: submit, jobs, logs, cancel.

`genie submit` prints the job id on standard output and nothing else there, so that scripts can
keep it; with `--wait` the job's own output follows instead, and its exit code becomes ours.
Not for: what jobs are (model/job.py) and how requests travel (cluster/client.py).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import INTERRUPTED, AsJson, Invocation, app, command
from genie.cli.interrupts import caught_interrupts
from genie.cli.quantities import duration_text, parse_whole
from genie.cli.wishes import WishOptions, gpus_text, places_text, resources_of, wishes_of
from genie.errors import GenieError, JobNotFoundError, UnreachableError, UsageError

if TYPE_CHECKING:
    from genie.cluster.client import ClusterClient
    from genie.config import Settings
    from genie.model.job import Job, JobSpec

_JOB_COLUMNS = ("job", "name", "state", "gpus", "node", "age", "exit", "reason")
_STATES = ("queued", "placing", "running", "succeeded", "failed", "cancelled", "lost")
_JOB_SPARE = ("age", "gpus", "exit")
_LIMIT_MAX = 1000
_RUN_MAX = 1_000_000
_NAME_CHARACTERS_MAX = 63


@command(
    app,
    "submit",
    example="genie submit --gpus 1 --workdir . -- python train.py",
    # What stands behind CMD belongs to the job, options included.
    context_settings={"allow_interspersed_args": False},
)
def submit(
    invocation: Invocation,
    *,
    argv: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD", help="The program and its arguments.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the job; the program's name when not given.")
    ] = None,
    gpus: Annotated[str, typer.Option(metavar="N", help="Accelerators of each worker.")] = "0",
    cpus: Annotated[str, typer.Option(metavar="X", help="Processors of each, such as 0.5.")] = "0",
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of each, such as 4GiB.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Variable for the job; may be repeated.")
    ] = None,
    workdir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory to send along; the job starts in a copy of it, and without it in an empty "
            "directory of its own. .gitignore is honoured.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show its output, and end with its exit code.")
    ] = False,
    as_json: AsJson = False,
    options: WishOptions,
) -> None:
    """Queue a command to run on the cluster, and print the job's id.

    With --wait, its output goes to standard output. Ctrl-C cancels it; a second Ctrl-C leaves at once.

    While it waits, 'genie explain JOB' says for what.
    """
    if as_json and wait:
        raise UsageError("--json and --wait exclude each other", hint="take --json, then 'genie logs -f JOB'")
    spec = job_spec(
        argv=argv or [],
        name=name,
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        env=env or [],
        options=options,
        now=time.time(),
    )
    if workdir is not None and not workdir.is_dir():
        raise UsageError(
            f"--workdir {str(workdir)!r} is not a directory", hint="give a directory that exists"
        )
    settings = invocation.load_settings()
    if wait:
        raise typer.Exit(asyncio.run(_submit_and_wait(settings, spec, workdir)))
    job = asyncio.run(_submit(settings, spec, workdir))
    if as_json:
        output.write_json(output.as_object(job))
    else:
        output.write_line(job.job_id)
    _say_why_waiting(job)


@command(app, "jobs", example="genie jobs --all --state failed")
def jobs(
    invocation: Invocation,
    *,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended, too.")] = False,
    state: Annotated[
        list[str] | None, typer.Option(metavar="STATE", help="Only these states; may be repeated.")
    ] = None,
    limit: Annotated[str, typer.Option(metavar="N", help="Newest jobs to show.")] = "100",
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first: those that wait or run, unless told otherwise."""
    wanted = _checked_states(state or [])
    most = parse_whole(limit, what="--limit", low=1, high=_LIMIT_MAX)
    settings = invocation.load_settings()
    found, more = asyncio.run(_list(settings, wanted=wanted, everything=everything, limit=most))
    if as_json:
        output.write_json({"jobs": [output.as_object(job) for job in found], "more": more})
        return
    if not found:
        hint = "" if everything or wanted else "; --all shows those that have ended"
        output.say(f"no jobs{hint}")
        return
    now = time.time()
    output.write_table(_JOB_COLUMNS, [_row(job, now=now) for job in found], spare=_JOB_SPARE)
    if more:
        output.say(f"older jobs are left out; --limit shows more than {most}")


@command(app, "logs", example="genie logs -f j-7k2m4xab")
def logs(
    invocation: Invocation,
    *,
    job_id: Annotated[
        str,
        typer.Argument(
            metavar="JOB[.RANK]",
            help="Id of the job, or its name where only one has it; JOB.2: of one worker.",
        ),
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    run: Annotated[
        str | None, typer.Option(metavar="N", help="Of a job that was preempted: its first run is 1.")
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all-runs", help="Every run that is kept, in turn.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a job wrote: standard output and error, in the order in which they came.

    Of a job that was preempted and ran again, that of its last run; those of a few before are kept.
    """
    number = 0 if run is None else parse_whole(run, what="--run", low=1, high=_RUN_MAX)
    if all_runs and (number or follow):
        raise UsageError("--all-runs excludes --run and --follow", hint="give one of them")
    settings = invocation.load_settings()
    if all_runs:
        asyncio.run(_show_all_runs(settings, job_id, as_json=as_json))
    elif not as_json:
        asyncio.run(_show_log(settings, job_id, follow=follow, run=number))
    else:
        log = asyncio.run(_whole_log(settings, job_id, follow=follow, run=number))
        output.write_json({"job": job_id, "log": _text(log)})


@command(app, "cancel", example="genie cancel j-7k2m4xab")
def cancel(
    invocation: Invocation,
    *,
    job_ids: Annotated[
        list[str], typer.Argument(metavar="JOB...", help="Ids of jobs, or names where only one job has it.")
    ],
    as_json: AsJson = False,
) -> None:
    """Cancel jobs. One that waits is gone at once; one that runs gets SIGTERM, later SIGKILL."""
    cancelled, failed = asyncio.run(_cancel(invocation.load_settings(), job_ids))
    if as_json:
        output.write_json({"jobs": [output.as_object(job) for job in cancelled]})
    else:
        for job in cancelled:
            output.write_line(f"{job.job_id}  {job.state}  {output.one_line(job.reason)}")
    for error in failed:
        output.show_error(error, debug=invocation.debug)
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed))


def job_spec(
    *,
    argv: list[str],
    name: str | None,
    gpus: str,
    cpus: str,
    memory: str | None,
    env: list[str],
    options: WishOptions,
    now: float,
) -> JobSpec:
    """What the options ask for, or a UsageError that names the one that is wrong."""
    from genie.model.job import JobSpec
    from genie.model.names import checked_name, checked_node_id

    if not argv:
        raise UsageError(
            "there is no command to run", hint="write it behind --, as in: genie submit -- python train.py"
        )
    if any("\x00" in part for part in argv):
        raise UsageError("the command has a NUL character in it", hint="no program can be given one")
    resources = resources_of(options, gpus=gpus, cpus=cpus, memory=memory)
    return JobSpec(
        name=checked_name(name, what="--name") if name is not None else _name_from(argv[0]),
        command=tuple(argv),
        resources=resources,
        env=_environment(env),
        node_id="" if options.node is None else checked_node_id(options.node, what="--node"),
        wishes=wishes_of(options, gpus=resources.gpus, now=now),
    )


def _environment(pairs: list[str]) -> dict[str, str]:
    from genie.model.names import checked_env_key

    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        checked_env_key(key, what="--env")
        if not equals:
            raise UsageError(f"--env {key!r} has no value", hint=f"write --env {key}=VALUE")
        if "\x00" in value:
            raise UsageError(f"--env {key!r} has a NUL character in it", hint="no program can be given one")
        found[key] = value
    return found


def _name_from(program: str) -> str:
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in Path(program).name)
    return kept.strip("-")[:_NAME_CHARACTERS_MAX].strip("-") or "job"


def _checked_states(states: list[str]) -> list[str]:
    for state in states:
        if state not in _STATES:
            raise UsageError(
                f"--state {state!r} is not a state of jobs", hint=f"allowed: {', '.join(_STATES)}"
            )
    return states


async def _submit(settings: Settings, spec: JobSpec, workdir: Path | None) -> Job:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return await _send(client, spec, workdir)


async def _send(client: ClusterClient, spec: JobSpec, workdir: Path | None) -> Job:
    progress = output.ProgressLine()
    try:
        return await client.submit(spec, workdir=workdir, progress=progress)
    finally:
        progress.close()


async def _list(
    settings: Settings, *, wanted: list[str], everything: bool, limit: int
) -> tuple[list[Job], bool]:
    from genie.cluster.client import open_client
    from genie.model.job import FINAL_STATES, JobState

    active = tuple(state for state in JobState if state not in FINAL_STATES)
    states = tuple(JobState(state) for state in wanted) or (() if everything else active)
    async with open_client(settings) as client:
        return await client.list_jobs(states=states, limit=limit)


async def _cancel(settings: Settings, job_ids: list[str]) -> tuple[list[Job], list[GenieError]]:
    from genie.cluster.client import open_client

    cancelled: list[Job] = []
    failed: list[GenieError] = []
    async with open_client(settings) as client:
        for job_id in job_ids:
            try:
                cancelled.append(await client.cancel(job_id))
            except GenieError as error:
                failed.append(error)
    return cancelled, failed


async def _show_log(settings: Settings, job_id: str, *, follow: bool, run: int) -> None:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        async for data in client.follow_log(job_id, follow=follow, run=run):
            output.write_bytes(data)


async def _whole_log(settings: Settings, job_id: str, *, follow: bool, run: int) -> bytes:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return b"".join([data async for data in client.follow_log(job_id, follow=follow, run=run)])


async def _show_all_runs(settings: Settings, job_id: str, *, as_json: bool) -> None:
    """One that its node has not any more is an error that leaves the others as they are."""
    from genie.cluster.client import open_client

    found = []
    async with open_client(settings) as client:
        runs = (await client.read_log(job_id, bytes_max=1)).runs
        for run in runs:
            if not as_json:
                output.say(f"run {run}:")
            log = b""
            try:
                async for data in client.follow_log(job_id, follow=False, run=run):
                    log += data if as_json else b""
                    if not as_json:
                        output.write_bytes(data)
            except (JobNotFoundError, UnreachableError) as error:
                output.show_error(error, debug=False)
            found.append({"run": run, "log": _text(log)})
    if as_json:
        output.write_json({"job": job_id, "runs": found})


def _text(log: bytes) -> str:
    return log.decode("utf-8", errors="replace")


async def _submit_and_wait(settings: Settings, spec: JobSpec, workdir: Path | None) -> int:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        job = await _send(client, spec, workdir)
        output.say(f"job {job.job_id} ({job.spec.name})")
        _say_why_waiting(job)
        ended = await _follow_to_end(client, job.job_id)
        return INTERRUPTED if ended is None else _exit_code(ended)


async def _follow_to_end(client: ClusterClient, job_id: str) -> Job | None:
    """The job as it ended, after its output; None when a second Ctrl-C came first."""
    with caught_interrupts() as interrupts:
        async with asyncio.TaskGroup() as group:
            follow = group.create_task(_stream(client, job_id))
            watch = group.create_task(_cancel_on_interrupt(client, job_id, interrupts, follow))
            await asyncio.wait([follow])
            watch.cancel()
    if follow.cancelled():
        return None
    outcome = follow.result()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def _stream(client: ClusterClient, job_id: str) -> Job | GenieError | OSError:
    """Returns what went wrong instead of raising it: a TaskGroup would wrap it."""
    try:
        async for data in client.follow_log(job_id, follow=True):
            output.write_bytes(data)
        return await client.wait_job(job_id)
    except (GenieError, OSError) as error:
        return error


async def _cancel_on_interrupt(
    client: ClusterClient, job_id: str, interrupts: asyncio.Queue[None], follow: asyncio.Task[object]
) -> None:
    """The first Ctrl-C cancels the job and lets its last output through; the second leaves."""
    await interrupts.get()
    output.say(f"genie: cancelling job {job_id}; press Ctrl-C again to leave without waiting for its end")
    try:
        await client.cancel(job_id)
    except GenieError as error:
        output.show_error(error, debug=False)
    await interrupts.get()
    follow.cancel()


def _exit_code(job: Job) -> int:
    """The job's own exit code; 1 for one that has none because it was lost, cancelled or never ran."""
    from genie.model.job import JobState

    if job.state is JobState.SUCCEEDED:
        return 0
    reason = output.one_line(job.reason).removeprefix(f"{job.state}: ")
    output.say(f"genie: job {job.job_id} {job.state}: {reason}")
    if job.state is JobState.FAILED and job.exit_code is not None:
        # A job that a signal ended has a negative code, which shells write as 128 + signal.
        return job.exit_code if job.exit_code > 0 else 128 - job.exit_code
    return 1


def _say_why_waiting(job: Job) -> None:
    from genie.model.job import JobState

    if job.state is JobState.QUEUED and job.reason:
        output.say(f"queued: {output.one_line(job.reason)}")


def _row(job: Job, *, now: float) -> tuple[str, ...]:
    return (
        job.job_id,
        job.spec.name,
        job.state.value,
        gpus_text(job.spec.resources, job.spec.wishes),
        places_text(job.placements) or "-",
        duration_text(now - job.submitted_at),
        "-" if job.exit_code is None else str(job.exit_code),
        job.reason,
    )
