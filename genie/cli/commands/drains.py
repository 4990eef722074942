"""drain and undrain: empty a node for maintenance, and make it accept jobs again.

`--wait` only observes: the controller drains the node, whether or not a command waits for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import INTERRUPTED_EXIT_CODE, Invocation, JsonOption, app, command
from genie.cli.commands.cluster import NodeIdArgument, send_node_request
from genie.cli.commands.status import count_jobs_left, job_ids_on_node
from genie.cli.interrupts import catch_interrupts
from genie.cli.quantities import format_count, format_duration, parse_duration
from genie.errors import GenieError, NodeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from genie.cluster.client import ClusterClient
    from genie.config import Settings
    from genie.model.messages import DrainStarted, NodeView

WAIT_POLL_INTERVAL_S = 1.0
_JOBS_SHOWN_MAX = 10


@command(app, "drain", example='genie drain gpu-box-3 --wait --reason "new fans on Friday"')
def drain(
    invocation: Invocation,
    *,
    node_id: NodeIdArgument,
    reason: Annotated[
        str,
        typer.Option("--reason", metavar="TEXT", help="Reason; shown by 'genie nodes' and for pending jobs."),
    ] = "",
    keep_jobs: Annotated[
        bool, typer.Option("--keep-jobs", help="Move no jobs: all run until they end.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no job is left on the node.")] = False,
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="With --wait: give up waiting after this time; the drain continues."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Empty a node: no new jobs, and restartable jobs move to other nodes. Lasts until 'genie undrain'.

    A restartable job (--preemptible) gets SIGTERM, and SIGKILL after its grace period, and is queued again.
    Other jobs and sessions run until they end.
    """
    from genie.model.names import validate_node_id

    validate_node_id(node_id, what="NODE")
    if timeout is not None and not wait:
        raise UsageError("--timeout requires --wait", hint="add --wait, or remove --timeout")
    timeout_s = None if timeout is None else parse_duration(timeout, what="--timeout")
    settings = invocation.load_settings()
    started = asyncio.run(_start_drain(settings, node_id, reason=reason, keep_jobs=keep_jobs))
    job_count = len(started.moving_job_ids) + len(started.staying_job_ids)
    if not as_json:
        output.write_line(_describe_drain(node_id, started))
    if wait and job_count:
        if not asyncio.run(_wait_until_empty(settings, node_id, timeout_s=timeout_s)):
            output.print_message(f"genie: stopped waiting; {_drain_continues(node_id)}")
            raise typer.Exit(INTERRUPTED_EXIT_CODE)
        job_count = 0
        if not as_json:
            output.write_line(f"{node_id} is drained")
    if as_json:
        state = "draining" if job_count else "drained"
        output.write_json({"node": node_id, "state": state} | output.struct_to_json(started))


@command(app, "undrain", example="genie undrain gpu-box-3")
def undrain(
    invocation: Invocation,
    *,
    node_id: NodeIdArgument,
) -> None:
    """Resume placing jobs on a draining or drained node.

    Stopped jobs stay in the queue and may start on any node.
    """
    was_drained = False

    async def send(client: ClusterClient) -> None:
        nonlocal was_drained
        view = await _find_node(client, node_id)
        was_drained = view is not None and bool(view.drained)
        await client.undrain_node(node_id)

    send_node_request(invocation, node_id, send)
    output.write_line(
        f"{node_id}: accepting work again" if was_drained else f"{node_id}: was not draining or drained"
    )


def _describe_drain(node_id: str, started: DrainStarted) -> str:
    """Return `a1 is draining: 3 jobs move (grace period up to 30 s), 1 job runs until it ends: j-7k`."""
    moving, staying = started.moving_job_ids, started.staying_job_ids
    parts = []
    if moving:
        grace = f" (grace period up to {format_duration(started.grace_s_max)})" if started.grace_s_max else ""
        parts.append(f"{format_count(len(moving), 'job')} {'moves' if len(moving) == 1 else 'move'}{grace}")
    if staying:
        verb = "runs until it ends" if len(staying) == 1 else "run until they end"
        parts.append(f"{format_count(len(staying), 'job')} {verb}: {_format_job_ids(staying)}")
    return (
        f"{node_id} is draining: {', '.join(parts)}" if parts else f"{node_id} is drained: no job runs there"
    )


def _format_job_ids(job_ids: Sequence[str]) -> str:
    more = len(job_ids) - _JOBS_SHOWN_MAX
    return ", ".join(job_ids[:_JOBS_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def _drain_continues(node_id: str) -> str:
    return f"the drain of {node_id} continues ('genie undrain {node_id}' ends it)"


async def _start_drain(settings: Settings, node_id: str, *, reason: str, keep_jobs: bool) -> DrainStarted:
    from genie.cluster.client import open_client
    from genie.model.messages import DrainStarted

    async with open_client(settings) as client:
        if not keep_jobs:
            return await client.empty_node(node_id, reason=reason)
        await client.drain_node(node_id, reason=reason)
        view = await _find_node(client, node_id)
        return DrainStarted(staying_job_ids=tuple(job_ids_on_node(view) if view is not None else ()))


async def _find_node(client: ClusterClient, node_id: str) -> NodeView | None:
    return next((view for view in await client.nodes() if view.info.node_id == node_id), None)


async def _wait_until_empty(settings: Settings, node_id: str, *, timeout_s: float | None) -> bool:
    """Wait until no job is left on the node; False after Ctrl-C. Raises NodeError after `timeout_s`."""
    progress = _DrainProgress(node_id)
    with catch_interrupts() as interrupts:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_watch_drain_and_get_error(settings, progress))
            stop = group.create_task(interrupts.get())
            await asyncio.wait([watch, stop], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            watch.cancel()
            stop.cancel()
    if watch.done() and not watch.cancelled():
        if (error := watch.result()) is not None:
            raise error
        return True
    if not stop.cancelled():
        return False
    raise NodeError(
        f"{node_id} is not empty after {format_duration(timeout_s or 0.0)}: {progress.describe()}",
        hint=_drain_continues(node_id),
    )


async def _watch_drain_and_get_error(settings: Settings, progress: _DrainProgress) -> GenieError | None:
    """Print progress until the node is empty. Return errors instead of raising them: a TaskGroup would wrap
    them. While no controller responds, the drain may continue, so that is no error."""
    from genie.cluster.client import open_client

    while True:
        try:
            async with open_client(settings) as client:
                while True:
                    if progress.update_and_check_empty(await _find_node(client, progress.node_id)):
                        return None
                    await asyncio.sleep(WAIT_POLL_INTERVAL_S)
        except GenieError as error:
            if not error.retryable:
                return error
            progress.print_if_new(f"waiting for the controller: {output.to_one_line(error.message)}")
        await asyncio.sleep(WAIT_POLL_INTERVAL_S)


class _DrainProgress:
    """The jobs left on a draining node, as last read. Prints each change."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._count_left = 0
        self._job_ids: list[str] = []
        self._last_message = ""

    def update_and_check_empty(self, view: NodeView | None) -> bool:
        """Whether no job is left. Raises NodeError if the node is no longer drained."""
        if view is None:
            return True  # it has left the cluster
        self._count_left, self._job_ids = count_jobs_left(view), job_ids_on_node(view)
        if not self._count_left:
            return True
        if not view.drained:
            raise NodeError(
                f"{self.node_id} was undrained before it was empty: {self.describe()}",
                hint=f"'genie drain {self.node_id}' drains it again",
            )
        self.print_if_new(f"{self.node_id}: {self.describe()}")
        return False

    def describe(self) -> str:
        """Return `2 jobs are left: j-7k2m4xab, j-9p3q5zcd`."""
        verb = "is" if self._count_left == 1 else "are"
        return f"{format_count(self._count_left, 'job')} {verb} left: {_format_job_ids(self._job_ids)}"

    def print_if_new(self, message: str) -> None:
        if message != self._last_message:
            self._last_message = message
            output.print_message(message)
