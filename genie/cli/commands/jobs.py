"""Commands for jobs: submit, jobs, logs, cancel.

`genie submit` prints only the job ID to standard output, for scripts; with `--wait` it prints the output
of the job instead and exits with the exit code of the job.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import INTERRUPTED_EXIT_CODE, Invocation, JsonOption, app, command
from genie.cli.interrupts import catch_interrupts
from genie.cli.placement_options import (
    PlacementOptions,
    format_gpu_count,
    format_placements,
    parse_constraints,
    parse_resources,
)
from genie.cli.quantities import format_duration, parse_integer
from genie.cli.reply_age import open_client_and_report_age
from genie.errors import GenieError, JobNotFoundError, UnreachableError, UsageError
from genie.model.limits import LIST_MAX, NAME_CHARS_MAX

if TYPE_CHECKING:
    from genie.cluster.client import ClusterClient
    from genie.config import Settings
    from genie.model.job import Job, JobSpec

_JOB_COLUMNS = ("job", "name", "state", "gpus", "node", "age", "exit code", "reason")
_JOB_STATES = ("queued", "placing", "running", "succeeded", "failed", "cancelled", "lost")
_JOB_COLUMNS_DROPPED_IF_NARROW = ("age", "gpus", "exit code")
_RUN_NUMBER_MAX = 1_000_000


@command(
    app,
    "submit",
    example="genie submit --gpus 1 --workdir . -- python train.py",
    # Options after CMD belong to the job.
    context_settings={"allow_interspersed_args": False},
)
def submit(
    invocation: Invocation,
    *,
    argv: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD", help="Command to run, with its arguments.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Job name (default: name of the program).")
    ] = None,
    gpus: Annotated[str, typer.Option(metavar="N", help="GPUs per worker.")] = "0",
    cpus: Annotated[str, typer.Option(metavar="X", help="CPUs per worker, such as 0.5.")] = "0",
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory per worker, e.g. 4GiB.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Environment variable of the job; repeatable.")
    ] = None,
    workdir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Upload this directory and run the job in a copy of it; honours .gitignore "
            "(default: an empty directory).",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the output and exit with the job's exit code.")
    ] = False,
    as_json: JsonOption = False,
    options: PlacementOptions,
) -> None:
    """Submit a command as a job and print the job ID.

    With --wait, Ctrl-C cancels the job; a second Ctrl-C exits at once.

    'genie explain JOB' shows why a job is pending.
    """
    if as_json and wait:
        raise UsageError(
            "--json and --wait are mutually exclusive", hint="use --json, then: genie logs -f JOB"
        )
    spec = build_job_spec(
        argv=argv or [],
        name=name,
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        env=env or [],
        options=options,
        now=time.time(),
    )
    if workdir is not None:
        _check_workdir_can_be_uploaded(workdir)
    settings = invocation.load_settings()
    if wait:
        raise typer.Exit(asyncio.run(_submit_wait_and_get_exit_code(settings, spec, workdir)))
    job = asyncio.run(_submit_job(settings, spec, workdir))
    if as_json:
        output.write_json(output.struct_to_json(job))
    else:
        output.write_line(job.job_id)
    _print_pending_reason(job)


@command(app, "jobs", example="genie jobs --all --state failed")
def jobs(
    invocation: Invocation,
    *,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Include finished jobs.")] = False,
    state: Annotated[
        list[str] | None, typer.Option(metavar="STATE", help="Only jobs in this state; repeatable.")
    ] = None,
    limit: Annotated[str, typer.Option(metavar="N", help="Maximum number of jobs.")] = "100",
    as_json: JsonOption = False,
) -> None:
    """List queued and running jobs, newest first."""
    states = _validate_job_states(state or [])
    most = parse_integer(limit, what="--limit", low=1, high=LIST_MAX)
    settings = invocation.load_settings()
    found, more, age_s = asyncio.run(
        _fetch_jobs_and_has_more_and_age_s(settings, wanted=states, everything=everything, limit=most)
    )
    if as_json:
        document = {"jobs": [output.struct_to_json(job) for job in found], "more": more, "age_s": age_s}
        output.write_json(document)
        return
    if not found:
        hint = "" if everything or states else "; use --all to include finished jobs"
        output.print_message(f"no jobs{hint}")
        return
    now = time.time()
    output.write_table(
        _JOB_COLUMNS, [_job_row(job, now=now) for job in found], droppable=_JOB_COLUMNS_DROPPED_IF_NARROW
    )
    if more:
        output.print_message(f"showing the newest {most}; use --limit N for more")


@command(app, "logs", example="genie logs -f j-7k2m4xab")
def logs(
    invocation: Invocation,
    *,
    job_id: Annotated[
        str,
        typer.Argument(
            metavar="JOB[.RANK]",
            help="Job ID or unique job name; JOB.2 selects the worker with rank 2.",
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(metavar="N", help="Run number of a preempted job, from 1 (default: the latest run)."),
    ] = None,
    all_runs: Annotated[
        bool, typer.Option("--all-runs", help="Print all retained runs, oldest first.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the standard output and error of a job, in order.

    For a job that was preempted and restarted, prints the latest run; a few earlier runs are retained.
    """
    number = 0 if run is None else parse_integer(run, what="--run", low=1, high=_RUN_NUMBER_MAX)
    if all_runs and (number or follow):
        raise UsageError("--all-runs cannot be combined with --run or --follow", hint="give one of them")
    settings = invocation.load_settings()
    if all_runs:
        asyncio.run(_print_logs_of_all_runs(settings, job_id, as_json=as_json))
    elif not as_json:
        asyncio.run(_print_log(settings, job_id, follow=follow, run=number))
    else:
        log = asyncio.run(_fetch_whole_log(settings, job_id, follow=follow, run=number))
        output.write_json({"job": job_id, "log": _decode_log(log)})


@command(app, "cancel", example="genie cancel j-7k2m4xab")
def cancel(
    invocation: Invocation,
    *,
    job_ids: Annotated[
        list[str], typer.Argument(metavar="JOB...", help="Job IDs, or names that one unfinished job has.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Cancel jobs. Running jobs get SIGTERM, then SIGKILL after a grace period."""
    cancelled, failed = asyncio.run(_cancel_jobs(invocation.load_settings(), job_ids))
    if as_json:
        output.write_json({"jobs": [output.struct_to_json(job) for job in cancelled]})
    else:
        for job in cancelled:
            output.write_line(f"{job.job_id}  {job.state}  {output.to_one_line(job.reason)}")
    for error in failed:
        output.show_error(error, debug=invocation.debug)
    if failed:
        raise typer.Exit(max(error.exit_code for error in failed))


def build_job_spec(
    *,
    argv: list[str],
    name: str | None,
    gpus: str,
    cpus: str,
    memory: str | None,
    env: list[str],
    options: PlacementOptions,
    now: float,
) -> JobSpec:
    """Build the job specification. Raises UsageError that names the invalid option."""
    from genie.model.job import JobSpec
    from genie.model.names import validate_name, validate_node_id

    if not argv:
        raise UsageError(
            "no command given",
            hint="put the command after --, as in: genie submit --workdir . -- python train.py",
        )
    if any("\x00" in part for part in argv):
        raise UsageError(
            "the command contains a NUL character", hint="remove it: arguments cannot contain NUL"
        )
    resources = parse_resources(options, gpus=gpus, cpus=cpus, memory=memory)
    return JobSpec(
        name=validate_name(name, what="--name") if name is not None else _default_job_name(argv[0]),
        command=tuple(argv),
        resources=resources,
        env=_parse_env_options(env),
        node_id="" if options.node is None else validate_node_id(options.node, what="--node"),
        constraints=parse_constraints(options, gpus=resources.gpus, now=now),
    )


def _check_workdir_can_be_uploaded(workdir: Path) -> None:
    from genie.processes.project_folder import why_folder_must_not_be_sent

    if not workdir.is_dir():
        raise UsageError(f"--workdir {str(workdir)!r} is not a directory", hint="give an existing directory")
    why = why_folder_must_not_be_sent(workdir.resolve())
    if why:
        raise UsageError(
            f"--workdir {str(workdir)!r} is not uploaded: {why}", hint="give the directory of the project"
        )


def _parse_env_options(pairs: list[str]) -> dict[str, str]:
    from genie.model.names import validate_env_key

    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        validate_env_key(key, what="--env")
        if not equals:
            raise UsageError(f"--env {key!r} has no value", hint=f"write --env {key}=VALUE")
        if "\x00" in value:
            raise UsageError(
                f"--env {key!r} contains a NUL character", hint="remove it: variables cannot contain NUL"
            )
        found[key] = value
    return found


def _default_job_name(program: str) -> str:
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in Path(program).name)
    return kept.strip("-")[:NAME_CHARS_MAX].strip("-") or "job"


def _validate_job_states(states: list[str]) -> list[str]:
    for state in states:
        if state not in _JOB_STATES:
            raise UsageError(
                f"--state {state!r} is not a job state", hint=f"allowed: {', '.join(_JOB_STATES)}"
            )
    return states


async def _submit_job(settings: Settings, spec: JobSpec, workdir: Path | None) -> Job:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return await _submit_with_progress(client, spec, workdir)


async def _submit_with_progress(client: ClusterClient, spec: JobSpec, workdir: Path | None) -> Job:
    progress = output.ProgressLine()
    try:
        return await client.submit(spec, workdir=workdir, progress=progress)
    finally:
        progress.close()


async def _fetch_jobs_and_has_more_and_age_s(
    settings: Settings, *, wanted: list[str], everything: bool, limit: int
) -> tuple[list[Job], bool, float]:
    from genie.model.job import FINAL_STATES, JobState

    active = tuple(state for state in JobState if state not in FINAL_STATES)
    states = tuple(JobState(state) for state in wanted) or (() if everything else active)
    async with open_client_and_report_age(settings) as client:
        found, more = await client.list_jobs(states=states, limit=limit)
        return found, more, client.reply_age_s


async def _cancel_jobs(settings: Settings, job_ids: list[str]) -> tuple[list[Job], list[GenieError]]:
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


async def _print_log(settings: Settings, job_id: str, *, follow: bool, run: int) -> None:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        if follow and not run:
            await _print_why_not_started(client, job_id)
        is_empty = True
        async for data in client.follow_log(job_id, follow=follow, run=run):
            is_empty = False
            output.write_bytes(data)
        if is_empty:
            await _print_why_log_is_empty(client, job_id, follow=follow)


async def _print_why_log_is_empty(client: ClusterClient, job_id: str, *, follow: bool) -> None:
    """Print the state of a job that has not started or has failed, which may be why there is no output."""
    from genie.model.job import JobState

    job = await _fetch_job_of_worker(client, job_id)
    if job.state in (JobState.QUEUED, JobState.PLACING) and not follow:
        output.print_message(f"no output yet: job {job.job_id} is {job.state}; 'genie logs -f' waits for it")
    elif job.state is JobState.FAILED:
        output.print_message(f"no output: job {job.job_id} failed: {output.to_one_line(job.reason)}")


async def _print_why_not_started(client: ClusterClient, job_id: str) -> None:
    """Print why a job that has not started is pending: following its log prints nothing until then."""
    from genie.model.job import JobState

    job = await _fetch_job_of_worker(client, job_id)
    if job.state in (JobState.QUEUED, JobState.PLACING):
        reason = f": {output.to_one_line(job.reason)}" if job.reason else ""
        output.print_message(f"waiting for job {job.job_id} to start; it is {job.state}{reason}")


async def _fetch_job_of_worker(client: ClusterClient, worker: str) -> Job:
    """Fetch the job of `JOB` or `JOB.RANK`."""
    name, _, rank = worker.rpartition(".")
    return await client.get_job(name if name and rank.isascii() and rank.isdecimal() else worker)


async def _fetch_whole_log(settings: Settings, job_id: str, *, follow: bool, run: int) -> bytes:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        if follow and not run:
            await _print_why_not_started(client, job_id)
        return b"".join([data async for data in client.follow_log(job_id, follow=follow, run=run)])


async def _print_logs_of_all_runs(settings: Settings, job_id: str, *, as_json: bool) -> None:
    """Print all retained runs. A run whose log is gone is reported; the others are still printed."""
    from genie.cluster.client import open_client

    found = []
    async with open_client(settings) as client:
        runs = (await client.read_log(job_id, bytes_max=1)).run_numbers
        for run in runs:
            if not as_json:
                output.print_message(f"run {run}:")
            log = b""
            try:
                async for data in client.follow_log(job_id, follow=False, run=run):
                    log += data if as_json else b""
                    if not as_json:
                        output.write_bytes(data)
            except (JobNotFoundError, UnreachableError) as error:
                output.show_error(error, debug=False)
            found.append({"run": run, "log": _decode_log(log)})
    if as_json:
        output.write_json({"job": job_id, "runs": found})


def _decode_log(log: bytes) -> str:
    return log.decode("utf-8", errors="replace")


async def _submit_wait_and_get_exit_code(settings: Settings, spec: JobSpec, workdir: Path | None) -> int:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        job = await _submit_with_progress(client, spec, workdir)
        output.print_message(f"job {job.job_id} ({job.spec.name})")
        _print_pending_reason(job)
        ended = await _follow_job_until_end(client, job.job_id)
        return INTERRUPTED_EXIT_CODE if ended is None else _print_failure_and_get_exit_code(ended)


async def _follow_job_until_end(client: ClusterClient, job_id: str) -> Job | None:
    """Print the output and return the finished job, or None after a second Ctrl-C."""
    with catch_interrupts() as interrupts:
        async with asyncio.TaskGroup() as group:
            follow = group.create_task(_print_log_and_get_ended_job_or_error(client, job_id))
            watch = group.create_task(_cancel_job_on_interrupt(client, job_id, interrupts, follow))
            await asyncio.wait([follow])
            watch.cancel()
    if follow.cancelled():
        return None
    outcome = follow.result()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def _print_log_and_get_ended_job_or_error(
    client: ClusterClient, job_id: str
) -> Job | GenieError | OSError:
    """Return errors instead of raising them: a TaskGroup would wrap them."""
    try:
        async for data in client.follow_log(job_id, follow=True):
            output.write_bytes(data)
        return await client.wait_job(job_id)
    except (GenieError, OSError) as error:
        return error


async def _cancel_job_on_interrupt(
    client: ClusterClient, job_id: str, interrupts: asyncio.Queue[None], follow: asyncio.Task[object]
) -> None:
    """Cancel the job at the first Ctrl-C and keep printing its output; exit at the second."""
    await interrupts.get()
    output.print_message(f"genie: cancelling job {job_id}; press Ctrl-C again to exit without waiting for it")
    try:
        await client.cancel(job_id)
    except GenieError as error:
        output.show_error(error, debug=False)
    await interrupts.get()
    follow.cancel()


def _print_failure_and_get_exit_code(job: Job) -> int:
    """Return the exit code of the job, or 1 if it was lost, cancelled or never ran."""
    from genie.model.job import JobState

    if job.state is JobState.SUCCEEDED:
        return 0
    reason = output.to_one_line(job.reason).removeprefix(f"{job.state}: ")
    output.print_message(f"genie: job {job.job_id} {job.state}: {reason}")
    if job.state is JobState.FAILED and job.exit_code is not None:
        return _to_shell_exit_code(job.exit_code)
    return 1


def _to_shell_exit_code(exit_code: int) -> int:
    """A negative exit code means that a signal ended the job; shells report 128 + signal."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def _print_pending_reason(job: Job) -> None:
    from genie.model.job import JobState

    if job.state is JobState.QUEUED and job.reason:
        output.print_message(f"queued: {output.to_one_line(job.reason)}")


def _job_row(job: Job, *, now: float) -> tuple[str, ...]:
    return (
        job.job_id,
        job.spec.name,
        job.state.value,
        format_gpu_count(job.spec.resources, job.spec.constraints),
        format_placements(job.placements) or "-",
        format_duration(now - job.submitted_at),
        "-" if job.exit_code is None else str(_to_shell_exit_code(job.exit_code)),
        job.reason,
    )
